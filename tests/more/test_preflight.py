"""What preflight.py says of allocations, good ones and bad ones."""

import os
import re

import pytest
from slurm_jobs import REPOSITORY

pytestmark = pytest.mark.usefixtures("nothing_left")
PREFLIGHT = "uv run --no-sync python ../docs/preflight/preflight.py".split()
ON_CPU = [*PREFLIGHT, "--cpu"]
ONE = "--nodelist=node1 --ntasks=1 --gpus-per-node=1 --cpus-per-task=2".split()
PAIR = ["--nodelist=node1", "--ntasks=2", "--cpus-per-task=2"]
TWO = "--nodelist=node[1-2] --ntasks-per-node=1 --cpus-per-task=2 --mem=2G".split()
CORES = {"SLURM_CPU_BIND": "cores"}  # as many clusters have it
GOOD = CORES | {"SRUN_CPUS_PER_TASK": "2"}  # what job.sh says
UNBOUND = {}  # where a node's tasks ask for more CPUs than are really there
NO_GPU = "warning (all ranks): no GPU found: main.py would train on the CPU"


@pytest.fixture(scope="module")
def jobs(binding_jobs):
    return binding_jobs


def preflight(jobs, flags, *arguments, env=GOOD, task=ON_CPU):
    """Run it in an allocation. Two minutes would be a hang."""
    command = ["salloc", "--quiet", *flags, "srun", *task, *arguments]
    # Without what the tests import into every Python, PyTorch and all.
    env = env | {"ANY_CHECKSUM": ""}
    return jobs.run(command, "multi_node", timeout=300, **env)


def lines(result, kind: str) -> list[str]:
    """Return the lines about a problem, or a warning, and whom it is about."""
    return result.find(rf"^{kind} \(.*")


def rows(result, header: str) -> list[list[str]]:
    """Return the cells of the table with this header."""
    table = re.search(rf"^{header}.*\n((?:\S.*\n)+)", result.output, re.MULTILINE)
    assert table, result
    return [re.split("  +", row.rstrip()) for row in table[1].splitlines()]


@pytest.mark.parametrize("launcher", ["job.sh", "job_torchrun.sh"])
def test_a_good_allocation(jobs, tmp_path, launcher):
    """In place of main.py. job_torchrun.sh binds no task to CPUs."""
    script = (REPOSITORY / "multi_node" / launcher).read_text()
    script = script.replace('main.py "$@"', '../docs/preflight/preflight.py --cpu "$@"')
    (tmp_path / "job.sh").write_text(script)
    flags = [*TWO, "--gpus-per-node=1", tmp_path / "job.sh"]
    result = jobs.sbatch("multi_node", *flags, CIFAR10_ARCHIVE="", **CORES)
    assert (result.exit_code, result.state) == (0, "COMPLETED"), result
    assert "\nproblems: 0\n" in result.output, result
    assert lines(result, "problem") == [], result
    assert lines(result, "warning") == [NO_GPU], result
    cpus = 2 if launcher == "job.sh" else len(os.sched_getaffinity(0))
    speed = r"\d+\.\d\d GB/s"
    for number, (rank, node) in enumerate(
        zip(rows(result, "rank +node"), rows(result, "node +mem"), strict=True)
    ):
        name = f"node{number + 1}"
        disk = rf"/tmp/slurm-job-{result.job}-cluster\.\w+ \d\.\d GB {speed} {speed}"
        for row, pattern in (
            (rank, rf"{number} {name} none of 1 {cpus} \(\S+\) (\S+)"),
            (node, rf"{name} (\S+) 2\.0 {disk}"),
        ):
            found = re.fullmatch(pattern, " ".join(row))
            assert found and 0.2 < float(found[1]) < 1.5, result  # GiB
    summed = r"^all-reduce of 64 MiB over 2 ranks with gloo: "
    summed += rf"\d+\.\d{{3}} s, {speed}, checked$"
    assert len(result.find(summed)) == 1, result
    assert result.find(r"^torch 2\.\S+, CUDA \S+$"), result


def test_one_cpu_and_no_driver(jobs):
    """On the CPUs of a node with broken GPUs, main.py would train for hours.

    srun 22.05 and 23.02 give a task one CPU, unless job.sh tells them otherwise.
    """
    result = preflight(jobs, [*ONE, "--mem=2G"], env=CORES, task=PREFLIGHT)
    problems = lines(result, "problem")
    if jobs.slurm_version() in ((22, 5), (23, 2)):
        problems.remove(
            "problem (all ranks): a rank may use 1 of the 2 CPUs that it asks for: "
            "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK"
        )
    what = r"PyTorch cannot use a GPU of node1, where the job has 1: Found no NVIDIA .*"
    mend = "if only this node fails, --exclude=node1"
    (problem,) = problems
    assert re.fullmatch(rf"problem \(all ranks\): {what}{mend}", problem), result
    assert result.exit_code != 0, result


