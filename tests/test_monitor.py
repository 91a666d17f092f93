"""What imagenet/monitor.py says about hangs, metrics, and where time goes.

Ranks are processes of their own, in a real process group (gloo) on this machine's CPU,
that really sleep, are stopped and are killed. No GPU is needed: how kernels are counted
is tested on a list of them made by hand.
"""

import gzip
import importlib
import importlib.util
import json
import logging
import multiprocessing
import os
import re
import resource
import shutil
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

REPOSITORY = Path(__file__).resolve().parents[1]
HOST = socket.gethostname()

pytestmark = pytest.mark.timeout(120)

# Where main.py finds the modules beside it.
sys.path.append(str(REPOSITORY / "imagenet"))
monitor = importlib.import_module("monitor")


# Processes


class Ranks:
    """Ranks that run `work(*args)` in a process group, and all that they print."""

    def __init__(self, log: Path, world_size: int, work, *args, timeout: float = 60):
        # Every rank is forked from a process that has imported all this once;
        # importing takes seconds.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            [
                "test_monitor",
                "torch._dynamo",
                "torch.profiler",
                "tensorboard.summary.writer.record_writer",
                "torchvision",
            ]
        )
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        self.log = log
        log.touch()
        job = (log, world_size, port, timeout, work, args)
        self.processes = [
            context.Process(target=run_rank, args=(r, *job)) for r in range(world_size)
        ]
        for process in self.processes:
            process.start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.processes:
            process.kill()
            process.join()

    def text(self) -> str:
        return self.log.read_text()

    def wait_for(self, pattern: str, count: int = 1) -> str:
        """Wait until the log has so many matches, and return it."""
        deadline = time.monotonic() + 60
        while len(re.findall(pattern, text := self.text(), re.MULTILINE)) < count:
            assert time.monotonic() < deadline, f"no {count} x {pattern} in\n{text}"
            time.sleep(0.05)
        return text

    def join(self) -> str:
        """Wait until all ranks have ended well, and return the log."""
        for process in self.processes:
            process.join(60)
        assert [process.exitcode for process in self.processes] == [0] * len(
            self.processes
        ), self.text()
        return self.text()


def run_rank(
    rank: int, log: Path, world_size: int, port: int, timeout: float, work, args: tuple
) -> None:
    torch.set_num_threads(1)
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    logging.basicConfig(format="%(message)s", force=True)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    dist.init_process_group(
        "gloo", timeout=timedelta(seconds=timeout), rank=rank, world_size=world_size
    )
    work(*args)
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


def wait_for_file(path: Path) -> None:
    while not path.exists():
        time.sleep(0.05)


# Hangs

STEPS, HANG_AT = 6, 4


class Samples(Dataset):
    """Samples of which one, first in step HANG_AT, may take until `go` exists."""

    def __init__(self, go: Path | None):
        self.go = go

    def __len__(self) -> int:
        return 2 * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.go and index == 2 * (HANG_AT - 1):
            wait_for_file(self.go)
        return torch.ones(4)


class Model(nn.Sequential):
    """A model with buffers, whose forward() may take until the file `go` exists."""

    def __init__(self):
        super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.go = None

    def forward(self, samples):
        if self.go:
            wait_for_file(self.go)
        return super().forward(samples)


def train_and_hang(timeout: float, fault: str, culprit: int, folder: Path) -> None:
    """Train; at one step the culprit does what `fault` says."""
    watch = monitor.HangReporter(timeout)
    mine = culprit == dist.get_rank()
    loader = DataLoader(
        Samples(folder / "go" if mine and fault == "loading" else None), batch_size=2
    )
    model = Model()
    ddp_model = DistributedDataParallel(model)
    for step, samples in enumerate(loader, start=1):
        watch.tick(step)
        if step == HANG_AT and mine:
            if fault == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            model.go = folder / "go" if fault == "forward" else None
        ddp_model(samples).sum().backward()
    watch.close()


def check_whole_lines(text: str) -> None:
    """All that was printed is reports, and no line of one rank is cut by another's."""
    for line in text.splitlines():
        assert re.fullmatch(
            rf"warning: rank \d of \d on {HOST} .*|  thread .*:|    [/<].*:\d+ in \S+",
            line,
        ), line


