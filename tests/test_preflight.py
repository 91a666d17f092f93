"""What preflight.py says of an allocation: of a good one, and of such in which something is wrong."""

import os
import re
import subprocess
import time
from contextlib import contextmanager

import pytest
from slurm_jobs import REPOSITORY

pytestmark = pytest.mark.usefixtures("nothing_left")
PREFLIGHT = ["uv", "run", "--no-sync", "python", "preflight.py", "--cpu"]
ONE = [
    "--nodelist=node1",
    "--ntasks=1",
    "--gpus-per-node=1",
    "--cpus-per-task=2",
    "--mem=2G",
]
TWO = [
    "--nodelist=node[1-2]",
    "--ntasks-per-node=1",
    "--gpus-per-node=3",
    "--cpus-per-task=2",
    "--mem=2G",
]
CORES = {"SLURM_CPU_BIND": "cores"}  # as many clusters have it
GOOD = CORES | {"SRUN_CPUS_PER_TASK": "2"}  # what job.sh says
BY_ADDRESS = "MASTER_ADDR=$(hostname -I | cut -d' ' -f1)"


@pytest.fixture(autouse=True)
def all_idle(jobs):
    """No job is being cleaned up: of the CPUs that nodes claim, only the first ones are there."""
    deadline = time.monotonic() + 60
    while set(
        jobs.run(["sinfo", "-h", "-p", "main", "-N", "-o", "%T"]).output.split()
    ) != {"idle"}:
        assert time.monotonic() < deadline, jobs.run(["sinfo", "-N"])
        time.sleep(0.1)


def preflight(jobs, flags, *arguments, env=GOOD, task=PREFLIGHT):
    """Run it in an allocation; return how it ended, and the problems: (what, whose, what mends it)."""
    command = ["salloc", "--quiet", *flags, "srun", *task, *arguments]
    result = jobs.run(command, "multi_node", timeout=200, **env)
    pattern = r"^problem: ([^\t]+?)\s\((all ranks|rank [\d, ]+)\)\n    mend: (.+)$"
    found = re.findall(pattern, result.output, re.MULTILINE)
    return result, {
        (" ".join(what.split()), whose, mend) for what, whose, mend in found
    }


def rows(output: str, header: str) -> list[list[str]]:
    """Return the cells of the table with this header."""
    table = re.search(rf"^{header}.*\n((?:\S.*\n)+)", output, re.MULTILINE)[1]
    return [re.split("  +", row.strip()) for row in table.splitlines()]


def assert_good(jobs, output: str, gpus: int, cpus: int, folder: str) -> None:
    assert "\nproblems: 0\n" in output and "problem: " not in output, output
    ranks = rows(output, "rank +node")
    seen = f"0 of {gpus} seen"
    assert [row[:3] for row in ranks] == [["0", "node1", seen], ["1", "node2", seen]], (
        output
    )
    assert [row[3].split()[0] for row in ranks] == [str(cpus)] * 2, output
    first, second = (jobs.cluster.address(node) for node in ("node1", "node2"))
    assert [row[:4] for row in rows(output, "node +memory")] == [
        ["node1", "2 GiB", first, "eth0"],
        ["node2", "2 GiB", second, "eth0"],
    ], output
    assert {row[4].split(": ")[1] for row in rows(output, "node +memory")} == {first}, (
        output
    )
    disks = [" ".join(row) for row in rows(output, "node +data")]
    pattern = rf"node(\d) {folder} \d\.\d GB \d+\.\d\d GB/s \d+\.\d\d GB/s"
    assert [re.fullmatch(pattern, disk)[1] for disk in disks] == ["1", "2"], output
    summed = r"^all-reduce of 64 MiB over 2 ranks with gloo: \d+\.\d{3} s, \d+\.\d\d GB/s, checked$"
    assert len(re.findall(summed, output, re.MULTILINE)) == 1, output


