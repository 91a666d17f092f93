"""What imagenet/checkpoint.py writes, reads back and refuses: real files and damage.

One rank is this process, in a process group of its own; several are processes (gloo).
Folders that are full or read-only are file systems mounted for it.
"""

import copy
import errno
import fcntl
import importlib
import importlib.util
import logging
import multiprocessing
import os
import pickle
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

REPOSITORY = Path(__file__).resolve().parents[1]
RECIPE = {"model": "tiny", "seed": 0, "batch_size": 4}

pytestmark = pytest.mark.timeout(120)

# Where main.py finds the modules beside it.
sys.path.append(str(REPOSITORY / "imagenet"))
checkpoint = importlib.import_module("checkpoint")


# Ranks


def forkserver():
    """Return what starts processes that have imported all this: that takes seconds."""
    context = multiprocessing.get_context("forkserver")
    slow = [
        "torch._dynamo",
        "torch.profiler",
        "tensorboard.summary.writer.record_writer",
        "torchvision",
        "tqdm",
        "scipy.io",
    ]
    context.set_forkserver_preload(
        ["test_checkpoint", "test_imagenet_training", "test_watch", *slow]
    )
    return context


def run_ranks(world_size: int, work, *args, timeout: float = 60) -> list:
    """Return what `work(*args)` returned on each rank of a process group, in order."""
    context = forkserver()
    with tempfile.TemporaryDirectory() as folder:
        job = (world_size, folder, work, args)
        processes = [
            context.Process(target=run_rank, args=(r, *job)) for r in range(world_size)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        for process in processes:
            process.join(max(0.1, deadline - time.monotonic()))
            process.kill()
            process.join()
        assert [process.exitcode for process in processes] == [0] * world_size
        return [
            torch.load(Path(folder, f"{rank}.pt"), weights_only=False)
            for rank in range(world_size)
        ]


def run_rank(rank: int, world_size: int, folder: str, work, args: tuple) -> None:
    torch.set_num_threads(1)
    # As in a process that no forkserver has made.
    multiprocessing.set_start_method("fork", force=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store, timeout = f"file://{folder}/store", timedelta(seconds=60)
    dist.init_process_group("gloo", store, timeout, rank=rank, world_size=world_size)
    torch.manual_seed(0)
    torch.save(work(*args), Path(folder, f"{rank}.pt"))
    if dist.is_initialized():  # main.py's fail(together=True) has left it
        dist.barrier()
        dist.destroy_process_group()


@pytest.fixture
def rank0():
    """This process is the only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# Runs and their checkpoints


def build_run(seed: int = 0, steps: int = 3) -> checkpoint.Run:
    """Return a small run after some steps, with momentum and statistics to keep."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 5)
    )
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)
    run = checkpoint.Run(model, optimizer, scheduler, RECIPE, 4)
    train(run, steps)
    return run


def train(run: checkpoint.Run, steps: int) -> None:
    for _ in range(steps):
        torch.manual_seed(run.step)
        run.model(torch.randn(4, 3, 4, 4)).square().mean().backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.scheduler.step()
        run.step += 1
        run.metrics += torch.tensor([0.1, 1, 4])


def same(one, other) -> bool:
    """Return whether nested dicts and lists hold the same names, types and bytes."""
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and torch.equal(one, other)
        )
    if isinstance(one, dict):
        return list(one) == list(other) and all(
            same(one[key], other[key]) for key in one
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


@contextmanager
def opened(folder: Path, keep: int = 3, recipe: dict = RECIPE):
    """Give the checkpoints in a folder, and the newest; let go of the folder after."""
    checkpoints = checkpoint.Checkpoints(folder, keep)
    try:
        yield checkpoints, checkpoints.load(recipe)
    finally:
        checkpoints._wait()
        if hasattr(checkpoints, "lock"):
            checkpoints.lock.close()


def load(folder: Path, recipe: dict = RECIPE) -> dict | None:
    with opened(folder, recipe=recipe) as (_, state):
        return state


def write(folder: Path, *states: dict, keep: int = 3) -> None:
    """Make checkpoints of these states, in a folder that may have some."""
    with opened(folder, keep) as (checkpoints, _):
        for state in states:
            checkpoints.save(state)
        checkpoints.finish()


def draw(epoch: int, step: int, kilobytes: int = 1, recipe: dict = RECIPE) -> dict:
    """Return a state for a checkpoint of about that size."""
    generator = torch.Generator().manual_seed(100 * epoch + step)
    weights = torch.randn(kilobytes * 256, generator=generator)
    state = {
        "model": {"weight": weights},
        "recipe": recipe,
        "epoch": epoch,
        "step": step,
    }
    return state | {"global_batch_size": 4}


def names(folder: Path) -> list[str]:
    """Return the checkpoints in a folder, and what else is there of them."""
    return sorted(
        path.name for path in folder.iterdir() if path.name not in ("lock", "starts")
    )


def warnings(caplog) -> list[str]:
    """Return what more than information has been said since this was last asked."""
    lines = [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING
    ]
    caplog.clear()
    return lines


@contextmanager
def mounted(folder: Path, options: str):
    """Mount a file system in memory on a folder."""
    if os.geteuid() != 0:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("mounting needs root")
    folder.mkdir(exist_ok=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", folder], check=True, timeout=20
    )
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True, timeout=20)


@pytest.fixture
def small_disk(tmp_path):
    """A folder with room for three checkpoints of 300 KB, and not for four."""
    with mounted(tmp_path / "small", "size=1m"):
        yield tmp_path / "small"


# What a checkpoint holds


