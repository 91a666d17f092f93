"""What imagenet/main.py and data.py train on and compute, stopped and started again.

The shipped main.py runs as it is, with flags and environment only: every rank is a
process of its own, in a real process group (gloo) on this machine's CPU, without Slurm.
Where a number finer than the printed ones is needed, its functions are called.
"""

import argparse
import atexit
import collections
import contextlib
import gzip
import importlib
import io
import json
import math
import multiprocessing
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from PIL import Image
from slurm_jobs import ARGUMENTS_LINE
from test_checkpoint import REPOSITORY, checkpoint, forkserver, mounted, run_ranks
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import Dataset
from torchvision import models
from tqdm import tqdm

pytestmark = pytest.mark.timeout(150)

main = importlib.import_module("main")
data = importlib.import_module("data")

CPU = torch.device("cpu")
SAVED = 75  # the status of ranks that were asked to stop
# Of 23 images to validate, neither 2 nor 3 ranks have the same number each.
TINY = [
    "--synthetic",
    "--image-size=32",
    "--limit-train-samples=67",
    "--limit-valid-samples=23",
    "--batch-size=4",
]
ENDLESS = [*TINY, "--model=dummy", "--epochs=9999", "--limit-train-samples=2000"]
EPOCH_LINE = re.compile(
    r"^Epoch (\d+): (train loss \d+\.\d{3} accuracy \d+\.\d\d%, "
    r"valid loss \d+\.\d{3} accuracy \d+\.\d\d%), "
    r"\d+ images/s, \d+% waiting for data$",
    re.MULTILINE,
)
WEIGHTS_LINE = re.compile(
    r"^Weights SHA-256 ([0-9a-f]{64}), commit [0-9a-f]{40}(?:-dirty)?\n\Z", re.MULTILINE
)
STOPPED_LINE = re.compile(
    r"^Asked to stop: saved step (\d+) of epoch (\d+), to go on from there$",
    re.MULTILINE,
)


# Runs of main.py


class Training:
    """main.py on some ranks, and all that they print."""

    def __init__(
        self, folder: Path, world_size: int, *arguments: str, late_ranks: int = 0
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self.checkpoints = folder / "checkpoints" / "none"
        self.log = folder / f"{len(list(folder.glob('*.log')))}.log"
        self.log.touch()
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        environment = {
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            "CUDA_VISIBLE_DEVICES": "",
        }
        self.processes = [
            forkserver().Process(
                target=run_main, args=(rank, environment, self.log, arguments)
            )
            for rank in range(world_size)
        ]
        for process in self.processes[: world_size - late_ranks]:
            process.start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.processes:
            if process.pid:
                for child in children(process):
                    kill(child, signal.SIGKILL)
                process.kill()
                process.join()

    def text(self) -> str:
        return self.log.read_text()

    def wait_for(self, happened, timeout: float = 60) -> None:
        deadline = time.monotonic() + timeout
        while not happened():
            alive = any(process.is_alive() for process in self.processes if process.pid)
            assert alive and time.monotonic() < deadline, self.text()
            time.sleep(0.002)

    def wait_for_checkpoint(self, epoch: int, step: int) -> None:
        path = self.checkpoints / f"epoch-{epoch:03}-step-{step:06}.pt"
        self.wait_for(path.exists)

    def newest(self) -> str:
        return max(path.name for path in self.checkpoints.glob("epoch-*"))

    def children(self) -> set[int]:
        return {child for process in self.processes for child in children(process)}

    def signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            os.kill(process.pid, number)

    def join(self, timeout: float = 60) -> list[int]:
        """Return the exit status of every rank."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.1, deadline - time.monotonic()))
        return [process.exitcode for process in self.processes]


def run_main(rank: int, environment: dict, log: Path, arguments) -> None:
    """Do what `python main.py` does, in a process that has imported most of it."""
    torch.set_num_threads(1)
    # As in a process that no forkserver has made.
    multiprocessing.set_start_method("fork", force=True)
    for descriptor, path in ((0, os.devnull), (1, log), (2, log)):
        os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), descriptor)
    sys.stdout.reconfigure(line_buffering=True)
    for name in outside_slurm(os.environ).keys() ^ os.environ.keys():
        del os.environ[name]
    os.environ |= environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.chdir(log.parent)
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


def outside_slurm(environment) -> dict[str, str]:
    """Return the environment without what main.py takes from a job's."""
    ours = ("SLURM_", "MASTER_", "TORCHELASTIC_", "SCRATCH", "WORK_DIR", "GIT_COMMIT")
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith((*ours, "GOT_FURTHER"))
    }


def children(process) -> set[int]:
    """Return the processes that a process has started."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for task in list(Path(f"/proc/{process.pid}/task").iterdir()):
            with contextlib.suppress(OSError):  # this thread has ended since
                found.update(map(int, (task / "children").read_text().split()))
    return found


def kill(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def alive(pid: int) -> bool:
    """Return whether a process is there, and does not only wait for its parent."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def run_to_its_end(
    folder: Path, world_size: int, *arguments: str, status: int = 0
) -> Training:
    with Training(folder, world_size, *arguments) as training:
        assert training.join() == [status] * world_size, training.text()
    return training


def weights(training: Training) -> str:
    """Return the SHA-256 that a run ends with."""
    (found,) = WEIGHTS_LINE.findall(training.text())
    return found


def epochs(training: Training) -> list[tuple[str, str]]:
    return EPOCH_LINE.findall(training.text())


