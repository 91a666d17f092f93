"""What imagenet/watch.py says about hangs, metrics, a profile and the wait for data.

Ranks are processes of their own, in a real process group (gloo) on this machine's CPU,
that really sleep, are stopped and are killed. TensorBoard and W&B read what is written.
"""

import argparse
import gzip
import importlib
import importlib.util
import json
import logging
import multiprocessing.connection
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

REPOSITORY = Path(__file__).resolve().parents[1]
HOST = socket.gethostname()
CPU = torch.device("cpu")

pytestmark = pytest.mark.timeout(120)

# Where main.py finds the modules beside it.
sys.path.append(str(REPOSITORY / "imagenet"))
watch = importlib.import_module("watch")


# Processes


class Ranks:
    """Ranks that run `work(*args)` in a process group, and all that they print."""

    def __init__(self, log: Path, world_size: int, work, *args):
        # Every rank is forked from a process that has imported all this once;
        # importing takes seconds.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            [
                "test_watch",
                "torch._dynamo",
                "torch.profiler",
                "torch.utils.tensorboard",
                "torchvision",
            ]
        )
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        self.log = log
        log.touch()
        job = (log, world_size, port, work, args)
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
        statuses = [process.exitcode for process in self.processes]
        assert statuses == [0] * len(statuses), self.text()
        return self.text()

    def end_with_the_first(self) -> str:
        """Kill all when the first one has ended, as srun does, and return the log."""
        sentinels = {process.sentinel: process for process in self.processes}
        ended = multiprocessing.connection.wait(sentinels, timeout=60)
        for process in self.processes:
            process.kill()
        statuses = [sentinels[sentinel].exitcode for sentinel in ended]
        assert set(statuses) == {1}, self.text()
        return self.text()


def run_rank(
    rank: int, log: Path, world_size: int, port: int, work, args: tuple
) -> None:
    torch.set_num_threads(1)
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    level = logging.INFO if rank == 0 else logging.ERROR
    # As in main.py. TensorBoard's thread, when it fails, writes to stderr meanwhile.
    logging.basicConfig(
        format="%(message)s", level=level, stream=sys.stdout, force=True
    )
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    limit = timedelta(minutes=30)  # main.py's: the watch alone ends a hang
    dist.init_process_group("gloo", timeout=limit, rank=rank, world_size=world_size)
    work(*args)
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


def options(**changes) -> argparse.Namespace:
    """Return the options of main.py that the watch reads."""
    values = {"timeout": 60, "compile": False, "profile": False, "wandb": None}
    return argparse.Namespace(**values | changes)


def wait_for_file(path: Path) -> None:
    while not path.exists():
        time.sleep(0.05)


# Hangs

STEPS, HANG_AT, TIMEOUT = 6, 4, 6


class Samples(Dataset):
    """Samples of which one, first in step HANG_AT, takes until the file `go` exists."""

    def __init__(self, go: Path | None = None):
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


def train_and_hang(fault: str, culprit: int, folder: Path) -> None:
    """Train; at one step the culprit does what `fault` says."""
    watching = watch.Watch(folder, CPU, options(timeout=TIMEOUT), 0)
    mine = culprit == dist.get_rank()
    go = folder / "go" if mine else None
    loader = DataLoader(Samples(go if fault == "loading" else None), batch_size=2)
    model = Model()
    ddp_model = DistributedDataParallel(model)
    ddp_model.broadcast_buffers = False  # as in main.py
    for step, samples in enumerate(watching.batches(loader), start=1):
        if step == HANG_AT and mine:
            if fault in ("SIGSTOP", "SIGKILL"):
                os.kill(os.getpid(), signal.Signals[fault])
            model.go = go if fault == "forward" else None
        ddp_model(samples).sum().backward()
    watching.close()


LOADING = "waits for its next batch"
WORKING = "works on a batch, or waits there for other ranks"


def find_hanging(text: str) -> dict[int, tuple[str, str]]:
    """Return what each rank says that it does, and its stacks."""
    said = re.findall(
        rf"^error: rank (\d) on {HOST} has not moved for \d s: it (.*)"
        r"((?:\n(?:(?:Current thr|Thr)ead .*|  File .*|))*)",
        text,
        re.MULTILINE,
    )
    assert len(said) == len({rank for rank, _, _ in said})
    for _, _, stacks in said:
        assert stacks.count("train_and_hang") == 1, text
    return {int(rank): (doing, stacks) for rank, doing, stacks in said}


