"""docs/after_a_job.rst: what can be run without accounting, mail and a laptop."""

import re
import shlex

import pytest
from slurm_jobs import IMAGENET_EPOCH_LINE, REPOSITORY, TINY

pytestmark = pytest.mark.usefixtures("nothing_left")
PAGE = (REPOSITORY / "docs" / "after_a_job.rst").read_text()
ONE = "--nodes=1 --ntasks-per-node=1 --gpus-per-node=1 --cpus-per-task=1 --mem=2G"


def test_which_line_won(user):
    """The command lists the runs of a real array, the best one first."""
    lines = ["--learning-rate 0.1", "--learning-rate 0 --weight-decay 0"]
    sweep = user.logs / "sweep.txt"
    sweep.write_text("\n".join(lines) + "\n")
    output = f"--output={user.logs}/slurm-%A_%a.out"
    flags = [*ONE.split(), output, "--array=1-2", "job.sh", f"@{sweep}"]
    job = user.submit("imagenet", *flags, *TINY, "--epochs=3")
    expected = []
    for task, line in enumerate(lines, 1):
        result = user.wait(f"{job}_{task}")
        log = f"slurm-{job}_{task}.out"
        text = (user.logs / log).read_text()
        assert result.state == "COMPLETED", text
        epochs = IMAGENET_EPOCH_LINE.findall(text)
        assert len(epochs) == 3, text
        expected.append((max(float(epoch[4]) for epoch in epochs), log, line))
    command = re.search(r"^    awk (.*\n)+?.*\| sort -rn$", PAGE, re.M)[0]
    command = f"cd {shlex.quote(str(user.logs))}; {command.replace('28', job)}"
    listed = user.run(["bash", "-euc", command]).output.splitlines()
    found = [line.split(" ", 2) for line in listed]
    rows = [(float(best.rstrip("%")), log, line) for best, log, line in found]
    assert sorted(rows) == sorted(expected)
    assert rows[0][0] >= rows[1][0]


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
