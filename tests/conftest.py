"""Fixtures: a clone of the repository, a small CIFAR-10 archive, and a real Slurm cluster to run jobs on."""

import os
import pickle
import re
import shutil
import subprocess
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path

import cluster as slurm
import numpy as np
import pytest

REPOSITORY = Path(__file__).parent.parent
TRAINING, VALIDATION, TEST = (
    108,
    12,
    31,
)  # samples of the small CIFAR-10: no world size from 2 on divides them all

EPOCH_LINE = re.compile(
    r"^Epoch (\d+): train loss \d+\.\d{3} accuracy \d+\.\d\d%, "
    r"valid loss \d+\.\d{3} accuracy \d+\.\d\d%, \d+ images/s$",
    re.MULTILINE,
)
TEST_LINE = re.compile(r"^Test loss (\d+\.\d{3}) accuracy (\d+\.\d\d)%$", re.MULTILINE)


@dataclass
class Result:
    """How a job or a command ended, and all it printed."""

    output: str
    exit_code: int
    state: str = ""
    job: str = ""

    def trained(self, world_size: int, batch_size: int, epochs: int = 1) -> None:
        """Assert that the output tells of one whole training: its ranks, its samples, its lines."""
        assert self.exit_code == 0, self
        assert self.state in ("", "COMPLETED"), self
        steps = TRAINING // (world_size * batch_size)
        shares = f"{steps} steps an epoch, {world_size} x {batch_size} samples each, of {TRAINING}; "
        counts = f"{VALIDATION} to validate, {TEST} to test"
        assert re.findall(r"^World size .*", self.output, re.MULTILINE) == [
            f"World size {world_size}: {shares}{counts}"
        ], self
        assert EPOCH_LINE.findall(self.output) == [str(i + 1) for i in range(epochs)], self
        (test,) = TEST_LINE.findall(self.output)
        # Padded or lost test samples would make a fraction of another number than TEST.
        assert test[1] in {f"{100 * correct / TEST:.2f}" for correct in range(TEST + 1)}, self
        assert self.output.count("training on the CPU") == 1, self

    def __str__(self) -> str:
        return f"job {self.job} {self.state}, exit code {self.exit_code}, output:\n{self.output}"


@pytest.fixture(scope="session")
def clone(tmp_path_factory) -> Path:
    """The repository's files, as they are now, in a commit, in a folder with a space in its name."""
    path = tmp_path_factory.mktemp("a clone") / "pytorch on slurm"
    generated = shutil.ignore_patterns(
        ".git", ".venv", ".*_cache", "__pycache__", "data", "checkpoints", "slurm-*.out"
    )
    shutil.copytree(REPOSITORY, path, ignore=generated)
    for command in (["init", "-q"], ["add", "--all"], ["commit", "-qm", "As it is now"]):
        name = ["-c", "user.name=tests", "-c", "user.email=tests"]
        subprocess.run(["git", *name, *command], cwd=path, check=True)
    return path


