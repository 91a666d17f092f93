"""What imagenet/main.py and data.py train on and compute, stopped and started again.

The shipped main.py runs as it is, with flags and environment only: every rank is a
process of its own, in a real process group (gloo) on this machine's CPU, without Slurm.
Where a number finer than the printed ones is needed, its functions are called.
"""

import argparse
import atexit
import collections
import contextlib
import fcntl
import gzip
import hashlib
import importlib
import io
import itertools
import json
import math
import multiprocessing
import os
import re
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from drawn_imagenet import draw_imagenet
from slurm_jobs import ARGUMENTS_LINE
from test_checkpoint import (
    REPOSITORY,
    checkpoint,
    forkserver,
    mounted,
    names,
    run_ranks,
    same,
)
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader
from tqdm import tqdm

pytestmark = pytest.mark.timeout(150)

main = importlib.import_module("main")
data = importlib.import_module("data")

SAVED = checkpoint.REQUEUE
# Of 23 pictures to validate, neither 2 nor 3 ranks have the same number each.
TINY = [
    "--synthetic",
    "--image-size=32",
    "--limit-train-samples=67",
    "--limit-valid-samples=23",
    "--batch-size=4",
]
EPOCH_LINE = re.compile(
    r"^Epoch (\d+): (train loss \d+\.\d{3} accuracy \d+\.\d\d%, "
    r"valid loss \d+\.\d{3} accuracy \d+\.\d\d%), "
    r"\d+ images/s, \d+% waiting for data$",
    re.MULTILINE,
)
WEIGHTS_LINE = re.compile(
    r"^Weights SHA-256 ([0-9a-f]{64}), commit ([0-9a-f]{40}(?:-dirty)?)$", re.MULTILINE
)


# Runs of main.py


class Training:
    """main.py on some ranks, and all that they print. Its node's disk is a folder."""

    def __init__(self, folder: Path, world_size: int, *arguments: str):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        number = len(list(folder.glob("*.log")))
        self.log, self.disk = folder / f"{number}.log", folder / f"disk{number}"
        self.log.touch()
        job = (world_size, port, folder, self.log, self.disk, arguments)
        self.processes = [
            forkserver().Process(target=run_main, args=(r, *job))
            for r in range(world_size)
        ]
        for process in self.processes:
            process.start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.processes:
            for child in children(process.pid):
                kill(child, signal.SIGKILL)
            process.kill()
            process.join()

    def text(self) -> str:
        return self.log.read_text()

    def wait_for(self, happened, timeout: float = 60) -> None:
        """Wait until `happened()`."""
        deadline = time.monotonic() + timeout
        while not happened():
            alive = any(process.is_alive() for process in self.processes)
            assert alive and time.monotonic() < deadline, self.text()
            time.sleep(0.002)

    def wait_for_file(self, name: str) -> None:
        """Wait for a file of that name among the checkpoints or in the run's folder."""
        self.wait_for(
            lambda: list(self.checkpoints.glob(name)) or (self.folder / name).exists()
        )

    def wait_for_signals(self) -> None:
        """Wait until the ranks take signals, as job.sh does."""
        self.wait_for(lambda: (self.disk / "none.training").exists())

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints" / "none"

    def signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            os.kill(process.pid, number)

    def join(self, timeout: float = 60) -> list[int]:
        """Return the exit status of every rank."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.1, deadline - time.monotonic()))
        return [process.exitcode for process in self.processes]


def run_main(
    rank: int,
    world_size: int,
    port: int,
    folder: Path,
    log: Path,
    disk: Path,
    arguments,
) -> None:
    """Do what `python main.py` does, in a process that has imported most of it."""
    torch.set_num_threads(1)
    # As in a process that no forkserver has made.
    multiprocessing.set_start_method("fork", force=True)
    for descriptor, path in ((0, os.devnull), (1, log), (2, log)):
        os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), descriptor)
    for name in list(os.environ):
        if name.startswith(
            ("SLURM_", "MASTER_", "TORCHELASTIC_", "SCRATCH", "WORK_DIR", "GIT_COMMIT")
        ):
            del os.environ[name]
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
    }
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    os.environ |= {
        "SLURM_TMPDIR": str(disk),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONUNBUFFERED": "1",
    }
    os.chdir(folder)
    sys.argv = ["main.py", *arguments]
    status = 0
    try:
        runpy.run_path(str(REPOSITORY / "imagenet" / "main.py"), run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()  # which a process of multiprocessing does not
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in list(Path(f"/proc/{pid}/task").iterdir()):
            with contextlib.suppress(OSError):  # this thread has ended since
                found += map(int, (task / "children").read_text().split())
    return found


def kill(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def alive(pid: int) -> bool:
    """Return whether a process is there, and does not only wait for its parent."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[
            0
        ] not in ("Z", "X")
    return False


def train(folder: Path, world_size: int, *arguments: str, status: int = 0) -> str:
    """Run main.py to its end, and return what it has printed."""
    with Training(folder, world_size, *arguments) as training:
        assert training.join() == [status] * world_size, training.text()
        return training.text()


def weights(text: str) -> str:
    """Return the SHA-256 that a run ends with."""
    (found,) = WEIGHTS_LINE.findall(text)
    assert text.endswith(f"Weights SHA-256 {found[0]}, commit {found[1]}\n"), text
    return found[0]


def saved(training: Training) -> list[str]:
    """Return the names of a run's checkpoints, in their order."""
    return [name for name in names(training.checkpoints) if name.startswith("epoch-")]


def errors(text: str) -> list[str]:
    return [
        line
        for line in text.splitlines()
        if "error" in line.lower() or "Traceback" in line
        if not ARGUMENTS_LINE.match(line)
    ]


# Two runs on one folder


@pytest.fixture(scope="module", autouse=True)
def second_run(tmp_path_factory):
    """A run on another one's folder: it waits a minute while other tests go on."""
    folder = tmp_path_factory.mktemp("shared")
    receiver, sender = forkserver().Pipe(duplex=False)
    process = forkserver().Process(
        target=send, args=(sender, start_on_a_used_folder, folder)
    )
    process.start()
    yield folder, receiver
    process.kill()
    process.join()


