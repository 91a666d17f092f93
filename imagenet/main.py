"""Train a ResNet-50 on ImageNet on several nodes: sbatch job.sh. A stopped run resumes.

For these settings, NVIDIA reports 77.1% of the validation images after 90 epochs (not
run here). On one H200, this code read and trained 2437 images/s.
"""

import argparse
import functools
import logging
import math
import os
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from itertools import islice
from os import environ
from typing import NoReturn

import resume  # first: a warning of Slurm's may come early
import torch
import torch.distributed as dist
from data import (
    StagingError,
    build_loader,
    evaluation_batches,
    list_batches,
    load_batches,
    load_data,
    normalize,
)
from run import (
    begin_run,
    checkpoint_dir,
    default_checkpoint_dir,
    find_commit,
    get_recipe,
    log_weights,
    rebuild_buckets,
    save_if_best,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision import models
from tqdm import tqdm
from watch import Watch

# This node's name, as --exclude takes it.
NODE = environ.get("SLURMD_NODENAME", socket.gethostname())


def main() -> None:
    args = parse_args()
    check_task()
    set_ranks()
    setup_logging()
    commit = find_commit()  # which may change while this trains
    logging.info(time.strftime("%Y-%m-%d %H:%M:%S"))
    for name, value in vars(args).items():
        logging.info(f"  {name}: {value}")
    train_set, valid_set = load_data(args)
    loader = build_loader(train_set, valid_set, args.workers)
    watch = Watch(args)
    device = setup_distributed()
    dtype = find_dtype(device)

    world_size = dist.get_world_size()
    global_batch_size = world_size * args.batch_size * args.accumulate
    recipe = get_recipe(args, train_set, valid_set)
    run = begin_run(args, recipe, global_batch_size)
    global_batch_size = run.global_batch_size
    steps = count_steps(len(train_set), global_batch_size)
    names = train_set.images.classes
    classes = len(names)
    logging.info(
        f"World size {world_size}: {steps} steps an epoch, "
        f"{world_size} x {global_batch_size / world_size:.4g} samples each, "
        f"of {len(train_set)}; {len(valid_set)} to validate; "
        f"{classes} classes, {names[0]} to {names[-1]}; "
        f"{args.model}, {args.image_size} x {args.image_size} pixels, "
        f"{args.epochs} epochs; computing in {str(dtype).removeprefix('torch.')}"
    )

    # Without this, a resumed run might use other algorithms, and round differently.
    torch.backends.cudnn.deterministic = True
    torch.manual_seed(args.seed)
    model = build_model(args, classes).to(device, memory_format=torch.channels_last)
    if args.compile:
        model.compile()
    # backward() averages gradients over all ranks while it computes the remaining ones.
    ddp_model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    # evaluate() copies the buffers, so DDP need not. As an argument, this would warn.
    ddp_model.broadcast_buffers = False
    optimizer, scheduler = build_optimizer(model, args, global_batch_size, steps)
    # In float16, small gradients would become 0. The scaler multiplies the loss before
    # backward(), and so all gradients. It skips a step whose gradients overflow.
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)

    rebuild_buckets(ddp_model, args.image_size)
    run.add(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler)
    watch.begin(run, ddp_model, steps)
    # An epoch's steps, what validates it, the next epoch's steps, from run.step on.
    stream = load_batches(loader, list_batches(loader.dataset, run, args), device)
    valid_steps = len(evaluation_batches(len(valid_set), world_size * args.batch_size))
    for epoch in run.loop(range(1, args.epochs + 1)):
        batches = run.loop(lambda done: watch.batches(islice(stream, steps - done)))
        # A progress bar, in a terminal only.
        if dist.get_rank() == 0:
            batches = tqdm(batches, f"Epoch {epoch}", steps, leave=False, disable=None)
            batches.update(run.step)  # an earlier start has taken these
        metrics = train(ddp_model, optimizer, scheduler, scaler, run, batches)
        if epoch == args.epochs:
            run.save()  # before the validation, which an unreadable image may end
        train_loss, train_accuracy = average(metrics)
        speed, in_words = watch.speed(global_batch_size)
        batches = run.pausable(watch.batches(islice(stream, valid_steps)))
        metrics = evaluate(model, batches)
        valid_loss, valid_accuracy = average(metrics)
        logging.info(
            f"Epoch {epoch}: "
            f"train loss {train_loss:.3f} accuracy {train_accuracy:.2%}, "
            f"valid loss {valid_loss:.3f} accuracy {valid_accuracy:.2%}, "
            f"{in_words}"
        )
        watch.log({"valid/loss": valid_loss, "valid/accuracy": valid_accuracy} | speed)
        save_if_best(run, names, valid_loss, valid_accuracy)
        run.log(epoch=epoch, loss=valid_loss, accuracy=valid_accuracy)
    log_weights(run, commit)
    watch.close()
    dist.barrier()
    time.sleep(0.1)  # gloo, on CPUs, still frees tensors: Python must not end yet
    dist.destroy_process_group()