def test_a_run_goes_on_as_if_never_stopped(tmp_path, rank0):
    """Weights, statistics, momentum, rate and place: all that follows is the same."""
    run = build_run(steps=5)
    run.epoch, run.best_accuracy = 2, 0.25
    write(tmp_path, run.state_dict())
    train(run, 4)

    resumed = build_run(seed=1, steps=0)
    resumed.load_state_dict(load(tmp_path))
    assert (resumed.epoch, resumed.step, resumed.best_accuracy) == (2, 5, 0.25)
    assert resumed.metrics.tolist() == pytest.approx([0.5, 5, 20])
    assert resumed.model[0].weight.is_contiguous(memory_format=torch.channels_last)
    train(resumed, 4)
    assert same(resumed.state_dict(), run.state_dict())
    assert checkpoint.digest(resumed.model.state_dict()) == checkpoint.digest(
        run.model.state_dict()
    )


def test_a_new_epoch_starts_at_its_first_step():
    run = build_run()
    before = run.metrics
    run.start_epoch(4)
    assert (run.epoch, run.step, run.metrics.tolist()) == (4, 0, [0, 0, 0])
    # The tensor of the epoch before stays for whoever has kept it.
    assert before.tolist() == pytest.approx([0.3, 3, 12])


def test_nothing_there(tmp_path, rank0, caplog):
    """The first start makes the folder, and begins with the first step."""
    assert load(tmp_path / "a folder" / "of its own") is None
    assert names(tmp_path / "a folder" / "of its own") == []
    assert not warnings(caplog)


def test_saving_does_not_wait_for_the_disk(tmp_path, rank0):
    """Training goes on at once; what it does then to the tensors is not in the file."""
    state = draw(1, 1, kilobytes=64 * 1024)
    state["nested"] = [{"tensors": (torch.ones(3), torch.zeros(2))}]
    right = copy.deepcopy(state)
    with opened(tmp_path) as (checkpoints, _):
        checkpoints.save(state)
        assert not list(tmp_path.glob("epoch-*.pt"))
        state["model"]["weight"].zero_()
        state["nested"][0]["tensors"][0].zero_()
        state["step"] = 2
        checkpoints.finish()
    assert names(tmp_path) == ["epoch-001-step-000001.pt"]
    saved = load(tmp_path)
    assert torch.equal(saved["model"]["weight"], right["model"]["weight"])
    assert saved["nested"][0]["tensors"][0].tolist() == [1, 1, 1]
    assert saved["step"] == 1


def test_copies_use_the_memory_of_the_one_before():
    """What is saved next goes to the same memory, if the shape is: new takes longer."""
    run = build_run(steps=0)  # without momentum yet
    first = checkpoint.copy_to_cpu(run.state_dict())
    train(run, 2)
    second = checkpoint.copy_to_cpu(run.state_dict(), first)
    places = [value.data_ptr() for value in first["model"].values()]
    assert [value.data_ptr() for value in second["model"].values()] == places
    assert not set(places) & {
        value.data_ptr() for value in run.model.state_dict().values()
    }
    assert checkpoint.digest(second) == checkpoint.digest(run.state_dict())
    other = copy.deepcopy(run.state_dict())
    other["model"]["0.bias"], other["metrics"] = (
        torch.ones(7),
        [torch.ones(2, dtype=torch.int64)],
    )
    assert checkpoint.digest(
        checkpoint.copy_to_cpu(other, second)
    ) == checkpoint.digest(other)


def test_age(tmp_path, rank0):
    """The time between checkpoints is from the beginning of one to that of the next."""
    with opened(tmp_path) as (checkpoints, _):
        started = time.monotonic()
        checkpoints.save(draw(1, 1, kilobytes=1024))
        saved = time.monotonic()
        checkpoints.finish()
        at_least = time.monotonic() - saved
        assert at_least <= checkpoints.age() <= time.monotonic() - started


def test_the_last_ones_are_kept(tmp_path, rank0):
    """Old ones are deleted, by epoch and step, only after the new one is there."""
    write(tmp_path, draw(1, 5), draw(1, 10), draw(2, 1), draw(2, 2), keep=2)
    assert names(tmp_path) == ["epoch-002-step-000001.pt", "epoch-002-step-000002.pt"]
    write(tmp_path, draw(10, 1), keep=2)
    assert names(tmp_path) == ["epoch-002-step-000002.pt", "epoch-010-step-000001.pt"]
    assert load(tmp_path)["epoch"] == 10


def test_the_newest_has_the_highest_numbers(tmp_path, rank0):
    """Also beyond the digits that a file's name has at least."""
    write(tmp_path, draw(999, 1), draw(1000, 1), keep=2)
    assert load(tmp_path)["epoch"] == 1000
    write(tmp_path, draw(1001, 999_999), draw(1001, 1_000_000), keep=2)
    assert load(tmp_path)["step"] == 1_000_000


def test_the_best_one_stays(tmp_path, rank0):
    """best.pt outlives its file, gives way to a better one; torch.load reads it."""
    run = build_run()
    with opened(tmp_path, keep=2) as (checkpoints, _):
        for epoch in range(1, 6):
            run.epoch = epoch
            train(run, 1)
            checkpoints.save(run.state_dict())
            if epoch in (1, 2):
                best = copy.deepcopy(run.state_dict())
                checkpoints.mark_best(run, 0.5)
        checkpoints.finish()
    files = ["best.pt", "epoch-004-step-000007.pt", "epoch-005-step-000008.pt"]
    assert names(tmp_path) == files
    plain = torch.load(tmp_path / "best.pt", weights_only=True)
    assert plain["epoch"] == 2
    assert same(dict(plain["model"]), dict(best["model"]))
    model = build_run(seed=1).model
    assert model.load_state_dict(plain["model"]) == model.load_state_dict(best["model"])