def test_a_good_allocation(jobs):
    """The tables say what Slurm gave, once, and fit into 80 columns whatever COLUMNS says."""
    result, _ = preflight(jobs, TWO, env=GOOD | {"COLUMNS": "30"})
    assert result.exit_code == 0, result
    assert_good(jobs, result.output, gpus=3, cpus=2, folder="/tmp")
    assert max(map(len, result.output.splitlines())) <= 80, result
    year, month = jobs.slurm_version()
    versions = (
        rf"^torch 2\.\S+, CUDA \S+, NCCL \S+, driver none, Slurm {year}\.{month:02}\."
    )
    assert re.match(versions, result.output), result


def test_torchrun(jobs, tmp_path):
    """Started by job_torchrun.sh in place of main.py. It binds no task to CPUs."""
    script = (REPOSITORY / "multi_node" / "job_torchrun.sh").read_text()
    (tmp_path / "job.sh").write_text(
        script.replace(" main.py ", " preflight.py --cpu ")
    )
    result = jobs.sbatch(
        "multi_node", *TWO, "--gpus-per-node=1", tmp_path / "job.sh", CIFAR10_ARCHIVE=""
    )
    assert (result.exit_code, result.state) == (0, "COMPLETED"), result
    output = re.sub(r"^\d: ", "", result.output, flags=re.MULTILINE)  # of srun -l
    assert_good(
        jobs,
        output,
        gpus=1,
        cpus=len(os.sched_getaffinity(0)),
        folder=f"/tmp/slurm-job-{result.job}",
    )


def test_srun_that_gives_a_task_one_cpu(jobs):
    """srun 22.05 and 23.02 do not go by the --cpus-per-task of the job, unless job.sh tells them to."""
    result, problems = preflight(jobs, ONE, env=CORES)
    if jobs.slurm_version() in ((22, 5), (23, 2)):
        what = "a rank can use 1 of the 2 CPUs that the job asks for"
        assert problems == {
            (what, "all ranks", "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK")
        }, result
    assert result.exit_code == bool(problems), result


def test_no_driver(jobs):
    """A node with broken GPUs: main.py would train on its CPUs for hours."""
    result, problems = preflight(jobs, ONE, task=PREFLIGHT[:-1])
    what = "node1 has no NVIDIA driver, and the job has 1 of its GPUs"
    assert problems == {(what, "all ranks", "#SBATCH --exclude=node1")}, result
    assert (
        result.exit_code != 0 and "main.py would train on the CPU" in result.output
    ), result


def test_gpus_per_task(jobs):
    flags = [
        "--nodes=1",
        "--ntasks=2",
        "--gpus-per-task=1",
        "--cpus-per-task=2",
        "--mem=2G",
    ]
    result, problems = preflight(jobs, flags, env={})
    what = "--gpus-per-task hides the GPUs of a node from one another, and NCCL needs to see them"
    assert problems == {
        (what, "all ranks", "#SBATCH --gpus-per-node=2, and no --gpus-per-task")
    }, result
    assert result.exit_code != 0, result


def test_gpu_bind(jobs):
    flags = [
        "--nodes=1",
        "--ntasks=2",
        "--gpus-per-node=2",
        "--cpus-per-task=2",
        "--mem=2G",
    ]
    result, problems = preflight(
        jobs,
        flags,
        env={"SLURM_GPU_BIND": "single:1", "SLURM_TRES_BIND": "gres/gpu:single:1"},
    )
    what = (
        "a rank sees 1 of the job's 2 GPUs of its node, and NCCL needs to see them all"
    )
    mend = "unset CUDA_VISIBLE_DEVICES SLURM_GPU_BIND SLURM_TRES_BIND; no --gpu-bind"
    assert problems == {(what, "all ranks", mend)}, result
    assert result.exit_code != 0, result