@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize("fault", ["loading", "forward"])
def test_sleeping_rank(fault, culprit, tmp_path):
    """All ranks show their stacks and end; who waits for its data says so.

    Of a rank that sleeps in forward(), the stacks tell.
    """
    with Ranks(tmp_path / "log", 3, train_and_hang, fault, culprit, tmp_path) as ranks:
        text = ranks.end_with_the_first()
    hanging = find_hanging(text)
    assert set(hanging) == {0, 1, 2}, text
    for rank, (doing, stacks) in hanging.items():
        mine = rank == culprit
        assert doing == (LOADING if mine and fault == "loading" else WORKING)
        assert ("in wait_for_file" in stacks) == mine
        assert ("_engine_run_backward" in stacks) != mine
    assert "does not answer" not in text


@pytest.mark.parametrize("culprit", [1, 0])
def test_stopped_rank(culprit, tmp_path):
    """A rank that does not answer is named, with its host, before the others end."""
    job = (train_and_hang, "SIGSTOP", culprit, tmp_path)
    with Ranks(tmp_path / "log", 3, *job) as ranks:
        text = ranks.end_with_the_first()
    named = re.findall(r"^error: rank (\d) on (\S+) does not", text, re.MULTILINE)
    # Rank 0 names the others, and the others name rank 0.
    assert named == [(str(culprit), HOST)] * (2 if culprit == 0 else 1), text
    assert set(find_hanging(text)) == {0, 1, 2} - {culprit}
    assert text.index("does not answer") < text.index("has not moved")


def stop_in_a_pause(folder: Path) -> None:
    """Rank 0 is stopped while it saves, and the other waits for it."""
    watching = watch.Watch(folder, CPU, options(timeout=TIMEOUT), 0)
    with watching.paused():
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()


def test_stopped_in_a_pause(tmp_path):
    """That is no slow disk: who does not answer is named, and the others end."""
    with Ranks(tmp_path / "log", 2, stop_in_a_pause, tmp_path) as ranks:
        text = ranks.end_with_the_first()
    assert f"error: rank 0 on {HOST} does not answer" in text


def lose_a_rank(folder: Path) -> None:
    """Rank 1 is killed. The other waits for it, as NCCL does, without an error."""
    watching = watch.Watch(folder, CPU, options(timeout=TIMEOUT), 0)
    for _ in watching.batches(range(1)):
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for_file(folder / "never")


def test_killed_rank(tmp_path):
    """Where nothing else ends the ranks that are left, they end, with their stacks."""
    with Ranks(tmp_path / "log", 2, lose_a_rank, tmp_path) as ranks:
        ranks.processes[0].join(60)
        assert ranks.processes[0].exitcode == 1
    assert "in wait_for_file" in ranks.text()


def step_until(folder: Path) -> None:
    """Train until the file `go` exists on all ranks."""
    watching = watch.Watch(folder, CPU, options(timeout=TIMEOUT), 0)
    for number in watching.batches(iter(int, 1)):
        Path(folder / f"rank {dist.get_rank()}").write_text(str(os.getpid()))
        go = torch.tensor(float((folder / "go").exists()))
        dist.all_reduce(go, dist.ReduceOp.MIN)
        if go:
            break
        assert number == 0
    watching.close()


@pytest.mark.parametrize("stopped", [[0], [1], [0, 1]])
def test_short_stop(stopped, tmp_path):
    """A rank, or all, that Slurm suspends for some seconds: nobody notices."""
    with Ranks(tmp_path / "log", 2, step_until, tmp_path) as ranks:
        for rank in range(2):
            wait_for_file(tmp_path / f"rank {rank}")
        for rank in stopped:
            os.kill(ranks.processes[rank].pid, signal.SIGSTOP)
        time.sleep(0.5 * TIMEOUT)  # the fault lasts as long
        for rank in stopped:
            os.kill(ranks.processes[rank].pid, signal.SIGCONT)
        (tmp_path / "go").touch()
        assert ranks.join() == ""


