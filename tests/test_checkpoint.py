"""What imagenet/checkpoint.py writes, reads back and refuses: real files and damage.

One rank is this process, in a process group of its own; several are processes (gloo).
Folders that are full or read-only are file systems mounted for it.
"""

import copy
import fcntl
import importlib
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
import time
import zipfile
from contextlib import contextmanager, suppress
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
    if dist.is_initialized():  # main.py leaves it
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


def draw(epoch: int, step: int, kilobytes: int = 1) -> checkpoint.Run:
    """Return a run at this step, whose checkpoint has about this size."""
    model = nn.Linear(256 * kilobytes, 1, bias=False)
    nn.init.constant_(model.weight, step)
    optimizer = torch.optim.SGD(model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)
    return checkpoint.Run(model, optimizer, scheduler, RECIPE, 4, epoch, step)


def is_from(state: dict, epoch: int, step: int) -> bool:
    """Return whether this is all of what `draw` drew."""
    return (state["epoch"], state["step"]) == (epoch, step) and bool(
        (state["model"]["weight"] == step).all()
    )


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
        if hasattr(checkpoints, "lock"):
            checkpoints.lock.close()


def load(folder: Path, recipe: dict = RECIPE) -> dict | None:
    with opened(folder, recipe=recipe) as (_, state):
        return state


def write(folder: Path, *places: tuple, keep: int = 3) -> None:
    """Make checkpoints of these epochs, steps and sizes."""
    with opened(folder, keep) as (checkpoints, _):
        for place in places:
            checkpoints.save(draw(*place))


def refused(function, *arguments) -> str:
    """Return the one line with which a function ends the run."""
    with pytest.raises(checkpoint.RunError) as refusal:
        function(*arguments)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def names(folder: Path) -> list[str]:
    """Return the checkpoints in a folder, and what else is there of them."""
    return sorted(path.name for path in folder.iterdir() if path.name != "lock")


def files(*places: tuple) -> list[str]:
    """Return the names of the checkpoints of these epochs and steps."""
    return [f"epoch-{epoch:03}-step-{step:06}.pt" for epoch, step in places]


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
    with opened(tmp_path) as (checkpoints, _):
        checkpoints.save(run)
    train(run, 4)

    resumed = build_run(seed=1, steps=0)
    resumed.load_state_dict(load(tmp_path))
    assert (resumed.epoch, resumed.step, resumed.best_accuracy) == (2, 5, 0.25)
    assert resumed.metrics.tolist() == pytest.approx([0.5, 5, 20])
    assert resumed.model[0].weight.is_contiguous(memory_format=torch.channels_last)
    train(resumed, 4)
    assert same(resumed.state_dict(), run.state_dict())


def test_nothing_there(tmp_path, rank0, caplog):
    """The first start makes the folder, and begins with the first step."""
    assert load(tmp_path / "a folder" / "of its own") is None
    assert names(tmp_path / "a folder" / "of its own") == []
    assert not warnings(caplog)


def test_the_last_ones_are_kept(tmp_path, rank0):
    """Those of the highest epochs and steps, whatever the number of digits."""
    write(tmp_path, (1, 5), (1, 10), (2, 1), (2, 2), keep=2)
    assert names(tmp_path) == files((2, 1), (2, 2))
    write(tmp_path, (999, 1), (1000, 999_999), (1000, 1_000_000), keep=2)
    assert names(tmp_path) == files((1000, 1_000_000), (1000, 999_999))
    assert is_from(load(tmp_path), 1000, 1_000_000)


def test_the_best_one_stays(tmp_path, rank0):
    """best.pt outlives its file, and torch.load reads it."""
    run = draw(1, 1)
    with opened(tmp_path, keep=1) as (checkpoints, _):
        for epoch, accuracy in [(1, 0.3), (2, 0.5), (3, None)]:
            run.epoch = epoch
            checkpoints.save(run)
            if accuracy:
                checkpoints.save_if_best(run, accuracy)
    assert run.best_accuracy == 0.5
    assert names(tmp_path) == ["best.pt", *files((3, 1))]
    assert is_from(torch.load(tmp_path / "best.pt", weights_only=True), 2, 1)


