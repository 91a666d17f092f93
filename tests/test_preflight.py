"""What preflight.py says of allocations, good ones and bad ones."""

import os
import re
import subprocess
import time
from contextlib import contextmanager

import pytest
from slurm_jobs import REPOSITORY

pytestmark = pytest.mark.usefixtures("nothing_left")
PREFLIGHT = ["uv", "run", "--no-sync", "python", "preflight.py"]
ON_CPU = [*PREFLIGHT, "--cpu"]
ONE = ["--nodelist=node1", "--ntasks=1", "--gpus-per-node=1", "--cpus-per-task=2"]
PAIR = ["--nodelist=node1", "--ntasks=2", "--cpus-per-task=2"]
TWO = ["--nodelist=node[1-2]", "--ntasks-per-node=1", "--cpus-per-task=2", "--mem=2G"]
CORES = {"SLURM_CPU_BIND": "cores"}  # as many clusters have it
GOOD = CORES | {"SRUN_CPUS_PER_TASK": "2"}  # what job.sh says
UNBOUND = {}  # where a node's tasks ask for more CPUs than are really there
NO_GPU = ("all ranks", "no GPU found: main.py would train on the CPU")


@pytest.fixture(scope="module")
def jobs(binding_jobs):
    return binding_jobs


@pytest.fixture(autouse=True)
def all_idle(jobs):
    """No job is being cleaned up: it would have the CPUs that are really there."""
    command = ["sinfo", "-h", "-p", "main", "-N", "-o", "%T"]
    deadline = time.monotonic() + 60
    while set(jobs.run(command).output.split()) != {"idle"}:
        assert time.monotonic() < deadline, jobs.run(["sinfo", "-N"])
        time.sleep(0.1)


def preflight(jobs, flags, *arguments, env=GOOD, task=ON_CPU):
    """Run it in an allocation."""
    command = ["salloc", "--quiet", *flags, "srun", *task, *arguments]
    # Without what the tests import into every Python, PyTorch and all.
    env = env | {"PYTHONPATH": ""}
    return jobs.run(command, "multi_node", timeout=200, **env)


def notes(result, kind: str) -> set[tuple[str, str]]:
    """Return whom each problem, or each warning, is about, and what it is."""
    pattern = rf"^{kind} \((all ranks|rank [\d, ]+)\): (.+)$"
    return set(re.findall(pattern, result.output, re.MULTILINE))


def rows(result, header: str) -> list[list[str]]:
    """Return the cells of the table with this header."""
    table = re.search(rf"^{header}.*\n((?:\S.*\n)+)", result.output, re.MULTILINE)
    assert table, result
    return [re.split("  +", row.rstrip()) for row in table[1].splitlines()]


def assert_good(result, gpus: int, cpus: int, folder: str) -> None:
    """Two nodes with a rank each, 2 GiB and no driver for their GPUs."""
    assert "\nproblems: 0\n" in result.output, result
    assert notes(result, "problem") == set(), result
    assert notes(result, "warning") == {NO_GPU}, result
    first, second = rows(result, "rank +node")
    assert first[:3] == ["0", "node1", f"none of {gpus}"], result
    assert second[:3] == ["1", "node2", f"none of {gpus}"], result
    for _, _, _, rank_cpus, memory in (first, second):
        assert rank_cpus.split()[0] == str(cpus), result
        assert 0.2 < float(memory) < 1.5, result
    for name, node in zip(("node1", "node2"), rows(result, "node +mem"), strict=True):
        assert node[0] == name and node[2:4] == ["2.0", folder], result
        assert 0.2 < float(node[1]) < 1.5, result
        assert re.fullmatch(r"\d\.\d GB", node[4]), result
        for speed in node[5:7]:
            assert re.fullmatch(r"\d+\.\d\d GB/s", speed), result
    speed = r"\d+\.\d{3} s, \d+\.\d\d GB/s, checked"
    summed = rf"^all-reduce of 64 MiB over 2 ranks with gloo: {speed}$"
    assert len(re.findall(summed, result.output, re.MULTILINE)) == 1, result


def test_a_good_allocation(jobs):
    result = preflight(jobs, [*TWO, "--gpus-per-node=3"])
    assert result.exit_code == 0, result
    assert_good(result, gpus=3, cpus=2, folder="/tmp")
    assert re.match(r"torch 2\.\S+, CUDA \S+\n", result.output), result