def work_slowly(folder: Path) -> None:
    """Do all that may take longer than the timeout, and is no hang."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    timeout = 2

    def take(timeouts: float, rank: int) -> None:
        if dist.get_rank() == rank:
            time.sleep(timeouts * timeout)
        dist.barrier()

    def wait(*_) -> Mock:
        time.sleep(1.5 * timeout)
        return Mock()

    watch.start_wandb = wait  # for a server that does not answer
    args = options(timeout=timeout, compile=True, wandb="project")
    watching = watch.Watch(folder, CPU, args, 0)
    RecordWriter.write = wait  # for a disk that does not
    watching.log(0, {"loss": 1.0})

    # The first step compiles. The others are slow, together more than the timeout.
    for step in watching.batches(range(4)):
        take(1.5 if step == 0 else 0.4, rank=step % 2)
    # On a GPU, the first step returns early, and a rank may have compiled long before.
    for step in watching.batches(range(2)):
        if (step, dist.get_rank()) == (0, 1):
            time.sleep(1.5 * timeout)
        if step == 1:
            dist.barrier()
    with watching.paused():  # a checkpoint on a slow disk
        take(1.5, rank=0)
    # One rank has more to evaluate than the other, and closes later.
    for _ in watching.batches(range(1 + 3 * dist.get_rank())):
        time.sleep(0.4 * timeout)
    watching.close()


def test_slow_training(tmp_path):
    """Nothing that is slow, and moves or is expected to take long, is a hang."""
    with Ranks(tmp_path / "log", 2, work_slowly, tmp_path) as ranks:
        assert ranks.join() == ""


def train_without_gloo(without: list[int], fault: str, folder: Path) -> None:
    if dist.get_rank() in without:
        os.environ["GLOO_SOCKET_IFNAME"] = "nowhere"
    train_and_hang(fault, 1, folder)


@pytest.mark.parametrize("without", [[0, 1], [1]])
@pytest.mark.parametrize("fault", ["none", "loading"])
def test_no_gloo_group(without, fault, tmp_path):
    """Without the watch's group there is one warning; a hang is still a hang."""
    job = (train_without_gloo, without, fault, tmp_path)
    with Ranks(tmp_path / "log", 2, *job) as ranks:
        text = ranks.join() if fault == "none" else ranks.end_with_the_first()
    (warning,) = re.findall("^warning: .*", text, re.MULTILINE)
    assert "a rank that is stopped will not be named" in warning
    hanging = find_hanging(text)
    assert set(hanging) == ({0, 1} if fault == "loading" else set())
    assert fault == "none" or hanging[1][0] == LOADING


# Metrics


def loss_at(step: int) -> float:
    return 1 / (1 + step)


def track(folder: Path, steps: range) -> None:
    """Log these steps, with a checkpoint after some, and go on from the last one."""
    done = folder / "checkpoint"
    first = int(done.read_text()) if done.exists() else steps.start
    tracker = watch.Tracker(folder, options(), first)
    for step in range(first, steps.stop):
        tracker.log(step, {"train/loss": loss_at(step), "train/step": step})
        if step % 7 == 0:
            time.sleep(
                0.05
            )  # it takes longer, and TensorBoard's thread writes meanwhile
            (folder / "new").write_text(str(step))
            (folder / "new").replace(done)
    tracker.close()


