"""Jobs train while a monkey picks faults: `pytest tests/faults --soak=30 -s`."""

import random
import signal
import time

import pytest
from slurm_jobs import User, weights
from test_signals import grace_time

ARGUMENTS = ["--epochs=30", "--save-steps=2", "--timeout=15"]


class Monkey:
    """Does things to a job, and undoes what administrators would repair."""

    def __init__(self, user: User):
        self.user = user

    def strike(self, job: str) -> str:
        """Do one thing to a job; return in words what it was."""
        cluster, kill = self.user.cluster, self.user.kill
        node = random.choice(["node1", "node2"])
        moments = {
            f"SIGKILL to the rank on {node}": lambda: kill(node, "main.py"),
            f"SIGKILL to the newest process on {node}": lambda: kill(
                node, "main.py", age="--newest"
            ),
            f"SIGSTOP to the rank on {node}": lambda: kill(
                node, "main.py", signal.SIGSTOP
            ),
            "SIGINT to rank 0": lambda: kill("node1", "main.py", signal.SIGINT),
            "the warning before the time limit": lambda: self.run(
                f"scancel --batch --signal=USR1 {job}"
            ),
            "scontrol requeue": lambda: self.run(f"scontrol requeue {job}"),
            "preempted, GraceTime 0": lambda: self.preempt(0),
            "preempted, GraceTime 15": lambda: self.preempt(15),
            "a flipped bit, SIGKILL to rank 0": lambda: self.flip_bit(job),
        }
        # How they begin, and how they end.
        faults = {
            "suspended": (
                lambda: self.run(f"scontrol suspend {job}"),
                lambda: self.run(f"scontrol resume {job}"),
            ),
            "no route between the nodes": (
                lambda: self.user.route("add"),
                lambda: self.user.route("del"),
            ),
            f"no network on {node}": (
                lambda: cluster.cable(node, "down"),
                lambda: cluster.cable(node, "up"),
            ),
            f"{node} without power": (lambda: cluster.crash(node), cluster.revive),
            "no controller": (lambda: self.user.crash_controller(job), cluster.revive),
        }
        what = random.choice([*moments, *faults])
        if what in moments:
            moments[what]()
            return what
        begin, end = faults[what]
        seconds = random.choice([3, 25])  # a moment, or longer than ranks wait
        begin()
        time.sleep(seconds)
        end()
        return f"{what} for {seconds} s"

    def run(self, command: str) -> int:
        return self.user.run(command.split()).exit_code

    def preempt(self, grace: int) -> None:
        urgent = ["--partition=urgent", "--nodes=3", "--exclusive"]
        with grace_time(self.user, grace):
            self.user.sbatch("", *urgent, "--wrap=sleep 5")

    def flip_bit(self, job: str) -> None:
        """Damage the newest checkpoint, if there is one before it."""
        paths = sorted(self.user.checkpoints(job).glob("epoch-*.pt"))
        if len(paths) > 1:
            content = bytearray(paths[-1].read_bytes())
            flipped = 1 << random.randrange(8)
            content[random.randrange(len(content))] ^= flipped
            paths[-1].write_bytes(content)
        self.user.kill("node1", "main.py")

    def repair(self, job: str) -> str:
        """Start what failed again, as users do; return the state the job was in."""
        self.user.until_controller()
        self.run("scontrol update NodeName=ALL State=RESUME")
        state = self.user.show(job)["JobState"]
        if state in ("FAILED", "NODE_FAIL", "TIMEOUT"):
            assert self.run(f"scontrol requeue {job}") == 0, self.user.log(job)
        return state


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_soak(user, nothing_left, pytestconfig):
    """Every job ends with the weights of one that nothing has happened to."""
    minutes = pytestconfig.getoption("soak")
    undisturbed = weights(user.wait(user.train(*ARGUMENTS), timeout=600))
    monkey = Monkey(user)
    jobs = faults = 0
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end:
        job, state = user.train(*ARGUMENTS), "PENDING"
        jobs += 1
        while state not in ("COMPLETED", "PREEMPTED", "CANCELLED"):
            time.sleep(random.uniform(1, 50))
            state = monkey.repair(job)
            if state == "RUNNING" and time.monotonic() < end:
                faults += 1
                print(f"{time.ctime()}, job {job}: {monkey.strike(job)}", flush=True)
        if not (24, 5) <= user.slurm_version() < (26, 5):  # see test_preempted
            state = "COMPLETED"
        assert weights(user.wait(job), state) == undisturbed, user.log(job)
    print(f"{jobs} jobs, {faults} faults: the weights are those of an undisturbed run")