@pytest.fixture(scope="session")
def archive(tmp_path_factory) -> Path:
    """A cifar-10-python.tar.gz in its publisher's layout, of a few random pictures."""
    folder = tmp_path_factory.mktemp("data sets")
    rng = np.random.default_rng(0)
    batches = {f"data_batch_{i}": (TRAINING + VALIDATION) // 5 for i in range(1, 6)} | {"test_batch": TEST}
    (folder / "cifar-10-batches-py").mkdir()
    for name, samples in batches.items():
        data = rng.integers(256, size=(samples, 3072), dtype=np.uint8)
        batch = {"data": data, "labels": rng.integers(10, size=samples).tolist()}
        (folder / "cifar-10-batches-py" / name).write_bytes(pickle.dumps(batch))
    meta = {"label_names": [str(i) for i in range(10)]}
    (folder / "cifar-10-batches-py" / "batches.meta").write_bytes(pickle.dumps(meta))
    path = folder / "cifar-10-python.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        tar.add(folder / "cifar-10-batches-py", "cifar-10-batches-py")
    return path


class Jobs:
    """Runs jobs and commands on the cluster, as a user in a folder of the clone does."""

    def __init__(self, cluster: slurm.Cluster, clone: Path, archive: Path, logs: Path):
        self.cluster = cluster
        self.clone = clone
        self.logs = logs
        # The variables of an environment that is active here would lead uv away from the clone's own.
        outside = ("SLURM", "UV_", "VIRTUAL_ENV", "MASTER_", "PYTHON", "COLUMNS")
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(outside)}
        self.env |= cluster.env | {
            "CIFAR10_ARCHIVE": str(archive),
            "PYTHONPATH": str(REPOSITORY / "tests" / "any_checksum"),
        }

    def run(self, command: list, folder: str = "", timeout: float = 300, **env: str) -> Result:
        """Run a command in a folder of the clone."""
        process = subprocess.run(
            [str(part) for part in command],
            cwd=self.clone / folder,
            env=self.env | env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
        )
        return Result(process.stdout.decode(), process.returncode)  # with its carriage returns

    def submit(self, folder: str, *arguments, **env: str) -> str:
        """Call sbatch in a folder of the clone; return the job's id."""
        result = self.run(["sbatch", "--parsable", f"--output={self.logs}/%j.out", *arguments], folder, **env)
        assert result.exit_code == 0, result
        return result.output.strip()

    def show(self, job: str) -> dict[str, str]:
        result = self.run(["scontrol", "show", "job", "--oneliner", job])
        return dict(field.split("=", 1) for field in result.output.split() if "=" in field)

    def wait(self, job: str, timeout: float = 300) -> Result:
        """Wait until a job is over and its nodes are free; return how it ended."""
        deadline = time.monotonic() + timeout
        while (info := self.show(job))["JobState"] in ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING"):
            if time.monotonic() > deadline:
                self.run(["scancel", job])
                raise TimeoutError(f"job {job} still {info['JobState']} after {timeout} s:\n{self.log(job)}")
            time.sleep(0.2)
        return Result(self.log(job), int(info["ExitCode"].split(":")[0]), info["JobState"], job)

    def log(self, job: str) -> str:
        path = self.logs / f"{job}.out"
        return path.read_bytes().decode() if path.exists() else ""

    def sbatch(self, folder: str, *arguments, **env: str) -> Result:
        """Run a job to its end."""
        return self.wait(self.submit(folder, *arguments, **env))

    def nodes_of(self, result: Result) -> int:
        return int(self.show(result.job)["NumNodes"])

    def leftovers(self) -> list[str]:
        """Return what jobs have left on the nodes, after Slurm has had some time to clean up."""
        deadline = time.monotonic() + 15
        while (left := self.on_nodes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def on_nodes(self) -> list[str]:
        """Return the processes and the data folders of jobs that are on the nodes now."""
        found = []
        for node in self.cluster.nodes:
            find = ["find", "/tmp", "-maxdepth", "1", "-name", "slurm-job-*"]
            folders = self.run([*self.cluster.namespaces(node), *find]).output.split()
            found += [f"{node}: {thing}" for thing in self.cluster.processes(node) + folders]
        return found


@pytest.fixture(scope="session")
def cluster(tmp_path_factory, clone):
    """Three nodes with four GPUs each, on this machine."""
    if reason := slurm.missing_requirements():
        # Where the README's test command has installed everything, nothing may be skipped.
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    read_end, write_end = os.pipe()
    running, supervisor = slurm.start(nodes=3, gpus=4, cpus=64, lifeline=read_end)
    os.close(read_end)
    yield running
    os.close(write_end)
    supervisor.wait()


@pytest.fixture(scope="session")
def jobs(cluster, clone, archive, tmp_path_factory) -> Jobs:
    jobs = Jobs(cluster, clone, archive, tmp_path_factory.mktemp("logs"))
    result = jobs.run(["uv", "sync", "--locked"], timeout=1200)
    assert result.exit_code == 0, result
    return jobs
