"""SIGKILL to a process of a job, as the kernel does it when memory runs out: the end is the same."""

import random
import re
import signal
import time

import pytest
from slurm_jobs import EPOCHS, every_case, weights

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.parametrize("moment", ["step", "save", "evaluation", "staging", *every_case("", "import")[1:]])
def test_killed(user, undisturbed, moment):
    """A process of the job dies at any moment."""
    job = user.train(*EPOCHS, "--save-steps=2")
    if moment in ("staging", "import"):
        file = {"staging": "prepare_data.py", "import": "main.py"}[moment]
        user.until_found(job, lambda: user.kill("node2", file) == 0, moment, 60, pause=0.005)
        assert user.wait(job).state == "FAILED"  # nothing was trained: it might fail for ever
        assert user.run(["scontrol", "requeue", job]).exit_code == 0
    else:
        file = {"step": "*-step-000002.pt", "save": "*.partial", "evaluation": "epoch-001-step-000016.pt"}
        user.until_file(job, file[moment])
        assert user.kill("node1" if moment == "save" else "node2", "main.py") == 0
    result = user.wait(job)
    assert weights(result) == undisturbed
    assert user.show(job)["Restarts"] == "1"


def test_rank_0_raises(user, undisturbed):
    """An exception in rank 0 alone, between the others' barriers, ends the job at once."""
    job = user.train(*EPOCHS, "--save-steps=2")
    user.until_file(job, "*-step-000002.pt")
    assert user.kill("node1", "main.py", signal.SIGINT) == 0  # raises KeyboardInterrupt
    start = time.monotonic()
    user.until(job, "^job.sh: status .*: to be requeued$")
    assert time.monotonic() - start < 60
    result = user.wait(job)
    assert weights(result) == undisturbed
    assert "KeyboardInterrupt" in result.output, result


@pytest.mark.parametrize("number", every_case(signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1))
def test_data_loader_worker(user, undisturbed, number):
    """A worker that is killed ends the training, which starts again; other signals are not for workers."""
    job = user.train(*EPOCHS, "--save-steps=2")
    user.until_file(job, "*-step-000002.pt")
    assert user.kill("node2", "main.py", number, age="--newest") == 0
    result = user.wait(job)
    assert weights(result) == undisturbed
    assert user.show(job)["Restarts"] == ("1" if number == signal.SIGKILL else "0")
    if number == signal.SIGKILL:
        assert re.search("RuntimeError: .*DataLoader worker .*is killed", result.output), result


def test_rank_sleeps_for_ever(user):
    """It is named, with the Python stack of every rank, within the timeout; the job is started again."""
    job = user.train("--epochs=200", "--timeout=15")
    user.until(job, r"^Epoch 1: ")
    assert user.kill("node2", "main.py", signal.SIGSTOP) == 0
    user.until(job, r"they wait for rank 1 on node2 \(does not answer", timeout=60)
    user.until(job, r"^Job .* requeued 1 times$")
    output = user.cancel(job).output
    assert re.search(r"^warning: rank 0 of 2 on node1 has not moved for \d+ s", output, re.MULTILINE), output
    assert "main.py" in output and " in train" in output, output


def test_always_killed(user):
    """A job that never gets to its next checkpoint gives up after a few tries, and says so."""
    job = user.train(*EPOCHS)
    for requeues in range(1, 5):
        user.until(job, rf"(^World size(.|\n)*){{{requeues}}}")
        for node in ("node1", "node2"):
            begun = [*user.cluster.namespaces(node), "test", "-e", f"/tmp/slurm-job-{job}/training"]
            user.until_found(job, lambda begun=begun: user.run(begun).exit_code == 0, "training", 60, 0.001)
        assert user.kill("node2", "main.py") == 0
        user.until(job, f"^Job .* requeued {requeues} times$")
    result = user.wait(job)
    assert result.state == "FAILED", result
    assert user.show(job)["Restarts"] == "4"
    (error,) = re.findall("^main.py: error: .*", result.output, re.MULTILINE)
    assert error.startswith("main.py: error: this job was started 4 times from the beginning and never"), (
        result
    )


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kills, epochs", every_case((3, 15), (20, 40)))
def test_random_moments(user, kills, epochs):
    """One job killed so many times, by any process, at any time. A user starts it again where it gave up."""
    seed = time.time_ns() % 2**32
    print(f"seed {seed}")
    chance = random.Random(seed)
    undisturbed = weights(user.wait(user.train(f"--epochs={epochs}")))
    job = user.train(f"--epochs={epochs}", "--save-steps=2")
    for kill in range(kills):
        user.until_found(job, lambda: user.show(job)["JobState"] in ("RUNNING", "COMPLETED"), "start", 60)
        delay = chance.uniform(0, 15)
        user.run(["sleep", f"{delay:.2f}"])  # the moment that was drawn
        node, age = chance.choice(["node1", "node2"]), chance.choice(["--oldest", "--newest"])
        if user.show(job)["JobState"] != "RUNNING":
            assert kill > 0, "it was over before"
            break
        where = user.log(job).splitlines()[-1:]
        killed = user.kill(node, "", age=age) == 0
        print(f"kill {kill}: {delay:.2f} s after start, {node} {age}, {killed=}, after {where}")
        if killed:
            restarts = user.show(job)["Restarts"]
            user.until_found(
                job,
                lambda restarts=restarts: (
                    user.show(job)["JobState"] in ("FAILED", "COMPLETED")
                    or user.show(job)["Restarts"] != restarts
                ),
                "end of the killed job",
                90,
                0.01,
            )
            if user.show(job)["JobState"] == "FAILED":
                assert user.run(["scontrol", "requeue", job]).exit_code == 0
    assert weights(user.wait(job)) == undisturbed
