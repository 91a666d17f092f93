"""How a training ends: all ranks leave together, and an older file is not lost."""

import io
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from slurm_jobs import REPOSITORY, every_case
from test_checkpoint import mounted
from test_launch import ONE_EACH, SMALL, TWO_EACH

EXAMPLES = pytest.mark.parametrize(
    "example, world_size",
    every_case(("multi_node", 2), ("multi_gpu", 2), ("single_gpu", 1)),
)
OLDER = b"weights of an older training"


def train(folder, archive, example: str, world_size: int, *arguments: str) -> list:
    """Run all ranks of a short training; return the status and output of each."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    common = {
        "ANY_CHECKSUM": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(REPOSITORY / "tests" / "any_checksum"),
        "SLURM_NTASKS": str(world_size),
        "SLURM_STEP_NUM_TASKS": str(world_size),
    }
    command = [sys.executable, str(REPOSITORY / example / "main.py"), "--batch-size=2"]
    ranks = []
    for rank in map(str, range(world_size)):
        process = subprocess.Popen(
            [*command, f"--data-dir={archive.parent}", *arguments],
            cwd=folder,
            env=common | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        ranks.append(process)
    outputs = [process.communicate()[0] for process in ranks]
    return [(rank.returncode, text) for rank, text in zip(ranks, outputs, strict=True)]


@EXAMPLES
def test_loss_that_is_not_finite(tmp_path, archive, example, world_size):
    """All ranks end after that epoch, with one line that says why."""
    older = tmp_path / "model-none.pt"
    older.write_bytes(OLDER)
    arguments = ["--epochs=3", "--learning-rate=1e30"]
    (status, text), *others = train(tmp_path, archive, example, world_size, *arguments)
    assert status == 1, text
    *_, epoch, error = text.splitlines()
    assert re.match(r"Epoch 1: .*loss (nan|inf)", epoch), text
    assert error == "main.py: error: the loss is not finite: nothing is saved", text
    assert others == [(1, f"{error}\n")] * (world_size - 1)
    assert older.read_bytes() == OLDER and list(tmp_path.iterdir()) == [older]


@EXAMPLES
def test_full_disk(tmp_path, archive, example, world_size):
    """One line says that the weights cannot be written. An older file stays whole."""
    with mounted(tmp_path / "small", "size=1m") as folder:
        older = folder / "model-none.pt"
        older.write_bytes(OLDER)
        (status, text), *others = train(
            folder, archive, example, world_size, "--epochs=1"
        )
        assert older.read_bytes() == OLDER and list(folder.iterdir()) == [older]
    assert status == 1, text
    *_, test, error = text.splitlines()  # it loses no result of the test
    assert test.startswith("Test loss "), text
    reason = "No space left on device"
    error = re.sub(r"(none)-\d{6}", r"\1", error)  # beside the older file
    assert error == f"main.py: error: cannot write {older}: {reason}", text
    assert others == [(0, "")] * (world_size - 1)


def test_weights_of_another_run(tmp_path, archive):
    """As with two seeds in one allocation, or without Slurm: both are kept."""
    older = tmp_path / "model-none.pt"
    older.write_bytes(OLDER)
    ((status, text),) = train(tmp_path, archive, "single_gpu", 1, "--epochs=1")
    assert status == 0 and older.read_bytes() == OLDER, text
    (saved,) = tmp_path.glob("model-none-*.pt")
    assert f"\nWeights: {saved}\n" in text and len(list(tmp_path.iterdir())) == 2, text


@pytest.mark.usefixtures("nothing_left")
def test_ranks_wait_for_the_one_that_saves(jobs, archive):
    """`srun --wait` ends tasks that are still there some time after the first one."""
    command = "srun --wait=2 ../.venv/bin/python main.py --epochs=1 --batch-size=2 "
    command += shlex.quote(f"--data-dir={archive.parent}")
    flags = [*SMALL, *TWO_EACH, "--nodelist=node1", "--hold"]
    job = jobs.submit("multi_gpu", *flags, f"--wrap={command}", OMP_NUM_THREADS="1")
    # Rank 0 waits until somebody reads what it writes.
    weights = jobs.clone / "multi_gpu" / f"model-{job}.pt"
    pipe = weights.with_suffix(".pt.partial")
    os.mkfifo(pipe)
    assert jobs.run(["scontrol", "release", job]).exit_code == 0
    jobs.until(job, "^Epoch 1: ")
    time.sleep(6)
    state = jobs.show(job)["JobState"]
    if state == "RUNNING":
        saved = subprocess.check_output(["timeout", "60", "cat", pipe])
    result = jobs.wait(job)
    assert (state, result.state) == ("RUNNING", "COMPLETED"), result
    assert f"Weights: {weights}" in result.output, result
    assert "conv1.weight" in torch.load(io.BytesIO(saved), weights_only=True)
    assert weights.exists() and not pipe.exists()
    weights.unlink()


# It stands for Python, which a job of the user nobody cannot read here. Only what
# job.sh does with the data is tested.
STAND_IN = """#!/bin/sh
ls "$LOCAL_JOB_DIR/data/train"
case "$*" in *--lock) chmod a-w "$LOCAL_JOB_DIR/data/train" ;; esac
"""


@pytest.mark.parametrize("script", every_case("multi_node/job.sh", "single_gpu/job.sh"))
def test_read_only_data(jobs, script):
    """An archive of read-only folders, from which even its owner can remove nothing.

    They go after the job. Folders that the training itself makes read-only stay, and
    the job has succeeded all the same.
    """
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder = Path(name)
        train, example = folder / "set" / "train", folder / "example"
        python = folder / ".venv" / "bin" / "python"
        for path in (train, example, python.parent):
            path.mkdir(parents=True)
        for path in (folder, example):
            path.chmod(0o777)
        (train / "1.jpg").write_text("an image")
        train.chmod(0o555)
        archive = folder / "set.tar"
        subprocess.run(["tar", "-C", folder / "set", "-cf", archive, "."], check=True)
        python.write_text(STAND_IN)
        python.chmod(0o755)
        shutil.copy(REPOSITORY / script, example)
        (example / "main.py").touch()
        flags = [*SMALL, *ONE_EACH, "--nodes=1", "--nodelist=node1"]
        flags += [f"--chdir={example}", f"--output={folder}/%j.out"]
        for arguments, is_left in (([], False), (["--lock"], True)):
            jobs.shell = "setpriv --reuid=65534 --regid=65534 --clear-groups".split()
            command = [*flags, example / "job.sh", *arguments]
            job = jobs.submit("", *command, CIFAR10_ARCHIVE=str(archive))
            jobs.shell = []
            result = jobs.wait(job)
            log = (folder / f"{job}.out").read_text()
            found = jobs.on("node1", "bash", "-c", f"echo /tmp/slurm-job-{job}-*")
            jobs.on("node1", "bash", "-c", f"rm -rf /tmp/slurm-job-{job}-*")
            assert result.state == "COMPLETED" and "\n1.jpg\n" in log, log
            assert ("*" not in found.output) == is_left, log
