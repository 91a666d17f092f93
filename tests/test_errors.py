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
SOON = 60  # seconds


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


def test_no_data_and_no_network(jobs):
    """The nodes have no way to the internet. Each says so once, if it comes to it."""
    result = sbatch(jobs, "multi_node", *TWO_NODES, "job.sh", CIFAR10_ARCHIVE="")
    where = r"/tmp/slurm-job-\d+/data on (node\d), "
    message = f"^main.py: error: no whole CIFAR-10 in {where}"
    assert_failed(result, f"{message}.*cifar-10-python.tar.gz.*--synthetic")
    nodes = result.find(message)
    assert len(nodes) == len(set(nodes)), result


@pytest.mark.parametrize(
    "folder, nodes", [("single_gpu", ["node1"]), ("multi_node", ["node1", "node2"])]
)
def test_truncated_archive(jobs, archive, tmp_path, folder, nodes):
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes(archive.read_bytes()[:20000])
    result = sbatch(jobs, folder, *SMALL, "job.sh", CIFAR10_ARCHIVE=str(cut))
    for node in nodes:
        message = rf"^job.sh: error: cannot unpack CIFAR10_ARCHIVE={cut} on {node}$"
        assert_failed(result, message, times=1, node=node)


@pytest.mark.parametrize(
    "folder, start", [("multi_gpu", salloc), ("multi_node", sbatch)]
)
def test_started_without_srun(jobs, folder, start):
    """It would wait for tasks that never start."""
    command = MAIN if start is salloc else [f"--wrap={' '.join(MAIN)}"]
    result = start(jobs, folder, *SMALL, "--ntasks=2", *command)
    message = "this is none of the 2 tasks of the job: start main.py with srun"
    assert_failed(result, f"^main.py: error: {message}$", times=1)


def test_more_tasks_than_gpus(jobs):
    flags = [*TWO_TASKS, "--gpus-per-node=1"]
    result = sbatch(jobs, "multi_node", *flags, "job.sh", *SYNTHETIC)
    assert_failed(
        result,
        "^main.py: error: local rank 1 on node1 has no GPU to itself: "
        "there are 1; ask for more --gpus-per-node, or for fewer tasks$",
    )


@pytest.mark.parametrize(
    "folder, flags, message",
    [
        ("single_gpu", TWO_NODES, "job.sh: error: several nodes: use multi_node"),
        ("multi_gpu", TWO_NODES, "job.sh: error: several nodes: use multi_node"),
        (
            "single_gpu",
            TWO_TASKS,
            "main.py: error: this example is a single process: start one task, or use "
            "multi_gpu",
        ),
    ],
)
def test_too_many_tasks(jobs, folder, flags, message):
    """Each would train the same."""
    result = sbatch(jobs, folder, *flags, "job.sh", *SYNTHETIC)
    assert_failed(result, f"^{message}$")


def test_multi_gpu_on_two_nodes_of_salloc(jobs):
    """Its ranks would look for one another on a node each."""
    result = salloc(jobs, "multi_gpu", *TWO_NODES, "srun", *MAIN)
    message = "this example is for one node: for several, use multi_node"
    assert_failed(result, f"^main.py: error: {message}$")


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


def test_nobody_at_master_addr(jobs):
    """Rank 0 notices at once that it cannot be found there; its end is everyone's."""
    address = jobs.cluster.address("node1").rpartition(".")[0] + ".99"
    srun = ["srun", "--kill-on-bad-exit=1", *MAIN]
    env = {"MASTER_ADDR": address, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    result = salloc(jobs, "multi_node", *TWO_NODES, *srun, **env)
    assert_failed(
        result,
        "^main.py: error: rank 0 of 2 .* cannot join the others "
        f"at MASTER_ADDR={address},",
        times=1,
    )


def test_rank_never_comes(jobs):
    """The other gives up and says where it looked. c10d looks for rank 0 twice."""
    command = (
        "srun --kill-on-bad-exit=1 bash -c '[ $SLURM_PROCID = {} ] && exec sleep 1000; "
        "exec uv run --no-sync python main.py --synthetic --timeout=2'"
    )
    where = r"\(cpu:0\) cannot join the others at MASTER_ADDR=node1, MASTER_PORT=\d+, "
    expected = [
        f"rank 1 of 2 on node2 {where}.*timed out",
        f"rank 0 of 2 on node1 {where}.*1/2 cl",
    ]
    ids = [
        jobs.submit("imagenet", *TWO_NODES, f"--wrap={command.format(missing)}")
        for missing in (0, 1)
    ]
    for job, message in zip(ids, expected, strict=True):
        result = jobs.wait(job, timeout=90)
        assert result.state == "FAILED" and "Traceback" not in result.output, result
        said = result.find("^main.py: error: .*")
        assert len(said) == 1 and re.search(message, said[0]), result


def test_a_rank_dies(jobs):
    """The job ends at once, as FAILED, and no process of it is left on any node."""
    many = ["--batch-size=4", "--epochs=1000"]
    job = jobs.submit("multi_node", *TWO_NODES, "job.sh", *many)
    jobs.until(job, "^Epoch 1:")
    os.kill(jobs.pid("node2", "main.py"), signal.SIGKILL)
    result = jobs.wait(job, timeout=30)
    assert result.state == "FAILED", result
