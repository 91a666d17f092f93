"""What the benchmarks share: variants take turns, and a table compares the medians."""

import argparse
import importlib.util
import os
import platform
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn


def argument_parser(doc: str, rounds: int) -> argparse.ArgumentParser:
    """Return a parser with the first line of a benchmark's docstring, and --rounds."""
    parser = argparse.ArgumentParser(
        description=doc.splitlines()[0],
        usage="%(prog)s [options]",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=rounds, help="turns of each")
    return parser


def load_example(folder: str):
    """Return an example's main.py as a module, as it is."""
    path = Path(__file__).parents[2] / folder / "main.py"
    spec = importlib.util.spec_from_file_location(f"{folder}_main", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(example, model, optimizer, scheduler, data, *epoch: int) -> None:
    """Train as the example's main() does: `epoch` is global batch, seed, number."""
    batches = example.training_batches(data, *epoch)
    bar = example.progress(epoch[-1], len(data) // epoch[0])
    example.train(model, optimizer, scheduler, batches, bar)


def distribute(model: nn.Module) -> nn.Module:
    """Return the model in DDP, as main() makes it from multi_gpu on."""
    ddp_model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    ddp_model.broadcast_buffers = False
    return ddp_model


class FreeNetwork(nn.Module):
    """A network that costs nothing: the same logits for every image."""

    def __init__(self):
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(10))

    def forward(self, images):
        return self.logits.expand(len(images), 10)


def take_turns(
    variants: dict[str, Callable[[], int]], rounds: int
) -> dict[str, list[float]]:
    """Return what each variant did per second, in every turn: A B A B.

    A variant returns how much it did. Its first turn warms up, and is not counted.
    """
    rates: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(-1, rounds):
        for name, variant in variants.items():
            start = time.perf_counter()
            done = variant()
            rate = done / (time.perf_counter() - start)
            if turn >= 0:
                rates[name].append(rate)
    return rates


def print_table(
    title: str,
    unit: str,
    rates: dict[str, list[float]],
    usual: str,
    limit: str | None = None,
) -> None:
    """Print the median of every variant, and its ratios to the usual and the limit."""
    table = Table(title=f"{title}\n{describe_machine()}", min_width=100)
    columns = ["", f"{unit}, median", "lowest", "highest", "times the usual way"]
    for column in [*columns, "of the limit"] if limit else columns:
        table.add_column(column, justify="right" if column else "left")
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, values in rates.items():
        numbers = [medians[name], min(values), max(values)]
        row = [
            name,
            *(
                f"{number:,.4g}" if number < 100 else f"{number:,.0f}"
                for number in numbers
            ),
        ]
        row.append(f"{medians[name] / medians[usual]:.2f}")
        if limit:
            row.append(f"{medians[name] / medians[limit]:.2f}")
        table.add_row(*row)
    Console(width=max(110, shutil.get_terminal_size().columns)).print(table)


def describe_machine() -> str:
    """Name the processor, how busy it is, PyTorch, and the GPU if there is one."""
    models = [
        line.split(": ")[1].strip()
        for line in open("/proc/cpuinfo")
        if line.startswith("model name")
    ]
    parts = [
        models[0] if models else platform.machine(),
        f"{len(os.sched_getaffinity(0))} cores",
        f"load {os.getloadavg()[0]:.1f}",
        f"PyTorch {torch.__version__}, {torch.get_num_threads()} threads",
    ]
    if torch.cuda.is_available():
        parts.append(torch.cuda.get_device_name())
    return ", ".join(parts)