@pytest.mark.parametrize(
    ("fault", "culprit", "step", "doing"),
    [
        (
            "loading",
            0,
            HANG_AT - 1,
            r"loading data in wait_for_file \(test_monitor.py:\d+\)",
        ),
        ("forward", 2, HANG_AT, r"working in wait_for_file \(test_monitor.py:\d+\)"),
    ],
)
def test_sleeping_rank(fault, culprit, step, doing, tmp_path):
    """The rank that all wait for is named once, with its step and its place.

    All ranks show their stacks. When the rank goes on, so does the training,
    which ends well.
    """
    with Ranks(
        tmp_path / "log", 3, train_and_hang, 3.0, fault, culprit, tmp_path
    ) as ranks:
        ranks.wait_for("asked all ranks")
        ranks.wait_for("has not moved for", 3)
        (tmp_path / "go").touch()
        text = ranks.join()
    check_whole_lines(text)
    (named,) = re.findall(r"they wait for (.*)", text)
    assert re.fullmatch(rf"rank {culprit} on {HOST} \(step {step}, {doing}\)", named)
    # Whoever asked says that it goes on, if it had another look before the end.
    assert len(re.findall("moves again", text)) <= 1
    stacks = dict(
        re.findall(
            r"rank (\d) of 3 on \S+ has not moved for \d+ s: (.*(?:\n  .*)*)", text
        )
    )
    assert set(stacks) == {"0", "1", "2"}
    assert text.count("has not moved") == 3
    for rank, stack in stacks.items():
        assert re.match(
            r"step \d+, " + (doing if int(rank) == culprit else "waiting for others"),
            stack,
        )
        assert (
            "thread MainThread" in stack
            and "test_monitor.py" in stack
            and "in train_and_hang" in stack
        )
        assert ("in wait_for_file" in stack) == (int(rank) == culprit)


def test_stopped_rank(tmp_path):
    """A rank that does not answer is named before the timeout ends the others."""
    with Ranks(
        tmp_path / "log", 3, train_and_hang, 20.0, "stopped", 1, tmp_path, timeout=20
    ) as ranks:
        text = ranks.wait_for("^RuntimeError", 2)
    gone = r"does not answer: stopped, or its node is gone"
    assert re.search(rf"they wait for rank 1 on {HOST} \({gone}\)", text)
    assert text.index("they wait for") < text.index("Traceback")
    assert set(re.findall(r"rank (\d) of 3 on \S+ has not moved", text)) == {"0", "2"}


def test_stopped_rank_0(tmp_path):
    """Where the store does not answer, every rank says so, and shows its stacks."""
    with Ranks(
        tmp_path / "log", 3, train_and_hang, 3.0, "stopped", 0, tmp_path
    ) as ranks:
        text = ranks.wait_for("has not moved", 2)
    check_whole_lines(text)
    gone = "the store does not answer: rank 0 is stopped, or its node is gone"
    found = re.findall(
        rf"rank (\d) of 3 on {HOST} has not moved .*waiting for others.*; {gone}", text
    )
    assert sorted(found) == ["1", "2"]


def hang_twice(timeout: float, folder: Path) -> None:
    watch = monitor.HangReporter(timeout)
    for step in (1, 2, 3):
        watch.tick(step)
        if dist.get_rank() == 1 and step < 3:
            wait_for_file(folder / f"go {step}")
        dist.barrier()
    watch.tick(4)
    wait_for_file(folder / "go 3")
    watch.close()


def test_second_hang(tmp_path):
    """A hang that ends is said to, and the next is reported as well, each once."""
    with Ranks(tmp_path / "log", 2, hang_twice, 3.0, tmp_path) as ranks:
        for hang in (1, 2):
            ranks.wait_for("they wait for", hang)
            (tmp_path / f"go {hang}").touch()
            ranks.wait_for("moves again", hang)
        (tmp_path / "go 3").touch()
        text = ranks.join()
    check_whole_lines(text)
    assert re.findall(r"they wait for rank (\d) on \S+ \(step (\d), ", text) == [
        ("1", "1"),
        ("1", "2"),
    ]
    assert text.count("moves again") == 2


