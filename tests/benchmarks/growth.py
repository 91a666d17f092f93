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
import statistics
import subprocess
import sys

import torch
import torch.distributed as dist
from side_by_side import (
    argument_parser,
    distribute,
    load_example,
    print_table,
    shipped,
    start_cluster,
    take_turns,
)

STEPS = 3  # in a turn
COLUMNS = ["Mbit/s", "ranks", "no network, s", "all-reduce, s", "computed"]
COLUMNS += ["step, s", "computed", "of computed"]


def main() -> None:
    # Samples per rank in a step.
    parser = argument_parser(__doc__, rounds=3, batch_size=16)
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    add(
        "--megabits",
        type=int,
        nargs="+",
        default=[2000, 200],
        help="a node sends in a second",
    )
    args = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # all of it is about CPUs
    if "SLURM_PROCID" in os.environ:
        return work(args)
    rows = []
    with start_cluster(nodes=max(args.ranks), gpus=0, bind_tasks=False) as cluster:
        for megabits in args.megabits:
            rate = f"rate {megabits}mbit burst 256kb latency 100ms"
            limit = f"tc qdisc replace dev eth0 root tbf {rate}".split()
            for node in cluster.nodes:
                subprocess.run([*cluster.namespaces(node), *limit], check=True)
            for ranks in args.ranks:
                srun = f"srun --nodes={ranks} --ntasks={ranks} --mem=2G".split()
                result = subprocess.check_output(
                    [*srun, "--kill-on-bad-exit", sys.executable, *sys.argv],
                    env=os.environ | cluster.env | {"OMP_NUM_THREADS": "1"},
                    text=True,
                )
                measured = json.loads(result.splitlines()[-1])
                compute, step = measured["compute"], measured["step"]
                sent = measured["gradient bytes"]
                wire = seconds_on_the_wire(sent, ranks, megabits / 8 * 1e6)
                computed = seconds_of_a_step(compute, wire)
                seconds = [compute, measured["all-reduce"], wire, step, computed]
                cells = [f"{value:.2f}" for value in [*seconds, step / computed]]
                rows.append([str(megabits), str(ranks), *cells])
    print_table("A step of multi_node/main.py, a rank a node", COLUMNS, rows)
    print(f"gradients of a ResNet-18: {sent / 1e6:.1f} MB")


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


def work(args: argparse.Namespace) -> None:
    """Be a rank: take turns with and without the network. Rank 0 prints the medians."""
    example = load_example("multi_node")
    example.set_ranks()
    example.setup_distributed()
    torch.manual_seed(0)
    batch_size = dist.get_world_size() * args.batch_size
    shape = (STEPS * batch_size, 3, 32, 32)
    images = torch.randint(256, shape, dtype=torch.uint8)
    data = example.Split(example.view_crops(images), torch.randint(10, (len(images),)))
    model, replica = (
        example.build_model().to(memory_format=torch.channels_last) for _ in range(2)
    )
    gradients = torch.zeros(sum(weight.numel() for weight in model.parameters()))

    def all_reduce() -> None:
        for _ in range(STEPS):
            dist.all_reduce(gradients)

    variants = {
        "compute": shipped(example, model, data, batch_size),
        "step": shipped(example, distribute(replica), data, batch_size),
        "all-reduce": all_reduce,
    }
    seconds = take_turns(variants, args.rounds, prepare=dist.barrier)
    if dist.get_rank() == 0:
        medians = {
            name: statistics.median(values) / STEPS for name, values in seconds.items()
        }
        print(json.dumps(medians | {"gradient bytes": 4 * gradients.numel()}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
