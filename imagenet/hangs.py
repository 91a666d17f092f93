"""Who does not move: a hang ends the job, and the log says which rank is the cause."""

import contextlib
import faulthandler
import math
import os
import re
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta

import resume
import torch.distributed as dist

# This node's name, as --exclude takes it.
NODE = os.environ.get("SLURMD_NODENAME", socket.gethostname())
# Seconds for what may take long on one rank, for which the others wait.
SLOW = 30 * 60


def read_stacks() -> str:
    """Return what this rank's threads are doing."""
    with open(os.memfd_create("stacks"), "w+") as stacks:
        faulthandler.dump_traceback(stacks)
        stacks.seek(0)
        # Without the threads' numbers, the stacks of many ranks are equal.
        return re.sub("0x[0-9a-f]+ ", "", stacks.read())


def say(text: str) -> None:
    """Write to the log in one piece: other ranks write there, too.

    print() would wait for a lock that the main thread may hold.
    """
    with contextlib.suppress(OSError):
        os.write(1, f"{text}\n".encode(errors="backslashreplace"))


class HangWatch:
    """Ends this rank when its main thread does not move, and lets the log say why.

    A thread counts the time by its own naps: hardly any passes while Slurm suspends
    the job. In a hang, it meets the threads of the other ranks, and rank 0 shows the
    stacks of all, equal ones once. A rank whose thread does not come is stopped or
    gone, or its C code keeps Python's lock: it is named.
    """

    def __init__(self, timeout: float):
        self.timeout = timeout
        self.group = None
        self.clock = 0.0  # in seconds
        # Ranks start at different times.
        self.tick(
            "has not begun to train: another rank or its node is gone, MASTER_ADDR is "
            "not rank 0's node, a firewall closes MASTER_PORT there, or NCCL cannot "
            "use the network, see NCCL_SOCKET_IFNAME",
            6 * timeout,
        )
        threading.Thread(target=self._run, daemon=True).start()

    def connect(self) -> None:
        """Let the threads of all ranks meet later, in a group of their own."""
        self.hosts = [None] * dist.get_world_size()
        dist.all_gather_object(self.hosts, NODE)
        limit = timedelta(seconds=0.3 * self.timeout)
        # Only with rank 0. Of many ranks, connections of each to each take minutes.
        os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
        try:
            self.group = dist.new_group(backend="gloo", timeout=limit)
            dist.monitored_barrier(self.group)  # makes these connections
        except RuntimeError as error:
            resume.say(
                "warning: a rank that is stopped will not be named: the ranks cannot "
                f"reach each other with gloo, see GLOO_SOCKET_IFNAME: {error!r}"
            )

    def tick(self, doing: str, limit: float = 0) -> None:
        """Say that the main thread moves, and what it does for at most `limit` s."""
        self.doing, self.last_tick = doing, self.clock
        # The rest is for _meet().
        self.limit = max(limit, 0.7 * self.timeout)

    @contextlib.contextmanager
    def paused(self, then: str = "has saved, and waits for other ranks"):
        """Give time to what may take long. All ranks enter it: others wait."""
        self.tick(self.doing, SLOW)
        yield
        self.tick(then)

    def _run(self) -> None:
        nap = self.timeout / 100
        while self.clock - self.last_tick < self.limit:
            before = time.monotonic()
            time.sleep(nap)
            # A nap that took longer was a busy CPU's, or Slurm has suspended the job.
            self.clock += min(time.monotonic() - before, 3 * nap)
        doing = f"has not moved for {self.limit:.0f} s: it {self.doing}"
        if self.group:
            self._meet(doing)
        else:
            rank = os.environ.get("RANK", resume.rank())
            say(f"error: rank {rank} on {NODE} {doing}\n{read_stacks()}")
        if not self.group or dist.get_rank() != 0:
            time.sleep(0.15 * self.timeout)  # in which other ranks write what they know
        os._exit(1)  # srun ends the other ranks

    def _meet(self, doing: str) -> None:
        """Let rank 0 show the stacks of all ranks, or name those that do not come."""
        rank = dist.get_rank()
        answers = [None] * dist.get_world_size() if rank == 0 else None
        limit = timedelta(seconds=0.15 * self.timeout)
        try:
            dist.monitored_barrier(self.group, limit, wait_all_ranks=True)
            dist.gather_object(f"{doing}\n{read_stacks()}", answers, group=self.group)
        except RuntimeError as error:
            # Of many ranks, two are enough. Rank 0 may be the one that is missing.
            stacks = f"\n{read_stacks()}" if rank < 2 else ""
            say(f"error: rank {rank} on {NODE} {doing}{stacks}")
            self._name_missing(str(error))
        else:
            self._show(answers or [])

    def _show(self, answers: list[str]) -> None:
        """Log what each rank has answered. Of many ranks, most do the same."""
        ranks_of = {}
        for rank, answer in enumerate(answers):
            ranks_of.setdefault(answer, []).append(rank)
        for answer, (rank, *others) in ranks_of.items():
            say(f"error: rank {rank} on {self.hosts[rank]} {answer}")
            if others:
                say(f"{len(others)} other ranks, too: {others}\n")

    def _name_missing(self, error: str) -> None:
        missing = []
        if found := re.search(r"Ranks ([\d, ]+) failed", error):
            missing = [int(rank) for rank in found[1].split(",")]
        elif "Timed out" in error:  # of the group: rank 0 would answer sooner
            missing = [0]
        elif dist.get_rank() == 0:
            say(f"error: a rank does not answer: {error}")
        # On the other ranks, another error says no more than rank 0 does.
        for rank in missing:
            say(
                f"error: rank {rank} on {self.hosts[rank]} does not answer: it is "
                "stopped or has ended, its C code keeps Python's lock, or its node or "
                "the network is down"
            )


def watched(run: resume.Run, items: Iterable, minutes: float = 10) -> Iterator:
    """Yield what the outermost loop of one's own script does. A hang in it ends all.

        for epoch in hangs.watched(run, run.loop(range(epochs))):

    It is one if no turn of an inner loop ends in so many minutes.
    """
    watch = HangWatch(60 * minutes)
    if dist.is_initialized():
        watch.connect()

    def tick(totals=None, turns_per_second=0) -> None:
        watch.tick("trains or validates", watch.timeout)

    @contextlib.contextmanager
    def while_saving():
        with watch.paused():
            yield
        tick()

    run.on_meeting, run.while_saving = tick, while_saving
    tick()
    try:
        yield from items
    finally:
        watch.tick("has trained", math.inf)
