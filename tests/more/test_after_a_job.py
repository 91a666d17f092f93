"""docs/after_a_job.rst: what can be run without accounting, mail and a laptop."""

import re

import pytest
from slurm_jobs import REPOSITORY

pytestmark = pytest.mark.usefixtures("nothing_left")
PAGE = (REPOSITORY / "docs" / "after_a_job.rst").read_text()
ONE = "--nodes=1 --ntasks-per-node=1 --gpus-per-node=1 --cpus-per-task=1 --mem=2G"


def test_when_will_it_start(jobs):
    """The page's command lists a job that waits for another one."""
    running = jobs.submit("", *ONE.split(), "--wrap=sleep 1000")
    after = [f"--dependency=afterok:{running}", "--mail-type=END,FAIL"]
    waiting = jobs.submit("", *ONE.split(), *after, "--wrap=:")
    (command,) = re.findall(r"^    (squeue --me --start)$", PAGE, re.MULTILINE)
    listed = jobs.run(command.split()).output.splitlines()
    assert "START_TIME" in listed[0], listed
    assert waiting in [row.split()[0] for row in listed[1:]], listed
    for job in (waiting, running):
        jobs.cancel(job)
