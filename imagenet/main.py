"""Train a ResNet-50 on ImageNet with the GPUs of several nodes; Slurm may stop the job and start it again."""

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
from pathlib import Path
from typing import NoReturn

import checkpoint
import rich.console
import rich.logging
import torch
import torch.distributed as dist
from checkpoint import Checkpoints, Run
from data import Augmented, build_loaders, load_data, seed_torch
from monitor import Monitor
from prepare_data import BadPicture
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision import models
from tqdm import tqdm

logger = logging.getLogger("main")


def parse_args() -> argparse.Namespace:
    def at_least(minimum: int | float):
        def number(text: str) -> int | float:
            value = type(minimum)(text)
            if not value >= minimum:  # so written, it also refuses nan
                raise argparse.ArgumentTypeError(
                    f"must be at least {minimum}, not {text}"
                )
            return value

        return number

    def model(name: str) -> str:
        if name not in ["dummy", *models.list_models(module=models)]:
            raise argparse.ArgumentTypeError(
                f"torchvision.models.list_models() has no {name}"
            )
        return name

    parser = argparse.ArgumentParser(
        description=__doc__,
        usage="%(prog)s [options]",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    # job.sh puts the data on the node's own disk, SLURM_TMPDIR.
    data_dir = Path(os.environ.get("SLURM_TMPDIR", ".")) / "data"
    cpus = int(os.environ.get("SLURM_CPUS_PER_TASK", "0")) or len(
        os.sched_getaffinity(0)
    )
    add = parser.add_argument
    add(
        "--data-dir",
        type=Path,
        default=data_dir,
        help="folder that prepare_data.py has filled",
    )
    add(
        "--synthetic",
        action="store_true",
        help="train on made-up pictures: no data, no network",
    )
    add("--limit-train-samples", type=at_least(1), help="limit of the training set")
    add("--limit-valid-samples", type=at_least(1), help="limit of the validation set")
    add("--image-size", type=at_least(1), default=224, help="pixels a side")
    add(
        "--model",
        type=model,
        default="resnet50",
        help="one of torchvision's; dummy: as fast as the data",
    )
    add("--epochs", type=at_least(1), default=90, help="passes over the training set")
    add("--batch-size", type=at_least(1), default=256, help="samples per GPU at a time")
    add("--accumulate", type=at_least(1), default=1, help="batches per GPU in a step")
    add(
        "--learning-rate",
        type=at_least(0.0),
        default=0.256,
        help="peak, per 256 samples of the global batch",
    )
    add(
        "--weight-decay",
        type=at_least(0.0),
        default=2**-15,
        help="L2 penalty on the weights",
    )
    add("--seed", type=at_least(0), default=0, help="seed of everything random")
    add(
        "--compile",
        action="store_true",
        help="compile the model: a slow start, faster steps",
    )
    add(
        "--sync-batchnorm",
        action="store_true",
        help="normalize over the batches of all GPUs: slower",
    )
    add(
        "--workers",
        type=at_least(0),
        default=cpus,
        help="processes per GPU that decode pictures",
    )
    add(
        "--checkpoint-dir",
        type=Path,
        default=checkpoint.default_checkpoint_dir(),
        help="folder of this run alone",
    )
    add(
        "--save-minutes",
        type=at_least(0.0),
        default=10.0,
        help="minutes between checkpoints",
    )
    add(
        "--save-steps",
        type=at_least(1),
        default=10**6,
        help="steps between checkpoints, if sooner",
    )
    add(
        "--keep",
        type=at_least(1),
        default=3,
        help="checkpoints to keep, besides the best",
    )
    add(
        "--timeout",
        type=at_least(1),
        default=120,
        help="seconds to wait for a rank that hangs",
    )
    add(
        "--profile",
        action="store_true",
        help="trace a few steps: where does the time go?",
    )
    add("--wandb", metavar="PROJECT", help="W&B project to track it in, too")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    device = setup_distributed(args.timeout)
    setup_logging()
    if device.type == "cpu":
        logger.warning("warning: no GPU found, training on the CPU")
        if args.sync_batchnorm:
            fail("--sync-batchnorm needs GPUs: leave it out", together=True)
    torch.manual_seed(args.seed)

    train_set, valid_set = load_data(args)
    checkpoints = Checkpoints(args.checkpoint_dir, args.keep)
    recipe = checkpoint.get_recipe(args, train_set)
    saved = checkpoints.load(recipe)
    world_size = dist.get_world_size()
    global_batch_size = world_size * args.batch_size * args.accumulate
    if saved:  # perhaps by another number of GPUs: the global batch stays as it was
        global_batch_size = saved["global_batch_size"]
    steps = count_steps(train_set, global_batch_size)
    share = f"{world_size} x {global_batch_size / world_size:.4g}"
    logger.info(
        f"World size {world_size}: {steps} steps an epoch, {share} samples each, of {len(train_set)}; "
        f"{len(valid_set)} to validate"
    )

    model = build_model(args, len(train_set.pictures.classes)).to(
        device, memory_format=torch.channels_last
    )
    if args.compile:
        model.compile()
    optimizer, scheduler = build_optimizer(model, args, global_batch_size, steps)
    # Its backward() averages the gradients over the ranks, the first ones while it still computes the rest.
    ddp_model = nn.parallel.DistributedDataParallel(model)
    checkpoint.settle_buckets(ddp_model, args.batch_size, args.image_size)
    run = Run(model, optimizer, scheduler, recipe, global_batch_size)
    if saved:
        run.load_state_dict(saved)
        del saved  # or it takes as much memory as the model, to the end
    train_loader, valid_loader = build_loaders(train_set, valid_set, run, args)
    monitor = Monitor(checkpoints.folder, device, args)
    checkpoint.catch_stop_signals()

    while run.epoch <= args.epochs:
        start, steps_before = time.perf_counter(), run.step
        metrics = train(ddp_model, run, train_loader, checkpoints, monitor, args)
        train_loss, train_accuracy = average(metrics, steps * global_batch_size)
        seconds = time.perf_counter() - start
        rate = (steps - steps_before) * global_batch_size / seconds
        usage = monitor.usage(seconds)
        valid_loss, valid_accuracy = average(
            evaluate(model, valid_loader, monitor), len(valid_set)
        )
        requeues = checkpoint.requeues_to_go(
            (args.epochs - run.epoch) * len(train_set), rate
        )
        logger.info(
            f"Epoch {run.epoch}: train loss {train_loss:.3f} accuracy {train_accuracy:.2%}, "
            f"valid loss {valid_loss:.3f} accuracy {valid_accuracy:.2%}, {rate:.0f} images/s{usage}{requeues}"
        )
        train_values = {
            "train/loss": train_loss,
            "train/accuracy": train_accuracy,
            "images/s": rate,
        }
        monitor.log(
            run,
            train_values | {"valid/loss": valid_loss, "valid/accuracy": valid_accuracy},
        )
        if valid_accuracy > run.best_accuracy:
            checkpoints.mark_best(run, valid_accuracy)
        run.start_epoch(run.epoch + 1)
    checkpoints.finish()
    logger.info(
        f"Weights SHA-256 {checkpoint.digest(model.state_dict())}, commit {checkpoint.commit()}"
    )
    monitor.close()
    dist.barrier()
    dist.destroy_process_group()


def setup_distributed(timeout: int) -> torch.device:
    """Join the process group, as one process a GPU, and return this process's device."""
    env, host = os.environ, socket.gethostname()
    tasks = read_slurm_number("SLURM_NTASKS", alone="1")
    # A batch script and salloc's shell know the number of tasks, too, but would wait for them without end.
    torchrun = "RANK" in env
    if not torchrun and env.get("SLURM_STEP_NUM_TASKS", "1") != tasks:
        fail(f"this is none of the {tasks} tasks of the job: start main.py with srun")
    # srun numbers its tasks. torchrun sets these variables itself, and then its numbers stay.
    env.setdefault("RANK", read_slurm_number("SLURM_PROCID", alone="0"))
    env.setdefault("WORLD_SIZE", tasks)
    rank, world_size = int(env["RANK"]), int(env["WORLD_SIZE"])
    env.setdefault("LOCAL_RANK", read_slurm_number("SLURM_LOCALID", alone="0"))
    local_rank = int(env["LOCAL_RANK"])
    # Rank 0 waits for the others here. job.sh sets both, salloc neither. Port 0 is any free one.
    job = int(read_slurm_number("SLURM_JOB_ID", alone="0"))
    if (
        "MASTER_ADDR" not in env and "SLURM_STEP_NODELIST" in env
    ):  # not the job's list: a step may have less
        command = ["scontrol", "show", "hostnames", env["SLURM_STEP_NODELIST"]]
        env["MASTER_ADDR"] = subprocess.check_output(command, text=True).split()[0]
    env.setdefault("MASTER_ADDR", "127.0.0.1")
    env.setdefault("MASTER_PORT", str(job and 10000 + job % 20000))

    gpus = torch.cuda.device_count() or int(env.get("SLURM_GPUS_ON_NODE", "0"))
    hidden = "SLURM_GPUS_PER_TASK" in env or "per_task" in env.get(
        "SLURM_TRES_BIND", ""
    )
    if gpus and (local_rank >= gpus or hidden):
        fail(
            f"rank {rank} of {host} has no GPU to itself: "
            "ask for more --gpus-per-node, no --gpus-per-task, no --gpu-bind"
        )
    gpu = torch.device("cuda", local_rank) if torch.cuda.device_count() else None
    if gpu:
        torch.cuda.set_device(gpu)
    try:
        if (
            rank == 0 and not torchrun
        ):  # c10d would take minutes and pages to say what is wrong there
            family, *_, address = socket.getaddrinfo(
                env["MASTER_ADDR"], env["MASTER_PORT"]
            )[0]
            socket.create_server(address, family=family).close()
        dist.init_process_group(
            "nccl" if gpu else "gloo", device_id=gpu, timeout=timedelta(seconds=timeout)
        )
    except (OSError, RuntimeError) as error:
        fail(
            f"rank {rank} of {world_size} on {host}, with {gpu or 'no GPU'}, cannot join the others at "
            f"MASTER_ADDR={env['MASTER_ADDR']}, MASTER_PORT={env['MASTER_PORT']}, "
            f"which must be rank 0's node and a free port there, unless NCCL complains: {error}"
        )
    return gpu or torch.device("cpu")


def read_slurm_number(name: str, alone: str) -> str:
    """Return a number that srun gives its tasks, or `alone` outside of Slurm."""
    value = os.environ.get(name, "missing" if "SLURM_STEP_ID" in os.environ else alone)
    if not value.isdecimal():
        fail(
            f"{name} is {value}, not the number that srun sets: start main.py with srun"
        )
    return value


def train(
    model, run: Run, loader: DataLoader, checkpoints, monitor, args: argparse.Namespace
) -> Tensor:
    """Train to the end of the epoch and return its metrics (see `measure`)."""
    model.train()
    device = next(model.parameters()).device
    rank, world_size = dist.get_rank(), dist.get_world_size()
    metrics = run.metrics.to(device) * (
        rank == 0
    )  # rank 0 counts what was done before this start
    parts, next_talk = loader.batch_sampler.parts, run.step
    for number, (images, labels) in enumerate(
        monitor.watch(run, progress(loader, f"Epoch {run.epoch}"))
    ):
        part = number % parts
        if part == 0 and run.step == next_talk:
            next_talk += agree(run, metrics, checkpoints, monitor, args)
        images, labels = (
            tensor.to(device, non_blocking=True) for tensor in (images, labels)
        )
        seed_torch(
            args.seed, run.epoch, run.step, part, rank
        )  # for models with dropout
        # One all-reduce of the gradients a step is enough: after its last part.
        with contextlib.nullcontext() if part == parts - 1 else model.no_sync():
            with torch.autocast(
                device.type, torch.bfloat16, enabled=device.type == "cuda"
            ):
                logits = model(normalize(images))
                losses = F.cross_entropy(
                    logits, labels, label_smoothing=0.1, reduction="sum"
                )
            # DDP divides by the ranks, whose shares and parts need not have the same size.
            (losses * world_size / run.global_batch_size).backward()
        measure(metrics, logits.detach(), labels)
        if part == parts - 1:
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.scheduler.step()
            run.step += 1
    # DDP has made BatchNorm's running statistics equal before every step, but not after the last one.
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    agree(run, metrics, checkpoints, monitor, args, save=True)
    return metrics


def agree(
    run: Run,
    metrics: Tensor,
    checkpoints,
    monitor,
    args: argparse.Namespace,
    save=False,
) -> int:
    """Let the ranks decide together whether to stop or to save; return the steps until they do it again."""
    mine = [
        checkpoint.stop_requested(),
        checkpoints.age() > 60 * args.save_minutes,
        monitor.pace(run),
    ]
    sums = torch.cat(
        (metrics, torch.tensor(mine, dtype=torch.float64, device=metrics.device))
    )
    dist.all_reduce(sums)
    loss, correct, samples, stop, due, pace = sums.tolist()
    if not math.isfinite(loss):
        fail(
            f"the loss is {loss} before step {run.step} of epoch {run.epoch}: nothing of it is saved; "
            "try a smaller --learning-rate, or look at the data",
            together=True,
        )
    if samples and not save:  # else main() does
        monitor.log(
            run, {"train/loss": loss / samples, "train/accuracy": correct / samples}
        )
    run.metrics = sums[:3].cpu()
    if save or stop or due or run.step % args.save_steps == 0 < run.step:
        checkpoints.save(run.state_dict())
    if stop:
        checkpoints.finish()
        logger.info(
            f"Asked to stop: saved step {run.step} of epoch {run.epoch}, to go on from there"
        )
        monitor.close()
        dist.barrier()
        dist.destroy_process_group()
        sys.exit(checkpoint.REQUEUE)
    # Again in 20 steps, or sooner if they take more than two seconds: a signal leaves little time.
    soon = max(1, min(20, int(2 * dist.get_world_size() / pace) if pace else 1))
    return min(soon, args.save_steps - run.step % args.save_steps)


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, monitor: Monitor) -> Tensor:
    """Return the metrics of the model (see `measure`) over all of the loader's samples."""
    model.eval()
    device = next(model.parameters()).device
    metrics = torch.zeros(3, dtype=torch.float64, device=device)
    for images, labels in loader:
        images, labels = (
            tensor.to(device, non_blocking=True) for tensor in (images, labels)
        )
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(normalize(images))
        measure(metrics, logits, labels)
        monitor.tick()
    return metrics


