"""Every way to start the examples, on real nodes.

What ran, on how many ranks, and what it left behind. A rank takes 5 seconds of a CPU to
import PyTorch: no test has more ranks than it needs. Jobs that do not concern each
other run at the same time.
"""

import os
import re
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from slurm_jobs import ARGUMENTS_LINE, REPOSITORY, environment

pytestmark = pytest.mark.usefixtures("nothing_left")
SMALL = ["--cpus-per-task=1", "--mem=1G"]
ONE_EPOCH = ["--epochs", "1", "--batch-size", "4"]
ONE_EACH = ["--ntasks-per-node=1", "--gpus-per-node=1"]
TWO_EACH = ["--ntasks-per-node=2", "--gpus-per-node=2"]
NODES = ["node1", "node2"]
# imagenet, without archives.
SYNTHETIC = ["--synthetic", "--limit-train-samples=64", "--limit-valid-samples=8"]
SYNTHETIC += ["--model=dummy", "--image-size=32", "--workers=1"]


def trained(result, folder: str, world_size: int) -> None:
    """Assert that a training was whole."""
    if folder == "imagenet":
        assert result.exit_code == 0 and "Weights SHA-256" in result.output, result
        assert f"World size {world_size}: " in result.output, result
    else:
        result.trained(world_size, batch_size=4)


def test_sbatch(jobs, archive, tmp_path):
    """job.sh lets every task see all GPUs of its node, also with --gpus-per-task.

    `sbatch job.sh --data-dir "a b"` reaches main.py as it is. The log has no progress
    bar, and nothing of what uv did not have to do.

    A compiled model under DDP trains, too; on a CPU, this needs a C++ compiler.
    """
    by_task = "--ntasks-per-node=2 --gpus-per-node=2 --gpus-per-task=1"
    cases = [  # folder, script, flags, ranks, nodes
        ("imagenet", "job.sh", f"--nodes=1 {' '.join(ONE_EACH)}", 1, 1),
        ("single_gpu", "job.sh", "", 1, 1),
        ("multi_gpu", "job.sh", "", 4, 1),
        ("multi_node", "job.sh", f"--nodes=1 {' '.join(ONE_EACH)}", 1, 1),
        ("multi_node", "job.sh", f"--nodes=1-2 --ntasks=2 {by_task}", 2, 1),
        ("multi_node", "job_torchrun.sh", f"--nodes=1 {by_task}", 2, 1),
        # As on clusters whose Slurm counts no GPUs.
        (
            "multi_node",
            "job_torchrun.sh",
            "--nodes=1 --ntasks-per-node=2 --gpus-per-node=0",
            2,
            1,
        ),
    ]
    env = {"IMAGENET_DIR": "", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}  # not taken
    submitted = []
    for folder, script, flags, _, _ in cases:
        command = [*SMALL, *flags.split(), script, *ONE_EPOCH]
        if folder == "imagenet":
            command += [*SYNTHETIC, "--compile"]
        if folder == "multi_gpu":
            command += ["--data-dir", archive.parent]
        submitted.append(jobs.submit(folder, *command, **env))
    for job, (folder, _, _, world_size, nodes) in zip(submitted, cases, strict=True):
        result = jobs.wait(job)
        trained(result, folder, world_size)
        assert result.state == "COMPLETED", result
        assert jobs.nodes_of(result) == nodes, result
        if folder == "single_gpu":
            first, second, *_ = result.output.splitlines()
            assert first.startswith(f"Job {job} on node"), result
            assert ARGUMENTS_LINE.match(second), result
            assert "\r" not in result.output, result
    assert " " in str(archive.parent)
    # What is compiled goes to the job's own folder, where nobody else can write.
    assert not list(tmp_path.iterdir())


def test_salloc_and_srun(jobs, archive):
    """A task takes the only GPU that it sees, or one of several.

    One step has two tasks on the last node of a job of three. What another launcher has
    left in the shell changes nothing, nor do the limits of a login node.
    """
    pages = [*REPOSITORY.glob("docs/**/*.rst"), *REPOSITORY.glob("*/README.rst")]
    text = "".join(page.read_text() for page in [REPOSITORY / "README.rst", *pages])
    blocks = re.findall(r"^    salloc --.*\n(?:    .*\n)*", text, re.MULTILINE)
    starts = re.findall(r" (srun .*(?:uv run|python).*)", "".join(blocks))
    assert len(starts) > 6, starts
    assert all(start.startswith("srun --propagate=CORE ") for start in starts), starts
    limits = ["bash", "-c", 'ulimit -Sv 1000000 -St 3; exec "$@"', "bash"]
    left = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "9"}
    three = "--nodes=3 --ntasks-per-node=2 --gpus-per-node=2"
    cases = [  # folder, flags of salloc, flags of srun, ranks
        ("single_gpu", "--ntasks=1 --gpus-per-task=1", "", 1),
        ("single_gpu", "--ntasks=1 --gpus-per-node=4", "", 1),
        ("multi_gpu", "--nodes=1 --ntasks=2 --gpus-per-task=1", "", 2),
        ("multi_node", "--nodes=2 --gpus-per-node=4", "", 2),
        ("multi_node", three, "--nodelist=node3 -N1 -n2", 2),
    ]

    def start(case):
        folder, salloc, srun, _ = case
        # The ranks of one node meet there.
        address = {"MASTER_ADDR": "nowhere"} if folder == "multi_gpu" else {}
        command = ["uv", "run", "python", "main.py", *ONE_EPOCH]
        command += ["--data-dir", archive.parent]
        srun = ["srun", "--propagate=CORE", *srun.split(), *command]
        salloc = [*limits, "salloc", *SMALL, *salloc.split()]
        return jobs.run(
            [*salloc, *srun], folder, OMP_NUM_THREADS="1", **left, **address
        )

    with ThreadPoolExecutor() as pool:
        results = list(pool.map(start, cases))
    for result, (folder, _, _, world_size) in zip(results, cases, strict=True):
        trained(result, folder, world_size)
        assert "\r" not in result.output, result  # tasks have no terminal


