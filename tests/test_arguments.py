"""What main.py says about its options, and about what it cannot work with.

That is one line, and no traceback. Nothing here trains.
"""

import re
from pathlib import Path

import pytest
from slurm_jobs import ARGUMENTS_LINE
from test_checkpoint import Started, mounted
from test_imagenet_training import run_main

EXAMPLES = ("single_gpu", "multi_gpu", "multi_node")
DEFAULTS = {
    "--data-dir": "./data",
    "--synthetic": "False",
    "--epochs": "35",
    "--batch-size": "256",
    "--learning-rate": "0.2",
    "--weight-decay": "0.0005",
    "--seed": "0",
}
ARCHIVE = "cifar-10-python.tar.gz"

pytestmark = pytest.mark.timeout(400)


def run(folder: Path, example: str, *arguments: str, **environment: str):
    """Run main.py to its end; return its status and its output."""
    log = folder / "log"
    job = (example, arguments, log, {"COLUMNS": "80"} | environment)
    with Started(log, run_main, [job]) as started:
        (status,) = started.join()
    text = log.read_text()
    log.unlink()
    return status, text


def refused(folder: Path, example: str, *arguments: str, **environment: str) -> str:
    """Return the one line with which main.py refuses to work."""
    status, text = run(folder, example, *arguments, **environment)
    assert status not in (0, None), text
    lines = [
        line
        for line in text.splitlines()
        if line and not line.startswith(("usage:", "warning: no GPU found"))
        if not ARGUMENTS_LINE.match(line)
    ]
    assert len(lines) == 1 and lines[0].startswith("main.py: error: "), text
    return lines[0]


@pytest.mark.parametrize("example", EXAMPLES)
def test_help(example, tmp_path):
    """--help fits into 80 columns; every example has the same options and defaults.

    Where the data are looked for in a job: test_data_dir.py.
    """
    status, text = run(tmp_path, example, "--help")
    assert status == 0 and max(map(len, text.splitlines())) <= 80, text
    _, _, *entries = re.split(r"\n  (?=-)", text.split("options:")[1])  # after --help
    found = {}
    for entry in entries:
        line = " ".join(entry.split())
        said = re.match(r"(--\S+) .{15,} \(default: (.*)\)$", line)
        assert said, f"no explanation: {line}"
        found[said[1]] = said[2]
    assert found == DEFAULTS


@pytest.mark.parametrize(
    "value",
    [
        "--batch-size 0",
        "--batch-size abc",
        "--epochs 0",
        "--epoch 3",  # no option may be shortened
    ],
)
def test_bad_values(value, tmp_path):
    """A value that makes no sense is refused by the name of its option."""
    option, number = value.split()
    line = refused(tmp_path, "single_gpu", "--synthetic", option, number)
    assert option in line


@pytest.mark.parametrize("example", ["single_gpu", "multi_node"])
def test_batch_larger_than_the_training_set(example, tmp_path):
    """A batch size with too few images for it is refused, with both numbers.

    Outside of Slurm, a process is alone, whatever another launcher has left.
    """
    left = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    line = refused(tmp_path, example, "--synthetic", "--batch-size", "5000", **left)
    # Of the 1152 images that --synthetic draws, a tenth is for validation.
    assert (
        "5000" in line
        and "only 1037 to train on: choose a smaller --batch-size" in line
    )


def test_damaged_archive_and_no_network(tmp_path):
    """One line says where the data were sought, and what to do. The archive stays."""
    content = b"\x1f\x8b" + bytes(range(256)) * 40
    (tmp_path / ARCHIVE).write_bytes(content)
    # Nobody listens there.
    proxies = dict.fromkeys(["https_proxy", "http_proxy"], "http://127.0.0.1:9")
    line = refused(tmp_path, "single_gpu", "--data-dir", ".", **proxies)
    for part in (str(tmp_path), ARCHIVE, "--synthetic"):
        assert part in line
    left = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert left == {ARCHIVE: content}


@pytest.mark.parametrize("example", ["single_gpu", "multi_node"])
def test_nowhere_to_save(example, tmp_path):
    """It is said before the training that the weights could not be saved."""
    with mounted(tmp_path / "read-only", "ro") as folder:
        status, text = run(tmp_path, example, "--synthetic", FOLDER=str(folder))
    assert status == 1 and "World size" not in text, text
    assert f"error: cannot write the weights to {folder}/model-none.pt: " in text


@pytest.mark.parametrize("example", ["multi_gpu", "multi_node", "imagenet"])
@pytest.mark.parametrize(
    "task",
    [
        {},  # in the shell of salloc without --ntasks, perhaps on a login node
        {"SLURM_STEP_NUM_TASKS": "4"},  # no number of the job's tasks
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"},  # salloc's shell in a step
    ],
)
def test_started_without_srun(example, task, tmp_path):
    """One line says to use srun. In a batch script and under salloc: test_errors.py."""
    job = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}
    assert "srun" in refused(tmp_path, example, "--synthetic", **job, **task)