def test_got_further(tmp_path, rank0, monkeypatch):
    """job.sh finds its file once a checkpoint is further than where the start began.

    A run that was killed at the end of an epoch writes best.pt once more.
    """
    folder, further = tmp_path / "checkpoints", tmp_path / "further"
    write(folder, (1, 1))
    monkeypatch.setenv("GOT_FURTHER", str(further))
    with opened(folder) as (checkpoints, _):
        checkpoints.save(draw(1, 1))
        checkpoints.save_if_best(draw(1, 1), 0.5)
        assert not further.exists()
        checkpoints.save(draw(1, 2))
        assert further.exists()


def test_time_of_the_last_one(tmp_path, rank0):
    """The time between checkpoints is from the end of one on."""
    with opened(tmp_path) as (checkpoints, _):
        before = checkpoints.saved_at
        checkpoints.save(draw(1, 1))
        assert before < checkpoints.saved_at <= time.monotonic()


# Interrupted writing


def save_without_end(folder: Path) -> None:
    with opened(folder, keep=2) as (checkpoints, state):
        run = draw(1, state["step"] if state else 0, 2**12)
        while True:
            run.step += 1
            run.model.weight.data += 1
            checkpoints.save(run)


def newest(folder: Path) -> Path:
    return max(folder.glob("*.pt"))


def written(folder: Path) -> int:
    """Return how many bytes of a checkpoint are written, while one is."""
    with suppress(FileNotFoundError):
        return max((p.stat().st_size for p in folder.glob("*.partial")), default=0)
    return 0


@pytest.mark.timeout(300)
def test_killed_while_writing(tmp_path, rank0, caplog):
    """At any moment, what has a checkpoint's name is whole; the next start tidies up.

    Killed 20 times, most times in the middle of a file.
    """
    rng, halfway = random.Random(0), 0
    folder = tmp_path / "checkpoints"
    write(folder, (1, 1))
    for _ in range(20):
        (tmp_path / "store").unlink(missing_ok=True)
        job = (0, 1, tmp_path, save_without_end, (folder,))
        process = forkserver().Process(target=run_rank, args=job)
        before, moment = newest(folder), rng.randrange(2**22)
        process.start()
        while newest(folder) == before or written(folder) < moment:
            assert process.is_alive()
        process.kill()
        process.join()
        halfway += bool(list(folder.glob("*.partial")))
        whole = sorted(folder.glob("*.pt"))
        for path in whole:
            assert is_from(checkpoint.read(path), 1, int(path.stem[-6:]))
        assert is_from(load(folder), 1, int(newest(folder).stem[-6:]))
        assert names(folder) == [path.name for path in whole] and not warnings(caplog)
    assert halfway >= 5


# Damage


def flip(content: bytes, byte: int, bit: int = 0) -> bytes:
    return content[:byte] + bytes([content[byte] ^ 1 << bit]) + content[byte + 1 :]


class Command:
    """Pickled, this is a call of os.system when it is loaded."""

    def __init__(self, command: str):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def command(path: Path) -> dict:
    return draw(1, 2).state_dict() | {"more": Command(f"touch '{path}.executed'")}


