"""What imagenet/checkpoint.py writes, reads back and refuses: real files and damage.

One rank is this process, in a process group of its own; several are processes (gloo).
Folders that are full or read-only are file systems mounted for it.
"""

import fcntl
import importlib.util
import itertools
import logging
import math
import multiprocessing
import os
import re
import resource
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
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing import start_processes

REPOSITORY = Path(__file__).resolve().parents[1]
RECIPE = {"model": "tiny", "seed": 0, "batch_size": 4}

pytestmark = pytest.mark.timeout(400)

# Where main.py finds the modules beside it.
sys.path.append(str(REPOSITORY / "imagenet"))
import run as run_module  # noqa: E402
from checkpoint import Checkpoints, check, default_checkpoint_dir, read  # noqa: E402
from coordinator import Coordinator, catch_stop_signals, stop_signals  # noqa: E402
from ranks import RunError, StopRequested  # noqa: E402
from run import Run  # noqa: E402
from watch import HangWatch  # noqa: E402

NO_HANG = HangWatch(10**6)  # in seconds

# Ranks


def forkserver():
    """Return what starts processes that have imported all this: that takes seconds."""
    context = multiprocessing.get_context("forkserver")
    slow = [
        "torch._dynamo",
        "torch.profiler",
        "torch.utils.tensorboard",
        "torchvision",
        "tqdm",
        "scipy.io",
    ]
    context.set_forkserver_preload(
        ["test_checkpoint", "test_imagenet_training", "test_watch", *slow]
    )
    return context


class Started:
    """Processes of the forkserver that share a log. They end with the block."""

    def __init__(self, log: Path, target, arguments: list[tuple]):
        self.log = log
        log.touch()
        new = forkserver().Process
        self.processes = [new(target=target, args=args) for args in arguments]
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

    def join(self) -> list[int | None]:
        """Return every exit status: None for what does not end within a minute."""
        for process in self.processes:
            process.join(60)
        return [process.exitcode for process in self.processes]


def run_ranks(world_size: int, work, *args) -> list:
    """Return what `work(*args)` returned on each rank of a process group, in order."""
    forkserver()
    with tempfile.TemporaryDirectory() as folder:
        job = (world_size, folder, work, args)
        start_processes(run_rank, job, nprocs=world_size, start_method="forkserver")
        return [
            torch.load(Path(folder, f"{rank}.pt"), weights_only=False)
            for rank in range(world_size)
        ]


def run_rank(rank: int, world_size: int, folder: str, work, args: tuple) -> None:
    torch.set_num_threads(1)
    # As in a process that no forkserver has made.
    multiprocessing.set_start_method("fork", force=True)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "RANK": str(rank)}
    # So long that imagenet's watch alone ends a hang.
    store, timeout = f"file://{folder}/store", timedelta(minutes=5)
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


