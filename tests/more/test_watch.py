"""What imagenet/watch.py says about hangs, metrics and the wait for data.

Ranks are processes of their own, in a real process group (gloo) on this machine's CPU,
that really sleep, are stopped and are killed. TensorBoard and W&B read what is written.
"""

import argparse
import ctypes
import importlib
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
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_checkpoint import Started, run_rank, run_ranks
from test_imagenet_training import Training
from torch import nn
from torch.nn.parallel import DistributedDataParallel

HOST = socket.gethostname()

pytestmark = pytest.mark.timeout(400)

watch = importlib.import_module("watch")


# Processes


def start_ranks(folder: Path, world_size: int, work, *args) -> Started:
    """Start ranks that run `work(folder, *args)` in a process group."""
    log = folder / "log"
    job = (log, world_size, tempfile.mkdtemp(dir=folder), work, (folder, *args))
    return Started(log, run_logged, [(rank, *job) for rank in range(world_size)])


def end_with_the_first(*ranks) -> str:
    """Start ranks; kill the last one, which may never end, and return the log."""
    with start_ranks(*ranks) as started:
        left = {process.sentinel for process in started.processes}
        while len(left) > 1:  # each of the others writes what it knows
            ended = multiprocessing.connection.wait(left, timeout=200)
            assert ended, started.text()
            left -= set(ended)
        statuses = {process.exitcode for process in started.processes} - {None}
    assert statuses == {1}, started.text()
    return started.text()


def run_logged(rank: int, log: Path, *job) -> None:
    for descriptor in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), descriptor)
    level = logging.INFO if rank == 0 else logging.ERROR
    # As in main.py. TensorBoard's thread, when it fails, writes to stderr meanwhile.
    logging.basicConfig(
        format="%(message)s", level=level, stream=sys.stdout, force=True
    )
    run_rank(rank, *job)


def start_watch(
    folder: Path, timeout=600, steps_done=0, compile=False, model=None
) -> watch.Watch:
    """Return a watch, with the options of main.py that it reads."""
    args = argparse.Namespace(
        timeout=timeout, compile=compile, profile=False, wandb=None
    )
    scheduler = argparse.Namespace(last_epoch=steps_done)
    run = argparse.Namespace(id="1a2b", scheduler=scheduler, folder=folder)
    watching = watch.Watch(args)
    watching.begin(run, model or DistributedDataParallel(nn.Linear(4, 4)), 6)
    return watching


# Hangs


def sleep_for_ever(*_) -> None:
    while True:
        time.sleep(1)


def train_and_hang(folder: Path, fault: str, culprit: int) -> None:
    """Train; at one step the culprit does what `fault` says."""
    mine = culprit == dist.get_rank()

    def load():
        for step in range(6):
            if step == 3 and mine and fault == "loading":
                sleep_for_ever()
            yield torch.ones(2, 4)

    watching = start_watch(folder, timeout=10)
    model = nn.Linear(4, 4)
    ddp_model = DistributedDataParallel(model)
    for step, samples in enumerate(watching.batches(load())):
        if step == 3 and mine and fault == "forward":
            model.register_forward_pre_hook(sleep_for_ever)
        if step == 3 and mine and fault == "lock":
            ctypes.PyDLL(None).sleep(60)  # which does not let go of Python's lock
        if step == 3 and mine and fault == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        ddp_model(samples).sum().backward()
    watching.close()


LOADING = "waits for its next batch"
WORKING = "works on a batch, or waits there for other ranks"


def find_hanging(text: str) -> dict[int, list[str]]:
    """Return what ranks say that they do, their stacks, and who says the same."""
    said = re.findall(
        rf"^error: rank (\d) on {HOST} has not moved for 7 s: it (.*)"
        r"((?:\n(?:(?:Current thr|Thr)ead .*|  File .*|))*)"
        r"(\d other ranks, too: .*)?",
        text,
        re.MULTILINE,
    )
    assert len(said) == len({rank for rank, *_ in said}), text
    return {int(rank): told for rank, *told in said}


def test_sleeping_rank(tmp_path):
    """Rank 0 shows the stacks of all, equal ones once. One of them sleeps."""
    text = end_with_the_first(tmp_path, 5, train_and_hang, "forward", 2)
    # Rank 0 has threads of its own, such as TensorBoard's.
    first, others, culprit = find_hanging(text).values()
    assert list(find_hanging(text)) == [0, 1, 2], text
    for doing, stacks, _ in (first, others, culprit):
        assert doing == WORKING and "in train_and_hang" in stacks, text
        assert ("in sleep_for_ever" in stacks) == (stacks == culprit[1])
        assert ("_engine_run_backward" in stacks) == (stacks != culprit[1])
    assert [first[2], others[2], culprit[2]] == ["", "2 other ranks, too: [3, 4]", ""]


