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
from run import Run


class Watch:
    """All that watches one run. Its files are in the run's checkpoint folder."""

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        args: argparse.Namespace,
        run: Run,
    ):
        self.compiles = args.compile
        self.on_gpu = device.type == "cuda"
        self.profile = start_profile(folder, device) if args.profile else None
        self.hangs = HangWatch(args.timeout)
        with self.hangs.paused():
            # Rank 0 may wait here for W&B's server, for 90 seconds.
            self.tracker = Tracker(folder, args, run)
            dist.barrier()

    def batches(self, loader: Iterable) -> Iterator:
        """Yield a loop's batches, and measure its speed and its waits for them."""
        batches = iter(loader)
        self.steps = 0
        self.start = time.perf_counter()
        self.waits = []  # for batches: when each began, and when it ended
        self.hangs.tick("waits for its first batch")
        while True:
            begin = self._now()
            batch = next(batches, None)
            self.waits.append((begin, self._now()))
            # The first step may compile, which takes longer than a hang.
            compiling = self.compiles and not self.steps
            self.hangs.tick(
                "works on a batch, or waits there for other ranks", compiling
            )
            if batch is None:
                return
            yield batch
            if compiling:  # on a GPU, this rank may be here long before the others
                dist.barrier()
            self.steps += 1
            if self.profile:
                self.profile.step()
            self.hangs.tick("waits for its next batch")

    def steps_per_second(self) -> float:
        """Return the speed of this loop so far."""
        return self.steps / (time.perf_counter() - self.start)

    def speed(self, images: int) -> dict[str, float]:
        """Return how fast this loop was, of so many images a step, to be logged.

        Nothing, if it had no step: an earlier start has taken them all.
        """
        if not self.steps:
            return {}
        seconds = time.perf_counter() - self.start
        speed = {
            "images/s": self.steps * images / seconds,
            "usage/waiting for data": self._seconds_waited() / seconds,
        }
        if self.on_gpu:
            free, total = torch.cuda.mem_get_info()
            speed["usage/memory in use"] = 1 - free / total
        return speed

    def close(self) -> None:
        """Stop watching: on all ranks, before the process group is destroyed."""
        if self.profile:
            self.profile.stop()
        self.hangs.close()
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


def watch_start(timeout: float) -> threading.Timer:
    """End this rank, unless it is cancelled in time: before there is a `HangWatch`."""

    def end() -> None:
        logging.error(
            f"error: rank {os.environ['RANK']} on {socket.gethostname()} has not begun "
            f"to train after {timeout:.0f} s: another rank or its node is gone, "
            "MASTER_ADDR is not rank 0's node, or NCCL cannot use the network, "
            "see NCCL_SOCKET_IFNAME"
        )
        faulthandler.dump_traceback()
        os._exit(1)

    timer = threading.Timer(timeout, end)
    timer.daemon = True
    timer.start()
    return timer