def train(model, optimizer, scheduler, scaler, run: resume.Run, batches) -> Tensor:
    """Train on all the batches. Return float64 [sum of losses, correct, samples]."""
    model.train()
    device = next(model.parameters()).device
    metrics = run.sums(3, device)  # zeros, or what earlier starts have added up
    for step_images, step_labels in batches:
        optimizer.zero_grad()
        parts = split_step(step_images, step_labels, run.settings["batch_size"])
        for part, (images, labels) in enumerate(parts, 1):
            # One all-reduce of the gradients a step is enough: after its last part.
            with nullcontext() if part == len(parts) else model.no_sync():
                logits = compute_logits(model, images)
                loss = F.cross_entropy(
                    logits, labels, label_smoothing=0.1, reduction="sum"
                )
                # All images of a step weigh the same. DDP divides by the ranks.
                loss *= dist.get_world_size() / run.global_batch_size
                scaler.scale(loss).backward()
            measure(metrics, logits.detach(), labels)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    dist.all_reduce(metrics)  # the sums over all ranks
    return metrics


def split_step(images: Tensor, labels: Tensor, batch_size: int) -> list:
    """Return a rank's share of a step in parts of `batch_size` images or fewer."""
    count = math.ceil(len(images) / batch_size)
    parts = images.tensor_split(count), labels.tensor_split(count)
    return list(zip(*parts, strict=True))


@torch.no_grad()
def evaluate(model, batches) -> Tensor:
    """Return the model's [sum of losses, correct, samples] over all the batches."""
    model.eval()
    # BatchNorm's running statistics are each rank's own: all take those of rank 0.
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    device = next(model.parameters()).device
    metrics = torch.zeros(3, dtype=torch.float64, device=device)
    for images, labels in batches:
        measure(metrics, compute_logits(model, images), labels)
    dist.all_reduce(metrics)  # the sums over all ranks
    return metrics


def setup_distributed() -> torch.device:
    """Join the process group, one process a GPU, and return this process's device."""
    # Where rank 0 listens. job.sh sets MASTER_ADDR and MASTER_PORT, salloc neither.
    if "MASTER_ADDR" not in environ:
        environ["MASTER_ADDR"] = find_first_node()
    job = int(environ.get("SLURM_JOB_ID", "0"))  # port 0 is any free one
    environ.setdefault("MASTER_PORT", str(10000 + job % 20000 if job else 0))
    # 0 keeps the old NCCL backend. By its source, the new one makes backward() wait.
    environ.setdefault("TORCH_DIST_USE_NCCL2", "0")
    device = find_device()
    on_gpu = device.type == "cuda"
    backend = "nccl" if on_gpu else "gloo"
    try:
        # All arrive in ten minutes. Later, hangs.py ends a hang much earlier than in
        # a week, and a job may be suspended for long.
        arrivals = dist.rendezvous("env://", timeout=timedelta(minutes=10))
        store, rank, world_size = next(arrivals)
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            device_id=device if on_gpu else None,
            timeout=timedelta(days=7),
        )
    except Exception as error:  # of several kinds
        fail(
            f"rank {environ['RANK']} of {environ['WORLD_SIZE']} on "
            f"{NODE} ({device}) cannot join the others at "
            f"MASTER_ADDR={environ['MASTER_ADDR']}, "
            f"MASTER_PORT={environ['MASTER_PORT']}: is that rank 0's node, the port "
            f"free there, and open between nodes (no firewall)? {error}"
        )
    check_gpus(device)
    return device


def compute_logits(model, images: Tensor) -> Tensor:
    """Return the model's logits for a batch of images."""
    dtype = find_dtype(images.device)
    with torch.autocast(images.device.type, dtype, enabled=dtype != torch.float32):
        logits = model(normalize(images))
    return logits.float()  # A loss in bfloat16 was 2.516 where it should be 2.498.