@pytest.mark.parametrize("fault, culprit", [("stopped", 0), ("lock", 2)])
def test_rank_without_stacks(fault, culprit, tmp_path):
    """A rank that cannot show its stacks is named, with its host.

    It is stopped, or in C code that keeps Python's lock. Each other rank says that it
    waits, and two of them show where.
    """
    text = end_with_the_first(tmp_path, 4, train_and_hang, fault, culprit)
    named = re.findall(r"^error: rank (\d) on (\S+) does not", text, re.MULTILINE)
    # Rank 0 names the others, and the others name rank 0.
    assert named == [(str(culprit), HOST)] * (3 if culprit == 0 else 1), text
    said = find_hanging(text)
    assert set(said) == {0, 1, 2, 3} - {culprit}, text
    with_stacks = {rank for rank in said if "in train_and_hang" in said[rank][1]}
    assert with_stacks == {0, 1} - {culprit}, text


def count_connections(folder: Path) -> int:
    """Return how many connections of this rank the watch has made."""
    files = Path("/proc/self/fd")

    def sockets() -> int:
        return sum("/socket:" in os.path.realpath(file) for file in files.iterdir())

    model = DistributedDataParallel(nn.Linear(4, 4))
    before = sockets()
    watching = start_watch(folder, model=model)
    made = sockets() - before
    dist.barrier()
    watching.close()
    return made


def test_connections(tmp_path):
    """Ranks connect to rank 0 alone: each to each would take many ranks minutes."""
    first, *others = run_ranks(6, count_connections, tmp_path)
    assert 5 <= first < 12 and all(made < 5 for made in others), (first, others)


def step_slowly(folder: Path) -> None:
    watching = start_watch(folder, timeout=4)
    for step in watching.batches(range(30)):
        (folder / f"{step}").touch()
        time.sleep(0.2)
        dist.barrier()
    watching.close()


def test_suspended(tmp_path):
    """A time in which Slurm had stopped all ranks is no hang, however long it was."""
    with start_ranks(tmp_path, 2, step_slowly) as ranks:
        while not (tmp_path / "3").exists():
            assert ranks.processes[0].is_alive(), ranks.text()
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for process in ranks.processes:
                os.kill(process.pid, number)
            if number == signal.SIGSTOP:
                time.sleep(6)  # the length of the suspension
        assert (ranks.join(), ranks.text()) == ([0, 0], "")