def errors(text: str) -> list[str]:
    return [
        line
        for line in text.splitlines()
        if "error" in line.lower() or "Traceback" in line
        if not ARGUMENTS_LINE.match(line)
    ]


# Stopped and started again

# A model with BatchNorm and dropout.
MOBILE = [*TINY, "--model=mobilenet_v3_small", "--epochs=3", "--save-steps=3"]
RUNS = {
    "plain": (2, MOBILE),
    # On 3 ranks: of 2 numbers, the sum does not depend on their order, which
    # settle_buckets keeps.
    "accumulating": (
        3,
        [*MOBILE, "--accumulate=2", "--batch-size=2", "--limit-train-samples=100"],
    ),
    "validating": (2, [*MOBILE, "--epochs=1", "--limit-valid-samples=800"]),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[str, Training]:
    """The runs, when nothing happens to them."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return {
        name: run_to_its_end(folder / name, world_size, *arguments, "--workers=1")
        for name, (world_size, arguments) in RUNS.items()
    }


def test_a_whole_run(undisturbed):
    """It says on how many samples it trains, a line an epoch, and last its weights."""
    heads = {
        "plain": "World size 2: 8 steps an epoch, 2 x 4 samples each, of 67",
        "accumulating": "World size 3: 8 steps an epoch, 3 x 4 samples each, of 100",
    }
    for name, head in heads.items():
        training = undisturbed[name]
        lines = training.text().splitlines()
        assert ARGUMENTS_LINE.match(lines[0])
        assert lines[1] == "warning: no GPU found, training on the CPU"
        assert lines[2] == f"{head}; 23 to validate; computing in float32"
        assert [epoch for epoch, _ in epochs(training)] == ["1", "2", "3"]
        assert weights(training)
        assert len(lines) == 7, training.text()


def stop(folder: Path, name: str, workers: int, number, epoch: int, step: int):
    """Run until a checkpoint is there, then signal all ranks.

    Return the epoch and the step from which the run is to go on.
    """
    world_size, arguments = RUNS[name]
    with Training(folder, world_size, *arguments, f"--workers={workers}") as training:
        training.wait_for_checkpoint(epoch, step)
        training.signal(number)
        training.signal(number)  # from srun and from uv
        assert training.join() == [SAVED] * world_size, training.text()
    assert not errors(training.text())
    ((stop_step, stop_epoch),) = STOPPED_LINE.findall(training.text())
    name = f"epoch-{int(stop_epoch):03}-step-{int(stop_step):06}.pt"
    assert training.newest() == name
    return int(stop_epoch), int(stop_step)


def check_that_nothing_is_lost(folder: Path, resumed: Training, right: Training):
    """The weights are the same to the last bit, and so is the line of each epoch."""
    assert weights(resumed) == weights(right)
    logs = "".join(path.read_text() for path in sorted(folder.glob("*.log")))
    assert dict(EPOCH_LINE.findall(logs)) == dict(epochs(right))
    best, right_best = (
        torch.load(training.checkpoints / "best.pt", weights_only=True)["epoch"]
        for training in (resumed, right)
    )
    assert best == right_best


@pytest.mark.parametrize(
    "name, number, workers",
    [("plain", signal.SIGUSR1, 0), ("accumulating", signal.SIGTERM, 2)],
)
def test_stopped_in_an_epoch(name, number, workers, undisturbed, tmp_path):
    """A run stopped twice, by either signal, ends as one that never was."""
    first = stop(tmp_path, name, workers, number, 1, 3)
    second = stop(tmp_path, name, workers, number, 2, 3)
    assert (1, 3) < first < (2, 3) < second
    world_size, arguments = RUNS[name]
    resumed = run_to_its_end(tmp_path, world_size, *arguments, f"--workers={workers}")
    file = f"epoch-{second[0]:03}-step-{second[1]:06}.pt"
    assert f"Resuming from {resumed.checkpoints}/{file}\n" in resumed.text()
    check_that_nothing_is_lost(tmp_path, resumed, undisturbed[name])


@pytest.mark.parametrize("number, workers", [(signal.SIGUSR1, 0), (signal.SIGTERM, 2)])
def test_stopped_in_a_validation(number, workers, undisturbed, tmp_path):
    """It may take longer than is left: it is left, and made when the run goes on.

    So is the last one of a run that had finished.
    """
    # The epoch is saved, then validated on 100 batches.
    assert stop(tmp_path, "validating", workers, number, 1, 8) == (1, 8)
    assert not EPOCH_LINE.search((tmp_path / "0.log").read_text())
    world_size, arguments = RUNS["validating"]
    resumed = run_to_its_end(tmp_path, world_size, *arguments, f"--workers={workers}")
    check_that_nothing_is_lost(tmp_path, resumed, undisturbed["validating"])
    again = run_to_its_end(tmp_path, world_size, *arguments, f"--workers={workers}")
    check_that_nothing_is_lost(tmp_path, again, undisturbed["validating"])


def test_killed_rank(undisturbed, tmp_path):
    """A killed rank's workers end, and so does the other rank, which needs it.

    The next start goes on from the newest checkpoint.
    """
    with Training(tmp_path, 2, *MOBILE, "--workers=2") as training:
        training.wait_for_checkpoint(1, 6)
        workers = training.children()
        training.processes[1].kill()
        first, second = training.join(30)
        assert second == -signal.SIGKILL
        assert first not in (None, 0, SAVED)  # not as if it had saved
        # A worker looks every 5 s whether its parent is there.
        deadline = time.monotonic() + 20
        while left := [pid for pid in workers if alive(pid)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
        newest = training.checkpoints / training.newest()
    resumed = run_to_its_end(tmp_path, 2, *MOBILE, "--workers=2")
    assert f"Resuming from {newest}\n" in resumed.text()
    check_that_nothing_is_lost(tmp_path, resumed, undisturbed["plain"])


def test_other_numbers_of_ranks(tmp_path):
    """2 ranks, then 3, then 1: the same steps of 8 samples, nearly the same weights."""
    # A model without BatchNorm and dropout, whose steps
    # do not depend on how a batch is shared.
    arguments = [*TINY, "--model=dummy", "--epochs=3", "--save-steps=2", "--workers=1"]
    alone = run_to_its_end(tmp_path / "alone", 2, *arguments)
    folder = tmp_path / "elastic"
    for world_size, epoch in ((2, 1), (3, 2)):
        with Training(folder, world_size, *arguments) as training:
            training.wait_for_checkpoint(epoch, 2)
            training.signal(signal.SIGUSR1)
            assert training.join() == [SAVED] * world_size, training.text()
    elastic = run_to_its_end(folder, 1, *arguments)
    shares = {2: "2 x 4", 3: "3 x 2.667", 1: "1 x 8"}
    for number, (world_size, share) in enumerate(shares.items()):
        head = f"World size {world_size}: 8 steps an epoch, {share} samples each, of 67"
        assert head in (folder / f"{number}.log").read_text()
    states = [
        torch.load(training.checkpoints / "epoch-003-step-000008.pt", weights_only=True)
        for training in (alone, elastic)
    ]
    assert [float(state["metrics"][2]) for state in states] == [64, 64]
    losses = [float(state["metrics"][0]) for state in states]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    for name, value in states[0]["model"].items():  # sums in another order
        torch.testing.assert_close(states[1]["model"][name], value, atol=2e-3, rtol=0)


def test_more_ranks_than_samples_in_a_step(tmp_path):
    arguments = [*TINY, "--model=dummy", "--epochs=1", "--batch-size=1", "--workers=0"]
    run_to_its_end(tmp_path, 2, *arguments)
    text = run_to_its_end(tmp_path, 3, *arguments, status=1).text()
    assert errors(text) == ["main.py: error: a step has 2 samples: start fewer ranks"]


@pytest.mark.parametrize("seed", [0, 1])  # the best epoch is the last, or the first
def test_the_best_weights_in_plain_code(seed, tmp_path):
    """Two lines load best.pt. Its accuracy is the best one that the log has."""
    arguments = ["--model=shufflenet_v2_x0_5", "--learning-rate=0.5", "--epochs=3"]
    arguments += [f"--seed={seed}", "--workers=1"]
    training = run_to_its_end(tmp_path, 2, *TINY, *arguments)
    best = training.checkpoints / "best.pt"
    model = models.get_model("shufflenet_v2_x0_5", num_classes=10)
    model.load_state_dict(torch.load(best, weights_only=True)["model"])

    _, valid_set = data.load_data(options())
    images, labels = zip(*(valid_set[0, index] for index in range(23)), strict=True)
    labels = torch.tensor(labels)
    with torch.no_grad():
        logits = model.eval()((torch.stack(images) / 255 - MEAN) / STD)
    results = []
    for _, metrics in epochs(training):
        loss, accuracy = re.search(r"valid loss (.*) accuracy (.*)%", metrics).groups()
        results.append((float(loss), float(accuracy)))
    best_loss, best_accuracy = max(results, key=lambda result: result[1])
    correct = (logits.argmax(dim=1) == labels).sum().item()
    assert round(100 * correct / 23, 2) == best_accuracy
    loss = F.cross_entropy(logits, labels).item()
    assert loss == pytest.approx(best_loss, rel=1e-3)


# A run that cannot go on


def test_loss_that_is_not_finite(tmp_path):
    """It ends all ranks with one line and status 1, and nothing of it is saved."""
    arguments = [*TINY, "--model=dummy", "--learning-rate=1e30", "--workers=1"]
    training = run_to_its_end(tmp_path, 2, *arguments, "--save-steps=1", status=1)
    (line,) = errors(training.text())
    # Weights that are not finite, after a step whose loss was, are not saved, either.
    assert re.match(
        r"main.py: error: (the loss is (nan|inf) before step \d+ of epoch 1: "
        r"nothing of it is saved; try a smaller --learning-rate, or look at the data"
        r"|cannot write .*: the weights are not finite)$",
        line,
    ), line
    for path in training.checkpoints.glob("*.pt*"):
        state = torch.load(path, weights_only=True)
        assert all(value.isfinite().all() for value in state["model"].values())
        assert state["metrics"].isfinite().all()


def meet_nan() -> str:
    """Return what is said when the loss is nan on rank 1 alone."""
    run = SimpleNamespace(epoch=1, step=1)
    checkpoints = checkpoint.Checkpoints(Path("nowhere"), 3)
    loss = math.nan if dist.get_rank() == 1 else 1.0
    metrics = torch.tensor([loss, 1, 4], dtype=torch.float64)
    with pytest.raises(checkpoint.RunError) as error:
        main.agree(run, metrics, checkpoints, NoWatch(), options(save_steps=1))
    return str(error.value)


def test_no_rank_goes_on_when_the_loss_is_nan_on_one():
    said = run_ranks(2, meet_nan)
    assert said[0] == said[1]
    assert said[0].startswith("the loss is nan before step 1 of epoch 1: ")


def test_full_disk(tmp_path):
    """The run ends at once, and the checkpoints before stay."""
    arguments = [*TINY, "--model=shufflenet_v2_x0_5", "--save-steps=1", "--workers=1"]
    arguments += [f"--checkpoint-dir={tmp_path}/small", "--keep=9"]
    with mounted(tmp_path / "small", "size=7m"):
        text = run_to_its_end(tmp_path, 2, *arguments, status=1).text()
        paths = sorted((tmp_path / "small").glob("*.pt*"))
        states = [torch.load(path, weights_only=True) for path in paths]
    assert 1 <= len(states) <= 4
    assert [state["step"] for state in states] == list(range(1, len(states) + 1))
    path = tmp_path / "small" / f"epoch-001-step-{len(states) + 1:06}.pt"
    assert errors(text) == [
        f"main.py: error: cannot write {path}: No space left on device"
    ]


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """Images in class folders."""
    folder = tmp_path_factory.mktemp("tree")
    for split, images in (("train", 10), ("val", 7)):
        for label in range(3):
            (folder / split / f"class{label}").mkdir(parents=True)
            for number in range(images):
                image = Image.effect_noise((48, 40), 60).convert("RGB")
                image.save(folder / split / f"class{label}" / f"{number}.JPEG")
    return folder


SMALL = ["--image-size=32", "--model=dummy", "--batch-size=2", "--epochs=1"]


@pytest.mark.parametrize("split, workers", [("train", 1), ("train", 0), ("val", 1)])
def test_an_image_that_does_not_decode(split, workers, tree, tmp_path):
    """It is named in one line, and the status is 1."""
    shutil.copytree(tree, tmp_path / "tree")
    bad = tmp_path / "tree" / split / "class1" / "4.JPEG"
    bad.write_bytes(bytes(bad.stat().st_size))
    arguments = [f"--data-dir={tmp_path}/tree", f"--workers={workers}", *SMALL]
    text = run_to_its_end(tmp_path, 1, *arguments, status=1).text()
    (line,) = errors(text)
    assert re.match(rf"main.py: error: cannot \w+ .*{bad} on .*: .+", line), text


def test_limited_samples(tree):
    """The --limit options choose from all of the data, and so from all classes."""
    limits = {"limit_train_samples": 13, "limit_valid_samples": 100}
    sets = data.load_data(options(synthetic=False, data_dir=tree, **limits))
    assert [len(data_set) for data_set in sets] == [13, 21]
    assert len(set(sets[0].chosen.tolist())) == 13
    assert {sets[0][1, index][1] for index in range(13)} == {0, 1, 2}


def load_trees(*trees: Path) -> str:
    """Return what a rank says, of which each has a tree of its own."""
    args = options(data_dir=trees[dist.get_rank()], synthetic=False)
    checkpoints = checkpoint.Checkpoints(trees[0] / "checkpoints", 3)
    try:
        checkpoints.load(checkpoint.get_recipe(args, *data.load_data(args)))
    except checkpoint.RunError as error:
        return str(error)
    return "the same"


def test_nodes_with_different_data(tree, tmp_path):
    """All ranks refuse it, if only the bytes of an image differ."""
    shutil.copytree(tree, tmp_path / "tree")
    assert run_ranks(2, load_trees, tree, tmp_path / "tree") == ["the same"] * 2
    image = tmp_path / "tree" / "train" / "class1" / "4.JPEG"
    image.write_bytes(image.read_bytes() + b"0")
    said = "not every node has the same data: stage it again"
    assert run_ranks(2, load_trees, tree, tmp_path / "tree") == [said] * 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["--batch-size=100"],
            "a step takes 200 samples and there are only 67 to train on: ",
        ),
        (["--checkpoint-dir=0.log"], "cannot use .*/0.log: "),
    ],
)
def test_errors_are_one_line(arguments, message, tmp_path):
    """What was asked for wrongly is said in a line, and all ranks end with status 1."""
    arguments = [*TINY, "--model=dummy", "--workers=0", *arguments]
    text = run_to_its_end(tmp_path, 2, *arguments, status=1).text()
    # Without a RunError, each rank says it.
    assert len(errors(text)) == (2 if "--batch-size=100" in arguments else 1), text
    assert re.match(f"main.py: error: {message}", errors(text)[0]), text
    assert "Traceback" not in text, text


def test_interrupted(tmp_path):
    """Ctrl-C ends a run at once, and leaves no process and none of their own files."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {"TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
    log = tmp_path / "log"
    with open(log, "w") as file:
        process = subprocess.Popen(
            [sys.executable, REPOSITORY / "imagenet/main.py", *ENDLESS, "--workers=2"],
            cwd=tmp_path,
            env=outside_slurm(os.environ) | environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 100
        while "Epoch" not in log.read_text():  # it is in the next one
            assert process.poll() is None and time.monotonic() < deadline, (
                log.read_text()
            )
            time.sleep(0.05)
        workers = children(process)
        assert len(workers) == 4
        assert list(temporary.glob("pymp-*/*"))  # where workers pass on batches
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        status = process.wait(timeout=30)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert status in (-signal.SIGINT, 128 + signal.SIGINT, 1), status
    assert not [pid for pid in workers if alive(pid)]
    # A worker that was just sending a batch tells of a broken pipe, in a traceback.
    text = log.read_text()
    assert text.count("KeyboardInterrupt") <= 1 and "DataLoader worker" not in text
    assert not list(temporary.glob("pymp-*"))


# Workers


def test_workers_stay(undisturbed, tmp_path):
    """They are forked before the process group is up, which a fork might break.

    They make the batches of all epochs and validations, and signals do not end them.
    """
    arguments = [*MOBILE, "--workers=2"]
    with Training(tmp_path, 2, *arguments, late_ranks=1) as training:
        first, second = training.processes
        training.wait_for(lambda: len(children(first)) == 4)
        workers = children(first)  # and no group yet: rank 1 is missing
        second.start()
        training.wait_for_checkpoint(1, 3)
        workers |= children(second)
        assert training.children() == workers and len(workers) == 8
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            for worker in workers:
                os.kill(worker, number)
        for epoch in (2, 3):
            training.wait_for_checkpoint(epoch, 3)
            assert training.children() == workers
        assert training.join() == [0, 0], training.text()
    assert not [pid for pid in workers if alive(pid)]
    assert weights(training) == weights(undisturbed["plain"])
    assert epochs(training) == epochs(undisturbed["plain"])


def test_killed_worker(tmp_path):
    """Its rank says so and ends, and so does the other rank, which needs it."""
    with Training(tmp_path, 2, *ENDLESS, "--workers=1") as training:
        training.wait_for(lambda: "Epoch 1: " in training.text())
        worker = min(children(training.processes[1]))
        kill(worker, signal.SIGKILL)
        assert training.join(30) == [1, 1], training.text()
    said = rf"RuntimeError: DataLoader worker \(pid.* {worker}\) .*"
    assert re.search(said, training.text()), training.text()


# The profile


def test_profile(tmp_path):
    """A trace a rank, and one table of where the time goes.

    In a step, it has no collective but DDP's own, of the gradients: not of BatchNorm's
    statistics.
    """
    arguments = [*TINY, "--model=shufflenet_v2_x0_5", "--limit-train-samples=200"]
    arguments += ["--epochs=1", "--workers=1", "--profile"]
    training = run_to_its_end(tmp_path, 2, *arguments)
    text = training.text()
    assert text.count("Self CPU time total") == 1, text
    for rank in range(2):
        (trace,) = training.checkpoints.glob(f"profile/rank{rank}.*.json.gz")
        with gzip.open(trace) as file:
            events = json.load(file)["traceEvents"]
        found = collections.Counter(event.get("name") for event in events)
        steps = [name for name in found if str(name).startswith("ProfilerStep#")]
        assert len(steps) == 5
        assert 10 <= found["c10d::allreduce_"] <= 12  # two buckets, and `agree`
        assert found["c10d::broadcast_"] == 0


def test_a_line_at_every_tenth(monkeypatch, caplog):
    """A batch job's log says where a long epoch is: loss, images/s and time left."""
    caplog.set_level("INFO")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "stderr", io.StringIO())  # as in a job, no terminal
    bar = main.progress(3, 20, 8)
    assert bar.mininterval == 10  # seconds: a short epoch says nothing
    bar.mininterval = 0
    for _ in range(20):
        main.show(bar, torch.tensor([5.0, 1, 4]))
    bar.close()
    lines = caplog.text.splitlines()
    line = r" Epoch 3: +%d%%\|.*\| %d/160 \[00:00<00:00, .* images/s, loss=1.250\]$"
    assert len(lines) == 10
    for tenth, found in enumerate(lines, 1):
        assert re.search(line % (10 * tenth, 16 * tenth), found), found


# Functions

MEAN, STD = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])[
    ..., None, None
]


