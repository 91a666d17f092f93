"""SIGKILL to a process of a job, as the kernel does it when memory runs out: the end is the same."""

import random
import time

import pytest
from slurm_jobs import every_case, weights

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.parametrize("kills, epochs", every_case((3, 2), (20, 10)))
def test_random_moments(user, kills, epochs):
    """One job killed so many times, by any process, at any time. A user starts it again where it gave up."""
    seed = time.time_ns() % 2**32
    print(f"seed {seed}")
    chance = random.Random(seed)
    undisturbed = weights(user.wait(user.train(f"--epochs={epochs}")))
    job = user.train(f"--epochs={epochs}", "--save-steps=2")
    for kill in range(kills):
        user.until_found(job, lambda: user.show(job)["JobState"] == "RUNNING", "start", 60)
        started, delay = time.monotonic(), chance.uniform(0, 25)
        user.run(["sleep", f"{delay:.2f}"])  # the moment that was drawn
        node, age = chance.choice(["node1", "node2"]), chance.choice(["--oldest", "--newest"])
        if user.show(job)["JobState"] != "RUNNING":
            break  # it was over before
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
                0.1,
            )
            if user.show(job)["JobState"] == "FAILED":
                assert user.run(["scontrol", "requeue", job]).exit_code == 0
    assert time.monotonic() > started
    assert weights(user.wait(job)) == undisturbed
