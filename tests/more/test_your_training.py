"""docs/your_training: a script as a job of one GPU, and what becomes of it on several.

GPUs, disks of nodes and a loss of NaN are simulated; ranks without Slurm get its names.
"""

import contextlib
import fcntl
import re
import shutil
import socket
import subprocess
import sys
import textwrap
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from first_aid import user_of
from slurm_jobs import REPOSITORY, Jobs, Result, listing, stop
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FLAGS = "--nodes=2 --ntasks-per-node=2 --gpus-per-node=2 --cpus-per-task=1 --mem=4G"
PAGE = (REPOSITORY / "docs" / "your_training.rst").read_text()
SCRIPTS = REPOSITORY / "docs" / "your_training"
RESUME = SCRIPTS / "resume" / "main.py"
SHARDED = REPOSITORY / "docs" / "sharded" / "main.py"
HOME = user_of(SimpleNamespace(env={}))  # the variables of a shell without Slurm


def losses(text: str, processes: int) -> dict[int, float]:
    """Return each epoch's loss, as printed, each over 16384 samples."""
    end = f", {processes} x cpu.*" if processes else ""
    line = rf"^Epoch (\d): loss (\d\.\d{{4}}) over 16384 samples{end}$"
    found = re.findall(line, text, re.MULTILINE)
    return {int(epoch): float(loss) for epoch, loss in found}


def train_alone(world_size: int, build, first: int = 0) -> list[float]:
    """Train in this process, on what all ranks take in each step together.

    `build` returns a model and its optimizer. Return each epoch's loss.
    """
    torch.manual_seed(0)
    points = torch.rand(16384, 2)
    targets = (points.square().sum(1) < 0.64).long()
    dataset = TensorDataset(points)
    samplers = [
        DistributedSampler(dataset, world_size, rank) for rank in range(world_size)
    ]
    model, optimizer = build()
    averages = []
    for epoch in range(first, 5):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        order = torch.tensor(list(chain(*zip(*samplers, strict=True))))
        total = 0.0
        for batch in order.split(64 * world_size):
            loss = F.cross_entropy(model(points[batch]), targets[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
        averages.append(total / 16384)
    return averages


def expected(world_size: int, rate: float | None = None) -> list[float]:
    """Return the losses of the page's script, without DDP."""

    def build() -> tuple:
        model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2))
        learning_rate = rate or 0.05 * world_size
        return model, torch.optim.SGD(model.parameters(), learning_rate, momentum=0.9)

    return train_alone(world_size, build)


@pytest.fixture(scope="module")
def together(jobs: Jobs, several) -> tuple[Path, Result]:
    """The script as a job of four processes on two nodes."""
    folder = several(SCRIPTS / "main.py")
    return folder, jobs.sbatch(folder, *FLAGS.split(), "job.sh", CIFAR10_ARCHIVE="")


@pytest.mark.usefixtures("nothing_left")
def test_one_gpu_first(jobs, project):
    """The script runs as it is, and its log is that of the same script at home."""
    shutil.copy(SCRIPTS / "before.py", project / "main.py")
    one = "--cpus-per-task=1 --mem=2G"
    result = jobs.sbatch(project, *one.split(), "job.sh", CIFAR10_ARCHIVE="")
    assert result.state == "COMPLETED", result
    found = losses(result.output, 0)
    assert list(found) == list(range(5)) and found[4] < found[0] / 2, result
    assert (project / "model.pt").exists()


def test_your_training(jobs, project, together):
    """A rank's step is a share of what one process computes; old weights fit."""
    folder, result = together
    assert result.state == "COMPLETED", result
    weights = torch.load(folder / "model.pt", weights_only=True)
    shapes = {name: value.shape for name, value in weights.items()}
    assert shapes == {
        name: value.shape
        for name, value in torch.load(project / "model.pt", weights_only=True).items()
    }
    alone = jobs.run([sys.executable, "main.py"], folder)
    for found, processes in ((alone, 1), (result, 4)):
        found = losses(found.output, processes)
        for epoch, loss in enumerate(expected(processes)):
            assert abs(found[epoch] - loss) < 0.002, (found, expected(processes))