def start_on_a_used_folder(folder: Path) -> str:
    with alone(), open(folder / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            checkpoint.Checkpoints(folder, 3).load({})
        except checkpoint.RunError as error:
            return str(error)
    return "used all the same"


# Stopped and started again

# A model with BatchNorm and dropout.
MOBILE = [
    *TINY,
    "--model=mobilenet_v3_small",
    "--epochs=3",
    "--save-steps=3",
]
# On 3 ranks: of 2 numbers, the sum does not depend
# on their order, which settle_buckets keeps.
ACCUMULATING = [
    *MOBILE,
    "--accumulate=2",
    "--batch-size=2",
    "--limit-train-samples=100",
]
KINDS = {"plain": (2, MOBILE), "accumulating": (3, ACCUMULATING)}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[str, str]:
    """What runs say that nothing has happened to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return {
        kind: train(folder / kind, world_size, *arguments, "--workers=1")
        for kind, (world_size, arguments) in KINDS.items()
    }


def test_a_whole_run(undisturbed):
    """It says on how many samples it trains, a line an epoch, and last its weights."""
    shares = {
        "plain": (64, "2 x 4 samples each, of 67"),
        "accumulating": (96, "3 x 4 samples each, of 100"),
    }
    for kind, text in undisturbed.items():
        (samples, share), lines = shares[kind], text.splitlines()
        assert ARGUMENTS_LINE.match(lines[0])
        assert lines[1] == "warning: no GPU found, training on the CPU"
        # 8 whole steps; some samples are left over.
        steps = f"World size {share[0]}: 8 steps an epoch, {share}; 23 to validate"
        assert lines[2] == f"{steps}; computing in float32"
        assert [epoch for epoch, _ in EPOCH_LINE.findall(text)] == ["1", "2", "3"]
        weights(text)
        assert len(lines) == 7, text
        for numbers in re.findall(
            r"train .* accuracy (.*)%, valid .* accuracy ([\d.]+)%", text
        ):
            assert numbers[0] in {
                f"{100 * n / samples:.2f}" for n in range(samples + 1)
            }
            assert numbers[1] in {f"{100 * n / 23:.2f}" for n in range(24)}


@pytest.mark.parametrize(
    "kind, number, workers, first_stop",
    [
        ("plain", signal.SIGUSR1, 0, "epoch-001-step-000003.pt"),
        ("plain", signal.SIGTERM, 2, "epoch-001-step-000006.pt"),
        ("accumulating", signal.SIGUSR1, 2, "epoch-001-step-000003.pt"),
    ],
)
def test_stopped_in_an_epoch(kind, number, workers, first_stop, undisturbed, tmp_path):
    """A run stopped twice, by either signal, ends as one that never was."""
    world_size, arguments = KINDS[kind]
    arguments = [*arguments, f"--workers={workers}"]
    stops = []
    for file in (first_stop, "epoch-002-step-000003.pt"):
        with Training(tmp_path, world_size, *arguments) as training:
            training.wait_for_file(file)
            training.signal(number)
            training.signal(number)  # from srun and from uv
            assert training.join() == [SAVED] * world_size, training.text()
            text = training.text()
        ((step, epoch),) = re.findall(
            r"^Asked to stop: saved step (\d) of epoch (\d), to go on from there$",
            text,
            re.MULTILINE,
        )
        assert "error" not in text.lower() and "Traceback" not in text, text
        stops.append((int(epoch), int(step)))
        assert f"epoch-{int(epoch):03}-step-{int(step):06}.pt" == saved(training)[-1]
    assert (1, 0) < stops[0] < stops[1]
    text = train(tmp_path, world_size, *arguments)
    name = f"epoch-{stops[1][0]:03}-step-{stops[1][1]:06}.pt"
    assert f"Resuming from {training.checkpoints}/{name}" in text
    assert weights(text) == weights(undisturbed[kind])
    assert EPOCH_LINE.findall(text)[-1] == EPOCH_LINE.findall(undisturbed[kind])[-1]
    # Nothing is lost, and nothing trained on twice:
    # the first epoch's line is the same, too.
    logs = "".join(path.read_text() for path in sorted(tmp_path.glob("*.log")))
    assert set(EPOCH_LINE.findall(logs)) == set(EPOCH_LINE.findall(undisturbed[kind]))


def test_signals_to_workers_and_a_finished_run(undisturbed, tmp_path):
    """Signals to the processes that load data change nothing.

    A finished run tells its end again.
    """
    with Training(tmp_path, 2, *MOBILE, "--workers=2") as training:
        training.wait_for_file("epoch-001-step-000003.pt")
        workers = [
            child for process in training.processes for child in children(process.pid)
        ]
        assert len(workers) >= 4
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            for worker in workers:
                kill(worker, number)
        assert training.join() == [0, 0], training.text()
        text = training.text()
    assert weights(text) == weights(undisturbed["plain"])
    assert EPOCH_LINE.findall(text) == EPOCH_LINE.findall(undisturbed["plain"])
    before = names(training.checkpoints)
    again = train(tmp_path, 2, *MOBILE, "--workers=2")
    assert weights(again) == weights(text)
    assert EPOCH_LINE.findall(again) == EPOCH_LINE.findall(text)[-1:]
    assert names(training.checkpoints) == before


def test_other_numbers_of_ranks(tmp_path):
    """2 ranks, then 3, then 1: the same steps of 8 samples, nearly the same weights."""
    # A model without BatchNorm and dropout, whose steps
    # do not depend on how a batch is shared.
    arguments = [*TINY, "--model=dummy", "--epochs=3", "--save-steps=2", "--workers=1"]
    alone = train(tmp_path / "alone", 2, *arguments)
    folder = tmp_path / "elastic"
    for world_size, file in (
        (2, "epoch-001-step-000002.pt"),
        (3, "epoch-002-step-000002.pt"),
    ):
        with Training(folder, world_size, *arguments) as training:
            training.wait_for_file(file)
            training.signal(signal.SIGUSR1)
            assert training.join() == [SAVED] * world_size, training.text()
    text = train(folder, 1, *arguments)
    shares = {2: "2 x 4", 3: "3 x 2.667", 1: "1 x 8"}
    for number, (world_size, share) in enumerate(shares.items()):
        head = (
            f"World size {world_size}: 8 steps an epoch, {share} samples each, "
            "of 67; 23 to validate; computing in float32\n"
        )
        assert head in (folder / f"{number}.log").read_text()
    assert "Epoch 3: " in text
    states = [
        torch.load(
            path / "checkpoints/none/epoch-003-step-000008.pt", weights_only=True
        )
        for path in (tmp_path / "alone", folder)
    ]
    assert [float(state["metrics"][2]) for state in states] == [64, 64]
    losses = [float(state["metrics"][0]) / 64 for state in states]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    for name, value in states[0]["model"].items():  # sums in another order
        torch.testing.assert_close(states[1]["model"][name], value, atol=2e-3, rtol=0)
    assert weights(alone) and weights(text)


# A run that cannot go on


def test_loss_that_is_not_finite(tmp_path):
    """It ends all ranks with one line and status 1.

    Nothing of it is saved, and job.sh need not try again.
    """
    arguments = [
        *TINY,
        "--model=dummy",
        "--learning-rate=1e30",
        "--save-steps=1",
        "--workers=1",
    ]
    with Training(tmp_path, 2, *arguments) as training:
        assert training.join() == [1, 1], training.text()
        # A checkpoint that was due between the step
        # and the next agreement is not written.
        *others, line = errors(training.text())
        assert all("the weights are not finite" in other for other in others)
        found = re.fullmatch(
            r"main.py: error: the loss is (nan|inf) before step (\d+) of epoch 1: "
            "nothing of it is saved; "
            "try a smaller --learning-rate, or look at the data",
            line,
        )
        assert found, line
        assert not (training.disk / "none.training").exists()
        assert not WEIGHTS_LINE.search(training.text())
        files = [name for name in names(training.checkpoints) if name.endswith(".pt")]
    for name in files:
        state = torch.load(training.checkpoints / name, weights_only=True)
        assert state["step"] < int(found[2])
        assert all(value.isfinite().all() for value in state["model"].values())
        assert state["metrics"].isfinite().all()


def test_disk_that_is_full(tmp_path):
    """Training goes on to its end, then says once that its last checkpoint is lost."""
    arguments = [
        *TINY,
        "--model=shufflenet_v2_x0_5",
        "--limit-train-samples=16",
        "--epochs=2",
        "--workers=1",
    ]
    with mounted(tmp_path / "small", "size=1m"):
        text = train(
            tmp_path, 2, *arguments, f"--checkpoint-dir={tmp_path}/small", status=1
        )
        assert not list((tmp_path / "small").glob("epoch*"))
    assert [epoch for epoch, _ in EPOCH_LINE.findall(text)] == ["1", "2"]
    *others, last = errors(text)
    assert len(others) >= 2 and all(
        line.startswith("error: cannot write ") for line in others
    ), text
    assert last.startswith(
        "main.py: error: the last checkpoint is not on disk: cannot write "
    ), text
    assert not WEIGHTS_LINE.search(text)


@pytest.fixture(scope="module")
def staged(tmp_path_factory) -> Path:
    """Drawn pictures, staged by prepare_data.py."""
    folder = tmp_path_factory.mktemp("staged")
    draw_imagenet(folder / "archives", classes=3, train=10, valid=7, resolution=40)
    command = [
        sys.executable,
        REPOSITORY / "imagenet" / "prepare_data.py",
        "--data-dir",
        folder / "data",
    ]
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SLURM_")
    }
    done = subprocess.run(
        command,
        env=env | {"IMAGENET_DIR": str(folder / "archives")},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "data"


@pytest.mark.parametrize("split, workers", [("train", 1), ("train", 0), ("valid", 1)])
def test_a_picture_that_does_not_decode(split, workers, staged, tmp_path):
    """It is named in one line, and the status is 1."""
    index = np.load(staged / f"{split}.npy")
    picture = index[4]
    (archive,) = staged.glob(f"*{'val' if split == 'valid' else 'train'}.tar")
    whole = archive.read_bytes()
    offset, size = int(picture["offset"]), int(picture["size"])
    archive.write_bytes(whole[:offset] + bytes(size) + whole[offset + size :])
    try:
        arguments = [
            "--image-size=32",
            "--model=dummy",
            "--batch-size=4",
            "--epochs=1",
            f"--workers={workers}",
        ]
        text = train(tmp_path, 1, f"--data-dir={staged}", *arguments, status=1)
    finally:
        archive.write_bytes(whole)
    (line,) = errors(text)
    name = os.fsdecode(picture["name"])
    assert re.fullmatch(
        rf"main.py: error: cannot read .*: .*{re.escape(name)} on .*: .+", line
    ), text
    assert "Traceback" not in text


def test_staged_pictures(staged, tmp_path):
    """The --limit options choose from what was staged, of all classes."""
    arguments = [
        "--image-size=32",
        "--model=dummy",
        "--batch-size=2",
        "--epochs=1",
        "--workers=1",
    ]
    limits = ["--limit-train-samples=13", "--limit-valid-samples=100"]
    text = train(tmp_path, 2, f"--data-dir={staged}", *arguments, *limits)
    assert (
        "World size 2: 3 steps an epoch, 2 x 2 samples each, of 13; 21 to validate"
        in text
    )
    args = options(
        image_size=32, data_dir=staged, limit_train_samples=13, synthetic=False
    )
    with alone():
        train_set, valid_set = data.load_data(args)
    assert len(set(train_set.chosen.tolist())) == 13 and len(valid_set) == 21
    assert set(train_set.pictures.labels[train_set.chosen].tolist()) == {0, 1, 2}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["--batch-size=100"],
            "a step takes 200 samples and there are only 67 to train on: ",
        ),
        (["--checkpoint-dir=0.log"], "0.log"),
        (["--sync-batchnorm", "--model=shufflenet_v2_x0_5"], "sync-batchnorm"),
    ],
)
def test_errors_are_one_line(arguments, message, tmp_path):
    """What was asked for wrongly is said in a line, and all ranks end with status 1."""
    text = train(
        tmp_path, 2, *TINY, "--model=dummy", "--workers=0", *arguments, status=1
    )
    lines = errors(text)
    assert len(lines) == 1 and message in lines[0], text
    assert lines[0].startswith("main.py: error: ") and "Traceback" not in text, text


def test_path_too_long_for_sockets(tmp_path, monkeypatch):
    """Workers could not pass on a batch: it is said before they start."""
    long = tmp_path / ("x" * 80)
    long.mkdir()
    command = [
        sys.executable,
        REPOSITORY / "imagenet" / "main.py",
        *TINY,
        "--model=dummy",
        "--workers=1",
    ]
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SLURM_")
    }
    env |= {"TMPDIR": str(long), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert re.fullmatch(
        rf"main.py: error: no socket's .* {long}/pymp-\w+: choose a shorter TMPDIR",
        said,
    ), said


# The end of processes


def test_interrupted(tmp_path):
    """Ctrl-C ends a run at once, and leaves no process and none of their own files."""
    command = [
        sys.executable,
        REPOSITORY / "imagenet" / "main.py",
        *TINY,
        "--model=dummy",
        "--epochs=9999",
    ]
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SLURM_")
    }
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    env |= {
        "SLURM_TMPDIR": str(tmp_path / "disk"),
        "TMPDIR": str(temporary),
        "OMP_NUM_THREADS": "1",
    }
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(
            # It is told of one epoch, and is in the next.
            [
                *command,
                "--workers=2",
                "--limit-train-samples=2000",
            ],
            cwd=tmp_path,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 100
        while not (tmp_path / "log").read_text().count("Epoch"):
            assert process.poll() is None and time.monotonic() < deadline, (
                tmp_path / "log"
            ).read_text()
            time.sleep(0.05)
        started = children(process.pid)
        assert len(started) >= 2
        assert list(temporary.glob("pymp-*/*"))  # where workers pass on batches
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        status = process.wait(timeout=30)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert status in (-signal.SIGINT, 128 + signal.SIGINT, 1), status
    assert not [pid for pid in started if alive(pid)]
    assert (tmp_path / "log").read_text().count("Traceback") <= 1
    assert not list(temporary.glob("pymp-*"))


def test_killed_rank(tmp_path):
    """A killed rank's workers end, and so does the other rank, which needs it."""
    flags = [
        "--model=dummy",
        "--epochs=9999",
        "--workers=2",
        "--limit-train-samples=2000",
    ]
    with Training(tmp_path, 2, *TINY, *flags) as training:
        training.wait_for(lambda: "Epoch 1: " in training.text())
        started = [
            child for process in training.processes for child in children(process.pid)
        ]
        assert len(started) >= 4
        training.processes[1].kill()
        statuses = training.join(30)
        assert statuses[1] == -signal.SIGKILL
        assert statuses[0] not in (None, 0, SAVED)  # not as if it had saved
        # A worker looks every 5 s whether its parent is there.
        deadline = time.monotonic() + 20
        while left := [pid for pid in started if alive(pid)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)


# The profile


def test_profile(tmp_path):
    """A trace a rank, and one table of where the time goes."""
    arguments = [
        *TINY,
        "--model=dummy",
        "--limit-train-samples=120",
        "--epochs=2",
        "--workers=1",
        "--profile",
    ]
    text = train(tmp_path, 2, *arguments)
    assert text.count("Self CPU time total") == text.count(" ProfilerStep*") == 1, text
    weights(text)
    for rank in range(2):
        trace = (
            tmp_path / "checkpoints" / "none" / "profile" / f"trace-rank{rank}.json.gz"
        )
        with gzip.open(trace) as file:
            events = json.load(file)["traceEvents"]
        steps = {
            event["name"]
            for event in events
            if event.get("name", "").startswith("ProfilerStep#")
        }
        assert len(steps) == 5


# Functions


def options(**changes) -> argparse.Namespace:
    """Return the options of a small run."""
    values = {
        "data_dir": Path("nowhere"),
        "synthetic": True,
        "limit_train_samples": 24,
        "limit_valid_samples": 23,
        "image_size": 32,
        "model": "dummy",
        "epochs": 1,
        "batch_size": 4,
        "accumulate": 1,
        "learning_rate": 0.1,
        "weight_decay": 1e-4,
        "seed": 0,
        "compile": False,
        "sync_batchnorm": False,
        "workers": 0,
        "save_minutes": 10.0,
        "save_steps": 10**6,
        "keep": 3,
        "timeout": 60,
        "profile": False,
        "wandb": None,
    }
    assert set(changes) <= set(values)
    return argparse.Namespace(**values | changes)


@contextlib.contextmanager
def alone():
    """This process is the only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


# Which samples


def list_batches() -> list[str]:
    """Check the shares of many numbers of ranks; return what is wrong with them."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    wrong, samples = [], 103
    for world_size in (1, 2, 3, 5, 8):
        for global_batch, batch_size in (
            (8, 1),
            (8, 3),
            (10, 5),
            (12, 12),
            (20, 5),
            (103, 7),
            (15, 5),
        ):
            for epoch, start in ((1, 0), (2, 1), (2, 3)):
                shares = []
                for rank in range(world_size):
                    # A process group whose ranks never meet:
                    # each is asked for its share here.
                    dist.init_process_group(
                        "fake", rank=rank, world_size=world_size, store=FakeStore()
                    )
                    run = SimpleNamespace(
                        global_batch_size=global_batch, epoch=epoch, step=start
                    )
                    batches = data.Batches(
                        samples, run, options(batch_size=batch_size, seed=7)
                    )
                    parts = list(batches)
                    dist.destroy_process_group()
                    what = (
                        f"rank {rank} of {world_size}, "
                        f"{global_batch} by {batch_size} from {start}"
                    )
                    if any(not 0 < len(part) <= batch_size for part in parts):
                        wrong.append(
                            f"{what}: batches of {sorted(set(map(len, parts)))}"
                        )
                    if any(key[0] != epoch for part in parts for key in part):
                        wrong.append(f"{what}: of another epoch")
                    if len(parts) % batches.parts:
                        wrong.append(
                            f"{what}: {len(parts)} batches, "
                            f"not a multiple of {batches.parts}"
                        )
                    steps = [
                        parts[i : i + batches.parts]
                        for i in range(0, len(parts), batches.parts)
                    ]
                    shares.append(
                        [[key[1] for part in step for key in part] for step in steps]
                    )
                order = data.draw_epoch(samples, 7, epoch).tolist()
                whole = samples // global_batch
                expected = [
                    sorted(order[i * global_batch :][:global_batch])
                    for i in range(start, whole)
                ]
                together = [
                    sorted(itertools.chain(*step)) for step in zip(*shares, strict=True)
                ]
                if together != expected:
                    wrong.append(
                        f"{world_size} ranks, "
                        f"{global_batch} by {batch_size}, from {start}"
                    )
                sizes = {len(step) for share in shares for step in share}
                if sizes and max(sizes) - min(sizes) > 1:
                    wrong.append(
                        f"{world_size} ranks, {global_batch}: shares of {sizes}"
                    )
    return wrong


def test_ranks_share_every_global_batch():
    """Over all ranks, an epoch's whole batches are there once, from any step on.

    Their parts fit.
    """
    context = forkserver()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=send, args=(sender, list_batches))
    process.start()
    assert receiver.poll(60)
    assert receiver.recv() == []
    process.join(20)