def evaluate_for_long(timeout: float, folder: Path) -> None:
    """Rank 1 goes on with its evaluation while the other has come to its end."""
    watch = monitor.HangReporter(timeout)
    watch.tick(7)
    while dist.get_rank() == 1 and not (folder / "go").exists():
        time.sleep(0.05)
        watch.tick()
    dist.barrier()
    watch.close()


def test_slow_evaluation(tmp_path):
    """A rank that moves is named, too, where another waits for it for so long."""
    with Ranks(tmp_path / "log", 2, evaluate_for_long, 3.0, tmp_path) as ranks:
        ranks.wait_for("they wait for")
        text = ranks.wait_for("rank 1 of 2 on .* has not moved")
        (tmp_path / "go").touch()
        ranks.join()
    assert re.search(
        r"they wait for rank 1 on \S+ \(step 7, working in evaluate_for_long", text
    )
    assert re.search(
        r"rank 1 of 2 on \S+ has not moved for [01] s: step 7, working in", text
    )


def work_slowly(timeout: float) -> None:
    watch = monitor.HangReporter(timeout)
    for step in range(6):
        watch.tick(step)
        # Together, more than the timeout.
        time.sleep(0.3 * timeout if dist.get_rank() == step % 2 else 0)
        dist.barrier()
    watch.pause()
    if dist.get_rank() == 0:
        time.sleep(1.2 * timeout)
    dist.barrier()
    watch.close()


def test_slow_training(tmp_path):
    """Slow steps, and a long pause that was announced, are not reported."""
    with Ranks(tmp_path / "log", 2, work_slowly, 5.0) as ranks:
        assert ranks.join() == ""


def test_alone(tmp_path):
    """A single rank shows its stacks, and there is nobody to ask."""
    with Ranks(
        tmp_path / "log", 1, train_and_hang, 2.0, "forward", 0, tmp_path
    ) as ranks:
        ranks.wait_for("has not moved")
        (tmp_path / "go").touch()
        text = ranks.join()
    check_whole_lines(text)
    assert "working in wait_for_file" in text and "they wait for" not in text


@pytest.mark.parametrize(
    ("states", "culprits"),
    [
        ({0: (5, True, ""), 2: (5, True, "")}, [1]),  # no answer
        ({0: (5, True, ""), 1: (4, False, ""), 2: (5, False, "")}, [1]),  # behind
        # Behind, and waiting for its GPU.
        ({0: (5, True, ""), 1: (4, True, ""), 2: (5, True, "")}, [1]),
        ({0: (5, True, ""), 1: (5, True, ""), 2: (5, False, "")}, [2]),  # not waiting
        ({0: (5, False, ""), 1: (5, True, ""), 2: (5, False, "")}, [0, 2]),
        # Each in another collective.
        ({0: (5, True, ""), 1: (5, True, ""), 2: (5, True, "")}, []),
    ],
)
def test_find_culprits(states, culprits):
    assert monitor.find_culprits(states, 3) == culprits


# Metrics


def loss_at(step: int) -> float:
    return 1 / (1 + step)


def track(folder: Path, steps: range) -> None:
    tracker = monitor.Tracker(folder)
    for step in steps:
        tracker.log(step, {"train/loss": loss_at(step), "train/step": step})
    tracker.close()


