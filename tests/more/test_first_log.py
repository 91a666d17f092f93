"""README.rst: the end of a log that is right, and of one that is not."""

import re

import pytest
from slurm_jobs import REPOSITORY, listings
from test_launch import ONE_EPOCH

PAGE = (REPOSITORY / "README.rst").read_text()
# What differs from job to job: metrics, numbers of jobs and nodes.
NUMBER = re.compile(r"\d+\.\d+%?|(?<=model-)\d+|(?<=slurm-job-)[^/ ]+|(?<=node)\d")


def shown(page: str, job: str) -> str:
    """Return words with what differs from job to job left out."""
    return NUMBER.sub("…", page.replace(job, "/home/you/pytorch_on_slurm"))


@pytest.mark.usefixtures("nothing_left")
def test_first_log(jobs):
    *_, right, wrong, _two_nodes = listings(PAGE, "Your first job")
    one = "--cpus-per-task=1"  # on a busy machine, threads would wait for each other
    result = jobs.sbatch("single_gpu", one, "job.sh", *ONE_EPOCH)
    assert result.state == "COMPLETED", result
    lines = shown(result.output, str(jobs.clone)).splitlines()
    assert lines[-2:] == shown(right, str(jobs.clone)).splitlines(), result
    result = jobs.sbatch("single_gpu", "job.sh", CIFAR10_ARCHIVE="")
    assert result.state == "FAILED", result
    lines = shown(result.output, str(jobs.clone)).splitlines()
    error, end = wrong.splitlines()
    before, after = shown(error, str(jobs.clone)).split(" (…)")
    assert [x for x in lines if x.startswith(before) and x.endswith(after)], result
    assert shown(end, str(jobs.clone)) in lines, result