def measure(metrics: Tensor, logits: Tensor, labels: Tensor) -> None:
    """Add a batch to `metrics`, float64 [sum of losses, correct, samples].

    They stay on the device: reading one, as `.item()` does, makes the CPU wait for the GPU.
    """
    losses = F.cross_entropy(logits.float(), labels, reduction="none")
    metrics[0] += losses.sum(dtype=torch.float64)
    metrics[1] += (logits.argmax(dim=1) == labels).sum()
    metrics[2] += len(labels)


def average(metrics: Tensor, samples: int) -> tuple[float, float]:
    """Return the loss and the accuracy (0 to 1) over `samples` samples, which is how many there must be."""
    dist.all_reduce(metrics)  # the sums over all ranks
    loss, correct, counted = metrics.tolist()
    assert counted == samples, f"{counted:.0f} samples were counted, not {samples}"
    return loss / samples, correct / samples


def build_model(args: argparse.Namespace, classes: int) -> nn.Module:
    """Return one of torchvision's models, or a dummy that is as fast as the data."""
    if args.model == "dummy":
        return nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, classes)
        )
    options = {}
    if (
        "resne" in args.model
    ):  # each block begins as the identity: Goyal et al. 2017, arXiv:1706.02677
        options = {"zero_init_residual": True}
    elif args.model in ("googlenet", "inception_v3"):
        options = {"aux_logits": False, "init_weights": True}
    model = models.get_model(args.model, num_classes=classes, **options)
    return (
        nn.SyncBatchNorm.convert_sync_batchnorm(model) if args.sync_batchnorm else model
    )