def send(sender, work, *args) -> None:
    sender.send(work(*args))


def test_more_ranks_than_samples_in_a_step():
    """A run that was begun with few ranks says so when it is to go on with too many."""
    with alone():
        run = SimpleNamespace(global_batch_size=0, epoch=1, step=0)
        with pytest.raises(
            checkpoint.RunError,
            match="a step of 0 samples leaves some ranks none: start fewer",
        ):
            data.Batches(10, run, options())


def share_one_by_one(sync_batchnorm: bool) -> str | int:
    run = SimpleNamespace(global_batch_size=3, epoch=1, step=0)
    try:
        return data.Batches(
            10, run, options(batch_size=1, sync_batchnorm=sync_batchnorm)
        ).parts
    except checkpoint.RunError as error:
        return str(error)


def test_batches_that_do_not_meet():
    """SyncBatchNorm would wait for ever for a rank that has a batch less.

    That is refused, on all ranks.
    """
    assert run_ranks(2, share_one_by_one, False) == [2, 1]
    said = (
        "with SyncBatchNorm, 2 batches of one are too many for some ranks: start fewer"
    )
    assert run_ranks(2, share_one_by_one, True) == [said, said]


def test_draw_epoch():
    """Every epoch and seed has an order of its own, the same one each time."""
    orders = {
        pair: data.draw_epoch(1000, *pair)
        for pair in ((0, 1), (0, 2), (1, 0), (1, 1), (2, 1))
    }
    for pair, order in orders.items():
        assert sorted(order.tolist()) == list(range(1000))
        assert torch.equal(order, data.draw_epoch(1000, *pair))
    assert len({tuple(order.tolist()) for order in orders.values()}) == len(orders)


