"""Measure how long training waits for a checkpoint, against torch.save in the loop.

The state is that of a model with its optimizer. The limit is writing as many
bytes, flushed to the disk.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from side_by_side import argument_parser, describe_machine
from torchvision import models

sys.path.insert(0, str(Path(__file__).parents[2] / "imagenet"))
from checkpoint import Checkpoints, Run


def parse_args() -> argparse.Namespace:
    parser = argument_parser(__doc__, rounds=5)
    add = parser.add_argument
    add("--model", default="resnet50", help="one of torchvision's")
    add(
        "--scratch",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="folder on the disk to measure",
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    dist.init_process_group("gloo")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = models.get_model(args.model).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    model(torch.zeros(2, 3, 64, 64, device=device)).sum().backward()
    optimizer.step()  # the momentum is part of the state
    run = Run(
        model,
        optimizer,
        torch.optim.lr_scheduler.ConstantLR(optimizer),
        {},
        global_batch_size=1,
    )
    seconds: dict[str, list[float]] = {}

    def note(name: str, start: float, turn: int) -> None:
        if turn >= 0:  # the first turn warms up
            seconds.setdefault(name, []).append(time.perf_counter() - start)

    with tempfile.TemporaryDirectory(prefix="saving-", dir=args.scratch) as folder:
        folder = Path(folder)
        checkpoints = Checkpoints(folder / "checkpoints", keep=3)
        checkpoints.load({})
        for turn in range(-1, args.rounds):
            start = time.perf_counter()
            torch.save(run.state_dict(), folder / "usual.pt")
            note("torch.save in the loop", start, turn)
            os.sync()

            run.step += 1
            start = time.perf_counter()
            checkpoints.save(run)
            note("imagenet/checkpoint.py, flushed to the disk", start, turn)

            content = bytes((folder / "usual.pt").stat().st_size)
            start = time.perf_counter()
            with (folder / "bytes").open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            note("writing as many bytes", start, turn)
    saved = f"Checkpoint of {args.model}, {len(content) / 1e6:.0f} MB"
    table = Table(title=f"{saved}\n{describe_machine()}")
    for column in ("", "seconds, median", "lowest", "highest", "of torch.save"):
        table.add_column(column, justify="right" if column else "left")
    usual = statistics.median(seconds["torch.save in the loop"])
    for name, values in seconds.items():
        median = statistics.median(values)
        numbers = [f"{value:.3f}" for value in (median, min(values), max(values))]
        table.add_row(name, *numbers, f"{median / usual:.2f}")
    Console(width=max(110, shutil.get_terminal_size().columns)).print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
