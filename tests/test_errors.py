"""What a user sees when something is wrong.

One clear line, soon, and a job that failed and left nothing.
"""

import os
import re
import signal

import pytest
from slurm_jobs import Jobs, Result

pytestmark = pytest.mark.usefixtures("nothing_left")
SMALL = ["--cpus-per-task=1", "--mem=1G"]
TWO_NODES = ["--nodes=2", "--nodelist=node[1-2]", "--ntasks-per-node=1"]
TWO_NODES += [*SMALL, "--gpus-per-node=1"]
TWO_TASKS = [*SMALL, "--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=2"]
SYNTHETIC = ["--synthetic", "--epochs=1", "--batch-size=4"]
MAIN = ["uv", "run", "--no-sync", "python", "main.py", *SYNTHETIC]
SOON = 300  # seconds: the first Python of a new environment compiles PyTorch


def sbatch(jobs: Jobs, folder: str, *arguments, **env: str) -> Result:
    return jobs.wait(jobs.submit(folder, *arguments, **env), timeout=SOON)


def salloc(jobs: Jobs, folder: str, *arguments, **env: str) -> Result:
    return jobs.run(["salloc", *arguments], folder, timeout=SOON, **env)


def assert_failed(result: Result, message: str, times: int = 0, node: str = "") -> None:
    """Assert that a job failed and said why, before Slurm did, without a traceback."""
    assert result.exit_code != 0, result
    assert result.state in ("", "FAILED"), result
    lines = result.output.splitlines()
    said = [i for i, line in enumerate(lines) if re.search(message, line)]
    assert said, result
    assert times in (0, len(said)), result
    errors = (f"srun: error: {node}", "slurmstepd: error")
    slurm = [i for i, line in enumerate(lines) if line.startswith(errors)]
    assert said[0] < min(slurm, default=len(lines)), result
    before = "\n".join(lines[: said[0]])
    assert not re.search(r"Traceback|\[[WE]", before), result


@pytest.mark.parametrize(
    "folder, nodes", [("single_gpu", ["node1"]), ("multi_node", ["node1", "node2"])]
)
def test_truncated_archive(jobs, archive, tmp_path, folder, nodes):
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes(archive.read_bytes()[:20000])
    result = sbatch(jobs, folder, *SMALL, "job.sh", CIFAR10_ARCHIVE=str(cut))
    for node in nodes:
        message = rf"^job.sh: error: {node} cannot unpack CIFAR10_ARCHIVE={cut}$"
        assert_failed(result, message, times=1, node=node)


NO_TASK = "this is no task of the job: start main.py with srun"
ONE_TASK = "start it with srun, as one task, not {}; multi_gpu is for several"


@pytest.mark.parametrize(
    "start, folder, tasks, message",
    [
        (salloc, "single_gpu", 1, ONE_TASK.format("none")),
        (salloc, "multi_gpu", 1, NO_TASK),
        (sbatch, "multi_node", 2, NO_TASK),
    ],
    ids=["salloc", "salloc, multi_gpu", "sbatch"],
)
def test_started_without_srun(jobs, start, folder, tasks, message):
    """It would train without the job's GPU, or wait for tasks that never start."""
    command = MAIN if start is salloc else [f"--wrap={' '.join(MAIN)}"]
    result = start(jobs, folder, *SMALL, f"--ntasks={tasks}", *command)
    assert_failed(result, f"^main.py: error: {message}$", times=1)


@pytest.mark.parametrize(
    "folder, driver", [("single_gpu", "nvidiactl"), ("imagenet", "kfd")]
)
def test_broken_driver(jobs, folder, driver):
    """It ends the job, which would train on the CPU for hours, unless that is asked.

    There is no driver here: its file is made up, in a /dev of the task's own.
    """
    script = f"""mount -t tmpfs none /mnt && mkdir /mnt/shm && touch /mnt/{driver}
        mknod /mnt/null c 1 3 && mknod /mnt/urandom c 1 9 && mount --move /mnt /dev
        exec env "$@" """
    flags = [*SMALL, "--nodelist=node1", "--ntasks=1", "--gpus-per-node=1"]
    srun = ["srun", "unshare", "--mount", "bash", "-ec", script, "bash"]
    broken = salloc(jobs, folder, *flags, *srun, *MAIN)
    # So it is in a container without --nv, too.
    message = "^main.py: error: PyTorch finds no GPU of node1: .* --nv, or --exclude .*"
    assert_failed(broken, message + "env CUDA_VISIBLE_DEVICES= before python$", times=1)
    command = ["CUDA_VISIBLE_DEVICES=", *MAIN, "--batch-size=9999"]
    on_cpu = salloc(jobs, folder, *flags, *srun, *command)
    assert_failed(on_cpu, "^main.py: error: a step takes 9999 samples ", times=1)


@pytest.mark.parametrize(
    "folder, flags, message",
    [
        ("single_gpu", TWO_TASKS, f"main.py: error: {ONE_TASK.format(2)}"),
        ("single_gpu", TWO_NODES, "job.sh: error: use multi_node"),
        ("multi_gpu", TWO_NODES, "job.sh: error: use multi_node"),
        (
            "multi_node",
            [*TWO_TASKS, "--gpus-per-node=1"],
            "main.py: error: node1 has more tasks than GPUs: ask for fewer tasks",
        ),
    ],
)
def test_too_many_tasks(jobs, folder, flags, message):
    """Each would train the same, or share a GPU."""
    result = sbatch(jobs, folder, *flags, "job.sh", *SYNTHETIC)
    assert_failed(result, f"^{message}$")