def test_augmentation():
    """Crop and flip follow from (seed, epoch, sample), in any order of drawing."""
    with alone():
        train_set, valid_set = data.load_data(options())
        another_seed, _ = data.load_data(options(seed=1))
    keys = [(epoch, index) for epoch in (1, 2) for index in range(12)]
    right = {key: train_set[key] for key in keys}
    for image, label in right.values():
        assert (image.dtype, image.shape) == (torch.uint8, (3, 32, 32)) and isinstance(
            label, int
        )
    for workers in (0, 1, 2):
        torch.manual_seed(workers)
        batches = [keys[i::7] for i in range(7)]
        loader = DataLoader(
            train_set,
            batch_sampler=batches,
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
            collate_fn=data.SharedBatch if workers else None,
        )
        for batch, (images, labels) in zip(batches, loader, strict=True):
            assert (images.dtype, images.shape) == (
                torch.uint8,
                (len(batch), 3, 32, 32),
            )
            assert (labels.dtype, labels.shape) == (torch.int64, (len(batch),))
            for key, image, label in zip(batch, images, labels, strict=True):
                assert torch.equal(image, right[key][0]) and label == right[key][1]
    assert all(not torch.equal(right[1, i][0], right[2, i][0]) for i in range(12))
    assert all(
        not torch.equal(right[1, i][0], another_seed[1, i][0]) for i in range(12)
    )
    assert len(
        {
            hashlib.sha256(image.contiguous().numpy()).digest()
            for image, _ in right.values()
        }
    ) == len(keys)
    # What is validated is the middle of the picture, always the same.
    torch.manual_seed(5)
    first = valid_set[0, 3][0]
    torch.manual_seed(6)
    assert torch.equal(first, valid_set[0, 3][0])