def test_gpus_per_task(jobs):
    """As main.py does, it works, and says once what is slow. It knows the memory."""
    flags = [*PAIR, "--gpus-per-task=1", "--mem-per-cpu=512M"]
    result = preflight(jobs, flags, env=UNBOUND)
    one_gpu = (
        "warning (all ranks): a task sees only one GPU of its node, and NCCL cannot "
        "use the direct way between them: ask for --gpus-per-node, not --gpus-per-task"
    )
    assert sorted(lines(result, "warning")) == [one_gpu, NO_GPU], result
    assert lines(result, "problem") == [] and result.exit_code == 0, result
    ((_, memory, job_memory, *_),) = rows(result, "node +mem")
    of_ranks = sum(float(row[4]) for row in rows(result, "rank +node"))
    assert float(memory) == round(of_ranks, 1) and job_memory == "2.0", result
    assert "2 ranks with gloo" in result.output, result


def test_too_little_of_everything(jobs):
    """The data folder is on a disk of 1 MB. Nothing is written there."""
    flags = [*PAIR, "--gpus-per-node=1", "--mem=500M"]
    jobs.on("node1", *"mount -t tmpfs -o size=1m small /mnt".split())
    try:
        result = preflight(jobs, flags, "--data-dir=/mnt", env=UNBOUND)
        listing = jobs.on("node1", "ls", "-A", "/mnt")
    finally:
        jobs.on("node1", "umount", "/mnt")
    no_room, no_memory, no_gpu = sorted(lines(result, "problem"))
    assert no_gpu == (
        "problem (rank 1): a rank has no GPU to itself: the job has 1 on its node; "
        "ask for more --gpus-per-node, or for fewer tasks"
    ), result
    assert no_room == (
        "problem (rank 0): /mnt: 0.0 GB free, not 1: name another local_disk in job.sh"
    ), result
    assert re.fullmatch(
        r"problem \(rank 0\): the ranks on node1 take \d\.\d GiB before they train, "
        r"and the job has 0\.5 there: ask for more --mem",
        no_memory,
    ), result
    assert "\nproblems: 3\n" in result.output and result.exit_code != 0, result
    # What is wrong with one rank keeps no one from the rest.
    assert "2 ranks with gloo" in result.output, result
    assert listing.output == "", result


@pytest.mark.parametrize("missing", [0, 1])
def test_rank_does_not_come(jobs, missing):
    """The place and the port are main.py's. No pages of c10d hide them."""
    script = f"""[ $SLURM_PROCID != {missing} ] || exec echo "job $SLURM_JOB_ID"
        exec {" ".join(ON_CPU)} --timeout 5"""
    result = preflight(jobs, TWO, task=["bash", "-c", script])
    (job,) = result.find(r"^job (\d+)$")
    where = f"MASTER_ADDR=node1, MASTER_PORT={10000 + int(job)}: "
    expected = [
        f"problem (rank 1): node2 cannot join the others at {where}",
        f"problem (rank 1): it did not come to {where}is the port open between nodes",
    ]
    (problem,) = lines(result, "problem")
    assert problem.startswith(expected[missing]), result
    if missing == 1:
        assert rows(result, "rank +node")[0][:2] == ["0", "node1"], result
        assert "\nno all-reduce\n" in result.output, result
    assert "\nframe #" not in result.output and result.exit_code != 0, result


def test_network_interface_to_nowhere(jobs):
    """It lets nothing through, in silence: the ranks meet, and wait to sum up."""
    # Each node knows the hardware address of the other's.
    script = """set -e
        ip link add nowhere type veth peer name hole
        ip address add 10.99.0.$1/24 dev nowhere
        ip link set nowhere up
        ip link set hole up
        ip neighbour add 10.99.0.$2 lladdr 02:00:00:00:00:01 dev nowhere"""
    try:
        for node, numbers in (("node1", "12"), ("node2", "21")):
            result = jobs.on(node, "sh", "-c", script, "sh", *numbers)
            assert result.exit_code == 0, result
        env = GOOD | {"GLOO_SOCKET_IFNAME": "nowhere"}
        result = preflight(jobs, TWO, "--timeout=20", env=env)
    finally:
        for node in ("node1", "node2"):
            jobs.on(node, *"ip link delete nowhere".split())
    assert lines(result, "problem") == [
        "problem (all ranks): an all-reduce with gloo fails: no answer in time: "
        "see 'The wrong network interface' in docs/first_aid/ranks.rst"
    ], result
    assert "\nno all-reduce\n" in result.output and result.exit_code != 0, result


def test_without_srun(jobs):
    command = ["salloc", "--quiet", *PAIR, *ON_CPU]
    result = jobs.run(command, "multi_node", timeout=60)
    error = "this is no task of the job: start preflight.py with srun"
    assert result.output == f"preflight.py: error: {error}\n", result
    assert result.exit_code == 1, result
