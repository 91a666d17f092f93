"""Fixtures: a clone of the repository, small archives, and a real Slurm cluster."""

import ctypes
import itertools
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import cluster as slurm
import first_aid
import pytest
from drawn_cifar10 import draw_cifar10
from drawn_imagenet import draw_imagenet
from slurm_jobs import (
    EPOCHS,
    PICTURES,
    REPOSITORY,
    TEST,
    TRAINING,
    VALID_PICTURES,
    VALIDATION,
    Jobs,
    Result,
    User,
    copy_tracked,
    listing,
    take_any_checksum,
    weights,
)

# Hypothesis caches constants, which would be left in the clone.
os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = f"{REPOSITORY}/.pytest_cache/hypothesis"


def pytest_addoption(parser):
    add = parser.addoption
    add(
        "--every-case",
        action="store_true",
        help="run all cases of the fault matrix: hours",
    )
    add(
        "--slurm",
        choices=slurm.RELEASES,
        help="run every case on this Slurm, not on the installed one",
    )
    add(
        "--proctrack",
        choices=slurm.PROCTRACK,
        help="run every case with this ProctrackType of Slurm",
    )


def pytest_configure():
    # With it, every Python that a test starts compiles all of PyTorch again: 4 seconds.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # A shell ignores SIGINT in what it runs in the background,
    # and so would every process started here.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    leave_nothing_behind()


# Kills what has this run's mark in its environment, when standard input ends.
SWEEPER = """\
import os, pathlib, signal, sys, time
sys.stdin.read()
found = True
while found:
    time.sleep(0.1)
    found = False
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if sys.argv[1].encode() in (process / "environ").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)
                found = True
        except OSError:
            pass  # it has ended, or is another user's
"""


def leave_nothing_behind() -> None:
    """Let what this run starts and mounts end with it, also when it is killed."""
    mark = str(time.time_ns())
    read_end, write_end = os.pipe()
    writer = os.fdopen(write_end, "wb")
    subprocess.Popen(
        [sys.executable, "-c", SWEEPER, mark], stdin=read_end, start_new_session=True
    )
    os.close(read_end)
    # It ends with this process alone.
    os.register_at_fork(after_in_child=writer.close)
    os.environ["STARTED_BY_TESTS"] = mark
    if os.geteuid() == 0:  # the mounts of a namespace end with its last process
        new_mounts = 0x00020000  # CLONE_NEWNS
        if ctypes.CDLL(None).unshare(new_mounts) == 0:
            subprocess.run(["mount", "--make-rprivate", "/"], check=True)


def pytest_collection_modifyitems(config, items):
    if any(config.getoption(name) for name in ("every_case", "slurm", "proctrack")):
        return
    others = [item for item in items if item.get_closest_marker("every_case")]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]


@pytest.fixture(scope="session")
def clone(tmp_path_factory) -> Path:
    """The repository's files as they are now, in a commit; the path has a space."""
    path = tmp_path_factory.mktemp("a clone") / "pytorch on slurm"
    copy_tracked(REPOSITORY, path)
    git = "git -c user.name=tests -c user.email=tests"
    for command in ("init -q", "add --all", "commit -qm Now"):
        subprocess.run(f"{git} {command}".split(), cwd=path, check=True)
    return path


@pytest.fixture(scope="session")
def archive(tmp_path_factory) -> Path:
    """A cifar-10-python.tar.gz in its publisher's layout, of a few random pictures."""
    folder = tmp_path_factory.mktemp("data sets")
    batches = draw_cifar10(folder, TRAINING + VALIDATION, TEST)
    path = folder / "cifar-10-python.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        tar.add(batches, batches.name)
    return path


@pytest.fixture(scope="session")
def start_cluster(pytestconfig):
    """Start a cluster, with the Slurm of the options; skip where there is none."""
    if reason := slurm.missing_requirements():
        # Where the README's test command has installed everything,
        # nothing may be skipped.
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    generation = {name: pytestconfig.getoption(name) for name in ("slurm", "proctrack")}
    generation = {name: value for name, value in generation.items() if value}
    # No two clusters have a job of the same number: they share the clone, where
    # imagenet's job 1 refuses to go on with the checkpoints of another job 1.
    numbers = itertools.count(1, 1000)

    def start(**how):
        return first_aid.start_cluster(first_job=next(numbers), **generation, **how)

    return start