@functools.cache
def find_dtype(device: torch.device) -> torch.dtype:
    """Return the type for autocast: 16 bits are several times faster on GPUs."""
    if device.type == "cpu":
        return torch.float32
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16
    return torch.float16  # V100, T4 and RTX 8000 only emulate bfloat16


def measure(metrics: Tensor, logits: Tensor, labels: Tensor) -> None:
    """Add images to the metrics: their losses without label smoothing."""
    # The sums stay on the GPU. To read one, as .item() does, the CPU would wait.
    metrics[0] += F.cross_entropy(logits, labels, reduction="sum")
    metrics[1] += (logits.argmax(1) == labels).sum()
    metrics[2] += (labels >= 0).sum()  # a label of -100 marks padding


def average(metrics: Tensor) -> tuple[float, float]:
    """Return the mean loss and the accuracy, 0 to 1."""
    loss, correct, samples = metrics.tolist()
    return loss / samples, correct / samples


def build_optimizer(
    model, args: argparse.Namespace, global_batch_size: int, steps: int
):
    """Return SGD and its one-cycle schedule, which advances after every step."""
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
    for weight in model.parameters():
        # If the scaler skipped the first step, fused SGD would use a buffer that
        # nothing has been written to.
        optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=learning_rate,
        total_steps=args.epochs * steps,
        pct_start=8 / 90,  # warm-up, and then a cosine
        cycle_momentum=False,
    )
    return optimizer, scheduler


def count_steps(samples: int, global_batch_size: int) -> int:
    """Return the steps of an epoch. An incomplete last global batch is dropped."""
    steps = samples // global_batch_size
    if steps == 0:
        fail(
            f"a step takes {global_batch_size} samples and there are only {samples} "
            "to train on: choose a smaller --batch-size"
        )
    return steps


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        usage="sbatch [Slurm's options] job.sh [options], or main.py [options]",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    # Those two return more than logits.
    known = models.list_models(module=models, exclude=["googlenet", "inception_v3"])
    cpus = int(environ.get("SLURM_CPUS_PER_TASK", "0")) or len(os.sched_getaffinity(0))
    add = parser.add_argument
    add(
        "--data-dir",
        type=os.path.expanduser,  # a shell leaves --data-dir=~/data as it is
        default=find_data_dir(),
        help="folder of prepare_data.py, or a tree of class folders",
    )
    add("--synthetic", action="store_true", help="made-up images, a small model")
    add("--limit-train-samples", type=positive_int, help="train on so many images")
    add("--limit-valid-samples", type=positive_int, help="validate on so many images")
    add("--image-size", type=positive_int, default=224, help="pixels per side")
    add("--max-megapixels", type=positive_int, default=200, help="of an image's file")
    add(
        "--model",
        choices=["dummy", *known],
        metavar="MODEL",
        default="resnet50",
        help="a model of torchvision; dummy measures the data alone",
    )
    add("--epochs", type=positive_int, default=90, help="passes over the training set")
    add("--batch-size", type=positive_int, default=256, help="images per GPU at a time")
    add("--accumulate", type=positive_int, default=1, help="batches per GPU in a step")
    add(
        "--learning-rate",
        type=float,
        default=0.256,
        help="peak for a global batch of 256, scaled with the batch",
    )
    add("--weight-decay", type=float, default=2**-15, help="L2 penalty")
    add("--seed", type=int, default=0, help="of weights, order, crops and flips")
    add("--compile", action="store_true", help="torch.compile: a slow first step")
    add("--workers", type=int, default=cpus, help="decoding processes per GPU")
    add(
        "--checkpoint-dir",
        type=checkpoint_dir,
        default=default_checkpoint_dir(),
        help="folder for the checkpoints of this run alone",
    )
    add("--save-minutes", type=float, default=10.0, help="minutes between checkpoints")
    add(
        "--save-steps",
        type=positive_int,
        default=10**6,
        help="also save every so many steps of an epoch",
    )
    add("--keep", type=positive_int, default=3, help="checkpoints kept besides best.pt")
    add(
        "--timeout",
        type=positive_int,
        default=120,
        help="end a hang after so many seconds",
    )
    add("--profile", action="store_true", help="trace a few steps")
    add("--wandb", metavar="PROJECT", help="also log to this W&B project")
    add("--only-check-arguments", action="store_true", help="do nothing else")
    if "--synthetic" in sys.argv:  # other defaults, which options still override
        parser.set_defaults(epochs=2, batch_size=8)  # a minute or two on two cores
        parser.set_defaults(model="shufflenet_v2_x0_5", image_size=64, workers=1)
    args = parser.parse_args()
    for option in ("learning_rate", "weight_decay", "seed", "workers", "save_minutes"):
        if not 0 <= getattr(args, option) < 2**63:  # nor NaN
            parser.error(f"--{option.replace('_', '-')} is out of range")
    if args.only_check_arguments:
        sys.exit()
    return args


