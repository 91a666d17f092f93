"""Every benchmark runs on tiny input, and tells all that it should, but for speed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from slurm_jobs import every_case

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
# How small, and the rows of its tables.
TINY = {
    "cifar10_input": ("--samples 256", 4),
    "cifar10_training": ("--samples 2 --batch-size 2", 3),
    "imagenet_input": ("--samples 10 --batch-size 10 --workers 1", 10),
    "imagenet_training": (
        "--model shufflenet_v2_x0_5 --samples 10 --batch-size 10 --workers 1",
        3,
    ),
    "staging": ("--images 2", 3),
    "training_step": ("--ranks 1 --steps 1 --batch-size 4", 5),
}


NAMES = {path.stem for path in BENCHMARKS.glob("*.py")} - {"side_by_side"}


OFTEN = "imagenet_training"  # what a change breaks first


@pytest.mark.parametrize("name", every_case(OFTEN, *sorted(NAMES - {OFTEN})))
def test_benchmark(name):
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


def test_on_gpu_names_files_that_exist():
    """No GPU runs it here."""
    script = (BENCHMARKS / "on_gpu.sh").read_text()
    # Of the repository: no file that it makes, under a variable's value.
    named = set(re.findall(r"(?<![\w/$-])[\w/]+/\w+\.py", script))
    assert {"single_gpu/main.py", "tests/benchmarks/training_step.py"} <= named
    missing = [name for name in named if not (BENCHMARKS.parents[1] / name).exists()]
    assert not missing


@pytest.mark.every_case
def test_on_gpu_gives_options_that_exist():
    script = (BENCHMARKS / "on_gpu.sh").read_text()
    commands = script.replace("\\\n", " ").replace('"', "")
    pattern = r"(?<![\w/$-])(\w+/main|tests/benchmarks/\w+)(\.py .*)"
    options = {}
    for name, arguments in re.findall(pattern, commands):
        options.setdefault(name, set()).update(re.findall("--[a-z-]+", arguments))
    assert len(options) >= 6
    for name, used in options.items():
        command = [sys.executable, BENCHMARKS.parents[1] / f"{name}.py", "--help"]
        text = subprocess.check_output(command, text=True)
        assert used <= set(re.findall("--[a-z-]+", text)), name
