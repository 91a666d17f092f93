"""Train a ResNet-18 on CIFAR-10 with one GPU."""

import argparse
import functools
import logging
import os
import socket
import sys
import time
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
import rich.console
import rich.logging
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.datasets import CIFAR10
from torchvision.models import resnet18
from tqdm import tqdm

logger = logging.getLogger("main")


class Split(NamedTuple):
    """Pictures and their classes, whole, in the memory of the device that works on them."""

    images: Tensor  # uint8, shape (samples, 3, 32, 32); to train on, what `view_crops` returns
    labels: Tensor  # int64, shape (samples,)


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

    parser = argparse.ArgumentParser(
        description=__doc__,
        usage="%(prog)s [options]",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    # job.sh puts the data on the node's own disk, SLURM_TMPDIR.
    data_dir = Path(os.environ.get("SLURM_TMPDIR", ".")) / "data"
    add = parser.add_argument
    add(
        "--data-dir",
        type=Path,
        default=data_dir,
        help="folder that has CIFAR-10, or gets it",
    )
    add(
        "--synthetic",
        action="store_true",
        help="train on made-up pictures: no data, no network",
    )
    add("--epochs", type=at_least(1), default=20, help="passes over the training set")
    add("--batch-size", type=at_least(1), default=256, help="samples per GPU in a step")
    add(
        "--learning-rate",
        type=at_least(0.0),
        default=0.2,
        help="peak, per 256 samples of the global batch",
    )
    add(
        "--weight-decay",
        type=at_least(0.0),
        default=5e-4,
        help="L2 penalty on the parameters",
    )
    add("--seed", type=at_least(0), default=0, help="seed of everything random")
    add(
        "--compile",
        action="store_true",
        help="compile the model: a slow start, faster steps",
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        fail("this example is a single process: start it as one task, or use multi_gpu")
    device = torch.device("cuda" if torch.cuda.device_count() else "cpu")
    setup_logging()
    if device.type == "cpu":
        logger.warning("warning: no GPU found, training on the CPU")
    torch.manual_seed(args.seed)

    train_set, valid_set, test_set = load_data(args, device)
    world_size = 1
    global_batch_size = world_size * args.batch_size
    steps = count_steps(train_set, global_batch_size)
    logger.info(
        f"World size {world_size}: {steps} steps an epoch, {world_size} x {args.batch_size} samples each, "
        f"of {len(train_set.labels)}; {len(valid_set.labels)} to validate, {len(test_set.labels)} to test"
    )

    model = build_model().to(device, memory_format=torch.channels_last)
    if args.compile:
        model.compile()
    optimizer, scheduler = build_optimizer(model, args, global_batch_size, steps)

    for epoch in range(1, args.epochs + 1):
        start = time.perf_counter()
        metrics = train(
            model, optimizer, scheduler, train_set, global_batch_size, args.seed, epoch
        )
        train_loss, train_accuracy = average(metrics, steps * global_batch_size)
        rate = steps * global_batch_size / (time.perf_counter() - start)
        valid_loss, valid_accuracy = average(
            evaluate(model, valid_set, args.batch_size), len(valid_set.labels)
        )
        logger.info(
            f"Epoch {epoch}: train loss {train_loss:.3f} accuracy {train_accuracy:.2%}, "
            f"valid loss {valid_loss:.3f} accuracy {valid_accuracy:.2%}, {rate:.0f} images/s"
        )
    test_loss, test_accuracy = average(
        evaluate(model, test_set, args.batch_size), len(test_set.labels)
    )
    logger.info(f"Test loss {test_loss:.3f} accuracy {test_accuracy:.2%}")


def train(
    model,
    optimizer,
    scheduler,
    data: Split,
    global_batch_size: int,
    seed: int,
    epoch: int,
) -> Tensor:
    """Train for one epoch and return its metrics (see `measure`)."""
    model.train()
    device = data.labels.device
    metrics = torch.zeros(3, dtype=torch.float64, device=device)
    order, top, left, flip = (
        draw.to(device) for draw in draw_epoch(len(data.labels), seed, epoch)
    )
    steps = len(order) // global_batch_size
    batches = order[: steps * global_batch_size].view(steps, global_batch_size)
    for index in progress(batches, f"Epoch {epoch}"):
        images, labels = (
            data.images[index, flip[index], top[index], left[index]],
            data.labels[index],
        )
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(normalize(images))
            loss = F.cross_entropy(logits, labels, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        measure(metrics, logits.detach(), labels)
    return metrics


@torch.no_grad()
def evaluate(model: nn.Module, data: Split, batch_size: int) -> Tensor:
    """Return the metrics of the model (see `measure`) over all of `data`."""
    model.eval()
    device = data.labels.device
    metrics = torch.zeros(3, dtype=torch.float64, device=device)
    order = torch.arange(len(data.labels), device=device)
    for index in order.split(batch_size):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(normalize(data.images[index]))
        measure(metrics, logits, data.labels[index])
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
    loss, correct, counted = metrics.tolist()
    assert counted == samples, f"{counted:.0f} samples were counted, not {samples}"
    return loss / samples, correct / samples


def build_model() -> nn.Module:
    """Return a ResNet-18 whose stem keeps 32 x 32 pixels; ImageNet's would leave 8 x 8."""
    model = resnet18(num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


def build_optimizer(
    model: nn.Module, args: argparse.Namespace, global_batch_size: int, steps: int
):
    """Return SGD and its one-cycle schedule, which is moved on after every step."""
    # The learning rate follows the global batch: linear scaling, Goyal et al. 2017, arXiv:1706.02677.
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
        cycle_momentum=False,
    )
    return optimizer, scheduler


def count_steps(data: Split, global_batch_size: int) -> int:
    """Return the steps in an epoch: the last global batch, if it is not whole, is left out."""
    steps = len(data.labels) // global_batch_size
    if steps == 0:
        fail(
            f"a step takes {global_batch_size} samples and there are only {len(data.labels)} to train on: "
            "choose a smaller --batch-size"
        )
    return steps


def load_data(
    args: argparse.Namespace, device: torch.device
) -> tuple[Split, Split, Split]:
    """Return the training, validation and test sets on `device`."""
    train_set, test_set = (
        draw_synthetic() if args.synthetic else read_cifar10(args.data_dir)
    )
    images, labels = (tensor.to(device) for tensor in train_set)
    # The pictures come in a random order: the last tenth is held out for validation.
    valid = len(labels) // 10
    return (
        Split(view_crops(images[:-valid]), labels[:-valid]),
        Split(images[-valid:], labels[-valid:]),
        Split(*(tensor.to(device) for tensor in test_set)),
    )


def read_cifar10(data_dir: Path) -> tuple[Split, Split]:
    """Read the training and the test pictures, after downloading them where `data_dir` has none."""
    socket.setdefaulttimeout(
        10
    )  # seconds; a firewall may drop packets, and then a download never ends
    try:
        parts = [
            CIFAR10(data_dir, train=train, download=True) for train in (True, False)
        ]
    except (OSError, RuntimeError) as error:
        fail(
            f"no whole CIFAR-10 in {data_dir.absolute()} on {socket.gethostname()}, and no download "
            f"({error}): put {CIFAR10.filename} there, or set CIFAR10_ARCHIVE for job.sh, or use --synthetic"
        )
    return tuple(
        Split(torch.from_numpy(p.data).permute(0, 3, 1, 2), torch.tensor(p.targets))
        for p in parts
    )


def draw_synthetic() -> tuple[Split, Split]:
    """Draw training and test pictures to learn from: each class is a pattern, hidden in noise."""
    generator = torch.Generator().manual_seed(0)
    patterns = F.interpolate(
        torch.randn(10, 3, 8, 8, generator=generator), (32, 32), mode="bilinear"
    )
    parts = []
    for samples in (2304, 256):  # enough for a step of 8 GPUs with 256 samples each
        labels = torch.randint(10, (samples,), generator=generator)
        noise = torch.randn(samples, 3, 32, 32, generator=generator)
        images = (128 + 32 * patterns[labels] + 48 * noise).clamp(0, 255).byte()
        parts.append(Split(images, labels))
    return tuple(parts)


def view_crops(images: Tensor) -> Tensor:
    """Return all crops of the pictures and of their mirror images: to augment a batch is to index it.

    They are a view of shape (samples, 2, 9, 9, 3, 32, 32), of two pictures of 40 x 40 pixels a sample.
    """
    padded = F.pad(images.permute(0, 2, 3, 1), (0, 0, 4, 4, 4, 4))
    return (
        torch.stack((padded, padded.flip(2)), dim=1).unfold(2, 32, 1).unfold(3, 32, 1)
    )


def draw_epoch(
    samples: int, seed: int, epoch: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw the order of an epoch, and of every sample the crop's top and left edge (0 to 8) and the flip.

    All follow from (seed, epoch, sample): they stay the same however many GPUs share the work.
    """
    rng = np.random.default_rng((seed, epoch))
    order = rng.permutation(samples)
    top, left = rng.integers(9, size=(2, samples))
    flip = rng.integers(2, size=samples)
    return tuple(torch.from_numpy(draw) for draw in (order, top, left, flip))


def normalize(images: Tensor) -> Tensor:
    """Return uint8 pictures as float32 ones of mean 0 and standard deviation 1, in channels_last."""
    mean, std = mean_and_std(images.device)
    return ((images - mean) / std).contiguous(memory_format=torch.channels_last)


@functools.cache  # a tensor made of Python numbers makes the CPU wait for the GPU: make it once
def mean_and_std(device: torch.device) -> Tensor:
    values = torch.tensor(
        [[0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]], device=device
    )
    return 255 * values.view(2, 3, 1, 1)


def progress(batches: Tensor, description: str) -> tqdm:
    """Return the batches with a progress bar in a terminal, and without one in a job's output."""
    return tqdm(
        batches,
        desc=description,
        unit="step",
        leave=False,
        disable=None,
    )


class LogHandler(rich.logging.RichHandler):
    """Rich's colours in a terminal, but no columns: every line stays whole and starts with its text."""

    def render(self, *, record, traceback, message_renderable):
        return message_renderable


def setup_logging() -> None:
    logging.basicConfig(
        level=logging.INFO,
        format="%(message)s",
        handlers=[LogHandler(console=rich.console.Console(soft_wrap=True))],
    )


def fail(message: str) -> NoReturn:
    """End this process with one line that says why."""
    sys.stderr.write(
        f"main.py: error: {message}\n"
    )  # in one piece: other processes may write there, too
    sys.exit(1)


if __name__ == "__main__":
    main()