def mark_best(checkpoints, epoch: int, step: int) -> None:
    checkpoints.mark_best(
        SimpleNamespace(epoch=epoch, step=step, best_accuracy=0.0), 0.5
    )


def test_the_best_one_that_is_lost(tmp_path, rank0, caplog):
    """What beats all on disk is the best, even if one was better but not written."""
    run, run.epoch, run.step = build_run(), 1, 1
    with opened(tmp_path) as (checkpoints, _):
        for epoch, accuracy in [(1, 0.5), (2, 0.7), (3, 0.6)]:
            run.epoch = epoch
            if accuracy != 0.7:
                checkpoints.save(run.state_dict())
            if accuracy > run.best_accuracy:
                checkpoints.mark_best(run, accuracy)
            checkpoints.finish()
    assert run.best_accuracy == 0.6
    assert (tmp_path / "best.pt").samefile(tmp_path / "epoch-003-step-000001.pt")


def test_the_best_one_cannot_be_marked(tmp_path, rank0, caplog):
    """An error says so; the checkpoint itself is there, and the training ends well."""
    run, run.epoch, run.step = build_run(), 1, 1
    (tmp_path / "best.pt").mkdir()
    with opened(tmp_path) as (checkpoints, _):
        checkpoints.save(run.state_dict())
        checkpoints.mark_best(run, 0.5)
        checkpoints.finish()
    assert run.best_accuracy == 0.0
    assert f"error: cannot write {tmp_path / 'best.pt'}: " in caplog.text
    assert names(tmp_path) == ["best.pt", "epoch-001-step-000001.pt"]


def test_the_best_one_is_there_once_on_disk(tmp_path, rank0):
    """Marking writes no bytes, and an unfinished one of before is no obstacle."""
    with opened(tmp_path) as (checkpoints, _):
        (tmp_path / "best.pt").write_text("an older one")
        checkpoints.save(draw(1, 1))
        mark_best(checkpoints, 1, 1)
        checkpoints.finish()
    assert (tmp_path / "best.pt").samefile(tmp_path / "epoch-001-step-000001.pt")


def test_an_unfinished_mark_is_not_written_through(tmp_path, rank0):
    """It may be the same file as a checkpoint."""
    with opened(tmp_path) as (checkpoints, _):
        checkpoints.save(draw(1, 1))
        checkpoints.finish()
        os.link(tmp_path / "epoch-001-step-000001.pt", tmp_path / "best.pt.partial")
        checkpoints.save(draw(1, 2))
        mark_best(checkpoints, 1, 2)
        checkpoints.finish()
    assert (
        torch.load(tmp_path / "epoch-001-step-000001.pt", weights_only=True)["step"]
        == 1
    )
    assert (tmp_path / "best.pt").samefile(tmp_path / "epoch-001-step-000002.pt")


def test_an_old_one_that_cannot_be_removed(tmp_path, rank0, caplog):
    """That is no failure of the new one."""
    with opened(tmp_path, keep=1) as (checkpoints, _):
        (tmp_path / "epoch-001-step-000001.pt").mkdir()  # which is no file to unlink
        checkpoints.save(draw(1, 2))
        checkpoints.finish()
    (line,) = warnings(caplog)
    assert (
        line.startswith("warning: cannot remove an old checkpoint: ")
        and "step-000001.pt" in line
    )
    assert (tmp_path / "epoch-001-step-000002.pt").is_file()


# Interrupted writing


def save_without_end(folder: Path) -> None:
    state = draw(1, 0, kilobytes=64 * 1024)
    with opened(folder, keep=100) as (checkpoints, _):
        while True:
            state["step"] += 1
            checkpoints.save(state)


def test_killed_while_writing(tmp_path, rank0, caplog):
    """After a kill, what has a checkpoint's name is whole; the next start tidies up."""
    for attempt in range(10):
        folder = tmp_path / str(attempt)
        process = forkserver().Process(
            target=run_rank, args=(0, 1, tmp_path, save_without_end, (folder,))
        )
        (tmp_path / "store").unlink(missing_ok=True)
        process.start()
        deadline = time.monotonic() + 60
        while not list(folder.glob("*2.pt.partial")):
            assert time.monotonic() < deadline and process.is_alive()
        process.kill()
        process.join()
        left = names(folder)
        state = load(folder)
        assert not warnings(caplog)
        assert names(folder) == [name for name in left if name.endswith(".pt")]
        assert f"epoch-001-step-{state['step']:06}.pt" == names(folder)[-1]
        shutil.rmtree(folder)
        if "epoch-001-step-000002.pt.partial" in left:
            return
    pytest.fail("never killed in the middle of a file")


def test_leftovers_of_a_killed_run_are_removed(tmp_path, rank0):
    for name in ("epoch-001-step-000002.pt", "best.pt", "writable"):
        (tmp_path / f"{name}.partial").write_bytes(b"half")
    assert load(tmp_path) is None
    assert names(tmp_path) == []


# Damage


def flip(path: Path, byte: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 1 << bit
    path.write_bytes(content)


def find_data(path: Path) -> int:
    """Return where in a file the bytes of its largest tensor begin."""
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda info: info.file_size)
    header = path.read_bytes()[largest.header_offset :][:30]
    name, extra = (int.from_bytes(header[i : i + 2], "little") for i in (26, 28))
    return largest.header_offset + 30 + name + extra


def find_name(path: Path) -> int:
    """Return where in a file the name of its weights is written."""
    return path.read_bytes().index(b"weight")


