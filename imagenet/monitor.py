"""What watches a training: a report of hangs, metrics, a profile, a stopwatch."""

import argparse
import collections
import io
import itertools
import json
import logging
import math
import os
import socket
import sys
import sysconfig
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from types import FrameType

import rich.box
import rich.console
import rich.table
import torch
import torch.distributed as dist
from checkpoint import Run
from torch.autograd import DeviceType

logger = logging.getLogger("main")


# Hangs


class HangReporter:
    """Logs every rank's Python stacks, and the rank that the others wait for.

    It does so when a rank has not called `tick` for 3/4 of the process group's timeout,
    which then ends the job. Make it with the process group, and close it before the
    last barrier: rank 0 hosts the store.
    """

    def __init__(self, timeout_seconds: float):
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.host, self.main_thread = (
            socket.gethostname(),
            threading.main_thread().ident,
        )
        self.limit, self.period = 0.75 * timeout_seconds, min(timeout_seconds / 40, 5.0)
        self.step, self.moved = 0, time.monotonic()
        self.heard = self.moved  # when the store has last answered
        self.asked = self.reported = False
        self.closed = threading.Event()
        self.threads = [threading.Thread(target=self._watch, daemon=True)]
        if self.world_size > 1:
            # A connection of its own: the process group's serves one call at a time,
            # and some wait for long.
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            timeout = timedelta(seconds=timeout_seconds)
            self.store = dist.TCPStore(
                address, port, timeout=timeout, wait_for_workers=False
            )
            self.store.set(f"hang/host/{self.rank}", self.host)
            # How many times ranks were asked, and last by which one.
            self.store.compare_set("hang/asked", "", "0 0")
            # A thread of its own: where rank 0 is stopped,
            # its store makes the others wait for ever.
            self.threads.append(threading.Thread(target=self._talk, daemon=True))
        for thread in self.threads:
            thread.start()

    def tick(self, step: int | None = None) -> None:
        """Say that this rank moves: in each step, by number, or evaluated batch."""
        self.moved = time.monotonic()
        if step is not None:
            self.step = step

    def pause(self) -> None:
        """Expect nothing of this rank until the next tick."""
        self.moved = math.inf

    def close(self) -> None:
        self.closed.set()
        for thread in self.threads:
            thread.join(timeout=1)

    def _watch(self) -> None:
        """Print this rank's stacks once a hang, if it does not move or is asked."""
        shown = -math.inf
        while not self.closed.wait(self.period):
            moved, now = self.moved, time.monotonic()
            asked, self.asked = self.asked, False
            # A question that comes just after this rank has shown its stacks
            # is about the same hang.
            asked = asked and now - shown >= self.limit
            if self.reported and moved > shown:
                self.reported = False
                self._write("moves again")
            if shown < moved and (asked or now - moved >= self.limit):
                shown = now
                since = (
                    "is paused"
                    if moved == math.inf
                    else f"has not moved for {now - moved:.0f} s"
                )
                silent = (
                    "; the store does not answer: "
                    "rank 0 is stopped, or its node is gone"
                    if now - self.heard > self.limit / 2
                    else ""
                )
                frames = sys._current_frames()
                doing = describe(frames[self.main_thread])[1]
                self._write(
                    f"{since}: step {self.step}, "
                    f"{doing}{silent}{self._format_stacks(frames)}"
                )

    def _format_stacks(self, frames: dict[int, FrameType]) -> str:
        text = ""
        for thread in set(threading.enumerate()) - set(self.threads):
            text += f"\n  thread {thread.name}, innermost call first:"
            # Without the source lines: where a file system hangs,
            # to read them would hang, too.
            for frame in walk(frames.get(thread.ident)):
                code = frame.f_code
                # Imports take many frames that are frozen.
                if not code.co_filename.startswith("<frozen"):
                    place = f"{code.co_filename}:{frame.f_lineno}"
                    text += f"\n    {place} in {code.co_qualname}"
        return text

    def _talk(self) -> None:
        """Ask all ranks for their state when this one hangs; answer those that ask."""
        answered = -math.inf
        try:
            heard = self.store.get("hang/asked").decode()
            while not self.closed.wait(self.period):
                number, asker = map(int, heard.split())
                stuck = (
                    time.monotonic() - self.moved >= self.limit
                    and answered < self.moved
                )
                # Where many ranks ask at the same time one of them wins,
                # and the others find its question.
                question = f"{number + 1} {self.rank}" if stuck else heard
                latest = self.store.compare_set("hang/asked", heard, question).decode()
                self.heard = time.monotonic()
                if latest == heard:
                    continue
                heard, answered, self.asked = latest, self.heard, True
                number, asker = map(int, heard.split())
                state = [self.step, *describe(sys._current_frames()[self.main_thread])]
                self.store.set(f"hang/{number}/{self.rank}", json.dumps(state))
                if asker == self.rank:
                    self._report(
                        [f"hang/{number}/{rank}" for rank in range(self.world_size)]
                    )
        except RuntimeError:
            # The store is gone, and rank 0 with it,
            # which the others learn without this.
            return

    def _report(self, keys: list[str]) -> None:
        """Wait a little for every rank's state, and name those that hold others up."""
        deadline = time.monotonic() + self.limit / 6
        while not self.store.check(keys) and time.monotonic() < deadline:
            self.closed.wait(self.period / 4)
        there = {rank: key for rank, key in enumerate(keys) if self.store.check([key])}
        states = {rank: json.loads(self.store.get(key)) for rank, key in there.items()}
        names = []
        for rank in find_culprits(states, self.world_size):
            host = self.store.get(f"hang/host/{rank}").decode()
            state = "does not answer: stopped, or its node is gone"
            if rank in states:
                state = f"step {states[rank][0]}, {states[rank][2]}"
            names.append(f"rank {rank} on {host} ({state})")
        if len(names) > 8:
            names[8:] = [f"{len(names) - 8} more"]
        self._write(
            "asked all ranks: they wait for "
            f"{', '.join(names) or 'each other, as their stacks show'}"
        )
        self.reported = True

    def _write(self, text: str) -> None:
        line = f"warning: rank {self.rank} of {self.world_size} on {self.host} {text}\n"
        # In one piece: other ranks write there, too.
        os.write(sys.stderr.fileno(), line.encode())