def work_slowly(folder: Path) -> None:
    """Do all that may take longer than the timeout, and is no hang."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    timeout = 4

    def take(timeouts: float, rank: int) -> None:
        if dist.get_rank() == rank:
            time.sleep(timeouts * timeout)
        dist.barrier()

    watching = start_watch(folder, timeout, compile=True)
    RecordWriter.write = lambda *_: time.sleep(1.5 * timeout)  # a slow disk
    watching.tracker.log(0, {"loss": 1.0})

    # The first step compiles. The others are slow, together more than the timeout.
    for step in watching.batches(range(4)):
        take(1.5 if step == 0 else 0.4, rank=step % 2)
    # On a GPU, the first step returns early, and a rank may have compiled long before.
    for step in watching.batches(range(2)):
        if (step, dist.get_rank()) == (0, 1):
            time.sleep(1.5 * timeout)
        if step == 1:
            dist.barrier()
    with watching.hangs.paused():  # a checkpoint on a slow disk
        take(1.5, rank=0)
    # One rank has more to evaluate than the other, and closes later.
    for _ in watching.batches(range(1 + 3 * dist.get_rank())):
        time.sleep(0.4 * timeout)
    watching.close()


def test_slow_training(tmp_path):
    """Nothing that is slow, and moves or is expected to take long, is a hang."""
    with start_ranks(tmp_path, 2, work_slowly) as ranks:
        assert (ranks.join(), ranks.text()) == ([0, 0], "")


def train_without_gloo(folder: Path) -> None:
    if dist.get_rank() == 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "nowhere"
    train_and_hang(folder, "loading", 1)


def test_no_gloo_group(tmp_path):
    """Without the watch's group there is one warning; a hang is still a hang.

    The rank that waits for its data says so.
    """
    text = end_with_the_first(tmp_path, 2, train_without_gloo)
    (warning,) = re.findall("^warning: .*", text, re.MULTILINE)
    assert "a rank that is stopped will not be named" in warning
    hanging = {rank: doing for rank, (doing, *_) in find_hanging(text).items()}
    assert hanging == {0: WORKING, 1: LOADING}, text


def test_stopped_before_the_first_step(tmp_path):
    """Once the ranks have met, a warning is not lost: one step, which is saved."""
    arguments = [*WANDB.split()[1:], "--model=resnet50"]
    with Training(tmp_path, 2, *arguments) as training:
        training.wait_for(lambda: "\nWorld size 2" in training.text())
        for process in training.processes:
            os.kill(process.pid, signal.SIGUSR1)
        assert training.join() == [75, 75], training.text()
    assert "\nAsked to stop: saved step 1 of epoch 1, " in training.text()


# Who is slow


def train_slowly(folder: Path, fault: str) -> None:
    """Train; rank 2 is slow."""
    pause = 0.1 if dist.get_rank() == 2 else 0.0

    def load():
        for _ in range(20):
            time.sleep(pause if fault == "data" else 0)
            yield torch.ones(2, 4)

    model = DistributedDataParallel(nn.Linear(4, 4))
    if fault == "forward":
        model.module.register_forward_pre_hook(lambda *_: time.sleep(pause))
    watching = start_watch(folder, model=model)
    for samples in watching.batches(load()):
        model(samples).sum().backward()
    watching.speed(1)
    watching.close()


@pytest.mark.parametrize(
    "fault, said",
    [
        (
            "data",
            r"waits for data (\d\d|100)% of the time \(median \d%\)",
        ),
        ("forward", r"is slow: its forward\(\) takes [\d.]+ times the median"),
    ],
)
def test_slow_rank(fault, said, tmp_path):
    """All ranks wait for it, and only one is named."""
    with start_ranks(tmp_path, 4, train_slowly, fault) as ranks:
        assert ranks.join() == [0, 0, 0, 0], ranks.text()
    warnings = re.findall("^warning: .*", ranks.text(), re.MULTILINE)
    named = [line for line in warnings if re.search(said, line)]
    assert len(named) == 1, ranks.text()
    assert named[0].startswith(f"warning: rank 2 on {HOST} "), named


# Metrics


def track(folder: Path, steps: int) -> None:
    """Log these steps, with a checkpoint after some, and go on from the last one."""
    done = folder / "checkpoint"
    first = int(done.read_text()) if done.exists() else 0
    watching = start_watch(folder, steps_done=first)
    for step in range(first + 1, steps + 1):
        watching.tracker.log(step, {"train/loss": 1 / step})
        if step % 7 == 0 and dist.get_rank() == 0:
            # It takes longer, and TensorBoard's thread writes meanwhile.
            time.sleep(0.05)
            (folder / "new").write_text(str(step))
            (folder / "new").replace(done)
    watching.close()


def read_tensorboard(folder: Path) -> dict[int, float]:
    """Return the losses by step as TensorBoard finds them: in order, each once."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sizes = {"scalars": 0}  # all of them
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance=sizes).Reload()
    found = events.Scalars("train/loss")
    losses = {event.step: event.value for event in found}
    assert [event.step for event in found] == sorted(losses)
    return losses


def test_killed_and_resumed(tmp_path):
    """A job killed anywhere and resumed earlier has every step once in its metrics."""
    done = tmp_path / "checkpoint"
    for goal in (0, 40, 41, 150):
        with start_ranks(tmp_path, 1, track, 10**6) as ranks:
            while not done.exists() or int(done.read_text()) < goal:
                assert ranks.processes[0].is_alive(), ranks.text()
    last = int(done.read_text()) + 20
    with start_ranks(tmp_path, 2, track, last) as ranks:
        assert (ranks.join(), ranks.text()) == ([0, 0], "")
    right = {step: 1 / step for step in range(1, last + 1)}
    assert read_tensorboard(tmp_path) == pytest.approx(right)


def train_without_space(folder: Path) -> None:
    watching = start_watch(folder)
    # As if the disk were full.
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    for step in range(1000):
        watching.tracker.log(step, {"loss": 1.0})
        time.sleep(0.002)  # what TensorBoard's thread met, the next step is told
    watching.close()
    print("trained")


def test_nowhere_to_write(tmp_path):
    """Without a place for its metrics a training goes on, after one warning."""
    with start_ranks(tmp_path, 1, train_without_space) as ranks:
        assert ranks.join() == [0], ranks.text()
        text = ranks.text()
    # TensorBoard's thread ends with a traceback, which may begin on the same line.
    (warning,) = re.findall("warning: .*", text)
    assert warning.startswith("warning: no more metrics go to tensorboard: "), text
    assert "trained\n" in text


# W&B


WANDB = """--wandb=project --save-steps=1 --keep=9999 --synthetic --model=dummy
    --image-size=32 --batch-size=4 --workers=0 --limit-train-samples=9999
    --limit-valid-samples=8"""


