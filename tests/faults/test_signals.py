"""What Slurm itself does to a job: signals, requeues, suspension, preemption.

The end is the same.
"""

import contextlib
import os
import re
import signal
import time

import pytest
from slurm_jobs import (
    ASKED_TO_STOP,
    EPOCHS,
    TWO,
    WHAT_NOW,
    User,
    every_case,
    stop,
)

pytestmark = pytest.mark.usefixtures("nothing_left")
NO_PROGRESS = r"job.sh: error: status \d+, no new checkpoint in .*: not started again"


def preempt(user: User, job: str, rank: int) -> None:
    """Let a more urgent job take the nodes until the first one is back in the queue.

    A stopped rank of it goes on when Slurm has sent the signal to end.
    """
    # exec: without cgroups, Slurm may miss a child that the shell has just started.
    sleep = "--wrap=exec sleep infinity"
    other = user.submit("", "--partition=urgent", "--nodes=3", "--exclusive", sleep)
    # Slurm prints the first, unless the step has just begun.
    user.until(job, r"\*\*\* .* CANCELLED AT |^job.sh: status ")
    with contextlib.suppress(ProcessLookupError):
        # With proctrack/cgroup, Slurm sends it to uv only.
        os.kill(rank, signal.SIGCONT)
    user.until_found(
        job, lambda: user.show(job)["JobState"] == "PENDING", "preemption", 150
    )
    user.run(["scancel", other])


def warn_stopped(user: User, job: str, rank: int) -> None:
    """Warn a job while one rank is stopped, which goes on when the warning is there."""
    user.warn(job)
    user.until_pending(job, rank, signal.SIGUSR1)
    os.kill(rank, signal.SIGCONT)


def test_four_warnings(user, same_end):
    """Four times in a row the time limit comes near; the job saves and comes back."""
    job = user.train(*EPOCHS, "--save-steps=1")
    moments = "001-step-000003 001-step-000009 001-step-000016 002-step-000006".split()
    for requeues, moment in enumerate(moments, 1):
        user.until_found(
            job,
            lambda n=requeues: user.log(job).count("\nWorld size") == n,
            "World size",
            120,
        )
        rank = user.pid("node2", "main.py")
        user.until_file(job, f"epoch-{moment}.pt")
        stop(rank)  # the last steps must not be over when the warning comes
        warn_stopped(user, job, rank)
        user.until(job, f"^Job .* requeued {requeues} times$")
    result = same_end(job, restarts=4)
    assert len(ASKED_TO_STOP.findall(result.output)) == 4


def test_requeue_by_hand(user, same_end):
    """`scontrol requeue` leaves the ranks time to save."""
    job = user.train(*EPOCHS, "--save-steps=3")
    user.until(job, "^World size")
    rank = user.pid("node1", "main.py")
    user.until_file(job, "*-step-000003.pt")
    stop(rank)
    # What another cluster's habits may send to job.sh does not end it.
    assert user.run(["scancel", "--batch", "--signal=USR1", job]).exit_code == 0
    assert user.run(["scontrol", "requeue", job]).exit_code == 0
    assert user.job_folder(job), user.log(
        job
    )  # it may still be saving, with files there
    with contextlib.suppress(ProcessLookupError):  # Slurm makes it go on, too
        os.kill(rank, signal.SIGCONT)
    user.until(job, "^Resuming from")
    assert user.show(job)["Requeue"] == "1"  # whatever happens next, too
    result = same_end(job)
    assert len(ASKED_TO_STOP.findall(result.output)) == 1, result
    assert result.find(r"^Resuming from .*-step-\d+.pt$"), result


def test_no_requeue(user, same_end):
    """Where a site, or its user, forbids it, the last line says how to go on."""
    steps = [*EPOCHS, "--save-steps=3"]
    job = user.train(*steps, flags=[*TWO, "--no-requeue"])
    warn_stopped(user, job, user.stop_rank(job))
    result = user.wait(job)
    assert (result.state, result.restarts) == ("FAILED", 0), result
    says = r"^job.sh: error: Slurm does not start it again. To go on: RUN_DIR='(.*)' "
    (folder,) = result.find(f"{says}sbatch job.sh$")
    assert not result.find("starts again"), result
    same_end(user.train(*steps, RUN_DIR=folder), restarts=0)


def test_array(user, same_end):
    """What happens to a task of an array happens to no other.

    The last one has the number of them all.
    """
    flags = [*TWO, "--time=60", "--array=1-2", f"--output={user.logs}/%A_%a.out"]
    array = user.train(
        *EPOCHS, "--seed=0", "--save-steps=1", "--timeout=900", flags=flags
    )
    first, last = f"{array}_1", f"{array}_2"
    ranks = {}

    def trains() -> list[str]:
        return [
            task
            for task in (first, last)
            if task not in ranks and list(user.checkpoints(task).glob("*-step-0*.pt"))
        ]

    while len(ranks) < 2:
        for task in user.until_found(array, trains, "a checkpoint", 300, 0.001):
            ranks[task] = user.pid("node1", f"main.py --seed={task[-1]}")
            stop(ranks[task])  # the first one is to be there until the last has ended
    assert user.show(last)["JobId"] == array
    warn_stopped(user, last, ranks[last])
    same_end(last)
    assert user.show(first)["Restarts"] == "0"
    warn_stopped(user, first, ranks[first])
    same_end(first)


