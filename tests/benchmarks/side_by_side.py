"""What the benchmarks share: variants take turns, and a table compares the medians."""

import argparse
import importlib
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F

# What benchmarks take from the tests.
sys.path.insert(0, str(Path(__file__).parents[1]))
from drawn_cifar10 import draw_cifar10 as draw_cifar10
from drawn_imagenet import draw_imagenet as draw_imagenet

ROOT = Path(__file__).resolve().parents[2]


def argument_parser(doc: str, rounds: int, **numbers: int) -> argparse.ArgumentParser:
    """Return a parser with the first line of a benchmark's docstring.

    Its options are --rounds, the turns of each variant beside the first, and the
    benchmark's other numbers, with these defaults.
    """
    parser = argparse.ArgumentParser(
        description=doc.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, default in {"rounds": rounds, **numbers}.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, default=default, help="how many")
    return parser


def prepare_data(source: Path, data_dir: Path, *flags: str) -> None:
    """Stage ImageNet's archives as imagenet's job.sh does."""
    script = ROOT / "imagenet" / "prepare_data.py"
    where = [f"--source={source}", f"--data-dir={data_dir}"]
    command = [sys.executable, script, *where, *flags]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)


def load_example(folder: str):
    """Return an example's main.py as a module, as it is."""
    sys.path.insert(0, str(ROOT / folder))
    return importlib.import_module("main")


def parse_args(example, *arguments: str) -> argparse.Namespace:
    """Return what the example makes of these arguments and of its defaults."""
    with mock.patch.object(sys, "argv", ["main.py", *arguments]):
        return example.parse_args()


def build_optimizer(example, model: nn.Module, batch_size: int, steps: int):
    """Return the example's SGD, at a rate of 0, and its schedule."""
    args = parse_args(example, "--learning-rate=0", "--epochs=1000000")
    return example.build_optimizer(model, args, batch_size, steps)


def distribute(model: nn.Module) -> nn.Module:
    """Return the model in DDP, as main() makes it from multi_gpu on."""
    ddp_model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    ddp_model.broadcast_buffers = False
    return ddp_model


def pad(example, images: torch.Tensor, labels: torch.Tensor):
    """Return a training set of images of 32 x 32 pixels as `load_data` makes it."""
    return example.TensorDataset(F.pad(images, (0, 0, 4, 4, 4, 4)), labels)


def shipped(example, model: nn.Module, data, batch_size: int):
    """Return a function that trains for an epoch of CIFAR-10 as main() does."""
    steps = len(data) // batch_size
    optimizer, scheduler = build_optimizer(example, model, batch_size, steps)
    dtype = example.find_dtype(data.tensors[0].device)
    scaler = torch.amp.GradScaler(enabled=dtype == torch.float16)

    def turn() -> None:
        batches = example.training_batches(data, batch_size, 0, 1)
        example.train(model, optimizer, scheduler, scaler, batches)

    return turn


def train_plainly(model, optimizer, batches, bfloat16=True, read=None) -> None:
    """Do forward, backward and step on each of the batches.

    A GPU computes in bfloat16, or else in float32. `read` takes the results of a step.
    """
    model.train()
    for images, labels in batches:
        device = labels.device.type
        with torch.autocast(device, torch.bfloat16, bfloat16 and device == "cuda"):
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if read:
            read(logits.detach(), labels, loss.detach())


def train_as_usual(model, optimizer, loader) -> None:
    """Train in float32; read loss and correct answers in every step, as many do."""
    device = next(model.parameters()).device

    def read(logits, labels, loss) -> None:
        (loss * len(labels)).item()
        (logits.argmax(1) == labels).sum().item()

    batches = ([part.to(device) for part in pair] for pair in loader)
    train_plainly(model, optimizer, batches, bfloat16=False, read=read)


def add_up(metrics, logits, labels, loss) -> None:
    """Add a batch to the metrics, as `train` does."""
    metrics[0] += loss.detach() * len(labels)
    metrics[1] += (logits.argmax(dim=1) == labels).sum()
    metrics[2] += len(labels)


def take_turns(
    variants: dict, rounds: int, prepare=lambda: None
) -> dict[str, list[float]]:
    """Return the seconds that each variant took in every turn: A B A B.

    The first turn warms up, and is not counted, unless there is no other.
    """
    seconds = {name: [] for name in variants}
    for _ in range(1 + rounds):
        for name, variant in variants.items():
            prepare()
            start = time.perf_counter()
            variant()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start)
    return {name: values[1:] or values for name, values in seconds.items()}


def compare(
    title: str,
    seconds: dict[str, list[float]],
    count: int = 0,
    unit: str = "seconds",
    has_limit: bool = True,
) -> None:
    """Print medians, and how fast each variant is beside the usual way and the limit.

    The usual way is the first one, the limit the last one. A turn did `count` of
    `unit`, which are then printed per second.
    """
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    usual, *_, limit = medians.values()
    rows = []
    for name, values in seconds.items():
        numbers = [medians[name], min(values), max(values)]
        if count:
            numbers = [count / number for number in numbers]
        row = [f"{n:,.0f}" if n > 100 else f"{n:.4g}" for n in numbers]
        row.append(f"{usual / medians[name]:.2f}")
        if has_limit:
            row.append(f"{limit / medians[name]:.2f}")
        rows.append([name, *row])
    columns = ["", f"{unit}, median", "fastest", "slowest", "times the usual way"]
    print_table(title, [*columns, "of the limit"][: len(rows[0])], rows)


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    table = Table(title=f"{title}\n{describe_machine()}", min_width=100)
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=110).print(table)


def describe_machine() -> str:
    """Name the processor, how busy it is, PyTorch, and the GPU if there is one."""
    named = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    parts = [
        named[1] if named else "?",
        f"{len(os.sched_getaffinity(0))} cores",
        f"load {os.getloadavg()[0]:.1f}",
        f"PyTorch {torch.__version__}, {torch.get_num_threads()} threads",
    ]
    if torch.cuda.is_available():
        parts.append(torch.cuda.get_device_name())
    return ", ".join(parts)
