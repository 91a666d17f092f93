"""Measure how fast imagenet trains, on a GPU or the CPU, against the usual way.

The usual way is torchvision's ImageFolder with v2 transforms on PIL images, float32,
and `.item()` in every step. The limit is forward, backward and step of the example's
model on one batch in memory. `taskset --cpu-list 0-3` before it tells how far four
cores reach.
"""

import itertools
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from imagenet_input import (
    image_folder,
    imagenet_parser,
    list_epoch,
    load,
    stage,
    usual_loader,
)
from side_by_side import (
    build_optimizer,
    compare,
    distribute,
    load_example,
    parse_args,
    take_turns,
    train_as_usual,
    train_plainly,
)


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
        staged = load(example, copied, args)
        tree = image_folder(staged.images, scratch / "tree", args)
        args.samples = len(staged)
        # As main.py does, before CUDA and NCCL are up.
        loader = example.build_loader(staged, staged, args.workers)
        settings = parse_args(
            example,
            f"--model={args.model}",
            f"--batch-size={args.batch_size}",
            "--timeout=86400",  # nothing is saved, and nothing is called a hang
            "--save-minutes=86400",
            f"--checkpoint-dir={scratch / 'run'}",
        )
        example.set_ranks()
        device = example.setup_distributed()
        watch = example.Watch(settings)
        recipe = {"samples": len(staged), "batch_size": args.batch_size}
        run = example.begin_run(settings, recipe, args.batch_size)
        classes, steps = len(staged.images.classes), len(staged) // args.batch_size

        def make_model():
            model = example.build_model(settings, classes)
            model = model.to(device, memory_format=torch.channels_last)
            return model, *build_optimizer(example, model, args.batch_size, steps)

        def shipped():
            model, optimizer, scheduler = make_model()
            half = example.find_dtype(device) == torch.float16
            scaler = torch.amp.GradScaler(enabled=half)
            run.add(model=model, optimizer=optimizer)
            run.add(scheduler=scheduler, scaler=scaler)
            ddp_model = distribute(model)
            watch.begin(run, ddp_model, steps)
            epochs = run.loop(range(10**6))
            order = itertools.cycle(list_epoch(staged, args.batch_size))
            stream = example.load_batches(loader, order, device)

            def turn() -> None:
                next(epochs)
                batches = run.loop(
                    lambda done: watch.batches(itertools.islice(stream, steps))
                )
                example.train(ddp_model, optimizer, scheduler, scaler, run, batches)

            return turn

        pil = usual_loader(tree, args, pin_memory=device.type == "cuda")
        usual_model, usual_sgd, _ = make_model()
        images = torch.randn(args.batch_size, 3, 224, 224, device=device)
        images = images.contiguous(memory_format=torch.channels_last)
        labels = torch.randint(classes, (args.batch_size,), device=device)
        bare_model, bare_sgd, _ = make_model()
        variants = {
            "ImageFolder, v2 on PIL, float32, .item()": lambda: train_as_usual(
                usual_model, usual_sgd, pil
            ),
            "imagenet/main.py": shipped(),
            "forward, backward, step on one batch": lambda: train_plainly(
                bare_model, bare_sgd, [(images, labels)] * steps
            ),
        }
        seconds = take_turns(variants, args.rounds)
    title = f"{args.model}, batches of {args.batch_size}, {args.workers} workers"
    compare(f"Training a {title}", seconds, steps * args.batch_size, "images/s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