def options(*arguments: str, **changes) -> argparse.Namespace:
    """Return the options of a small run."""
    with pytest.MonkeyPatch.context() as patch:
        flags = [*TINY, "--model=dummy", "--workers=0", "--epochs=1"]
        patch.setattr(sys, "argv", ["main.py", *flags, *arguments])
        values = vars(main.parse_args())
    assert set(changes) <= set(values)
    return argparse.Namespace(**values | changes)


@contextlib.contextmanager
def alone(rank: int = 0, world_size: int = 1):
    """Make this process the only rank, or one of a group whose ranks never meet."""
    backend, store = (
        ("gloo", dist.HashStore()) if world_size == 1 else ("fake", FakeStore())
    )
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


NO_BAR = tqdm(disable=True)


class NoWatch:
    """Sees only at which steps metrics are logged, and runs no thread."""

    def __init__(self, pace: float = 0):
        self.logged: list[int] = []
        self.pace = pace

    def steps_per_second(self) -> float:
        return self.pace

    def batches(self, batches):
        return batches

    def log(self, step: int, values: dict) -> None:
        self.logged.append(step)

    def paused(self):
        return contextlib.nullcontext()


class LoggingWatch(main.Watch):
    """Sees only at which steps metrics are logged, and watches as ever."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.logged: list[int] = []

    def log(self, step: int, values: dict) -> None:
        self.logged.append(step)


# Which samples


class Numbers(Dataset):
    """A sample is its own number, and that of its epoch."""

    seed, size = 7, (1, 1)

    def __init__(self, samples: int):
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, key: tuple[int, int]) -> tuple[int, int]:
        return key[::-1]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_ranks_share_every_global_batch(world_size):
    """Over all ranks, an epoch's whole batches are there once, from any step on."""
    loader = data.build_loader(Numbers(103), 0)
    for size, epoch, step in ((8, 1, 0), (15, 2, 1), (20, 1, 3), (103, 1, 0)):
        run = SimpleNamespace(global_batch_size=size, epoch=epoch, step=step)
        ranks = []
        for rank in range(world_size):
            with alone(rank, world_size):
                ranks.append(list(data.training_batches(loader, run, CPU)))
        order = data.draw_epoch(103, 7, epoch)
        assert len(ranks[0]) == 103 // size - step
        for number, shares in enumerate(zip(*ranks, strict=True), step):
            sizes = [len(numbers) for numbers, _ in shares]
            assert max(sizes) - min(sizes) <= 1
            numbers, epochs = map(torch.cat, zip(*shares, strict=True))
            right = order[number * size :][:size]
            assert sorted(numbers.tolist()) == sorted(right.tolist())
            assert set(epochs.tolist()) == {epoch}


