"""The imagenet example as jobs: staged, stopped, killed, started: the same weights."""

import os
import signal
from dataclasses import replace

import pytest
from slurm_jobs import ASKED_TO_STOP, EPOCHS, TINY, TWO, weights

pytestmark = pytest.mark.usefixtures("nothing_left")
ONE = ["--nodes=1", *TWO]  # rank


def test_the_whole_way(user, undisturbed):
    """From safe_sbatch through the time limit and a requeue to the end.

    The weights are those of a job that nothing has happened to.
    """
    # Slurm warns the job at once when it gets a limit of three minutes.
    flags = ["--parsable", f"--output={user.logs}/%j.out", "--signal=B:USR1@175"]
    command = ["./safe_sbatch", *TWO, *flags, "--time=10", "job.sh", *TINY, *EPOCHS]
    command += ["--save-steps=3", "--timeout=900"]  # a rank is stopped meanwhile
    submitted = user.run(command, "imagenet")
    assert submitted.exit_code == 0, submitted
    job = submitted.output.split()[-1]
    rank = user.stop_rank(job)
    # Slurm looks every 30 seconds whether it is time.
    assert user.run(["scontrol", "update", f"job={job}", "TimeLimit=3"]).exit_code == 0
    user.until_pending(job, rank, signal.SIGUSR1)
    user.run(["scontrol", "update", f"job={job}", "TimeLimit=60"])
    os.kill(rank, signal.SIGCONT)
    user.until(job, ASKED_TO_STOP.pattern)
    # 75, or 143 for a rank that srun ended after the first had left.
    user.until(job, r"^job.sh: status (75|143): starts again, to resume$")
    result = user.wait(job)
    assert weights(result) == undisturbed
    assert result.restarts > 0
    resumed = r"^Resuming from .*-step-\d+.pt$"
    assert result.find(resumed), result


def test_cancelled_and_resumed(user, tmp_path):
    """A cancelled job saves, and does not come back.

    Another one goes on with its checkpoints, on another number of ranks.
    """
    folder = {"RUN_DIR": str(tmp_path)}
    # Ranks agree in each step: SIGKILL comes in 15 s.
    job = user.train("--epochs=3", "--save-steps=1", **folder)
    checkpoint = tmp_path / "epoch-001-step-000002.pt"
    user.until_found(job, checkpoint.exists, checkpoint.name, 300, 0.001)
    cancelled = user.cancel(job)
    assert (cancelled.state, cancelled.restarts) == ("CANCELLED", 0), cancelled
    ((step, epoch),) = ASKED_TO_STOP.findall(cancelled.output)
    saved = tmp_path / f"epoch-{epoch:0>3}-step-{step:0>6}.pt"
    resumed = user.wait(user.train("--epochs=3", flags=ONE, **folder))
    assert f"\nResuming from {saved}\n" in resumed.output, resumed
    # The epoch lines count all samples of whole batches.
    weights(replace(resumed, output=cancelled.output + resumed.output))
    share = "World size 1: 16 steps an epoch, 1 x 10 samples each, of 160; 24 to"
    assert share in resumed.output, resumed


def test_array(user):
    """Each task of an array has data, a checkpoint folder and a seed of its own.

    They also remove what a job of this user has left there, and nothing of others.
    """
    folders = set(user.checkpoints("").glob("*"))
    flags = ["--nodelist=node1", "--array=1-2", f"--output={user.logs}/%A_%a.out"]
    # One that runs on another node: some nodes share their /tmp.
    other = ["--nodelist=node2", "--mem=100M", "--wrap=sleep infinity"]
    running = user.submit("", *other)
    # And a task of an array that was requeued, which squeue shows as one of the rest.
    rest = user.submit("", *other, "--array=1-4%1")
    task = f"{rest}_1"
    user.until_found(
        task, lambda: user.show(task)["JobState"] == "RUNNING", "a start", timeout=60
    )
    requeued = user.show(task)["JobId"]
    assert user.run(["scontrol", "requeuehold", task]).exit_code == 0
    user.until_found(
        task, lambda: user.show(task)["JobState"] == "PENDING", "a requeue", timeout=60
    )
    names = ["99999-cluster", "99998-cluster", "99999-another", "99997", "cache"]
    names += [f"{running}-cluster", f"{requeued}-cluster"]
    abandoned, *kept = folders_of_jobs = [f"/tmp/slurm-job-{name}" for name in names]
    user.on("node1", "mkdir", "-p", f"{abandoned}/data", *folders_of_jobs)
    user.on("node1", "chown", "nobody", kept[0])
    # What a user may have set for squeue hides no job from the examples.
    array = user.train("--epochs=1", flags=[*ONE, *flags], SQUEUE_PARTITION="urgent")
    results = [user.wait(f"{array}_{task}") for task in (1, 2)]
    find = "find /tmp -maxdepth 1 -name slurm-job-*".split()
    left = user.on("node1", *find).output.split()
    user.run(["scancel", running, rest])
    user.on("node1", "rm", "-r", *kept)
    assert sorted(left) == sorted(kept)
    assert len({weights(result) for result in results}) == 2  # of two seeds
    told = "".join(result.output for result in results)
    assert f"node1: removed {abandoned}, " in told
    assert told.count("node1: staged ") == 2
    made = set(user.checkpoints("").glob("*")) - folders
    assert [(folder / "best.pt").exists() for folder in made] == [True, True]


MISSING = [  # archives, arguments, message
    (
        "",
        [],
        r"^main.py: error: on node\d: no data in /tmp/slurm-job-\d+-cluster\.\w+/data: "
        "for job.sh, set IMAGENET_DIR to the archives; else run prepare_data.py",
    ),
    (
        "/no/such/folder",
        [],
        r"^prepare_data.py: error: cannot stage /no/such/folder in \S+ on node\d: "
        ".*No such file",
    ),
    (  # With --data-dir, nothing is staged.
        "/no/such/folder",
        ["--data-dir", "/no/data"],
        r"^main.py: error: on node\d: no data in /no/data: ",
    ),
]


def test_missing_data(user):
    """One line says what to do, and the job is not tried again."""
    jobs = [
        user.train(*arguments, flags=ONE, IMAGENET_DIR=archives)
        for archives, arguments, _ in MISSING
    ]
    for job, (_, _, message) in zip(jobs, MISSING, strict=True):
        result = user.wait(job)
        assert (result.state, result.restarts) == ("FAILED", 0), result
        assert result.find(message), result
        for text in ("Traceback", "World size"):
            assert text not in result.output, result