class Limited(data.Augmented):
    """The kernel stops whoever reads these from making any file any larger."""

    def __init__(self, pictures, args: argparse.Namespace, killed: bool):
        super().__init__(pictures, None, args)
        # The signal kills it, or it gets an error.
        self.action = signal.SIG_DFL if killed else signal.SIG_IGN

    def __getitem__(self, key):
        signal.signal(signal.SIGXFSZ, self.action)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        return super().__getitem__(key)


def load_limited(killed: bool) -> list[str]:
    args = options(workers=1)
    datasets = [Limited(part.pictures, args, killed) for part in data.load_data(args)]
    said = []
    for loader in data.build_loaders(
        *datasets, SimpleNamespace(global_batch_size=8, epoch=1, step=0), args
    ):
        try:
            next(iter(loader))
        except RuntimeError as error:
            said.append(str(error))
    data.end_workers()
    return said


@pytest.mark.parametrize("killed", [True, False])
def test_nothing_is_left_in_shared_memory(killed):
    """A worker may be killed making a batch, or find no room for it: that is said."""
    before = set(os.listdir("/dev/shm"))
    (said,) = run_ranks(1, load_limited, killed)
    assert set(os.listdir("/dev/shm")) <= before
    assert len(said) == 2
    for message in said:
        right = (
            "DataLoader worker .* exited"
            if killed
            else "no room in /dev/shm for a batch .*--workers$"
        )
        assert re.search(right, message.strip()), message


