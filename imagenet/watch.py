"""What watches a training: hangs, metrics, a profile, the wait for data, the GPUs."""

import argparse
import contextlib
import faulthandler
import logging
import os
import re
import socket
import statistics
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


class Watch:
    """All that watches one run. Its files are in the run's checkpoint folder."""

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        args: argparse.Namespace,
        steps_done: int,
    ):
        self.device, self.compiles = device, args.compile
        self.hangs = HangWatch(args.timeout)
        self.tracker = Tracker(folder, args, steps_done)
        self.profile = start_profile(folder / "profile") if args.profile else None
        self.stopwatch = Stopwatch(device)
        self.gpus = GpuSampler(device)

    def batches(self, loader: Iterable) -> Iterator:
        """Yield a loop's batches, and measure what `usage` tells of this loop."""
        self.stopwatch = Stopwatch(self.device)
        self.gpus.samples.clear()
        self.hangs.moved("waits for its first batch")
        batches, self.begun, self.done = iter(loader), time.perf_counter(), 0
        while True:
            with self.stopwatch.waiting():
                batch = next(batches, None)
            self.hangs.moved("works on a batch, or waits there for other ranks")
            if batch is None:
                return
            # To compile may take longer than a hang.
            compiling = self.compiles and self.done == 0
            with self.paused() if compiling else contextlib.nullcontext():
                yield batch
            self.hangs.moved("waits for its next batch")
            self.done += 1

    def pace(self) -> float:
        """Return the batches a second of this loop so far."""
        return self.done / (time.perf_counter() - self.begun)

    def paused(self):
        """Return a context that may take long. All ranks enter it: others wait."""
        return self.hangs.paused()

    def step_done(self) -> None:
        """Say that the optimizer has made a step."""
        if self.profile:
            self.profile.step()

    def usage(self, seconds: float) -> dict[str, float]:
        """Return, for `log`, how the device was used in a loop of so many seconds."""
        usage = {"usage/waiting_for_data": self.stopwatch.seconds() / seconds}
        if self.device.type == "cuda":
            highest = torch.cuda.max_memory_reserved(self.device)
            usage["usage/memory_GiB"] = highest / 2**30
        if self.gpus.samples:
            usage["usage/busy"] = statistics.mean(self.gpus.samples) / 100
        return usage

    def describe(self, usage: dict[str, float]) -> str:
        """Return ", 3% waiting for data, 31.2 of 80 GiB, 97% busy"."""
        text = f", {usage['usage/waiting_for_data']:.0%} waiting for data"
        if "usage/memory_GiB" in usage:
            there = torch.cuda.get_device_properties(self.device).total_memory / 2**30
            text += f", {usage['usage/memory_GiB']:.1f} of {there:.0f} GiB"
        if "usage/busy" in usage:
            text += f", {usage['usage/busy']:.0%} busy"
        return text

    def log(self, step: int, values: dict[str, float]) -> None:
        """Write the metrics after so many steps, on rank 0."""
        self.tracker.log(step, values)

    def close(self) -> None:
        """Stop watching: on all ranks, before the process group is destroyed."""
        if self.profile:
            self.profile.stop()
        self.hangs.close()
        self.tracker.close()


class HangWatch:
    """Names the rank that hangs, shows the stacks of all, and ends this rank.

    A rank hangs when its main thread has not called `moved` for `timeout` seconds. Then
    a thread of this class says what that rank is doing. Of a rank that is stopped, or
    gone, the threads of the others say so: its thread does not come to their barrier.
    """

    def __init__(self, timeout: float):
        self.timeout, self.is_paused = timeout, False
        self.rank, self.hosts = dist.get_rank(), [""] * dist.get_world_size()
        self.missing: list[int] = []  # ranks that did not come to the barrier
        self.group = self._make_group()
        self.moved("has not asked for a batch yet")
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def moved(self, doing: str) -> None:
        """Say that the main thread moves, and what it is about to do."""
        self.doing, self.last_move = doing, time.monotonic()

    @contextlib.contextmanager
    def paused(self):
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.moved(self.doing)
            self.is_paused = before

    def close(self) -> None:
        self.closed.set()
        self.thread.join()

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
                "warning: a rank that is stopped will not be named: "
                f"the ranks cannot reach each other with gloo: {reason}"
            )
            return None

    def _run(self) -> None:
        closing = False
        while not closing:
            closing = self.closed.wait(self.timeout / 40)
            if self.group:
                self._meet(closing)
            if self._seconds_without_move() > 0.9 * self.timeout:
                self._report()
                # The other ranks show their stacks meanwhile: when the first one has
                # ended, srun kills them.
                self.closed.wait(0.1 * self.timeout)
                if self._seconds_without_move() > self.timeout:
                    os._exit(1)

    def _meet(self, closing: bool) -> None:
        """Wait for the threads of all ranks, and name those that do not come."""
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
                self.missing = [int(rank) for rank in found[1].split(",")]
            elif "Timed out" in str(error):
                self.missing = [0]
            # Else rank 0 says who is missing, or srun says which process has ended.
        self.group = None  # after an error, gloo cannot use it again
        for rank in self.missing:
            say(
                f"error: rank {rank} on {self.hosts[rank]} does not answer: "
                "it is stopped or has ended, or its node or the network is down"
            )

    def _seconds_without_move(self) -> float:
        if self.is_paused and not self.missing:
            return 0.0
        return time.monotonic() - self.last_move

    def _report(self) -> None:
        with open(os.memfd_create("stacks"), "w+") as stacks:
            faulthandler.dump_traceback(stacks)
            stacks.seek(0)
            say(
                f"error: rank {self.rank} on {socket.gethostname()} has not moved "
                f"for {self._seconds_without_move():.0f} s: it {self.doing}\n"
                f"{stacks.read()}"
            )


