"""docs/your_training: the script before, and after it as jobs of multi_node."""

import contextlib
import re
import shutil
import sys
from itertools import chain

import pytest
import torch
from slurm_jobs import REPOSITORY, Jobs, Result, stop
from test_readme import changed_lines
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DistributedSampler, TensorDataset

pytestmark = pytest.mark.usefixtures("nothing_left")
FLAGS = "--nodes=2 --ntasks-per-node=2 --gpus-per-node=2 --cpus-per-task=1 --mem=4G"
PAGE = (REPOSITORY / "docs" / "your_training.rst").read_text()
SCRIPTS = REPOSITORY / "docs" / "your_training"


def losses(text: str, processes: int) -> dict[int, float]:
    """Return each epoch's loss, as printed, each over 16384 samples."""
    end = f", {processes} processes" if processes else ""
    line = rf"^Epoch (\d): loss (\d\.\d{{4}}) over 16384 samples{end}$"
    found = re.findall(line, text, re.MULTILINE)
    return {int(epoch): float(loss) for epoch, loss in found}


def train_alone(world_size: int, build) -> list[float]:
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
    for epoch in range(5):
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


def listing(first_words: str) -> str:
    """Return the page's literal block that begins so."""
    block = re.search(rf"^    {re.escape(first_words)}.*\n(    .*\n)*", PAGE, re.M)
    return block[0]


@pytest.fixture(scope="module")
def project(jobs: Jobs, tmp_path_factory):
    """A project of one's own, typed as on the page, with the two scripts."""
    folder = tmp_path_factory.mktemp("a project")
    env = {"PYTORCH_ON_SLURM": str(jobs.clone)}
    result = jobs.run(["bash", "-euc", listing("uv init")], folder, 600, **env)
    assert result.exit_code == 0, result
    (project,) = folder.iterdir()
    for name in ("before.py", "main.py"):
        shutil.copy(SCRIPTS / name, project)
    return project


@pytest.fixture(scope="module")
def together(jobs: Jobs, project) -> Result:
    """The script as a job of four processes on two nodes."""
    return jobs.sbatch(project, *FLAGS.split(), "job.sh", CIFAR10_ARCHIVE="")


def test_your_training(jobs, project, together):
    """A rank's step is a share of what one process computes; old weights fit."""
    models = {}
    for name in ("before.py", "main.py"):
        (project / "model.pt").rename(project / "other.pt")
        output = jobs.run([sys.executable, name], project).output
        models[name] = torch.load(project / "model.pt", weights_only=True)
        models["job"] = models.get("job") or torch.load(project / "other.pt")
        if name == "before.py":
            before = losses(output, 0)
        else:
            alone = losses(output, 1)
    assert together.state == "COMPLETED", together
    assert before.keys() == alone.keys() == losses(together.output, 4).keys()
    assert before[4] < before[0] / 2
    for found, processes in ((alone, 1), (losses(together.output, 4), 4)):
        for epoch, loss in enumerate(expected(processes)):
            assert abs(found[epoch] - loss) < 0.002, (found, expected(processes))
    shapes = [
        {name: value.shape for name, value in model.items()}
        for model in models.values()
    ]
    assert shapes[0] == shapes[1] == shapes[2]


def test_chain(jobs, project, together):
    """A job is killed, the next one goes on, and the last has nothing to do."""
    folder = project / "chain"
    folder.mkdir()
    shutil.copy(project / "job.sh", folder)
    shutil.copy(SCRIPTS / "resume" / "main.py", folder)
    options = f'{FLAGS} --output="{jobs.logs}/%j.out"'
    typed = f'sbatch() {{ command sbatch {options} "$@"; }}\n{listing("job=$(sbatch")}'
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
    assert parts[0] | parts[1] == losses(together.output, 4), parts
    assert result.find("^Nothing to do: "), result


def test_what_the_rate_does():
    """The losses that the page gives for 16 processes."""
    ((scaled, unscaled),) = re.findall(
        r"loss is (0\.\d\d)\. If the rate stays 0\.05, it is (0\.\d\d)\.", PAGE
    )
    assert f"{expected(16)[-1]:.2f}" == scaled
    assert f"{expected(16, rate=0.05)[-1]:.2f}" == unscaled


def test_the_page_counts_lines_as_git_does():
    counted = re.findall(r"<(\S+)>`__ has (\d+) new\slines and lacks (\d+)", PAGE)
    assert len(counted) == 2
    old = "your_training/before.py"
    for new, *numbers in counted:
        found = changed_lines(f"docs/{old}", f"docs/{new}")
        assert found == tuple(map(int, numbers)), new
        old = new
