"""Measure how fast single_gpu trains, on a GPU or the CPU, against the usual way.

The usual way is torchvision's data set with its augmentation behind worker processes,
float32, and `.item()` in every step. The limit is forward, backward and step of the
example's model on one batch in memory. On a GPU, there is the example with CUDA graphs,
too: then the CPU starts many kernels at once.
"""

import torch
from cifar10_input import AUGMENT, cifar10_folder, cifar10_parser, read, usual_loader
from side_by_side import (
    build_optimizer,
    compare,
    load_example,
    pad,
    shipped,
    take_turns,
    train_as_usual,
    train_plainly,
)


def main() -> None:
    args = cifar10_parser(__doc__, rounds=3).parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    example = load_example("single_gpu")
    steps = args.samples // args.batch_size
    usual_model = example.build_model().to(device)
    usual_sgd = torch.optim.SGD(usual_model.parameters(), lr=0.0, momentum=0.9)
    model, graphs_model, bare_model = (
        example.build_model().to(device, memory_format=torch.channels_last)
        for _ in range(3)
    )
    graphs_model.compile(mode="reduce-overhead")
    bare_sgd, _ = build_optimizer(example, bare_model, args.batch_size, steps)

    with cifar10_folder(args) as folder:
        images, labels = (part.to(device) for part in read(folder, args.samples))
        data = pad(example, images, labels)
        one_batch = slice(args.batch_size)
        batch = example.normalize(images[one_batch]), labels[one_batch]
        loader = usual_loader(
            folder,
            args,
            AUGMENT,
            pin_memory=device.type == "cuda",
            persistent_workers=True,
        )

        variants = {
            "torchvision, 2 workers, float32, .item()": lambda: train_as_usual(
                usual_model, usual_sgd, loader
            ),
            "single_gpu/main.py": shipped(example, model, data, args.batch_size),
        }
        if device.type == "cuda":
            variants["single_gpu/main.py with CUDA graphs"] = shipped(
                example, graphs_model, data, args.batch_size
            )
        variants["forward, backward, step on one batch"] = lambda: train_plainly(
            bare_model, bare_sgd, [batch] * steps
        )
        seconds = take_turns(variants, args.rounds)
    title = f"Training a ResNet-18 on CIFAR-10, batches of {args.batch_size}"
    compare(title, seconds, steps * args.batch_size, "images/s")


if __name__ == "__main__":
    main()