def test_not_what_job_sh_is_for(jobs):
    """sbatch in another folder, and a job.sh within srun."""
    part = ["--nodes=1", "--ntasks-per-node=1", *SMALL]
    result = sbatch(jobs, "", *part, "single_gpu/job.sh", *SYNTHETIC)
    error = f"no main.py in {re.escape(str(jobs.clone))}"
    assert_failed(result, f"^job.sh: error: {error}$", times=1)
    srun = ["srun", *part, "bash", "job.sh", *SYNTHETIC]
    for folder in ("single_gpu", "imagenet"):
        result = jobs.run(srun, folder, timeout=SOON)
        assert result.exit_code == 1, result
        assert result.find("^job.sh: error: start it with sbatch$"), result


# In place of a container, which has no scontrol.
NO_SCONTROL = 'PATH=$(dirname "$(command -v uv)"):/tmp; exec "$@"'


@pytest.mark.parametrize(
    "folder, script, message",
    [
        # Its ranks would look for one another on a node each.
        ("multi_gpu", 'exec "$@"', "this example is for one node: .* multi_node$"),
        (
            "multi_node",
            NO_SCONTROL,
            "scontrol fails, as in a container: export MASTER_ADDR, rank 0's node$",
        ),
    ],
)
def test_two_nodes_of_salloc(jobs, folder, script, message):
    srun = ["srun", "--kill-on-bad-exit=1", "bash", "-c", script]
    result = salloc(jobs, folder, *TWO_NODES, *srun, "bash", *MAIN)
    assert_failed(result, f"^main.py: error: {message}")


@pytest.mark.parametrize("folder", ["multi_node", "imagenet"])
def test_no_cpus_per_task(jobs, tmp_path, folder):
    """A line that job.sh needs may have been lost, or be missing on some cluster."""
    script = (jobs.clone / folder / "job.sh").read_text()
    without = re.sub("#SBATCH --cpus-per-task=.*\n", "", script)
    assert without != script
    (tmp_path / "job.sh").write_text(without)
    flags = ["--mem=1G", "--nodes=1", "--ntasks-per-node=1", "--gpus-per-node=1"]
    env = {"CIFAR10_ARCHIVE": "", "IMAGENET_DIR": ""}
    result = sbatch(jobs, folder, *flags, tmp_path / "job.sh", *SYNTHETIC, **env)
    assert_failed(result, "SLURM_CPUS_PER_TASK: give --cpus-per-task$", times=1)


def test_wrong_argument(jobs):
    """It ends a job before the data is copied."""
    command = ["--nodes=1", "--ntasks-per-node=1", *SMALL, "job.sh", "--epoch=5"]
    result = sbatch(jobs, "imagenet", *command, IMAGENET_DIR="/nowhere")
    assert_failed(result, "main.py: error: unrecognized arguments: --epoch=5$", times=1)
    assert "cannot stage" not in result.output, result


def test_wrong_interface(jobs):
    """A line that was copied from another cluster."""
    command = [*TWO_TASKS, "job.sh", *SYNTHETIC]
    result = sbatch(jobs, "multi_node", *command, GLOO_SOCKET_IFNAME="eth7")
    assert_failed(
        result,
        r"^main.py: error: rank . of 2 on node1 \(cpu:0\) cannot join the others "
        ".*Unable to find address for: eth7",
    )
    assert "Traceback" not in result.output, result


def test_rank_never_comes(jobs, tmp_path):
    """The other one does not wait for c10d's half an hour: the watch ends it."""
    command = (
        "srun --kill-on-bad-exit=1 bash -c '[ $SLURM_PROCID = {} ] && exec sleep 1000; "
        "exec uv run --no-sync python main.py --synthetic --timeout=2'"
    )
    expected = [
        f"{rank} has not moved for 12 s: it has not begun to train: another rank or its"
        for rank in ("rank 1 on node2", "rank 0 on node1")
    ]
    ids = [
        # What the watch ends leaves a folder of multiprocessing's there.
        jobs.submit("imagenet", *TWO_NODES, f"--wrap={wrap}", TMPDIR=str(tmp_path))
        for wrap in map(command.format, (0, 1))
    ]
    for job, message in zip(ids, expected, strict=True):
        result = jobs.wait(job, timeout=300)
        assert result.state == "FAILED" and "Traceback" not in result.output, result
        (said,) = result.find("^error: (.*)")
        assert said.startswith(message) and " in main\n" in result.output, result


def test_a_rank_dies(jobs):
    """The job ends at once, as FAILED, and no process of it is left on any node."""
    many = ["--batch-size=4", "--epochs=1000"]
    job = jobs.submit("multi_node", *TWO_NODES, "job.sh", *many)
    jobs.until(job, "^Epoch 1:")
    os.kill(jobs.pid("node2", "main.py"), signal.SIGKILL)
    result = jobs.wait(job, timeout=90)
    assert result.state == "FAILED", result