def check_tracked(folder: Path, steps: range) -> None:
    """TensorBoard finds every step once, in order, with its values."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    for tag, value_at in (("train/loss", loss_at), ("train/step", float)):
        found = events.Scalars(tag)
        assert [event.step for event in found] == list(steps)
        assert [event.value for event in found] == pytest.approx(
            [value_at(step) for step in steps]
        )


def test_killed_and_resumed(tmp_path):
    """A job killed anywhere and resumed earlier has every step once in its metrics."""
    folder, mark = tmp_path / "metrics", tmp_path / "metrics" / "tracked"
    start = 0
    for goal in (40, 150, 151, 270):
        with Ranks(
            tmp_path / f"log {goal}", 1, track, folder, range(start, 10**6)
        ) as ranks:
            while not mark.exists() or int(mark.read_text()) < goal:
                assert ranks.processes[0].is_alive(), ranks.text()
            os.kill(ranks.processes[0].pid, signal.SIGKILL)
        start = max(0, int(mark.read_text()) - 30)  # its last checkpoint
    last = int(mark.read_text()) + 20
    with Ranks(tmp_path / "log", 1, track, folder, range(start, last)) as ranks:
        ranks.join()
    check_tracked(folder, range(last))
    assert int(mark.read_text()) == last - 1


def track_and_die(folder: Path) -> None:
    tracker = monitor.Tracker(folder)
    values = {f"layer {number}/norm": 1.0 for number in range(300)}
    tracker.log(0, values | {"train/loss": loss_at(0), "train/step": 0})
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_after_the_mark(tmp_path):
    """What the file `tracked` names is on disk."""
    with Ranks(tmp_path / "log", 1, track_and_die, tmp_path / "metrics") as ranks:
        ranks.processes[0].join(60)
    assert (tmp_path / "metrics" / "tracked").read_text() == "0"
    check_tracked(tmp_path / "metrics", range(1))


def test_killed_before_the_mark(tmp_path):
    """A step on disk, but not in the file `tracked`, is written again and read once."""
    track(tmp_path, range(10))
    # As if killed while steps 8 and 9 were written.
    (tmp_path / "tracked").write_text("7")
    track(tmp_path, range(5, 20))
    check_tracked(tmp_path, range(20))


def test_empty_mark(tmp_path):
    """A node that was lost may have left it: the metrics go on."""
    track(tmp_path, range(3))
    (tmp_path / "tracked").write_text("")
    track(tmp_path, range(5))
    check_tracked(tmp_path, range(5))
    assert (tmp_path / "tracked").read_text() == "4"


def test_no_tracking_elsewhere(tmp_path, monkeypatch):
    """Ranks without a folder write nothing, anywhere."""
    monkeypatch.chdir(tmp_path)
    tracker = monitor.Tracker(None, "project", "run", {})
    tracker.log(1, {"loss": 1.0})
    tracker.close()
    assert not list(tmp_path.iterdir())


def track_without(what: str, folder: Path) -> None:
    tracker = monitor.Tracker(folder)
    tracker.log(1, {"loss": 1.0})
    if what == "folder":
        shutil.rmtree(folder)
    else:
        # As if the disk were full.
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    for step in range(2, 1000):
        tracker.log(step, {"loss": 1.0})
    tracker.close()
    sys.stderr.write("trained\n")


@pytest.mark.parametrize("what", ["folder", "space"])
def test_nowhere_to_write(what, tmp_path):
    """Without a place for its metrics a training goes on, after one warning."""
    log = Path(f"{tmp_path}.log")
    with Ranks(log, 1, track_without, what, tmp_path / "metrics") as ranks:
        text = ranks.join()
    warning, trained = text.splitlines()
    assert warning.startswith(
        f"warning: no more metrics in {tmp_path / 'metrics'}: [Errno "
    )
    assert trained == "trained"


@pytest.mark.skipif(
    importlib.util.find_spec("wandb") is not None, reason="W&B is installed"
)
def test_wandb_is_missing(tmp_path):
    with pytest.raises(
        SystemExit,
        match=r"^main\.py: error: W&B is not installed: "
        r"uv sync --locked --group wandb$",
    ):
        monitor.Tracker(tmp_path, "project", "run", {})


# Where a step's time goes


class Pictures(Dataset):
    def __init__(self, seconds: float):
        self.seconds = seconds

    def __len__(self) -> int:
        return 18

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.seconds)
        return torch.randn(3, 48, 48), index % 10


def profile(
    folder: Path, data_seconds: float, rank_1_seconds: float, steps: int
) -> None:
    from torchvision.models import resnet18

    model = DistributedDataParallel(resnet18(num_classes=10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    profiler = monitor.Profiler(folder, skip=2, active=4)
    loader = iter(DataLoader(Pictures(data_seconds), batch_size=2))
    for _ in range(steps):
        images, labels = next(loader)
        time.sleep(rank_1_seconds * dist.get_rank())
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        profiler.step()
    profiler.close()


@pytest.mark.parametrize(
    ("data_seconds", "rank_1_seconds", "steps", "slow"),
    [(0.15, 0.0, 9, "waiting for data"), (0.0, 0.3, 5, "communication")],
)
def test_profiler(data_seconds, rank_1_seconds, steps, slow, tmp_path):
    """Rank 0's table shows slow data as such, and a slow rank as communication.

    That also holds in a short epoch.
    """
    with Ranks(
        tmp_path / "log",
        2,
        profile,
        tmp_path / "traces",
        data_seconds,
        rank_1_seconds,
        steps,
    ) as ranks:
        text = ranks.join()
    rows = re.findall(r"^ *(\S.*?) +(\d+\.\d) +(\d+\.\d)% *$", text, re.MULTILINE)
    kinds = [
        "waiting for data",
        "forward",
        "backward",
        "communication",
        "optimizer",
        "other",
        "step",
    ]
    assert [row[0] for row in rows] == kinds
    times, shares = ({row[0]: float(row[i]) for row in rows} for i in (1, 2))
    total = times.pop("step")
    assert sum(times.values()) == pytest.approx(total, abs=0.5)
    assert sum(shares.values()) == pytest.approx(200, abs=0.5)
    assert 280 < times[slow] < 0.95 * total
    others = [kind for kind in times if kind not in (slow, "communication")]
    assert max(others, key=times.get) == "backward"
    assert all(
        times[kind] > 0
        for kind in ("forward", "backward", "communication", "optimizer")
    )
    assert max(len(line) for line in text.splitlines() if "%" in line) <= 80
    for rank in range(2):
        trace = json.loads(
            gzip.decompress(
                (tmp_path / "traces" / f"trace-rank{rank}.json.gz").read_bytes()
            )
        )
        names = [event.get("name", "") for event in trace["traceEvents"]]
        active = min(4, steps - 3)
        assert names.count("DistributedDataParallel.forward") == active
        assert "gloo:all_reduce" in names


def test_no_steps_to_profile(tmp_path):
    """A too short epoch gives no table, and no error; nor does it without a folder."""
    with Ranks(tmp_path / "log", 2, profile, tmp_path / "traces", 0.0, 0.0, 2) as ranks:
        assert "ms a step" not in ranks.join()
    profiler = monitor.Profiler(None)
    profiler.step()
    profiler.close()


def test_time_on_a_gpu():
    """Kernels belong to what launched them, though they run later, and count once."""
    cpu = {
        "step": [(100, 120), (120, 300)],
        "forward": [(102, 105), (280, 284)],
        "backward": [(106, 110), (285, 290)],
        "optimizer": [(112, 115), (292, 295)],
        "waiting for data": [(100, 101), (120, 280)],
    }
    runs = [  # launched at, from, to
        (90, 95, 130, "gemm"),  # of the step before, which still runs
        (103, 130, 150, "gemm"),
        (107, 150, 180, "gemm"),
        (108, 160, 190, "ncclDevKernel_AllReduce"),
        (113, 190, 200, "adam"),
        (116, 200, 204, "sum"),
        # Until 280 the GPU has nothing to do: the next batch is not there.
        (281, 282, 300, "gemm"),
        (286, 300, 320, "gemm"),
        (293, 320, 330, "adam"),
    ]
    kernels = [
        SimpleNamespace(
            id=i, name=name, time_range=SimpleNamespace(start=start, end=end)
        )
        for i, (_, start, end, name) in enumerate(runs)
    ]
    spans = monitor.find_gpu_spans(
        cpu, kernels, {i: launch for i, (launch, *_) in enumerate(runs)}
    )
    times, hidden = monitor.share_out(2, spans)
    assert {kind: round(2000 * time) for kind, time in times.items()} == {
        "forward": 38,
        "backward": 50,
        "communication": 10,
        "optimizer": 20,
        "other": 4 + 2,  # what measures, and the 2 us between data and forward
        "waiting for data": 76,
    }
    assert round(2000 * hidden) == 20


# The device


def test_stopwatch():
    """Only the time between `batch_wanted` and `batch_here` counts."""
    watch = monitor.Stopwatch(torch.device("cpu"))
    spent = 0.0
    for _ in range(3):
        time.sleep(0.05)
        start = time.perf_counter()
        watch.batch_wanted()
        time.sleep(0.02)
        watch.batch_here()
        spent += time.perf_counter() - start
    assert 0.06 <= watch.seconds() <= spent
    assert watch.seconds() == watch.seconds()


def test_no_gpu():
    assert monitor.gpu_usage(torch.device("cpu")) == ""
