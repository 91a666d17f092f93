"""Measure how fast imagenet trains, on a GPU or the CPU, against the usual way.

The usual way is torchvision's ImageFolder with v2 transforms on PIL images, float32,
and `.item()` in every step. The limit is forward, backward and step of the example's
model on one batch in memory. Between them: the example on staged and on made-up
images, and what it would be if the device itself decoded the JPEGs.
`taskset --cpu-list 0-3` before it tells how far four cores reach.
"""

import io
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from imagenet_input import image_folder, imagenet_parser, load, stage, usual_loader
from PIL import Image
from side_by_side import (
    build_optimizer,
    compare,
    distribute,
    load_example,
    parse_args,
    read_items,
    take_turns,
    train_plainly,
)
from torch.utils.data import Dataset
from torchvision.io import decode_jpeg


def main() -> None:
    parser = imagenet_parser(
        __doc__, rounds=3, samples=12800, batch_size=256, workers=8
    )
    parser.add_argument("--model", default="resnet50", help="one of torchvision's")
    args = parser.parse_args()
    example = load_example("imagenet")
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(args.scratch or temporary)
        copied = stage(args, scratch, "copied")
        tree = image_folder(stage(args, scratch, "tree", "--extract"), args)
        staged = load(example, copied, args)
        args.samples = len(staged)
        synthetic = load(example, copied, args, "--synthetic")
        # As main.py does, before CUDA and NCCL are up.
        staged_loader, synthetic_loader = (
            example.build_loader(part, args.workers) for part in (staged, synthetic)
        )
        settings = parse_args(
            example,
            f"--model={args.model}",
            f"--batch-size={args.batch_size}",
            "--timeout=86400",  # nothing is saved, and nothing is called a hang
            "--save-minutes=86400",
        )
        example.set_ranks()
        device = example.setup_distributed(settings.timeout)
        watch = example.Watch(scratch, device, settings, 0)
        classes, steps = len(staged.images.classes), len(staged) // args.batch_size

        def make_model():
            model = example.build_model(settings, classes)
            model = model.to(device, memory_format=torch.channels_last)
            return model, *build_optimizer(example, model, args.batch_size, steps)

        def shipped(loader):
            model, optimizer, scheduler = make_model()
            run = example.Run(model, optimizer, scheduler, {}, args.batch_size)
            ddp_model = distribute(model)
            # An epoch ends with a checkpoint. A turn is much shorter than an epoch, so
            # this one does not.
            no_checkpoints = SimpleNamespace(
                save=lambda run: None, saved_at=time.monotonic()
            )

            def turn() -> None:
                batches = example.training_batches(loader, run, device)
                example.train(
                    ddp_model,
                    run,
                    watch.batches(batches),
                    example.progress(1, steps, args.batch_size),
                    no_checkpoints,
                    watch,
                    settings,
                )
                run.start_epoch(run.epoch + 1)

            return turn

        def plain(loader, to_device, bfloat16=True):
            model, optimizer, _ = make_model()

            def turn() -> None:
                batches = (to_device(*batch) for batch in loader)
                train_plainly(model, optimizer, batches, bfloat16, read_items)

            return turn

        def copy(images, labels):
            return images.to(device), labels.to(device)

        def decode(content, sizes, labels):
            images = decode_jpeg(list(content.split(sizes)), mode="RGB", device=device)
            if on_gpu:  # where PyTorch does not resize bytes
                images = [image.float() for image in images]
            images = torch.stack([staged.crop_and_flip(image) for image in images])
            return example.normalize(images), labels.to(device)

        on_gpu = device.type == "cuda"
        pil = usual_loader(tree, args, pin_memory=on_gpu)
        encoded = usual_loader(
            Encoded(staged), args, pin_memory=on_gpu, collate_fn=as_one
        )
        images = torch.randn(args.batch_size, 3, 224, 224, device=device)
        images = images.contiguous(memory_format=torch.channels_last)
        labels = torch.randint(classes, (args.batch_size,), device=device)
        bare_model, bare_sgd, _ = make_model()
        variants = {
            "ImageFolder, v2 on PIL, float32, .item()": plain(
                pil, copy, bfloat16=False
            ),
            "imagenet/main.py": shipped(staged_loader),
            f"no DDP, .item(), JPEGs decoded on the {device.type}": plain(
                encoded, decode
            ),
            "imagenet/main.py --synthetic": shipped(synthetic_loader),
            "forward, backward, step on one batch": lambda: train_plainly(
                bare_model, bare_sgd, [(images, labels)] * steps
            ),
        }
        seconds = take_turns(variants, args.rounds)
    title = f"{args.model}, batches of {args.batch_size}, {args.workers} workers"
    compare(f"Training a {title}", seconds, steps * args.batch_size, "images/s")
    dist.destroy_process_group()


class Encoded(Dataset):
    """The bytes of staged JPEGs, and their classes."""

    def __init__(self, staged):
        self.images, self.chosen = staged.images, staged.chosen

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, number: int):
        i = self.chosen[number]
        content = self.images.read_bytes(i)
        image = Image.open(io.BytesIO(content.numpy()))
        # A GPU decodes no others; ImageNet has 23 of them.
        if image.format != "JPEG" or image.mode not in ("RGB", "L"):
            return self[(number + 1) % len(self)]
        return content, int(self.images.labels[i])


def as_one(samples):
    """Return the bytes of all images in a row, their numbers, and the labels.

    Each tensor that comes from a worker takes a file descriptor.
    """
    contents, labels = zip(*samples, strict=True)
    sizes = [len(content) for content in contents]
    return torch.cat(contents), sizes, torch.tensor(labels)


if __name__ == "__main__":
    main()
