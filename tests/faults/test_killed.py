"""SIGKILL to a process of a job, as when memory runs out: the end is the same."""

import os
import re
import signal
import time

import pytest
from slurm_jobs import EPOCHS, every_case

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.parametrize(
    "moment", ["step", "save", "staging", *every_case("", "evaluation", "import")[1:]]
)
def test_killed(user, same_end, moment):
    """A process of the job dies at any moment: it is named, and the others end soon."""
    job = user.train(*EPOCHS, f"--save-steps={1 if moment == 'save' else 2}")
    task = 0 if moment == "save" else 1
    if moment in ("staging", "import"):
        file = {"staging": "prepare_data.py", "import": "main.py"}[moment]
        user.signal_at_start(job, file, signal.SIGKILL)
    elif moment == "save":
        os.kill(user.stop_in_a_save(job), signal.SIGKILL)
    else:
        user.until(job, "^World size")
        rank = user.pid("node2", "main.py")
        user.until_file(
            job, "*-step-000002.pt" if moment == "step" else "epoch-001-step-000016.pt*"
        )
        os.kill(rank, signal.SIGKILL)
    start = time.monotonic()
    if moment in ("staging", "import"):
        # Nothing was trained: it might fail for ever.
        assert user.wait(job).state == "FAILED"
    else:
        user.until(job, "^job.sh: status .*: starts again, to resume$")
    assert time.monotonic() - start < 60
    output = user.log(job)
    died = (
        rf"^srun: error: node{task + 1}: task {task}: "
        r"(Exited with exit code 137|Killed)$"
    )
    assert re.search(died, output, re.MULTILINE), output
    if moment in ("staging", "import"):
        assert user.run(["scontrol", "requeue", job]).exit_code == 0
    elif moment == "save":
        assert list(user.checkpoints(job).glob("epoch-*.partial"))  # it was cut
    elif moment == "evaluation":
        assert "\nEpoch 1: " not in output, output
    same_end(job)


def test_rank_0_raises(user, same_end):
    """An exception in rank 0 alone, between others' barriers, ends the job at once."""
    job = user.train(*EPOCHS, "--save-minutes=0")  # after every step
    user.until_file(job, "*-step-000001.pt")
    assert user.kill("node1", "main.py", signal.SIGINT) == 0  # raises KeyboardInterrupt
    start = time.monotonic()
    user.until(job, "^job.sh: status .*: starts again, to resume$")
    assert time.monotonic() - start < 60
    result = same_end(job)
    assert "KeyboardInterrupt" in result.output, result


@pytest.mark.parametrize(
    "number", every_case(signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1)
)
def test_data_loader_worker(user, same_end, number):
    """A killed worker ends the training, which starts again; other signals do not."""
    job = user.train(*EPOCHS, "--save-steps=2")
    user.until_file(job, "*-step-000002.pt")
    assert user.kill("node2", "main.py", number, age="--newest") == 0
    result = same_end(job, restarts=number == signal.SIGKILL)
    if number == signal.SIGKILL:
        assert re.search(
            "RuntimeError: DataLoader worker .* is killed by signal", result.output
        ), result


@pytest.mark.parametrize("rank", every_case(1, 0))
def test_rank_sleeps_for_ever(user, same_end, rank):
    """It is named in time, with the others' Python stacks; the job is started again."""
    job = user.train(*EPOCHS, "--save-steps=3", "--timeout=30")
    user.until_file(job, "*-step-000003.pt")
    assert user.kill(f"node{rank + 1}", "main.py", signal.SIGSTOP) == 0
    named = rf"^error: rank {rank} on node{rank + 1} does not answer"
    user.until(job, named, timeout=90)
    restarts = 1
    if rank == 1:
        # Once more, while rank 0 saves, for which the others wait as long as it takes.
        user.until(job, "^Resuming from")
        rank_0 = user.stop_in_a_save(job)
        assert user.kill("node2", "main.py", signal.SIGSTOP) == 0
        os.kill(rank_0, signal.SIGCONT)
        user.until(job, rf"{named}(.*\n)+{named}", timeout=90)
        restarts = 2
    result = same_end(job, restarts)
    other = rf"^error: rank {1 - rank} on node{2 - rank} has not moved for \d+ s"
    assert result.find(other), result
    stack = r"^  File .*main.py\", line \d+ in train$"
    assert result.find(stack), result
