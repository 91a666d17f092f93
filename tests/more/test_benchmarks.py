"""Every benchmark runs on tiny input, and tells all that it should, but for speed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
# How small, and the rows of its tables.
TINY = {
    "cifar10_input": ("--samples 256", 4),
    "cifar10_training": ("--samples 2 --batch-size 2", 3),
    "growth": ("--ranks 2 --megabits 1000 --batch-size 2", 1),
    "imagenet_input": ("--samples 10 --batch-size 10 --workers 1", 8),
    "imagenet_training": (
        "--model shufflenet_v2_x0_5 --samples 10 --batch-size 10 --workers 1",
        4,
    ),
    "job_start": ("--tasks 1", 3),
    "saving": ("", 3),
    "staging": ("--images 2", 4),
    "training_step": ("--ranks 1 --steps 1 --batch-size 4", 5),
}


def test_all_are_run():
    shared = {"side_by_side"}
    assert {path.stem for path in BENCHMARKS.glob("*.py")} - shared == set(TINY)


@pytest.mark.parametrize("name", TINY)
def test_benchmark(name, request):
    if name in ("growth", "job_start"):
        request.getfixturevalue("start_cluster")  # it says what is missing
    options, rows = TINY[name]
    command = [sys.executable, BENCHMARKS / f"{name}.py", "--rounds=0"]
    # Threads of one process wait for each other, for long where others have the CPUs.
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, *options.split()], env=env, capture_output=True, text=True
    )
    output = result.stdout + result.stderr
    assert result.returncode == 0 and "Traceback" not in output, output
    found = re.findall(r"^│ .*\d\.\d\d │$", result.stdout, re.MULTILINE)
    assert len(found) == rows, output
    assert " cores, load " in result.stdout, output


def test_scaling_page():
    """docs/scaling.rst computes what growth.py computes."""
    sys.path.insert(0, str(BENCHMARKS))
    import growth

    text = (BENCHMARKS.parents[1] / "docs" / "scaling.rst").read_text()
    sizes = re.findall(r"ResNet-\d+: ([\d.]+) MB of gradients", text)
    sizes = [1e6 * float(size) for size in sizes]
    row = r"^(\d+) Gbit/s" + r" +([\d.]+) ms +(\d+) \S+" * 2 + "$"
    rows = re.findall(row, text, re.MULTILINE)
    assert len(sizes) == 2 and len(rows) >= 5
    for gigabits, *cells in rows:
        for size, wire, rate in zip(sizes, cells[::2], cells[1::2], strict=True):
            computed = growth.seconds_on_the_wire(
                size, 10**9, float(gigabits) * 1e9 / 8
            )
            # The page's numbers are rounded.
            assert float(wire) == pytest.approx(1000 * computed, rel=0.03)
            # A step hides the network if two thirds of it are longer.
            compute = 256 / float(rate)
            assert 2 / 3 * compute == pytest.approx(computed, rel=0.005)
    row = r"^(\d+) Mbit/s +(\d)" + r" +([\d.]+) s" * 5 + "$"
    measured = re.findall(row, text, re.MULTILINE)
    assert len(measured) >= 6
    for megabits, ranks, *cells in measured:
        compute, wire, _, step, _ = map(float, cells)
        computed = growth.seconds_on_the_wire(
            sizes[0], int(ranks), float(megabits) * 1e6 / 8
        )
        assert wire == pytest.approx(computed, abs=0.01)
        assert step == pytest.approx(
            growth.seconds_of_a_step(compute, computed), abs=0.015
        )