def positive_int(text: str) -> int:
    """Return an option's value, for argparse."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return int(text)


def setup_logging() -> None:
    sys.stdout.reconfigure(errors="backslashreplace")  # of another locale, as Latin-1
    logging.basicConfig(
        level=logging.INFO if environ["RANK"] == "0" else logging.ERROR,
        format="%(message)s",
        stream=sys.stdout,
    )


# Checks: a wrong start, and a broken GPU.


def fail(message: str) -> NoReturn:
    """End this process with one line that says why."""
    sys.exit(f"main.py: error: {message}")


def check_task() -> None:
    """Refuse to start without srun: on a login node, or without the other tasks."""
    if "SLURM_JOB_ID" not in environ or "TORCHELASTIC_RUN_ID" in environ:
        return
    if environ.get("SLURM_STEP_NUM_TASKS") != environ.get("SLURM_NTASKS", "1"):
        fail("this is no task of the job: start main.py with srun")


def set_ranks() -> None:
    """Set torchrun's variables from srun's, whatever a shell has left in them."""
    if "TORCHELASTIC_RUN_ID" in environ:  # torchrun has set them
        return
    environ["RANK"] = environ.get("SLURM_PROCID", "0")
    environ["LOCAL_RANK"] = environ.get("SLURM_LOCALID", "0")
    environ["WORLD_SIZE"] = environ.get("SLURM_NTASKS", "1")


def find_data_dir() -> str:
    """Return job.sh's data folder; without job.sh, one in $SLURM_TMPDIR or here."""
    disk = environ.get("LOCAL_JOB_DIR", "")
    # What another job has left in the shell that submitted this one does not count.
    if f"/slurm-job-{environ.get('SLURM_JOB_ID')}-" not in disk:
        disk = environ.get("SLURM_TMPDIR") or "."
    return f"{disk}/data"


def find_device() -> torch.device:
    """Return the GPU of this process, or the CPU where there is none."""
    local_rank = int(environ["LOCAL_RANK"])
    if 0 < int(environ.get("SLURM_GPUS_ON_NODE", "0")) <= local_rank:
        fail(f"{NODE} has more tasks than GPUs: ask for fewer tasks")
    gpus = torch.cuda.device_count()
    if gpus == 0:
        has_driver = os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/kfd")
        if has_driver and environ.get("CUDA_VISIBLE_DEVICES") != "":
            fail(
                f"PyTorch finds no GPU of {NODE}: ask for "
                "--gpus-per-node, install a PyTorch for GPUs, start a container with "
                "--nv, or --exclude this node; to train on the CPU, write env "
                "CUDA_VISIBLE_DEVICES= before python"
            )
        logging.warning("warning: no GPU found, training on the CPU")
        return torch.device("cpu", 0)
    # With --gpus-per-task, a task sees its own GPU only, as number 0.
    device = torch.device("cuda", local_rank % gpus)
    torch.cuda.set_device(device)
    return device


def find_first_node() -> str:
    """Return the first node of this step, which may have fewer than its job."""
    if "SLURM_STEP_NODELIST" not in environ:
        return "127.0.0.1"
    command = ["scontrol", "show", "hostnames", environ["SLURM_STEP_NODELIST"]]
    try:
        return subprocess.check_output(command, text=True).split()[0]
    except (OSError, subprocess.CalledProcessError):
        fail("scontrol fails, as in a container: export MASTER_ADDR, rank 0's node")


def check_gpus(device: torch.device) -> None:
    """Refuse GPUs of two precisions: only float16 scales its gradients."""
    dtypes = [None] * dist.get_world_size()
    dist.all_gather_object(dtypes, find_dtype(device))
    if len(set(dtypes)) > 1:
        fail(f"ask for GPUs of one kind, as in --gpus-per-node=a100:4: {set(dtypes)}")


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
    except StagingError as error:
        # From a DataLoader worker, its text is a traceback that ends in this line.
        fail(str(error).split("StagingError: ")[-1].strip())