def test_draw_epoch():
    """Every epoch and seed has an order of its own, the same one each time."""
    pairs = [(0, 1), (0, 2), (1, 0), (1, 1), (2, 1)]
    orders = [data.draw_epoch(1000, *pair).tolist() for pair in pairs]
    assert orders == [data.draw_epoch(1000, *pair).tolist() for pair in pairs]
    assert all(sorted(order) == list(range(1000)) for order in orders)
    assert len(set(map(tuple, orders))) == len(pairs)


def load_with_workers(keys: list[tuple[int, int]]) -> list[dict]:
    """Return the samples, as 0, 1 and 2 processes make them in batches."""
    train_set, _ = data.load_data(options())
    results = []
    for workers in (0, 1, 2):
        torch.manual_seed(workers)
        loader = data.build_loader(train_set, workers)
        found, batches = {}, [keys[i::7] for i in range(7)]
        loader.batch_sampler[:] = batches
        for batch, (images, labels) in zip(batches, loader, strict=True):
            assert (images.dtype, labels.dtype) == (torch.uint8, torch.int64)
            assert images.shape == (len(batch), 3, 32, 32)
            pairs = zip(images.clone(), labels.tolist(), strict=True)
            found.update(zip(batch, pairs, strict=True))
        results.append(found)
    return results


