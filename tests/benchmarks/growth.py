"""Measure a step of multi_node at 1, 2, 4 and 8 ranks, on networks of known speed.

Each rank has a node of the test cluster, which the kernel's token bucket filter lets
send so fast and no faster. Beside the measured times stand those that docs/scaling.rst
computes from the bytes of the gradients and the bandwidth. All ranks share this
machine's cores: a step without communication gets slower with their number, and is
measured for each. Needs root and Slurm, as the tests do.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from side_by_side import (
    FreeNetwork,
    argument_parser,
    describe_machine,
    distribute,
    load_example,
    train,
)
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
import cluster as slurm

ROOT = Path(__file__).resolve().parents[2]


def parse_args() -> argparse.Namespace:
    parser = argument_parser(__doc__, rounds=3)
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    add(
        "--megabits",
        type=int,
        nargs="+",
        default=[2000, 200],
        help="a node sends in a second",
    )
    add("--batch-size", type=int, default=16, help="samples per rank in a step")
    add("--steps", type=int, default=3, help="in a turn")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # all of it is about CPUs
    if "SLURM_PROCID" in os.environ:
        work(args)
        return
    table = Table(
        title=f"A step of multi_node/main.py, a rank a node\n{describe_machine()}"
    )
    columns = [
        "Mbit/s",
        "ranks",
        "input, CPU ms",
        "no network, s",
        "all-reduce, s",
        "computed",
        "step, s",
    ]
    for column in [*columns, "computed", "of computed"]:
        table.add_column(column, justify="right")
    read_end, write_end = os.pipe()
    cluster, supervisor = slurm.start(
        nodes=max(args.ranks), gpus=0, cpus=64, lifeline=read_end, bind_tasks=False
    )
    try:
        for megabits in args.megabits:
            for node in cluster.nodes:
                limit(cluster, node, megabits)
            for ranks in args.ranks:
                measured = launch(cluster, ranks)
                bytes_, compute = measured["bytes"], measured["compute"]
                wire = seconds_on_the_wire(bytes_, ranks, megabits / 8 * 1e6)
                computed = seconds_of_a_step(compute, wire)
                step = measured["step"]
                row = [
                    megabits,
                    ranks,
                    f"{1000 * measured['input']:.1f}",
                    f"{compute:.2f}",
                ]
                row += [
                    f"{measured['all_reduce']:.2f}",
                    f"{wire:.2f}",
                    f"{step:.2f}",
                    f"{computed:.2f}",
                ]
                table.add_row(*map(str, row), f"{step / computed:.2f}")
            table.add_section()
    finally:
        os.close(write_end)
        supervisor.wait()
    Console(width=max(110, shutil.get_terminal_size().columns)).print(table)
    print(f"gradients of a ResNet-18: {bytes_ / 1e6:.1f} MB")


def seconds_on_the_wire(
    gradient_bytes: float, ranks: int, bytes_per_second: float
) -> float:
    """Return how long a ring all-reduce takes.

    Each rank sends 2 (n - 1) / n of the bytes: Patarasuk and Yuan 2009, "Bandwidth
    optimal all-reduce algorithms for clusters of workstations".
    """
    return 2 * (ranks - 1) / ranks * gradient_bytes / bytes_per_second


def seconds_of_a_step(compute: float, wire: float) -> float:
    """Return how long a step takes.

    The all-reduce overlaps with backward, two thirds of the computation.
    """
    return max(compute, compute / 3 + wire)


def limit(cluster: slurm.Cluster, node: str, megabits: int) -> None:
    """Let a node send so fast."""
    rate = f"rate {megabits}mbit burst 256kb latency 100ms"
    command = f"tc qdisc replace dev eth0 root tbf {rate}".split()
    subprocess.run([*cluster.namespaces(node), *command], check=True)


def launch(cluster: slurm.Cluster, ranks: int) -> dict[str, float]:
    """Run `work` on so many nodes, and return what rank 0 says."""
    srun = [
        "srun",
        f"--nodes={ranks}",
        f"--ntasks={ranks}",
        "--cpus-per-task=1",
        "--mem=2G",
        "--kill-on-bad-exit",
    ]
    env = os.environ | cluster.env | {"OMP_NUM_THREADS": "1"}
    command = [*srun, sys.executable, *sys.argv]
    result = subprocess.run(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(result.stdout.splitlines()[-1])


def work(args: argparse.Namespace) -> None:
    """Be a rank: take turns with and without the network. Rank 0 prints the medians."""
    example = load_example("multi_node")
    example.set_ranks()
    example.setup_distributed()
    torch.manual_seed(0)
    world_size = dist.get_world_size()
    global_batch_size = world_size * args.batch_size
    images = torch.randint(
        256, (args.steps * global_batch_size, 3, 32, 32), dtype=torch.uint8
    )
    data = example.Split(example.view_crops(images), torch.randint(10, (len(images),)))
    options = argparse.Namespace(learning_rate=0.0, weight_decay=0.0, epochs=10**6)

    def step(model: nn.Module):
        optimizer, scheduler = example.build_optimizer(
            model, options, global_batch_size, args.steps
        )
        epoch = (global_batch_size, 0, 1)
        return lambda: train(example, model, optimizer, scheduler, data, *epoch)

    alone = example.build_model().to(memory_format=torch.channels_last)
    ddp = distribute(example.build_model().to(memory_format=torch.channels_last))
    gradients = torch.zeros(sum(parameter.numel() for parameter in alone.parameters()))

    def all_reduce() -> None:
        for _ in range(args.steps):
            dist.all_reduce(gradients)

    variants = {
        "input": step(FreeNetwork()),
        "compute": step(alone),
        "step": step(ddp),
        "all_reduce": all_reduce,
    }
    seconds = {name: [] for name in variants}
    for turn in range(-1, args.rounds):
        for name, variant in variants.items():
            dist.barrier()
            clock = time.process_time if name == "input" else time.perf_counter
            start = clock()
            variant()
            if turn >= 0:  # the first turn warms up
                seconds[name].append((clock() - start) / args.steps)
    if dist.get_rank() == 0:
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        print(json.dumps(medians | {"bytes": 4 * gradients.numel()}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
