"""What watches a training: hangs, metrics, a profile, the wait for data."""

import argparse
import contextlib
import faulthandler
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import gather
from run import Run

# Seconds for what may take long on one rank, for which the others wait.
SLOW = 30 * 60


class Watch:
    """All that watches one run. Its files are in the run's checkpoint folder."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.hangs = HangWatch(args.timeout)

    def begin(self, folder: Path, device: torch.device, run: Run) -> None:
        """Watch the training, too. All ranks have met."""
        self.on_gpu = device.type == "cuda"
        self.profile = start_profile(folder, device) if self.args.profile else None
        self.hangs.connect()
        with self.hangs.paused():
            # Rank 0 may wait here for W&B's server, for 90 seconds.
            self.tracker = Tracker(folder, self.args, run)
            dist.barrier()

    def batches(self, batches: Iterable) -> Iterator:
        """Yield a loop's batches, and measure its speed and its waits for them."""
        working = "works on a batch, or waits there for other ranks"
        self.steps = 0
        self.start = time.perf_counter()
        self.waits = []  # for batches: when each began, and when it ended
        self.hangs.tick("waits for its first batch")
        begin = self._now()
        for batch in batches:
            self.waits.append((begin, self._now()))
            # The first step may compile, which takes longer than a hang.
            compiling = self.args.compile and self.steps == 0
            self.hangs.tick(working, SLOW if compiling else 0)
            self.steps += 1
            yield batch
            if compiling:  # on a GPU, this rank may be here long before the others
                dist.barrier()
            if self.profile:
                self.profile.step()
            self.hangs.tick("waits for its next batch")
            begin = self._now()
        self.hangs.tick(working)

    def steps_per_second(self) -> float:
        """Return the speed of this loop so far."""
        return self.steps / (time.perf_counter() - self.start)

    def speed(self, images: int) -> tuple[dict[str, float], str]:
        """Return how fast this loop was, of so many images a step: numbers, and words.

        No numbers, if it had no step: an earlier start has taken them all.
        """
        if self.steps == 0:
            return {}, "nothing was left to train"
        seconds = time.perf_counter() - self.start
        rate, waiting = self.steps * images / seconds, self._seconds_waited() / seconds
        speed = {"images/s": rate, "usage/waiting for data": waiting}
        words = f"{rate:.0f} images/s, {waiting:.0%} waiting for data"
        if self.on_gpu:
            free, total = torch.cuda.mem_get_info()
            speed["usage/memory in use"] = 1 - free / total
            words += f", {1 - free / total:.0%} memory in use"
        return speed, words

    def close(self) -> None:
        """End the profile and the metrics. Other ranks may wait for rank 0 to do so."""
        self.hangs.tick("ends", SLOW)
        if self.profile:
            self.profile.stop()
        self.tracker.close()

    def _now(self):
        """Return the time at which the device has done all that it was given."""
        if not self.on_gpu:
            return time.perf_counter()
        # The CPU runs ahead of the GPU: the GPU notes the time when it comes here.
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds_waited(self) -> float:
        if not self.on_gpu:
            return sum(end - begin for begin, end in self.waits)
        torch.cuda.synchronize()
        return sum(begin.elapsed_time(end) for begin, end in self.waits) / 1000


def log_stacks(message: str) -> None:
    """Say what is wrong with this rank, and what its threads are doing."""
    # All in one piece: other ranks write to the same log.
    with open(os.memfd_create("stacks"), "w+") as stacks:
        faulthandler.dump_traceback(stacks)
        stacks.seek(0)
        logging.error(
            f"error: rank {os.environ['RANK']} on {socket.gethostname()} "
            f"{message}\n{stacks.read()}"
        )


