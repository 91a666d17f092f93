"""Every way to start the examples, on real nodes.

What ran, on how many ranks, and what it left behind. A rank takes 5 seconds of a CPU to
import PyTorch: no test has more ranks than it needs. Jobs that do not concern each
other run at the same time.
"""

import re
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from slurm_jobs import ARGUMENTS_LINE, TEST_LINE, TINY, TWO

pytestmark = pytest.mark.usefixtures("nothing_left")
SMALL = ["--cpus-per-task=1", "--mem=1G"]
ONE_EPOCH = ["--epochs", "1", "--batch-size", "4"]
ONE_EACH = ["--ntasks-per-node=1", "--gpus-per-node=1"]
TWO_EACH = ["--ntasks-per-node=2", "--gpus-per-node=2"]
ONE_GPU_ONLY = "warning: a task sees only one GPU of its node, and NCCL cannot use"
# imagenet, without archives.
SYNTHETIC = ["--synthetic", "--limit-train-samples=64", "--limit-valid-samples=8"]
SYNTHETIC += ["--model=dummy", "--image-size=32", "--workers=1"]


def trained(result, folder: str, world_size: int) -> None:
    """Assert that a training was whole."""
    # Without the task numbers that `srun -l` puts before each line.
    result.output = re.sub(r"^\d+: ", "", result.output, flags=re.MULTILINE)
    if folder == "imagenet":
        assert result.exit_code == 0 and "Weights SHA-256" in result.output, result
        assert f"World size {world_size}: " in result.output, result
    else:
        result.trained(world_size, batch_size=4)