def find_culprits(
    states: dict[int, tuple[int, bool, str]], world_size: int
) -> list[int]:
    """Return the ranks that others wait for, by their steps and whether they wait."""
    if silent := [rank for rank in range(world_size) if rank not in states]:
        return silent
    lowest = min(step for step, _, _ in states.values())
    behind = [rank for rank, (step, _, _) in states.items() if step == lowest]
    return [r for r in behind if not states[r][1]] or (
        behind if len(behind) < world_size else []
    )


def describe(innermost: FrameType) -> tuple[bool, str]:
    """Return whether a main thread waits for other ranks, and in words what it does."""
    torch_dir, file = f"{Path(torch.__file__).parent}/", innermost.f_code.co_filename
    frames = list(walk(innermost))
    loading = any(
        frame.f_code.co_filename.startswith(f"{torch_dir}utils/data/")
        for frame in frames
    )
    # With a GPU any call may wait: its queue fills up
    # behind a kernel that waits for other ranks.
    parts = ("",) if torch.cuda.is_initialized() else ("distributed/", "nn/parallel/")
    waits = file.startswith(tuple(torch_dir + part for part in parts))
    # loss.backward(), where DDP averages gradients,
    # and main.py's functions that read an averaged tensor.
    waits |= innermost.f_code.co_name in ("_engine_run_backward", "agree", "average")
    doing = "loading data" if loading else "waiting for others" if waits else "working"
    libraries = (
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
        "<",  # "<frozen importlib>"
    )
    for code, line in ((frame.f_code, frame.f_lineno) for frame in frames):
        if not code.co_filename.startswith(libraries):
            doing += f" in {code.co_name} ({Path(code.co_filename).name}:{line})"
            break
    return waits and not loading, doing


def walk(frame: FrameType | None):
    """Return a frame and its callers."""
    while frame:
        yield frame
        frame = frame.f_back


# Metrics


