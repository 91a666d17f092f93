"""Measure the training step of multi_gpu with several ranks, on GPUs or the CPU.

The usual way has AdamW as it comes, three all-reduces a step for loss, correct and
count, and reads each with `.item()`. The limit is forward, backward and step of the
same model with DDP, on one batch in memory. The second table compares what the metrics
of a step cost, without the rest of it.
"""

import argparse
import os
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
from side_by_side import (
    argument_parser,
    distribute,
    load_example,
    print_table,
    take_turns,
    train,
)
from torch import nn
from torch.nn import functional as F


def parse_args() -> argparse.Namespace:
    parser = argument_parser(__doc__, rounds=3)
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="processes, with one thread each")
    add("--steps", type=int, default=10, help="in a turn")
    add("--batch-size", type=int, default=32, help="samples per rank in a step")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    # Start the ranks: this script, as torchrun would start it.
    if "RANK" not in os.environ:
        torchrun = [
            "-m",
            "torch.distributed.run",
            f"--nproc-per-node={args.ranks}",
            "--standalone",
        ]
        with tempfile.TemporaryDirectory() as folder:  # torchrun leaves one there
            env = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": folder}
            sys.exit(
                subprocess.run(
                    [sys.executable, *torchrun, *sys.argv], env=env
                ).returncode
            )
    example = load_example("multi_gpu")
    example.set_ranks()
    device = example.setup_distributed()
    steps = take_turns(build_steps(example, device, args), args.rounds)
    metrics = take_turns(build_metrics(example, device, args), args.rounds)
    if dist.get_rank() == 0:
        title = f"{args.ranks} ranks, {args.batch_size} samples each"
        usual, *_, limit = steps
        print_table(f"Training, {title}", "steps/s", steps, usual, limit)
        print_table(
            f"The metrics of a step, {title}", "steps/s", metrics, next(iter(metrics))
        )
    dist.barrier()
    dist.destroy_process_group()


def build_steps(example, device: torch.device, args: argparse.Namespace) -> dict:
    """Return a function for each way; it trains for some steps and returns how many."""
    torch.manual_seed(0)
    samples = args.ranks * args.batch_size * args.steps
    images = torch.randint(256, (samples, 3, 32, 32), dtype=torch.uint8, device=device)
    data = example.Split(
        example.view_crops(images), torch.randint(10, (samples,), device=device)
    )
    batch, labels = (
        example.normalize(images[: args.batch_size]),
        data.labels[: args.batch_size],
    )

    def make_model() -> nn.Module:
        return example.build_model().to(device, memory_format=torch.channels_last)

    usual_model = nn.parallel.DistributedDataParallel(make_model())
    shipped_model, bare_model = (distribute(make_model()) for _ in range(2))
    adamw = torch.optim.AdamW(usual_model.parameters())
    bare_sgd = torch.optim.SGD(
        bare_model.parameters(), lr=0.0, momentum=0.9, nesterov=True, fused=True
    )
    options = argparse.Namespace(learning_rate=0.0, weight_decay=0.0, epochs=10**6)
    global_batch_size = args.ranks * args.batch_size
    sgd, scheduler = example.build_optimizer(
        shipped_model, options, global_batch_size, args.steps
    )

    def usual() -> int:
        usual_model.train()
        for _ in range(args.steps):
            with torch.autocast(
                device.type, torch.bfloat16, enabled=device.type == "cuda"
            ):
                logits = usual_model(batch)
                loss = F.cross_entropy(logits, labels, label_smoothing=0.1)
            adamw.zero_grad()
            loss.backward()
            adamw.step()
            reduce_and_read(loss, logits, labels)
        return done(args.steps)

    def shipped() -> int:
        epoch = (global_batch_size, 0, 1)
        train(example, shipped_model, sgd, scheduler, data, *epoch)
        return done(args.steps)

    def bare() -> int:
        bare_model.train()
        for _ in range(args.steps):
            with torch.autocast(
                device.type, torch.bfloat16, enabled=device.type == "cuda"
            ):
                loss = F.cross_entropy(bare_model(batch), labels, label_smoothing=0.1)
            bare_sgd.zero_grad()
            loss.backward()
            bare_sgd.step()
        return done(args.steps)

    return {
        "AdamW, three all-reduces and .item()": usual,
        "multi_gpu/main.py": shipped,
        "forward, backward, step on one batch": bare,
    }


def build_metrics(example, device: torch.device, args: argparse.Namespace) -> dict:
    logits = torch.randn(args.batch_size, 10, device=device)
    labels = torch.randint(10, (args.batch_size,), device=device)
    loss = F.cross_entropy(logits, labels)
    steps = 100 * args.steps

    def usual() -> int:
        for _ in range(steps):
            reduce_and_read(loss, logits, labels)
        return done(steps)

    def shipped() -> int:
        metrics = torch.zeros(3, dtype=torch.float64, device=device)
        for _ in range(steps):
            example.measure(metrics, logits, labels)
        return done(steps)

    return {"three all-reduces and .item()": usual, "multi_gpu/main.py": shipped}


def reduce_and_read(loss, logits, labels) -> tuple[float, float, float]:
    """Return loss, correct and count over all ranks, as most tutorials have it."""
    values = [
        loss.detach() * len(labels),
        (logits.argmax(1) == labels).sum().float(),
        torch.tensor(float(len(labels)), device=labels.device),
    ]
    for value in values:
        dist.all_reduce(value)
    return tuple(value.item() for value in values)


def done(count: int) -> int:
    """Return the count, when the GPU has done all that it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return count


if __name__ == "__main__":
    main()
