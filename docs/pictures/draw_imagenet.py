"""Write staging.svg, checkpoints.svg and requeue.svg: imagenet's disks and requeues.

The pictures take the colour scheme of the page that shows them,
as that of draw_ranks.py does.
"""

from pathlib import Path

from draw_ranks import STYLE, arrow, arrow_head, box, path, text

WIDTH = 960
# Columns of the index, and a row of it.
INDEX = (
    (0, "label", "417"),
    (46, "name", "n02782093/…6.JPEG"),
    (186, "offset", "58720768"),
    (256, "size", "110214"),
)
DASHED = """
.dashed { stroke-dasharray: 5 4; }
.small { font: 13px sans-serif; }
.small.name { font: 13px monospace; }"""


def main() -> None:
    for name, draw in PICTURES.items():
        Path(__file__).with_name(name).write_text(draw(), encoding="utf-8")


def picture(height: int, title: str, *shapes: str, width: int = WIDTH) -> str:
    """Return a whole SVG, with its title at the top left."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
            f' viewBox="0 0 {width} {height}" role="img">',
            f"<title>{title}</title>",
            f"<style>\n{STYLE}{DASHED}\n</style>",
            box("page", 0.5, 0.5, width - 1, height - 1),
            text("title", 24, 36, title),
            *shapes,
            "</svg>\n",
        ]
    )


def draw_staging() -> str:
    """Shared disk, the nodes' disks, and the workers that read the images."""
    top, height, step = 60, 216, 232
    center = top + height + (step - height) / 2
    shapes = [
        *cylinder(24, top + 60, 206, step + height - 120),
        text("title center", 127, center - 68, "shared disk"),
        text("name center", 127, center - 46, "IMAGENET_DIR"),
    ]
    for number, name in enumerate(
        (
            "…_img_train.tar",
            "…_img_val.tar",
            "…_devkit_t12.tar.gz",
        )
    ):
        shapes += [
            box("node", 42, center - 24 + number * 40, 170, 32),
            text("small name center", 127, center - 3 + number * 40, name),
        ]
    for node, host in enumerate(("node1", "node2")):
        shapes += draw_staged_node(host, top + node * step)
    shapes += [
        text("small center", 258, top + 100, "read"),
        text("small center", 258, top + 140, "once"),
        text("small center", 258, top + step + 100, "read"),
        text("small center", 258, top + step + 140, "once"),
    ]
    return picture(
        top + step + height + 24,
        "Staging: each node copies the archives, and extracts nothing",
        *shapes,
    )


def draw_staged_node(host: str, y: int) -> list[str]:
    """Return a node: its disk with an archive and its index, and its workers."""
    bar_x, bar_y, pieces = 318, y + 62, (34, 18, 46, 24, 38, 28, 20, 52, 30, 32)
    read = 3  # the image that a worker wants
    row_y = bar_y + 86
    piece_x = [bar_x + sum(pieces[:i]) for i in range(len(pieces))]
    target = piece_x[read] + pieces[read] / 2
    shapes = [
        arrow_right("disk", 230, 286, y + 118),
        box("node", 286, y, 650, 216),
        box("disk", 302, y + 12, 354, 192),
        text(
            "",
            318,
            y + 32,
            f'disk of <tspan class="name">{host}</tspan>: '
            '<tspan class="name">$LOCAL_JOB_DIR/data</tspan>',
        ),
        text("small name", bar_x, bar_y - 7, "…_img_train.tar"),
        text("small right", 640, bar_y - 7, "as it was, image after image"),
    ]
    shapes += [
        path(
            "address" if i == read else "node",
            f"M{x:g} {bar_y:g} h{pieces[i]} v34 h{-pieces[i]} z",
        )
        for i, x in enumerate(piece_x)
    ]
    shapes += [
        text("small name", bar_x, row_y - 9, "train.npy"),
        text("small right", 640, row_y - 9, "the index"),
        box("node", bar_x, row_y, 322, 48),
        path("address", f"M{bar_x + 1} {row_y + 24} h320 v23 h-320 z"),
        arrow("address", target, row_y + 22, bar_y + 34),
        *(
            text("small name", bar_x + 8 + x, row_y + line_y, words)
            for x, *column in INDEX
            for line_y, words in zip((17, 40), column, strict=True)
        ),
        box("task", 690, y + 12, 230, 192),
        text("center", 805, y + 36, "a rank's 8 workers:"),
        text("small center", 805, y + 62, "look up offset and size,"),
        text("small center", 805, y + 82, "read those bytes of the archive,"),
        text("small center", 805, y + 102, "decode, crop, resize, flip"),
        box("gpu", 706, y + 152, 198, 36),
        text("center", 805, y + 175, "its GPU: normalize"),
        arrow("gpu", 805, y + 112, y + 152),
        text("small", 815, y + 136, "uint8"),
        arrow_right("disk", 656, 690, y + 62 + 17),
    ]
    return shapes


