"""Write ranks.svg: the nodes, tasks, ranks and GPUs of the multi_node job.

The picture takes the colour scheme of the page that shows it,
and has its own background in case it cannot.
"""

from pathlib import Path

HOSTS = ("node1", "node2")
TASKS_PER_NODE = 4
WORLD_SIZE = len(HOSTS) * TASKS_PER_NODE

# In pixels, from the top left corner. The second node is the first one upside down:
# both have their GPUs next to the all-reduce, which lies between them.
WIDTH, HEIGHT = 960, 586
ADDRESS_Y, ADDRESS_HEIGHT = 56, 34
ALL_REDUCE_Y, ALL_REDUCE_HEIGHT = 318, 42
NODE_HEIGHT, NODE_Y = 184, (116, 378)
TASK_HEIGHT, TASK_Y = 96, (132, 450)
GPU_HEIGHT, GPU_Y = 36, (248, 394)
TASK_X, TASK_WIDTH, TASK_STEP = 220, 130, 142
TASKS_WIDTH = (TASKS_PER_NODE - 1) * TASK_STEP + TASK_WIDTH
TASKS_CENTER = TASK_X + TASKS_WIDTH / 2
DISK_X, DISK_WIDTH, DISK_HEIGHT = 790, 136, 104

STYLE = """\
text { font: 16px sans-serif; fill: #1f2328; }
.title { font: bold 19px sans-serif; }
.name { font: 15px monospace; }
.right { text-anchor: end; }
.center { text-anchor: middle; }
rect, path { stroke-width: 1.5; }
.page { fill: #ffffff; stroke: #d1d9e0; }
.node { fill: #f2f4f7; stroke: #818b98; }
.task { fill: #ffffff; stroke: #0969da; }
.gpu { fill: #d3f0d9; stroke: #1a7f37; }
.disk { fill: #e8e4f8; stroke: #6e5bb8; }
.address { fill: #fff3cd; stroke: #9a6700; }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc; }
.page { fill: #0d1117; stroke: #3d444d; }
.node { fill: #1c232d; stroke: #757e8a; }
.task { fill: #0d1117; stroke: #4493f8; }
.gpu { fill: #12411f; stroke: #3fb950; }
.disk { fill: #342a5c; stroke: #a493e8; }
.address { fill: #4a3706; stroke: #d29922; }
}
.line { fill: none; stroke-width: 2; }"""


def main() -> None:
    Path(__file__).with_name("ranks.svg").write_text(draw(), encoding="utf-8")


def draw() -> str:
    """Return the picture as SVG."""
    shapes = [
        box("page", 0.5, 0.5, WIDTH - 1, HEIGHT - 1),
        text(
            "title",
            24,
            36,
            f"{len(HOSTS)} nodes, {TASKS_PER_NODE} tasks on each, a GPU for each task",
        ),
        text("name right", WIDTH - 24, 36, f"SLURM_NTASKS = WORLD_SIZE = {WORLD_SIZE}"),
        *draw_node(0),
        *draw_node(1),
        box("address", TASK_X, ADDRESS_Y, TASKS_WIDTH, ADDRESS_HEIGHT),
        text(
            "center",
            TASKS_CENTER,
            ADDRESS_Y + 22,
            f"MASTER_ADDR = {HOSTS[0]}: the node of rank 0, where all ranks meet",
        ),
        arrow(
            "address", TASK_X + TASK_WIDTH / 2, ADDRESS_Y + ADDRESS_HEIGHT, TASK_Y[0]
        ),
        box("gpu", TASK_X, ALL_REDUCE_Y, TASKS_WIDTH, ALL_REDUCE_HEIGHT),
        text(
            "center",
            TASKS_CENTER,
            ALL_REDUCE_Y + 26,
            f"all-reduce: in every step, the mean of all {WORLD_SIZE} gradients",
        ),
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}"'
            f' viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
            "<title>The nodes, tasks, ranks and GPUs of the multi_node job</title>",
            f"<style>\n{STYLE}\n</style>",
            *shapes,
            "</svg>\n",
        ]
    )


