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
from checkpoint import gather
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
            # Rank 0 may wait here for W&B's server, for 90 seconds. The others may have
            # failed to make the group of the watch sooner than it.
            self.tracker = Tracker(folder, args, run)
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
            compiling = self.compiles and self.steps == 0
            self.hangs.tick(working, compiling)
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
    """End this rank after `timeout` s, unless cancelled. Later, HangWatch does so."""

    def end() -> None:
        log_stacks(
            f"has not begun to train after {timeout} s: another rank or its node is "
            "gone, MASTER_ADDR is not rank 0's node, or NCCL cannot use the network, "
            "see NCCL_SOCKET_IFNAME"
        )
        os._exit(1)

    timer = threading.Timer(timeout, end)
    timer.daemon = True
    timer.start()
    return timer


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
        self.hosts = gather(socket.gethostname())
        self.group = None
        # Where rank 0 is stopped, its barrier ends for the others after this timeout.
        limit = timedelta(seconds=0.85 * timeout)
        try:
            self.group = dist.new_group(backend="gloo", timeout=limit)
        except RuntimeError as error:
            logging.warning(
                "warning: a rank that is stopped will not be named: the ranks cannot "
                f"reach each other with gloo, see GLOO_SOCKET_IFNAME: {error!r}"
            )
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
        self.tick(self.doing, may_be_slow=True)
        yield
        self.tick(self.doing)

    def close(self) -> None:
        self.closed.set()
        self.thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        closing = False
        while not closing:
            # faulthandler ends this rank, unless this thread comes here again in time.
            faulthandler.cancel_dump_traceback_later()
            if not self.may_be_slow:
                faulthandler.dump_traceback_later(self.timeout, exit=True)
            # At the end: once more, to tell the others.
            closing = self.closed.wait(self.timeout / 40)
            if self.group:
                self._meet(closing)
            if self.may_be_slow:
                continue
            last_tick = self.last_tick
            seconds = time.monotonic() - last_tick
            if seconds > 0.9 * self.timeout:
                log_stacks(f"has not moved for {seconds:.0f} s: it {self.doing}")
                # When the first rank has ended, srun kills the others. Until then, they
                # show their stacks, too. The main thread may still move.
                self.closed.wait(0.1 * self.timeout)
                if last_tick == self.last_tick:
                    os._exit(1)

    def _meet(self, closing: bool) -> None:
        """Wait for the threads of all ranks, and name those that do not come."""
        missing = []
        try:
            limit = timedelta(seconds=0.7 * self.timeout)
            dist.monitored_barrier(self.group, limit, wait_all_ranks=True)
            # A thread that closes comes no more. All hear of it, and meet no more.
            any_closing = torch.tensor(float(closing))
            dist.all_reduce(any_closing, group=self.group)
            if not any_closing:
                return
        except RuntimeError as error:
            if self.may_be_slow:
                # It may wait for a rank that is gone. So it gets no more time than a
                # step does, from now on.
                self.tick(self.doing)
            if found := re.search(r"Ranks ([\d, ]+) failed", str(error)):
                missing = [int(rank) for rank in found[1].split(",")]
            elif "Timed out" in str(error):
                missing = [0]
            elif dist.get_rank() == 0:
                logging.error(f"error: a rank does not answer: {error!r}")
            # On the other ranks, another error says no more than rank 0 does.
        self.group = None  # an error has broken it
        for rank in missing:
            logging.error(
                f"error: rank {rank} on {self.hosts[rank]} does not answer: "
                "it is stopped or has ended, or its node or the network is down"
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
            self.tensorboard = start_tensorboard(folder, run.scheduler.last_epoch)
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


def start_tensorboard(folder: Path, steps_done: int):
    """Return what writes for TensorBoard.

    Its own thread writes to the disk: where that is slow, no step waits.
    """
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(
        str(folder / "tensorboard"),
        # From this step on, TensorBoard drops what an earlier start has logged: these
        # steps are done, and logged, once more.
        purge_step=steps_done + 1,
        max_queue=0,  # no limit
        flush_secs=1,
    )


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
