"""Write multi_gpu.svg and imagenet.svg: nodes, tasks, ranks, GPUs of their job.sh.

The pictures take the colour scheme of the page that shows them,
as that of draw_ranks.py does.
"""

import functools
import re
from pathlib import Path

from draw_imagenet import cylinder, picture
from draw_ranks import arrow, arrow_head, box, path, text

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = {
    "multi_gpu": "multi_gpu: a process for each GPU",
    "imagenet": "imagenet: workers that read images, and checkpoints on a shared disk",
}
HOSTS = ("node1", "node2")

# In pixels. The disks are on the outside, so that
# the all-reduce has only the tasks above it.
NODE_WIDTH, NODE_STEP, NODE_HEIGHT = 450, 462, 152
DISK_WIDTH, TASKS_WIDTH, GAP = 78, 314, 6


def main() -> None:
    for name, draw in PICTURES.items():
        Path(__file__).with_name(name).write_text(draw(), encoding="utf-8")


def draw_example(example: str) -> str:
    """Return the picture of an example as SVG."""
    job = (ROOT / example / "job.sh").read_text(encoding="utf-8")
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\d+)(?: +#.*)?$", job, re.M))
    nodes, tasks, gpus = (
        int(options[name]) for name in ("nodes", "ntasks-per-node", "gpus-per-node")
    )
    assert nodes <= len(HOSTS) and tasks == gpus, "the picture has a GPU for each task"
    words = f"--ntasks-per-node={tasks} --gpus-per-node={gpus}"
    if nodes > 1:
        words = f"--nodes={nodes} {words}"
    shapes = [text("name", 24, 60, f"sbatch {words}")]
    node_y, width = 122, 36 + nodes * NODE_STEP
    bar_y, left, right = (
        node_y + NODE_HEIGHT + 16,
        tasks_x(0),
        tasks_x(nodes - 1) + TASKS_WIDTH,
    )
    for node in range(nodes):
        shapes += draw_node(
            node,
            node_y,
            tasks,
            f"{options['cpus-per-task']} workers" * (example == "imagenet"),
        )
    address = "the first node" if nodes > 1 else "127.0.0.1"
    shapes += [
        box("address", left, 76, right - left, 28),
        text(
            "small center",
            (left + right) / 2,
            94,
            f"ranks meet at MASTER_ADDR, {address}",
        ),
        arrow("address", task_x(0, 0, tasks) + task_width(tasks) / 2, 104, node_y + 40),
        box("gpu", left, bar_y, right - left, 28),
        text(
            "small center",
            (left + right) / 2,
            bar_y + 18,
            "all-reduce: the mean of all gradients",
        ),
    ]
    height = bar_y + 28 + 20
    if example == "imagenet":
        shared_y = bar_y + 58
        shapes += [
            box("disk", 24, shared_y, width - 48, 36),
            text(
                "center",
                width / 2,
                shared_y + 23,
                "shared disk: the archives, copied once to each node, "
                "and the checkpoints that rank 0 writes",
            ),
        ]
        shapes += [
            arrow("disk", disk_x(n) + DISK_WIDTH / 2, shared_y, node_y + 136)
            for n in range(nodes)
        ]
        # Rank 0 writes checkpoints, and reads one at the start.
        x, rank_y = left - 16, node_y + 60
        down_to = f"V{shared_y - 2} {arrow_head(x, shared_y - 2, 1)}"
        back = f"M{left - 5} {rank_y - 4} L{left} {rank_y} L{left - 5} {rank_y + 4}"
        shapes.append(path("task line", f"M{left} {rank_y} H{x} {down_to} {back}"))
        shapes.append(text("small", x + 8, shared_y - 11, "checkpoints"))
        height = shared_y + 36 + 20
    return picture(height, EXAMPLES[example], *shapes, width=width)


def draw_node(node: int, y: int, tasks: int, workers: str) -> list[str]:
    """Return a node with its disk, its tasks and their GPUs.

    `workers` take the place of the local ranks.
    """
    x = 24 + node * NODE_STEP
    shapes = [
        box("node", x, y, NODE_WIDTH, NODE_HEIGHT),
        text(
            "right",
            tasks_x(node) + TASKS_WIDTH,
            y + 26,
            HOSTS[node],
        ),
        *cylinder(disk_x(node), y + 16, DISK_WIDTH, 120),
        text("small center", disk_x(node) + DISK_WIDTH / 2, y + 76, "own disk:"),
        text("small center", disk_x(node) + DISK_WIDTH / 2, y + 94, "the data"),
    ]
    for local_rank in range(tasks):
        left, width = task_x(node, local_rank, tasks), task_width(tasks)
        center = left + width / 2
        lines = (
            f"rank {node * tasks + local_rank}",
            workers or f"local {local_rank}",
        )
        shapes += [
            box("task", left, y + 40, width, 48),
            text("center", center, y + 60, lines[0]),
            text("small center", center, y + 79, lines[1]),
            arrow("task", center, y + 88, y + 106),
            box("gpu", left, y + 106, width, 30),
            text(
                "small name center",
                center,
                y + 125,
                f"cuda:{local_rank}",
            ),
        ]
        shapes.append(
            arrow("gpu", center, y + 136, y + NODE_HEIGHT + 16, both_ends=True)
        )
    return shapes


def disk_x(node: int) -> int:
    return 24 + node * NODE_STEP + (16 if node == 0 else NODE_WIDTH - 16 - DISK_WIDTH)


def tasks_x(node: int) -> int:
    return 24 + node * NODE_STEP + (NODE_WIDTH - 12 - TASKS_WIDTH if node == 0 else 12)


def task_width(tasks: int) -> float:
    return (TASKS_WIDTH - (tasks - 1) * GAP) / tasks


def task_x(node: int, local_rank: int, tasks: int) -> float:
    return tasks_x(node) + local_rank * (task_width(tasks) + GAP)


PICTURES = {
    f"{example}.svg": functools.partial(draw_example, example) for example in EXAMPLES
}

if __name__ == "__main__":
    main()
