"""Write cluster.svg, global_batch.svg and hang.svg: a job's way, its batches, a hang.

The pictures take the colour scheme of the page that shows them,
as that of draw_ranks.py does.
"""

from pathlib import Path

from draw_imagenet import arrow_right, picture
from draw_ranks import arrow, arrow_head, box, path, text


def main() -> None:
    for name, draw in PICTURES.items():
        Path(__file__).with_name(name).write_text(draw(), encoding="utf-8")


def draw_cluster() -> str:
    """From the login node through the queue to the tasks on two nodes."""
    top, disk_y = 64, 302
    shapes = [
        box("node", 24, top, 178, 206),
        text("title", 40, top + 30, "login node"),
        text("", 40, top + 58, "You type:"),
        text("small name", 40, top + 84, "sbatch job.sh"),
        text("small name", 40, top + 106, "squeue --me"),
        text("small name", 40, top + 128, "tail -F slurm-8.out"),
        text("small", 40, top + 160, "Do not train here."),
        arrow_right("task", 202, 236, top + 80),
        box("node", 236, top, 148, 206),
        text("title", 252, top + 30, "queue"),
        text("small right", 370, top + 30, "PD"),
        text("small", 252, top + 54, "Slurm starts a"),
        text("small", 252, top + 72, "job when its"),
        text("small", 252, top + 90, "nodes are free."),
        arrow_right("task", 384, 418, top + 80),
    ]
    for number, (job, kind) in enumerate(
        {"job 8, yours": "address", "job 9": "task"}.items()
    ):
        y = top + 108 + number * 44
        shapes += [
            box(kind, 252, y, 116, 32),
            text("small center", 310, y + 21, job),
        ]
    shapes += [
        box("node", 418, top, 282, 206),
        text("title", 434, top + 30, "node1"),
        text("small right", 688, top + 30, "job 8: R"),
        box("address", 434, top + 44, 250, 46),
        text("small center", 559, top + 63, "batch shell: runs job.sh,"),
        text("small center", 559, top + 81, "on the first node only"),
        box("node", 718, top, 218, 206),
        text("title", 734, top + 30, "node2"),
        path(
            "address line",
            f"M686 {top + 67} H827 V{top + 112} {arrow_head(827, top + 112, 1)}",
        ),
        arrow("address", 559, top + 90, top + 114),
        text("small name", 568, top + 107, "srun"),
        text("small name", 836, top + 90, "srun"),
    ]
    for rank, x in enumerate((434, 562, 734, 834)):
        width = 122 if rank < 2 else 92
        shapes += [
            box("task", x, top + 114, width, 40),
            text("small center", x + width / 2, top + 139, f"task {rank}"),
        ]
    for x, width, words in (
        (434, 250, "two GPUs and its own disk"),
        (734, 192, "two GPUs and its own disk"),
    ):
        shapes += [
            box("gpu", x, top + 162, width, 32),
            text(
                "small center",
                x + width / 2,
                top + 183,
                words,
            ),
        ]
    shapes += [
        box("disk", 24, disk_y, 912, 46),
        text(
            "center",
            480,
            disk_y + 20,
            "shared disk: your clone of this repository, data, logs, checkpoints",
        ),
        text("small center", 480, disk_y + 38, "the same files on every node"),
        *(arrow("disk", x, disk_y, top + 206, both_ends=True) for x in (113, 559, 827)),
    ]
    return picture(
        370, "A job's way: from sbatch through the queue to its tasks", *shapes
    )