def test_suspended(user, same_end):
    """Suspended for longer than --timeout, while it trains, a job just goes on."""
    job = user.train(*EPOCHS, "--save-steps=3", "--timeout=15")
    user.until_file(job, "*-step-000003.pt")
    assert user.run(["scontrol", "suspend", job]).exit_code == 0
    user.until_found(
        job, lambda: user.show(job)["JobState"] == "SUSPENDED", "suspension", 20
    )
    # The length of the suspension, not a wait for something.
    user.run(["sleep", 20])
    assert user.run(["scontrol", "resume", job]).exit_code == 0
    result = same_end(job, restarts=0)
    assert "does not answer" not in result.output, result


@contextlib.contextmanager
def grace_time(user: User, seconds: int):
    """Let Slurm give preempted jobs so long to end."""
    set_grace = "scontrol update PartitionName=main GraceTime"
    assert user.run(f"{set_grace}={seconds}".split()).exit_code == 0
    try:
        yield
    finally:
        user.run(f"{set_grace}=0".split())


def test_preempted_before_the_first_step(user):
    """A preempted job comes back, even without a checkpoint."""
    with grace_time(user, 60):
        job = user.train(*EPOCHS)
        # It cannot end before the signal.
        user.signal_at_start(job, "main.py", signal.SIGSTOP)
        preempt(user, job, user.pid("node2", "main.py"))
        result = user.wait(job)
    assert (
        result.find("^job.sh: status .*: starts again, to resume$")
        and result.restarts == 1
    )
    assert not ASKED_TO_STOP.search(result.output), result


@pytest.mark.parametrize("grace", every_case(60, 0))
def test_preempted(user, same_end, grace):
    """A job with more urgent ones behind it saves in its grace time, and comes back."""
    state = user.state_after_preemption() if grace else "COMPLETED"
    with grace_time(user, grace):
        job = user.train(*EPOCHS, "--save-steps=3")
        preempt(user, job, user.stop_rank(job))
        user.until(job, "^Resuming from")
        assert user.show(job)["Requeue"] == "1"  # it may be preempted again
        result = same_end(job, state=state)
    assert len(ASKED_TO_STOP.findall(result.output)) == 1, result


MOMENTS = every_case(
    "staging", "import", "first step", "save", "last steps", "after the last epoch"
)


@pytest.mark.parametrize("moment", MOMENTS)
def test_warned(user, same_end, moment):
    """The warning before the time limit, at moments at which it is easily lost."""
    saved = {
        "first step": "step [12] of epoch 1",
        "save": r"step \d+ of epoch \d",
        "last steps": "step 1[56] of epoch 2",
    }
    steps = {"first step": 1, "save": 1, "last steps": 14}
    job = user.train(*EPOCHS, f"--save-steps={steps.get(moment, 1000)}")
    if moment in ("staging", "import"):
        file = "prepare_data.py" if moment == "staging" else "main.py"
        user.signal_at_start(job, file, signal.SIGSTOP)
        user.warn(job)
        # Only job.sh is warned: nobody else lets the stopped process go on.
        user.kill("node2", file, signal.SIGCONT)
        result = user.wait(job)
        assert result.state == "FAILED", result
        *before, message = result.find(r"^job.sh: error: .*")
        early = "job.sh: error: Slurm's warning came before the training"
        assert before == ([early] if moment == "staging" else []), result
        assert re.fullmatch(NO_PROGRESS, message), result
        assert result.restarts == 0
        (command,) = result.find(WHAT_NOW)
        told = user.run(["bash", "-c", command], "/")
        assert "This start has saved nothing new" in told.output, told
        return
    if moment == "save":
        rank = user.stop_in_a_save(job)
    elif moment == "after the last epoch":
        user.until(job, "^World size")
        rank = user.pid("node2", "main.py")
        user.until_found(
            job, lambda: "\nEpoch 2: " in user.log(job), "Epoch 2", 120, 0.001
        )
        stop(rank)
    else:
        files = {"first step": "*-step-000001.pt*"}
        rank = user.stop_rank(job, files.get(moment, "epoch-002-step-000014.pt*"))
    warn_stopped(user, job, rank)
    # After the last epoch, nothing agrees any more:
    # it ends as if it had not been warned.
    result = same_end(job, restarts=moment in saved)
    said = result.find("^Asked to stop: saved (.*), to go on from there$")
    assert len(said) == result.restarts, result
    assert all(re.fullmatch(saved[moment], words) for words in said), result


