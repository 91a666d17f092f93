"""What imagenet/resume.py writes, reads back and refuses: real files and damage.

One rank is this process, in a process group of its own; several are processes (gloo).
Folders that are full or read-only are file systems mounted for it.
"""

import argparse
import fcntl
import importlib.util
import itertools
import logging
import multiprocessing
import os
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

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
import resume  # noqa: E402
import run as run_module  # noqa: E402
import watch  # noqa: E402
from resume import Run  # noqa: E402

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
        """Return every exit status: None for what does not end in 200 seconds."""
        deadline = time.monotonic() + 200
        for process in self.processes:
            process.join(max(0, deadline - time.monotonic()))
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


def begin(folder: Path, keep: int = 3, recipe: dict = RECIPE, kilobytes: int = 1):
    """Return a run in this folder, whose checkpoints have about this size."""
    model = nn.Linear(256 * kilobytes, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    return Run(folder, recipe, keep, scaler=scaler, best=0.0, **parts)


@contextmanager
def opened(folder: Path, *arguments):
    """Give a run; let go of its folder after."""
    try:
        yield begin(folder, *arguments)
    finally:
        let_go(folder)


def let_go(folder: Path) -> None:
    """Close the lock, as the end of a process does."""
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if descriptor.readlink() == folder / "lock":
                os.close(int(descriptor.name))


def load(folder: Path, recipe: dict = RECIPE) -> tuple[int, int] | None:
    """Return the epoch and the step where the next start would go on."""
    with opened(folder, 3, recipe) as run:
        if not run._place:
            return None
        (weight,) = run.model.weight.unique().tolist()
        assert weight == run.step, "it is not from this step"
        return run.epoch, run.step


def save(run: Run, epoch: int, step: int) -> None:
    run.epoch, run.step = epoch, step
    nn.init.constant_(run.model.weight, step)
    run.save()


def write(folder: Path, *places: tuple[int, int], keep: int = 3, kilobytes=1) -> None:
    """Make checkpoints of these epochs and steps."""
    for place in places:
        with opened(folder, keep, RECIPE, kilobytes) as run:
            run._place = []  # it is not to go on
            save(run, *place)


def refused(function, *arguments) -> str:
    """Return the one line with which a function ends all ranks."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as refusal:
        said = []
        patch.setattr(resume, "say", lambda text: said.append(text) or print(text))
        patch.setattr(resume, "leave", sys.exit)  # the group is for more
        function(*arguments)
    assert refusal.value.code == 1
    line = said[-1].split(": error: ", 1)[1]
    assert "\n" not in line
    return line


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
    assert load(tmp_path) == (1000, 1_000_000)


def test_a_folder_of_its_own(monkeypatch):
    """What job.sh has chosen, or you, comes first: see test_the_whole_way."""
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert run_module.default_checkpoint_dir() == Path("checkpoints/17")
    monkeypatch.setenv("RUN_DIR", "runs/1")
    assert run_module.default_checkpoint_dir() == Path("runs/1")


def test_started_again_without_a_checkpoint(tmp_path, rank0, monkeypatch, capsys):
    """As on a disk that the nodes do not share: the log says that it starts over."""
    for count in "01":
        monkeypatch.setenv("SLURM_RESTART_COUNT", count)
        assert load(tmp_path) is None
        warned = f"warning: started again, and no checkpoint is in {tmp_path}: "
        assert capsys.readouterr().out.count(warned) == int(count)


def test_another_run_in_the_folder(tmp_path, rank0, monkeypatch):
    """A job that was just killed may hold it a little longer: a minute is waited."""
    write(tmp_path, (1, 1))
    waited = []

    def hold() -> int:
        lock = os.open(tmp_path / "lock", os.O_WRONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        return lock

    hold()  # load() closes it, too
    # Who can only read the folder cannot hold it.
    assert stat.S_IMODE((tmp_path / "lock").stat().st_mode) == 0o600
    monkeypatch.setattr(time, "sleep", waited.append)
    line = refused(load, tmp_path)
    assert line.startswith(f"another run writes to {tmp_path}: choose another ")
    assert sum(waited) == 60
    lock, naps = hold(), []
    monkeypatch.setattr(time, "sleep", lambda _: naps.append(os.close(lock)))
    assert load(tmp_path) == (1, 1) and len(naps) == 1


# Interrupted writing


def save_without_end(folder: Path) -> None:
    with opened(folder, 2, RECIPE, 2**12) as run:
        run._place = []
        for step in itertools.count(run.step + 1):
            save(run, 1, step)


def written(folder: Path) -> int:
    """Return how many bytes of a checkpoint are written, while one is."""
    with suppress(FileNotFoundError):
        return sum(path.stat().st_size for path in folder.glob("*.partial"))
    return 0


def test_killed_while_writing(tmp_path, rank0, capsys):
    """At any moment, what has a checkpoint's name is whole; the next start tidies up.

    Killed 4 times, each time with another part of a file written.
    """
    folder, halfway = tmp_path / "checkpoints", 0
    write(folder, (1, 1), kilobytes=2**12)
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
        with opened(folder, 2, RECIPE, 2**12) as run:
            assert run.step == int(whole[-1].stem[-6:])
            assert run.model.weight.unique() == run.step
        assert names(folder) == [*(path.name for path in whole), "other.pkl.partial"]
    assert halfway and "warning" not in capsys.readouterr().out


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
        torch.save(torch.load(path) | {"more": Command()}, path)
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
def test_damaged(how, reason, tmp_path, rank0, capsys, monkeypatch):
    """The one before is used, and one line says which file is damaged, and how.

    The file stays for a look at it. Code in it is not run.
    """
    monkeypatch.chdir(tmp_path)
    write(tmp_path, (1, 1), (1, 2))
    older, newest = sorted(tmp_path.glob("*.pt"))
    damage(newest, how)
    capsys.readouterr()
    assert load(tmp_path) == (1, 1)
    head = f"warning: {newest} is damaged, trying the one before: "
    warning, resuming = capsys.readouterr().out.splitlines()
    assert re.fullmatch(re.escape(head) + reason, warning)
    assert names(tmp_path) == [older.name, f"{newest.name}.damaged"]
    # The next start finds nothing to complain of.
    assert load(tmp_path) == (1, 1)
    assert capsys.readouterr().out == f"{resuming}\n"


def test_any_flipped_bit(tmp_path, rank0):
    """Wherever a bit is flipped, what was saved is read, or the damage is found."""
    write(tmp_path, (1, 1))
    (path,) = tmp_path.glob("*.pt")

    def content() -> tuple[str, bytes]:
        resume.check(path)
        state = resume.read(path)
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


def test_all_damaged(tmp_path, rank0, capsys):
    """No run begins anew in silence, also the next time, until someone has looked."""
    write(tmp_path, (1, 1), (1, 2))
    paths = sorted(tmp_path.glob("*.pt"), reverse=True)
    for path in paths:
        os.truncate(path, 100)
    refused(load, tmp_path)
    said = re.findall("warning: (.*) is damaged", capsys.readouterr().out)
    assert said == [*map(str, paths)]
    for _ in range(2):
        assert refused(load, tmp_path) == (
            f"no whole checkpoint is left in {tmp_path}: "
            "remove the damaged ones there to start again from the beginning"
        )
    for path in tmp_path.glob("*.damaged"):
        path.unlink()
    assert load(tmp_path) is None


def test_a_disk_that_does_not_read(tmp_path, rank0):
    """The file may be whole: it is kept, and no run goes on from an older one."""
    write(tmp_path, (1, 1), (1, 2))
    newest = tmp_path / files((1, 2))[0]
    newest.unlink()
    newest.symlink_to("/proc/self/mem")  # to read it is an I/O error
    assert refused(load, tmp_path) == f"cannot use {tmp_path}: Input/output error"
    assert names(tmp_path) == files((1, 1), (1, 2))


def load_with_little_memory(folder: Path, megabytes: int) -> str:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = size + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return refused(load, folder)


def test_a_node_without_memory(tmp_path, rank0):
    """To map the file of 64 MB: no fault of the file."""
    write(tmp_path, (1, 1))
    write(tmp_path / "large", (1, 2), kilobytes=2**16)
    (large,) = (tmp_path / "large").glob("*.pt")
    large.rename(tmp_path / large.name)
    shutil.rmtree(tmp_path / "large")
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
        "go on as it began, or choose another folder"
    )
    assert load(tmp_path) == (1, 1)


def test_more_ranks_than_images(tmp_path, rank0):
    """A run on few GPUs cannot go on with so many that some have nothing to do."""
    with opened(tmp_path) as run:
        run.add(global_batch_size=1, id="", best_accuracy=0.0)
        save(run, 1, 1)
    said = (
        "the checkpoint is of a run with 1 images a step, and there are 2 ranks: "
        "resume with 1 ranks or fewer"
    )
    assert run_ranks(2, begin_to_be_refused, tmp_path) == [said] * 2


def begin_to_be_refused(folder: Path) -> str:
    args = argparse.Namespace(checkpoint_dir=folder, keep=3, save_minutes=1)
    args.save_steps = 9
    return refused(run_module.begin_run, args, RECIPE, 8)


@pytest.mark.parametrize("part", ["model", "optimizer", "best"])
def test_a_checkpoint_that_does_not_fit(part, tmp_path, rank0):
    """One line refuses it, and names the part. A value that is new begins as given."""
    write(tmp_path, (1, 1))
    (path,) = tmp_path.glob("*.pt")
    state = torch.load(path)
    if part == "best":
        del state["resume"]["_own"][0]["best"]
    else:
        del state[part]
    torch.save(state, path)
    if part == "best":
        assert load(tmp_path) == (1, 1)
    else:
        line = refused(load, tmp_path)
        assert line.startswith(f"the checkpoint's {part} does not fit: ")


def test_a_checkpoint_that_is_written_over(tmp_path, rank0):
    """What was taken of it stays as it was."""
    with opened(tmp_path) as run:
        run.model(torch.ones(1, 256)).sum().backward()
        run.optimizer.step()
        save(run, 1, 1)
    (path,) = tmp_path.glob("*.pt")
    with opened(tmp_path) as resumed:
        before = str([resumed.model.state_dict(), resumed.optimizer.state_dict()])
        with open(path, "r+b") as file:
            file.write(bytes(path.stat().st_size))
        after = str([resumed.model.state_dict(), resumed.optimizer.state_dict()])
    assert after == before and "momentum_buffer" in before and "nan" not in before


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
    with opened(tmp_path, 1) as run:
        save(run, 1, 1)
        run.model.weight.data[0, 17] = float("nan")
        run.step = 2
        line = refused(run.save)
        (newest,) = files((1, 2))
        said = f"cannot write {tmp_path}/{newest}: the weights of model are not finite"
        assert line == said
        line = refused(run.write, "best.pt", run.model)
        said = f"cannot write {tmp_path}/best.pt: the weights are not finite"
        assert line == said
        line = refused(run_module.save_if_best, run, [], float("nan"), 0.5)
        assert line == "the loss is not finite: validated, it is nan"
    assert names(tmp_path) == files((1, 1))


def save_what_differs(folder: Path) -> str:
    with opened(folder) as run:
        nn.init.constant_(run.model.weight, 1 + 1e-6 * dist.get_rank())
        return refused(run.save)


def test_weights_that_differ(tmp_path):
    """As of ranks that have trained without DDP: all of them end, nothing is saved."""
    lines = run_ranks(2, save_what_differs, tmp_path)
    assert lines[0] == lines[1]
    assert "the weights of model differ between ranks: call DDP's" in lines[0]
    assert names(tmp_path) == []


def meet_faults_of_rank_0(folder: Path) -> list[str]:
    """Return what a rank is told of what only rank 0 sees."""
    with opened(folder, 9, RECIPE, 300) as run:
        assert (run.epoch, run.step) == (1, 2)
        run._place, run.step = [], 4
        return [refused(run.save), refused(run.write, "best.pt", torch.ones(2**18))]


def test_full_disk(tmp_path, rank0):
    """It ends all ranks with the same words, and none waits.

    The checkpoints before stay: none makes room for the next. All ranks had gone on
    from the newest whole one.
    """
    folder = tmp_path / "small"
    with mounted(folder, "size=1m"):  # room for three, and not for four
        write(folder, (1, 1), (1, 2), (1, 3), kilobytes=300)
        damage(folder / files((1, 3))[0], "bit")
        told, others = run_ranks(2, meet_faults_of_rank_0, folder)
        damaged = f"{files((1, 3))[0]}.damaged"
        assert names(folder) == [*files((1, 1), (1, 2)), damaged]
    assert (
        told
        == others
        == [
            f"cannot write {folder}/{files((1, 4))[0]}: No space left on device",
            f"cannot write {folder}/best.pt: No space left on device",
        ]
    )


# When to save and to stop


def take_turns(folder: Path, turns: int, seconds=0.0, asked=0, **options):
    """Take a loop's turns; return after which all ranks save, and their status.

    Rank 1 is asked to stop in the turn `asked`.
    """
    rank, saved = dist.get_rank(), []
    resume.warned.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resume, "leave", sys.exit)
        run = Run(folder, **options)
        run.while_saving = lambda: saved.append(run.step) or nullcontext()
        try:
            for _ in run.loop(range(1)):
                sums = run.sums(2)
                for turn in run.loop(range(1, turns + 1)):
                    sums += torch.tensor([rank, 4])
                    time.sleep(seconds)
                    if rank and asked == turn:
                        os.kill(os.getpid(), signal.SIGUSR1)
                assert sums.tolist() == [rank * turns, 4 * turns]
                run.save()
            status = 0
        except SystemExit as stopped:
            status = stopped.code
    let_go(folder)
    return saved, status, resume.read(max(folder.glob("*.pt")))["resume"]["_totals"]


def take_turns_of(folder: Path, cases: list[dict]) -> list[tuple]:
    found = []
    for number, case in enumerate(cases):
        found.append(take_turns(folder / str(number), **case))
        dist.barrier()
    return found


def test_ranks_agree(tmp_path):
    """They save after the same turns, and what they save are the sums of all ranks."""
    cases = [
        {"turns": 500},
        {"turns": 15, "save_steps": 7},
        {"turns": 3, "save_minutes": 0},
    ]
    found, others = run_ranks(2, take_turns_of, tmp_path, cases)
    assert found == others
    assert found == [
        ([500], 0, [500, 4000]),
        ([7, 14, 15], 0, [15, 120]),
        ([1, 3], 0, [3, 24]),
    ]


def test_ranks_stop_together(tmp_path):
    """One that is asked to stop stops all, within 20 turns or two seconds, and saved.

    Also if it is asked in its first turn.
    """
    cases = [
        {"turns": 200, "asked": asked, "seconds": seconds}
        for asked, seconds in [(1, 0), (112, 0), (1, 0.5), (9, 0.5)]
    ]
    found, others = run_ranks(2, take_turns_of, tmp_path, cases)
    assert found == others
    for case, ((step,), status, sums) in zip(cases, found, strict=True):
        assert status == 75 and sums == [step, 8 * step]
        late = step - case["asked"]
        assert 0 <= late < min(20, 2.5 / (case["seconds"] or 0.1)), case
        assert late == 0 or case["asked"] > 1


def test_a_line_a_minute(rank0, monkeypatch, caplog):
    """A batch job's log says where a long epoch is, and nothing of a short one."""
    caplog.set_level(logging.INFO)
    run = SimpleNamespace(epoch=1, step=0, global_batch_size=8)
    watching = watch.Watch.__new__(watch.Watch)
    watching.run, watching.steps_an_epoch, watching.logged_at = run, 100, 0
    watching.log = lambda values: None
    for seconds in (0.1, 70):  # from one look at the clock to the next
        clock = itertools.count(0, seconds).__next__
        monkeypatch.setattr(time, "monotonic", clock)
        assert not caplog.messages
        for run.step in range(1, 101):
            watching.meet([4.0 * run.step, 0.0, 4.0 * run.step], 99)
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
        model = nn.ParameterDict({"a": layout})
        run = SimpleNamespace(model=model, folder=Path("run"))
        run_module.log_weights(run, "c0ffee")
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
