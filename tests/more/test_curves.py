"""docs/pictures/draw_curves.py draws what the log of a job says."""

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from slurm_jobs import REPOSITORY, call

SCRIPT = REPOSITORY / "docs" / "pictures" / "draw_curves.py"


def draw(log: Path, picture: Path) -> dict[str, float]:
    """Return the height of all points of the curves, by what they say they are."""
    result = call([sys.executable, SCRIPT, log, picture])
    assert (result.exit_code, result.output) == (0, ""), result
    circles = ElementTree.parse(picture).iterfind(".//{*}circle")
    points = {circle[0].text: -float(circle.get("cy")) for circle in circles}
    points = {words: height for words, height in points.items() if "epoch" in words}
    assert points
    return points


def printed(example: str) -> list[str]:
    """Return what its README file shows of a job's log, which a job has printed."""
    lines = (REPOSITORY / example / "README.rst").read_text().splitlines()
    return [
        line.strip()
        for line in lines
        if line.startswith(("    Epoch ", "    Test loss "))
    ]


@pytest.mark.parametrize("example", ["multi_gpu", "imagenet"])
def test_every_value_of_the_log_is_in_the_picture(example, tmp_path):
    log = tmp_path / "slurm-1.out"
    log.write_text("\n".join(printed(example)))
    points = draw(log, tmp_path / "curves.svg")
    accuracies, rates = {}, {}
    for line in printed(example):
        if line.startswith("Epoch"):  # the test belongs to the last one
            epoch = line.split()[1]
        for name, value in re.findall(r"(\w+) loss \S+ accuracy (\S+)%", line.lower()):
            accuracies[f"{name}, epoch {epoch} {float(value):g}"] = float(value)
        for rate in re.findall(r"(\d+) images/s", line):
            rates[f"images/s, epoch {epoch} {rate}"] = float(rate)
    assert points.keys() == accuracies.keys() | rates.keys()
    for values in (accuracies, rates):
        assert sorted(values, key=values.get) == sorted(values, key=points.get)


def test_what_a_job_says_again_is_drawn_once(tmp_path):
    """Stopped after an epoch's last step, it only validates again."""
    lines = printed("imagenet")
    once, twice = tmp_path / "once.out", tmp_path / "twice.out"
    once.write_text("\n".join(lines))
    again = re.sub(r"\d+ images/s.*", "nothing was left to train", lines[-1])
    assert again != lines[-1]
    twice.write_text("\n".join([*lines, again]))
    assert draw(twice, tmp_path / "twice.svg") == draw(once, tmp_path / "once.svg")
