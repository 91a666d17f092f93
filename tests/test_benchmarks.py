"""Every benchmark runs on tiny input, and tells all that it should, but for speed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import cluster as slurm
import pytest

BENCHMARKS = Path(__file__).parent / "benchmarks"
TINY = {
    "cifar10_input": "--samples 512 --workers 1 --rounds 1",
    "cifar10_training": "--samples 4 --batch-size 2 --workers 1 --rounds 1",
    "growth": "--ranks 1 2 --megabits 1000 --batch-size 2 --steps 1 --rounds 1",
    "imagenet_input": "--samples 20 --batch-size 10 --workers 1 --rounds 1",
    "imagenet_training": (
        "--model shufflenet_v2_x0_5 --samples 10 --batch-size 5 --workers 1 --rounds 1"
    ),
    "job_start": "--tasks 1 --rounds 1",
    "saving": "--model shufflenet_v2_x0_5 --rounds 1",
    "staging": "--images 2 --rounds 1",
    "training_step": "--ranks 1 --steps 1 --batch-size 4 --rounds 1",
}


def test_all_are_run():
    shared = {"side_by_side"}
    assert {path.stem for path in BENCHMARKS.glob("*.py")} - shared == set(TINY)


@pytest.mark.parametrize("name", TINY)
def test_benchmark(name):
    if name in ("growth", "job_start") and (reason := slurm.missing_requirements()):
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    command = [sys.executable, BENCHMARKS / f"{name}.py", *TINY[name].split()]
    # Threads of one process wait for each other, for long where others have the CPUs.
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert result.returncode == 0 and "Traceback" not in result.stderr, result.stderr
    rows = re.findall(r"^│ .*\d\.\d\d │$", result.stdout, re.MULTILINE)
    assert len(rows) >= 2, result.stdout
    assert " cores, load " in result.stdout, result.stdout


def test_scaling_page():
    """docs/scaling.rst computes what growth.py computes."""
    sys.path.insert(0, str(BENCHMARKS))
    import growth

    text = (BENCHMARKS.parents[1] / "docs" / "scaling.rst").read_text()
    sizes = [
        1e6 * float(size)
        for size in re.findall(r"ResNet-\d+: ([\d.]+) MB of gradients", text)
    ]
    rows = re.findall(
        r"^(\d+) Gbit/s +([\d.]+) ms +(\d+) \S+ +([\d.]+) ms +(\d+) \S+$",
        text,
        re.MULTILINE,
    )
    assert len(sizes) == 2 and len(rows) >= 5
    for gigabits, *cells in rows:
        for size, wire, rate in zip(sizes, cells[::2], cells[1::2], strict=True):
            computed = growth.seconds_on_the_wire(
                size, 10**9, float(gigabits) * 1e9 / 8
            )
            # The page's number is rounded.
            assert float(wire) == pytest.approx(1000 * computed, rel=0.03)
            # A longer step hides the network, a shorter one does not.
            compute = 256 / float(rate)
            assert (
                growth.seconds_of_a_step(1.005 * compute, computed) == 1.005 * compute
            )
            assert growth.seconds_of_a_step(0.995 * compute, computed) > 0.995 * compute
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