def draw_checkpoints() -> str:
    """A checkpoint's way to the disk, above, and back from it."""
    others_y, rank_0_y, height = 72, 126, 38
    stages = [
        (316, 214, "write a .partial file"),
        (534, 66, "fsync"),
        (604, 84, "rename"),
        (692, 140, "remove oldest"),
    ]
    shapes = [
        text("right", 120, others_y + 24, "other ranks:"),
        text("right", 120, rank_0_y + 24, "rank 0:"),
        box("node", 316, others_y, 516, height),
        text("center", 574, others_y + 24, "wait"),
    ]
    for i, x in enumerate((132, 178, 224, 270, 836, 882)):
        for y in (others_y, rank_0_y):
            shapes += [
                box("task", x, y, 42, height),
                text("small center", x + 21, y + 24, f"{397 + i}"),
            ]
    for x, width, words in stages:
        shapes += [
            box("gpu", x, rank_0_y, width, height),
            text("center", x + width / 2, rank_0_y + 24, words),
        ]
    rename_x, rename_y = 646, rank_0_y + height
    folder_y = 216
    files = [
        ("gpu", "epoch-002-step-000400.pt", "the newest"),
        ("gpu", "epoch-002-step-000200.pt", ""),
        ("gpu", "epoch-001-step-001000.pt", "the last three stay"),
        ("disk", "best.pt", "the best epoch's"),
    ]
    shapes += [
        box("node", 24, folder_y, 452, 196),
        text(
            "",
            40,
            folder_y + 26,
            'the run\'s folder: <tspan class="name">--checkpoint-dir</tspan>',
        ),
        path(
            "gpu line",
            f"M{rename_x} {rename_y} V190 H250 V{folder_y - 2} "
            f"{arrow_head(250, folder_y - 2, 1)}",
        ),
    ]
    for i, (kind, name, words) in enumerate(files):
        y = folder_y + 40 + i * 38
        shapes += [
            box(kind, 40, y, 208, 30),
            text("small name", 50, y + 20, name),
            text("small", 258, y + 20, words),
        ]
    shapes += [
        box("node", 520, folder_y, 416, 196),
        text("", 536, folder_y + 26, "the next start, on all ranks"),
        box("task", 536, folder_y + 40, 384, 38),
        text(
            "small center",
            728,
            folder_y + 63,
            "rank 0 reads the newest: is every checksum right?",
        ),
        arrow("address", 610, folder_y + 78, folder_y + 112),
        text("small", 620, folder_y + 100, "no"),
        box("address", 536, folder_y + 112, 184, 68),
        text("small center", 628, folder_y + 133, "a warning names it;"),
        text("small center", 628, folder_y + 150, "now .damaged; the one"),
        text("small center", 628, folder_y + 167, "before it is read"),
        arrow("gpu", 830, folder_y + 78, folder_y + 112),
        text("small", 840, folder_y + 100, "yes"),
        box("gpu", 744, folder_y + 112, 176, 68),
        text("small center", 832, folder_y + 133, "all ranks get it, and"),
        text("small center", 832, folder_y + 150, "resume at its step: the"),
        text("small center", 832, folder_y + 167, "same weights, bit for bit"),
        arrow_right("task", 476, 520, folder_y + 59),
    ]
    return picture(
        436,
        "Checkpoints: rank 0 writes them, whole or not at all, and all others wait",
        *shapes,
    )