DAMAGE = {
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "cut by a byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "emptied": lambda path: os.truncate(path, 0),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "bit of a weight": lambda path: flip(path, find_data(path) + 101),
    "bit of a name": lambda path: flip(path, find_name(path)),
    "text": lambda path: path.write_text("not a checkpoint\n"),
    "another torch file": lambda path: torch.save([1, 2], path),
    "no checksum": lambda path: torch.save(draw(1, 2), path),
    "another checksum": lambda path: torch.save(
        draw(1, 2) | {"sha256": "0" * 64}, path
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged(damage, tmp_path, rank0, caplog):
    """The one before is used, and one line says which file is damaged, and how.

    The file stays for a look at it.
    """
    older, newer = draw(1, 1), draw(1, 2)
    write(tmp_path, older, newer)
    newest = tmp_path / "epoch-001-step-000002.pt"
    DAMAGE[damage](newest)
    assert same(load(tmp_path), older)
    (line,) = warnings(caplog)
    head = f"warning: {newest} is damaged, trying the one before: "
    assert line.startswith(head) and len(line) > len(head) + 3 and "\n" not in line
    if damage == "bit of a weight":
        assert line == f"{head}its content does not match its SHA-256"
    assert names(tmp_path) == [
        "epoch-001-step-000001.pt",
        "epoch-001-step-000002.pt.damaged",
    ]
    # The next start finds nothing to complain of,
    # and the run comes by the same step again.
    assert same(load(tmp_path), older)
    write(tmp_path, newer)
    assert same(load(tmp_path), newer)
    assert not warnings(caplog)


def test_any_flipped_bit(tmp_path, rank0, caplog):
    """Wherever a bit is flipped, what was saved is loaded, or the checkpoint before."""
    older, newer = draw(1, 1), draw(1, 2)
    write(tmp_path, older, newer)
    newest = tmp_path / "epoch-001-step-000002.pt"
    whole, rng = newest.read_bytes(), random.Random(0)
    fallen_back = 0
    for byte in sorted(rng.sample(range(len(whole)), 400)):
        newest.write_bytes(whole)
        flip(newest, byte, rng.randrange(8))
        state = load(tmp_path)
        fallen_back += same(state, older)
        assert same(state, newer if newest.exists() else older), f"byte {byte}"
        assert len(warnings(caplog)) == (not newest.exists())
        (tmp_path / "epoch-001-step-000002.pt.damaged").unlink(missing_ok=True)
    # The weights are a fifth of the file, and all of theirs count.
    assert fallen_back > 100


def test_a_disk_that_does_not_read(tmp_path, rank0, caplog):
    """The file may be whole: it is kept, and no run goes on from an older one."""
    write(tmp_path, draw(1, 1), draw(1, 2))
    newest = tmp_path / "epoch-001-step-000002.pt"
    newest.unlink()
    newest.symlink_to("/proc/self/mem")  # to read it is an I/O error
    with (
        pytest.raises(
            checkpoint.RunError, match=r"^cannot use .*: Input/output error$"
        ),
        opened(tmp_path),
    ):
        pass
    assert (
        names(tmp_path) == ["epoch-001-step-000001.pt", newest.name]
        and not caplog.messages
    )


def load_with_little_memory(folder: Path) -> str:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 2**25, size + 2**25))
    with pytest.raises(checkpoint.RunError) as caught:
        load(folder)
    return str(caught.value)


def test_a_node_without_memory(tmp_path):
    """That is no fault of the file, either."""
    run_ranks(1, write, tmp_path, draw(1, 1, 2**16), draw(1, 2, 2**16))
    whole = names(tmp_path)
    said = run_ranks(1, load_with_little_memory, tmp_path)
    assert said == [f"cannot use {tmp_path}: Cannot allocate memory"]
    assert names(tmp_path) == whole


@pytest.mark.parametrize("entry", ["recipe", "epoch", "step", "global_batch_size"])
def test_a_file_without(entry, tmp_path, rank0, caplog):
    """It is no checkpoint, whatever its name."""
    state = draw(1, 2)
    del state[entry]
    write(tmp_path, draw(1, 1))
    torch.save(
        state | {"sha256": checkpoint.digest(state)},
        tmp_path / "epoch-001-step-000002.pt",
    )
    with opened(tmp_path) as (_, newest):
        assert (newest["epoch"], newest["step"]) == (1, 1)
    assert f"trying the one before: it has no {entry}" in caplog.text


def test_two_damaged(tmp_path, rank0, caplog):
    write(tmp_path, draw(1, 1), draw(1, 2), draw(1, 3))
    for step in (2, 3):
        os.truncate(tmp_path / f"epoch-001-step-{step:06}.pt", 100)
    assert load(tmp_path)["step"] == 1
    assert [re.findall(r"step-(\d+)", line) for line in warnings(caplog)] == [
        ["000003"],
        ["000002"],
    ]


def test_all_damaged(tmp_path, rank0):
    """No run begins anew in silence, also the next time, until someone has looked."""
    write(tmp_path, draw(1, 1), draw(1, 2))
    for path in tmp_path.glob("*.pt"):
        os.truncate(path, 100)
    for _ in range(2):
        with pytest.raises(checkpoint.RunError) as refusal:
            load(tmp_path)
        assert str(refusal.value) == (
            f"no whole checkpoint is left in {tmp_path}: "
            "remove the damaged ones there to start anew"
        )
    for path in tmp_path.glob("*.damaged"):
        path.unlink()
    assert load(tmp_path) is None


class Command:
    """Pickled, this is a call of os.system when it is loaded."""

    def __init__(self, command: str):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("form", ["torch.save", "pickle"])
