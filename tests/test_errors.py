"""What a user sees when something is wrong.

One clear line, soon, and a job that failed and left nothing.
"""

import re
import subprocess
import time

import pytest

pytestmark = pytest.mark.usefixtures("nothing_left")
SMALL = ["--cpus-per-task=1", "--mem=1G"]
SYNTHETIC = ["--synthetic", "--epochs", "1", "--batch-size", "4"]


def assert_failed(
    result, message: str, times: int | None = None, node: str = ""
) -> None:
    """Assert that a job failed and said why, before Slurm did, without a traceback."""
    assert result.exit_code != 0, result
    assert result.state in ("", "FAILED"), result
    lines = result.output.splitlines()
    said = [i for i, line in enumerate(lines) if re.search(message, line)]
    assert said, result
    assert times in (None, len(said)), result
    errors = (f"srun: error: {node}", "slurmstepd: error")
    slurm = [i for i, line in enumerate(lines) if line.startswith(errors)]
    assert said[0] < min(slurm, default=len(lines)), result
    before = "\n".join(lines[: said[0]])
    assert "Traceback" not in before and "[W" not in before and "[E" not in before, (
        result
    )


def test_no_data_and_no_network(jobs):
    """The nodes have no way to the internet. Each says so once, if it comes to it."""
    start = time.monotonic()
    flags = [*SMALL, "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1"]
    result = jobs.sbatch("multi_node", *flags, "job.sh", CIFAR10_ARCHIVE="")
    assert_failed(
        result,
        r"^main.py: error: no whole CIFAR-10 in /tmp/slurm-job-\d+/data on node\d",
    )
    nodes = re.findall("^main.py: error: .* on (node.),", result.output, re.MULTILINE)
    assert len(nodes) == len(set(nodes)), result
    assert (
        "cifar-10-python.tar.gz" in result.output and "--synthetic" in result.output
    ), result
    assert time.monotonic() - start < 60


@pytest.mark.parametrize(
    "folder, nodes", [("single_gpu", ["node1"]), ("multi_node", ["node1", "node2"])]
)
def test_truncated_archive(jobs, archive, tmp_path, folder, nodes):
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes(archive.read_bytes()[:20000])
    result = jobs.sbatch(folder, *SMALL, "job.sh", CIFAR10_ARCHIVE=str(cut))
    for node in nodes:
        message = rf"^job.sh: error: cannot unpack CIFAR10_ARCHIVE={cut} on {node}$"
        assert_failed(result, message, times=1, node=node)
    assert "World size" not in result.output


@pytest.mark.parametrize("folder", ["multi_gpu", "multi_node"])
@pytest.mark.parametrize("shell", ["batch script", "salloc"])
def test_started_without_srun(jobs, folder, shell):
    """It would wait for tasks that never start."""
    command = ["uv", "run", "--no-sync", "python", "main.py", *SYNTHETIC]
    if shell == "salloc":
        result = jobs.run(
            ["salloc", *SMALL, "--ntasks=2", *command], folder, timeout=60
        )
    else:
        result = jobs.sbatch(
            folder, *SMALL, "--ntasks=2", f"--wrap={' '.join(command)}"
        )
    assert_failed(
        result,
        "^main.py: error: this is none of the 2 tasks of the job: "
        "start main.py with srun$",
        times=1,
    )


def test_more_tasks_than_gpus(jobs):
    flags = [*SMALL, "--nodes=1", "--ntasks-per-node=3", "--gpus-per-node=2"]
    result = jobs.sbatch("multi_node", *flags, "job.sh", *SYNTHETIC)
    assert_failed(
        result,
        "^main.py: error: local rank 2 on node1 has no GPU to itself: "
        "there are 2; ask for more --gpus-per-node, or for fewer tasks$",
    )


ONE_NODE = "^main.py: error: this example is for one node: for several, use multi_node$"
ONE_TASK = (
    "^main.py: error: this example is a single process: "
    "start one task, or use multi_gpu$"
)


@pytest.mark.parametrize("folder", ["single_gpu", "multi_gpu"])
def test_two_nodes(jobs, folder):
    """The second node would train the same, or look for the first one."""
    flags = [*SMALL, "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1"]
    result = jobs.sbatch(folder, *flags, "job.sh", *SYNTHETIC)
    assert_failed(result, "^job.sh: error: several nodes: use multi_node$", times=1)


def test_multi_gpu_on_two_nodes_of_salloc(jobs):
    """Its ranks would look for one another on a node each."""
    flags = [*SMALL, "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1"]
    command = ["srun", "uv", "run", "--no-sync", "python", "main.py", *SYNTHETIC]
    result = jobs.run(["salloc", *flags, *command], "multi_gpu", timeout=60)
    assert_failed(
        result,
        ONE_NODE,
    )


def test_single_gpu_as_several_tasks(jobs):
    """Each would train the same."""
    flags = [*SMALL, "--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=2"]
    result = jobs.sbatch("single_gpu", *flags, "job.sh", *SYNTHETIC)
    assert_failed(result, ONE_TASK)
    assert "Epoch" not in result.output, result


@pytest.mark.parametrize("folder", ["multi_node", "imagenet"])
def test_no_cpus_per_task(jobs, tmp_path, folder):
    """A line that job.sh needs may have been lost, or be missing on some cluster."""
    script = (jobs.clone / folder / "job.sh").read_text()
    without = re.sub("#SBATCH --cpus-per-task=.*\n", "", script)
    assert without != script
    (tmp_path / "job.sh").write_text(without)
    flags = ["--mem=1G", "--nodes=1", "--ntasks-per-node=1", "--gpus-per-node=1"]
    result = jobs.sbatch(
        folder,
        *flags,
        tmp_path / "job.sh",
        *SYNTHETIC,
        CIFAR10_ARCHIVE="",
        IMAGENET_DIR="",
    )
    assert_failed(result, "SLURM_CPUS_PER_TASK: give --cpus-per-task$", times=1)


