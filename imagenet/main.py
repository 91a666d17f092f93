"""Train a ResNet-50 on ImageNet with the GPUs of several nodes, stopped and resumed."""

import argparse
import contextlib
import functools
import logging
import math
import os
import socket
import subprocess
import sys
import time
from datetime import timedelta
from os import environ
from pathlib import Path

import checkpoint
import torch
import torch.distributed as dist
from checkpoint import Checkpoints, Run, RunError
from data import (
    BadImage,
    build_loader,
    evaluation_batches,
    load_data,
    normalize,
    training_batches,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision import models
from tqdm import tqdm
from watch import Watch, describe_usage


def parse_args() -> argparse.Namespace:
    def at_least(minimum):
        def number(text):
            value = type(minimum)(text)
            if not value >= minimum:  # unlike `<`, this refuses nan
                raise argparse.ArgumentTypeError(f"must be at least {minimum}: {text}")
            return value

        return number

    parser = argparse.ArgumentParser(
        description=__doc__,
        usage="%(prog)s [options]",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    # job.sh puts the data on the node's own disk, SLURM_TMPDIR.
    data_dir = f"{environ.get('SLURM_TMPDIR', '.')}/data"
    # Those two return more than logits.
    known = models.list_models(module=models, exclude=["googlenet", "inception_v3"])
    cpus = int(environ.get("SLURM_CPUS_PER_TASK", "0")) or len(os.sched_getaffinity(0))
    add = parser.add_argument
    add("--data-dir", default=data_dir, help="folder that prepare_data.py has filled")
    add("--synthetic", action="store_true", help="made-up images, no data needed")
    add("--limit-train-samples", type=at_least(1), help="limit of the training set")
    add("--limit-valid-samples", type=at_least(1), help="limit of the validation set")
    add("--image-size", type=at_least(1), default=224, help="pixels a side")
    add(
        "--model",
        choices=["dummy", *known],
        metavar="MODEL",
        default="resnet50",
        help="one of torchvision's; dummy: as fast as the data",
    )
    add("--epochs", type=at_least(1), default=90, help="passes over the training set")
    add("--batch-size", type=at_least(1), default=256, help="images per GPU at a time")
    add("--accumulate", type=at_least(1), default=1, help="batches per GPU in a step")
    add(
        "--learning-rate",
        type=at_least(0.0),
        default=0.256,
        help="peak, per 256 images of the global batch",
    )
    add("--weight-decay", type=at_least(0.0), default=2**-15, help="L2 penalty")
    add("--seed", type=at_least(0), default=0, help="seed of everything random")
    add("--compile", action="store_true", help="a slow start, then faster steps")
    add("--workers", type=at_least(0), default=cpus, help="decoding processes per GPU")
    add(
        "--checkpoint-dir",
        type=Path,
        default=checkpoint.default_checkpoint_dir(),
        help="of this run alone",
    )
    add("--save-minutes", type=at_least(0.0), default=10.0, help="between checkpoints")
    add(
        "--save-steps",
        type=at_least(1),
        default=10**6,
        help="steps between checkpoints, if sooner",
    )
    add("--keep", type=at_least(1), default=3, help="checkpoints, besides the best")
    add("--timeout", type=at_least(1), default=120, help="seconds until a hang ends")
    add("--profile", action="store_true", help="trace a few steps")
    add("--wandb", metavar="PROJECT", help="W&B project to track it in, too")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    check_task()
    set_ranks()
    setup_logging()
    commit = checkpoint.find_commit()  # which may change while this trains
    logging.info(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {vars(args)}")
    train_set, valid_set = load_data(args)
    loaders = [build_loader(part, args.workers) for part in (train_set, valid_set)]
    device = setup_distributed(args.timeout)
    if device.type == "cpu":
        logging.warning("warning: no GPU found, training on the CPU")

    world_size = dist.get_world_size()
    global_batch_size = world_size * args.batch_size * args.accumulate
    checkpoints = Checkpoints(args.checkpoint_dir, args.keep)
    recipe = checkpoint.get_recipe(args, train_set, valid_set)
    saved = checkpoints.load(recipe)
    if saved:  # the global batch stays, also on another number of GPUs
        global_batch_size = saved["global_batch_size"]
    steps = count_steps(len(train_set), global_batch_size, world_size)
    logging.info(
        f"World size {world_size}: {steps} steps an epoch, "
        f"{world_size} x {global_batch_size / world_size:.4g} samples each, "
        f"of {len(train_set)}; {len(valid_set)} to validate; "
        f"computing in {'bfloat16' if has_bfloat16() else 'float32'}"
    )

    torch.manual_seed(args.seed)
    model = build_model(args, len(train_set.images.classes))
    model = model.to(device, memory_format=torch.channels_last)
    if args.compile:
        model.compile()
    optimizer, scheduler = build_optimizer(model, args, global_batch_size, steps)
    # backward() averages the gradients over all ranks while it computes the rest.
    ddp_model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    # DDP would broadcast BatchNorm's statistics in each step. train() does it once.
    ddp_model.broadcast_buffers = False

    checkpoint.settle_buckets(ddp_model, args.image_size)
    run = Run(model, optimizer, scheduler, recipe, global_batch_size)
    if saved:
        run.load_state_dict(saved)
        del saved  # or it takes as much memory as the model, to the end
    watch = Watch(checkpoints.folder, device, args, scheduler.last_epoch)
    checkpoint.catch_stop_signals()
    run_epochs(ddp_model, run, *loaders, steps, checkpoints, watch, args)
    checkpoint.log_weights(model, commit)
    finish(watch)


def run_epochs(
    ddp_model,
    run: Run,
    train_loader,
    valid_loader,
    steps: int,
    checkpoints,
    watch,
    args,
) -> None:
    """Train and validate until the last epoch is done."""
    global_batch_size = run.global_batch_size
    for epoch in range(run.epoch, args.epochs + 1):
        batches = watch.batches(training_batches(train_loader, run, ddp_model.device))
        # Fewer steps are left if this start is in the middle of an epoch.
        bar = progress(epoch, steps - run.step, global_batch_size)
        metrics = train(ddp_model, run, batches, bar, checkpoints, watch, args)
        train_loss, train_accuracy = average(metrics, steps * global_batch_size)
        rate = watch.steps_per_second() * global_batch_size
        usage = watch.usage.shares()
        batches = validation_batches(valid_loader, run, watch, args)
        metrics = evaluate(run.model, batches)
        valid_loss, valid_accuracy = average(metrics, len(valid_loader.dataset))
        samples_to_go = (args.epochs - epoch) * len(train_loader.dataset)
        logging.info(
            f"Epoch {epoch}: "
            f"train loss {train_loss:.3f} accuracy {train_accuracy:.2%}, "
            f"valid loss {valid_loss:.3f} accuracy {valid_accuracy:.2%}, "
            f"{rate:.0f} images/s"
            f"{describe_usage(usage)}{checkpoint.requeues_to_go(samples_to_go, rate)}"
        )
        values = {
            "valid/loss": valid_loss,
            "valid/accuracy": valid_accuracy,
            "images/s": rate,
        }
        watch.log(run.scheduler.last_epoch, values | usage)
        with watch.paused():
            checkpoints.save_if_best(run, valid_accuracy)
        run.start_epoch(epoch + 1)


def check_task() -> None:
    """Refuse to start without srun: this process would wait for the other tasks."""
    tasks = environ.get("SLURM_NTASKS", "1")
    if environ.get("SLURM_STEP_NUM_TASKS", "1") != tasks and "RANK" not in environ:
        fail(f"this is none of the {tasks} tasks of the job: start main.py with srun")


def set_ranks() -> None:
    """Set torchrun's variables from srun's. Under torchrun, they are set already."""
    environ.setdefault("RANK", environ.get("SLURM_PROCID", "0"))
    environ.setdefault("LOCAL_RANK", environ.get("SLURM_LOCALID", "0"))
    environ.setdefault("WORLD_SIZE", environ.get("SLURM_NTASKS", "1"))


def setup_distributed(timeout: float) -> torch.device:
    """Join the process group, one process a GPU, and return this process's device."""
    # Where rank 0 listens. job.sh sets both, salloc neither.
    if "MASTER_ADDR" not in environ:
        environ["MASTER_ADDR"] = find_first_node()
    job = int(environ.get("SLURM_JOB_ID", "0"))  # port 0 is any free one
    environ.setdefault("MASTER_PORT", str(10000 + job % 20000 if job else 0))
    device = find_device()
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        check_master_addr()
        # Ranks start at different times: this is longer than a hang takes to end.
        limit = timedelta(seconds=5 * timeout)
        store, rank, world_size = next(dist.rendezvous("env://", timeout=limit))
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            device_id=device,
            # Ranks wait so long while rank 0 saves. `Watch` ends a hang much earlier.
            timeout=timedelta(minutes=30),
        )
    except (OSError, RuntimeError) as error:
        fail(
            f"rank {environ['RANK']} of {environ['WORLD_SIZE']} on "
            f"{socket.gethostname()} ({device}) cannot join the others at "
            f"MASTER_ADDR={environ['MASTER_ADDR']}, "
            f"MASTER_PORT={environ['MASTER_PORT']}, which must be rank 0's node "
            f"and a free port there, unless NCCL complains: {error}"
        )
    return device


def find_first_node() -> str:
    """Return the first node of this step, which may have fewer than its job."""
    if "SLURM_STEP_NODELIST" not in environ:
        return "127.0.0.1"
    command = ["scontrol", "show", "hostnames", environ["SLURM_STEP_NODELIST"]]
    return subprocess.check_output(command, text=True).split()[0]


def find_device() -> torch.device:
    """Return the GPU of this process, or the CPU where there is none."""
    local_rank = int(environ["LOCAL_RANK"])
    gpus = visible = torch.cuda.device_count()
    # --gpus-per-task shows a task its own GPU only. Slurm counts all of the node.
    one_only = "," not in (environ.get("CUDA_VISIBLE_DEVICES") or ",")
    if one_only or visible == 0:
        gpus = int(environ.get("SLURM_GPUS_ON_NODE", visible))
    if 0 < gpus <= local_rank:
        fail(
            f"local rank {local_rank} on {socket.gethostname()} has no GPU to itself: "
            f"there are {gpus}; ask for more --gpus-per-node, or for fewer tasks"
        )
    if one_only and gpus > 1:
        logging.warning(
            "warning: a task sees only one GPU of its node, and NCCL cannot use the "
            "direct way between them: ask for --gpus-per-node, not --gpus-per-task"
        )
    if visible == 0:
        return torch.device("cpu", 0)
    device = torch.device("cuda", 0 if one_only else local_rank)
    torch.cuda.set_device(device)
    return device


def check_master_addr() -> None:
    """Raise OSError if rank 0 is not there. c10d would take minutes to say so."""
    if environ["RANK"] == "0" and "TORCHELASTIC_RUN_ID" not in environ:
        family, *_, address = socket.getaddrinfo(environ["MASTER_ADDR"], 0)[0]
        socket.socket(family).bind(address)


def train(
    model, run: Run, batches, bar: tqdm, checkpoints, watch: Watch, args
) -> Tensor:
    """Train on all the batches and return their metrics (see `measure`)."""
    model.train()
    device = next(model.parameters()).device
    metrics = torch.zeros(3, dtype=torch.float64, device=device)
    if dist.get_rank() == 0:  # which counts what was done before this start
        metrics += run.metrics.to(device)
    optimizer, scheduler = run.optimizer, run.scheduler
    # First after one step: so even a start that must stop at once gets further.
    next_agreement = run.step + 1
    for images, labels in batches:
        if run.step == next_agreement:
            next_agreement += agree(run, metrics, checkpoints, watch, args)
        # For models with dropout.
        torch.manual_seed(hash((args.seed, run.epoch, run.step, dist.get_rank())))
        optimizer.zero_grad()
        compute_gradients(model, run, images, labels, metrics, args.batch_size)
        optimizer.step()
        scheduler.step()
        run.step += 1
        show(bar, metrics)
    bar.close()
    # BatchNorm's running statistics are each rank's own: all take those of rank 0.
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    agree(run, metrics, checkpoints, watch, args, save=True)
    return metrics


def compute_gradients(
    model, run: Run, images, labels, metrics: Tensor, batch_size: int
) -> None:
    """Compute the gradients of a step, in parts of `batch_size` images or fewer.

    Ranks may have shares of different sizes, and every image of a step weighs the same.
    """
    world_size = dist.get_world_size()
    parts = math.ceil(len(images) / batch_size)
    pairs = zip(images.tensor_split(parts), labels.tensor_split(parts), strict=True)
    for number, (images, labels) in enumerate(pairs, 1):
        # One all-reduce of the gradients a step is enough: after its last part.
        with contextlib.nullcontext() if number == parts else model.no_sync():
            with torch.autocast(images.device.type, torch.bfloat16, has_bfloat16()):
                logits = model(normalize(images))
                losses = F.cross_entropy(
                    logits, labels, label_smoothing=0.1, reduction="sum"
                )
            # DDP divides by the number of ranks.
            (losses * world_size / run.global_batch_size).backward()
        measure(metrics, logits.detach(), labels)


def agree(
    run: Run, metrics: Tensor, checkpoints, watch: Watch, args, save=False
) -> int:
    """Let the ranks decide together whether to stop or to save.

    Return the steps until they do it again.
    """
    due = time.monotonic() - checkpoints.saved_at > 60 * args.save_minutes
    speed = watch.steps_per_second()
    mine = torch.tensor([checkpoint.stop_requested(), due, speed]).to(metrics)
    sums = torch.cat((metrics, mine))
    dist.all_reduce(sums)
    loss, correct, samples, stop, due, speed = sums.tolist()
    if not math.isfinite(loss):
        raise RunError(
            f"the loss is {loss} before step {run.step} of epoch {run.epoch}: "
            "nothing of it is saved; "
            "try a smaller --learning-rate, or look at the data"
        )
    run.metrics = sums[:3].cpu()
    values = {"train/loss": loss / samples, "train/accuracy": correct / samples}
    watch.log(run.scheduler.last_epoch, values)
    at_step = run.step % args.save_steps == 0
    if save or stop or due or at_step:
        with watch.paused():
            checkpoints.save(run)
    if stop:
        leave(run, watch)
    # Again in 20 steps, or in two seconds: a signal leaves little time.
    soon = max(1, min(20, int(2 * speed / dist.get_world_size())))
    return min(soon, args.save_steps - run.step % args.save_steps)


def leave(run: Run, watch: Watch) -> None:
    """End this process, as all the others do: the run is saved, and goes on later."""
    logging.info(
        f"Asked to stop: saved step {run.step} of epoch {run.epoch}, "
        "to go on from there"
    )
    finish(watch)
    sys.exit(75)  # "try again later", in sysexits.h


def finish(watch: Watch) -> None:
    watch.close()
    dist.barrier()
    dist.destroy_process_group()


def validation_batches(loader, run: Run, watch: Watch, args):
    """Yield the batches of a validation, unless Slurm asks to stop.

    The epoch is saved before, and the next start goes on with its validation.
    """
    device = next(run.model.parameters()).device
    batches = evaluation_batches(loader, args.batch_size, device)
    for number, batch in enumerate(watch.batches(batches)):
        if number % 20 == 0 and checkpoint.any_rank_must_stop(device):
            leave(run, watch)
        yield batch


@torch.no_grad()
def evaluate(model: nn.Module, batches) -> Tensor:
    """Return the metrics of the model (see `measure`) over all the batches."""
    model.eval()
    device = next(model.parameters()).device
    metrics = torch.zeros(3, dtype=torch.float64, device=device)
    for images, labels in batches:
        with torch.autocast(device.type, torch.bfloat16, has_bfloat16()):
            logits = model(normalize(images))
        measure(metrics, logits, labels)
    return metrics


@functools.cache  # asked in every step
def has_bfloat16() -> bool:
    """Say whether a GPU computes bfloat16 itself. T4 and RTX 8000 only emulate it."""
    return torch.cuda.is_bf16_supported(including_emulation=False)


def measure(metrics: Tensor, logits: Tensor, labels: Tensor) -> None:
    """Add a batch to `metrics`, float64 [sum of losses, correct, samples].

    The losses are without label smoothing. A label of -100, which `cross_entropy`
    ignores, marks padding. The metrics stay on the device: reading one makes the CPU
    wait for the GPU.
    """
    losses = F.cross_entropy(logits.float(), labels, reduction="none")
    metrics[0] += losses.sum(dtype=torch.float64)
    metrics[1] += (logits.argmax(dim=1) == labels).sum()
    metrics[2] += (labels >= 0).sum()


def average(metrics: Tensor, samples: int) -> tuple[float, float]:
    """Return the mean loss and the accuracy, 0 to 1, over exactly `samples` samples."""
    dist.all_reduce(metrics)  # the sums over all ranks
    loss, correct, counted = metrics.tolist()
    assert counted == samples, f"{counted:.0f} samples were counted, not {samples}"
    return loss / samples, correct / samples


def build_optimizer(
    model, args: argparse.Namespace, global_batch_size: int, steps: int
):
    """Return SGD and its one-cycle schedule, which is moved on after every step."""
    # The defaults are NVIDIA's for ResNet-50 v1.5, who report 77.1% after 90 epochs
    # and 75.8% after 50: github.com/NVIDIA/DeepLearningExamples,
    # PyTorch/Classification/ConvNets/resnet50v1.5/README.md.
    # The rate follows the global batch: linear scaling, Goyal et al. 2017.
    learning_rate = args.learning_rate * global_batch_size / 256
    decayed = [weight for weight in model.parameters() if weight.ndim > 1]
    # Biases, and the weights of norms.
    others = [weight for weight in model.parameters() if weight.ndim <= 1]
    optimizer = torch.optim.SGD(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
        lr=learning_rate,
        momentum=0.875,
        weight_decay=args.weight_decay,
        fused=True,
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=learning_rate,
        total_steps=args.epochs * steps,
        pct_start=8 / 90,  # warm-up, and then a cosine
        cycle_momentum=False,
    )
    return optimizer, scheduler


def count_steps(samples: int, global_batch_size: int, world_size: int) -> int:
    """Return the steps of an epoch. An incomplete last global batch is dropped."""
    steps = samples // global_batch_size
    if steps == 0:
        fail(
            f"a step takes {global_batch_size} samples and there are only {samples} "
            f"to train on: choose --batch-size {samples // world_size} or less"
        )
    return steps


def progress(epoch: int, steps: int, global_batch_size: int) -> tqdm:
    """Return the progress bar of an epoch."""
    options = {"mininterval": 1, "disable": None}  # seconds; None: only in a terminal
    # Under salloc, srun's tasks have no terminal, but a person watches: `show` logs.
    in_salloc = "SLURM_STEP_ID" in environ and environ.get("ENVIRONMENT") != "BATCH"
    if not sys.stderr.isatty():
        options = {"mininterval": 10, "file": open(os.devnull, "w")}
        # A batch job logs a line at every tenth of an epoch.
        options["miniters"] = 1 if in_salloc else math.ceil(steps / 10)
    if environ["RANK"] != "0":
        options = {"disable": True}
    options |= {"unit": " images", "unit_scale": global_batch_size}
    return tqdm(total=steps, desc=f"Epoch {epoch}", leave=False, **options)


def show(bar: tqdm, metrics: Tensor) -> None:
    """Move the bar on by a step. When it is drawn, read rank 0's loss."""
    if bar.update():
        loss, _, samples = metrics.tolist()
        bar.set_postfix(loss=f"{loss / samples:.3f}")
        if not bar.fp.isatty():
            logging.info(bar)  # a line: srun passes on whole lines only


def setup_logging() -> None:
    logging.basicConfig(
        level=logging.INFO if environ["RANK"] == "0" else logging.ERROR,
        format="%(message)s",
        stream=sys.stdout,
    )


def fail(message: str) -> None:
    """End this process with one line that says why."""
    sys.exit(f"main.py: error: {message}")


# ImageNet: any model of torchvision. The images are in data.py.


def build_model(args: argparse.Namespace, classes: int) -> nn.Module:
    """Return one of torchvision's models, or a dummy that is as fast as the data."""
    if args.model == "dummy":
        return nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, classes)
        )
    options = {}
    if "resne" in args.model:
        # Each block begins as the identity: Goyal et al. 2017, arXiv:1706.02677.
        options = {"zero_init_residual": True}
    return models.get_model(args.model, num_classes=classes, **options)


if __name__ == "__main__":
    try:
        main()
    except RunError as error:  # on all ranks: rank 0 says it
        if dist.get_rank() == 0:
            print(f"main.py: error: {error}", file=sys.stderr, flush=True)
        dist.barrier()
        sys.exit(1)
    except BadImage as error:
        # From a DataLoader worker it comes with a traceback, which ends in its text.
        fail(str(error).strip().split("BadImage: ")[-1])