def test_code_is_not_run(form, tmp_path, rank0, caplog):
    """A file with code in it, as pickle allows, is damaged, and its code is not run."""
    write(tmp_path, draw(1, 1))
    state = draw(1, 2) | {"optimizer": Command(f"touch '{tmp_path}/executed'")}
    path = tmp_path / "epoch-001-step-000002.pt"
    if form == "pickle":
        path.write_bytes(pickle.dumps(state))
    else:
        torch.save(state, path)
    assert load(tmp_path)["step"] == 1
    (line,) = warnings(caplog)
    assert str(path) in line and "weights only" in line.lower()
    assert "set to `False`" not in line  # torch's advice is to load it all the same
    assert "executed" not in names(tmp_path)


# Another run's checkpoint


@pytest.mark.parametrize(
    "recipe, difference",
    [
        (RECIPE | {"seed": 1}, "seed 0, not 1"),
        (RECIPE | {"model": "resnet50"}, "model tiny, not resnet50"),
        (RECIPE | {"seed": 1, "batch_size": 8}, "seed 0, not 1; batch_size 4, not 8"),
        (RECIPE | {"accumulate": 1}, "accumulate None, not 1"),  # of an older main.py
        ({"model": "tiny", "seed": 0}, "batch_size 4, not None"),
    ],
)
def test_another_recipe(recipe, difference, tmp_path, rank0):
    """No run goes on with other settings; what differs is said, and the files stay."""
    write(tmp_path, draw(1, 1))
    with pytest.raises(checkpoint.RunError) as refusal:
        load(tmp_path, recipe)
    path = tmp_path / "epoch-001-step-000001.pt"
    assert str(refusal.value) == (
        f"{path} is of another run, with {difference}: "
        "go on as it began, or choose another --checkpoint-dir"
    )
    assert load(tmp_path)["step"] == 1


def test_recipe():
    """What may not change during a run, and only that: workers and ranks, say, may."""
    settings = {
        "model": "resnet18",
        "image_size": 32,
        "epochs": 3,
        "batch_size": 4,
        "accumulate": 2,
        "learning_rate": 0.1,
        "weight_decay": 0.0,
        "seed": 1,
        "sync_batchnorm": False,
    }
    others = {
        "workers": 3,
        "compile": True,
        "keep": 9,
        "timeout": 5,
        "save_steps": 2,
        "data_dir": "elsewhere",
    }
    data = type(
        "Data",
        (),
        {"__len__": lambda self: 99, "pictures": SimpleNamespace(fingerprint="1a2b")},
    )
    recipe = checkpoint.get_recipe(SimpleNamespace(**settings, **others), data())
    assert recipe == settings | {"samples": 99, "fingerprint of the data": "1a2b"}


def lose(run, state):
    del state["model"]["3.bias"]
    return "3.bias"


def add(run, state):
    state["model"]["4.weight"] = torch.ones(2)
    return "4.weight"


def reshape(run, state):
    state["model"]["3.weight"] = torch.ones(5, 17)
    return "[5, 17]"


def lose_all(run, state):
    del state["optimizer"]
    return "optimizer"


def regroup(run, state):
    parameters = list(run.model.parameters())
    run.optimizer = torch.optim.SGD(
        [{"params": parameters[:2]}, {"params": parameters[2:]}], lr=0.1
    )
    return "group"


def empty_optimizer(run, state):
    state["optimizer"]["state"] = {}
    return "optimizer's state"


def lose_momentum(run, state):
    del state["optimizer"]["state"][2]
    return "optimizer's state"


def reshape_momentum(run, state):
    state["optimizer"]["state"][2]["momentum_buffer"] = torch.ones(7)
    return "optimizer's state"


@pytest.mark.parametrize(
    "change",
    [
        lose,
        add,
        reshape,
        lose_all,
        regroup,
        empty_optimizer,
        lose_momentum,
        reshape_momentum,
    ],
)
def test_a_checkpoint_that_does_not_fit(change, tmp_path, rank0):
    """One line refuses it, and names what is missing, too many, or of another shape."""
    run = build_run()
    state = copy.deepcopy(run.state_dict())
    name = change(run, state)
    with pytest.raises(checkpoint.RunError) as refusal:
        run.load_state_dict(state)
    line = str(refusal.value)
    assert (
        line.startswith("the checkpoint does not fit --model tiny: ") and name in line
    )
    assert "\n" not in line and len(line) < 400


def test_a_lock_is_waited_for(tmp_path, rank0, caplog):
    """A job just killed may still hold the folder: its successor says so, and waits."""
    write(tmp_path, draw(1, 1))
    log = tmp_path / "said"
    ready, held = multiprocessing.Pipe(duplex=False)
    holder = forkserver().Process(target=hold, args=(tmp_path, held, log))
    holder.start()
    assert ready.poll(60) and ready.recv() == "held"
    (line,) = load_and_say(tmp_path, log, caplog)
    assert (
        line
        == f"warning: another run writes to {tmp_path}: waiting a minute for its end"
    )
    holder.join(30)
    assert holder.exitcode == 0