def build_optimizer(
    model: nn.Module, args: argparse.Namespace, global_batch_size: int, steps: int
):
    """Return SGD and its one-cycle schedule, which is moved on after every step.

    The defaults are NVIDIA's for ResNet-50 v1.5, who report 77.1% after 90 epochs, and 75.8% after 50:
    github.com/NVIDIA/DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5/README.md.
    """
    # The learning rate follows the global batch: linear scaling, Goyal et al. 2017, arXiv:1706.02677.
    learning_rate = args.learning_rate * global_batch_size / 256
    parameters = [
        parameter for parameter in model.parameters() if parameter.requires_grad
    ]
    optimizer = torch.optim.SGD(
        [
            {
                "params": [p for p in parameters if p.ndim > 1],
                "weight_decay": args.weight_decay,
            },
            {
                "params": [p for p in parameters if p.ndim <= 1],
                "weight_decay": 0.0,
            },  # biases and norms
        ],
        lr=learning_rate,
        momentum=0.875,
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


def count_steps(data: Augmented, global_batch_size: int) -> int:
    """Return the steps in an epoch: the last global batch, if it is not whole, is left out."""
    steps = len(data) // global_batch_size
    if steps == 0:
        fail(
            f"a step takes {global_batch_size} samples and there are only {len(data)} to train on: "
            "choose a smaller --batch-size",
            together=True,
        )
    return steps


def normalize(images: Tensor) -> Tensor:
    """Return uint8 pictures as float32 ones of mean 0 and standard deviation 1, in channels_last."""
    mean, std = mean_and_std(images.device)
    return ((images - mean) / std).contiguous(memory_format=torch.channels_last)


@functools.cache  # a tensor made of Python numbers makes the CPU wait for the GPU: make it once
def mean_and_std(device: torch.device) -> Tensor:
    values = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]], device=device)
    return 255 * values.view(2, 3, 1, 1)


