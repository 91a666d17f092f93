"""Draw the accuracy and the images/s of a run, epoch by epoch, from the log of its job.

Without arguments, it draws curves.svg from curves.out, the log of a run that
docs/evidence.rst tells of. The picture takes the colour scheme of the page that shows
it, as that of draw_ranks.py does.
"""

import argparse
import html
import math
import re
import sys
from pathlib import Path

from draw_imagenet import WIDTH, picture
from draw_ranks import box, path, text

EPOCH = re.compile(
    r"Epoch (\d+): train loss \S+ accuracy ([\d.]+)%, "
    r"valid loss \S+ accuracy ([\d.]+)%, (?:(\d+) images/s|nothing)"
)
TEST = re.compile(r"Test loss \S+ accuracy ([\d.]+)%")
# In pixels: where the plots are.
LEFT, RIGHT, HEIGHT, TOPS = 84, WIDTH - 40, 190, (92, 372)
LOG = Path(__file__).with_name("curves.out")
PICTURES = {
    "curves.svg": lambda: draw(
        LOG.read_text(encoding="utf-8"), "A ShuffleNet on CIFAR-10's images"
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "log", nargs="?", type=Path, help="slurm-N.out of any of the examples"
    )
    parser.add_argument("picture", nargs="?", type=Path, help="SVG to write")
    args = parser.parse_args()
    if args.log is None:
        for name, draw_it in PICTURES.items():
            LOG.with_name(name).write_text(draw_it(), encoding="utf-8")
        return
    if args.picture is None:
        parser.error("name the picture, too")
    try:
        log = args.log.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        sys.exit(f"draw_curves.py: error: {error}: name the slurm-NUMBER.out of a job")
    if not EPOCH.search(log):
        sys.exit(
            f"draw_curves.py: error: {args.log} has no line of an epoch: "
            "did the job train?"
        )
    args.picture.write_text(draw(log, args.log.name), encoding="utf-8")


def draw(log: str, name: str) -> str:
    """Return the picture as SVG."""
    epochs: dict[int, list[float]] = {}
    for epoch, *values in EPOCH.findall(log):
        epochs.setdefault(int(epoch), [float(value or 0) for value in values])
    train, valid, rate = (
        {epoch: values[i] for epoch, values in epochs.items()} for i in range(3)
    )
    # A job that was stopped between the end of an epoch and its line has trained
    # nothing since its start.
    rate = {epoch: value for epoch, value in rate.items() if value}
    accuracies = [("gpu", "train", train), ("task", "valid", valid)]
    if test := TEST.search(log):
        accuracies.append(("address", "test", {max(epochs): float(test[1])}))
    lowest = min(value for _, _, curve in accuracies for value in curve.values())
    return picture(
        624,
        f"{html.escape(name)}: accuracy and images/s",
        *plot(TOPS[0], "accuracy, %", accuracies, epochs, lowest),
        *plot(TOPS[1], "images/s", [("disk", "images/s", rate)], epochs, 0),
    )


def plot(
    top: int, title: str, curves: list[tuple[str, str, dict]], epochs, lowest: float
) -> list[str]:
    """Return a plot of curves, each with a kind, a name and values by epoch.

    The last value stands above.
    """
    highest = max(
        (value for _, _, curve in curves for value in curve.values()), default=1.0
    )
    y_ticks = ticks(lowest, highest)
    first, last = min(epochs), max(epochs)

    def place(epoch: int, value: float) -> tuple[float, float]:
        x = (epoch - first) / (last - first) if last > first else 0.5
        y = (value - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return LEFT + x * (RIGHT - LEFT), top + (1 - y) * HEIGHT

    shapes = [
        box("node", LEFT - 12, top - 8, RIGHT - LEFT + 24, HEIGHT + 16),
        text("", LEFT - 12, top - 18, title),
        text("small center", (LEFT + RIGHT) / 2, top + HEIGHT + 46, "epoch"),
    ]
    for tick in y_ticks:
        y = place(first, tick)[1]
        shapes += [
            text("small right", LEFT - 20, y + 4, f"{tick:g}"),
            path("page", f"M{LEFT - 12} {y:g} H{RIGHT + 12}"),
        ]
    for tick in ticks(first, last):
        if first <= tick <= last and tick == int(tick):
            shapes.append(
                text(
                    "small center",
                    place(tick, lowest)[0],
                    top + HEIGHT + 28,
                    f"{tick:g}",
                )
            )
    for number, (kind, name, curve) in enumerate(curves):
        points = [
            (epoch, value, *place(epoch, value))
            for epoch, value in sorted(curve.items())
        ]
        if points:
            legend_x = RIGHT - 110 * (len(curves) - number - 1)
            shapes += [
                path(
                    f"{kind} line",
                    "M" + " L".join(f"{x:.1f} {y:.1f}" for *_, x, y in points),
                ),
                *(
                    circle(kind, x, y, f"{name}, epoch {epoch}: {value:g}")
                    for epoch, value, x, y in points
                ),
                text("small right", legend_x, top - 18, f"{name} {points[-1][1]:g}"),
                circle(kind, legend_x + 8, top - 22, name, radius=5),
            ]
    return shapes


def ticks(low: float, high: float) -> list[float]:
    """Return four to eight round numbers, from `low` or less to `high` or more."""
    span = high - low or 1
    power = 10 ** math.floor(math.log10(span / 4))
    step = next(
        power * factor for factor in (1, 2, 5, 10) if power * factor >= span / 5
    )
    return [
        step * i
        for i in range(math.floor(low / step), max(math.ceil(high / step), 1) + 1)
    ]


def circle(kind: str, x: float, y: float, words: str, radius: int = 3) -> str:
    """Return a circle that says what it is when a mouse is over it."""
    where = f'cx="{x:.1f}" cy="{y:.1f}" r="{radius}"'
    return f'<circle class="{kind}" {where}><title>{words}</title></circle>'


if __name__ == "__main__":
    main()
