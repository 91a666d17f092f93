"""Measure how fast single_gpu trains, on a GPU or the CPU, against the usual way.

The usual way is torchvision's data set with its augmentation behind worker processes,
float32, and `.item()` in every step. The limit is forward, backward and step of the
example's model on one batch in memory.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from cifar10_input import MEAN, STD, draw
from side_by_side import argument_parser, load_example, print_table, take_turns, train
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset
from torchvision import datasets, transforms


def parse_args() -> argparse.Namespace:
    parser = argument_parser(__doc__, rounds=3)
    add = parser.add_argument
    add(
        "--data-dir",
        type=Path,
        help="folder with cifar-10-batches-py; without it, made-up images",
    )
    add("--samples", type=int, default=45000, help="training images in a turn")
    add("--batch-size", type=int, default=256)
    add("--workers", type=int, default=2, help="worker processes of the usual way")
    add(
        "--compile",
        action="store_true",
        help="compile the model of the example, and that of the limit",
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    example = load_example("single_gpu")
    with tempfile.TemporaryDirectory() as folder:
        data_dir = args.data_dir or draw(Path(folder), args.samples)
        # Made-up images have no published checksum.
        datasets.cifar.check_integrity = lambda *_: True
        variants = build_variants(example, data_dir, device, args)
        rates = take_turns(variants, args.rounds)
    usual, *_, limit = variants
    print_table(
        f"Training a ResNet-18 on CIFAR-10, batches of {args.batch_size}",
        "images/s",
        rates,
        usual,
        limit,
    )


def build_variants(
    example, data_dir: Path, device: torch.device, args: argparse.Namespace
) -> dict:
    """Return a function for each way: it does an epoch, and counts the images."""
    data = datasets.CIFAR10(data_dir)
    images = torch.from_numpy(data.data).permute(0, 3, 1, 2)[: args.samples].to(device)
    labels = torch.tensor(data.targets)[: args.samples].to(device)
    train_set = example.Split(example.view_crops(images), labels)
    steps = len(labels) // args.batch_size
    augment = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]
    transform = transforms.Compose(
        [*augment, transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    )
    dataset = Subset(
        datasets.CIFAR10(data_dir, transform=transform), range(len(labels))
    )
    options = {
        "shuffle": True,
        "drop_last": True,
        "num_workers": args.workers,
        "pin_memory": device.type == "cuda",
    }
    loader = DataLoader(
        dataset, args.batch_size, persistent_workers=args.workers > 0, **options
    )

    usual_model = example.build_model().to(device)
    usual_sgd = torch.optim.SGD(usual_model.parameters(), lr=0.0, momentum=0.9)
    settings = argparse.Namespace(learning_rate=0.0, weight_decay=0.0, epochs=10**6)
    models = [
        example.build_model().to(device, memory_format=torch.channels_last)
        for _ in range(2)
    ]
    if args.compile:
        for model in models:
            model.compile()
    model, bare_model = models
    sgd, scheduler = example.build_optimizer(model, settings, args.batch_size, steps)
    bare_sgd, _ = example.build_optimizer(bare_model, settings, args.batch_size, steps)
    batch, labels = (
        example.normalize(images[: args.batch_size]),
        labels[: args.batch_size],
    )

    def usual() -> int:
        usual_model.train()
        loss_sum, correct = 0.0, 0
        for inputs, targets in loader:
            inputs, targets = inputs.to(device), targets.to(device)
            usual_sgd.zero_grad()
            outputs = usual_model(inputs)
            loss = F.cross_entropy(outputs, targets)
            loss.backward()
            usual_sgd.step()
            loss_sum += loss.item() * len(targets)
            correct += (outputs.argmax(1) == targets).sum().item()
        return done()

    def shipped() -> int:
        train(example, model, sgd, scheduler, train_set, args.batch_size, 0, 1)
        return done()

    def bare() -> int:
        bare_model.train()
        for _ in range(steps):
            with torch.autocast(
                device.type, torch.bfloat16, enabled=device.type == "cuda"
            ):
                loss = F.cross_entropy(bare_model(batch), labels, label_smoothing=0.1)
            bare_sgd.zero_grad()
            loss.backward()
            bare_sgd.step()
        return done()

    def done() -> int:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return steps * args.batch_size

    return {
        f"torchvision, {args.workers} workers, float32, .item()": usual,
        "single_gpu/main.py": shipped,
        "forward, backward, step on one batch": bare,
    }


if __name__ == "__main__":
    main()
