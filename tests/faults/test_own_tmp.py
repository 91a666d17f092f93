"""Warnings on a cluster where each job has a /tmp of its own.

It is gone when the job's extern step ends, as it does by a signal to the whole job.
"""

import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest
from conftest import start_jobs
from drawn_imagenet import draw_imagenet
from slurm_jobs import ASKED_TO_STOP, TWO, User, stop


@pytest.fixture(scope="module")
def user(start_cluster, clone, archive):
    """The clone is mounted elsewhere: a job sees nothing of the machine's /tmp."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        there = Path(folder)
        subprocess.run(["mount", "--bind", clone.parent, there], check=True)
        for name in ("own/archives", "own/logs", "own/project"):
            (clone.parent / name).mkdir(parents=True)
        draw_imagenet(there / "own/archives", 4, train=40, valid=6, resolution=40)
        try:
            with start_cluster(own_tmp=True) as cluster:
                jobs = start_jobs(cluster, there / clone.name, archive, there)
                user = User(cluster, jobs.clone, archive, there / "own/logs")
                user.env |= {"IMAGENET_DIR": str(there / "own/archives")}
                yield user
        finally:
            subprocess.run(["umount", there], check=True)
            shutil.rmtree(clone.parent / "own")


@pytest.fixture(scope="module")
def project(user):
    """A project of one's own."""
    folder = user.logs.parent / "project"
    names = ["docs/your_training/job.sh", "docs/your_training/main.py"]
    for name in [*names, "imagenet/resume.py"]:
        shutil.copy(user.clone / name, folder)
    (folder / ".venv").symlink_to(user.clone / ".venv")
    return folder


@pytest.mark.parametrize("whose", ["imagenet", "your training"])
def test_warned(user, project, whose):
    """Warned by hand, and by Slurm, it saves, comes back and goes on."""
    flags = [*TWO, "--time=10"]
    if whose == "imagenet":
        job = user.train("--epochs=12", "--limit-valid-samples=8", flags=flags)
    else:
        job = user.submit(project, *flags, "job.sh")

    def epochs() -> int:
        return user.log(job).count("\nEpoch ")

    for starts, limit in enumerate((False, True), 1):
        done = epochs()
        user.until_found(job, lambda n=done: epochs() > n, "an epoch", 120)
        # It must not be over when the warning comes.
        stop(rank := user.pid("node1", "main.py"))
        if limit:  # less than 180 s from now
            update = ["scontrol", "update", f"job={job}", "TimeLimit=3"]
            assert user.run(update).exit_code == 0
        else:
            user.warn(job)
        user.until_pending(job, rank, signal.SIGUSR1)
        user.run(["scontrol", "update", f"job={job}", "TimeLimit=60"])
        os.kill(rank, signal.SIGCONT)
        again = rf"(?s:(^Job .* requeued .*){{{starts}}})^job.sh: .*: starts again"
        user.until(job, again)
        user.until(job, f"^Job .* requeued {starts} times$")
    result = user.wait(job)
    assert (result.state, result.restarts) == ("COMPLETED", 2), result
    assert len(ASKED_TO_STOP.findall(result.output)) == 2, result
    assert len(result.find("^Resuming from .*$")) == 2, result