def test_two_ranks_on_a_gpu_and_no_room(jobs):
    """The data folder is to be on a disk of 1 MB; nothing is written there."""
    flags = [
        "--nodelist=node1",
        "--ntasks=2",
        "--gpus-per-node=1",
        "--cpus-per-task=2",
        "--mem=2G",
    ]
    with mounted(jobs, "node1", "-t", "tmpfs", "-o", "size=1m", "small", "/mnt"):
        result, problems = preflight(jobs, flags, "--data-dir=/mnt/job/data", env={})
        listing = jobs.run([*jobs.cluster.namespaces("node1"), "ls", "-A", "/mnt"])
    assert problems == {
        (
            "2 ranks share the GPUs of a node, of which the job has 1",
            "rank 1",
            "#SBATCH --gpus-per-node=2",
        ),
        (
            "/mnt has 0.0 GB free, not 1",
            "rank 0",
            "export SLURM_TMPDIR=/a/folder/with/room/$SLURM_JOB_ID",
        ),
    }, result
    assert result.exit_code != 0 and listing.output == "", result


def test_port_taken(jobs):
    """The ranks cannot meet; each says what is wrong with it, before the first to fail ends them all."""
    listen = "import socket; s = socket.create_server(('', 23456)); print('ready', flush=True); input()"
    command = [*jobs.cluster.namespaces("node1"), "python3", "-c", listen]
    stranger = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert stranger.stdout.readline() == b"ready\n"
        env = GOOD | {"MASTER_PORT": "23456", "SLURM_KILL_BAD_EXIT": "1"}
        start = time.monotonic()
        result, problems = preflight(jobs, TWO, "--timeout=5", "--data-gb=9", env=env)
        assert time.monotonic() - start < 60
    finally:
        stranger.communicate(b"\n")
    assert result.exit_code != 0, result
    mends = {what: mend for what, whose, mend in problems if whose == "rank 0"}
    taken = mends.pop("another process has taken MASTER_PORT=23456 of node1")
    assert re.fullmatch(r"export MASTER_PORT=\d+", taken) and "23456" not in taken, (
        result
    )
    (room,) = mends
    assert re.fullmatch(r"/tmp has \d\.\d GB free, not 9", room), result
    other = r"^preflight.py: node2: /tmp has \d\.\d GB free, not 9: export SLURM_TMPDIR=.*\n"
    other += r"preflight.py: node2: rank 1 of 2 finds no others at MASTER_ADDR=node1, MASTER_PORT=23456: "
    assert len(re.findall(other, result.output, re.MULTILINE)) == 1, result


def test_a_rank_that_does_not_come(jobs):
    script = f"[ $SLURM_PROCID = 1 ] || exec {' '.join(PREFLIGHT)} --timeout 5"
    start = time.monotonic()
    result, problems = preflight(jobs, TWO, task=["bash", "-c", script])
    assert problems == {
        (
            "these ranks did not come, or were lost",
            "rank 1",
            "see what they say themselves",
        )
    }, result
    assert result.exit_code != 0 and time.monotonic() - start < 60, result


def test_first_node_is_loopback(jobs, tmp_path):
    """As where /etc/hosts of a node calls it 127.0.1.1; the address that job.sh could take mends it."""
    lines = (jobs.cluster.state / "hosts").read_text().splitlines()
    hosts = [line for line in lines if not line.endswith(" node1")] + [
        "127.0.1.1 node1",
        "",
    ]
    (tmp_path / "hosts").write_text("\n".join(hosts))
    with mounted(jobs, "node1", "--bind", tmp_path / "hosts", "/etc/hosts"):
        result, problems = preflight(jobs, TWO)
    what = "node1 is 127.0.1.1 on node1, where no other node can reach it"
    assert problems == {(what, "rank 0", BY_ADDRESS)}, result
    assert result.exit_code != 0, result


def test_without_srun(jobs):
    result = jobs.run(["salloc", "--quiet", *ONE, *PREFLIGHT], "multi_node", timeout=60)
    error = "preflight.py: error: this is no task of a job: use srun uv run python preflight.py\n"
    assert (result.exit_code, result.output) == (1, error)


@contextmanager
def mounted(jobs, node: str, *what):
    """Mount something on a node."""
    on_node = jobs.cluster.namespaces(node)
    assert jobs.run([*on_node, "mount", *what]).exit_code == 0
    try:
        yield
    finally:
        assert jobs.run([*on_node, "umount", what[-1]]).exit_code == 0