def progress(batches: DataLoader, description: str) -> tqdm:
    """Return the batches with a progress bar in a terminal, and without one in a job's output."""
    return tqdm(
        batches,
        desc=description,
        unit="step",
        leave=False,
        disable=None if dist.get_rank() == 0 else True,
    )


class LogHandler(rich.logging.RichHandler):
    """Rich's colours in a terminal, but no columns: every line stays whole and starts with its text."""

    def render(self, *, record, traceback, message_renderable):
        return message_renderable


def setup_logging() -> None:
    logging.basicConfig(
        level=logging.INFO if dist.get_rank() == 0 else logging.ERROR,
        format="%(message)s",
        handlers=[LogHandler(console=rich.console.Console(soft_wrap=True))],
    )


def fail(message: str, together: bool = False) -> NoReturn:
    """End this process with one line that says why; with all the others at once, rank 0 says it for them."""
    if mark := checkpoint.training_mark():  # job.sh need not try again
        with contextlib.suppress(FileNotFoundError):
            mark.rename(mark.with_suffix(".failed"))
    if not together or dist.get_rank() == 0:
        sys.stderr.write(
            f"main.py: error: {message}\n"
        )  # in one piece: other processes may write there, too
    if together:
        dist.barrier()
        dist.destroy_process_group()
    sys.exit(1)


if __name__ == "__main__":
    try:
        main()
    except checkpoint.RunError as error:  # on all ranks
        fail(str(error), together=True)
    except BadPicture as error:
        # From a worker of the DataLoader it comes with a traceback, which ends in its text.
        fail(str(error).strip().split("BadPicture: ")[-1])