DAMAGE = {
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "cut by a byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "emptied": lambda path: os.truncate(path, 0),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "bit of a weight": lambda path: path.write_bytes(
        flip(path.read_bytes(), path.stat().st_size // 2)
    ),
    "text": lambda path: path.write_text("not a checkpoint\n"),
    "code": lambda path: torch.save(command(path), path),
    "code in a pickle": lambda path: path.write_bytes(pickle.dumps(command(path))),
}
REASONS = {
    "bit of a weight": "its content does not match its CRC",
    "code": "it is not made of weights only, and code in it is not run",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged(damage, tmp_path, rank0, caplog):
    """The one before is used, and one line says which file is damaged, and how.

    The file stays for a look at it. Code in it is not run.
    """
    write(tmp_path, (1, 1), (1, 2, 64))
    older, newest = sorted(tmp_path.glob("*.pt"))
    DAMAGE[damage](newest)
    assert is_from(load(tmp_path), 1, 1)
    (line,) = warnings(caplog)
    head = f"warning: {newest} is damaged, trying the one before: "
    assert line == head + REASONS.get(damage, "File is not a zip file")
    assert names(tmp_path) == [older.name, f"{newest.name}.damaged"]
    # The next start finds nothing to complain of,
    # and the run comes by the same step again.
    write(tmp_path, (1, 2))
    assert is_from(load(tmp_path), 1, 2)
    assert not warnings(caplog)


def test_any_flipped_bit(tmp_path, rank0, caplog):
    """Wherever a bit is flipped, what was saved is loaded, or the checkpoint before."""
    write(tmp_path, (1, 1), (1, 2))
    newest, damaged = tmp_path / files((1, 2))[0], f"{files((1, 2))[0]}.damaged"
    whole, right, found = newest.read_bytes(), checkpoint.read(newest), 0
    with zipfile.ZipFile(newest) as file:
        directory = file.start_dir
    rng = random.Random(0)
    anywhere = [(rng.randrange(len(whole)), rng.randrange(8)) for _ in range(500)]
    # The names, places and sizes of all parts of the file.
    all_there = [(n, bit) for n in range(directory, len(whole)) for bit in range(8)]
    for byte, bit in anywhere + all_there:
        newest.write_bytes(flip(whole, byte, bit))
        try:
            assert same(checkpoint.read(newest), right), f"bit {bit} of byte {byte}"
        except ValueError:
            found += 1
            if found % 50 == 0:
                assert is_from(load(tmp_path), 1, 1)
                assert names(tmp_path) == [*files((1, 1)), damaged]
                assert len(warnings(caplog)) == 1
    # Nothing depends on the others: versions, dates, padding.
    assert found > (len(anywhere) + len(all_there)) / 2


def test_all_damaged(tmp_path, rank0, caplog):
    """No run begins anew in silence, also the next time, until someone has looked."""
    write(tmp_path, (1, 1), (1, 2), (1, 3))
    oldest, *others = sorted(tmp_path.glob("*.pt"))
    for path in others:
        os.truncate(path, 100)
    assert is_from(load(tmp_path), 1, 1)
    assert [line.split()[1] for line in warnings(caplog)] == [*map(str, others[::-1])]
    os.truncate(oldest, 100)
    for _ in range(2):
        assert refused(load, tmp_path) == (
            f"no whole checkpoint is left in {tmp_path}: "
            "remove the damaged ones there to start again from the beginning"
        )
    for path in tmp_path.glob("*.damaged"):
        path.unlink()
    assert load(tmp_path) is None


def test_a_disk_that_does_not_read(tmp_path, rank0, caplog):
    """The file may be whole: it is kept, and no run goes on from an older one."""
    write(tmp_path, (1, 1), (1, 2))
    newest = tmp_path / files((1, 2))[0]
    newest.unlink()
    newest.symlink_to("/proc/self/mem")  # to read it is an I/O error
    assert refused(load, tmp_path) == f"cannot use {tmp_path}: Input/output error"
    assert names(tmp_path) == files((1, 1), (1, 2)) and not caplog.messages


def load_with_little_memory(folder: Path, megabytes: int) -> str:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = size + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return refused(load, folder)


@pytest.mark.parametrize("megabytes", [32, 96])
def test_a_node_without_memory(megabytes, tmp_path):
    """To read the file of 64 MB, or to make tensors of it: no fault of the file."""
    run_ranks(1, write, tmp_path, (1, 1), (1, 2, 2**16))
    (said,) = run_ranks(1, load_with_little_memory, tmp_path, megabytes)
    assert said.startswith(f"cannot use {tmp_path}: ")
    assert "Cannot allocate memory" in said
    assert names(tmp_path) == files((1, 1), (1, 2))


# Another run's checkpoint


@pytest.mark.parametrize(
    "recipe, difference",
    [
        (RECIPE | {"seed": 1, "batch_size": 8}, "seed 0, not 1; batch_size 4, not 8"),
        (RECIPE | {"accumulate": 1}, "accumulate None, not 1"),  # of an older main.py
    ],
)
def test_another_recipe(recipe, difference, tmp_path, rank0):
    """No run goes on with other settings; what differs is said, and the files stay."""
    write(tmp_path, (1, 1))
    assert refused(load, tmp_path, recipe) == (
        f"{tmp_path / files((1, 1))[0]} is of another run, with {difference}: "
        "go on as it began, or choose another --checkpoint-dir"
    )
    assert is_from(load(tmp_path), 1, 1)


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
    }
    others = {"workers": 3, "compile": True, "keep": 9, "timeout": 5, "save_steps": 2}
    fingerprint = {"images": SimpleNamespace(fingerprint="1a2b")}
    data = type("Data", (), {"__len__": lambda self: 99} | fingerprint)
    recipe = checkpoint.get_recipe(
        SimpleNamespace(**settings, **others), data(), data()
    )
    assert recipe == settings | {
        "samples": 99,
        "fingerprints of the data": "1a2b 1a2b",
    }