def test_wrong_interface(jobs):
    """A line that was copied from another cluster."""
    flags = [*SMALL, "--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=2"]
    result = jobs.sbatch(
        "multi_node", *flags, "job.sh", *SYNTHETIC, GLOO_SOCKET_IFNAME="eth7"
    )
    assert_failed(
        result,
        r"^main.py: error: rank . of 2 on node1 \(cpu:0\) cannot join the others "
        ".*Unable to find address for: eth7",
    )
    assert "Traceback" not in result.output, result


def test_global_batch_larger_than_the_training_set(jobs):
    flags = [*SMALL, "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1"]
    result = jobs.sbatch(
        "multi_node", *flags, "job.sh", "--epochs", "1", "--batch-size", "64"
    )
    assert_failed(
        result,
        "^main.py: error: a step takes 128 samples and there are only 108 to train on: "
        "choose --batch-size 54 or less$",
    )


def test_port_taken(jobs):
    """A stranger listens where rank 0 wants to."""
    listen = (
        "import socket; s = socket.create_server(('', 23456)); "
        "print('ready', flush=True); input()"
    )
    stranger = subprocess.Popen(
        [*jobs.cluster.namespaces("node1"), "python3", "-c", listen],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert stranger.stdout.readline() == b"ready\n"
        flags = [
            *SMALL,
            "--nodelist=node[1-2]",
            "--ntasks-per-node=1",
            "--gpus-per-node=1",
        ]
        start = time.monotonic()
        result = jobs.sbatch(
            "multi_node", *flags, "job.sh", *SYNTHETIC, MASTER_PORT="23456"
        )
        assert_failed(
            result,
            r"^main.py: error: rank 0 of 2 on node1 \(cpu:0\) cannot join the others "
            "at MASTER_ADDR=node1, MASTER_PORT=23456, .*in use",
        )
        assert time.monotonic() - start < 60
    finally:
        stranger.communicate(b"\n")


def test_nobody_at_master_addr(jobs):
    """Rank 0 notices at once that it cannot be found there; its end is everyone's."""
    address = (
        re.search(
            r"NodeAddr=(\S+)\.\d+ ", (jobs.cluster.state / "slurm.conf").read_text()
        )[1]
        + ".99"
    )
    command = [
        "srun",
        "--kill-on-bad-exit=1",
        "uv",
        "run",
        "--no-sync",
        "python",
        "main.py",
        *SYNTHETIC,
    ]
    flags = ["--nodelist=node[2-3]", "--ntasks=2", "--gpus-per-node=2"]
    start = time.monotonic()
    env = {"MASTER_ADDR": address, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    result = jobs.run(["salloc", *SMALL, *flags, *command], "multi_node", **env)
    assert_failed(
        result,
        "^main.py: error: rank 0 of 2 .* cannot join the others "
        f"at MASTER_ADDR={address},",
        times=1,
    )
    assert time.monotonic() - start < 60


@pytest.mark.parametrize(
    "missing, who, why",
    [(0, "rank 1 of 2 on node3", "timed out"), (1, "rank 0 of 2 on node2", "1/2 cl")],
)
def test_rank_never_comes(jobs, missing, who, why):
    """The other gives up and says where it looked. c10d looks for rank 0 twice."""
    script = (
        f"[ $SLURM_PROCID = {missing} ] && exec sleep 1000; "
        'exec uv run --no-sync python main.py "$@"'
    )
    flags = ["--nodelist=node[2-3]", "--ntasks=2", "--gpus-per-node=2"]
    start = time.monotonic()
    command = [
        "salloc",
        *SMALL,
        *flags,
        "srun",
        "--kill-on-bad-exit=1",
        "bash",
        "-c",
        script,
        "main.py",
        *SYNTHETIC,
        "--timeout=10",
    ]
    result = jobs.run(command, "imagenet", timeout=400)
    assert result.exit_code != 0
    (error,) = re.findall(r"^main\.py: error: (.*)", result.output, re.MULTILINE)
    where = r"\(cpu:0\) cannot join the others at MASTER_ADDR=node2, MASTER_PORT=\d+,"
    assert re.match(f"{who} {where} .*{why}", error), result
    assert "Traceback" not in result.output, result
    assert time.monotonic() - start < 90


def test_a_rank_dies(jobs):
    """The job ends at once, as FAILED, and no process of it is left on any node."""
    flags = [*SMALL, "--nodelist=node[1-2]", "--ntasks-per-node=2", "--gpus-per-node=2"]
    job = jobs.submit(
        "multi_node", *flags, "job.sh", "--batch-size", "4", "--epochs", "1000"
    )
    deadline = time.monotonic() + 120
    while "Epoch 1:" not in jobs.log(job):
        assert time.monotonic() < deadline, jobs.log(job)
        time.sleep(0.1)
    killed = jobs.run(
        [
            *jobs.cluster.namespaces("node2"),
            "pkill",
            "--newest",
            "--signal",
            "KILL",
            "-f",
            "python main.py",
        ]
    )
    assert killed.exit_code == 0
    start = time.monotonic()
    result = jobs.wait(job)
    assert time.monotonic() - start < 30
    assert result.state == "FAILED" and result.exit_code != 0, result
    assert "Test loss" not in result.output
