"""Measure imagenet/prepare_data.py against `cp` and torchvision's ImageNet parser.

They take turns, each on files that have been read once before, into an empty folder;
medians are compared. What is timed is the whole command, with the start of Python: up
to 1 s, and with torchvision several.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table
from side_by_side import argument_parser, describe_machine

sys.path.insert(0, str(Path(__file__).parent.parent))
from drawn_imagenet import draw_imagenet

SCRIPT = Path(__file__).parents[2] / "imagenet" / "prepare_data.py"
# torchvision refuses archives without the published checksums.
PARSER = """
import os, sys
from torchvision.datasets import imagenet
imagenet.check_integrity = lambda path, md5=None: os.path.isfile(path)
for split in ("train", "val"):
    imagenet.ImageNet(sys.argv[1], split)
"""


def parse_args() -> argparse.Namespace:
    parser = argument_parser(__doc__, rounds=3)
    add = parser.add_argument
    add(
        "--source",
        type=Path,
        help="folder with ImageNet's three archives; without it, made-up ones",
    )
    add(
        "--scratch",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="folder on the disk to measure",
    )
    add("--images", type=int, default=100, help="made-up ones, of each class")
    add("--copy-only", action="store_true", help="leave the extraction out")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    with tempfile.TemporaryDirectory(prefix="staging-", dir=args.scratch) as scratch:
        scratch = Path(scratch)
        source = (
            args.source
            or draw_imagenet(scratch / "drawn", 20, args.images, 5, 256).source
        )
        files = sorted(source.glob("ILSVRC2012_*"))
        size = sum(file.stat().st_size for file in files)

        def cp(folder: Path) -> float:
            return timed("cp", *files, folder)

        def prepare_data(folder: Path, *flags: str) -> float:
            command = [
                sys.executable,
                SCRIPT,
                f"--source={source}",
                f"--data-dir={folder}",
            ]
            return timed(*command, *flags)

        def torchvision(folder: Path) -> float:
            for file in files:  # it writes beside its archives
                (folder / file.name).symlink_to(file.absolute())
            return timed(sys.executable, "-c", PARSER, folder)

        where = f"{describe_machine()}, {describe_disk(args.scratch)}"
        table = Table(title=f"{where}, {size / 1e9:.2f} GB", min_width=90)
        for column in ("", "seconds, median", "all", "GB/s", "times as fast"):
            table.add_column(
                column, justify="left" if column in ("", "all") else "right"
            )
        rows = [
            ("cp", "prepare_data.py", cp, prepare_data),
            (
                "torchvision's ImageNet",
                "prepare_data.py --extract",
                torchvision,
                lambda folder: prepare_data(folder, "--extract"),
            ),
        ]
        for first, second, run_first, run_second in rows[
            : 1 if args.copy_only else None
        ]:
            times = take_turns([run_first, run_second], args.rounds, files, scratch)
            medians = [statistics.median(seconds) for seconds in times]
            for name, seconds, median in zip(
                (first, second), times, medians, strict=True
            ):
                every = " ".join(f"{value:.2f}" for value in seconds)
                ratio = f"{medians[0] / median:.2f}"
                table.add_row(
                    name, f"{median:.2f}", every, f"{size / median / 1e9:.2f}", ratio
                )
            table.add_section()
    Console(width=max(110, shutil.get_terminal_size().columns)).print(table)


def take_turns(
    variants: list[Callable[[Path], float]],
    rounds: int,
    files: list[Path],
    scratch: Path,
) -> list[list[float]]:
    """Return the seconds that each variant took, A B A B."""
    times = [[] for _ in variants]
    for i in range(-1, rounds):  # the first turn warms up, and is not counted
        for variant, seconds in zip(variants, times, strict=True):
            folder = scratch / "staged"
            folder.mkdir(mode=0o700)
            for file in files:  # into the page cache, for both
                subprocess.run(["cat", file], stdout=subprocess.DEVNULL, check=True)
            os.sync()  # what the one before has left to write
            taken = variant(folder)
            if i >= 0:
                seconds.append(taken)
            shutil.rmtree(folder)
    return times


def timed(*command) -> float:
    """Return the seconds that a command takes, its start included."""
    start = time.perf_counter()
    subprocess.run(
        [str(part) for part in command], stdout=subprocess.DEVNULL, check=True
    )
    return time.perf_counter() - start


def describe_disk(folder: Path) -> str:
    result = subprocess.run(
        ["stat", "-f", "-c", "%T", folder], capture_output=True, text=True, check=True
    )
    return f"{folder} ({result.stdout.strip()})"


if __name__ == "__main__":
    main()