def test_sbatch(jobs, tmp_path):
    """job.sh lets every task see all GPUs of its node, also with --gpus-per-task.

    A compiled model under DDP trains, too; on a CPU, this needs a C++ compiler.
    """
    by_task = "--ntasks-per-node=2 --gpus-per-node=2 --gpus-per-task=1"
    cases = [  # folder, script, flags, ranks, nodes
        ("imagenet", "job.sh", f"--nodes=1 {by_task}", 2, 1),
        ("single_gpu", "job.sh", "", 1, 1),
        ("multi_gpu", "job.sh", "", 4, 1),
        ("multi_node", "job.sh", "", 8, 2),
        ("multi_node", "job.sh", "--nodes=1 --ntasks-per-node=1", 1, 1),
        ("multi_node", "job.sh", f"--nodes=1-2 --ntasks=2 {by_task}", 2, 1),
        ("multi_node", "job_torchrun.sh", f"--nodes=1 {by_task}", 2, 1),
    ]
    env = {"IMAGENET_DIR": "", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    submitted = []
    for folder, script, flags, _, _ in cases:
        command = [*SMALL, *flags.split(), script, *ONE_EPOCH]
        if folder == "imagenet":
            command += [*SYNTHETIC, "--compile"]
        submitted.append(jobs.submit(folder, *command, **env))
    for job, (folder, _, _, world_size, nodes) in zip(submitted, cases, strict=True):
        result = jobs.wait(job)
        trained(result, folder, world_size)
        assert result.state == "COMPLETED", result
        assert jobs.nodes_of(result) == nodes, result
        assert ONE_GPU_ONLY not in result.output, result
    assert list(tmp_path.rglob("*.so"))  # what the model was compiled to


def test_salloc_and_srun(jobs, archive):
    """A task takes the only GPU that it sees, and rank 0 tells what that costs.

    One step has two tasks on the last node of a job of three.
    """
    cases = [  # folder, flags of salloc, flags of srun, ranks, warnings
        ("single_gpu", "--ntasks=1 --gpus-per-task=1", "", 1, 0),
        ("multi_gpu", "--nodes=1 --ntasks=2 --gpus-per-node=2", "", 2, 0),
        ("multi_gpu", "--nodes=1 --ntasks=2 --gpus-per-task=1", "", 2, 1),
        ("multi_node", "--nodes=2 --ntasks=2 --gpus-per-task=1", "", 2, 0),
        (
            "multi_node",
            "--nodes=3 --ntasks-per-node=2",
            "--nodelist=node3 -N1 -n2",
            2,
            0,
        ),
    ]

    def start(case):
        folder, salloc, srun, _, _ = case
        command = ["uv", "run", "python", "main.py", *ONE_EPOCH]
        command += ["--data-dir", archive.parent]
        srun = ["srun", *srun.split(), *command]
        salloc = ["salloc", *SMALL, *salloc.split()]
        return jobs.run([*salloc, *srun], folder, OMP_NUM_THREADS="1")

    with ThreadPoolExecutor() as pool:
        results = list(pool.map(start, cases))
    for result, (folder, _, _, world_size, warnings) in zip(
        results, cases, strict=True
    ):
        trained(result, folder, world_size)
        assert result.output.count(ONE_GPU_ONLY) == warnings, result


@pytest.mark.parametrize("job", ["job.sh", "job_torchrun.sh"])
def test_uneven_nodes(jobs, job):
    """The job has two GPUs and processes on one of its nodes, and one on the other."""
    flags = [*SMALL, "--nodes=2", "--ntasks=3", "--gpus=3"]
    script = f"scontrol show --detail job $SLURM_JOB_ID; bash {job} "
    script += shlex.join(ONE_EPOCH)
    result = jobs.run(["salloc", *flags, "bash", "-c", script], "multi_node")
    gpus = re.findall(r"Nodes=\S+ .*GRES=gpu:(\d)", result.output)
    assert set(gpus) == {"1", "2"}, result
    trained(result, "multi_node", 3)


def test_log_and_arguments(jobs, archive):
    """`sbatch job.sh --epochs 2 --data-dir "a b"` reaches main.py as it is.

    The log has no progress bar, and nothing of what uv did not have to do.
    """
    assert " " in str(archive.parent)
    arguments = ["--epochs", "2", "--batch-size", "4", "--data-dir", archive.parent]
    result = jobs.sbatch("single_gpu", *SMALL, "job.sh", *arguments, CIFAR10_ARCHIVE="")
    result.trained(1, batch_size=4, epochs=2)
    assert "\r" not in result.output and "it/s" not in result.output, result
    first, second, *_ = result.output.splitlines()
    assert first.startswith(f"Job {result.job} on node"), result
    assert ARGUMENTS_LINE.match(second), result


def test_variables_of_the_cluster(jobs, archive):
    """With --export, Slurm would give the tasks nothing that job.sh sets.

    Where SLURM_TMPDIR is set, the data goes there, on every node, and stays.
    """
    export = f"--export=PATH,HOME,PYTHONPATH,SLURM_TMPDIR,CIFAR10_ARCHIVE={archive}"
    flags = [*SMALL, "--nodelist=node[1-2]", *ONE_EACH, export]
    env = {"CIFAR10_ARCHIVE": "/nowhere", "SLURM_TMPDIR": "/tmp/local disk"}
    result = jobs.sbatch("multi_node", *flags, "job.sh", *ONE_EPOCH, **env)
    result.trained(2, batch_size=4)
    for node in ("node1", "node2"):
        listing = jobs.on(node, "ls", "/tmp/local disk/data/cifar-10-batches-py")
        assert "test_batch" in listing.output, node
        jobs.on(node, "rm", "-r", "/tmp/local disk")


def test_two_jobs_at_once_on_one_node(jobs):
    """Each has a port of its own, and what the user exports wins."""
    flags = [*SMALL, "--nodelist=node1"]
    many = ["--epochs=1000", "--batch-size=4"]
    said = {"NCCL_DEBUG": "INFO", "TORCH_CPP_LOG_LEVEL": "INFO"}
    first = jobs.submit("multi_gpu", *flags, *ONE_EACH, "job.sh", *many, **said)
    jobs.until(first, r"^Epoch 1: ")
    path = Path(f"/proc/{jobs.pid('node1', 'main.py')}/environ")
    variables = dict(v.split("=", 1) for v in path.read_text().split("\0") if v)
    second = jobs.sbatch("multi_gpu", *flags, *TWO_EACH, "job.sh", *ONE_EPOCH)
    state = jobs.show(first)["JobState"]
    result = jobs.cancel(first)
    second.trained(2, batch_size=4)
    assert state == "RUNNING", result
    assert {name: variables[name] for name in said} == said


def test_job_that_submits_the_next(user, tmp_path):
    """A job has a folder of its own under /tmp, also one that another job submits."""
    arguments = [*TINY, "--model=dummy", "--epochs=1"]
    flags = ["--nodes=1", *TWO, f"--output={user.logs}/%j.out"]
    then = shlex.join(["sbatch", "--parsable", *flags, "job.sh", *arguments])
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\nsource ./job.sh {shlex.join(arguments)}\n{then}\n")
    first = user.sbatch("imagenet", *flags, script)
    second = user.wait(first.find(r"^\d+$")[-1])
    for result in (first, second):
        assert result.state == "COMPLETED", result
        where = f"/tmp/slurm-job-{result.job}/data"
        assert f" images in {where} after " in result.output, result


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


def test_synthetic_under_salloc(jobs):
    """The first thing that people type ends far above chance, 10%.

    srun's tasks have no terminal, but somebody watches: lines tell how far it is.
    """
    command = "srun uv run python main.py --synthetic --epochs=1 --batch-size=8"
    salloc = ["salloc", "--ntasks=1", *SMALL, *command.split()]
    # With a thread, an epoch takes more than ten seconds.
    result = jobs.run(salloc, "single_gpu", OMP_NUM_THREADS="1")
    ((_, accuracy),) = TEST_LINE.findall(result.output)
    assert float(accuracy) >= 60, result
    bar = r"^Epoch 1: .*?(\d+)/129 .*, loss=\d\.\d\d\d\]$"
    shown = result.find(bar)
    assert shown and len(shown) == len(set(shown)), result
    assert "\r" not in result.output, result
