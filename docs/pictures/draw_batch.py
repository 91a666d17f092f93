"""Write batch_cifar10.svg and batch_imagenet.svg: a batch on its way to the model.

The pictures take the colour scheme of the page that shows them,
as that of draw_ranks.py does.
"""

from pathlib import Path
from typing import NamedTuple

from draw_imagenet import arrow_right, picture
from draw_ranks import arrow, arrow_head, box, path, text

# In pixels. A row has room for five stages.
LEFT, STAGE_WIDTH, STAGE_HEIGHT, STEP = 36, 160, 112, 182


class Stage(NamedTuple):
    kind: str  # a box of draw_ranks.py
    name: str
    words: tuple[str, str]
    result: tuple[str, str]  # what comes out: type and shape


def main() -> None:
    for name, draw in PICTURES.items():
        Path(__file__).with_name(name).write_text(draw(), encoding="utf-8")


def draw_cifar10() -> str:
    """All on the GPU; only the random numbers come from the CPU."""
    top, numbers_y = 98, 254
    stages = [
        Stage(
            "disk",
            "images",
            ("all of them, moved", "there once, as bytes"),
            ("uint8", "45000, 32, 32, 3"),
        ),
        Stage(
            "gpu",
            "load_data",
            ("pads them, once, with", "4 pixels on each side"),
            ("uint8", "45000, 40, 40, 3"),
        ),
        Stage(
            "gpu",
            "training_batches",
            ("32 rows, 32 columns", "of each; flips some"),
            ("uint8", "256, 32, 32, 3"),
        ),
        Stage(
            "gpu",
            "normalize",
            ("mean 0, deviation 1,", "channels_last"),
            ("float32", "256, 3, 32, 32"),
        ),
        Stage(
            "gpu",
            "model",
            ("bfloat16, if the GPU", "computes it itself"),
            ("logits", "256, 10"),
        ),
    ]
    middle = LEFT + 2 * STEP + STAGE_WIDTH / 2
    shapes = [
        box("node", 24, 56, 912, 166),
        text("", LEFT, 82, "in the GPU's memory"),
        *draw_row(stages, 0, top),
        box("address", LEFT + STEP, numbers_y, 2 * STEP + STAGE_WIDTH, 62),
        text(
            "center",
            middle,
            numbers_y + 25,
            "draw_epoch, on the CPU, once an epoch: order, top, left, flip",
        ),
        text(
            "small center",
            middle,
            numbers_y + 47,
            "they depend only on seed, epoch and sample",
        ),
        arrow("address", middle, numbers_y, top + STAGE_HEIGHT),
    ]
    return picture(336, "The path of a batch in single_gpu", *shapes)


def draw_imagenet() -> str:
    """Bytes until the end: read and decoded in workers, normalized on the GPU."""
    tops = (98, 290)
    reading = [
        Stage(
            "disk",
            "…_img_train.tar",
            ("on the node's disk,", "with its index"),
            ("JPEGs", "one after another"),
        ),
        Stage(
            "task",
            "read",
            ("at the offset that", "the index has"),
            ("JPEG", "an image's bytes"),
        ),
        Stage(
            "task",
            "decode",
            ("torchvision's", "decode_image"),
            ("uint8", "3, height, width"),
        ),
        Stage(
            "task",
            "crop, resize, flip",
            ("from seed, epoch and", "index of the image"),
            ("uint8", "3, 224, 224"),
        ),
        Stage(
            "task",
            "collate",
            ("DataLoader: 256", "images in /dev/shm"),
            ("uint8", "256, 3, 224, 224"),
        ),
    ]
    training = [
        Stage(
            "address",
            "pin",
            ("by the rank: memory", "that stays put"),
            ("uint8", "256, 3, 224, 224"),
        ),
        Stage(
            "gpu",
            "copy to the GPU",
            ("the CPU does not wait", "for it (non_blocking)"),
            ("uint8", "256, 3, 224, 224"),
        ),
        Stage(
            "gpu",
            "normalize",
            ("mean 0, deviation 1,", "channels_last"),
            ("float32", "256, 3, 224, 224"),
        ),
        Stage(
            "gpu",
            "model",
            ("bfloat16, if the GPU", "computes it itself"),
            ("logits", "256, 1000"),
        ),
    ]
    end_x, start_x = (LEFT + slot * STEP + STAGE_WIDTH / 2 for slot in (4, 1))
    between = tops[0] + STAGE_HEIGHT + 28
    shapes = [
        box("node", LEFT + STEP - 12, 56, 936 - LEFT - STEP + 12, 166),
        text(
            "",
            LEFT + STEP,
            82,
            "a worker, one of 8 that the rank has forked before CUDA",
        ),
        *draw_row(reading, 0, tops[0]),
        path(
            "task line",
            f"M{end_x} {tops[0] + STAGE_HEIGHT + 2} V{between} H{start_x} "
            f"V{tops[1] - 2} {arrow_head(start_x, tops[1] - 2, 1)}",
        ),
        box("node", LEFT + 2 * STEP - 12, 250, 936 - LEFT - 2 * STEP + 12, 168),
        text("", LEFT + 2 * STEP, 274, "the rank's GPU"),
        *draw_row(training, 1, tops[1]),
        text("small", LEFT, tops[1] + 24, "A batch of 256 is"),
        text("small", LEFT, tops[1] + 44, "39 MB as uint8 and"),
        text("small", LEFT, tops[1] + 64, "154 MB as float32."),
    ]
    return picture(438, "The path of a batch in imagenet", *shapes)


def draw_row(stages: list[Stage], slot: int, y: int) -> list[str]:
    """Return stages with arrows between them, the first one in this slot of the row."""
    shapes = []
    for i, stage in enumerate(stages, start=slot):
        x = LEFT + i * STEP
        center = x + STAGE_WIDTH / 2
        shapes += [
            box(stage.kind, x, y, STAGE_WIDTH, STAGE_HEIGHT),
            text(
                "center",
                center,
                y + 24,
                f'<tspan font-size="15px" font-weight="bold">{stage.name}</tspan>',
            ),
            text("small center", center, y + 46, stage.words[0]),
            text("small center", center, y + 62, stage.words[1]),
            text("small center", center, y + 86, stage.result[0]),
            text("small name center", center, y + 102, stage.result[1]),
        ]
        if i > slot:
            shapes.append(
                arrow_right("task", x - STEP + STAGE_WIDTH, x, y + STAGE_HEIGHT / 2)
            )
    return shapes


PICTURES = {"batch_cifar10.svg": draw_cifar10, "batch_imagenet.svg": draw_imagenet}

if __name__ == "__main__":
    main()