def load_from_killed() -> list[str]:
    args, said = options(workers=1, limit_train_samples=64), []
    run = SimpleNamespace(global_batch_size=8, epoch=1, step=0)
    for loader in data.build_loaders(*data.load_data(args), run, args):
        batches = iter(loader)
        next(batches)
        assert batches._data_queue._reader.poll(60)  # the next one is on its way
        # What DataLoader says may come later.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        (worker,) = multiprocessing.active_children()
        worker.kill()
        worker.join()
        try:
            next(batches)
        except RuntimeError as error:
            said.append(str(error.__cause__))
        data.end_workers()
        del batches
    return said


def test_worker_killed_before_its_batch_is_taken():
    """The error says what has happened, in training and in an evaluation."""
    (said,) = run_ranks(1, load_from_killed)
    assert said == ["a DataLoader worker is killed: is --mem too small?"] * 2


def test_made_up_pictures_to_validate_are_others():
    with alone():
        train_set, valid_set = data.load_data(options())
    read = [
        {hashlib.sha256(d[0, i][0].contiguous().numpy()).digest() for i in range(23)}
        for d in (train_set, valid_set)
    ]
    assert len(read[0] | read[1]) == 46


# What a step computes


class ExactModel(nn.Sequential):
    """A convolution without BatchNorm.

    It computes in float32: bfloat16 would hide differences below 1%.
    """

    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 8, 3, stride=4),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(32, 10),
        )
        self.seconds, self.forwards = 0.0, 0

    def forward(self, images):
        assert images.dtype == torch.float32 and images.is_contiguous(
            memory_format=torch.channels_last
        )
        self.forwards += 1
        with torch.autocast(images.device.type, enabled=False):
            return super().forward(images)


class NormModel(nn.Sequential):
    """A model with BatchNorm."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 8, 3, stride=4),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 10),
        )


def build(
    folder: Path, model: nn.Module, args: argparse.Namespace, global_batch_size: int
) -> tuple:
    """Return what main() makes for train()."""
    train_set, valid_set = data.load_data(args)
    world_size = dist.get_world_size()
    steps = main.count_steps(len(train_set), global_batch_size, world_size)
    model = model.to(memory_format=torch.channels_last)
    optimizer, scheduler = main.build_optimizer(model, args, global_batch_size, steps)
    run = checkpoint.Run(
        model, optimizer, scheduler, {"model": "exact"}, global_batch_size
    )
    checkpoints = checkpoint.Checkpoints(folder, args.keep)
    checkpoints.load(run.recipe)
    train_loader, valid_loader = data.build_loaders(train_set, valid_set, run, args)
    ddp_model = nn.parallel.DistributedDataParallel(model)
    watch = main.Watch(folder, torch.device("cpu"), args, 0)
    return ddp_model, run, train_loader, valid_loader, checkpoints, watch


NO_BAR = tqdm(disable=True)


def take_one_step(folder: Path, global_batch_size: int, batch_size: int) -> dict:
    """Return the first step's gradients, the metrics, and how often the model ran."""
    args = options(batch_size=batch_size, limit_train_samples=global_batch_size + 1)
    model = ExactModel()
    ddp_model, run, loader, _, checkpoints, watch = build(
        folder, model, args, global_batch_size
    )
    gradients = {}

    def keep(*_):
        gradients.update({name: p.grad.clone() for name, p in model.named_parameters()})

    run.optimizer.register_step_pre_hook(keep)
    metrics = main.train(ddp_model, run, loader, NO_BAR, checkpoints, watch, args)
    watch.close()
    assert not any(p.grad is not None and p.grad.any() for p in model.parameters())
    average = main.average(metrics, global_batch_size)
    return {
        "gradients": gradients,
        "average": average,
        "forwards": model.forwards,
        "step": run.step,
    }


@pytest.fixture(scope="module")
def whole_batches(tmp_path_factory) -> dict[int, dict]:
    """The steps of one rank that takes a whole global batch at once."""
    folder = tmp_path_factory.mktemp("whole")
    return {
        size: run_ranks(1, take_one_step, folder / str(size), size, size)[0]
        for size in (10, 12)
    }


@pytest.mark.parametrize(
    "world_size, global_batch_size, batch_size, forwards",
    [
        (1, 12, 5, [3]),
        (2, 12, 3, [2, 2]),
        (3, 10, 4, [1, 1, 1]),  # shares of 4, 3 and 3
        (3, 10, 3, [2, 2, 2]),  # the first needs two batches for its share
        (3, 10, 2, [2, 2, 2]),
    ],
)
def test_a_step_is_that_of_the_whole_batch(
    world_size, global_batch_size, batch_size, forwards, whole_batches, tmp_path
):
    """Shared and accumulated, gradients are those of one GPU, whatever the shares."""
    right = whole_batches[global_batch_size]
    ranks = run_ranks(
        world_size, take_one_step, tmp_path, global_batch_size, batch_size
    )
    assert [rank["forwards"] for rank in ranks] == forwards
    for rank in ranks:
        assert rank["step"] == 1
        assert rank["average"] == pytest.approx(right["average"], abs=1e-6)
        for name, gradient in rank["gradients"].items():
            torch.testing.assert_close(
                gradient, right["gradients"][name], atol=1e-6, rtol=1e-5
            )


def test_the_gradient_is_that_of_plain_code(whole_batches):
    """The mean over the samples of the loss with label smoothing."""
    torch.manual_seed(0)
    model = ExactModel()
    with alone():
        train_set, _ = data.load_data(options(limit_train_samples=13))
    order = data.draw_epoch(13, 0, 1)[:12].tolist()
    mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]).view(
        2, 3, 1, 1
    )
    for index in order:
        image, label = train_set[1, index]
        normal = ((image / 255 - mean) / std)[None].contiguous(
            memory_format=torch.channels_last
        )
        target = torch.full((1, 10), 0.01)
        target[0, label] += 0.9
        (-(target * model(normal).log_softmax(dim=1)).sum() / 12).backward()
    for name, parameter in model.named_parameters():
        right = whole_batches[12]["gradients"][name]
        torch.testing.assert_close(parameter.grad, right, atol=1e-5, rtol=1e-3)