def draw_global_batch() -> str:
    """One step of four ranks, of a global batch of twelve samples."""
    order = (7, 2, 40, 13, 28, 5, 31, 19, 0, 22, 36, 9)
    kinds = ("task", "gpu", "disk", "address")
    left, step, row_y, ranks_y = 200, 56, 62, 158
    shapes = [
        text("right", left - 14, row_y + 22, "samples, in the"),
        text("right", left - 14, row_y + 40, "epoch's order:"),
    ]
    for position, sample in enumerate(order):
        x = left + position * step
        shapes += [
            box(kinds[position % 4], x, row_y, 46, 46),
            text("center", x + 23, row_y + 28, f"{sample}"),
        ]
    shapes += [
        text("", left + 12 * step + 4, row_y + 28, "…"),
        path("task line", f"M{left} {row_y + 54} v10 h{12 * step - 10} v-10"),
        text(
            "small center",
            left + 6 * step - 5,
            row_y + 82,
            "the global batch of a step: 4 ranks x --batch-size 3",
        ),
    ]
    for rank in range(4):
        x = left + rank * 172
        mine = ", ".join(str(sample) for sample in order[rank::4])
        shapes += [
            box(kinds[rank], x, ranks_y, 154, 62),
            text("center", x + 77, ranks_y + 25, f"rank {rank}"),
            text("small center", x + 77, ranks_y + 46, f"takes {mine}"),
            arrow("gpu", x + 77, ranks_y + 62, ranks_y + 92),
        ]
    shapes += [
        box("gpu", left, ranks_y + 92, 670, 36),
        text(
            "center",
            left + 335,
            ranks_y + 115,
            "all-reduce: every rank gets the mean of all gradients: the same step",
        ),
    ]
    return picture(310, "One global batch, dealt out to the ranks like cards", *shapes)


def draw_hang() -> str:
    """Four ranks on two nodes, of which one stops; who says so, and what follows."""
    left, step, end = 116, 38, 760
    named, over = 470, 640
    # The lines pass behind the ranks.
    shapes = [
        path("address line dashed", f"M{named} 66 V270"),
        path("task line dashed", f"M{over + 3} 66 V270"),
    ]
    for rank in range(4):
        y = 84 + rank * 46
        node = rank // 2 + 1
        shapes.append(
            text("small right", left - 8, y + 22, f"rank {rank}, node{node}:")
        )
        steps = 4 if rank == 2 else 5
        for i in range(steps):
            shapes += [
                box("task", left + i * step, y, 34, 34),
                text("small center", left + i * step + 17, y + 22, f"{400 + i}"),
            ]
        x = left + steps * step
        if rank == 2:
            shapes += [
                box("address", x, y, over - x, 34),
                text(
                    "center",
                    (x + over) / 2,
                    y + 22,
                    "does not go on: stopped, or cut off",
                ),
            ]
        else:
            shapes += [
                box("node", x, y, over - x, 34),
                text(
                    "center",
                    (x + over) / 2,
                    y + 22,
                    "waits in step 404 for rank 2's gradients",
                ),
            ]
    shapes += [
        text("small center", named - 60, 60, "the ranks' threads met without it"),
        text("small center", over + 20, 60, "--timeout: 120 s"),
        box("gpu", over + 12, 84, 108, 80),
        text("small center", over + 66, 112, "srun ends"),
        text("small center", over + 66, 130, "all ranks;"),
        text("small center", over + 66, 148, "requeue"),
        box("task", end + 6, 84, 170, 80),
        text("small center", end + 91, 112, "the next start goes"),
        text("small center", end + 91, 130, "on from the last"),
        text("small center", end + 91, 148, "checkpoint"),
        text(
            "name",
            left,
            300,
            "error: rank 2 on node2 does not answer: it is stopped or has ended, …",
        ),
        text(
            "name",
            left,
            322,
            "error: rank 0 on node1 has not moved for 108 s: it works on a batch, …",
        ),
        text(
            "small",
            left,
            344,
            "and below it the Python stack of each thread of that rank",
        ),
    ]
    return picture(
        364, "A hang: the rank that stops is named, and the job goes on", *shapes
    )


PICTURES = {
    "cluster.svg": draw_cluster,
    "global_batch.svg": draw_global_batch,
    "hang.svg": draw_hang,
}

if __name__ == "__main__":
    main()