@pytest.mark.usefixtures("nothing_left")
def test_salloc(jobs, together):
    """srun needs nothing else; without it, the script says so."""
    folder, result = together
    python = "--export=ALL,OMP_NUM_THREADS=1 .venv/bin/python main.py"
    typed = f".venv/bin/python main.py || echo ended $?\nsrun {python}"
    command = ["salloc", "--quiet", *FLAGS.split(), "bash", "-c", typed]
    output = jobs.run(command, folder).output
    error, ended, *_ = output.splitlines()
    assert error.startswith("main.py: error: start it with srun"), output
    assert ended == "ended 1", output
    assert losses(output, 4) == losses(result.output, 4), output


@pytest.mark.parametrize("tasks", ["2 ", "1 "])
def test_other_numbers(jobs, together, tasks):
    """Slurm accepts what the page asks for. Two cores would take long to train so."""
    words = f"sbatch --nodes=1 --ntasks-per-node={tasks}"
    typed = 'sbatch() { command sbatch --test-only "$@"; }\n'
    result = jobs.run(
        ["bash", "-euc", typed + listing("your_training.rst", words)], together[0]
    )
    assert result.exit_code == 0, result


@pytest.mark.usefixtures("nothing_left")
def test_chain(jobs, several, together):
    """A job is killed, the next one goes on, and the last has nothing to do."""
    folder = several(SCRIPTS / "resume" / "main.py")
    chain_typed = listing("your_training.rst", "job=$(sbatch")
    options = f'{FLAGS} --output="{jobs.logs}/%j.out"'
    typed = f'sbatch() {{ command sbatch {options} "$@"; }}\n{chain_typed}'
    result = jobs.run(["bash", "-euc", typed], folder, CIFAR10_ARCHIVE="")
    assert result.exit_code == 0, result
    queue = jobs.run(["squeue", "--noheader", "--format=%A", "--sort=i"])
    first, second, third = queue.output.split()
    jobs.submitted += [first, second, third]

    def rank_0() -> int:
        with contextlib.suppress(ValueError):  # it has not started
            return jobs.pid("node1", "main.py")

    saved = (folder / "checkpoint.pt").exists
    rank = jobs.until_found(first, rank_0, "rank 0", 120)
    jobs.until_found(first, saved, "a checkpoint", 120, pause=0.001)
    stop(rank)  # or it may be done before Slurm ends it
    killed = jobs.cancel(first)
    assert killed.state == "CANCELLED", killed
    parts = [losses(killed.output, 4)]
    for job in (second, third):
        result = jobs.wait(job)
        assert result.state == "COMPLETED", result
        parts.append(losses(result.output, 4))
    assert parts[0] and 4 not in parts[0] and 0 not in parts[1] and not parts[2], parts
    assert parts[0] | parts[1] == losses(together[1].output, 4), parts
    assert result.find("^checkpoint.pt is of epoch 4. To start over, "), result


