"""Measure how long training waits for a checkpoint, against torch.save in the loop.

The state is that of a model with its optimizer. The limit is writing as many
bytes, flushed to the disk.
"""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from side_by_side import argument_parser, compare, load_example, take_turns
from torchvision import models


def main() -> None:
    parser = argument_parser(__doc__, rounds=5)
    parser.add_argument(
        "--scratch", default=tempfile.gettempdir(), help="folder on the disk to measure"
    )
    args = parser.parse_args()
    example = load_example("imagenet")
    example.set_ranks()
    device = example.setup_distributed(timeout=60)
    model = models.resnet50().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    model(torch.zeros(2, 3, 64, 64, device=device)).sum().backward()
    optimizer.step()  # the momentum is part of the state
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    run = example.Run(model, optimizer, scheduler, {}, global_batch_size=1)

    with tempfile.TemporaryDirectory(prefix="saving-", dir=args.scratch) as folder:
        usual_file = Path(folder, "usual.pt")
        checkpoints = example.Checkpoints(Path(folder, "checkpoints"), keep=3)
        checkpoints.load({})

        def usual() -> None:
            torch.save(run.state_dict(), usual_file)

        def shipped() -> None:
            run.step += 1
            checkpoints.save(run)

        def bare() -> None:
            with Path(folder, "bytes").open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())

        usual()
        content = usual_file.read_bytes()
        variants = {
            "torch.save in the loop": usual,
            "imagenet/checkpoint.py, flushed to the disk": shipped,
            "writing as many bytes": bare,
        }
        seconds = take_turns(variants, args.rounds, prepare=os.sync)
    compare(f"Checkpoint of a ResNet-50, {len(content) / 1e6:.0f} MB", seconds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