@pytest.mark.parametrize("launcher", ["job.sh", "job_torchrun.sh"])
def test_in_place_of_main(jobs, tmp_path, launcher):
    """Started by our job scripts. job_torchrun.sh binds no task to CPUs."""
    script = (REPOSITORY / "multi_node" / launcher).read_text()
    (tmp_path / "job.sh").write_text(
        script.replace(" main.py ", " preflight.py --cpu ")
    )
    flags = [*TWO, "--gpus-per-node=1", tmp_path / "job.sh"]
    result = jobs.sbatch("multi_node", *flags, CIFAR10_ARCHIVE="", **CORES)
    assert (result.exit_code, result.state) == (0, "COMPLETED"), result
    # srun -l, of job_torchrun.sh, begins each line with the number of the node.
    result.output = re.sub(r"^\d: ", "", result.output, flags=re.MULTILINE)
    cpus = 2 if launcher == "job.sh" else len(os.sched_getaffinity(0))
    assert_good(result, gpus=1, cpus=cpus, folder=f"/tmp/slurm-job-{result.job}")


def test_srun_that_gives_a_task_one_cpu(jobs):
    """As srun 22.05 and 23.02 do, unless job.sh tells them otherwise."""
    result = preflight(jobs, [*ONE, "--mem=2G"], env=CORES)
    problem = (
        "all ranks",
        "a rank may use 1 of the 2 CPUs that it asks for: "
        "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK",
    )
    old = jobs.slurm_version() in ((22, 5), (23, 2))
    assert notes(result, "problem") == ({problem} if old else set()), result
    assert result.exit_code == old, result


def test_no_driver(jobs):
    """A node with broken GPUs, on whose CPUs main.py would train for hours."""
    result = preflight(jobs, [*ONE, "--mem=2G"], task=PREFLIGHT)
    ((whose, problem),) = notes(result, "problem")
    assert whose == "all ranks", result
    what = "PyTorch cannot use a GPU of node1, where the job has 1: Found no NVIDIA "
    assert problem.startswith(what), result
    assert problem.endswith("if only this node fails, --exclude=node1"), result
    assert result.exit_code != 0, result


def test_gpus_per_task(jobs):
    """As main.py does, it works, and says once what is slow. It knows the memory."""
    flags = [*PAIR, "--gpus-per-task=1", "--mem-per-cpu=512M"]
    result = preflight(jobs, flags, env=UNBOUND)
    one_gpu = (
        "all ranks",
        "a task sees only one GPU of its node, and NCCL cannot use the direct "
        "way between them: ask for --gpus-per-node, not --gpus-per-task",
    )
    assert notes(result, "warning") == {NO_GPU, one_gpu}, result
    assert notes(result, "problem") == set() and result.exit_code == 0, result
    ((_, memory, job_memory, *_),) = rows(result, "node +mem")
    of_ranks = sum(float(row[4]) for row in rows(result, "rank +node"))
    assert float(memory) == round(of_ranks, 1) and job_memory == "2.0", result
    assert "2 ranks with gloo" in result.output, result


def test_too_little_of_everything(jobs):
    """The data folder is on a disk of 1 MB. Nothing is written there."""
    flags = [*PAIR, "--gpus-per-node=1", "--mem=500M"]
    with mounted(jobs, "node1", "-t", "tmpfs", "-o", "size=1m", "small", "/mnt"):
        result = preflight(jobs, flags, "--data-dir=/mnt", env=UNBOUND)
        listing = jobs.run([*jobs.cluster.namespaces("node1"), "ls", "-A", "/mnt"])
    problems = notes(result, "problem")
    (memory,) = [problem for problem in problems if "--mem" in problem[1]]
    assert problems - {memory} == {
        (
            "rank 1",
            "a rank has no GPU to itself: the job has 1 on its node; "
            "ask for more --gpus-per-node, or for fewer tasks",
        ),
        (
            "rank 0",
            "/mnt: 0.0 GB free, not 1: export SLURM_TMPDIR=/a/folder/with/room",
        ),
    }, result
    assert re.fullmatch(
        r"the ranks on node1 take \d\.\d GiB before they train, "
        r"and the job has 0\.5 there: ask for more --mem",
        memory[1],
    ), result
    assert "\nproblems: 3\n" in result.output and result.exit_code != 0, result
    # What is wrong with one rank keeps no one from the rest.
    assert "2 ranks with gloo" in result.output, result
    assert listing.output == "", result