def start(script: Path, *folders: Path, **more: str) -> list[Result]:
    """Train without Slurm, one rank in each folder; return how each has ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    env |= {"SLURM_STEP_NUM_TASKS": str(len(folders))} | more
    ranks = [
        subprocess.Popen(
            ["timeout", "120", sys.executable, script],
            cwd=folder,
            env=HOME | env | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, folder in enumerate(folders)
    ]
    return [Result(rank.communicate()[0], rank.returncode) for rank in ranks]


def changed(folder: Path, old: str, new: str, script: Path = RESUME) -> Path:
    """Return a copy of a script, with another text in one place."""
    text = script.read_text()
    assert text.count(old) == 1
    folder.mkdir(exist_ok=True)
    (folder / "changed.py").write_text(text.replace(old, new))
    return folder / "changed.py"


def test_one_rank_decides(tmp_path):
    """Rank 1 sees no checkpoint; the rate is that of the new number of processes."""
    own = tmp_path / "another node's disk"
    own.mkdir()
    short = changed(tmp_path, "epochs = 5", "epochs = 2")
    assert losses(start(short, tmp_path)[0].output, 1).keys() == {0, 1}
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    momentum = {n: m["momentum_buffer"] for n, m in saved["momentum"].items()}

    def build() -> tuple:
        model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2))
        model.load_state_dict(saved["model"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * 2, momentum=0.9)
        for n, weight in enumerate(model.parameters()):
            optimizer.state[weight]["momentum_buffer"] = momentum[n].clone()
        return model, optimizer

    rank_0, rank_1 = start(RESUME, tmp_path, own)
    assert (rank_0.exit_code, rank_1.exit_code) == (0, 0), (rank_0, rank_1)
    found = losses(rank_0.output, 2)
    for epoch, loss in enumerate(train_alone(2, build, first=2), start=2):
        assert abs(found.pop(epoch) - loss) < 0.002, rank_0
    assert not found and not list(own.iterdir())


def test_random_numbers_and_a_schedule_after_a_resume(tmp_path):
    """They are what they would have been."""
    old = "nn.ReLU(), nn.Linear(64, 2)).to(device)"
    text = changed(tmp_path, old, f"nn.Dropout(0.5), {old}").read_text()
    set_rate = listing("your_training.rst", "for group in")
    script = tmp_path / "scheduled.py"
    script.write_text(text.replace("    metrics =", f"{set_rate}\n    metrics =", 1))
    whole = losses(start(script, tmp_path)[0].output, 1)
    (tmp_path / "checkpoint.pt").unlink()
    stopped = tmp_path / "stopped.py"
    stopped.write_text(script.read_text().replace("(first, epochs)", "(first, 3)"))
    parts = losses(start(stopped, tmp_path)[0].output, 1)
    assert len(parts) == 3
    parts |= losses(start(script, tmp_path)[0].output, 1)
    assert parts == whole and len(whole) == 5


@pytest.mark.parametrize("script", [RESUME, SHARDED], ids=["resume", "sharded"])
def test_a_good_checkpoint_stays(tmp_path, script):
    """Of NaN, a full disk and a second job, one line tells; no bad file is taken."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk]
    subprocess.run(mount, check=True)
    small = changed(tmp_path, "16384, 2", "2048, 2", script)
    short = changed(tmp_path / "short", "epochs = 5", "epochs = 1", small)
    assert start(short, disk, disk)[0].exit_code == 0

    def files() -> dict[Path, bytes]:
        return {p: p.read_bytes() for p in disk.rglob("*") if p.is_file()}

    good = files()

    def error(script: Path, *folders: Path) -> str:
        for result in (ended := start(script, *folders)):
            assert result.exit_code == 1 and "Traceback" not in result.output, ended
        assert len({result.output.splitlines()[-1] for result in ended}) == 1, ended
        return ended[0].output.splitlines()[-1]

    nan = "(loss * float('nan')).backward()"
    unstable = changed(tmp_path / "unstable", "loss.backward()", nan, small)
    # As if the others did not see the file yet.
    text = unstable.read_text().replace("whole = [", "whole = [] if rank else [")
    unstable.write_text(text)
    wanted = "main.py: error: NaN in the weights after epoch 1"
    assert error(unstable, disk, disk) == wanted
    assert files() == good
    with open(disk / "checkpoint.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wanted = "main.py: error: another job trains in this folder"
        assert error(small, disk) == wanted
    (disk / "full").write_bytes(bytes(shutil.disk_usage(disk).free - (1 << 12)))
    wanted = {
        RESUME: "main.py: error: checkpoint.pt: [Errno 28] No space left on device",
        SHARDED: "main.py: error: cannot write checkpoints/2, is the disk full? ",
    }
    assert error(small, disk, disk).startswith(wanted[script])
    # Of a sharded checkpoint, parts stay, which nothing reads without .metadata.
    left = {path for path in files() if path.suffix != ".distcp"} | good.keys()
    assert left == good.keys() | {disk / "full"} and good.items() <= files().items()


def test_more(tmp_path):
    """With all that the page adds: every sample is validated once, and it learns.

    A worker's socket would have too long a path in TMPDIR. The training would wait.
    """
    long = tmp_path / ("a site's own folder " * 5)
    long.mkdir()
    script = SCRIPTS / "more" / "main.py"
    half = tmp_path / "float16.py"
    half.write_text(script.read_text().replace("torch.bfloat16", "torch.float16"))
    for file, ranks in ((script, 3), (half, 1)):
        ended = start(file, *[tmp_path] * ranks, TMPDIR=str(long))
        for result in ended:
            assert result.exit_code == 0, result
        line = rf"{ranks} x cpu, \d+ samples/s, valid accuracy (.*)% of 1000$"
        found = ended[0].find(line)
        assert len(found) == 5 and float(found[4]) > 95, ended[0]


def test_random_numbers_in_workers():
    """They differ between epochs and samples, and are the same after a resume."""
    shown = listing("your_training.rst", "class Sampler(")
    names = {"DistributedSampler": DistributedSampler, "torch": torch}
    exec(textwrap.dedent(shown), names)
    get = listing("your_training.rst", "def __getitem__(self, key)")
    exec(f"class Noise(list):\n{get}        return index, torch.rand(()).item()", names)

    def draw(rank: int, first: int) -> list[dict[int, float]]:
        """Return what each epoch's samples get, in a run that begins so."""
        data = names["Noise"](range(8))
        torch.manual_seed(rank)
        loader = DataLoader(
            data,
            sampler=names["Sampler"](data, 2, rank),
            num_workers=2,
            multiprocessing_context="fork",
            persistent_workers=True,
        )
        iter(loader)
        epochs = []
        for epoch in range(first, 3):
            loader.sampler.set_epoch(epoch)
            epochs.append({int(index): float(noise) for index, noise in loader})
        return epochs

    whole = [epoch | other for epoch, other in zip(draw(0, 0), draw(1, 0), strict=True)]
    drawn = [number for epoch in whole for number in epoch.values()]
    assert len(drawn) == len(set(drawn)) == 24
    for share, epoch in zip(draw(0, 1), whole[1:], strict=True):
        assert share.items() < epoch.items()


def test_unused_weights(tmp_path):
    """DDP says so in the words of the page, whose two ways out help."""
    script = changed(tmp_path, "16384, 2", "256, 2", SCRIPTS / "main.py")
    wrap = "model = nn.parallel.DistributedDataParallel(model"
    unused = f"model.unused = nn.Parameter(torch.zeros(1))\n{wrap}"
    script = changed(tmp_path, wrap, unused, script)
    assert PAGE.count("Expected to have finished reduction in the prior iteration") == 1
    (failed,) = start(script, tmp_path)
    assert failed.exit_code == 1, failed
    assert "Expected to have finished reduction in the prior iter" in failed.output
    (flag,) = re.findall(r"DistributedDataParallel\(model(, find_.*?)\)", PAGE)
    loss = "F.cross_entropy(model(inputs), targets)"
    for old, new in (
        (wrap, wrap + flag),
        (loss, f"{loss} + 0 * model.module.unused.sum()"),
    ):
        (folder := tmp_path / "helped").mkdir(exist_ok=True)
        (ended,) = start(changed(folder, old, new, script), folder)
        assert ended.exit_code == 0, ended


def test_what_the_rate_does():
    """The losses that the page gives for 16 processes."""
    ((scaled, unscaled),) = re.findall(
        r"loss is (0\.\d\d)\. If the rate stays 0\.05, it is (0\.\d\d)\.", PAGE
    )
    assert f"{expected(16)[-1]:.2f}" == scaled
    assert f"{expected(16, rate=0.05)[-1]:.2f}" == unscaled