def hold(folder: Path, held, log: Path) -> None:
    """Hold the lock of a folder until whoever waits for it has said so."""
    with open(folder / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        held.send("held")
        deadline = time.monotonic() + 60
        while not log.exists() and time.monotonic() < deadline:
            time.sleep(0.01)


def load_and_say(folder: Path, log: Path, caplog) -> list[str]:
    """Load, and make the file `log` when something is said."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: log.touch()
    checkpoint.logger.addHandler(handler)
    try:
        assert load(folder)["step"] == 1
    finally:
        checkpoint.logger.removeHandler(handler)
    return warnings(caplog)


def test_a_job_array_does_not_share_a_folder(monkeypatch):
    """Each job has a folder of its own, also after Slurm has started it again."""
    for name in ("SCRATCH", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    assert checkpoint.default_checkpoint_dir() == Path("checkpoints/none")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a/b")
    assert checkpoint.default_checkpoint_dir() == Path("checkpoints/a-b")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert checkpoint.default_checkpoint_dir() == Path("checkpoints/17")
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    assert checkpoint.default_checkpoint_dir() == Path("/scratch/me/checkpoints/17")


def test_work_dir(tmp_path, monkeypatch, rank0):
    """Checkpoints go where the job was submitted, even if its code runs from a copy."""
    monkeypatch.setenv("WORK_DIR", str(tmp_path / "submitted from"))
    write(Path("checkpoints"), draw(1, 1))
    assert names(tmp_path / "submitted from" / "checkpoints") == [
        "epoch-001-step-000001.pt"
    ]
    write(tmp_path / "absolute", draw(1, 1))
    assert names(tmp_path / "absolute") == ["epoch-001-step-000001.pt"]


# Folders that cannot be used


def test_read_only_folder(tmp_path, rank0):
    """It is found out at the start, not at the first checkpoint hours later."""
    folder = tmp_path / "read only"
    with mounted(folder, "ro"):
        with pytest.raises(
            checkpoint.RunError, match="Read-only file system"
        ) as refusal:
            load(folder)
        assert str(folder) in str(refusal.value)


def test_folder_that_becomes_read_only(tmp_path, rank0):
    """The same where there are checkpoints to go on from."""
    folder = tmp_path / "read only"
    with mounted(folder, "size=1m"):
        write(folder, draw(1, 1))
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True, timeout=20)
        with pytest.raises(
            checkpoint.RunError, match="Read-only file system"
        ) as refusal:
            load(folder)
        assert str(folder) in str(refusal.value)


@pytest.mark.parametrize("inside", ["", "checkpoints"])
def test_folder_that_is_a_file(inside, tmp_path, rank0):
    (tmp_path / "file").touch()
    with pytest.raises(checkpoint.RunError) as refusal:
        load(tmp_path / "file" / inside)
    assert str(tmp_path / "file") in str(refusal.value)


# A full disk


def test_full_disk(small_disk, rank0, caplog):
    """A checkpoint that does not fit is an error in the log; older ones stay whole."""
    # None is removed to make room for the next.
    with opened(small_disk, keep=3) as (checkpoints, _):
        for step in (1, 2, 3):
            checkpoints.save(draw(1, step, kilobytes=300))
        checkpoints.finish()
        for step in (4, 5):
            checkpoints.save(draw(1, step, kilobytes=300))
            with pytest.raises(
                checkpoint.RunError,
                match="the last checkpoint is not on disk: cannot write ",
            ):
                checkpoints.finish()
            (line,) = warnings(caplog)
            path = small_disk / f"epoch-001-step-{step:06}.pt"
            assert line.startswith(f"error: cannot write {path}: ")
            assert (
                line.endswith("; training goes on, the checkpoints before it stay")
                and "\n" not in line
            )
        assert names(small_disk) == [
            f"epoch-001-step-{step:06}.pt" for step in (1, 2, 3)
        ]
        # Someone makes room: the next one is written, and all is well.
        (small_disk / "epoch-001-step-000001.pt").unlink()
        checkpoints.save(draw(1, 6, kilobytes=300))
        checkpoints.finish()
    assert not warnings(caplog)
    assert same(load(small_disk), draw(1, 6, kilobytes=300))


def fill(folder: Path) -> None:
    """Leave no byte of room in a file system."""
    file = os.open(folder / "filler", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with pytest.raises(OSError) as full:
        while True:
            os.write(file, bytes(4096))
    os.close(file)
    assert full.value.errno == errno.ENOSPC


def test_full_disk_at_the_start(small_disk, rank0):
    """It is refused in a line that says where there is no room left."""
    with opened(small_disk):
        pass
    (
        small_disk / "starts"
    ).unlink()  # its next line would have room in the block of the first
    fill(small_disk)
    with pytest.raises(checkpoint.RunError, match="No space left") as refusal:
        load(small_disk)
    assert str(small_disk) in str(refusal.value)


def finish_on_full_disk(folder: Path) -> list[str]:
    """Return what load() in a file's folder and finish() on a full disk tell ranks."""
    told = []
    for place in (folder / "file", folder):
        checkpoints = checkpoint.Checkpoints(place, 9)
        try:
            checkpoints.load(RECIPE)
            checkpoints.save(draw(1, 1, kilobytes=2000))
            # It is not there: no second failure hides the first.
            mark_best(checkpoints, 1, 1)
            checkpoints.finish()
        except checkpoint.RunError as error:
            told.append(str(error))
    return told


def test_every_rank_is_told(small_disk):
    """What only rank 0 sees ends all ranks, with the same words: none waits."""
    (small_disk / "file").touch()
    first, second = run_ranks(2, finish_on_full_disk, small_disk)
    assert first == second
    assert [
        line.startswith("the last checkpoint is not on disk: ") for line in first
    ] == [False, True]
    assert str(small_disk / "file") in first[0]
    assert first[1].endswith(
        "epoch-001-step-000001.pt: [Errno 28] No space left on device"
    )


def finish_slowly(folder: Path) -> list[str]:
    """Write for longer than ranks wait for each other."""
    checkpoints = checkpoint.Checkpoints(folder, 9)
    checkpoints.load(RECIPE)
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), dist.group.WORLD)
    write, start = checkpoints._write, time.monotonic()

    def write_slowly(state: dict) -> None:
        time.sleep(6)  # a disk that takes so long
        write(state)

    checkpoints._write = write_slowly
    checkpoints.save(draw(1, 1))
    mark_best(checkpoints, 1, 1)
    dist.barrier()  # marking does not make rank 0 late
    assert time.monotonic() - start < 3
    checkpoints.save(draw(1, 2))  # which has to wait for the first one
    checkpoints.finish()
    return names(folder)