class WandbTraining(Training):
    """main.py with --wandb, of which every step has a checkpoint, and its log."""

    def __init__(self, folder: Path, *arguments: str, **env: str):
        super().__init__(folder, 1, *WANDB.split(), *arguments, **env)

    def step(self) -> int:
        return len(list(self.checkpoints.glob("epoch-*.pt")))

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: self.step() >= step)

    def send(self, number: signal.Signals) -> None:
        os.kill(self.processes[0].pid, number)

    def signal_wandb(self, number: signal.Signals) -> None:
        """Signal W&B's process, as Slurm does with all of a job's processes."""
        command = ["pkill", f"-{number}", "--parent", str(self.processes[0].pid)]
        subprocess.run([*command, "wandb-core"], check=True)

    def end(self, status: int) -> list[str]:
        """Wait for its end, and return what it has warned of W&B."""
        assert self.join() == [status], self.text()
        return re.findall("^warning: .*wandb.*", self.text(), re.MULTILINE)


def read_wandb(file: Path) -> tuple[str, dict[int, float]]:
    """Return the run and its losses by step, as W&B's own reader prints them."""
    wandb = Path(sys.executable).with_name("wandb")
    text = subprocess.check_output([wandb, "leet", "inspect", "--json", file])
    records = [json.loads(line) for line in text.splitlines()]
    (run,) = [record["run"] for record in records if record["type"] == "run"]
    items = [r["history"]["item"] for r in records if r["type"] == "history"]
    losses = {i["_step"]: i["train/loss"] for i in items if "train/loss" in i}
    return f"{run['project']}/{run['run_id']}", losses


def test_wandb(tmp_path):
    """W&B in offline mode: the same run after a requeue.

    Its process survives USR1. TERM ends it, and with it neither the training nor
    TensorBoard; what was logged a second before is there.
    """
    with WandbTraining(tmp_path, WANDB_MODE="offline") as first:
        first.wait_for_step(20)
        first.signal_wandb(signal.SIGUSR1)
        first.send(signal.SIGUSR1)
        assert first.end(75) == []
    requeued_at = first.step()
    with WandbTraining(tmp_path, WANDB_MODE="offline") as second:
        second.wait_for_step(requeued_at + 20)
        promised = second.step()
        time.sleep(1.5)  # for which it promises to have written
        second.signal_wandb(signal.SIGTERM)
        second.wait_for_step(second.step() + 50)
        second.send(signal.SIGUSR1)
        assert len(second.end(75)) == 1

    folder = second.checkpoints
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    (name, losses), (again, more) = map(read_wandb, files)
    # Not by the name of its folder: another run may have one of that name.
    saved = torch.load(second.newest(), weights_only=True)["resume"]
    run = watch.resume.unpack(saved["_own"][0]["id"])
    assert name == again == f"project/{run}" and len(run) == 32
    assert list(losses) == list(range(1, requeued_at + 1))
    assert set(range(requeued_at + 1, promised)) <= set(more)
    right = read_tensorboard(folder)
    assert list(right) == list(range(1, second.step() + 1))
    losses |= more
    assert losses == pytest.approx({step: right[step] for step in losses})


def test_wandb_without_internet(tmp_path):
    """It waits for its server, which is no hang, and a training goes on without it."""
    env = {"WANDB_BASE_URL": "http://127.0.0.1:9", "no_proxy": "*"}
    env |= {"WANDB_API_KEY": 40 * "0", "WANDB_INIT_TIMEOUT": "10"}
    arguments = ["--timeout=6", "--epochs=1", "--limit-train-samples=8"]
    with WandbTraining(tmp_path, *arguments, **env) as training:
        (warning,) = training.end(0)
    hint = "(no internet? export WANDB_MODE=offline)"
    assert warning.startswith(f"warning: no more metrics go to wandb {hint}: ")
    assert 2 in read_tensorboard(training.checkpoints)


# Where a step's time goes


def measure_usage(folder: Path) -> tuple[dict[str, float], str]:
    def load(seconds: float):
        for number in range(5):
            time.sleep(seconds)
            yield number

    watching = start_watch(folder)
    for load_for, work_for in ((0.2, 0), (0.4, 0.4)):
        for _ in watching.batches(load(load_for)):
            time.sleep(work_for)
    speed = watching.speed(1)
    watching.close()
    return speed


def test_usage(tmp_path):
    """Only the waits for the last loop's batches count."""
    ((speed, words),) = run_ranks(1, measure_usage, tmp_path)
    # Other jobs of this machine make either sleep longer. There is no GPU.
    assert speed.keys() == {"images/s", "usage/waiting for data"}
    assert speed["usage/waiting for data"] == pytest.approx(0.5, abs=0.2)
    share = speed["usage/waiting for data"]
    assert words == f"{speed['images/s']:.0f} images/s, {share:.0%} waiting for data"