MISFITS = {
    "3.bias": lambda state: state["model"].pop("3.bias"),
    "4.weight": lambda state: state["model"].update({"4.weight": torch.ones(2)}),
    "[5, 17]": lambda state: state["model"].update({"3.weight": torch.ones(5, 17)}),
    "optimizer": lambda state: state.pop("optimizer"),
    "group": lambda state: state["optimizer"]["param_groups"].append({}),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_checkpoint_that_does_not_fit(name):
    """One line refuses it, and names what is missing, too many, or of another shape."""
    run = build_run()
    state = run.state_dict()
    MISFITS[name](state)
    line = refused(run.load_state_dict, state)
    assert line.startswith("the checkpoint does not fit --model tiny: ")
    assert name in line and len(line) < 400


# Folders


def test_another_run_in_the_folder(tmp_path, rank0, monkeypatch):
    """A job that was just killed may hold it a little longer: a minute is waited."""
    write(tmp_path, (1, 1))
    lock, waited = open(tmp_path / "lock", "a"), []
    fcntl.flock(lock, fcntl.LOCK_EX)
    monkeypatch.setattr(time, "sleep", waited.append)
    line = refused(load, tmp_path)
    assert line.startswith(f"another run writes to {tmp_path}: choose another ")
    assert sum(waited) == 60
    monkeypatch.setattr(time, "sleep", lambda seconds: lock.close())
    assert is_from(load(tmp_path), 1, 1)


def test_each_job_has_a_folder(tmp_path, monkeypatch, rank0):
    """Where it was submitted, also if its code runs elsewhere."""
    for name in ("SCRATCH", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    assert checkpoint.default_checkpoint_dir() == Path("checkpoints/none")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    assert checkpoint.default_checkpoint_dir() == Path("checkpoints/a")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("WORK_DIR", str(tmp_path / "submitted from"))
    write(checkpoint.default_checkpoint_dir(), (1, 1))
    assert names(tmp_path / "submitted from/checkpoints/17") == files((1, 1))
    monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
    write(checkpoint.default_checkpoint_dir(), (1, 1))
    assert names(tmp_path / "scratch/checkpoints/17") == files((1, 1))


def test_read_only_folder(tmp_path, rank0):
    """It is found out at the start, not at the first checkpoint hours later."""
    folder = tmp_path / "read only"
    with mounted(folder, "size=1m"):
        write(folder, (1, 1))
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True, timeout=20)
        assert refused(load, folder) == f"cannot use {folder}: Read-only file system"


@pytest.mark.parametrize("inside", ["", "checkpoints"])
def test_folder_that_is_a_file(inside, tmp_path, rank0):
    (tmp_path / "file").touch()
    line = refused(load, tmp_path / "file" / inside)
    assert line.startswith(f"cannot use {tmp_path / 'file' / inside}: ")


def test_folder_that_is_gone(tmp_path, rank0):
    folder = tmp_path / "checkpoints"
    with opened(folder) as (checkpoints, _):
        checkpoints.save(draw(1, 1))
        shutil.rmtree(folder)
        head, path = "cannot write", folder / files((1, 2))[0]
        line = refused(checkpoints.save, draw(1, 2))
        assert line == f"{head} {path}: No such file or directory"
        line = refused(checkpoints.save_if_best, draw(1, 2), 0.5)
        assert line == f"{head} {folder / 'best.pt'}: No such file or directory"


def test_full_disk(small_disk, rank0, monkeypatch):
    """A checkpoint that does not fit ends the run; the ones before stay, and whole."""
    with opened(small_disk) as (checkpoints, _):
        for step in (1, 2, 3):  # none is removed to make room for the next
            checkpoints.save(draw(1, step, 300))
        monkeypatch.setenv("GOT_FURTHER", str(small_disk / "further"))
        path = small_disk / files((1, 4))[0]
        line = refused(checkpoints.save, draw(1, 4, 300))
        assert line == f"cannot write {path}: No space left on device"
        assert names(small_disk) == files((1, 1), (1, 2), (1, 3))
    assert is_from(load(small_disk), 1, 3)
    # Someone makes room.
    (small_disk / files((1, 1))[0]).unlink()
    write(small_disk, (1, 4, 300))
    assert is_from(load(small_disk), 1, 4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(value, tmp_path, rank0):
    """They are not written over good ones, not even as the last of several to keep."""
    with opened(tmp_path, keep=1) as (checkpoints, _):
        checkpoints.save(draw(1, 1))
        broken = draw(1, 2)
        broken.model.weight.data[0, 17] = value
        line = refused(checkpoints.save, broken)
    path = tmp_path / files((1, 2))[0]
    assert line == f"cannot write {path}: the weights are not finite"
    assert names(tmp_path) == files((1, 1))


# Several ranks


def fail_on_rank_0(folder: Path) -> list[str]:
    """Return what ranks are told of what only rank 0 sees."""
    on_a_file = checkpoint.Checkpoints(folder / "file", 9)
    checkpoints = checkpoint.Checkpoints(folder, 9)
    assert checkpoints.load(RECIPE) is None
    return [
        refused(on_a_file.load, RECIPE),
        refused(checkpoints.save, draw(1, 1, 2000)),
        refused(checkpoints.save_if_best, draw(1, 1, 2000), 0.5),
    ]


def test_every_rank_is_told(small_disk):
    """What only rank 0 sees ends all ranks, with the same words: none waits."""
    (small_disk / "file").touch()
    told, *others = run_ranks(3, fail_on_rank_0, small_disk)
    assert others == [told, told]
    assert [line.split(": ")[1] for line in told] == [
        "File exists",
        "No space left on device",
        "No space left on device",
    ]


def go_on(folder: Path) -> dict:
    checkpoints = checkpoint.Checkpoints(folder, 9)
    state = checkpoints.load(RECIPE)
    run = draw(2, 1)
    run.best_accuracy = dist.get_rank() / 10  # to see whose is written
    checkpoints.save(run)
    checkpoints.save_if_best(run, 0.5)
    assert is_from(checkpoint.read(folder / "best.pt"), 2, 1)  # at once, on all ranks
    return state


def test_every_rank_goes_on_from_the_same_one(tmp_path):
    """Rank 0 reads and writes for all, and the others wait for it."""
    run_ranks(1, write, tmp_path, (1, 1), (1, 2))
    os.truncate(tmp_path / files((1, 2))[0], 100)
    assert all(is_from(state, 1, 1) for state in run_ranks(3, go_on, tmp_path))
    assert run_ranks(1, load, tmp_path)[0]["best_accuracy"] == 0
    damaged = f"{files((1, 2))[0]}.damaged"
    assert names(tmp_path) == ["best.pt", *files((1, 1)), damaged, *files((2, 1))]


# The digest


def told(caplog, weights: dict) -> tuple[str, str]:
    """Return the digest and the commit that rank 0 tells of these weights."""
    caplog.set_level(logging.INFO)
    checkpoint.log_weights(
        SimpleNamespace(state_dict=lambda: weights), checkpoint.find_commit()
    )
    line = caplog.messages[-1]
    return re.fullmatch("Weights SHA-256 ([0-9a-f]{64}), commit (.*)", line).groups()


def test_digest_of_the_same(rank0, caplog):
    """It tells what the numbers are, not how they lie in memory or on which device."""
    weights = torch.randn(2, 3, 4, 5)
    layouts = [
        weights,
        weights.clone(),
        weights.to(memory_format=torch.channels_last),
        torch.stack([weights, weights], dim=-1)[..., 0],
        nn.Parameter(weights).detach(),
    ]
    if torch.cuda.is_available():
        layouts.append(weights.cuda())
    digests = {told(caplog, {"weights": layout}) for layout in layouts}
    assert len(digests) == 1


def test_digest_of_others(rank0, caplog):
    """Every single byte counts."""
    weights = torch.arange(6, dtype=torch.float32)
    trees = [{"a": weights}]
    for byte in range(24):
        changed = weights.clone()
        changed.view(torch.uint8)[byte] ^= 1
        trees.append({"a": changed})
    assert len({told(caplog, tree) for tree in trees}) == len(trees)


# Signals, requeues, the commit


def catch_signals() -> tuple:
    """Signal rank 1 alone."""
    checkpoint.catch_stop_signals()
    told = []
    for number in (None, signal.SIGUSR1, signal.SIGTERM):
        checkpoint._stop_signals.clear()
        for _ in range(3 if number and dist.get_rank() == 1 else 0):
            os.kill(os.getpid(), number)
        any_rank = checkpoint.any_rank_must_stop(torch.device("cpu"))
        told.append((checkpoint.stop_requested(), any_rank))
    return told


def test_signals_are_noted():
    """SIGUSR1 and SIGTERM end no training by themselves, and all ranks are told."""
    no, yes, told = (False, False), (True, True), (False, True)
    assert run_ranks(2, catch_signals) == [[no, told, told], [no, yes, yes]]


def ask_for_requeues() -> list[str]:
    told = [checkpoint.requeues_to_go(1000, 0.0)]
    os.environ["SLURM_CONF"] = "/nowhere"
    # squeue, where there is one, knows no cluster.
    told.append(checkpoint.requeues_to_go(1000, 10.0))
    os.environ["PATH"] = "/nowhere"
    told.append(checkpoint.requeues_to_go(1000, 10.0))
    return told


def test_outside_a_job():
    """Without Slurm there is no time limit, and nothing is said of requeues."""
    assert run_ranks(2, ask_for_requeues) == [["", "", ""], ["", "", ""]]


def test_commit(rank0, caplog, tmp_path, monkeypatch):
    """The commit that runs is told in full, marked if files differ; never as a tag."""
    monkeypatch.delenv("GIT_COMMIT", raising=False)
    code = tmp_path / "a repository" / "checkpoint.py"
    code.parent.mkdir()
    code.touch()
    monkeypatch.setattr(checkpoint, "__file__", str(code))

    def git(*command: str) -> str:
        name = ["git", "-c", "user.name=tests", "-c", "user.email=tests"]
        command = [*name, "-C", code.parent, *command]
        return subprocess.check_output(command, text=True, timeout=20).strip()

    assert told(caplog, {})[1] == "unknown"
    git("init", "-q")
    git("add", "checkpoint.py")
    git("commit", "-qm", "One")
    git("tag", "-a", "v1", "-m", "One")
    head = git("rev-parse", "HEAD")
    (code.parent / "slurm-1.out").write_text("untracked files are no change of code")
    assert len(head) == 40 and told(caplog, {})[1] == head
    code.write_text("changed")
    assert told(caplog, {})[1] == f"{head}-dirty"
    # As safe_sbatch does, whose tree this would be a copy of.
    monkeypatch.setenv("GIT_COMMIT", "f" * 40)
    assert told(caplog, {})[1] == "f" * 40
    monkeypatch.delenv("GIT_COMMIT")
    monkeypatch.setenv("PATH", "/nowhere")
    assert told(caplog, {})[1] == "unknown"


# The order of DDP's sums


def settle() -> tuple:
    model = build_run(seed=2).model
    before = copy.deepcopy(model.state_dict())
    pictures = nn.Sequential(nn.AdaptiveAvgPool2d(4), model)
    ddp_model = nn.parallel.DistributedDataParallel(pictures)
    checkpoint.settle_buckets(ddp_model, 8)
    gradients = [
        p.grad for p in model.parameters() if p.grad is not None and p.grad.any()
    ]
    return same(dict(before), dict(model.state_dict())), len(gradients)


def test_settling_leaves_no_trace():
    """Weights, BatchNorm's statistics and gradients are as they were."""
    assert run_ranks(2, settle) == [(True, 0), (True, 0)]
