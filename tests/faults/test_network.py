"""Networks, nodes and the controller fail, and come back: the end is the same."""

import os
import re
import signal

import pytest
from slurm_jobs import EPOCHS, TWO, every_case, weights

# Ranks wait 15 seconds for each other, and say before that who does not answer.
ARGUMENTS = [*EPOCHS, "--save-steps=3", "--timeout=15"]
NOTICED = "^error: rank . on node. does not answer"


@pytest.fixture(autouse=True)
def repaired(user, nothing_left):
    """Nodes and network are whole again after each test, and all nodes idle."""
    yield
    user.cluster.revive()
    flush = "ip route flush type blackhole".split()
    for node in ("node1", "node2"):
        user.cluster.cable(node, "up")
        user.on(node, *flush)
    user.until_controller()
    user.run(["scontrol", "update", "NodeName=ALL", "State=RESUME"])

    def idle() -> bool:
        states = user.run("sinfo -hN -p main -o %T".split()).output.split()
        return states == ["idle"] * len(user.cluster.nodes)

    user.until_found("", idle, "idle nodes", 60, 0.01)


@pytest.mark.parametrize("length", every_case("long", "short"))
@pytest.mark.parametrize(
    "what", every_case("cable of node2", "cable of node1", "route")
)
def test_network_fails(user, same_end, what, length):
    """Nodes cannot reach each other, or one nobody, for long or for a moment only."""

    def change(cable: str, route: str) -> None:
        if what == "route":
            user.route(route)
        else:
            user.cluster.cable(what.split()[-1], cable)

    job = user.train(*ARGUMENTS)
    user.until_file(job, "*-step-000003.pt")
    change("down", "add")
    if length == "long":
        user.until(job, NOTICED)
        # job.sh requeues the job, or Slurm, which misses the node.
        ended = "^srun: error: node.: task .: Exited with exit code 1"
        user.until(job, f"{ended}|requeued 1 times$")
    else:
        user.run(["sleep", "4"])  # as long as the fault lasts
    change("up", "del")
    result = same_end(job, restarts=length == "long")
    if length == "long" and "starts again" not in result.output:
        # Slurm did it, because it missed a node: what the first start had there is
        # left, until somebody restarts the node, or this user's next job removes it.
        for node in ("node1", "node2"):
            user.cluster.crash(node)
    if length == "short":
        assert "Error" not in result.output, result
        assert "error: rank" not in result.output, result


CRASHES = [("node2", "stays away"), ("node2", "returns")]


@pytest.mark.parametrize(
    "node, then",
    [*CRASHES, *every_case("", ("node1", "stays away"), ("node1", "returns"))[1:]],
)
def test_node_crashes(user, undisturbed, node, then):
    """A node loses its power, node1 with the batch script.

    The job starts again, on another node where it must.
    """
    job = user.train(*ARGUMENTS)
    user.until_file(job, "*-step-000003.pt")
    user.cluster.crash(node)
    if then == "returns":
        user.cluster.revive()
    # Slurm does not miss a batch script that is just starting
    # before it has asked its nodes 20 times.
    user.until(job, "^Job .* requeued 1 times", timeout=300 if node == "node1" else 200)
    nodes = user.show(job)["NodeList"]
    result = user.wait(job)
    assert weights(result) == undisturbed
    if then == "stays away":
        assert nodes == {"node1": "node[2-3]", "node2": "node[1,3]"}[node]
    assert result.find(r"^Resuming from .*epoch-001-step-\d+.pt$"), result


@pytest.mark.every_case
def test_node_crashes_in_multi_node(jobs, user):
    """A job that cannot resume ends; it waits for no node that came back without it."""
    job = jobs.submit("multi_node", *TWO, "job.sh", "--epochs=1000", "--batch-size=4")
    user.until(job, "^Epoch 1: ")
    user.cluster.crash("node2")
    user.cluster.revive()
    result = user.wait(job)
    assert result.state == "FAILED", result
    lost = re.escape(f"[{user.cluster.address('node2')}]")
    # Who notices first says so, and srun then kills rank 0.
    said = (
        rf"^\[rank0\]: RuntimeError: .*({lost}|Timed out)|"
        r"^srun: error: .* missing step on node 1$"
    )
    assert result.find(said), result


@pytest.mark.parametrize("meanwhile", ["the job trains", "a rank is killed"])
def test_controller_restarts(user, same_end, meanwhile):
    """Without the controller, a job goes on, or waits until it can be requeued."""
    job = user.train(*EPOCHS, "--save-steps=3")
    rank = user.stop_rank(job)
    user.crash_controller(job)
    os.kill(rank, signal.SIGCONT)
    if meanwhile == "the job trains":
        user.until_file(job, "epoch-002-*.pt")
    else:
        assert user.kill("node2", "main.py") == 0
        waits = "^job.sh: waiting for Slurm's controller$"
        # srun is not told that a task has ended before the controller is back.
        if user.slurm_version() >= (26, 5):
            waits = r"^\[rank0\]: RuntimeError"

        def waiting():
            return re.search(waits, user.log(job), re.MULTILINE)

        user.until_found(job, waiting, "waiting", 300, 0.01)
    user.cluster.revive()
    user.until_controller()
    same_end(job, restarts=meanwhile != "the job trains")