# What a step costs


def count_collectives(folder: Path, steps: int, batch_size: int) -> dict:
    """Count what so many steps of 4 samples a rank call."""
    gradients = []

    def average_gradients(state, bucket):
        gradients.append(1)
        return allreduce_hook(state, bucket)

    size = 4 * dist.get_world_size()
    # The crops and flips, which read values, are drawn in another process.
    args = options(batch_size=batch_size, limit_train_samples=steps * size, workers=1)
    ddp_model, run, loader, valid_loader, checkpoints, watch = build(
        folder, NormModel(), args, size
    )
    ddp_model.register_comm_hook(None, average_gradients)
    reads = collections.Counter()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU]
    ) as profile:
        main.train(ddp_model, run, loader, NO_BAR, checkpoints, watch, args)
    events = collections.Counter(event.name for event in profile.events())
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU]
    ) as evaluation:
        main.evaluate(ddp_model.module, valid_loader, watch)
    watch.close()
    reads = {
        name: events[name]
        for name in ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal")
    }
    return {
        "gradients": len(gradients),
        "agreements": events["c10d::allreduce_"] - len(gradients),
        "others": {
            n: c
            for n, c in events.items()
            if n.startswith("c10d::") and n != "c10d::allreduce_"
        },
        "reads": reads,
        "evaluation": [
            event.name
            for event in evaluation.events()
            if event.name.startswith("c10d::")
        ],
    }


def count_short_and_long(folder: Path, batch_size: int) -> list[dict]:
    return [
        count_collectives(folder / str(steps), steps, batch_size) for steps in (10, 50)
    ]


@pytest.mark.parametrize("batch_size", [4, 2])
def test_steps_hardly_talk(batch_size, tmp_path):
    """One all-reduce of the gradients a step, also with accumulation.

    And a small one every 20 steps.
    """
    for short, long in run_ranks(2, count_short_and_long, tmp_path, batch_size):
        assert [short["gradients"], long["gradients"]] == [10, 50]
        # Before the first step, after it, when it is known
        # how long a step takes, and at the end.
        assert 2 <= short["agreements"] <= 4
        assert 1 <= long["agreements"] - short["agreements"] <= 4
        # DDP's own: BatchNorm's statistics before each step.
        growth = {
            name: long["others"][name] - short["others"][name]
            for name in long["others"]
        }
        assert set(growth) <= {"c10d::broadcast_"} and growth["c10d::broadcast_"] in (
            40,
            80,
        )
        # A value is read for an agreement, and by nothing else in a step.
        for name in long["reads"]:
            assert long["reads"][name] - short["reads"][name] <= 12 * 3
        assert long["evaluation"] == short["evaluation"] == []


def agree_at_paces(folder: Path, done: int) -> list[int]:
    args = options(save_steps=1000)
    _, run, _, _, checkpoints, watch = build(folder, ExactModel(), args, 8)
    run.step = run.scheduler.last_epoch = done
    intervals = []
    # Seconds and steps since the last time, on rank 0; the others only wait for it.
    for seconds, steps in ((0, 0), (0.08, 40), (0.2, 20), (0.5, 1), (2.5, 1)):
        if dist.get_rank() == 0:
            time.sleep(seconds)
        dist.barrier()
        for _ in range(steps):
            run.scheduler.last_epoch += 1
            run.step += 1
        intervals.append(
            main.agree(
                run, torch.zeros(3, dtype=torch.float64), checkpoints, watch, args
            )
        )
    args.save_steps = run.step + 3
    intervals.append(
        main.agree(run, torch.zeros(3, dtype=torch.float64), checkpoints, watch, args)
    )
    watch.close()
    return intervals


@pytest.mark.parametrize("done", [0, 500])
def test_slow_steps_are_agreed_on_sooner(tmp_path, done):
    """A signal leaves little time, so that ranks agree often.

    That is every 20 steps, or every 2 seconds, or when one is to save. So do
    those of a run that goes on: the steps of its start before tell nothing of
    how long one takes now.
    """
    first, second = run_ranks(2, agree_at_paces, tmp_path, done)
    assert first == second
    start, quick, quicker, slow, slowest, before_saving = first
    assert (start, quick, quicker, slowest) == (1, 20, 20, 1)
    assert 1 <= slow <= 4
    assert before_saving <= 3


def agree_on_nan(folder: Path) -> tuple[int, str]:
    """Return this rank's status and words when the loss is nan on rank 1 alone."""
    args = options(save_steps=1)
    _, run, _, _, checkpoints, watch = build(folder, ExactModel(), args, 8)
    run.step = 1
    loss = math.nan if dist.get_rank() == 1 else 1.0
    said = io.StringIO()
    with contextlib.redirect_stderr(said), pytest.raises(SystemExit) as end:
        main.agree(
            run,
            torch.tensor([loss, 1, 4], dtype=torch.float64),
            checkpoints,
            watch,
            args,
        )
    assert not dist.is_initialized()
    checkpoints.writer.shutdown()
    watch.close()
    return end.value.code, said.getvalue()


def test_no_rank_goes_on_when_the_loss_is_nan_on_one(tmp_path):
    """All ranks leave together, one of them says why, and nothing is saved."""
    line = (
        "main.py: error: the loss is nan before step 1 of epoch 1: "
        "nothing of it is saved; "
        "try a smaller --learning-rate, or look at the data\n"
    )
    assert run_ranks(2, agree_on_nan, tmp_path) == [(1, line), (1, "")]
    assert not list(tmp_path.glob("epoch-*"))


# Evaluation


def evaluate(folder: Path, batch_size: int) -> tuple:
    args = options(batch_size=batch_size, limit_valid_samples=23)
    _, _, _, valid_loader, _, watch = build(folder, NormModel(), args, 12)
    torch.manual_seed(3)
    model = NormModel()
    model[1].running_mean.uniform_(-1, 1)
    model[1].running_var.uniform_(0.5, 2)
    result = main.average(main.evaluate(model, valid_loader, watch), 23)
    watch.close()
    return result