def check_tracked(folder: Path, steps: range) -> None:
    """TensorBoard finds every step once, in order, with its values."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sizes = {"scalars": 0}  # all of them
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance=sizes).Reload()
    for tag, value_at in (("train/loss", loss_at), ("train/step", float)):
        found = events.Scalars(tag)
        assert [event.step for event in found] == list(steps)
        assert [event.value for event in found] == pytest.approx(
            [value_at(step) for step in steps]
        )


def test_killed_and_resumed(tmp_path):
    """A job killed anywhere and resumed earlier has every step once in its metrics."""
    done = tmp_path / "checkpoint"
    for goal in (0, 40, 150, 151, 270):
        with Ranks(tmp_path / f"log {goal}", 1, track, tmp_path, range(10**6)) as ranks:
            while not done.exists() or int(done.read_text()) < goal:
                assert ranks.processes[0].is_alive(), ranks.text()
            os.kill(ranks.processes[0].pid, signal.SIGKILL)
    last = int(done.read_text()) + 20
    with Ranks(tmp_path / "log", 1, track, tmp_path, range(last)) as ranks:
        ranks.join()
    check_tracked(tmp_path, range(last))


def train_without_space(what: str, folder: Path) -> None:
    watching = watch.Watch(folder, CPU, options(), 0)
    if what == "folder":
        (folder / "tensorboard").rename(folder / "elsewhere")
    else:
        # As if the disk were full.
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    for step in range(1000):
        watching.log(step, {"loss": 1.0})
        time.sleep(0.002)  # what TensorBoard's thread met, the next step is told
    watching.close()
    print("trained")


@pytest.mark.parametrize("what", ["folder", "space"])
def test_nowhere_to_write(what, tmp_path):
    """Without a place for its metrics a training goes on, after one warning."""
    with Ranks(tmp_path / "log", 1, train_without_space, what, tmp_path) as ranks:
        text = ranks.join()
    # TensorBoard's thread ends with a traceback, which may begin on the same line.
    (warning,) = re.findall("warning: .*", text)
    assert warning.startswith("warning: no more metrics go to TensorBoard: "), text
    assert "trained\n" in text


def track_on_two_ranks(folder: Path) -> None:
    tracker = watch.Tracker(folder / str(dist.get_rank()), options(), 0)
    tracker.log(0, {"loss": 1.0})
    tracker.close()


def test_other_ranks_write_nothing(tmp_path):
    with Ranks(tmp_path / "log", 2, track_on_two_ranks, tmp_path) as ranks:
        assert ranks.join() == ""
    assert sorted(os.listdir(tmp_path)) == ["0", "log"]


# W&B


class Alone:
    """This process is the only rank."""

    def __enter__(self):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def __exit__(self, *error):
        dist.destroy_process_group()


def track_with_wandb(folder: str, first: int, last: int) -> None:
    """Log these steps, one when the one before has been read from the test's pipe."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    for number in (signal.SIGUSR1, signal.SIGTERM):  # as main.py: noted, no more
        signal.signal(number, lambda *_: None)
    with Alone():
        args = options(wandb="project", timeout=6, checkpoint_dir=Path(folder))
        watching = watch.Watch(Path(folder), CPU, args, first)
        for step in watching.batches(range(first, last)):
            watching.log(step, {"train/loss": loss_at(step), "train/step": step})
            print("logged", step, flush=True)
            sys.stdin.readline()
        watching.close()
    print("trained", flush=True)


class WandbProcess:
    """A run of `track_with_wandb`."""

    def __init__(self, folder: Path, first: int, last: int, **env: str):
        call = f"test_watch.track_with_wandb({str(folder)!r}, {first}, {last})"
        env["PYTHONPATH"] = str(REPOSITORY / "tests")
        self.errors = open(folder.with_suffix(f".{first}.log"), "w+")
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"import test_watch; {call}"],
            env=os.environ | env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )

    def step(self) -> str:
        """Return what it says, and let it go on to the next step."""
        said = self.process.stdout.readline()
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return said.strip()

    def signal_all(self, number: int) -> None:
        """Signal every process, as Slurm does with proctrack/linuxproc."""
        found = [self.process.pid]
        for pid in found:  # it grows
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                found += map(int, children.read_text().split())
        names = [Path(f"/proc/{pid}/comm").read_text() for pid in found]
        assert "wandb-core\n" in names, names
        for pid in found:
            os.kill(pid, number)

    def end(self) -> str:
        """Wait for its end, and return what it has warned of."""
        assert self.process.wait(30) == 0
        self.errors.seek(0)
        return "\n".join(re.findall("^warning: .*", self.errors.read(), re.MULTILINE))


def read_wandb(file: Path) -> tuple[dict, dict]:
    """Return the run and its losses by step, as W&B's own reader prints them."""
    command = [
        Path(sys.executable).with_name("wandb"),
        "leet",
        "inspect",
        "--json",
        file,
    ]
    text = subprocess.check_output(command, text=True)
    records = [json.loads(line) for line in text.splitlines()]
    (run,) = [record["run"] for record in records if record["type"] == "run"]
    items = [r["history"]["item"] for r in records if r["type"] == "history"]
    assert [item["train/step"] for item in items] == [i["_step"] for i in items]
    return run, {item["_step"]: item["train/loss"] for item in items}