def test_a_task_on_each_node(jobs):
    """The experiment of multi_node's page: without --ntasks, srun runs every task."""
    page = (jobs.clone / "multi_node" / "README.rst").read_text()
    commands = re.findall(r"^    (srun .* hostname)$", page, re.MULTILINE)
    shape = ["--nodes=2", "--ntasks-per-node=4", "--nodelist=node[1-2]"]
    salloc = ["salloc", "--quiet", *SMALL, *shape]
    hosts = [
        [
            jobs.run([*salloc, *srun.split()]).find("^node.$").count(node)
            for node in NODES
        ]
        for srun in commands
    ]
    assert hosts == [[4, 4], [1, 1]]


@pytest.mark.parametrize("job", ["job.sh", "job_torchrun.sh"])
def test_uneven_nodes(jobs, job):
    """The job has two GPUs and processes on one of its nodes, and one on the other."""
    flags = [*SMALL, "--nodes=2", "--ntasks=3", "--gpus=3"]
    script = f"scontrol show --detail job $SLURM_JOB_ID; bash {job} "
    script += shlex.join(ONE_EPOCH)
    # The script's own lines ask for as many GPUs on each node.
    result = jobs.sbatch("multi_node", *flags, f"--wrap={script}")
    gpus = re.findall(r"Nodes=\S+ .*GRES=gpu:(\d)", result.output)
    assert set(gpus) == {"1", "2"}, result
    trained(result, "multi_node", 3)


def test_variables_of_the_cluster(jobs, archive):
    """With --export, Slurm would give the tasks nothing that job.sh sets.

    It has no PATH, either, where Slurm cannot load the login environment, with su.
    Where SLURM_TMPDIR is set, the data goes there, on every node, and is removed.
    """
    disk, su = "/tmp/local disk", os.path.realpath("/bin/su")
    for node in ("node1", "node2"):
        jobs.on(node, "mkdir", disk)
        jobs.on(node, "mount", "--bind", "/bin/false", su)
    export = f"--export=HOME,ANY_CHECKSUM,SLURM_TMPDIR,CIFAR10_ARCHIVE={archive}"
    flags = [*SMALL, "--nodelist=node[1-2]", *ONE_EACH, export]
    env = {"CIFAR10_ARCHIVE": "/nowhere", "SLURM_TMPDIR": disk}
    result = jobs.sbatch("multi_node", *flags, "job.sh", *ONE_EPOCH, **env)
    for node in ("node1", "node2"):
        assert jobs.on(node, "umount", su).exit_code == 0
    result.trained(2, batch_size=4)
    where = rf"\n  data_dir: {disk}/slurm-job-{result.job}-cluster\.\w+/data\n"
    assert re.search(where, result.output), result
    for node in ("node1", "node2"):
        assert jobs.on(node, "rmdir", disk).exit_code == 0, node


def test_two_jobs_at_once_on_one_node(jobs):
    """Each has a port of its own, and what the user exports wins.

    A crash leaves no core file, though Slurm's daemon would allow one: of the login
    shell's limits, the job has this one. It has none of the others.
    """
    daemon = jobs.on("node1", "pgrep", "--oldest", "slurmd").output.strip()
    jobs.on("node1", "prlimit", "--pid", daemon, "--core=unlimited", "--nofile=9000")
    limits = "ulimit -Sc 0 -Sn 900"
    flags = [*SMALL, "--nodelist=node1"]
    many = ["--epochs=1000", "--batch-size=4"]
    said = {"NCCL_DEBUG": "INFO", "TORCH_CPP_LOG_LEVEL": "INFO"}
    said["MASTER_PORT"] = "23459"
    jobs.shell = ["bash", "-c", f'{limits}; exec "$@"', "bash"]
    first = jobs.submit("multi_gpu", *flags, *ONE_EACH, "job.sh", *many, **said)
    jobs.shell = []
    jobs.until(first, r"^Epoch 1: ")
    pid = jobs.pid("node1", "main.py")
    variables, limited = environment(pid), Path(f"/proc/{pid}/limits").read_text()
    soft = dict(re.findall(r"^Max (core file size|open files) +(\w+)", limited, re.M))
    assert soft == {"core file size": "0", "open files": "9000"}
    second = jobs.sbatch("multi_gpu", *flags, *TWO_EACH, "job.sh", *ONE_EPOCH)
    state = jobs.show(first)["JobState"]
    result = jobs.cancel(first)
    second.trained(2, batch_size=4)
    assert state == "RUNNING", result
    assert {name: variables[name] for name in said} == said


def test_progress_bar_in_a_terminal(jobs, archive):
    """Under `srun --pty`, an epoch has a bar, which gives way to the epoch's line."""
    command = ["salloc", *SMALL, "--ntasks=1", "srun", "--pty", "uv", "run", "python"]
    command += ["main.py", "--data-dir", str(archive.parent), *ONE_EPOCH]
    # script(1) gives it a terminal.
    in_terminal = f"stty cols 100 rows 30; {shlex.join(command)}"
    script = ["script", "--quiet", "--return", "--command", in_terminal, "/dev/null"]
    result = jobs.run(script, "single_gpu")
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", result.output)  # without colours
    assert result.exit_code == 0, text
    assert re.search(r"\rEpoch 1: .*\| *\d+/9 ", text), text
    assert re.search(r"[\r\n]Epoch 1: train loss .* images/s\r\n", text), text
    assert re.search(r"[\r\n]Test loss .*%\r\n", text), text