class HangWatch:
    """Ends this rank when its main thread does not move, and lets the log say why.

    A thread counts the time by its own naps: hardly any passes while Slurm suspends
    the job. Of a hang, it shows the stacks, and then waits for the threads of the
    other ranks, which do the same. A rank whose thread does not come is stopped or
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
        self.hosts = gather(socket.gethostname())
        limit = timedelta(seconds=0.3 * self.timeout)
        try:
            self.group = dist.new_group(backend="gloo", timeout=limit)
        except RuntimeError as error:
            logging.warning(
                "warning: a rank that is stopped will not be named: the ranks cannot "
                f"reach each other with gloo, see GLOO_SOCKET_IFNAME: {error!r}"
            )
        self.tick("has not asked for a batch yet")

    def tick(self, doing: str, limit: float = 0) -> None:
        """Say that the main thread moves, and what it does for at most `limit` s."""
        self.doing, self.last_tick = doing, self.clock
        # The rest is for _name_missing().
        self.limit = max(limit, 0.7 * self.timeout)

    @contextlib.contextmanager
    def paused(self):
        """Give time to what may take long. All ranks enter it: others wait."""
        self.tick(self.doing, SLOW)
        yield
        self.tick(self.doing)

    def _run(self) -> None:
        nap = self.timeout / 100
        while self.clock - self.last_tick < self.limit:
            before = time.monotonic()
            time.sleep(nap)
            # A nap that took longer was a busy CPU's, or Slurm has suspended the job.
            self.clock += min(time.monotonic() - before, 3 * nap)
        log_stacks(f"has not moved for {self.limit:.0f} s: it {self.doing}")
        self._name_missing()
        os._exit(1)  # srun ends the other ranks

    def _name_missing(self) -> None:
        """Wait until all ranks have shown their stacks, and name those that do not."""
        limit = 0.15 * self.timeout
        if not self.group:
            return time.sleep(limit)
        missing = []
        try:
            dist.monitored_barrier(self.group, timedelta(seconds=limit), True)
        except RuntimeError as error:
            if found := re.search(r"Ranks ([\d, ]+) failed", str(error)):
                missing = [int(rank) for rank in found[1].split(",")]
            elif "Timed out" in str(error):  # of the group: rank 0 would answer sooner
                missing = [0]
            elif dist.get_rank() == 0:
                logging.error(f"error: a rank does not answer: {error!r}")
            # On the other ranks, another error says no more than rank 0 does.
        for rank in missing:
            logging.error(
                f"error: rank {rank} on {self.hosts[rank]} does not answer: it is "
                "stopped or has ended, its C code keeps Python's lock, or its node or "
                "the network is down"
            )


class Tracker:
    """Writes rank 0's metrics for TensorBoard, and to W&B if asked.

    A training is worth more than its metrics: no error of theirs ends it.
    """

    def __init__(self, folder: Path, args: argparse.Namespace, run: Run):
        self.tensorboard = self.wandb = None
        if dist.get_rank() != 0:
            return
        with self._survive_errors("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            # Its own thread writes to the disk: where that is slow, no step waits.
            self.tensorboard = SummaryWriter(
                str(folder / "tensorboard"),
                # From this step on, TensorBoard drops what an earlier start has logged:
                # these steps are done, and logged, once more.
                purge_step=run.scheduler.last_epoch + 1,
                max_queue=0,  # no limit
                flush_secs=1,
            )
        if args.wandb:
            hint = " (no internet? export WANDB_MODE=offline)"
            with self._survive_errors("wandb", hint):
                self.wandb = start_wandb(folder, args, run.id)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Write the metrics after so many steps."""
        if self.tensorboard:
            with self._survive_errors("tensorboard"):
                for name, value in values.items():
                    self.tensorboard.add_scalar(name, value, step)
        if self.wandb:
            with self._survive_errors("wandb"):
                self.wandb.log(values, step)

    def close(self) -> None:
        if self.tensorboard:
            with self._survive_errors("tensorboard"):
                self.tensorboard.close()
        if self.wandb:
            with self._survive_errors("wandb"):
                self.wandb.finish()

    @contextlib.contextmanager
    def _survive_errors(self, writer: str, hint: str = ""):
        try:
            yield
        except Exception as error:
            setattr(self, writer, None)
            logging.warning(f"warning: no more metrics go to {writer}{hint}: {error!r}")


def start_wandb(folder: Path, args: argparse.Namespace, run_id: str):
    """Return the W&B run of this id, the same one on every start.

    Slurm may send SIGTERM to all processes of a job. That ends W&B's own process, for
    the rest of this start (github.com/wandb/wandb/issues/9963). What was logged a
    second before is on disk.
    """
    import wandb

    return wandb.init(
        project=args.wandb,
        name=folder.name,
        id=run_id,
        resume="allow",
        dir=folder,
        config=vars(args),
        settings=wandb.Settings(
            console="off",  # leave the log to Slurm
            x_transaction_log_flush_interval=1,
            finish_timeout=60,  # seconds
        ),
    )


def start_profile(folder: Path, device: torch.device) -> torch.profiler.profile:
    """Profile five steps: a trace a rank for ui.perfetto.dev, and rank 0's table."""
    write_trace = torch.profiler.tensorboard_trace_handler(
        str(folder / "profile"), f"rank{dist.get_rank()}", use_gzip=True
    )

    def report(profile: torch.profiler.profile) -> None:
        write_trace(profile)
        order = f"self_{device.type}_time_total"
        logging.info(profile.key_averages().table(order, row_limit=20))

    schedule = torch.profiler.schedule(wait=5, warmup=1, active=5, repeat=1)
    profile = torch.profiler.profile(schedule=schedule, on_trace_ready=report)
    profile.start()
    return profile
