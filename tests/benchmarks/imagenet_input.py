"""Measure how fast imagenet makes images to train on, against the usual way.

The usual way is torchvision's ImageFolder, which hands out PIL images, and its v2
transforms, which end in float32. imagenet's are bytes until main.py normalizes them, on
its GPU; a variant does that, too. The limit is decoding alone. First in one process,
then through worker processes, there also with the images that
`prepare_data.py --resize 256` has made smaller.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from side_by_side import argument_parser, load_example, print_table, take_turns
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "imagenet"))
import checkpoint
import data
from drawn_imagenet import draw_imagenet

PREPARE_DATA = Path(__file__).parents[2] / "imagenet" / "prepare_data.py"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def parse_args() -> argparse.Namespace:
    parser = argument_parser(__doc__, rounds=5)
    add = parser.add_argument
    add(
        "--source",
        type=Path,
        help="folder with ImageNet's three archives; without it, made-up ones",
    )
    add("--samples", type=int, default=600, help="images in a turn")
    add("--batch-size", type=int, default=50)
    add("--workers", type=int, default=2, help="worker processes")
    add(
        "--scratch",
        type=Path,
        help="folder for what it stages, which stays there for the next time",
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    # With a GPU, one of the ways would copy to pinned memory, too.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    dist.init_process_group("gloo")
    normalize = load_example("imagenet").normalize
    with tempfile.TemporaryDirectory() as temporary:
        scratch = args.scratch or Path(temporary)
        forms = {"copied": [], "tree": ["--extract"], "small": ["--resize=256"]}
        build_scratch(scratch, args, forms)
        one = {
            "ImageFolder, v2 on PIL, float32": usual_alone(scratch / "tree", args),
            "imagenet/data.py": shipped_alone(scratch / "copied", args),
            "imagenet/data.py, normalized on this CPU": shipped_alone(
                scratch / "copied", args, normalize
            ),
            "decoding alone": decoding_alone(scratch / "copied", args),
        }
        usual_way, *_, limit = one
        print_table(
            "One process", "images/s", take_turns(one, args.rounds), usual_way, limit
        )
        several = {
            "ImageFolder, v2 on PIL, float32": usual(scratch / "tree", args),
            "imagenet/data.py": shipped(scratch / "copied", args),
            "imagenet/data.py, normalized on this CPU": shipped(
                scratch / "copied", args, normalize
            ),
            "imagenet/data.py, after --resize 256": shipped(scratch / "small", args),
        }
        title = f"{args.workers} workers, batches of {args.batch_size}"
        print_table(title, "images/s", take_turns(several, args.rounds), usual_way)
    dist.destroy_process_group()


def build_scratch(
    scratch: Path, args: argparse.Namespace, forms: dict[str, list[str]]
) -> None:
    """Stage the images, or made-up ones, in folders of `scratch`.

    Each of `forms` says with what flags.
    """
    forms = {
        folder: flags
        for folder, flags in forms.items()
        if not (scratch / folder / "done").exists()
    }
    source = args.source
    if forms and source is None:
        images = min(80, args.samples // 10)
        source = draw_imagenet(scratch / "drawn", 10, images, 5, resolution=400).source
    for folder, flags in forms.items():
        command = [
            sys.executable,
            PREPARE_DATA,
            f"--source={source}",
            f"--data-dir={scratch / folder}",
        ]
        subprocess.run([*command, *flags], check=True, stdout=subprocess.DEVNULL)
        (scratch / folder / "done").touch()


def options(data_dir: Path, args: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments of main.py that its loaders look at."""
    return argparse.Namespace(
        data_dir=data_dir,
        synthetic=False,
        image_size=224,
        seed=0,
        limit_train_samples=args.samples,
        limit_valid_samples=None,
    )


def image_folder(tree: Path) -> ImageFolder:
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(224),
            v2.RandomHorizontalFlip(),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )
    return ImageFolder(tree / "train", transform)


def order(dataset, args: argparse.Namespace) -> list[int]:
    """Return the images of a turn: not those of one class only."""
    return data.draw_epoch(len(dataset), 0, 1)[: args.samples].tolist()


def usual_alone(tree: Path, args: argparse.Namespace):
    dataset = image_folder(tree)
    indices = order(dataset, args)

    def turn() -> int:
        for index in indices:
            dataset[index]
        return len(indices)

    return turn


def shipped_alone(staged: Path, args: argparse.Namespace, then=lambda images: images):
    dataset, _ = data.load_data(options(staged, args))

    def turn() -> int:
        for index in range(len(dataset)):
            then(dataset[1, index][0].unsqueeze(0))
        return len(dataset)

    return turn


def decoding_alone(staged: Path, args: argparse.Namespace):
    dataset, _ = data.load_data(options(staged, args))

    def turn() -> int:
        for index in dataset.chosen:
            dataset.images.read(index)
        return len(dataset)

    return turn


def usual(tree: Path, args: argparse.Namespace):
    dataset = image_folder(tree)
    loader = DataLoader(
        torch.utils.data.Subset(dataset, order(dataset, args)),
        args.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=args.workers,
        persistent_workers=True,
    )

    def turn() -> int:
        return sum(len(labels) for _, labels in loader)

    return turn


def shipped(staged: Path, args: argparse.Namespace, then=lambda images: images):
    dataset, _ = data.load_data(options(staged, args))
    loader = data.build_loader(dataset, args.workers)
    run = checkpoint.Run(None, None, None, {}, global_batch_size=args.batch_size)

    def turn() -> int:
        batches = data.training_batches(loader, run, torch.device("cpu"))
        return sum(len(then(images)) for images, _ in batches)

    return turn


if __name__ == "__main__":
    main()