def load_module(path: str):
    """Return a new module, of a file of the repository."""
    spec = importlib.util.spec_from_file_location("loaded", REPOSITORY / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Runs and their checkpoints


def draw(epoch: int, step: int, kilobytes: int = 1) -> Run:
    """Return a run at this step, whose checkpoint has about this size."""
    model = nn.Linear(256 * kilobytes, 1, bias=False)
    nn.init.constant_(model.weight, step)
    optimizer = torch.optim.SGD(model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return Run(model, optimizer, scheduler, scaler, RECIPE, 4, ["a"], epoch, step)


def is_from(state: dict, epoch: int, step: int) -> bool:
    """Return whether this is all of what `draw` drew."""
    weights = state["model"]["weight"]
    return (state["epoch"], state["step"], *weights.unique()) == (epoch, step, step)


@contextmanager
def opened(folder: Path, keep: int = 3, recipe: dict = RECIPE):
    """Give the checkpoints in a folder, and the newest; let go of the folder after."""
    checkpoints = Checkpoints(folder, keep, NO_HANG)
    try:
        yield checkpoints, checkpoints.load(recipe)
    finally:
        if hasattr(checkpoints, "lock_file"):
            checkpoints.lock_file.close()


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
    with pytest.raises(RunError) as refusal:
        function(*arguments)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def names(folder: Path) -> list[str]:
    """Return the checkpoints in a folder, and what else is there of them."""
    return sorted(path.name for path in folder.iterdir() if path.name != "lock")


def files(*places: tuple) -> list[str]:
    """Return the names of the checkpoints of these epochs and steps."""
    return [f"epoch-{epoch:03}-step-{step:06}.pt" for epoch, step in places]


@contextmanager
def mounted(folder: Path, options: str):
    """Mount a file system in memory on a folder, and give the folder."""
    if os.geteuid() != 0:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("mounting needs root")
    folder.mkdir(exist_ok=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", folder], check=True, timeout=20
    )
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True, timeout=20)


# Which checkpoints there are


def test_the_last_ones_are_kept(tmp_path, rank0):
    """Those of the highest epochs and steps, whatever the number of digits."""
    places = (1, 10), (2, 1), (999, 1), (1000, 999_999), (1000, 1_000_000)
    write(tmp_path, *places, keep=2)
    assert names(tmp_path) == files((1000, 1_000_000), (1000, 999_999))
    assert is_from(load(tmp_path), 1000, 1_000_000)


def test_all_of_a_run_comes_back(tmp_path, rank0):
    """best.pt outlives its file, and torch.load reads it.

    After a stop, too, it is the best one of the whole run.
    """
    with opened(tmp_path, keep=1) as (checkpoints, _):
        run = draw(1, 1)
        run.metrics += torch.tensor([0.5, 3, 4])
        for run.epoch, accuracy in [(1, 0.0), (2, 0.5), (3, 0.4)]:
            checkpoints.save(run)
            checkpoints.save_if_best(run, accuracy)
            assert (tmp_path / "best.pt").exists()
    assert names(tmp_path) == ["best.pt", *files((3, 1))]
    assert is_from(torch.load(tmp_path / "best.pt", weights_only=True), 2, 1)
    resumed = draw(1, 1)
    with opened(tmp_path) as (checkpoints, state):
        resumed.load_state_dict(state)
        assert str(resumed.state_dict()) == str(run.state_dict())
        (tmp_path / "best.pt").unlink()
        for accuracy in (0.4, 0.5, 0.6):
            assert not (tmp_path / "best.pt").exists()
            checkpoints.save_if_best(resumed, accuracy)
        assert (tmp_path / "best.pt").exists()


def test_got_further(tmp_path, rank0, monkeypatch, caplog):
    """job.sh finds its file once a checkpoint is further than where the start began.

    A run that was killed at the end of an epoch writes best.pt once more. Where the
    file cannot be made, the checkpoint is whole, and the run goes on.
    """
    folder, further = tmp_path / "checkpoints", tmp_path / "further"
    write(folder, (1, 1))
    monkeypatch.setenv("GOT_FURTHER", str(further))
    with opened(folder) as (checkpoints, _):
        checkpoints.save_if_best(draw(1, 1), 0.5)
        assert not further.exists()
        started_at = checkpoints.saved_at
        checkpoints.save(draw(1, 2))
        assert further.exists()
        assert checkpoints.saved_at > started_at  # --save-minutes begins again
        # The submit folder may not have this one yet.
        monkeypatch.setenv("GOT_FURTHER", str(tmp_path / "new/further"))
        checkpoints.save(draw(1, 3))
        assert (tmp_path / "new/further").exists()
        monkeypatch.setenv("GOT_FURTHER", str(further / "in a file"))
        checkpoints.save(draw(1, 4))
    (warning,) = caplog.messages
    assert str(further) in warning
    assert is_from(load(folder), 1, 4)


def test_folder_on_the_scratch(tmp_path, monkeypatch, rank0):
    """Each job has one, there or where it was submitted: see test_the_whole_way."""
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("JOB_WORK_DIR", str(tmp_path / "submitted from"))
    monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
    write(default_checkpoint_dir(), (1, 1))
    assert names(tmp_path / "scratch/checkpoints/17") == files((1, 1))
    # Where each job has a scratch of its own, it is removed with the job.
    for own in ("17/mine", "me.17"):
        monkeypatch.setenv("SCRATCH", str(tmp_path / own))
        assert default_checkpoint_dir() == Path("checkpoints/17")
    monkeypatch.setenv("SCRATCH", "/scratch/me170")
    assert default_checkpoint_dir() == Path("/scratch/me170/checkpoints/17")


def test_started_again_without_a_checkpoint(tmp_path, rank0, monkeypatch, caplog):
    """As on a disk that the nodes do not share: the log says that it starts over."""
    for count in "01":
        monkeypatch.setenv("SLURM_RESTART_COUNT", count)
        assert load(tmp_path) is None
        warned = f"warning: started again, and no checkpoint is in {tmp_path}: "
        assert caplog.text.count(warned) == int(count)


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


# Interrupted writing


def save_without_end(folder: Path) -> None:
    with opened(folder, keep=2) as (checkpoints, state):
        for step in itertools.count(state["step"] + 1):
            checkpoints.save(draw(1, step, 2**12))


def written(folder: Path) -> int:
    """Return how many bytes of a checkpoint are written, while one is."""
    with suppress(FileNotFoundError):
        return sum(path.stat().st_size for path in folder.glob("*.partial"))
    return 0


def test_killed_while_writing(tmp_path, rank0, caplog):
    """At any moment, what has a checkpoint's name is whole; the next start tidies up.

    Killed 4 times, each time with another part of a file written.
    """
    folder, halfway = tmp_path / "checkpoints", 0
    write(folder, (1, 1, 2**12))
    (folder / "other.pkl.partial").touch()  # is not ours
    for kill in range(4):
        job = (0, 1, tempfile.mkdtemp(dir=tmp_path), save_without_end, (folder,))
        process = forkserver().Process(target=run_rank, args=job)
        process.start()
        while written(folder) <= kill * 2**20:
            assert process.is_alive()
        process.kill()
        process.join()
        halfway += written(folder) > 0
        whole = sorted(folder.glob("*.pt"))
        assert is_from(load(folder), 1, int(whole[-1].stem[-6:]))
        assert names(folder) == [*(path.name for path in whole), "other.pkl.partial"]
    assert halfway and not caplog.messages


# Damage


def flip(content: bytes, byte: int, bit: int = 0) -> bytes:
    return content[:byte] + bytes([content[byte] ^ 1 << bit]) + content[byte + 1 :]


class Command:
    """Pickled, this is a call of os.mkdir when it is loaded."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "code":
        torch.save(draw(1, 2).state_dict() | {"more": Command()}, path)
    elif how == "bit":
        path.write_bytes(flip(content, len(content) // 2))
    else:
        path.write_bytes(b"" if how == "empty" else content[:-1])


@pytest.mark.parametrize(
    "how, reason",
    [
        ("cut", "File is not a zip file"),
        ("empty", "cannot mmap an empty file"),
        ("bit", "its content does not match its CRC"),
        ("code", "Weights only load failed. .*"),
    ],
)
def test_damaged(how, reason, tmp_path, rank0, caplog, monkeypatch):
    """The one before is used, and one line says which file is damaged, and how.

    The file stays for a look at it. Code in it is not run.
    """
    monkeypatch.chdir(tmp_path)
    write(tmp_path, (1, 1), (1, 2, 64))
    older, newest = sorted(tmp_path.glob("*.pt"))
    damage(newest, how)
    assert is_from(load(tmp_path), 1, 1)
    head = f"warning: {newest} is damaged, trying the one before: "
    (warning,) = caplog.messages
    assert re.fullmatch(re.escape(head) + reason, warning)
    assert names(tmp_path) == [older.name, f"{newest.name}.damaged"]
    # The next start finds nothing to complain of.
    assert is_from(load(tmp_path), 1, 1)
    assert len(caplog.messages) == 1


def test_any_flipped_bit(tmp_path, rank0):
    """Wherever a bit is flipped, what was saved is read, or the damage is found."""
    write(tmp_path, (1, 1))
    (path,) = tmp_path.glob("*.pt")

    def content() -> tuple[str, bytes]:
        check(path)
        state = read(path)
        return str(state), state["model"]["weight"].numpy().tobytes()

    whole, right = path.read_bytes(), content()
    with zipfile.ZipFile(path) as file:
        directory = file.start_dir
    bits = [(n, n % 8) for n in range(0, len(whole), 7)]
    # And of all names, places and sizes of the file's parts. Bit 4 may say: a folder.
    bits += [(n, bit) for n in range(directory, len(whole)) for bit in {n % 8, 4}]
    for byte, bit in bits:
        path.write_bytes(flip(whole, byte, bit))
        with suppress(ValueError):
            assert content() == right, f"bit {bit} of byte {byte}"


def test_all_damaged(tmp_path, rank0, caplog):
    """No run begins anew in silence, also the next time, until someone has looked."""
    write(tmp_path, (1, 1), (1, 2))
    paths = sorted(tmp_path.glob("*.pt"), reverse=True)
    for path in paths:
        os.truncate(path, 100)
    for _ in range(2):
        assert refused(load, tmp_path) == (
            f"no whole checkpoint is left in {tmp_path}: "
            "remove the damaged ones there to start again from the beginning"
        )
    assert [line.split()[1] for line in caplog.messages] == [*map(str, paths)]
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


def test_a_node_without_memory(tmp_path, rank0):
    """To map the file of 64 MB: no fault of the file."""
    write(tmp_path, (1, 1), (1, 2, 2**16))
    (said,) = run_ranks(1, load_with_little_memory, tmp_path, 32)
    assert said == f"cannot use {tmp_path}: Cannot allocate memory"
    assert names(tmp_path) == files((1, 1), (1, 2))


# Another run's checkpoint


def test_another_recipe(tmp_path, rank0):
    """No run goes on with other settings; what differs is said, and the files stay."""
    write(tmp_path, (1, 1))
    # A checkpoint of an older main.py says nothing of a newer setting.
    recipe = RECIPE | {"seed": 1, "batch_size": 8, "accumulate": 1}
    assert refused(load, tmp_path, recipe) == (
        f"{tmp_path / files((1, 1))[0]} is of another run, with "
        "seed 0, not 1; batch_size 4, not 8; accumulate None, not 1: "
        "go on as it began, or choose another --checkpoint-dir"
    )
    assert is_from(load(tmp_path), 1, 1)


def load_other_data(folder: Path) -> str:
    return refused(load, folder, RECIPE | {"fingerprints": str(dist.get_rank())})


def test_nodes_with_different_data(tmp_path):
    """All ranks refuse it."""
    said = "not every node has the same data: stage it again"
    assert run_ranks(2, load_other_data, tmp_path) == [said] * 2


def load_to_be_refused(folder: Path) -> str:
    return refused(load, folder)


def test_more_ranks_than_images(tmp_path, rank0):
    """A run on few GPUs cannot go on with so many that some have nothing to do."""
    with opened(tmp_path) as (checkpoints, _):
        run = draw(1, 1)
        run.global_batch_size = 1
        checkpoints.save(run)
    said = (
        f"{tmp_path / files((1, 1))[0]} is of a run with 1 images a step, and there "
        "are 2 ranks: resume with 1 ranks or fewer"
    )
    assert run_ranks(2, load_to_be_refused, tmp_path) == [said] * 2


@pytest.mark.parametrize(
    "part, entry", [("model", "weight"), ("optimizer", "param_groups")]
)
def test_a_checkpoint_that_does_not_fit(part, entry):
    """One line refuses it, and names what is missing."""
    run = draw(1, 1)
    state = run.state_dict()
    del state[part][entry]
    line = refused(run.load_state_dict, state)
    assert line.startswith(f"the checkpoint's {part} does not fit --model tiny: ")
    assert entry in line


def test_a_checkpoint_of_older_code(tmp_path, rank0):
    """What it lacks begins as in a new run, or is named if it cannot.

    What is taken of it stays as it was when its file is written over.
    """
    run = draw(1, 1)
    run.optimizer = torch.optim.SGD(run.model.parameters(), momentum=0.9)
    run.model(torch.ones(1, 256)).sum().backward()
    run.optimizer.step()
    with opened(tmp_path) as (checkpoints, _):
        checkpoints.save(run)
    (path,), state = tmp_path.glob("*.pt"), load(tmp_path)
    del state["best_accuracy"]
    resumed = draw(1, 2)
    resumed.load_state_dict(state)
    assert (resumed.step, resumed.best_accuracy) == (1, draw(1, 1).best_accuracy)
    before = str(resumed.state_dict())
    with open(path, "r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert str(resumed.state_dict()) == before and "nan" not in before
    del state["optimizer"]
    line = refused(resumed.load_state_dict, state)
    assert line.startswith("the checkpoint's optimizer does not fit")


# Folders that cannot be written to


def test_read_only_folder(tmp_path, rank0):
    """It is found out at the start, not at the first checkpoint hours later."""
    folder = tmp_path / "read only"
    with mounted(folder, "size=1m"):
        write(folder, (1, 1))
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True, timeout=20)
        assert refused(load, folder) == f"cannot use {folder}: Read-only file system"


def test_weights_that_are_not_finite(tmp_path, rank0):
    """They are not written over good ones, not even as the last of several to keep."""
    with opened(tmp_path, keep=1) as (checkpoints, _):
        checkpoints.save(draw(1, 1))
        broken = draw(1, 2)
        broken.model.weight.data[0, 17] = float("nan")
        line = refused(checkpoints.save, broken)
    (newest,) = files((1, 2))
    assert line == f"cannot write {tmp_path}/{newest}: the weights are not finite"
    assert names(tmp_path) == files((1, 1))


def meet_faults_of_rank_0(folder: Path) -> list[str]:
    """Return what a rank is told of what only rank 0 sees."""
    checkpoints = Checkpoints(folder, 9, NO_HANG)
    assert is_from(checkpoints.load(RECIPE), 1, 2)
    return [
        refused(checkpoints.save, draw(1, 4, 300)),
        refused(checkpoints.save_if_best, draw(1, 4, 300), 0.5),
    ]


def test_full_disk(tmp_path, rank0):
    """It ends all ranks with the same words, and none waits.

    The checkpoints before stay: none makes room for the next. All ranks had gone on
    from the newest whole one.
    """
    folder = tmp_path / "small"
    with mounted(folder, "size=1m"):  # room for three, and not for four
        write(folder, (1, 1, 300), (1, 2, 300), (1, 3, 300))
        damage(folder / files((1, 3))[0], "bit")
        told, others = run_ranks(2, meet_faults_of_rank_0, folder)
        damaged = f"{files((1, 3))[0]}.damaged"
        assert names(folder) == [*files((1, 1), (1, 2)), damaged]
        assert is_from(load(folder), 1, 2)
    assert (
        told
        == others
        == [
            f"cannot write {folder}/{files((1, 4))[0]}: No space left on device",
            f"cannot write {folder}/best.pt: No space left on device",
        ]
    )


# When to save and to stop


def take_steps(
    steps=500, speed=99, loss=1.0, asked=0, saved_at=math.inf, save_steps=10**6
) -> tuple[list[int], str]:
    """Take an epoch's steps; return after which all ranks save, and what ends them.

    In a step, a rank has 4 samples, and its number of them right. Rank 1 has this loss,
    and is asked to stop in that step.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    saved, logged = [], {}
    checkpoints, watch = MagicMock(saved_at=saved_at), MagicMock()
    checkpoints.save = lambda run: saved.append(run.step)
    watch.tracker.log = logged.__setitem__
    # Rank 0 has taken so many steps a second.
    watch.steps_per_second.return_value = 0 if rank else speed * ranks
    run = draw(1, 0)
    run.recipe, run.global_batch_size = {"samples": 8 * steps + 7}, 8
    run.scheduler = SimpleNamespace(last_epoch=0)
    args = SimpleNamespace(save_steps=save_steps, save_minutes=1)
    coordinator = Coordinator(run, checkpoints, watch, args)
    stop_signals.clear()
    catch_stop_signals()
    metrics, end = torch.zeros(3, dtype=torch.float64), ""
    try:
        for run.scheduler.last_epoch in range(1, steps + 1):
            metrics += torch.tensor([4 * loss if rank else 4.0, rank, 4])
            if rank and asked == run.scheduler.last_epoch:
                os.kill(os.getpid(), signal.SIGUSR1)
            coordinator.after_step(metrics)
    except (RunError, StopRequested) as error:
        end = repr(error)
    # What is saved, and logged, is of all ranks, and of this step.
    assert run.step == run.scheduler.last_epoch == max(logged, default=1)
    assert run.metrics[2] == 4 * ranks * run.step
    for values in logged.values():
        assert values["train/accuracy"] == (ranks - 1) / (4 * ranks)
        assert values["train/loss"] == (1 + (ranks - 1) * loss) / ranks
    if not end:
        coordinator.end_epoch({"valid/accuracy": 0.5})
        checkpoints.save_if_best.assert_called_once_with(run, 0.5)
        assert logged[steps] == {"valid/accuracy": 0.5}
        assert (run.epoch, run.step, run.metrics.sum()) == (2, 0, 0)
    return saved, end


def take_steps_of(cases: list[dict]) -> list[tuple]:
    return [take_steps(**case) for case in cases]


def test_ranks_agree():
    """They save after the same steps: after an epoch, and when it is time to.

    One whose loss is not finite ends all, and nothing is saved.
    """
    cases = [
        {},
        {"steps": 15, "save_steps": 7},
        {"steps": 3, "saved_at": -math.inf},
        {"loss": math.nan},
    ]
    found, others = run_ranks(2, take_steps_of, cases)
    assert found == others
    epoch, often, late, (saved, end) = found
    assert epoch == ([500], "")
    assert often == ([7, 14, 15], "")
    assert late == ([1, 3], "")
    assert saved == []
    assert "the loss is nan before step 1 of epoch 1: nothing of it is saved" in end


def test_ranks_stop_together():
    """One that is asked to stop stops all, within 20 steps or two seconds, and saved.

    Also if it is asked before its first step.
    """
    cases = [
        {"asked": asked, "speed": speed} for asked in (1, 112) for speed in (99, 4, 0)
    ]
    found, others = run_ranks(2, take_steps_of, cases)
    assert found == others
    for case, ((step,), end) in zip(cases, found, strict=True):
        assert end == "StopRequested()"
        late = step - case["asked"]
        assert 0 <= late < min(20, 2 * case["speed"] or 1), case
        assert late == 0 or case["asked"] > 1


def test_a_line_a_minute(rank0, monkeypatch, caplog):
    """A batch job's log says where a long epoch is, and nothing of a short one."""
    caplog.set_level(logging.INFO)
    for seconds in (0.1, 70):  # from one look at the clock to the next
        clock = itertools.count(0, seconds).__next__
        monkeypatch.setattr(time, "monotonic", clock)
        assert not caplog.messages
        take_steps(100)
    steps = [int(line.split()[3]) for line in caplog.messages]
    assert steps == sorted(set(steps)) and steps[-1] == 100
    assert caplog.messages[-1] == (
        "Epoch 1, step 100 of 100: train loss 1.000 accuracy 0.00%, 792 images/s"
    )


# The last line: the digest and the commit


def test_digest(rank0, caplog):
    """It tells what the numbers are, not how they lie in memory. Every bit counts."""
    caplog.set_level(logging.INFO)
    weights = torch.randn(2, 3, 4, 5)
    other = weights.clone()
    other.view(torch.uint8)[1, 2, 3, 17] ^= 1
    channels_last = weights.to(memory_format=torch.channels_last)
    for layout in (weights, channels_last, other):
        run = draw(1, 1)
        run.model = nn.ParameterDict({"a": layout})
        run.log_weights("c0ffee", Path("run"))
    first, second, last = caplog.messages[::2]  # then how to use the weights
    assert first == second != last


def test_commit(tmp_path, monkeypatch):
    """The commit that runs is told in full, marked if files differ; never as a tag."""
    monkeypatch.delenv("GIT_COMMIT", raising=False)
    monkeypatch.setenv("RANK", "0")
    code = tmp_path / "a repository" / "run.py"
    code.parent.mkdir()
    code.touch()
    monkeypatch.setattr(run_module, "__file__", str(code))

    def run(script: str) -> str:
        output = subprocess.check_output(
            script, shell=True, cwd=code.parent, text=True, timeout=20
        )
        return output.strip()

    assert run_module.find_commit() == "unknown"
    run("""
        git init -q
        git config user.name tests
        git config user.email tests
        git add run.py
        git commit -qm One
        git tag -a v1 -m One
    """)
    head = run("git rev-parse HEAD")
    (code.parent / "slurm-1.out").write_text("untracked files are no change of code")
    assert len(head) == 40
    monkeypatch.setenv("GIT_DIR", "/elsewhere")
    assert run_module.find_commit() == head
    code.write_text("changed")
    assert run_module.find_commit() == f"{head}-dirty"
    # As safe_sbatch does, whose tree this would be a copy of.
    monkeypatch.setenv("GIT_COMMIT", "f" * 40)
    assert run_module.find_commit() == "f" * 40
    # The other ranks say nothing of it, and ask git nothing.
    monkeypatch.setenv("RANK", "1")
    assert run_module.find_commit() == ""