def test_a_slow_disk_is_no_rank_that_hangs(tmp_path):
    files = ["best.pt", "epoch-001-step-000001.pt", "epoch-001-step-000002.pt"]
    assert run_ranks(2, finish_slowly, tmp_path)[0] == files


def load_while_locked(folder: Path) -> int:
    """Begin while another run holds the folder, for longer than ranks wait."""
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), dist.group.WORLD)
    if dist.get_rank() == 0:
        lock = open(folder / "lock", "a")
        fcntl.flock(lock, fcntl.LOCK_EX)
        threading.Timer(6, lock.close).start()
    return checkpoint.Checkpoints(folder, 9).load(RECIPE)["step"]


def test_a_slow_start_is_no_rank_that_hangs(tmp_path, rank0):
    write(tmp_path, draw(1, 7))
    assert run_ranks(2, load_while_locked, tmp_path) == [7, 7]


def load_on_ranks(folder: Path) -> tuple:
    checkpoints = checkpoint.Checkpoints(folder, 9)
    state = checkpoints.load(RECIPE)
    age = checkpoints.age()
    # Ranks other than 0 may call all this, and it does nothing.
    checkpoints.save(draw(1, 10 + dist.get_rank()))
    mark_best(checkpoints, 1, 10)
    checkpoints.finish()
    return state, age


def test_every_rank_goes_on_from_the_same_one(tmp_path):
    """Rank 0 reads and writes for all."""
    run_ranks(1, write, tmp_path, draw(1, 1), draw(1, 2))
    os.truncate(tmp_path / "epoch-001-step-000002.pt", 100)
    results = run_ranks(3, load_on_ranks, tmp_path)
    assert all(same(state, draw(1, 1)) for state, _ in results)
    assert [age == 0 for _, age in results] == [False, True, True]
    files = [
        "epoch-001-step-000001.pt",
        "epoch-001-step-000002.pt.damaged",
        "epoch-001-step-000010.pt",
    ]
    assert names(tmp_path) == ["best.pt", *files]


# Weights that are not finite


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(value, tmp_path, rank0, caplog):
    """They are not written over good ones, not even as the last of several to keep."""
    with opened(tmp_path, keep=1) as (checkpoints, _):
        checkpoints.save(draw(1, 1))
        broken = draw(1, 2)
        broken["model"]["weight"][17] = value
        checkpoints.save(broken)
        with pytest.raises(checkpoint.RunError, match="the weights are not finite"):
            checkpoints.finish()
    assert len(warnings(caplog)) == 1
    assert names(tmp_path) == ["epoch-001-step-000001.pt"]


# The digest


def test_digest_of_the_same():
    """It tells what the numbers are, not how they lie in memory or on which device."""
    weights = torch.randn(2, 3, 4, 5)
    tree = {
        "weights": weights,
        "more": [1, 2.5, "text", None, {"empty": torch.ones(0, 3)}],
    }
    right = checkpoint.digest(tree)
    assert re.fullmatch("[0-9a-f]{64}", right)
    layouts = [
        weights.clone(),
        weights.to(memory_format=torch.channels_last),
        weights.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        torch.stack([weights, weights], dim=-1)[..., 0],
        nn.Parameter(weights),
    ]
    if torch.cuda.is_available():
        layouts.append(weights.cuda())
    assert [checkpoint.digest(tree | {"weights": layout}) for layout in layouts] == [
        right
    ] * len(layouts)
    for dtype in (torch.bfloat16, torch.bool, torch.uint8, torch.int64, torch.float64):
        assert checkpoint.digest(torch.ones(2, dtype=dtype)) == checkpoint.digest(
            torch.ones(2, dtype=dtype)
        )
    assert checkpoint.digest(torch.tensor(1.0)) == checkpoint.digest(torch.tensor(1.0))


def test_digest_of_others():
    """Names, order, shapes, types and every single byte count."""
    weights = torch.arange(6, dtype=torch.float32)
    trees = [
        {"a": weights},
        {"b": weights},
        {"a": weights, "b": weights},
        {"b": weights, "a": weights},
        {"a": weights.view(2, 3)},
        {"a": weights.view(3, 2)},
        {"a": weights.double()},
        {"a": weights.view(torch.int32)},
        {"a": weights.flip(0)},
        {"a": {"a": weights}},
        {"a": [weights]},
        {"a": -weights * 0},
        {"a": weights * 0},
        {"a": 1},
        {"a": 1.0},
        {"a": "1"},
        {"a": True},
        {"a": None},
    ]
    for byte in range(24):
        changed = weights.clone()
        changed.view(torch.uint8)[byte] ^= 1
        trees.append({"a": changed})
    assert len({checkpoint.digest(tree) for tree in trees}) == len(trees)


def test_digest_after_a_file(tmp_path):
    """It stays the same through torch.save and torch.load."""
    run = build_run()
    state = checkpoint.copy_to_cpu(run.state_dict())
    torch.save(state, tmp_path / "file.pt")
    loaded = torch.load(tmp_path / "file.pt", weights_only=True)
    assert (
        checkpoint.digest(loaded)
        == checkpoint.digest(state)
        == checkpoint.digest(run.state_dict())
    )


# How a job ends and starts again


