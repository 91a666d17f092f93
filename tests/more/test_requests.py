"""What a job asks of Slurm's controller, which all users of the cluster share."""

import re

import pytest
from slurm_jobs import TWO

pytestmark = pytest.mark.usefixtures("nothing_left")
# What the nodes say by themselves, from time to time.
OF_THE_NODES = {"MESSAGE_NODE_REGISTRATION_STATUS", "REQUEST_PING"}


def requests_of_a_job(user, ranks: int) -> dict[str, int]:
    """Return how many requests of each kind come while a job runs.

    Nobody else asks meanwhile: this waits for the log and the processes.
    """
    assert user.run(["sdiag", "--reset"]).exit_code == 0
    each = [f"--{name}-per-node={ranks // 2}" for name in ("ntasks", "gpus")]
    job = user.train("--epochs=1", flags=[*TWO, *each])
    has_ended = "^Weights SHA-256 |^job.sh: error: "

    def over() -> bool:
        ended = re.search(has_ended, user.log(job), re.MULTILINE)
        return ended and not any(map(user.cluster.processes, user.cluster.nodes))

    user.until_found(job, over, has_ended, 200, 0.01)
    text = user.run(["sdiag"]).output
    text = text.split("by message type")[1].split("by user")[0]
    counts = re.findall(r"^\s+(\w+)\s*\(.*?\) count:(\d+)", text, re.MULTILINE)
    assert user.wait(job).state == "COMPLETED"
    return {name: int(n) for name, n in counts if name not in OF_THE_NODES}


def test_requests(user):
    """More ranks ask no more. A controller that 1000 ranks ask would be busy."""
    two, four = (requests_of_a_job(user, ranks) for ranks in (2, 4))
    assert "REQUEST_JOB_STEP_CREATE" in two
    # srun asks again where the controller has not yet noted that a step has ended.
    more = {"REQUEST_JOB_STEP_CREATE": 6}
    for kind in four:
        assert four[kind] < two.get(kind, 0) + more.get(kind, 2), (two, four)
    assert sum(two.values()) <= 40, two