class HangWatch:
    """Names the rank that hangs, shows the stacks of all, and ends this rank.

    A rank hangs when its main thread has not called `tick` for `timeout` seconds,
    unless what it does may be slow. Then a thread of this class says what that rank is
    doing. If a rank is stopped or gone, the threads of the others say so, because its
    thread does not come to their barrier. They wait there for a part of `timeout`: so
    they name it before any rank ends. While C code holds Python's lock, no thread of
    this class runs: then faulthandler shows the stacks, and ends this rank.
    """

    def __init__(self, timeout: float):
        self.timeout = timeout
        self.hosts = [""] * dist.get_world_size()
        self.group = self._make_group()
        self.tick("has not asked for a batch yet")
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def tick(self, doing: str, may_be_slow: bool = False) -> None:
        """Say that the main thread moves, and what it is about to do."""
        self.doing, self.last_tick = doing, time.monotonic()
        self.may_be_slow = may_be_slow

    @contextlib.contextmanager
    def paused(self):
        """Give time to what may take long. All ranks enter it: others wait."""
        before = self.may_be_slow
        self.tick(self.doing, may_be_slow=True)
        self._set_alarm()
        try:
            yield
        finally:
            self.tick(self.doing, before)
        self._set_alarm()

    def close(self) -> None:
        self.closed.set()
        self.thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _make_group(self) -> dist.ProcessGroup | None:
        # Where rank 0 is stopped, its barrier ends for the others after this timeout.
        limit = timedelta(seconds=0.85 * self.timeout)
        try:
            group = dist.new_group(backend="gloo", timeout=limit)
            dist.all_gather_object(self.hosts, socket.gethostname(), group)
            return group
        except RuntimeError as error:
            reason = str(error).split("\n")[0]
            logging.warning(
                "warning: a rank that is stopped will not be named: the ranks cannot "
                f"reach each other with gloo, see GLOO_SOCKET_IFNAME: {reason}"
            )
            return None

    def _set_alarm(self) -> None:
        """End this rank in `timeout` seconds, unless this is called again before."""
        faulthandler.cancel_dump_traceback_later()
        if not self.may_be_slow:
            faulthandler.dump_traceback_later(self.timeout, exit=True)

    def _run(self) -> None:
        closing = False
        while not closing:
            self._set_alarm()
            closing = self.closed.wait(self.timeout / 40)
            if self.group:
                self._meet(closing)
            if self._seconds_without_tick() > 0.9 * self.timeout:
                self._report()
                # The other ranks show their stacks meanwhile: when the first one has
                # ended, srun kills them.
                self.closed.wait(0.1 * self.timeout)
                if self._seconds_without_tick() > self.timeout:
                    os._exit(1)

    def _meet(self, closing: bool) -> None:
        """Wait for the threads of all ranks, and name those that do not come."""
        missing = []
        try:
            limit = timedelta(seconds=0.7 * self.timeout)
            dist.monitored_barrier(self.group, limit, wait_all_ranks=True)
            # When one closes, none waits for it any more.
            any_closing = torch.tensor(float(closing))
            dist.all_reduce(any_closing, group=self.group)
            if not any_closing:
                return
        except RuntimeError as error:
            if found := re.search(r"Ranks ([\d, ]+) failed", str(error)):
                missing = [int(rank) for rank in found[1].split(",")]
            elif "Timed out" in str(error):
                missing = [0]
            elif dist.get_rank() == 0:
                reason = str(error).split("\n")[0]
                logging.error(f"error: a rank does not answer: {reason}")
            # Else rank 0 says who is missing, or srun says which process has ended.
        self.group = None  # after an error, gloo cannot use it again
        for rank in missing:
            self.may_be_slow = False  # this rank waits for that one
            logging.error(
                f"error: rank {rank} on {self.hosts[rank]} does not answer: "
                "it is stopped or has ended, or its node or the network is down"
            )

    def _seconds_without_tick(self) -> float:
        return 0.0 if self.may_be_slow else time.monotonic() - self.last_tick

    def _report(self) -> None:
        with open(os.memfd_create("stacks"), "w+") as stacks:
            faulthandler.dump_traceback(stacks)
            stacks.seek(0)
            logging.error(
                f"error: rank {dist.get_rank()} on {socket.gethostname()} "
                f"has not moved for {self._seconds_without_tick():.0f} s: "
                f"it {self.doing}\n"
                f"{stacks.read()}"
            )


class Tracker:
    """Writes rank 0's metrics for TensorBoard, and to W&B if asked.

    A training is worth more than its metrics: no error of theirs ends it.
    """

    def __init__(self, folder: Path, args: argparse.Namespace, run: Run):
        self.writers: dict = {}
        if dist.get_rank() != 0:
            return
        with self._survive_errors("TensorBoard"):
            self.writers["TensorBoard"] = TensorBoard(folder, run.scheduler.last_epoch)
        if args.wandb:
            with self._survive_errors("W&B (no internet? export WANDB_MODE=offline)"):
                self.writers["W&B"] = start_wandb(folder, args, run.id)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Write the metrics after so many steps."""
        for name, writer in list(self.writers.items()):
            with self._survive_errors(name):
                writer.log(values, step)

    def close(self) -> None:
        for name, writer in list(self.writers.items()):
            with self._survive_errors(name):
                writer.finish()

    @contextlib.contextmanager
    def _survive_errors(self, name: str):
        try:
            yield
        except Exception as error:
            self.writers.pop(name, None)
            logging.warning(f"warning: no more metrics go to {name}: {error!r}")


class TensorBoard:
    """Writes for TensorBoard, with the methods of a W&B run.

    TensorBoard's own thread writes to the disk: where that is slow, no step waits.
    """

    def __init__(self, folder: Path, steps_done: int):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(
            str(folder / "tensorboard"),
            # From this step on, TensorBoard drops what an earlier start has logged:
            # these steps are done, and logged, once more.
            purge_step=steps_done + 1,
            max_queue=0,  # no limit
            flush_secs=1,
        )

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self.writer.close()


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


def describe_speed(speed: dict[str, float]) -> str:
    """Return "900 images/s, 3% waiting for data, 39% memory in use"."""
    if not speed:
        return "nothing was left to train"
    rate, *shares = speed.items()
    told = [f"{share:.0%} {name.removeprefix('usage/')}" for name, share in shares]
    return ", ".join([f"{rate[1]:.0f} images/s", *told])