def say(text: str) -> None:
    """Write to the log in one piece: other ranks write there, too."""
    os.write(sys.stderr.fileno(), f"{text}\n".encode())


class Tracker:
    """Writes rank 0's metrics for TensorBoard, and to W&B if asked.

    A training is worth more than its metrics: no error of theirs ends it.
    """

    def __init__(self, folder: Path, args: argparse.Namespace, steps_done: int):
        self.writers: dict = {}
        if dist.get_rank() != 0:
            return
        with self._survive_errors("TensorBoard"):
            writer = TensorBoard(folder / "tensorboard", steps_done)
            self.writers["TensorBoard"] = writer
        if args.wandb:
            with self._survive_errors("W&B"):
                self.writers["W&B"] = WeightsAndBiases(folder, args)

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, writer in list(self.writers.items()):
            with self._survive_errors(name):
                writer.log(step, values)

    def close(self) -> None:
        for name, writer in list(self.writers.items()):
            with self._survive_errors(name):
                writer.close()

    @contextlib.contextmanager
    def _survive_errors(self, name: str):
        try:
            yield
        except Exception as error:
            self.writers.pop(name, None)
            reason = str(error) or type(error).__name__
            logging.warning(f"warning: no more metrics go to {name}: {reason}")


class TensorBoard:
    """Writes for TensorBoard, which shows each step of a resumed run once."""

    def __init__(self, folder: Path, steps_done: int):
        from torch.utils.tensorboard import SummaryWriter

        # Of what was written before the run was stopped, TensorBoard drops these steps
        # and later ones. The run logs them once more.
        self.writer = SummaryWriter(str(folder), purge_step=steps_done)

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        # A run that is killed after its next checkpoint does not log this step again.
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """Writes to the W&B run that has the checkpoint folder's name, on every start.

    Slurm may send SIGTERM to all processes of a job. That ends W&B's own process, for
    the rest of this start (github.com/wandb/wandb/issues/9963). What was logged a
    second before is on disk.
    """

    def __init__(self, folder: Path, args: argparse.Namespace):
        try:
            import wandb
        except ModuleNotFoundError:
            sys.exit(
                "main.py: error: W&B is not installed: uv sync --locked --group wandb"
            )
        self.run = wandb.init(
            project=args.wandb,
            id=folder.name,
            resume="allow",
            dir=folder,
            config={name: str(value) for name, value in vars(args).items()},
            mode=os.environ.get("WANDB_MODE") or find_wandb_mode(folder),
            settings=wandb.Settings(
                console="off",
                silent=True,
                x_transaction_log_flush_interval=1,
                finish_timeout=60,  # seconds
                finish_timeout_raises=True,
            ),
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        self.run.log(values, step=step)

    def close(self) -> None:
        self.run.finish()


def find_wandb_mode(folder: Path) -> str:
    """Return "offline" where the server is out of reach: wandb.init() would wait."""
    url = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    try:
        urllib.request.urlopen(url, timeout=3).close()
    except urllib.error.HTTPError:
        return "online"  # whatever it says, it is there
    except OSError:
        logging.warning(
            f"warning: no {url} from here, W&B is offline: "
            f"later, call wandb sync {folder}/wandb/offline-run-*"
        )
        return "offline"
    return "online"


def start_profile(folder: Path) -> torch.profiler.profile:
    """Profile five steps: a trace a rank for ui.perfetto.dev, and rank 0's table."""
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def write(profile: torch.profiler.profile) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        trace = folder / f"trace-rank{dist.get_rank()}.json.gz"
        profile.export_chrome_trace(str(trace))
        if dist.get_rank() == 0:
            order = f"self_{device}_time_total"
            print(profile.key_averages().table(order, row_limit=20), flush=True)

    schedule = torch.profiler.schedule(
        skip_first=5, wait=0, warmup=1, active=5, repeat=1
    )
    profile = torch.profiler.profile(schedule=schedule, on_trace_ready=write)
    profile.start()
    return profile


class Stopwatch:
    """Measures how long the device had no work because a batch was missing."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.waits: list = []

    @contextlib.contextmanager
    def waiting(self):
        """Return a context in which nothing but the wait for a batch happens."""
        start = self._now()
        yield
        self.waits.append((start, self._now()))

    def seconds(self) -> float:
        if not self.cuda:
            return sum(end - start for start, end in self.waits)
        torch.cuda.synchronize()
        return sum(start.elapsed_time(end) for start, end in self.waits) / 1000

    def _now(self):
        if not self.cuda:
            return time.perf_counter()
        # The CPU runs ahead of the GPU: the GPU notes the time when it comes here.
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class GpuSampler:
    """Asks every second how busy the GPUs are that rank 0 sees on its node."""

    def __init__(self, device: torch.device):
        self.samples: list[float] = []
        if device.type == "cuda" and dist.get_rank() == 0:
            threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        # A slice of a GPU (MIG) does not tell, nor do some containers.
        with contextlib.suppress(Exception):
            while True:
                for gpu in range(torch.cuda.device_count()):
                    self.samples.append(torch.cuda.utilization(gpu))
                time.sleep(1)
