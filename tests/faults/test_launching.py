"""Jobs that share a node, or start in odd places or from odd shells."""

import shutil
import socket
from pathlib import Path

import pytest
from slurm_jobs import EPOCHS, PICTURES, TWO, every_case, weights

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_same_port(user):
    """With one port for two jobs on a node, the second says so, and only it ends."""
    one = ["--nodes=1", "--nodelist=node1", *TWO]
    first = user.train("--epochs=40", flags=one, MASTER_PORT="23456")
    user.until(first, "^World size")
    second = user.wait(user.train(*EPOCHS, flags=one, MASTER_PORT="23456"))
    assert (second.state, second.restarts) == ("FAILED", 0), second
    (error,) = second.find("^main.py: error: .*")
    assert "MASTER_PORT=23456" in error and "address already in use" in error, second
    user.until(first, "^Epoch 2: ")
    assert "starts again" not in user.cancel(first).output


@pytest.mark.parametrize("when", every_case("they train", "they meet"))
def test_stranger_at_the_port(user, same_end, when):
    """Someone who speaks to rank 0's port in another language changes nothing."""
    job = user.train(*EPOCHS, "--save-steps=3", MASTER_PORT="23457")
    port = (user.cluster.address("node1"), 23457)

    def speak() -> bool:
        try:
            for message in (b"GET / HTTP/1.1\r\n\r\n", bytes(4096), b"\xff" * 4096):
                with socket.create_connection(port, timeout=10) as connection:
                    connection.sendall(message)
        except OSError:
            return False
        return True

    if when == "they train":
        user.until_file(job, "*-step-000003.pt")
        assert speak()
    else:
        user.until_found(job, speak, "listener", 120, 0.001)
        assert "World size" not in user.log(job)
    same_end(job, restarts=0)
    assert not speak()  # it is open no longer than the job


def test_quotes_and_spaces(user, tmp_path, same_end):
    """Any character may be in a path. (The repository's has a space, too.)"""
    name = """a 'single' and a "double" quote, $HOME, `date`, a*? and \\"""
    folder, source, disk = (
        tmp_path / name,
        tmp_path / f"from {name}",
        Path("/tmp", name),
    )
    shutil.copytree(user.env["IMAGENET_DIR"], source)
    for node in ("node1", "node2"):
        user.on(node, "mkdir", disk)
    job = user.train(
        *EPOCHS,
        RUN_DIR=str(folder),
        IMAGENET_DIR=str(source),
        SLURM_TMPDIR=str(disk),
    )
    result = same_end(job, restarts=0)
    words = f"images in {disk}/slurm-job-{job}-cluster."
    assert words in result.output, result
    for node in ("node1", "node2"):
        assert user.on(node, "rmdir", disk).exit_code == 0
    assert (folder / "best.pt").exists()


@pytest.mark.every_case
@pytest.mark.parametrize("tasks", [24])
def test_many_tasks_start_at_once(user, tasks):
    """All of them start uv and import torch at once, without a way to the internet."""
    flags = f"--ntasks-per-node={tasks // 2} --gpus-per-node=0 --cpus-per-task=1"
    flags = [*flags.split(), "--mem=16G"]
    arguments = ["--epochs=1", "--batch-size=1", "--image-size=64", "--workers=0"]
    result = user.wait(user.train(*arguments, flags=flags), timeout=800)
    weights(result, pictures=PICTURES - PICTURES % tasks)
    assert f"World size {tasks}: " in result.output


@pytest.mark.timeout(3600)
@pytest.mark.every_case
@pytest.mark.parametrize("count, at_once", [(6, 3), (100, 50)])
def test_many_short_jobs(user, count, at_once):
    """An array of short jobs: none is lost."""
    flags = "--nodes=1 --ntasks-per-node=1 --gpus-per-node=0 --cpus-per-task=1 --mem=1G"
    flags += f" --array=1-{count}%{at_once} --output={user.logs}/%A_%a.out"
    arguments = ["--epochs=1", "--model=dummy", "--workers=0"]
    array = user.train(*arguments, flags=flags.split())
    tasks = range(1, count + 1)
    results = [user.wait(f"{array}_{task}", timeout=3000) for task in tasks]
    # Each has a seed of its own.
    assert len({weights(result) for result in results}) == count