def test_evaluation_does_not_depend_on_the_ranks(tmp_path):
    """Any number of GPUs and any batch size report the same for the same weights."""
    results = [
        result
        for world_size, batch_size in ((1, 23), (2, 5), (3, 4))
        for result in run_ranks(
            world_size, evaluate, tmp_path / str(world_size), batch_size
        )
    ]
    assert len(results) == 6
    for loss, accuracy in results:
        assert loss == pytest.approx(results[0][0], abs=1e-5)
        assert accuracy == results[0][1]


# Models and their optimizer


def test_every_model_can_be_built():
    """Each of torchvision's classification models gives logits of all the classes."""
    names = main.models.list_models(module=main.models)
    assert len(names) >= 80
    with torch.device("meta"):
        # The regnets read their weights.
        for name in (name for name in names if not name.startswith("regnet")):
            model = main.build_model(options(model=name), 7)
            sizes = {p.shape[0] for p in list(model.parameters())[-4:]}
            assert 7 in sizes or "squeezenet" in name, name
        for name, size in (
            ("googlenet", 64),
            ("inception_v3", 80),
            ("vit_b_16", 224),
            ("squeezenet1_0", 64),
        ):
            model = main.build_model(options(model=name), 7).train()
            logits = model(torch.empty(2, 3, size, size))
            assert isinstance(logits, torch.Tensor) and logits.shape == (2, 7)
    assert main.build_model(options(model="regnet_y_400mf"), 7).fc.out_features == 7
    assert main.build_model(options(), 7)(torch.ones(2, 3, 9, 9)).shape == (2, 7)


def test_blocks_begin_as_the_identity():
    """The last BatchNorm of a ResNet block begins with a gamma of 0, others with 1."""
    model = main.build_model(options(model="resnet18"), 10)
    gammas = {
        name: m.weight
        for name, m in model.named_modules()
        if isinstance(m, nn.BatchNorm2d)
    }
    last = [name for name in gammas if re.fullmatch(r"layer\d\.\d\.bn2", name)]
    assert len(last) == 8 and len(gammas) == 20
    assert all((gammas[name] == (name not in last)).all() for name in gammas)


def test_weight_decay():
    """Weights of convolutions and linear layers decay; biases and norms do not."""
    model = main.build_model(options(model="resnet18"), 10)
    optimizer, _ = main.build_optimizer(model, options(weight_decay=0.03), 256, 10)
    decays = {
        id(p): group["weight_decay"]
        for group in optimizer.param_groups
        for p in group["params"]
    }
    assert len(decays) == len(list(model.parameters()))
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            shrinks = name == "weight" and isinstance(module, nn.Conv2d | nn.Linear)
            assert decays[id(parameter)] == (0.03 if shrinks else 0)
    assert all(group["fused"] for group in optimizer.param_groups)


@pytest.mark.parametrize("global_batch_size", [64, 1024])
def test_learning_rate(global_batch_size):
    """It rises for 8 of 90 epochs to --learning-rate per 256 samples, then falls."""
    args = options(epochs=90, learning_rate=0.256)
    optimizer, scheduler = main.build_optimizer(
        nn.Linear(3, 2), args, global_batch_size, 5
    )
    peak, rates = global_batch_size / 1000, []
    for _ in range(450):
        assert len({group["lr"] for group in optimizer.param_groups}) == 1
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert max(rates) == pytest.approx(peak, rel=1e-3)
    assert 38 <= rates.index(max(rates)) <= 41  # 8 epochs of 5 steps
    assert rates[0] == pytest.approx(peak / 25)
    assert 0 < rates[-1] < peak / 1e4
    rising, falling = (
        rates[: rates.index(max(rates)) + 1],
        rates[rates.index(max(rates)) :],
    )
    assert rising == sorted(rising) and falling == sorted(falling, reverse=True)
    assert {group["momentum"] for group in optimizer.param_groups} == {0.875}
    with pytest.raises(ValueError):
        for _ in range(2):
            scheduler.step()


def test_normalize():
    """Colours at ImageNet's mean become 0, one standard deviation above it 1.

    They are float32 in channels_last.
    """
    mean, std = (
        torch.tensor(v).view(3, 1, 1)
        for v in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    )
    images = (
        torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 3, 16, 16)
    )
    normal = main.normalize(images)
    assert normal.dtype == torch.float32 and normal.is_contiguous(
        memory_format=torch.channels_last
    )
    torch.testing.assert_close(normal, ((images / 255 - mean) / std), atol=1e-5, rtol=0)


def test_metrics_are_averaged_over_samples():
    """A small last batch weighs by its samples.

    A sample too many or too few stops the run.
    """
    logits, labels = 3 * torch.randn(22, 10).bfloat16(), torch.randint(10, (22,))
    metrics = torch.zeros(3, dtype=torch.float64)
    for some_logits, some_labels in zip(
        logits.split([5, 5, 3, 9]), labels.split([5, 5, 3, 9]), strict=True
    ):
        main.measure(metrics, some_logits, some_labels)
    right = -logits.double().log_softmax(dim=1)[torch.arange(22), labels].mean().item()
    with alone():
        loss, accuracy = main.average(metrics, 22)
        with pytest.raises(AssertionError, match="22 samples were counted, not 23"):
            main.average(metrics, 23)
    assert loss == pytest.approx(right, abs=1e-6) and math.isfinite(loss)
    assert accuracy == pytest.approx(
        (logits.argmax(dim=1) == labels).double().mean().item()
    )


def test_same_is_no_approximation():
    """What compares states here would see the last bit."""
    assert not same(
        {"a": torch.ones(1)}, {"a": torch.ones(1).nextafter(torch.zeros(1))}
    )


def test_another_run_writes_there(second_run):
    """The second run on a folder gives up after a minute, and touches nothing."""
    folder, receiver = second_run
    assert receiver.poll(100)
    assert receiver.recv() == (
        f"another run writes to {folder}: choose another --checkpoint-dir; "
        "where its node is gone, and there is no such run, remove the file lock there"
    )
    assert names(folder) == []