def draw_node(node: int) -> list[str]:
    task_y, gpu_y = TASK_Y[node], GPU_Y[node]
    # All tasks read the disk: their lines meet on the side that has no GPUs.
    outer_y = task_y if node == 0 else task_y + TASK_HEIGHT
    bus_y = outer_y - 9 if node == 0 else outer_y + 9
    shapes = [
        box("node", 24, NODE_Y[node], WIDTH - 48, NODE_HEIGHT),
        text("title", 40, NODE_Y[node] + 34, HOSTS[node]),
        text("right", TASK_X - 12, task_y + 25, "each task:"),
        text("name right", TASK_X - 12, task_y + 54, "SLURM_PROCID ="),
        text("name right", TASK_X - 12, task_y + 80, "SLURM_LOCALID ="),
        text("right", TASK_X - 12, gpu_y + 23, "its device:"),
        path("disk line", f"M{TASK_X + TASK_WIDTH / 2:g} {bus_y:g} H{DISK_X:g}"),
        *draw_disk(DISK_X, task_y + (TASK_HEIGHT - DISK_HEIGHT) / 2),
    ]
    for local_rank in range(TASKS_PER_NODE):
        rank = node * TASKS_PER_NODE + local_rank
        x = TASK_X + local_rank * TASK_STEP
        center = x + TASK_WIDTH / 2
        shapes += [
            path("disk line", f"M{center:g} {bus_y:g} V{outer_y:g}"),
            box("task", x, task_y, TASK_WIDTH, TASK_HEIGHT),
            text("name center", center, task_y + 25, "main.py"),
            text("title center", center, task_y + 55, f"rank {rank}"),
            text("center", center, task_y + 80, f"local rank {local_rank}"),
            box("gpu", x, gpu_y, TASK_WIDTH, GPU_HEIGHT),
            text("name center", center, gpu_y + 23, f"GPU cuda:{local_rank}"),
        ]
        if node == 0:
            shapes.append(arrow("task", center, task_y + TASK_HEIGHT, gpu_y))
            shapes.append(
                arrow("gpu", center, gpu_y + GPU_HEIGHT, ALL_REDUCE_Y, both_ends=True)
            )
        else:
            shapes.append(arrow("task", center, task_y, gpu_y + GPU_HEIGHT))
            shapes.append(
                arrow(
                    "gpu",
                    center,
                    gpu_y,
                    ALL_REDUCE_Y + ALL_REDUCE_HEIGHT,
                    both_ends=True,
                )
            )
    return shapes


def draw_disk(x: float, y: float) -> list[str]:
    """Return a disk, as a cylinder whose top and bottom are curved by 10 pixels."""
    arc, side = f"a{DISK_WIDTH / 2:g} 10 0 0", DISK_HEIGHT - 20
    start = f"M{x:g} {y + 10:g}"
    center = x + DISK_WIDTH / 2
    return [
        path(
            "disk", f"{start} {arc} 1 {DISK_WIDTH} 0 v{side} {arc} 1 {-DISK_WIDTH} 0 z"
        ),
        path("disk line", f"{start} {arc} 0 {DISK_WIDTH} 0"),
        text("center", center, y + 41, "node's disk"),
        text("name center", center, y + 62, "LOCAL_JOB_DIR"),
        text("center", center, y + 84, "staged data"),
    ]


def box(kind: str, x: float, y: float, width: float, height: float) -> str:
    size = f'width="{width:g}" height="{height:g}"'
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" {size} rx="8"/>'


def text(kind: str, x: float, y: float, words: str) -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{words}</text>'


def path(kind: str, commands: str) -> str:
    return f'<path class="{kind}" d="{commands}"/>'


def arrow(
    kind: str, x: float, start_y: float, end_y: float, both_ends: bool = False
) -> str:
    """Return a vertical arrow, which stays 2 pixels off what it joins."""
    down = 1 if start_y < end_y else -1
    start_y, end_y = start_y + 2 * down, end_y - 2 * down
    commands = f"M{x:g} {start_y:g} V{end_y:g} {arrow_head(x, end_y, down)}"
    if both_ends:
        commands += f" {arrow_head(x, start_y, -down)}"
    return path(f"{kind} line", commands)


def arrow_head(x: float, y: float, down: int) -> str:
    return f"M{x - 5:g} {y - 5 * down:g} L{x:g} {y:g} L{x + 5:g} {y - 5 * down:g}"


if __name__ == "__main__":
    main()
