"""Jobs train while a monkey picks faults for some minutes: `pytest --soak=30 -s`."""

import random
import re
import signal
import time

import pytest
from rich.console import Console
from rich.table import Table
from slurm_jobs import User, weights

ARGUMENTS = ["--epochs=30", "--save-steps=2", "--timeout=15"]


class Monkey:
    """Does things to a job, by a seed, and undoes what administrators would repair."""

    def __init__(self, user: User, seed: int):
        self.user = user
        self.chance = random.Random(seed)
        self.faults = [
            getattr(self, name) for name in dir(self) if name.startswith("fault_")
        ]

    def strike(self, job: str) -> str:
        """Do one thing to a job; return in words what it was."""
        fault = self.chance.choice(self.faults)
        return fault(job) or fault.__doc__

    def node(self) -> str:
        return self.chance.choice(["node1", "node2"])

    def last(self) -> str:
        """Let a fault last a moment, or longer than ranks wait; return its length."""
        seconds = self.chance.choice([3, 25])
        time.sleep(seconds)
        return f"for {seconds} s"

    def fault_kill_rank(self, job):
        node = self.node()
        self.user.kill(node, "main.py")
        return f"SIGKILL to the rank on {node}"

    def fault_kill_worker(self, job):
        node = self.node()
        self.user.kill(node, "main.py", age="--newest")
        return f"SIGKILL to the newest process on {node}"

    def fault_stop_rank(self, job):
        node = self.node()
        self.user.kill(node, "main.py", signal.SIGSTOP)
        return f"SIGSTOP to the rank on {node}"

    def fault_interrupt(self, job):
        """SIGINT to rank 0"""
        self.user.kill("node1", "main.py", signal.SIGINT)

    def fault_warn(self, job):
        """the warning before the time limit"""
        self.user.run(["scancel", "--signal=USR1", job])

    def fault_requeue(self, job):
        """scontrol requeue"""
        self.user.run(["scontrol", "requeue", job])

    def fault_suspend(self, job):
        self.user.run(["scontrol", "suspend", job])
        length = self.last()
        self.user.run(["scontrol", "resume", job])
        return f"suspended {length}"

    def fault_preempt(self, job):
        grace = self.chance.choice([0, 15])
        self.user.run(
            ["scontrol", "update", "PartitionName=main", f"GraceTime={grace}"]
        )
        other = self.user.submit(
            "", "--partition=urgent", "--nodes=3", "--exclusive", "--wrap=sleep 5"
        )
        self.user.wait(other)
        self.user.run(["scontrol", "update", "PartitionName=main", "GraceTime=0"])
        return f"preempted, GraceTime {grace}"

    def fault_route(self, job):
        ends = [("node1", "node2"), ("node2", "node1")]
        for here, there in ends:
            route = [
                "ip",
                "route",
                "add",
                "blackhole",
                self.user.cluster.address(there),
            ]
            self.user.run([*self.user.cluster.namespaces(here), *route])
        length = self.last()
        for here, there in ends:
            route = [
                "ip",
                "route",
                "del",
                "blackhole",
                self.user.cluster.address(there),
            ]
            self.user.run([*self.user.cluster.namespaces(here), *route])
        return f"no route between the nodes {length}"

    def fault_cable(self, job):
        node = self.node()
        self.user.cluster.cable(node, "down")
        length = self.last()
        self.user.cluster.cable(node, "up")
        return f"no network on {node} {length}"

    def fault_crash(self, job):
        node = self.node()
        self.user.cluster.crash(node)
        length = self.last()
        self.user.cluster.revive()
        return f"{node} without power {length}"

    def fault_controller(self, job):
        self.user.cluster.crash("controller")
        length = self.last()
        self.user.cluster.revive()
        self.answered()
        return f"no controller {length}"

    def fault_checkpoint(self, job):
        paths = sorted(self.user.checkpoints(job).glob("epoch-*.pt"))
        if len(paths) < 2:
            return "nothing: there is one checkpoint at most"
        content = bytearray(paths[-1].read_bytes())
        content[self.chance.randrange(len(content))] ^= 1 << self.chance.randrange(8)
        paths[-1].write_bytes(content)
        self.user.kill("node1", "main.py")
        return f"a flipped bit in {paths[-1].name}, and SIGKILL to rank 0"

    def answered(self):
        self.user.until_found(
            "",
            lambda: self.user.run(["scontrol", "ping"]).exit_code == 0,
            "controller",
            60,
            0.01,
        )

    def repair(self, job: str) -> str:
        """Start what failed again, as users do; return the state the job was in."""
        self.answered()
        self.user.run(["scontrol", "update", "NodeName=ALL", "State=RESUME"])
        state = self.user.show(job)["JobState"]
        if state in ("FAILED", "NODE_FAIL", "TIMEOUT"):
            assert (
                result := self.user.run(["scontrol", "requeue", job])
            ).exit_code == 0, result
        return state


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_soak(user, nothing_left, pytestconfig):
    """Every job ends with the weights of one that nothing has happened to."""
    seed = pytestconfig.getoption("soak_seed") or time.time_ns() % 2**32
    minutes = pytestconfig.getoption("soak")
    print(f"\nseed {seed}", flush=True)
    undisturbed = weights(user.wait(user.train(*ARGUMENTS), timeout=600))
    monkey = Monkey(user, seed)
    report = Table(
        "minute",
        "job",
        "what happened",
        "starts",
        title=f"{minutes} minutes, seed {seed}",
    )
    start = time.monotonic()
    jobs = 0
    try:
        while time.monotonic() - start < 60 * minutes:
            job, state = user.train(*ARGUMENTS), "PENDING"
            jobs += 1
            while state not in ("COMPLETED", "PREEMPTED", "CANCELLED"):
                time.sleep(monkey.chance.uniform(1, 50))
                state = monkey.repair(job)
                if state == "RUNNING" and time.monotonic() - start < 60 * minutes:
                    minute = f"{(time.monotonic() - start) / 60:.1f}"
                    starts = len(re.findall("^Job ", user.log(job), re.MULTILINE))
                    row = (minute, job, monkey.strike(job), str(starts))
                    report.add_row(*row)
                    print(*row, flush=True)
            if not (24, 5) <= user.slurm_version() < (26, 5):  # see test_preempted
                state = "COMPLETED"
            assert weights(user.wait(job), state) == undisturbed, user.log(job)
    finally:
        Console(width=110).print(report)
    print(
        f"{jobs} jobs, {report.row_count} faults: "
        "the weights are those of an undisturbed run"
    )