def test_augmentation():
    """Crop and flip follow from (seed, epoch, sample), in any order of drawing."""
    train_set, valid_set = data.load_data(options())
    another_seed, _ = data.load_data(options(seed=1))
    keys = [(epoch, index) for epoch in (1, 2) for index in range(12)]
    right = {key: train_set[key] for key in keys}
    (results,) = run_ranks(1, load_with_workers, keys)
    for found in results:
        for key, (image, label) in right.items():
            assert torch.equal(found[key][0], image) and found[key][1] == label
    for index in range(12):
        assert not torch.equal(right[1, index][0], right[2, index][0])
        assert not torch.equal(right[1, index][0], another_seed[1, index][0])
    # What is validated is the middle of the image, always the same, and another image.
    torch.manual_seed(5)
    first = valid_set[0, 3][0]
    torch.manual_seed(6)
    assert torch.equal(first, valid_set[0, 3][0])
    assert not torch.equal(first, train_set[0, 3][0])


# What a step computes


class ExactModel(nn.Sequential):
    """A convolution without BatchNorm."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 8, 3, stride=4),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(32, 10),
        )
        self.forwards = 0

    def forward(self, images):
        assert images.dtype == torch.float32
        assert images.is_contiguous(memory_format=torch.channels_last)
        self.forwards += 1
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


def build_run(model: nn.Module, args, global_batch_size: int, steps: int):
    optimizer, scheduler = main.build_optimizer(model, args, global_batch_size, steps)
    return checkpoint.Run(model, optimizer, scheduler, {}, global_batch_size)


def take_one_step(global_batch_size: int, batch_size: int) -> tuple:
    """Return the gradients, the metrics, and how often the model ran."""
    args = options(limit_train_samples=global_batch_size + 1)
    train_set, _ = data.load_data(args)
    model = ExactModel().to(memory_format=torch.channels_last)
    ddp_model = nn.parallel.DistributedDataParallel(model)
    run = build_run(model, args, global_batch_size, 1)
    loader = data.build_loader(train_set, 0)
    ((images, labels),) = data.training_batches(loader, run, CPU)
    metrics = torch.zeros(3, dtype=torch.float64)
    main.compute_gradients(ddp_model, run, images, labels, metrics, batch_size)
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    return gradients, main.average(metrics, global_batch_size), model.forwards


@pytest.fixture(scope="module")
def whole_batches() -> dict[int, tuple]:
    """The steps of one rank that takes a whole global batch at once."""
    return {size: run_ranks(1, take_one_step, size, size)[0] for size in (10, 12)}


@pytest.mark.parametrize(
    "world_size, global_batch_size, batch_size, forwards",
    [
        (1, 12, 5, [3]),
        (2, 12, 3, [2, 2]),
        (3, 10, 4, [1, 1, 1]),  # shares of 4, 3 and 3
        (3, 10, 3, [2, 1, 1]),  # the first needs two parts for its share
        (3, 10, 1, [4, 3, 3]),
    ],
)
def test_a_step_is_that_of_the_whole_batch(
    world_size, global_batch_size, batch_size, forwards, whole_batches
):
    """Shared and accumulated, gradients are those of one GPU, whatever the shares."""
    right_gradients, right_metrics, _ = whole_batches[global_batch_size]
    ranks = run_ranks(world_size, take_one_step, global_batch_size, batch_size)
    assert [rank[2] for rank in ranks] == forwards
    for gradients, metrics, _ in ranks:
        assert metrics == pytest.approx(right_metrics, abs=1e-6)
        for name, gradient in gradients.items():
            right = right_gradients[name]
            torch.testing.assert_close(gradient, right, atol=1e-6, rtol=1e-5)


def test_steps_are_those_of_plain_code(tmp_path):
    """Weights follow from the mean over the samples of the loss with smoothed labels.

    The steps are on whole batches in the order of `draw_epoch`.
    """
    args = options(limit_train_samples=40, batch_size=12, learning_rate=0.5)
    train_set, _ = data.load_data(args)
    torch.manual_seed(0)
    model, plain_model = ExactModel(), ExactModel()
    plain_model.load_state_dict(model.state_dict())
    with alone():
        run = build_run(model, args, 12, 3)
        batches = data.training_batches(data.build_loader(train_set, 0), run, CPU)
        checkpoints = checkpoint.Checkpoints(tmp_path, 3)
        metrics = main.train(model, run, batches, NO_BAR, checkpoints, NoWatch(), args)
    assert run.step == 3 and metrics[2] == 36

    optimizer, scheduler = main.build_optimizer(plain_model, args, 12, 3)
    order = data.draw_epoch(40, 0, 1).tolist()
    for start in (0, 12, 24):
        plain_model.zero_grad()
        for index in order[start : start + 12]:
            image, label = train_set[1, index]
            normal = ((image / 255 - MEAN) / STD)[None]
            logits = plain_model(normal.contiguous(memory_format=torch.channels_last))
            target = torch.full((1, 10), 0.01)
            target[0, label] += 0.9
            (-(target * logits.log_softmax(dim=1)).sum() / 12).backward()
        optimizer.step()
        scheduler.step()
    for name, weight in plain_model.state_dict().items():
        found = model.state_dict()[name]
        torch.testing.assert_close(found, weight, atol=1e-5, rtol=1e-3)


# What a step costs


def count_calls(work) -> collections.Counter:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        work()
    return collections.Counter(event.name for event in profile.events())


def count_steps(folder: Path, steps: int) -> tuple:
    """Count what so many steps of 2 x 2 samples a rank call, and then an evaluation."""
    global_batch_size = 4 * dist.get_world_size()
    train_set, valid_set = data.load_data(
        options(limit_train_samples=steps * global_batch_size, limit_valid_samples=200)
    )
    args = options(batch_size=2)
    # The crops and flips, which read values, are drawn in another process.
    train_loader = data.build_loader(train_set, 1)
    valid_loader = data.build_loader(valid_set, 1)
    model = NormModel().to(memory_format=torch.channels_last)
    ddp_model = nn.parallel.DistributedDataParallel(model)
    ddp_model.broadcast_buffers = False  # as main() does: see test_profile
    run = build_run(model, args, global_batch_size, steps)
    checkpoints = checkpoint.Checkpoints(folder, 3)
    checkpoints.load({})
    watch = NoWatch(pace=100)
    batches = data.training_batches(train_loader, run, CPU)
    training = count_calls(
        lambda: main.train(ddp_model, run, batches, NO_BAR, checkpoints, watch, args)
    )
    args = options(batch_size=4)
    batches = main.validation_batches(valid_loader, run, watch, args)
    return training, count_calls(lambda: main.evaluate(model, batches))


def count_short_and_long(folder: Path) -> list[tuple]:
    return [count_steps(folder / str(steps), steps) for steps in (10, 50)]


def test_steps_hardly_talk(tmp_path):
    """One all-reduce of the gradients a step, also with accumulation.

    A small one every 20 steps, and every 20 batches of an evaluation. BatchNorm's
    statistics go round once, before the evaluation.
    """
    for (short, _), (long, evaluation) in run_ranks(2, count_short_and_long, tmp_path):
        growth = {name: long[name] - short[name] for name in {*long, *short}}
        collectives = {
            name for name, n in growth.items() if name.startswith("c10d::") and n
        }
        assert collectives == {"c10d::allreduce_"}
        # After the first step it is not yet known how long steps take.
        assert 40 + 1 <= growth["c10d::allreduce_"] <= 40 + 4
        assert long["c10d::broadcast_"] >= 3
        # A value is read for an agreement, and by nothing else in a step.
        for name in ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal"):
            assert growth.get(name, 0) <= 4 * 12
        # Of 25 batches a rank.
        assert {n: c for n, c in evaluation.items() if n.startswith("c10d::")} == {
            "c10d::allreduce_": 2
        }


def agree_at_paces(folder: Path) -> list[int]:
    """Return after how many steps ranks agree again, rank 0 seeing these paces."""
    run = build_run(ExactModel(), options(), 8, 10)
    checkpoints = checkpoint.Checkpoints(folder, 3)
    run.step = 500
    intervals = []
    for pace, save_steps in (
        (0, 10**6),
        (99, 10**6),
        (4, 10**6),
        (0.3, 10**6),
        (99, 7),
    ):
        metrics = torch.ones(3, dtype=torch.float64)
        watch = NoWatch(pace * 2 * (dist.get_rank() == 0))
        args = options(save_steps=save_steps)
        intervals.append(main.agree(run, metrics, checkpoints, watch, args))
    return intervals


def test_slow_steps_are_agreed_on_sooner(tmp_path):
    """A signal leaves little time.

    Ranks agree every 20 steps, or every 2 seconds, or when one is to save.
    """
    # 500 is 71 * 7 + 3.
    assert run_ranks(2, agree_at_paces, tmp_path) == [[1, 20, 8, 1, 4]] * 2


def test_the_pace_is_that_of_this_start(tmp_path):
    """The steps of a start before tell nothing of how long one takes now."""
    args = options()
    run = build_run(ExactModel(), args, 4, 1000)
    run.step = 500
    run.scheduler.last_epoch = 500

    def batches():
        for _ in range(5):
            time.sleep(0.6)
            yield torch.zeros(4, 3, 32, 32, dtype=torch.uint8), torch.arange(4)

    with alone():
        watch = LoggingWatch(tmp_path, CPU, args, 500)
        checkpoints = checkpoint.Checkpoints(tmp_path, 3)
        some = watch.batches(batches())
        main.train(run.model, run, some, NO_BAR, checkpoints, watch, args)
        watch.close()
    # At about 1.7 steps a second, every 3 steps at most: not every 20.
    assert watch.logged[0] == 501 and len(watch.logged) >= 2


# Evaluation


def evaluate(batch_size: int) -> tuple[float, float, list[int]]:
    """Return the loss, the accuracy, and the sizes of this rank's batches."""
    torch.manual_seed(3)
    model = NormModel()
    model[1].running_mean.uniform_(-1, 1)
    model[1].running_var.uniform_(0.5, 2)
    _, valid_set = data.load_data(options())
    loader = data.build_loader(valid_set, 0)
    batches = list(data.evaluation_batches(loader, batch_size, CPU))
    metrics = main.evaluate(model, batches)
    return *main.average(metrics, 23), [len(labels) for _, labels in batches]


