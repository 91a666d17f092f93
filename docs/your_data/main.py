"""Train a ResNet-18 on your images with the GPUs of several nodes, a process each."""

import argparse
import functools
import logging
import os
import socket
import subprocess
import sys
import time
from os import environ

import torch
import torch.distributed as dist
from data import evaluation_batches, load_data, normalize, training_batches
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision import models
from tqdm import tqdm


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
    add = parser.add_argument
    add("--data-dir", default=data_dir, help="has the images")
    add("--epochs", type=at_least(1), default=35, help="passes over the training set")
    add("--batch-size", type=at_least(1), default=256, help="images per GPU at a time")
    add(
        "--learning-rate",
        type=at_least(0.0),
        default=0.2,
        help="peak, per 256 images of the global batch",
    )
    add("--weight-decay", type=at_least(0.0), default=5e-4, help="L2 penalty")
    add("--seed", type=at_least(0), default=0, help="seed of everything random")
    add("--compile", action="store_true", help="a slow start, then faster steps")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    check_task()
    set_ranks()
    setup_logging()
    logging.info(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {vars(args)}")
    train_set, valid_set, test_set = load_data(args)  # before NCCL is up
    device = setup_distributed()
    if device.type == "cpu":
        logging.warning("warning: no GPU found, training on the CPU")

    world_size = dist.get_world_size()
    global_batch_size = world_size * args.batch_size
    steps = count_steps(len(train_set), global_batch_size, world_size)
    logging.info(
        f"World size {world_size}: {steps} steps an epoch, "
        f"{world_size} x {args.batch_size} samples each, of {len(train_set)}; "
        f"{len(valid_set)} to validate, {len(test_set)} to test; "
        f"computing in {'bfloat16' if has_bfloat16() else 'float32'}"
    )

    torch.manual_seed(args.seed)
    model = build_model().to(device, memory_format=torch.channels_last)
    if args.compile:
        model.compile()
    optimizer, scheduler = build_optimizer(model, args, global_batch_size, steps)
    # backward() averages the gradients over all ranks while it computes the rest.
    ddp_model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    # DDP would broadcast BatchNorm's statistics in each step. train() does it once.
    ddp_model.broadcast_buffers = False

    for epoch in range(1, args.epochs + 1):
        start = time.perf_counter()
        batches = training_batches(train_set, global_batch_size, args.seed, epoch)
        bar = progress(epoch, steps)
        metrics = train(ddp_model, optimizer, scheduler, batches, bar)
        train_loss, train_accuracy = average(metrics, steps * global_batch_size)
        rate = steps * global_batch_size / (time.perf_counter() - start)
        metrics = evaluate(model, evaluation_batches(valid_set, args.batch_size))
        valid_loss, valid_accuracy = average(metrics, len(valid_set))
        logging.info(
            f"Epoch {epoch}: "
            f"train loss {train_loss:.3f} accuracy {train_accuracy:.2%}, "
            f"valid loss {valid_loss:.3f} accuracy {valid_accuracy:.2%}, "
            f"{rate:.0f} images/s"
        )
    metrics = evaluate(model, evaluation_batches(test_set, args.batch_size))
    test_loss, test_accuracy = average(metrics, len(test_set))
    logging.info(f"Test loss {test_loss:.3f} accuracy {test_accuracy:.2%}")
    dist.destroy_process_group()


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


def setup_distributed() -> torch.device:
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
        dist.init_process_group(backend, device_id=device)
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


def train(model, optimizer, scheduler, batches, bar: tqdm) -> Tensor:
    """Train on all the batches and return their metrics (see `measure`)."""
    model.train()
    device = next(model.parameters()).device
    metrics = torch.zeros(3, dtype=torch.float64, device=device)
    for images, labels in batches:
        with torch.autocast(device.type, torch.bfloat16, has_bfloat16()):
            logits = model(normalize(images))
            loss = F.cross_entropy(logits, labels, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        measure(metrics, logits.detach(), labels)
        show(bar, metrics)
    bar.close()
    # BatchNorm's running statistics are each rank's own: all take those of rank 0.
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    return metrics


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
    # The rate follows the global batch: linear scaling, Goyal et al. 2017.
    learning_rate = args.learning_rate * global_batch_size / 256
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=learning_rate,
        momentum=0.9,
        nesterov=True,
        weight_decay=args.weight_decay,
        fused=True,
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=learning_rate,
        total_steps=args.epochs * steps,
        pct_start=0.23,  # of all steps until the peak: Jordan 2024, arXiv:2404.00498
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


def progress(epoch: int, steps: int) -> tqdm:
    """Return the progress bar of an epoch."""
    options = {"mininterval": 1, "disable": None}  # seconds; None: only in a terminal
    # Under salloc, srun's tasks have no terminal, but a person watches: `show` logs.
    in_salloc = "SLURM_STEP_ID" in environ and environ.get("ENVIRONMENT") != "BATCH"
    if in_salloc and not sys.stderr.isatty():
        options = {"mininterval": 10, "file": open(os.devnull, "w")}
    if environ["RANK"] != "0":
        options = {"disable": True}
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


# Your model. Your images are in data.py.


def build_model() -> nn.Module:
    """Return a ResNet-18 whose stem keeps 32 x 32 pixels: ImageNet's leaves 8 x 8."""
    # Each block begins as the identity: Goyal et al. 2017, arXiv:1706.02677.
    model = models.resnet18(num_classes=10, zero_init_residual=True)
    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


if __name__ == "__main__":
    main()