# What srun, OpenMP, Python and bash would take from the environment, with values that
# would end a job, change it, or hide what it says.
HOSTILE = """
SLURM_GPUS=8 SLURM_GPUS_PER_NODE=4 SLURM_GPUS_PER_SOCKET=4 SLURM_GPUS_PER_TASK=4
SLURM_GPU_BIND=map_gpu:3 SLURM_GPU_FREQ=high SLURM_GRES=gpu:4 SLURM_STEP_GRES=gpu:4
SLURM_MEM_PER_CPU=999999 SLURM_MEM_PER_GPU=999999 SLURM_MEM_BIND=map_mem:1
SLURM_TRES_BIND=gres/gpu:map:3 SLURM_TRES_PER_TASK=gres/gpu:4 SLURM_GRES_FLAGS=x
SLURM_CPUS_PER_GPU=60 SLURM_NTASKS_PER_GPU=1 SLURM_CPU_BIND=map_cpu:77
SLURM_CONSTRAINT=a100 SLURM_HOSTFILE=/nowhere SLURM_HET_SIZE=2 SLURM_RESV_PORTS=5
SLURM_EXACT=1 SLURM_EXCLUSIVE=x SLURM_IMMEDIATE=1 SLURM_WAIT=1 SLURM_SIGNAL=KILL@60
SLURM_TIMELIMIT=0:01 SLURM_NO_KILL=x SLURM_EXIT_ERROR=3 SLURM_EXIT_IMMEDIATE=3
SLURM_STDINMODE=none SLURM_STDOUTMODE=none SLURM_STDERRMODE=none SLURM_OPEN_MODE=x
SLURM_LABELIO=1 SLURM_WORKING_DIR=/nowhere SLURM_REMOTE_CWD=/nowhere
SLURM_PROLOG=/bin/false SLURM_EPILOG=/bin/false SLURM_TASK_PROLOG=/bin/false
SLURM_TASK_EPILOG=/bin/false SLURM_BCAST=/nowhere/x SRUN_CPUS_PER_TASK=60
SRUN_OUTPUT=none SRUN_ERROR=none SRUN_INPUT=none SRUN_CONTAINER=/nowhere
SRUN_EXPORT_ENV=NONE SLURM_ARRAY_TASK_ID=3 SLURM_ARRAY_JOB_ID=1
OMP_NUM_THREADS=7 OMP_PROC_BIND=true OMP_PLACES={0} OMP_THREAD_LIMIT=1
GOMP_CPU_AFFINITY=0 KMP_AFFINITY=granularity=fine,compact
PYTHONPATH=/nowhere PYTHONHOME=/nowhere PYTHONSAFEPATH=1 PYTHONWARNINGS=error
PYTHONOPTIMIZE=2 PYTHONIOENCODING=ascii RANK=1 WORLD_SIZE=1 LOCAL_RANK=1
MASTER_ADDR=nowhere MASTER_PORT=1 SLURM_TIME_FORMAT=relative
SLURM_UMASK=0777 SLURM_CLUSTERS=other SLURM_NTASKS_PER_TRES=2
TORCHELASTIC_RUN_ID=x TORCHELASTIC_USE_AGENT_STORE=True VIRTUAL_ENV=/nowhere
POSIXLY_CORRECT=1 BASH_COMPAT=4.2 CDPATH=/ GLOBIGNORE=* TAR_OPTIONS=--strip-components=1
"""


def test_hostile_shell(user, same_end, monkeypatch):
    """The job trains, and ends with the same weights.

    The shell has limits, too, as on a login node: of memory and of seconds.
    """
    hostile = dict(word.split("=", 1) for word in HOSTILE.split())
    # sbatch itself would read these two.
    not_for_sbatch = ("SLURM_CLUSTERS", "SLURM_HOSTFILE")
    export = ",".join(f"{name}={hostile.pop(name)}" for name in not_for_sbatch)
    flags = [*TWO, f"--export=ALL,{export}"]
    limits = ["bash", "-c", 'ulimit -Sv 1000000 -St 3; exec "$@"', "bash"]
    monkeypatch.setattr(user, "shell", limits)
    result = same_end(user.train(*EPOCHS, flags=flags, **hostile), restarts=0)
    assert not result.find("^srun: error|VIRTUAL_ENV"), result