class Tracker:
    """Writes metrics for TensorBoard, and to W&B if asked.

    A requeued job goes on in the same run. A resumed training repeats the steps since
    its checkpoint, with the same values. They are skipped up to the step in the file
    `tracked`, the last one that is on disk. Without a folder, nothing is written.
    """

    def __init__(
        self,
        folder: Path | None,
        wandb_project: str | None = None,
        run_id: str = "",
        config=None,
        patience: float = 60.0,
    ):
        self.folder, self.run = folder, None
        self.logged = collections.deque()  # steps, with the time
        if folder is None:
            return
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter

            folder.mkdir(parents=True, exist_ok=True)
            mark = folder / "tracked"
            text = mark.read_text() if mark.exists() else ""
            # A node that was lost may have left the mark empty.
            self.done = int(text) if text.isdecimal() else -1
            self.Event, self.Summary = event_pb2.Event, summary_pb2.Summary
            # As torch's SummaryWriter, but without its thread:
            # an error comes where it occurs.
            writer = f"{socket.gethostname()}.{os.getpid()}"
            name = f"events.out.tfevents.{time.time():.0f}.{writer}"
            self.file = open(folder / name, "ab")
            self.writer = RecordWriter(self.file)
            self._write(file_version="brain.Event:2")
            # A job killed between a step and its mark writes the step again:
            # readers drop the first one.
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(step=self.done + 1, session_log=start)
            if wandb_project:
                self.run = start_wandb(folder, wandb_project, run_id, config, patience)
        except Exception as error:
            self._give_up(error)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Write all the values of a step, in one call."""
        if self.folder is None or step <= self.done:
            return
        try:
            scalars = [
                self.Summary.Value(tag=tag, simple_value=value)
                for tag, value in values.items()
            ]
            self._write(step=step, summary=self.Summary(value=scalars))
            if self.run:
                self.run.log(values, step=step, commit=True)
            self.logged.append((time.monotonic(), step))
            # In seconds: W&B's process writes every second.
            self._move_mark(3.0 if self.run else 0.0)
        except Exception as error:
            self._give_up(error)

    def close(self) -> None:
        if self.folder is None:
            return
        try:
            self._move_mark(0.0)
            self.file.close()
            if self.run:
                self.run.finish()
        except TimeoutError:
            runs = f"{self.folder}/wandb/run-*-{self.run.id}"
            logger.warning(
                "warning: W&B has not taken all of it in time: "
                f"later, call wandb sync {runs}"
            )
        except Exception as error:
            self._give_up(error)

    def _write(self, **event) -> None:
        self.writer.write(
            self.Event(wall_time=time.time(), **event).SerializeToString()
        )
        self.file.flush()

    def _move_mark(self, age: float) -> None:
        """Note the last step logged at least `age` seconds ago."""
        step = None
        while self.logged and time.monotonic() - self.logged[0][0] >= age:
            step = self.logged.popleft()[1]
        if step is None:
            return
        # It is on disk before the mark, also if the node is lost.
        os.fsync(self.file.fileno())
        new = self.folder / "tracked.new"
        with open(new, "w") as file:
            file.write(str(step))
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.folder / "tracked")

    def _give_up(
        self, error: Exception
    ) -> None:  # of any kind: a training is worth more than its metrics
        logger.warning(f"warning: no more metrics in {self.folder}: {error}")
        self.folder = None


def start_wandb(
    folder: Path, project: str, run_id: str, config: dict | None, patience: float
):
    """Start or resume a W&B run, offline where its server is out of reach.

    It ends in `patience` seconds.
    """
    try:
        import wandb
    except ModuleNotFoundError:
        sys.exit("main.py: error: W&B is not installed: uv sync --locked --group wandb")
    mode, url = (
        os.environ.get("WANDB_MODE"),
        os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"),
    )
    try:
        if mode is None:
            urllib.request.urlopen(url, timeout=3).close()
    except urllib.error.HTTPError:
        pass  # whatever it says, it is there
    except OSError:
        mode = "offline"
        runs = f"{folder}/wandb/offline-run-*-{run_id}"
        logger.warning(
            f"warning: no {url} from here, W&B is offline: "
            f"later, call wandb sync {runs}"
        )
    settings = wandb.Settings(
        console="off",
        silent=True,
        x_transaction_log_flush_interval=1,
        finish_timeout=patience,
        finish_timeout_raises=True,
    )
    names = {"project": project, "id": run_id, "dir": folder}
    try:
        return wandb.init(
            **names, resume="allow", config=config, mode=mode, settings=settings
        )
    except Exception as error:  # no account, say
        logger.warning(f"warning: nothing goes to W&B, only to {folder}: {error}")
        return None


# Where a step's time goes


class Profiler:
    """Profiles a few steps: a trace a rank, and a table of rank 0's times.

    Traces are for https://ui.perfetto.dev. What it
    reads torch records by itself. Without a folder, nothing is profiled.
    """

    def __init__(self, folder: Path | None, skip: int = 5, active: int = 5):
        self.folder, self.profile = folder, None
        if folder:
            schedule = torch.profiler.schedule(
                skip_first=skip, wait=0, warmup=1, active=active, repeat=1
            )
            self.profile = torch.profiler.profile(
                schedule=schedule, on_trace_ready=self._write
            )
            self.profile.start()

    def step(self) -> None:
        """Say that a step is over."""
        if self.profile:
            self.profile.step()

    def close(self) -> None:
        if self.profile:
            self.profile.stop()
            self.profile = None

    def _write(self, profile: torch.profiler.profile) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(
            str(self.folder / f"trace-rank{dist.get_rank()}.json.gz")
        )
        steps, spans = find_spans(profile.events())
        if dist.get_rank() == 0 and steps:
            print(format_table(*share_out(steps, spans)), flush=True)


def find_spans(events) -> tuple[int, dict[str, list]]:
    """Return the number of steps, and when each kind of work went on.

    Times are (start, end) in microseconds. Where kinds overlap,
    the step's time is that of the first in the dictionary.
    """

    def on_cpu(name: str) -> list[tuple[float, float]]:
        found = (
            e
            for e in events
            if e.device_type == DeviceType.CPU and e.name.startswith(name)
        )
        return [(event.time_range.start, event.time_range.end) for event in found]

    updates = on_cpu("Optimizer.step#")
    steps = [
        span
        for span in on_cpu("ProfilerStep")
        if any(span[0] <= time < span[1] for time, _ in updates)
    ]
    spans = {
        "step": steps,
        "waiting for data": on_cpu("enumerate(DataLoader)#"),
        "backward": on_cpu("autograd::engine::evaluate_function"),
        "optimizer": updates,
        # Backward goes on meanwhile; forward does not:
        # it starts by waiting for rank 0's buffers.
        "communication": on_cpu("gloo:"),
        "forward": on_cpu("DistributedDataParallel.forward"),
    }
    kernels = [
        e
        for e in events
        if e.device_type == DeviceType.CUDA and not e.is_user_annotation
    ]
    if steps and kernels:
        launches = {
            e.id: e.time_range.start
            for e in events
            if e.name.startswith(("cuda", "cuLaunch"))
        }
        spans = find_gpu_spans(spans, kernels, launches)
    return len(steps), spans


def find_gpu_spans(
    cpu: dict[str, list], kernels: list, launches: dict[int, float]
) -> dict[str, list]:
    """Return the spans of `find_spans` on the GPU.

    There, a kernel is of the kind of work that launched it.
    """
    spans = {
        kind: []
        for kind in (
            "step",
            "forward",
            "backward",
            "optimizer",
            "other",
            "communication",
        )
    }
    first, last = cpu["step"][0][0], cpu["step"][-1][1]
    # The CPU runs ahead: the steps last from the end of the kernels before them
    # to that of their own.
    begin = end = first
    for kernel in kernels:
        launch, span = (
            launches.get(kernel.id, -math.inf),
            (kernel.time_range.start, kernel.time_range.end),
        )
        kinds = ("forward", "backward", "optimizer")
        kind = next(
            (k for k in kinds if any(start <= launch < stop for start, stop in cpu[k])),
            "other",
        )
        spans["communication" if "nccl" in kernel.name else kind].append(span)
        begin = max(begin, span[1]) if launch < first else begin
        end = max(end, span[1]) if first <= launch < last else end
    return spans | {"step": [(begin, end)], "waiting for data": cpu["waiting for data"]}


def share_out(steps: int, spans: dict[str, list]) -> tuple[dict[str, float], float]:
    """Return a step's milliseconds by kind of work, and of hidden communication."""
    edges = [(start, kind, 1) for kind in spans for start, _ in spans[kind]]
    edges += [(end, kind, -1) for kind in spans for _, end in spans[kind]]
    active, total = collections.Counter(), collections.Counter()
    for (start, kind, way), (end, _, _) in itertools.pairwise(sorted(edges)):
        active[kind] += way
        if active["step"]:
            first = next(
                (kind for kind in spans if kind != "step" and active[kind]), "other"
            )
            total[first] += (end - start) / 1000 / steps
            if first != "communication" and active["communication"]:
                total["hidden"] += (end - start) / 1000 / steps
    hidden = total.pop("hidden", 0.0)
    return total, hidden