def test_cancelled_while_it_tidies_up(user):
    """Cancelled after the warning, but before its requeue, a job does not come back."""
    job = user.train("--epochs=99", "--save-steps=3")
    user.until_file(job, "*-step-000003.pt")
    folder = user.job_folder(job, "node2")
    files = f"mkdir {folder}/many; cd $_; seq 500000 | xargs touch"
    user.on("node2", "bash", "-c", files)
    user.warn(job)

    def removes() -> bool:
        return user.on("node2", "pgrep", "--full", "rm -rf").exit_code == 0

    user.until_found(job, removes, "rm", 60, 0.01)
    result = user.cancel(job)
    assert (result.state, result.restarts) == ("CANCELLED", 0), result


# In front of Slurm's own scontrol: a busy controller, which does not answer the first
# time, or answers a requeue late, when the requeue has ended who asked.
BUSY = """\
#!/bin/bash
own=$(type -ap scontrol | grep -vF "$0" | head -n 1)
if [[ $* == "{command}"* && ! -e "$0.$1" ]]; then
    touch "$0.$1"
    echo "slurm_load_jobs error: Socket timed out on send/recv operation" >&2
    {instead}
    exit 1
fi
exec "$own" "$@"
"""


@pytest.mark.parametrize(
    "command, instead",
    every_case(("requeue", ""), ("show job", ""), ("requeue", '"$own" "$@"; sleep 3')),
)
def test_busy_controller(user, same_end, tmp_path, command, instead):
    """It is asked again, and nobody is told that a requeued job was not."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(BUSY.format(command=command, instead=instead))
    scontrol.chmod(0o755)
    path = f"{tmp_path}:{user.env['PATH']}"
    job = user.train(*EPOCHS, "--save-steps=3", PATH=path)
    rank = user.stop_rank(job)
    warn_stopped(user, job, rank)
    user.until(job, "^Resuming from")
    result = same_end(job)
    assert list(tmp_path.glob("scontrol.*")), "it was never busy"
    assert "not started again" not in result.output, result


@pytest.mark.parametrize("answers", every_case(0, 1))
def test_controller_that_never_answers(user, tmp_path, answers):
    """A job does not hold its nodes for ever: it ends, and one line says why.

    The controller answers this job never, or only at its start.
    """
    scontrol = tmp_path / "scontrol"
    command = f"""own=$(type -ap scontrol | grep -vF "$0" | head -n 1)
        echo x >> "$0.calls"
        [ $(wc -l < "$0.calls") -gt {answers} ] || exec "$own" "$@"
        echo "slurm_load_jobs error: Access/permission denied" >&2
        exit 1"""
    scontrol.write_text(f"#!/bin/bash\n{command}\n")
    sleep = tmp_path / "sleep"  # job.sh sleeps between its questions
    sleep.write_text("#!/bin/bash\nexec /bin/sleep 0.01\n")
    for program in (scontrol, sleep):
        program.chmod(0o755)
    path = f"{tmp_path}:{user.env['PATH']}"
    result = user.wait(user.train("--epochs=0", PATH=path), timeout=90)
    assert (result.state, result.restarts) == ("FAILED", 0), result
    said = result.find(r"^job\.sh: error: .*$")
    silent = "job.sh: error: no answer of Slurm's controller in ten minutes"
    assert said.count(silent) == 1, result
    last = NO_PROGRESS if answers else silent
    assert re.fullmatch(last, said[-1]), result


def test_slow_disk_at_the_end(user, same_end, tmp_path):
    """What job.sh cannot remove in time costs no requeue."""
    rm = tmp_path / "rm"
    # For the job's folder itself, it takes for ever.
    wait = "[[ $* != */slurm-job-+([0-9])-cluster.* ]] || exec sleep infinity"
    rm.write_text(f'#!/bin/bash\n{wait}\n/bin/rm "$@"\n')
    rm.chmod(0o755)
    # Slurm warns the job at once when it gets a limit of three minutes.
    flags = [*TWO, "--signal=B:USR1@175", "--time=10"]
    path = f"{tmp_path}:{user.env['PATH']}"
    job = user.train(*EPOCHS, "--save-steps=3", "--timeout=900", flags=flags, PATH=path)
    rank = user.stop_rank(job)
    assert user.run(["scontrol", "update", f"job={job}", "TimeLimit=3"]).exit_code == 0
    user.until_pending(job, rank, signal.SIGUSR1)
    # Slurm counts whole minutes from a start that is slow here: time is measured.
    user.run(["scontrol", "update", f"job={job}", "TimeLimit=60"])
    warned = time.monotonic()
    os.kill(rank, signal.SIGCONT)
    user.until(job, "^job.sh: status .*: starts again, to resume$", timeout=240)
    assert time.monotonic() - warned < 175
    rm.unlink()
    same_end(job)