def test_wandb(tmp_path):
    """W&B in offline mode: the same run after a requeue.

    Its process survives USR1. TERM ends it, and with it neither the training nor
    TensorBoard; what was logged a second before is there.
    """
    folder = tmp_path / "run7"
    first = WandbProcess(folder, 0, 60, WANDB_MODE="offline")
    assert [first.step() for _ in range(10)] == [f"logged {n}" for n in range(10)]
    first.signal_all(signal.SIGUSR1)
    assert [first.step() for _ in range(10)] == [f"logged {n + 10}" for n in range(10)]
    time.sleep(1.5)  # for which it promises to have written
    first.signal_all(signal.SIGTERM)
    assert [first.step() for _ in range(41)][-1] == "trained"
    assert first.end().startswith("warning: no more metrics go to W&B: ")

    second = WandbProcess(folder, 15, 30, WANDB_MODE="offline")
    assert [second.step() for _ in range(16)][-1] == "trained"
    assert second.end() == ""

    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    read = [read_wandb(file) for file in files]
    runs, losses = zip(*read, strict=True)
    assert {(run["run_id"], run["project"]) for run in runs} == {("run7", "project")}
    assert list(losses[0])[:20] == list(range(20))
    assert losses[1] == pytest.approx({n: loss_at(n) for n in range(15, 30)})
    # The first start went on to step 59, and the second one took it back to 30.
    check_tracked(folder, range(30))


def test_wandb_without_internet(tmp_path):
    """It waits for its server, which is no hang, and a training goes on without it."""
    process = WandbProcess(
        tmp_path / "run8",
        0,
        2,
        WANDB_BASE_URL="http://127.0.0.1:9",
        no_proxy="*",
        WANDB_API_KEY=40 * "0",
        WANDB_INIT_TIMEOUT="10",
    )
    assert [process.step() for _ in range(3)] == ["logged 0", "logged 1", "trained"]
    warning = (
        "warning: no more metrics go to W&B (no internet? export WANDB_MODE=offline)"
    )
    assert process.end().startswith(f"{warning}: ")
    check_tracked(tmp_path / "run8", range(2))


# Where a step's time goes


class Pictures(Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.05)
        return torch.randn(3, 48, 48), index % 10


def profile(folder: Path, batches: int) -> None:
    from torchvision.models import resnet18

    model = DistributedDataParallel(resnet18(num_classes=10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    watching = watch.Watch(folder, CPU, options(profile=True), 0)
    loader = DataLoader(Pictures(), batch_size=2)
    for number, (images, labels) in enumerate(watching.batches(loader)):
        if number == batches:
            break
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    watching.close()


def test_profile(tmp_path):
    """A trace a rank of five steps, and one table of where rank 0's time goes."""
    with Ranks(tmp_path / "log", 2, profile, tmp_path, 12) as ranks:
        text = ranks.join()
    rows = re.findall(r"^ *(\S.*?)  .* (\d+) *$", text, re.MULTILINE)
    calls = {name: int(count) for name, count in rows}
    assert len(rows) == len(calls) == 20  # and no second table
    assert calls["ProfilerStep*"] == calls["DistributedDataParallel.forward"] == 5
    assert any(name.startswith("enumerate(DataLoader)") for name in calls)
    for rank in range(2):
        (file,) = tmp_path.glob(f"profile/rank{rank}.*.json.gz")
        trace = json.loads(gzip.decompress(file.read_bytes()))
        names = [event.get("name", "") for event in trace["traceEvents"]]
        assert names.count("DistributedDataParallel.forward") == 5
        assert "gloo:all_reduce" in names


def test_too_few_steps_to_profile(tmp_path):
    with Ranks(tmp_path / "log", 2, profile, tmp_path, 3) as ranks:
        assert "ProfilerStep" not in ranks.join()


# The device


def test_usage(tmp_path):
    """Only the waits for the last loop's batches count."""
    with Alone():
        watching = watch.Watch(tmp_path, CPU, options(), 0)

        def load(seconds: float):
            for number in range(5):
                time.sleep(seconds)
                yield number

        for _ in watching.batches(load(0.2)):
            pass
        for _ in watching.batches(load(0.05)):
            time.sleep(0.05)
        usage = watching.usage.shares()
        watching.close()
    # Other jobs of this machine make either sleep longer.
    assert 0.3 < usage["usage/waiting for data"] < 0.7
    assert list(usage) == ["usage/waiting for data"]  # there is no GPU


def test_describe_usage():
    usage = {"usage/waiting for data": 0.034, "usage/GPUs busy": 0.971}
    assert watch.describe_usage(usage) == ", 3% waiting for data, 97% GPUs busy"