def format_table(times: dict[str, float], hidden: float) -> str:
    step = sum(times.values())
    table = rich.table.Table("Rank 0", box=rich.box.SIMPLE)
    table.add_column("ms a step", justify="right")
    table.add_column("share", justify="right")
    for kind in (
        "waiting for data",
        "forward",
        "backward",
        "communication",
        "optimizer",
        "other",
    ):
        table.add_row(kind, f"{times[kind]:.1f}", f"{times[kind] / step:.1%}")
    table.add_section()
    table.add_row("step", f"{step:.1f}", "100.0%")
    console = rich.console.Console(file=io.StringIO(), width=80)
    console.print(
        table, f"Hidden behind other work: {hidden:.1f} ms of communication a step."
    )
    return console.file.getvalue()


# The device


class Stopwatch:
    """Measures how long the device did nothing because the next batch was missing."""

    def __init__(self, device: torch.device):
        self.cuda, self.total = device.type == "cuda", 0.0
        self.pairs, self.spare = collections.deque(), []

    def batch_wanted(self) -> None:
        """Start: call this before next(loader), with the whole step launched."""
        # The CPU runs ahead of the GPU, so the GPU itself has to
        # look at the clock when it comes here.
        self.start = self._record() if self.cuda else time.perf_counter()

    def batch_here(self) -> None:
        """Stop: call this after next(loader), before anything is launched for it."""
        if self.cuda:
            self.pairs.append((self.start, self._record()))
            self._add_up()
        else:
            self.total += time.perf_counter() - self.start

    def seconds(self) -> float:
        """Return all the seconds so far; a GPU comes to the end of its work first."""
        if self.pairs:
            self.pairs[-1][1].synchronize()
            self._add_up()
        return self.total

    def _record(self) -> torch.cuda.Event:
        event = self.spare.pop() if self.spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _add_up(self) -> None:
        while self.pairs and self.pairs[0][1].query():  # the GPU has come so far
            start, end = self.pairs.popleft()
            self.total += start.elapsed_time(end) / 1000
            self.spare += (start, end)


