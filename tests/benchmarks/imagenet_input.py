"""Measure how fast imagenet makes images to train on, against the usual way.

The usual way is torchvision's ImageFolder, which hands out PIL images, and its v2
transforms, which end in float32. imagenet's are bytes until main.py normalizes them, on
its GPU; a variant does that, too. The limit is decoding alone. First in one process,
then through worker processes, there also with the images that
`prepare_data.py --resize 256` has made smaller.
"""

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from side_by_side import (
    argument_parser,
    compare,
    draw_imagenet,
    load_example,
    parse_args,
    prepare_data,
    take_turns,
)
from torch.utils.data import DataLoader, Subset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2


def imagenet_parser(doc: str, **numbers: int) -> argparse.ArgumentParser:
    parser = argument_parser(doc, **numbers)
    add = parser.add_argument
    add("--source", type=Path, help="has ImageNet's archives; else, made-up ones")
    add("--scratch", help="folder for what it stages, which stays for the next time")
    return parser


def main() -> None:
    # Images in a turn, of those that there are; images in a step; worker processes.
    parser = imagenet_parser(__doc__, rounds=5, samples=600, batch_size=50, workers=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    # With a GPU, one of the ways would copy to pinned memory, too.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    example = load_example("imagenet")
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(args.scratch or temporary)
        copied = load(example, stage(args, scratch, "copied"), args)
        small = load(example, stage(args, scratch, "small", "--resize=256"), args)
        tree = image_folder(copied.images, scratch / "tree", args)
        loaders = {
            part: example.build_loader(part, part, args.workers)
            for part in (copied, small)
        }
        loader = usual_loader(tree, args)
        example.set_ranks()
        device = example.setup_distributed()

        def one_by_one():
            return (copied[1, i] for i in range(len(copied)))

        def shipped(dataset, then=None) -> None:
            batches = list_epoch(dataset, args.batch_size)
            go_through(example.load_batches(loaders[dataset], batches, device), then)

        one = {
            "ImageFolder, v2 on PIL, float32": lambda: go_through(tree),
            "imagenet/data.py": lambda: go_through(one_by_one()),
            "imagenet/data.py, normalized on this CPU": lambda: go_through(
                one_by_one(), lambda image: example.normalize(image[None])
            ),
            "decoding alone": lambda: go_through(
                (copied.images.read(i), None) for i in copied.chosen
            ),
        }
        several = {
            "ImageFolder, v2 on PIL, float32": lambda: go_through(loader),
            "imagenet/data.py": lambda: shipped(copied),
            "imagenet/data.py, normalized on this CPU": lambda: shipped(
                copied, example.normalize
            ),
            "imagenet/data.py, after --resize 256": lambda: shipped(small),
        }
        seconds = take_turns(one, args.rounds)
        compare("One process", seconds, len(copied), "images/s")
        seconds = take_turns(several, args.rounds)
        epochs = 4 * list_epoch(copied, args.batch_size)
        streams = {
            "each in a loop of its own": lambda: [shipped(copied) for _ in range(4)],
            "in one stream, as main.py does it": lambda: go_through(
                example.load_batches(loaders[copied], epochs, device)
            ),
        }
        in_streams = take_turns(streams, args.rounds)
    title = f"{args.workers} workers, batches of {args.batch_size}"
    images = len(copied) // args.batch_size * args.batch_size
    compare(title, seconds, images, "images/s", has_limit=False)
    title = f"Four epochs of {images // args.batch_size} batches"
    compare(title, in_streams, 4 * images, "images/s", has_limit=False)
    dist.destroy_process_group()


def list_epoch(dataset, batch_size: int) -> list[list[tuple[int, int]]]:
    """Return an epoch's whole batches, of (epoch, index)."""
    steps = len(dataset) // batch_size
    order = np.random.default_rng(0).permutation(len(dataset))[: steps * batch_size]
    return [[(1, i) for i in batch] for batch in order.reshape(steps, -1).tolist()]


def go_through(samples, then=None) -> None:
    for images, _ in samples:
        if then:
            then(images)


def stage(args: argparse.Namespace, scratch: Path, name: str, *flags: str) -> Path:
    """Return a folder with the images, or made-up ones, staged with these flags."""
    source = args.source or scratch / "drawn"
    if not source.exists():
        draw_imagenet(source, 10, min(80, args.samples // 10), 5, resolution=400)
    prepare_data(source, scratch / name, *flags)
    return scratch / name


def load(example, data_dir: Path, args: argparse.Namespace):
    """Return the training set of main.py."""
    flags = f"--data-dir={data_dir}", f"--limit-train-samples={args.samples}"
    return example.load_data(parse_args(example, *flags))[0]


def usual_loader(dataset, args: argparse.Namespace, **options) -> DataLoader:
    options |= {"shuffle": True, "drop_last": True, "persistent_workers": True}
    return DataLoader(dataset, args.batch_size, num_workers=args.workers, **options)


def image_folder(images, tree: Path, args: argparse.Namespace) -> Subset:
    """Return staged images as torchvision reads them, from a tree of class folders."""
    for i in range(len(images)):
        path = tree / images.index["name"][i].decode()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(images.read_bytes(i).numpy())
    to_float = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    normalize = v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    augment = [v2.RandomResizedCrop(224), v2.RandomHorizontalFlip()]
    dataset = ImageFolder(tree, v2.Compose([*augment, *to_float, normalize]))
    # Not those of one class only.
    order = np.random.default_rng(0).permutation(len(dataset))
    return Subset(dataset, order[: args.samples])


if __name__ == "__main__":
    main()