def test_evaluation_does_not_depend_on_the_ranks():
    """Any number of GPUs and any batch size report the same for the same weights.

    Each sample counts once. Batches have one size: --compile compiles for each.
    """
    ((right_loss, right_accuracy, _),) = run_ranks(1, evaluate, 23)
    for world_size, batch_size, batches in ((2, 5, 3), (3, 4, 2)):
        for loss, accuracy, sizes in run_ranks(world_size, evaluate, batch_size):
            assert loss == pytest.approx(right_loss, abs=1e-5)
            assert accuracy == right_accuracy
            assert sizes == [batch_size] * batches


def test_metrics_are_averaged_over_samples():
    """A small last batch weighs by its samples, and padding counts nowhere.

    A sample too many or too few stops the run.
    """
    logits, labels = 3 * torch.randn(22, 10).bfloat16(), torch.randint(10, (22,))
    metrics = torch.zeros(3, dtype=torch.float64)
    for some_logits, some_labels in zip(
        logits.split([5, 5, 3, 9]), labels.split([5, 5, 3, 9]), strict=True
    ):
        main.measure(metrics, some_logits, some_labels)
    main.measure(metrics, logits[:7], torch.full((7,), -100))
    right = -logits.double().log_softmax(dim=1)[torch.arange(22), labels].mean().item()
    with alone():
        loss, accuracy = main.average(metrics, 22)
        with pytest.raises(AssertionError, match="22 samples were counted, not 23"):
            main.average(metrics, 23)
    assert loss == pytest.approx(right, abs=1e-6)
    assert accuracy == pytest.approx(
        (logits.argmax(1) == labels).double().mean().item()
    )