def test_a_job_that_never_gets_on(tmp_path, rank0, monkeypatch):
    """After many starts from the same place, it gives up, and says what it knows."""
    for restarts in range(checkpoint.STARTS):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
        assert load(tmp_path) is None
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(checkpoint.STARTS))
    for _ in range(2):
        with pytest.raises(checkpoint.RunError) as refusal:
            load(tmp_path)
        line = str(refusal.value)
        assert line.startswith(
            f"this job was started {checkpoint.STARTS} times "
            "from the beginning and never"
        )
        assert str(tmp_path / "starts") in line
    # Someone has found out why, and submits it again as a new job.
    monkeypatch.delenv("SLURM_RESTART_COUNT")
    write(tmp_path, draw(1, 7))
    # A place further on counts anew; a place that only some of the starts had
    # is no reason to stop.
    for restarts in range(checkpoint.STARTS, 2 * checkpoint.STARTS):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
        assert load(tmp_path)["step"] == 7
    with pytest.raises(checkpoint.RunError, match="from epoch 1 step 7 and never"):
        load(tmp_path)


def test_starts_are_told_with_their_times(tmp_path, rank0):
    """The refusal says that the file has the times of the starts."""
    load(tmp_path)
    (line,) = (tmp_path / "starts").read_text().splitlines()
    assert line.startswith("the beginning")
    assert re.search(r"\d\d:\d\d|\d{9,}", line), line


def test_signals_are_noted(tmp_path):
    """SIGUSR1 and SIGTERM end no training by themselves, however often they come."""
    (before, after, mark) = run_ranks(1, catch_signals, tmp_path / "node's disk")[0]
    assert (before, after, mark) == (False, {"SIGUSR1": True, "SIGTERM": True}, True)


def catch_signals(folder: Path) -> tuple:
    os.environ["SLURM_TMPDIR"] = str(folder)
    checkpoint.catch_stop_signals()
    before, after = checkpoint.stop_requested(), {}
    for number in (signal.SIGUSR1, signal.SIGTERM):
        checkpoint._stop_signals.clear()
        for _ in range(3):
            os.kill(os.getpid(), number)
        after[number.name] = checkpoint.stop_requested()
    # The file that tells job.sh that signals may be passed on.
    mark = folder / "none.training"
    return before, after, checkpoint.training_mark() == mark and mark.exists()


def test_workers_ignore_signals():
    """What ends a job must not end what loads the data first; SIGKILL still does."""
    assert run_ranks(1, ignore_signals) == ["still there"]


def ignore_signals() -> str:
    checkpoint.ignore_signals(3)
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
    return "still there"


def test_outside_a_job(monkeypatch, tmp_path):
    """Without Slurm, there is no time limit, no mark, and nothing about requeues."""
    monkeypatch.delenv("SLURM_TMPDIR", raising=False)
    assert checkpoint.training_mark() is None
    assert run_ranks(2, ask_for_requeues) == [["", "", ""], ["", "", ""]]


def ask_for_requeues() -> list[str]:
    told = [checkpoint.requeues_to_go(1000, 0.0)]
    os.environ["SLURM_CONF"] = "/nowhere"
    # squeue, where there is one, knows no cluster.
    told.append(checkpoint.requeues_to_go(1000, 10.0))
    os.environ["PATH"] = "/nowhere"
    told.append(checkpoint.requeues_to_go(1000, 10.0))
    return told


def test_commit(tmp_path, monkeypatch):
    """The commit that runs is told in full, marked if files differ; never as a tag."""
    monkeypatch.delenv("GIT_COMMIT", raising=False)
    folder = tmp_path / "a repository" / "imagenet"
    folder.mkdir(parents=True)
    shutil.copy(REPOSITORY / "imagenet" / "checkpoint.py", folder)
    spec = importlib.util.spec_from_file_location(
        "copied_checkpoint", folder / "checkpoint.py"
    )
    copied = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copied)

    def git(*command: str) -> str:
        name = ["-c", "user.name=tests", "-c", "user.email=tests"]
        done = subprocess.run(
            ["git", *name, *command],
            cwd=folder,
            check=True,
            capture_output=True,
            text=True,
            timeout=20,
        )
        return done.stdout.strip()

    assert copied.commit() == "unknown"
    git("init", "-q")
    git("add", "checkpoint.py")
    git("commit", "-qm", "One")
    git("tag", "-a", "v1", "-m", "One")
    head = git("rev-parse", "HEAD")
    assert len(head) == 40
    # The folder that counts is the code's, not the one it is called from.
    monkeypatch.chdir(tmp_path)
    assert copied.commit() == head
    (folder / "slurm-1.out").write_text("untracked files are no change of the code")
    assert copied.commit() == head
    with open(folder / "checkpoint.py", "a") as file:
        file.write("# changed\n")
    assert copied.commit() == f"{head}-dirty"
    # As safe_sbatch does, whose tree this would be a copy of.
    monkeypatch.setenv("GIT_COMMIT", "f" * 40)
    assert copied.commit() == "f" * 40
    monkeypatch.setenv("PATH", "/nowhere")
    assert copied.commit() == "f" * 40
    monkeypatch.delenv("GIT_COMMIT")
    assert copied.commit() == "unknown"


# The order of DDP's sums


def settle() -> tuple:
    model = build_run(seed=2).model
    before = copy.deepcopy(model.state_dict())
    pictures = nn.Sequential(nn.AdaptiveAvgPool2d(4), model)
    ddp_model = nn.parallel.DistributedDataParallel(pictures)
    checkpoint.settle_buckets(ddp_model, 4, 8)
    gradients = [
        p.grad for p in model.parameters() if p.grad is not None and p.grad.any()
    ]
    return same(dict(before), dict(model.state_dict())), len(gradients)


def test_settling_leaves_no_trace():
    """Weights, BatchNorm's statistics and gradients are as they were."""
    assert run_ranks(2, settle) == [(True, 0), (True, 0)]
