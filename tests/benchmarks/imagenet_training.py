"""Measure how fast imagenet trains, on a GPU or the CPU, against the usual way.

The usual way is torchvision's ImageFolder with v2 transforms on PIL images, float32,
and `.item()` in every step. The limit is forward, backward and step of the example's
model on one batch in memory. Between them: the example on staged and on made-up
images, and what it would be if the device itself decoded the JPEGs.
`taskset --cpu-list 0-3` before it tells how far four cores reach.
"""

import argparse
import io
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from imagenet_input import build_scratch, data, image_folder, options, order
from PIL import Image
from side_by_side import (
    argument_parser,
    distribute,
    load_example,
    print_table,
    take_turns,
)
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision.io import decode_jpeg

sys.path.insert(0, str(Path(__file__).parents[2] / "imagenet"))
import checkpoint
import watch


def parse_args() -> argparse.Namespace:
    parser = argument_parser(__doc__, rounds=3)
    add = parser.add_argument
    add(
        "--source",
        type=Path,
        help="folder with ImageNet's three archives; without it, made-up ones",
    )
    add(
        "--samples",
        type=int,
        default=12800,
        help="images in a turn, of those that there are",
    )
    add("--model", default="resnet50", help="one of torchvision's")
    add("--batch-size", type=int, default=256)
    add("--workers", type=int, default=8, help="worker processes")
    add(
        "--scratch",
        type=Path,
        help="folder for what it stages, which stays there for the next time",
    )
    add(
        "--compile",
        action="store_true",
        help="compile the model of the example, and that of the limit",
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    example = load_example("imagenet")
    example.set_ranks()
    with tempfile.TemporaryDirectory() as temporary:
        scratch = args.scratch or Path(temporary)
        build_scratch(scratch, args, {"copied": [], "tree": ["--extract"]})
        variants = build_variants(example, scratch, args)
        rates = take_turns(variants, args.rounds)
    usual, *_, limit = variants
    title = (
        f"Training a {args.model}, batches of {args.batch_size}, {args.workers} workers"
    )
    print_table(title, "images/s", rates, usual, limit)
    dist.destroy_process_group()


def build_variants(example, scratch: Path, args: argparse.Namespace) -> dict:
    """Return a function for each way: it does some steps, and counts the images."""
    settings = options(scratch / "copied", args)
    for name, value in vars(args).items():
        setattr(settings, name, value)
    settings.learning_rate, settings.weight_decay, settings.epochs = 0.0, 0.0, 10**6
    settings.save_minutes, settings.save_steps = 10**6, 10**6
    settings.profile = False
    settings.wandb, settings.timeout = None, 24 * 60 * 60
    staged, _ = example.load_data(settings)
    settings.limit_train_samples = len(staged)  # for made-up ones: as many
    settings.synthetic = True
    synthetic, _ = example.load_data(settings)
    # As main.py does, before CUDA and NCCL are up.
    staged_loader = example.build_loader(staged, args.workers)
    synthetic_loader = example.build_loader(synthetic, args.workers)
    device = example.setup_distributed(settings.timeout)
    watching = watch.Watch(scratch, device, settings, 0)
    classes, steps = len(staged.images.classes), len(staged) // args.batch_size

    def make_model():
        model = example.build_model(settings, classes).to(
            device, memory_format=torch.channels_last
        )
        if args.compile:
            model.compile()
        return model

    def shipped(loader):
        model = make_model()
        optimizer, scheduler = example.build_optimizer(
            model, settings, args.batch_size, steps
        )
        run = checkpoint.Run(model, optimizer, scheduler, {}, args.batch_size)
        ddp_model = distribute(model)
        # An epoch ends with a checkpoint. A turn is much shorter than an epoch,
        # so this one does not.
        no_checkpoints = argparse.Namespace(
            save=lambda run: None, saved_at=time.monotonic()
        )

        def turn() -> int:
            batches = example.training_batches(loader, run, device)
            batches = watching.batches(batches)
            bar = example.progress(run.epoch, steps, run.global_batch_size)
            example.train(
                ddp_model, run, batches, bar, no_checkpoints, watching, settings
            )
            run.start_epoch(run.epoch + 1)
            return done()

        return turn

    def plain(loader, autocast: bool, prepare):
        """Train as most scripts do; `prepare` makes float32 of what is loaded."""
        model = make_model()
        sgd, _ = example.build_optimizer(model, settings, args.batch_size, steps)

        def turn() -> int:
            model.train()
            loss_sum, correct = 0.0, 0
            for images, labels in loader:
                images, labels = prepare(images), labels.to(device)
                with torch.autocast(
                    device.type,
                    torch.bfloat16,
                    enabled=autocast and device.type == "cuda",
                ):
                    outputs = model(images)
                    loss = F.cross_entropy(outputs, labels, label_smoothing=0.1)
                sgd.zero_grad()
                loss.backward()
                sgd.step()
                loss_sum += loss.item() * len(labels)
                correct += (outputs.argmax(1) == labels).sum().item()
            return done()

        return turn

    def decode_there(encoded: tuple[torch.Tensor, list[int]]) -> torch.Tensor:
        content, sizes = encoded
        images = decode_jpeg(list(content.split(sizes)), mode="RGB", device=device)
        if device.type == "cuda":  # where PyTorch does not resize bytes
            images = [image.float() for image in images]
        return example.normalize(
            torch.stack([staged.crop_and_flip(image) for image in images])
        )

    tree = image_folder(scratch / "tree")
    make_loader = {"batch_size": args.batch_size, "shuffle": True, "drop_last": True}
    make_loader |= {"num_workers": args.workers, "persistent_workers": args.workers > 0}
    make_loader["pin_memory"] = device.type == "cuda"
    pil = DataLoader(Subset(tree, order(tree, args)), **make_loader)
    encoded = DataLoader(Encoded(staged), collate_fn=as_one, **make_loader)

    bare_model = make_model()
    bare_sgd, _ = example.build_optimizer(bare_model, settings, args.batch_size, steps)
    batch = torch.randint(
        256, (args.batch_size, 3, 224, 224), dtype=torch.uint8, device=device
    )
    batch, labels = (
        example.normalize(batch),
        torch.randint(classes, (args.batch_size,), device=device),
    )

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
        "ImageFolder, v2 on PIL, float32, .item()": plain(
            pil, False, lambda images: images.to(device)
        ),
        "imagenet/main.py": shipped(staged_loader),
        f"no DDP, .item(), JPEGs decoded on the {device.type}": plain(
            encoded, True, decode_there
        ),
        "imagenet/main.py --synthetic": shipped(synthetic_loader),
        "forward, backward, step on one batch": bare,
    }


class Encoded(Dataset):
    """The bytes of staged JPEGs, and their classes."""

    def __init__(self, chosen: data.Augmented):
        self.images, self.chosen = chosen.images, chosen.chosen

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        while True:
            i = self.chosen[number]
            content = self.images.read_bytes(i)
            image = Image.open(io.BytesIO(content.numpy()))
            if image.format == "JPEG" and image.mode in ("RGB", "L"):
                return content, int(self.images.labels[i])
            # A GPU decodes no others; ImageNet has 23 of them.
            number = (number + 1) % len(self)


def as_one(
    samples: list[tuple[torch.Tensor, int]],
) -> tuple[tuple[torch.Tensor, list[int]], torch.Tensor]:
    """Return the bytes of all images in a row, with their numbers, and the labels.

    Each tensor that comes from a worker takes a file descriptor.
    """
    contents, labels = zip(*samples, strict=True)
    return (torch.cat(contents), [len(content) for content in contents]), torch.tensor(
        labels
    )


if __name__ == "__main__":
    main()