def gpu_usage(device: torch.device) -> str:
    """Return "31.2 of 80 GiB, 97% busy", the highest and the latest, if on a GPU."""
    if device.type == "cpu":
        return ""
    total = torch.cuda.get_device_properties(device).total_memory
    highest = torch.cuda.max_memory_reserved(device)
    usage = f"{highest / 2**30:.1f} of {total / 2**30:.0f} GiB"
    try:
        return f"{usage}, {torch.cuda.utilization(device)}% busy"
    except Exception:
        # Of many kinds: a slice of a GPU (MIG) does not tell, nor do some containers.
        return usage


class Monitor:
    """All of these for one run, as main.py uses them, in the checkpoints' folder."""

    def __init__(self, folder: Path, device: torch.device, args: argparse.Namespace):
        self.device, self.waited, self.talk, self.gpu = device, 0.0, None, ""
        self.hangs, self.stopwatch = HangReporter(args.timeout), Stopwatch(device)
        self.profiler = Profiler(folder / "profile" if args.profile else None)
        mine = folder / "tensorboard" if dist.get_rank() == 0 else None
        config = {name: str(value) for name, value in vars(args).items()}
        patience = min(60.0, args.timeout / 2)  # other ranks wait for this one
        self.tracker = Tracker(mine, args.wandb, folder.name, config, patience)

    def watch(self, run: Run, batches: Iterable) -> Iterator:
        """Yield the batches of an epoch, with an eye on how long they take to come."""
        batches, steps = iter(batches), run.scheduler.last_epoch
        while True:
            self.stopwatch.batch_wanted()
            batch = next(batches, None)
            self.stopwatch.batch_here()
            if batch is None:
                # Before a checkpoint, for which the GPU waits.
                self.gpu = gpu_usage(self.device)
                return
            yield batch
            self.hangs.tick(run.scheduler.last_epoch)
            if run.scheduler.last_epoch != steps:  # not after every part of a step
                self.profiler.step()
                steps = run.scheduler.last_epoch

    def tick(self) -> None:
        """Say that this rank moves, in an evaluation."""
        self.hangs.tick()

    def pace(self, run: Run) -> float:
        """Return the seconds a step since this was last asked; 0 if there was none."""
        step, now = run.scheduler.last_epoch, time.perf_counter()
        (last_step, then), self.talk = self.talk or (step, now), (step, now)
        return (now - then) / (step - last_step) if step > last_step else 0.0

    def usage(self, seconds: float) -> str:
        """Return ", 3% waiting for data" of the epoch line, and the GPU's state."""
        waited, self.waited = (
            self.stopwatch.seconds() - self.waited,
            self.stopwatch.seconds(),
        )
        return f", {waited / seconds:.0%} waiting for data" + (
            f", {self.gpu}" if self.gpu else ""
        )

    def log(self, run: Run, values: dict[str, float]) -> None:
        """Track the values under the number of steps so far, once a step."""
        self.tracker.log(run.scheduler.last_epoch, values)

    def close(self) -> None:
        for part in (self.profiler, self.tracker, self.hangs):
            part.close()
