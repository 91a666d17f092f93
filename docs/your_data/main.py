"""Train a model on your data on several nodes, with one process per GPU."""

import argparse
import io
import logging
import math
import os
import socket
import subprocess
import sys
import time
from os import environ
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from data import build_model, evaluation_batches, load_data, normalize, training_batches
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm


def main() -> None:
    args = parse_args()
    check_task()
    set_ranks()
    setup_logging()
    logging.info(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {vars(args)}")
    weights_file = find_weights_file()
    train_set, valid_set, test_set = load_data(args)  # before NCCL is up
    device = setup_distributed()
    dtype = find_dtype(device)

    world_size = dist.get_world_size()
    global_batch_size = world_size * args.batch_size
    steps = count_steps(len(train_set), global_batch_size)
    logging.info(
        f"World size {world_size}: {steps} steps an epoch, "
        f"{world_size} x {args.batch_size} samples each, of {len(train_set)}; "
        f"{len(valid_set)} to validate, {len(test_set)} to test; "
        f"computing in {str(dtype).removeprefix('torch.')}"
    )

    torch.manual_seed(args.seed)
    model = build_model(train_set.classes).to(device, memory_format=torch.channels_last)
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

    evaluation_batch_size = 4 * args.batch_size  # it keeps no activations
    for epoch in range(1, args.epochs + 1):
        start = time.perf_counter()
        batches = training_batches(train_set, global_batch_size, args.seed, epoch)
        # A progress bar, in a terminal only.
        if dist.get_rank() == 0:
            batches = tqdm(batches, f"Epoch {epoch}", steps, leave=False, disable=None)
        metrics = train(ddp_model, optimizer, scheduler, scaler, batches)
        train_loss, train_accuracy = average(metrics)
        rate = steps * global_batch_size / (time.perf_counter() - start)
        metrics = evaluate(model, evaluation_batches(valid_set, evaluation_batch_size))
        valid_loss, valid_accuracy = average(metrics)
        logging.info(
            f"Epoch {epoch}: "
            f"train loss {train_loss:.3f} accuracy {train_accuracy:.2%}, "
            f"valid loss {valid_loss:.3f} accuracy {valid_accuracy:.2%}, "
            f"{rate:.0f} images/s"
        )
        check_losses(train_loss, valid_loss)
    metrics = evaluate(model, evaluation_batches(test_set, evaluation_batch_size))
    test_loss, test_accuracy = average(metrics)
    logging.info(f"Test loss {test_loss:.3f} accuracy {test_accuracy:.2%}")
    try:
        if dist.get_rank() == 0:
            save_weights(model, weights_file)
    finally:  # All leave together: srun may end those that stay longer than the first.
        dist.barrier()
        dist.destroy_process_group()


def train(model, optimizer, scheduler, scaler, batches) -> Tensor:
    """Train on all the batches. Return float64 [sum of losses, correct, samples]."""
    model.train()
    device = next(model.parameters()).device
    metrics = torch.zeros(3, dtype=torch.float64, device=device)
    for images, labels in batches:
        logits = compute_logits(model, images)
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        # The sums stay on the GPU. To read one, as .item() does, the CPU would wait.
        metrics[0] += loss.detach() * len(labels)
        metrics[1] += (logits.argmax(1) == labels).sum()
        metrics[2] += len(labels)
    dist.all_reduce(metrics)  # the sums over all ranks
    return metrics


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # --compile would compile each batch size
def evaluate(model, batches) -> Tensor:
    """Return the model's [sum of losses, correct, samples] over all the batches."""
    model.eval()
    # BatchNorm's running statistics are each rank's own: all take those of rank 0.
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    device = next(model.parameters()).device
    metrics = torch.zeros(3, dtype=torch.float64, device=device)
    for images, labels in batches:
        logits = compute_logits(model, images)
        metrics[0] += F.cross_entropy(logits, labels, reduction="sum")
        metrics[1] += (logits.argmax(1) == labels).sum()
        metrics[2] += len(labels)
    dist.all_reduce(metrics)  # the sums over all ranks
    return metrics


def setup_distributed() -> torch.device:
    """Join the process group, one process a GPU, and return this process's device."""
    # Where rank 0 listens. job.sh sets both, salloc neither.
    if "MASTER_ADDR" not in environ:
        environ["MASTER_ADDR"] = find_first_node()
    job = int(environ.get("SLURM_JOB_ID", "0"))  # port 0 is any free one
    environ.setdefault("MASTER_PORT", str(10000 + job % 20000 if job else 0))
    device = find_device()
    on_gpu = device.type == "cuda"
    backend = "nccl" if on_gpu else "gloo"
    try:
        check_master_addr()
        dist.init_process_group(backend, device_id=device if on_gpu else None)
    except Exception as error:  # of several kinds
        fail(
            f"rank {environ['RANK']} of {environ['WORLD_SIZE']} on "
            f"{socket.gethostname()} ({device}) cannot join the others at "
            f"MASTER_ADDR={environ['MASTER_ADDR']}, "
            f"MASTER_PORT={environ['MASTER_PORT']}: is that rank 0's node, and a "
            f"free port there? {error}"
        )
    return device


def compute_logits(model, images: Tensor) -> Tensor:
    """Return the model's logits for a batch of images."""
    dtype = find_dtype(images.device)
    with torch.autocast(images.device.type, dtype, enabled=dtype != torch.float32):
        logits = model(normalize(images))
    return logits.float()  # A loss in bfloat16 was 2.516 where it should be 2.498.


def find_dtype(device: torch.device) -> torch.dtype:
    """Return the type for autocast: 16 bits are several times faster on GPUs."""
    if device.type == "cpu":
        return torch.float32
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16
    return torch.float16  # V100, T4 and RTX 8000 only emulate bfloat16


def average(metrics: Tensor) -> tuple[float, float]:
    """Return the mean loss and the accuracy, 0 to 1."""
    loss, correct, samples = metrics.tolist()
    return loss / samples, correct / samples


def build_optimizer(
    model, args: argparse.Namespace, global_batch_size: int, steps: int
):
    """Return SGD and its one-cycle schedule, which advances after every step."""
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
    for weight in model.parameters():
        # If the scaler skipped the first step, fused SGD would use a buffer that
        # nothing has been written to.
        optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=learning_rate,
        total_steps=args.epochs * steps,
        pct_start=0.3,  # For 30% of all steps, the rate rises
        div_factor=10,  # from a tenth of its peak. Then it falls to nearly 0.
        anneal_strategy="linear",
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
    add = parser.add_argument
    add(
        "--data-dir",
        type=os.path.expanduser,  # a shell leaves --data-dir=~/data as it is
        default=find_data_dir(),
        help="has your data",
    )
    add("--epochs", type=positive_int, default=35, help="passes over the training set")
    add("--batch-size", type=positive_int, default=256, help="images per GPU at a time")
    add(
        "--learning-rate",
        type=float,
        default=0.2,
        help="peak for a global batch of 256, scaled with the batch",
    )
    add("--weight-decay", type=float, default=5e-4, help="L2 penalty")
    add("--seed", type=int, default=0, help="of weights, order, crops and flips")
    add("--compile", action="store_true", help="torch.compile: 23 s slower on an H200")
    return parser.parse_args()


def positive_int(text: str) -> int:
    """Return an option's value, for argparse."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return int(text)


def setup_logging() -> None:
    logging.basicConfig(
        level=logging.INFO if environ["RANK"] == "0" else logging.ERROR,
        format="%(message)s",
        stream=sys.stdout,
    )


# Checks: a wrong start, a broken GPU, a full disk, a training run that diverges.


def fail(message: str) -> NoReturn:
    """End this process with one line that says why."""
    sys.exit(f"main.py: error: {message}")


def check_task() -> None:
    """Refuse to start without srun: this process would wait for the other tasks."""
    tasks = environ.get("SLURM_NTASKS", "1")
    in_step = environ.get("SLURM_STEP_NUM_TASKS", "1") == tasks
    if not in_step and "TORCHELASTIC_RUN_ID" not in environ:
        fail(f"this is none of the {tasks} tasks of the job: start main.py with srun")


def set_ranks() -> None:
    """Set torchrun's variables from srun's, whatever a shell has left in them."""
    if "TORCHELASTIC_RUN_ID" in environ:  # torchrun has set them
        return
    environ["RANK"] = environ.get("SLURM_PROCID", "0")
    environ["LOCAL_RANK"] = environ.get("SLURM_LOCALID", "0")
    environ["WORLD_SIZE"] = environ.get("SLURM_NTASKS", "1")
    tasks_here = environ.get("SLURM_GTIDS", "0").split(",")  # on this node, as 4,5,6,7
    environ["LOCAL_WORLD_SIZE"] = str(len(tasks_here))


def find_data_dir() -> str:
    """Return job.sh's data folder; without job.sh, one in $SLURM_TMPDIR or here."""
    disk = environ.get("LOCAL_JOB_DIR", "")
    # What another job has left in the shell that submitted this one does not count.
    if f"/slurm-job-{environ.get('SLURM_JOB_ID')}-" not in disk:
        disk = environ.get("SLURM_TMPDIR") or "."
    return f"{disk}/data"


def find_device() -> torch.device:
    """Return the GPU of this process, or the CPU where there is none."""
    local_rank, ranks = int(environ["LOCAL_RANK"]), int(environ["LOCAL_WORLD_SIZE"])
    gpus = int(environ.get("SLURM_GPUS_ON_NODE", "0"))  # the job's
    if 0 < gpus <= local_rank:
        fail(
            f"local rank {local_rank} on {socket.gethostname()} has no GPU to itself: "
            f"there are {gpus}; ask for more --gpus-per-node, or for fewer tasks"
        )
    if gpus > ranks:
        logging.warning(f"warning: {ranks} of {gpus} GPUs a node are used: add tasks")
    visible = torch.cuda.device_count()
    # Without a driver, take the CPU. With one, a GPU must be visible: set_device()
    # below fails if none is.
    has_driver = os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/kfd")
    if visible == 0 and (not has_driver or environ.get("CUDA_VISIBLE_DEVICES") == ""):
        logging.warning("warning: no GPU found, training on the CPU")
        return torch.device("cpu", 0)
    # With --gpus-per-task, a task sees its own GPU only, as number 0.
    device = torch.device("cuda", local_rank % max(1, visible))
    try:
        torch.cuda.set_device(device)
    except Exception as error:  # of several kinds
        fail(
            f"no GPU of {socket.gethostname()} works: {str(error).splitlines()[0]}: "
            "ask for --gpus-per-node, or --exclude this node; to train on the CPU, "
            "write env CUDA_VISIBLE_DEVICES= before python"
        )
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


def check_master_addr() -> None:
    """Raise OSError if rank 0 is not there. PyTorch would take minutes to say so."""
    try:
        addresses = socket.getaddrinfo(environ["MASTER_ADDR"], 0)
    except socket.gaierror:
        time.sleep(10)  # a name server may be busy for a moment
        addresses = socket.getaddrinfo(environ["MASTER_ADDR"], 0)
    if environ["RANK"] != "0" or "TORCHELASTIC_RUN_ID" in environ:
        return
    for family, *_, address in addresses:  # PyTorch tries all of them, too
        try:
            socket.socket(family).bind(address)
            return
        except OSError as error:
            reason = error
    raise reason


def check_losses(*losses: float) -> None:
    """End a training run that has diverged: its weights are worth nothing."""
    if not math.isfinite(sum(losses)):
        logging.warning("main.py: error: the loss is not finite: nothing is saved")
        dist.barrier()  # or srun might end rank 0 before it has said so
        sys.exit(1)


def find_weights_file() -> Path:
    """Return where the weights will be: beside the log of the job."""
    path = Path(f"model-{environ.get('SLURM_JOB_ID', 'none')}.pt").absolute()
    if not os.access(".", os.W_OK):
        fail(f"cannot write the weights to {path}: use a clone that you can write to")
    return path


def save_weights(model, path: Path) -> None:
    """Write the file whole or not at all. An older one stays until then."""
    # Not straight to the disk: torch.save's error does not say that a disk is full.
    content = io.BytesIO()
    torch.save(model.state_dict(), content)
    partial = path.with_suffix(".pt.partial")
    try:
        partial.write_bytes(content.getbuffer())
        partial.rename(path)
    except OSError as error:  # such as a full disk
        partial.unlink(missing_ok=True)
        fail(f"cannot write {path}: {error.strerror}")
    logging.info(f"Weights: {path}")


if __name__ == "__main__":
    main()
