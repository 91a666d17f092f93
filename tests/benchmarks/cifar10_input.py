"""Measure how fast single_gpu makes batches of CIFAR-10, against the usual way.

The usual way is torchvision's data set behind two worker processes, which hands out PIL
images. The limit is the loop of main.py without augmentation. A network that costs
nothing takes each batch, in every variant.
"""

import argparse
import pickle
import tempfile
from pathlib import Path

import numpy as np
import torch
from side_by_side import (
    FreeNetwork,
    argument_parser,
    load_example,
    print_table,
    take_turns,
    train,
)
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset
from torchvision import datasets, transforms

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def parse_args() -> argparse.Namespace:
    parser = argument_parser(__doc__, rounds=5)
    add = parser.add_argument
    add(
        "--data-dir",
        type=Path,
        help="folder with cifar-10-batches-py; without it, made-up images",
    )
    add("--samples", type=int, default=45000, help="training images")
    add("--batch-size", type=int, default=256)
    add("--workers", type=int, default=2, help="worker processes of the usual way")
    add("--threads", type=int, default=1, help="CPU threads of PyTorch")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    example = load_example("single_gpu")
    with tempfile.TemporaryDirectory() as folder:
        data_dir = args.data_dir or draw(Path(folder), args.samples)
        # Made-up images have no published checksum.
        datasets.cifar.check_integrity = lambda *_: True
        variants = build_variants(example, data_dir, args)
        rates = take_turns(variants, args.rounds)
    usual, *_, limit = variants
    print_table("CIFAR-10: batches for training", "images/s", rates, usual, limit)


def build_variants(example, data_dir: Path, args: argparse.Namespace) -> dict:
    """Return a function for each way: it does an epoch, and counts the images."""
    data = datasets.CIFAR10(data_dir)
    images = torch.from_numpy(data.data).permute(0, 3, 1, 2)
    images, labels = images[: args.samples], torch.tensor(data.targets)[: args.samples]
    train_set = example.Split(example.view_crops(images), labels)
    steps = len(labels) // args.batch_size
    network = FreeNetwork()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)

    def step(images, labels) -> None:
        loss = F.cross_entropy(network(images), labels, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()

    def usual(*augmentation):
        transform = transforms.Compose(
            [*augmentation, transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
        )
        dataset = Subset(
            datasets.CIFAR10(data_dir, transform=transform), range(len(labels))
        )
        options = {"shuffle": True, "num_workers": args.workers, "drop_last": True}
        loader = DataLoader(dataset, args.batch_size, **options)

        def epoch() -> int:
            for images, labels in loader:
                step(images, labels)
            return steps * args.batch_size

        return epoch

    def shipped() -> int:
        epoch = (args.batch_size, 0, 1)
        train(example, network, optimizer, scheduler, train_set, *epoch)
        return steps * args.batch_size

    def limit() -> int:
        metrics = torch.zeros(3, dtype=torch.float64)
        order = torch.from_numpy(np.random.default_rng(0).permutation(len(labels)))
        for index in order[: steps * args.batch_size].view(steps, args.batch_size):
            batch = example.normalize(images[index]), labels[index]
            step(*batch)
            example.measure(metrics, network(batch[0]).detach(), batch[1])
        return steps * args.batch_size

    return {
        f"torchvision, {args.workers} workers, no augmentation": usual(),
        f"torchvision, {args.workers} workers, crop and flip": usual(
            transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()
        ),
        "single_gpu/main.py, crop and flip": shipped,
        "indexing and normalizing, no augmentation": limit,
    }


def draw(folder: Path, samples: int) -> Path:
    """Write CIFAR-10's training files, made up; return the folder of their folder."""
    rng = np.random.default_rng(0)
    (folder / "cifar-10-batches-py").mkdir()
    for i in range(1, 6):
        data = rng.integers(256, size=(-(-samples // 5), 3072), dtype=np.uint8)
        batch = {"data": data, "labels": rng.integers(10, size=len(data)).tolist()}
        (folder / "cifar-10-batches-py" / f"data_batch_{i}").write_bytes(
            pickle.dumps(batch)
        )
    meta = {"label_names": [str(i) for i in range(10)]}
    (folder / "cifar-10-batches-py" / "batches.meta").write_bytes(pickle.dumps(meta))
    return folder


if __name__ == "__main__":
    main()
