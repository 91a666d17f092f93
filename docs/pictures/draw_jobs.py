"""Write cluster.svg, global_batch.svg and hang.svg: a job's path, its batches, a hang.

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
    top, height, disk_y = 64, 250, 348
    shapes = [
        text("small right", 936, 36, "single_gpu's job has task 0 only, on one node"),
        box("node", 24, top, 190, height),
        text("title", 40, top + 30, "login node"),
        text("", 40, top + 62, "You type:"),
        text("small name", 40, top + 92, "sbatch job.sh"),
        text("small name", 40, top + 116, "squeue --me"),
        text("small name", 40, top + 140, "tail -F slurm-8.out"),
        text("small", 40, top + 176, "Do not train here."),
        arrow_right("task", 214, 244, top + 88),
        box("node", 244, top, 154, height),
        text("title", 260, top + 30, "queue"),
        text("small", 260, top + 60, "Slurm starts a"),
        text("small", 260, top + 80, "job when what it"),
        text("small", 260, top + 100, "needs is free."),
        arrow_right("task", 398, 428, top + 88),
    ]
    for number, (job, kind) in enumerate(
        {"job 8 was here": "address dashed", "job 9: PD": "task"}.items()
    ):
        y = top + 122 + number * 48
        shapes += [
            box(kind, 260, y, 122, 36),
            text("small center", 321, y + 23, job),
        ]
    shapes += [
        box("node", 428, top, 274, height),
        text("title", 444, top + 30, "node1"),
        text("small right", 686, top + 30, "job 8: R"),
        box("address", 444, top + 44, 242, 46),
        text("small center", 565, top + 63, "batch shell: runs job.sh,"),
        text("small center", 565, top + 81, "on the first node only"),
        box("node", 718, top, 218, height),
        text("title", 734, top + 30, "node2"),
        text("small right", 920, top + 30, "job 8: R"),
        path(
            "address line",
            f"M688 {top + 67} H780 V{top + 116} {arrow_head(780, top + 116, 1)}",
        ),
        arrow("address", 504, top + 90, top + 118),
        text("small name", 514, top + 109, "srun"),
        text("small name", 790, top + 92, "srun"),
    ]
    for node, (left, width) in enumerate(((444, 242), (734, 186))):
        half = (width - 6) / 2
        memory = half + 22 * node  # its words need room
        for x, y, size, kind, words in (
            (left, 118, half, "task", f"task {2 * node}"),
            (left + half + 6, 118, half, "task", f"task {2 * node + 1}"),
            (left, 164, memory, "page", "CPUs, memory"),
            (left + memory + 6, 164, width - memory - 6, "gpu", "2 GPUs"),
            (left, 206, width, "disk", "its own disk"),
        ):
            shapes += [
                box(kind, x, top + y, size, 34),
                text("small center", x + size / 2, top + y + 22, words),
            ]
    shapes += [
        box("disk", 24, disk_y, 912, 54),
        text(
            "center",
            480,
            disk_y + 23,
            "shared disk: your clone of this repository, data, logs, checkpoints",
        ),
        text("small center", 480, disk_y + 43, "the same files on every node"),
        *(
            arrow("disk", x, disk_y, top + height, both_ends=True)
            for x in (119, 565, 827)
        ),
    ]
    return picture(
        422, "The path of a job, here one of four tasks on two nodes", *shapes
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
    return picture(
        310, "One global batch: each rank takes every fourth sample", *shapes
    )


def draw_hang() -> str:
    """Four ranks on two nodes, of which one stops; who says so, and what follows."""
    left, step, end = 132, 42, 760
    named, over = 500, 650
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
                box("task", left + i * step, y, 38, 34),
                text("small center", left + i * step + 19, y + 22, f"{400 + i}"),
            ]
        x = left + steps * step
        if rank == 2:
            shapes += [
                box("address", x, y, over - x, 34),
                text(
                    "center",
                    (x + over) / 2,
                    y + 22,
                    "does not continue: stopped, or cut off",
                ),
            ]
        else:
            shapes += [
                box("node", x, y, over - x, 34),
                text(
                    "center",
                    (x + over) / 2,
                    y + 22,
                    "waits in step 404 for rank 2",
                ),
            ]
    shapes += [
        text(
            "small center",
            named - 80,
            60,
            "a thread in each rank notices that rank 2 is missing",
        ),
        text("small", over - 40, 60, "--timeout: 120 s"),
        box("gpu", over + 14, 84, 104, 80),
        text("small center", over + 66, 112, "srun ends"),
        text("small center", over + 66, 130, "all ranks;"),
        text("small center", over + 66, 148, "requeue"),
        box("task", end + 16, 84, 160, 80),
        text("small center", end + 96, 112, "the next start"),
        text("small center", end + 96, 130, "resumes from the last"),
        text("small center", end + 96, 148, "checkpoint"),
        text(
            "name",
            left,
            300,
            "error: rank 0 on node1 has not moved for 84 s: it works on a batch, …",
        ),
        text(
            "small",
            left,
            322,
            "and below it the Python stack of each thread of that rank",
        ),
        text(
            "name",
            left,
            344,
            "error: rank 2 on node2 does not answer: it is stopped or has ended, …",
        ),
    ]
    return picture(
        364, "A hang: the rank that stops is named, and the job continues", *shapes
    )


PICTURES = {
    "cluster.svg": draw_cluster,
    "global_batch.svg": draw_global_batch,
    "hang.svg": draw_hang,
}

if __name__ == "__main__":
    main()