# Models and their optimizer


def test_every_model_can_be_built():
    """Each of torchvision's classification models gives logits of all the classes.

    Two give more than that in training: --model refuses them.
    """
    with torch.device("meta"):
        for name in models.list_models(module=models):
            if name.startswith("regnet"):  # they read their weights
                continue
            if name in ("googlenet", "inception_v3"):
                with pytest.raises(SystemExit):
                    options(f"--model={name}")
                continue
            model = main.build_model(options(model=name), 7)
            sizes = {weight.shape[0] for weight in list(model.parameters())[-4:]}
            assert 7 in sizes or "squeezenet" in name, name
        model = main.build_model(options(model="vit_b_16"), 7).train()
        assert model(torch.empty(2, 3, 224, 224)).shape == (2, 7)
    for name in ("regnet_y_400mf", "squeezenet1_0", "dummy"):
        model = main.build_model(options(model=name), 7)
        assert model(torch.ones(2, 3, 64, 64)).shape == (2, 7)


def test_blocks_begin_as_the_identity():
    """The last BatchNorm of a ResNet block begins with a gamma of 0, others with 1."""
    for name, module in main.build_model(options(model="resnet18"), 10).named_modules():
        if isinstance(module, nn.BatchNorm2d):
            last = re.fullmatch(r"layer\d\.\d\.bn2", name)
            assert (module.weight == (0 if last else 1)).all(), name


