"""Measure the training step of multi_gpu with several ranks, on GPUs or the CPU.

The usual way has AdamW as it comes, three all-reduces a step for loss, correct and
count, and reads each with `.item()`. The limit is forward, backward and step of the
same model with DDP, on one batch in memory. The second table compares what the metrics
of a step cost, without the rest of it.
"""

import os
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
from side_by_side import (
    add_up,
    argument_parser,
    build_optimizer,
    compare,
    distribute,
    load_example,
    pad,
    shipped,
    take_turns,
    train_plainly,
)
from torch import nn


def main() -> None:
    # Processes, with one thread each; steps in a turn; samples per rank in a step.
    parser = argument_parser(__doc__, rounds=3, ranks=2, steps=10, batch_size=32)
    args = parser.parse_args()
    # Start the ranks: this script, as torchrun would start it.
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        torchrun = f"-m torch.distributed.run --nproc-per-node={args.ranks}".split()
        command = [sys.executable, *torchrun, "--standalone", *sys.argv]
        with tempfile.TemporaryDirectory() as folder:  # torchrun leaves one there
            env = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": folder}
            sys.exit(subprocess.call(command, env=env))

    example = load_example("multi_gpu")
    example.set_ranks()
    device = example.setup_distributed()
    torch.manual_seed(0)
    global_batch_size = args.ranks * args.batch_size
    samples = global_batch_size * args.steps
    images = torch.randint(256, (samples, 32, 32, 3), dtype=torch.uint8, device=device)
    labels = torch.randint(10, (samples,), device=device)
    data = pad(example, images, labels)
    labels = labels[: args.batch_size]
    batches = [(example.normalize(images[: args.batch_size]), labels)] * args.steps

    def make_model() -> nn.Module:
        return example.build_model().to(device, memory_format=torch.channels_last)

    usual_model = nn.parallel.DistributedDataParallel(make_model())
    adamw = torch.optim.AdamW(usual_model.parameters())
    model, bare_model = distribute(make_model()), distribute(make_model())
    bare_sgd, _ = build_optimizer(example, bare_model, global_batch_size, args.steps)
    variants = {
        "AdamW, three all-reduces and .item()": lambda: train_plainly(
            usual_model, adamw, batches, read=reduce_and_read
        ),
        "multi_gpu/main.py": shipped(example, model, data, global_batch_size),
        "forward, backward, step on one batch": lambda: train_plainly(
            bare_model, bare_sgd, batches
        ),
    }
    seconds = take_turns(variants, args.rounds)

    steps = 100 * args.steps
    logits = torch.randn(args.batch_size, 10, device=device)
    loss = logits.mean()
    metrics = torch.zeros(3, dtype=torch.float64, device=device)

    def usual_metrics() -> None:
        for _ in range(steps):
            reduce_and_read(logits, labels, loss)

    def shipped_metrics() -> None:
        for _ in range(steps):
            add_up(metrics, logits, labels, loss)

    variants = {
        "three all-reduces and .item()": usual_metrics,
        "multi_gpu/main.py": shipped_metrics,
    }
    metrics_seconds = take_turns(variants, args.rounds)
    if dist.get_rank() == 0:
        title = f"{args.ranks} ranks, {args.batch_size} samples each"
        compare(f"Training, {title}", seconds, args.steps, "steps/s")
        title = f"The metrics of a step, {title}"
        compare(title, metrics_seconds, steps, "steps/s", has_limit=False)
    dist.barrier()
    dist.destroy_process_group()


def reduce_and_read(logits, labels, loss) -> None:
    """Read loss, correct and count over all ranks, as most tutorials have it."""
    correct = (logits.argmax(1) == labels).sum().float()
    count = torch.tensor(float(len(labels)), device=labels.device)
    values = [loss * len(labels), correct, count]
    for value in values:
        dist.all_reduce(value)
    for value in values:
        value.item()


if __name__ == "__main__":
    main()
