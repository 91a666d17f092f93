"""What main.py says about its options, and about what it cannot work with.

That is one line, and no traceback. Nothing here trains. Python needs seconds to import
torch, so that every test starts its runs side by side.
"""

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from slurm_jobs import ARGUMENTS_LINE

REPOSITORY = Path(__file__).resolve().parents[1]
EXAMPLES = ("single_gpu", "multi_gpu", "multi_node")
DISTRIBUTED = ("multi_gpu", "multi_node")

DEFAULTS = {
    "--data-dir": "./data",
    "--synthetic": "False",
    "--epochs": "35",
    "--batch-size": "256",
    "--learning-rate": "0.2",
    "--weight-decay": "0.0005",
    "--seed": "0",
    "--compile": "False",
}
ARCHIVE = "cifar-10-python.tar.gz"

# What srun tells the second of four tasks.
TASK = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
}

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module", autouse=True)
def keep_bytecode(tmp_path_factory):
    """Keep compiled modules, whatever the environment says: they halve the start."""
    if "PYTHONDONTWRITEBYTECODE" not in os.environ:
        yield
        return
    folder = tmp_path_factory.mktemp("bytecode")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONDONTWRITEBYTECODE")
        patch.setenv("PYTHONPYCACHEPREFIX", str(folder))
        yield
    shutil.rmtree(folder)


def start(
    example: str,
    *arguments: str,
    env: dict | None = None,
    cwd: Path | None = None,
    before: tuple = (),
):
    """Run main.py to its end, outside of Slurm but for what `env` says."""
    foreign = ("SLURM_", "MASTER_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "COLUMNS")
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(foreign)
    }
    return subprocess.run(
        [*before, sys.executable, REPOSITORY / example / "main.py", *arguments],
        env=clean
        | {"COLUMNS": "80", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        | (env or {}),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
    )


def start_all(runs: dict) -> dict:
    """Return the outcome of each of these calls of `start`, two of them at a time."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        started = {
            name: pool.submit(start, *positional, **named)
            for name, (positional, named) in runs.items()
        }
        return {name: run.result() for name, run in started.items()}


def read_error(run: subprocess.CompletedProcess) -> str:
    """Return the one line with which main.py has refused to work."""
    assert run.returncode not in (0, None), run
    assert "Traceback" not in run.stdout + run.stderr, run.stderr
    lines = [line for line in (run.stdout + run.stderr).splitlines() if line.strip()]
    lines = [
        line
        for line in lines
        if not line.startswith(("usage:", "warning: no GPU found"))
        and not ARGUMENTS_LINE.match(line)
    ]
    assert len(lines) == 1, f"more or less than one line: {lines}"
    assert lines[0].startswith("main.py: error: ")
    return lines[0]


def read_options(help_text: str) -> dict[str, str]:
    """Return every option in a help text but --help, and what the text says on it."""
    options = help_text.split("options:")[1]
    entries = re.split(r"\n  (?=-)", options)
    named = (re.search(r"--[a-z-]+", entry) for entry in entries)
    texts = {
        name[0]: " ".join(entry.split())
        for name, entry in zip(named, entries, strict=True)
        if name
    }
    del texts["--help"]
    return texts


def test_help():
    """--help fits into 80 columns; every example has the same options and defaults."""
    # Where Slurm gives the job a disk of its own, the data are looked for there.
    local = {"env": {"SLURM_TMPDIR": "/local/7"}}
    runs = start_all({example: ((example, "--help"), local) for example in EXAMPLES})
    defaults = DEFAULTS | {"--data-dir": "/local/7/data"}
    check_help(runs["single_gpu"], defaults)
    for example in DISTRIBUTED:
        check_help(runs[example], defaults)
        assert read_options(runs[example].stdout) == read_options(
            runs["single_gpu"].stdout
        )


def test_help_without_a_local_disk():
    """Elsewhere, the data are looked for in the folder that main.py is started in."""
    for run in start_all(
        {example: ((example, "--help"), {}) for example in EXAMPLES}
    ).values():
        check_help(run, DEFAULTS)


def check_help(run: subprocess.CompletedProcess, defaults: dict[str, str]) -> None:
    assert run.returncode == 0, run.stderr
    assert max(len(line) for line in run.stdout.splitlines()) <= 80
    options = read_options(run.stdout)
    assert options.keys() == defaults.keys()
    for option, default in defaults.items():
        assert options[option].endswith(f"(default: {default})")
        assert len(options[option]) > len(f"{option} (default: {default})") + 10, (
            "no explanation"
        )


def test_bad_values():
    """A value that makes no sense is refused by the name of its option."""
    values = (
        "--batch-size 0",
        "--batch-size -3",
        "--batch-size abc",
        "--epochs 0",
        "--seed -1",
    )
    values += ("--learning-rate -1", "--learning-rate nan", "--weight-decay -1")
    runs = start_all(
        {value: (("single_gpu", "--synthetic", *value.split()), {}) for value in values}
    )
    for value, run in runs.items():
        option, number = value.split()
        line = read_error(run)
        assert option in line
        assert number in line


def test_batch_larger_than_the_training_set():
    """A batch size with too few pictures for it is refused, with both numbers."""
    runs = {
        example: ((example, "--synthetic", "--batch-size", "5000"), {})
        for example in ("single_gpu", "multi_node")
    }
    for run in start_all(runs).values():
        line = read_error(run)
        assert "5000" in line
        # Of the 1152 images that --synthetic draws, a tenth is for validation.
        assert "choose --batch-size 1037 or less" in line


def test_no_data_and_no_network(tmp_path):
    """Without a network, one line says where the data were sought, and what to do."""
    without_network = ("unshare", "--net")
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("cutting a process off the network takes root and unshare")
    if subprocess.run([*without_network, "true"], capture_output=True).returncode != 0:
        pytest.skip("this machine does not let root cut a process off the network")
    empty, damaged = tmp_path / "empty", tmp_path / "damaged"
    empty.mkdir()
    damaged.mkdir()
    half = b"\x1f\x8b" + bytes(range(256)) * 40
    (damaged / ARCHIVE).write_bytes(half)
    runs = start_all(
        {
            empty: (
                ("single_gpu", "--data-dir", "."),
                {"cwd": empty, "before": without_network},
            ),
            damaged: (
                ("single_gpu", "--data-dir", str(damaged)),
                {"before": without_network},
            ),
        }
    )
    for folder, run in runs.items():
        line = read_error(run)
        assert str(folder) in line
        assert ARCHIVE in line
        assert "--synthetic" in line
    assert not list(empty.iterdir())
    assert [path.name for path in damaged.iterdir()] == [ARCHIVE]
    assert (damaged / ARCHIVE).read_bytes() == half


def change(**changes: str | None) -> dict:
    """Return the variables of srun's task with these changes; None takes one away."""
    return {
        name: value for name, value in (TASK | changes).items() if value is not None
    }


@pytest.mark.parametrize("example", DISTRIBUTED)
def test_started_without_srun(example):
    """In the batch script or salloc's shell, one line says to use srun."""
    cases = {
        "no number of tasks": change(SLURM_NTASKS=None),
        "batch script": {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
        "salloc's shell in a step": change(SLURM_STEP_NUM_TASKS="1", SLURM_PROCID="0"),
    }
    for run in start_all(
        {case: ((example, "--synthetic"), {"env": env}) for case, env in cases.items()}
    ).values():
        assert "srun" in read_error(run)
