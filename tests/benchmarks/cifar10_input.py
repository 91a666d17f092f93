"""Measure how fast single_gpu makes batches of CIFAR-10, against the usual way.

The usual way is torchvision's data set behind two worker processes, which hands out PIL
images. The limit is the loop of main.py without augmentation. A network that costs
nothing takes each batch, in every variant.
"""

import argparse
import contextlib
import tempfile
from pathlib import Path

import torch
from side_by_side import (
    add_up,
    argument_parser,
    build_optimizer,
    compare,
    draw_cifar10,
    load_example,
    pad,
    shipped,
    take_turns,
    train_plainly,
)
from torch import nn
from torch.utils.data import DataLoader, Subset
from torchvision import transforms
from torchvision.datasets import CIFAR10, cifar

AUGMENT = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]


def cifar10_parser(doc: str, rounds: int) -> argparse.ArgumentParser:
    # Images in a turn, and in a step.
    parser = argument_parser(doc, rounds, samples=45000, batch_size=256)
    parser.add_argument(
        "--data-dir", help="has cifar-10-batches-py; without it, made-up images"
    )
    return parser


class FreeNetwork(nn.Module):
    """A network that costs nothing: the same logits for every image."""

    def __init__(self):
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(10))

    def forward(self, images):
        return self.logits.expand(len(images), 10)


def main() -> None:
    args = cifar10_parser(__doc__, rounds=5).parse_args()
    torch.set_num_threads(1)
    example = load_example("single_gpu")
    steps = args.samples // args.batch_size
    network = FreeNetwork()
    optimizer, _ = build_optimizer(example, network, args.batch_size, steps)

    def limit() -> None:
        metrics = torch.zeros(3, dtype=torch.float64)
        chosen = torch.randperm(len(images)).split(args.batch_size)[:steps]
        batches = ((example.normalize(images[i]), labels[i]) for i in chosen)

        def measure(logits, labels, loss) -> None:
            add_up(metrics, logits, labels, loss)

        train_plainly(network, optimizer, batches, read=measure)

    with cifar10_folder(args) as folder:
        images, labels = read(folder, args.samples)
        data = pad(example, images, labels)
        bare, augmented = (usual_loader(folder, args, a) for a in ([], AUGMENT))
        variants = {
            "torchvision, no augmentation": lambda: train_plainly(
                network, optimizer, bare
            ),
            "torchvision, crop and flip": lambda: train_plainly(
                network, optimizer, augmented
            ),
            "single_gpu/main.py, crop and flip": shipped(
                example, network, data, args.batch_size
            ),
            "indexing and normalizing, no augmentation": limit,
        }
        seconds = take_turns(variants, args.rounds)
    images_in_a_turn = steps * args.batch_size
    compare("CIFAR-10: batches for training", seconds, images_in_a_turn, "images/s")


def usual_loader(folder, args: argparse.Namespace, augment: list, **options):
    """Return torchvision's data set behind two worker processes."""
    normalize = transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    transform = transforms.Compose([*augment, transforms.ToTensor(), normalize])
    dataset = Subset(CIFAR10(folder, transform=transform), range(args.samples))
    options |= {"shuffle": True, "drop_last": True, "num_workers": 2}
    return DataLoader(dataset, args.batch_size, **options)


def read(folder, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    data = CIFAR10(folder)
    images = torch.from_numpy(data.data)
    return images[:samples], torch.tensor(data.targets)[:samples]


@contextlib.contextmanager
def cifar10_folder(args: argparse.Namespace):
    """Yield --data-dir, or a folder with CIFAR-10's training files, made up."""
    # Made-up images have no published checksum.
    cifar.check_integrity = lambda *_: True
    with tempfile.TemporaryDirectory() as folder:
        if not args.data_dir:
            draw_cifar10(Path(folder), args.samples + 5, test=0)
        yield args.data_dir or folder


if __name__ == "__main__":
    main()