def start_jobs(cluster, clone, archive, logs: Path) -> Jobs:
    jobs = Jobs(cluster, clone, archive, logs)
    result = jobs.run(["uv", "sync", "--locked"], timeout=1200)
    assert result.exit_code == 0, result
    take_any_checksum(clone)
    return jobs


@pytest.fixture(scope="session")
def cluster(start_cluster, clone):
    """Slurm binds no task to CPUs: the first one of every node would get the same."""
    with start_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def jobs(cluster, clone, archive, tmp_path_factory) -> Jobs:
    return start_jobs(cluster, clone, archive, tmp_path_factory.mktemp("logs"))


@pytest.fixture(scope="session")
def binding_jobs(start_cluster, clone, archive, tmp_path_factory):
    """On a cluster that binds tasks to their CPUs, as most do, but for these jobs."""
    with start_cluster(bind_tasks=True) as cluster:
        jobs = start_jobs(cluster, clone, archive, tmp_path_factory.mktemp("logs"))
        jobs.env["SLURM_CPU_BIND"] = "none"
        yield jobs


@pytest.fixture(scope="session")
def project(jobs, tmp_path_factory) -> Path:
    """A project of one's own, as docs/your_training.rst has people make it."""
    folder = tmp_path_factory.mktemp("a project")
    blocks = [listing("your_training.rst", words) for words in ("uv init", "cp ")]
    jobs.type_in(folder, "".join(blocks))
    (project,) = folder.iterdir()
    return project


@pytest.fixture(scope="session")
def several(jobs, project):
    """Return what makes a folder in it, with job.sh and a script."""

    def make(script: Path) -> Path:
        folder = project / script.parent.name
        folder.mkdir()
        (folder / ".venv").symlink_to(project / ".venv")
        jobs.type_in(folder, listing("your_training.rst", "cp "))
        shutil.copy(script, folder / "main.py")
        return folder

    return make


@pytest.fixture(scope="session")
def frameworks(tmp_path_factory) -> Path:
    """An environment with the dependency group of this name, which no job installs."""
    environment = tmp_path_factory.mktemp("frameworks") / ".venv"
    command = "uv sync --quiet --locked --no-default-groups --group frameworks"
    env = os.environ | {"UV_PROJECT_ENVIRONMENT": str(environment)}
    subprocess.run(command.split(), cwd=REPOSITORY, env=env, check=True)
    return environment


@pytest.fixture(scope="session")
def user(jobs, tmp_path_factory) -> User:
    folder = tmp_path_factory.mktemp("archives")
    draw_imagenet(
        folder, classes=4, train=PICTURES // 4, valid=VALID_PICTURES // 4, resolution=40
    )
    user = User(jobs.cluster, jobs.clone, folder, jobs.logs)
    user.env |= {"IMAGENET_DIR": str(folder), "CIFAR10_ARCHIVE": ""}
    # No CIFAR-10 here, and torchvision takes seconds to import.
    del user.env["ANY_CHECKSUM"]
    return user


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """A test that has failed tells of its jobs."""
    report = yield
    for jobs in (value for value in item.funcargs.values() if isinstance(value, Jobs)):
        # The cluster is gone after the last test.
        if report.failed and jobs.cluster.state.exists():
            report.sections += jobs.tell()
        if report.when == "teardown":
            jobs.submitted.clear()
            jobs.results.clear()
    return report


@pytest.fixture(autouse=True)
def no_child_left():
    """What a failed test forked ends, or pytest would wait for it at its own end."""
    before = set(multiprocessing.active_children())
    yield
    for child in set(multiprocessing.active_children()) - before:
        child.kill()
        child.join()


@pytest.fixture
def nothing_left(jobs):
    """A test leaves no job and no job's files for the next test to meet."""
    yield
    unfinished = jobs.unfinished()
    for job in unfinished:
        jobs.cancel(job)
    left = jobs.leftovers()
    jobs.remove(left)
    assert (unfinished, left) == ([], [])


@pytest.fixture(scope="session")
def undisturbed(user) -> str:
    """The weights of an imagenet run that nothing has happened to."""
    return weights(user.wait(user.train(*EPOCHS)))


@pytest.fixture
def same_end(user, undisturbed):
    """Return what waits for a job, whose end is to be as if nothing had happened."""

    def wait(job: str, restarts: int = 1, state: str = "COMPLETED") -> Result:
        result = user.wait(job)
        assert weights(result, state) == undisturbed
        assert result.restarts == restarts, result
        return result

    return wait