def draw_requeue() -> str:
    """Who does what when a job is stopped before its time limit, left to right."""
    lanes = {"Slurm": 74, "job.sh": 158, "main.py": 242}
    bars = [
        ("Slurm", 112, 70, "node", "queue"),
        ("Slurm", 186, 446, "disk", "the job runs, for --time at most"),
        ("Slurm", 662, 70, "node", "queue"),
        ("Slurm", 736, 206, "disk", "the job runs again"),
        ("job.sh", 186, 86, "address", "code, data"),
        # Between these two, the signal passes by: Slurm sends it to the ranks.
        ("job.sh", 276, 144, "task", "waits for srun"),
        ("job.sh", 440, 112, "task", "still waits"),
        ("job.sh", 556, 76, "address", "cleans up"),
        ("job.sh", 736, 82, "address", "code, data"),
        ("job.sh", 826, 116, "task", "waits for srun"),
        ("main.py", 276, 156, "gpu", "steps 1 to 412"),
        ("main.py", 436, 58, "gpu", "agree"),
        ("main.py", 498, 54, "gpu", "save"),
        ("main.py", 822, 120, "gpu", "steps from 413"),
    ]
    signal, end, limit, resume = 430, 550, 642, lanes["main.py"]
    shapes = [
        arrow("address", signal, lanes["Slurm"] + 36, lanes["main.py"]),
        text(
            "small right",
            signal - 8,
            lanes["Slurm"] + 66,
            "USR1 to every rank, 180 s before the limit",
        ),
    ]
    for name, y in lanes.items():
        shapes.append(text("name right", 102, y + 23, name))
    for name, x, width, kind, words in bars:
        y = lanes[name]
        shapes += [
            box(kind, x, y, width, 36),
            text("small center", x + width / 2, y + 23, words),
        ]
    shapes += [
        arrow("task", end, lanes["main.py"], lanes["job.sh"] + 36),
        text("small", end + 8, lanes["job.sh"] + 66, "all exit"),
        arrow("task", 608, lanes["job.sh"], lanes["Slurm"] + 36),
        text("small right", 600, lanes["Slurm"] + 58, "it got further:"),
        text("small right", 600, lanes["Slurm"] + 74, "scontrol requeue"),
        path("address line dashed", f"M{limit} 60 V{lanes['main.py'] + 40}"),
        text("small", limit + 8, lanes["job.sh"] + 4, "time limit"),
        text("small center", 684, 318, "the checkpoint, on the shared disk"),
        path(
            "gpu line",
            f"M523 {resume + 38} V298 H846 V{resume + 38} "
            f"{arrow_head(846, resume + 38, -1)}",
        ),
    ]
    return picture(336, "A job that continues after its time limit", *shapes)


def cylinder(x: float, y: float, width: float, height: float) -> list[str]:
    """Return a disk, whose top and bottom are curved by 14 pixels."""
    arc, side = f"a{width / 2:g} 14 0 0", height - 28
    start = f"M{x:g} {y + 14:g}"
    return [
        path("disk", f"{start} {arc} 1 {width:g} 0 v{side:g} {arc} 1 {-width:g} 0 z"),
        path("disk line", f"{start} {arc} 0 {width:g} 0"),
    ]


def arrow_right(kind: str, start_x: float, end_x: float, y: float) -> str:
    """Return a horizontal arrow, which stays 2 pixels off what it joins."""
    start_x, end_x = start_x + 2, end_x - 2
    head = f"M{end_x - 5:g} {y - 5:g} L{end_x:g} {y:g} L{end_x - 5:g} {y + 5:g}"
    return path(f"{kind} line", f"M{start_x:g} {y:g} H{end_x:g} {head}")


PICTURES = {
    "staging.svg": draw_staging,
    "checkpoints.svg": draw_checkpoints,
    "requeue.svg": draw_requeue,
}

if __name__ == "__main__":
    main()
