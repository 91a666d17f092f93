"""Measure the time from srun to PyTorch imported in every task, on a test cluster.

The usual way is `srun uv run` in every task, which has each look whether the
environment is up to date. The examples' job.sh runs `uv sync` once and then
`srun uv run --no-sync`; both are counted. The limit is one process that imports
PyTorch. All tasks share this machine's cores. Needs root and Slurm, as the tests do.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from side_by_side import argument_parser, describe_machine

sys.path.insert(0, str(Path(__file__).parents[1]))
import cluster as slurm

ROOT = Path(__file__).resolve().parents[2]


def parse_args() -> argparse.Namespace:
    parser = argument_parser(__doc__, rounds=3)
    add = parser.add_argument
    add(
        "--tasks",
        type=int,
        nargs="+",
        default=[1, 2, 4, 8],
        help="numbers of tasks, on two nodes",
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    table = Table(
        title=f"From srun to PyTorch imported in every task\n{describe_machine()}"
    )
    for column in (
        "Tasks",
        "",
        "seconds, median",
        "lowest",
        "highest",
        "of one process",
    ):
        table.add_column(column, justify="left" if not column else "right")
    read_end, write_end = os.pipe()
    cluster, supervisor = slurm.start(nodes=2, gpus=0, cpus=64, lifeline=read_end)
    try:
        for tasks in args.tasks:
            srun = [
                "srun",
                "--nodes=1-2",
                f"--ntasks={tasks}",
                "--cpus-per-task=1",
                "--mem-per-cpu=1G",
            ]
            python = ["python", "-c", "import torch"]
            variants = {
                "srun uv run": [[*srun, "uv", "run", *python]],
                "uv sync; srun uv run --no-sync": [
                    ["uv", "sync", "--locked"],
                    [*srun, "uv", "run", "--no-sync", *python],
                ],
                "one process": [["uv", "run", "--no-sync", *python]],
            }
            seconds = {name: [] for name in variants}
            for turn in range(-1, args.rounds):
                for name, commands in variants.items():
                    start = time.perf_counter()
                    for command in commands:
                        subprocess.run(
                            command,
                            cwd=ROOT,
                            env=os.environ | cluster.env,
                            check=True,
                            capture_output=True,
                        )
                    if turn >= 0:  # the first turn warms up
                        seconds[name].append(time.perf_counter() - start)
            limit = statistics.median(seconds["one process"])
            for name, values in seconds.items():
                median = statistics.median(values)
                numbers = [
                    f"{value:.2f}" for value in (median, min(values), max(values))
                ]
                table.add_row(str(tasks), name, *numbers, f"{median / limit:.2f}")
            table.add_section()
    finally:
        os.close(write_end)
        supervisor.wait()
    Console(width=max(110, shutil.get_terminal_size().columns)).print(table)


if __name__ == "__main__":
    main()