def test_port_taken(jobs):
    listen = """import socket
server = socket.create_server(("", 23456))
print("ready", flush=True)
input()"""
    command = [*jobs.cluster.namespaces("node1"), "python3", "-c", listen]
    stranger = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert stranger.stdout.readline() == b"ready\n"
        env = GOOD | {"MASTER_PORT": "23456", "SLURM_KILL_BAD_EXIT": "1"}
        start = time.monotonic()
        result = preflight(jobs, TWO, env=env)
        assert time.monotonic() - start < 60
    finally:
        stranger.communicate(b"\n")
    assert result.exit_code != 0, result
    where = "MASTER_ADDR=node1, MASTER_PORT=23456, which must be"
    problem = rf"node1 cannot join the others at {where} .*address already in use"
    of_rank_0 = [text for who, text in notes(result, "problem") if who == "rank 0"]
    assert re.match(problem, of_rank_0[0]), result


def test_rank_1_does_not_come(jobs):
    script = f"[ $SLURM_PROCID = 1 ] || exec {' '.join(ON_CPU)} --timeout 5"
    start = time.monotonic()
    result = preflight(jobs, TWO, task=["bash", "-c", script])
    assert time.monotonic() - start < 60, result
    ((whose, problem),) = notes(result, "problem")
    assert whose == "rank 1", result
    assert problem.startswith("it did not come to MASTER_ADDR=node1, or was lost"), (
        result
    )
    assert rows(result, "rank +node")[0][:2] == ["0", "node1"], result
    assert "\nno all-reduce\n" in result.output and result.exit_code != 0, result


@pytest.mark.parametrize("level", ["", "ERROR"])
def test_rank_0_does_not_come(jobs, level):
    """The place and the port are main.py's. c10d's pages are for those who ask."""
    script = f"""[ $SLURM_PROCID = 1 ] || exec echo "job $SLURM_JOB_ID"
        exec {" ".join(ON_CPU)} --timeout 5"""
    env = GOOD | ({"TORCH_CPP_LOG_LEVEL": level} if level else {})
    start = time.monotonic()
    result = preflight(jobs, TWO, task=["bash", "-c", script], env=env)
    assert time.monotonic() - start < 60, result
    port = 10000 + int(re.search(r"^job (\d+)$", result.output, re.MULTILINE)[1])
    ((whose, problem),) = notes(result, "problem")
    where = f"node2 cannot join the others at MASTER_ADDR=node1, MASTER_PORT={port}, "
    assert whose == "rank 1" and problem.startswith(where), result
    pages = "\nframe #" in result.output
    assert pages == (level == "ERROR"), result
    assert result.exit_code != 0, result


def test_network_interface_to_nowhere(jobs):
    """It lets nothing through, in silence: the ranks meet, and wait to sum up."""
    with interface_to_nowhere(jobs):
        start = time.monotonic()
        env = GOOD | {"GLOO_SOCKET_IFNAME": "nowhere"}
        result = preflight(jobs, TWO, "--timeout=5", env=env)
        assert time.monotonic() - start < 60, result
    fails = "an all-reduce with gloo fails: no answer in time: "
    mend = "see 'The wrong network interface' in docs/troubleshooting.rst"
    assert notes(result, "problem") == {("all ranks", fails + mend)}, result
    assert "\nno all-reduce\n" in result.output and result.exit_code != 0, result


def test_without_srun(jobs):
    command = ["salloc", "--quiet", *PAIR, *ON_CPU]
    result = jobs.run(command, "multi_node", timeout=60)
    error = "this is none of the 2 tasks of the job: start preflight.py with srun"
    assert result.output == f"preflight.py: error: {error}\n", result
    assert result.exit_code == 1, result


@contextmanager
def interface_to_nowhere(jobs):
    """Two nodes have one, and know the hardware address of each other's."""
    nodes = [jobs.cluster.namespaces(name) for name in ("node1", "node2")]
    try:
        for number, on_node in enumerate(nodes, 1):
            other = f"10.99.0.{3 - number} lladdr 02:00:00:00:00:01"
            for command in (
                "link add nowhere type veth peer name hole",
                f"address add 10.99.0.{number}/24 dev nowhere",
                "link set nowhere up",
                "link set hole up",
                f"neighbour add {other} dev nowhere",
            ):
                result = jobs.run([*on_node, "ip", *command.split()])
                assert result.exit_code == 0, result
        yield
    finally:
        for on_node in nodes:
            jobs.run([*on_node, "ip", "link", "delete", "nowhere"])


@contextmanager
def mounted(jobs, node: str, *what):
    """Mount something on a node."""
    on_node = jobs.cluster.namespaces(node)
    assert jobs.run([*on_node, "mount", *what]).exit_code == 0
    try:
        yield
    finally:
        assert jobs.run([*on_node, "umount", what[-1]]).exit_code == 0