def test_weight_decay():
    """Weights of convolutions and linear layers decay; biases and norms do not."""
    model = main.build_model(options(model="resnet18"), 10)
    optimizer, _ = main.build_optimizer(model, options(weight_decay=0.03), 256, 10)
    decays = {}
    for group in optimizer.param_groups:
        decays |= dict.fromkeys(group["params"], group["weight_decay"])
    assert len(decays) == len(list(model.parameters()))
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            shrinks = name == "weight" and isinstance(module, nn.Conv2d | nn.Linear)
            assert decays[parameter] == (0.03 if shrinks else 0)


@pytest.mark.parametrize("global_batch_size", [64, 1024])
def test_learning_rate(global_batch_size):
    """It rises for 8 of 90 epochs to --learning-rate per 256 samples, then falls."""
    args = options(epochs=90, learning_rate=0.256)
    model = nn.Linear(3, 2)
    optimizer, scheduler = main.build_optimizer(model, args, global_batch_size, 5)
    peak, rates = global_batch_size / 1000, []
    for _ in range(450):
        assert len({group["lr"] for group in optimizer.param_groups}) == 1
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    top = rates.index(max(rates))
    assert 38 <= top <= 41  # 8 epochs of 5 steps
    assert rates[top] == pytest.approx(peak, rel=1e-3)
    assert rates[0] == pytest.approx(peak / 25)
    assert 0 < rates[-1] < peak / 1e4
    assert rates[:top] == sorted(rates[:top])
    assert rates[top:] == sorted(rates[top:], reverse=True)
