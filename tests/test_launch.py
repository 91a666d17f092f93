"""Every way to start the examples, on real nodes.

What ran, on how many ranks, and what it left behind.
"""

import re
import shlex

import pytest
from slurm_jobs import TINY, TWO

pytestmark = pytest.mark.usefixtures("nothing_left")
SMALL = ["--cpus-per-task=1", "--mem=1G"]
ONE_EPOCH = ["--epochs", "1", "--batch-size", "4"]


@pytest.mark.parametrize(
    "folder, script, flags, world_size, nodes",
    [
        ("single_gpu", "job.sh", [], 1, 1),
        ("multi_gpu", "job.sh", [], 4, 1),
        ("multi_node", "job.sh", [], 8, 2),
        ("multi_node", "job.sh", ["--nodes=1", "--ntasks-per-node=1"], 1, 1),
        (
            "multi_node",
            "job.sh",
            ["--nodes=3", "--ntasks-per-node=2", "--gpus-per-node=2"],
            6,
            3,
        ),
        ("multi_node", "job.sh", ["--ntasks=3", "--nodes=2"], 3, 2),
        ("multi_node", "job.sh", ["--nodes=1-2", "--ntasks=4", "--gpus=4"], 4, 1),
        ("multi_node", "job_torchrun.sh", [], 8, 2),
        ("multi_node", "job_torchrun.sh", ["--nodes=1"], 4, 1),
        (
            "multi_node",
            "job_torchrun.sh",
            ["--nodes=3", "--ntasks-per-node=2", "--gpus-per-node=2"],
            6,
            3,
        ),
        (
            "multi_node",
            "job_torchrun.sh",
            ["--nodes=1-2", "--ntasks=4", "--gpus=4"],
            4,
            1,
        ),
    ],
)
def test_sbatch(jobs, folder, script, flags, world_size, nodes):
    result = jobs.sbatch(folder, *SMALL, *flags, script, *ONE_EPOCH)
    result.output = without_labels(result.output)
    result.trained(world_size, batch_size=4)
    assert jobs.nodes_of(result) == nodes


def without_labels(output: str) -> str:
    """Remove the task numbers that `srun -l` puts before each line."""
    return re.sub(r"^\d+: ", "", output, flags=re.MULTILINE)


@pytest.mark.parametrize(
    "folder, flags, srun, world_size",
    [
        ("single_gpu", ["--ntasks=1", "--gpus-per-node=1"], "srun", 1),
        ("multi_gpu", ["--nodes=1", "--ntasks=2", "--gpus-per-node=2"], "srun", 2),
        ("multi_node", ["--nodes=1-2", "--ntasks=4", "--gpus=4"], "srun", 4),
        # A step of two tasks on the last node of a job of three.
        (
            "multi_node",
            ["--nodes=3", "--ntasks-per-node=2", "--gpus-per-node=2"],
            "srun --nodelist=node3 -N1 -n2",
            2,
        ),
    ],
)
def test_salloc_and_srun(jobs, archive, folder, flags, srun, world_size):
    data_dir = ["--data-dir", archive.parent]
    command = [*srun.split(), "uv", "run", "python", "main.py", *data_dir, *ONE_EPOCH]
    result = jobs.run(["salloc", *SMALL, *flags, *command], folder, OMP_NUM_THREADS="1")
    result.trained(world_size, batch_size=4)


def test_compile(jobs, tmp_path):
    """A compiled model under DDP trains, too; on a CPU this needs a C++ compiler."""
    flags = [*SMALL, "--ntasks-per-node=2", "--gpus-per-node=2"]
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    job = jobs.submit("multi_gpu", *flags, "job.sh", *ONE_EPOCH, "--compile", **env)
    jobs.wait(job, timeout=800).trained(2, batch_size=4)
    assert list(tmp_path.rglob("*.so"))  # what it was compiled to


@pytest.mark.parametrize("job", ["job.sh", "job_torchrun.sh"])
def test_uneven_nodes(jobs, job):
    """The job has three GPUs on one node and one on the other; so are the processes."""
    flags = [*SMALL, "--nodes=2", "--ntasks=4", "--gpus=4", "--cpus-per-task=1"]
    script = (
        f"scontrol show --detail job $SLURM_JOB_ID; bash {job} {' '.join(ONE_EPOCH)}"
    )
    result = jobs.run(["salloc", *flags, "bash", "-c", script], "multi_node")
    assert sorted(re.findall(r"Nodes=node\d .*GRES=gpu:(\d)", result.output)) == [
        "1",
        "3",
    ], result
    result.output = without_labels(result.output)
    result.trained(4, batch_size=4)


def test_epochs_and_arguments_with_spaces(jobs, archive):
    """`sbatch job.sh --epochs 2 --data-dir "a b"` reaches main.py as it is."""
    assert " " in str(archive.parent)
    arguments = ["--epochs", "2", "--batch-size", "4", "--data-dir", archive.parent]
    result = jobs.sbatch("single_gpu", *SMALL, "job.sh", *arguments, CIFAR10_ARCHIVE="")
    result.trained(1, batch_size=4, epochs=2)


def test_variables_by_sbatch_export(jobs, archive):
    """Slurm would give the tasks what --export names, and nothing that job.sh sets."""
    export = f"--export=PATH,HOME,PYTHONPATH,CIFAR10_ARCHIVE={archive}"
    flags = [*SMALL, "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1"]
    result = jobs.sbatch(
        "multi_node", *flags, export, "job.sh", *ONE_EPOCH, CIFAR10_ARCHIVE="/nowhere"
    )
    result.trained(2, batch_size=4)


@pytest.mark.parametrize(
    "folder, last_line", [("multi_node", "Test loss"), ("imagenet", "Weights SHA-256")]
)
def test_sbatch_in_a_job(jobs, folder, last_line):
    """The shell that calls sbatch has other memory, CPUs and GPUs.

    Slurm passes its variables on.
    """
    terminal = [
        "salloc",
        "--nodes=1",
        "--cpus-per-task=2",
        "--mem-per-cpu=100",
        "--gpus=1",
    ]
    terminal += ["srun", "--cpu-bind=cores"]
    passed_on = "$SLURM_CPU_BIND == *mask_cpu:* && $SLURM_MEM_PER_CPU && $SLURM_GPUS"
    inherited = [
        "bash",
        "-c",
        f'[[ {passed_on} ]] && SRUN_CPUS_PER_TASK=64 exec "$@"',
        "-",
    ]
    flags = [
        *SMALL,
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gpus-per-node=1",
        f"--output={jobs.logs}/%j.out",
    ]
    arguments = ONE_EPOCH
    if folder == "imagenet":
        arguments = [
            *ONE_EPOCH,
            "--synthetic",
            "--limit-train-samples=64",
            "--limit-valid-samples=8",
        ]
        arguments += ["--model=dummy", "--image-size=32", "--workers=1"]
    sbatch = ["sbatch", "--parsable", *flags, "job.sh", *arguments]
    # --synthetic takes nothing from there.
    env = {
        "SLURM_CPU_BIND": "",
        "IMAGENET_DIR": "/nowhere",
    }
    submitted = jobs.run([*terminal, *inherited, *sbatch], folder, **env)
    result = jobs.wait(re.search(r"^\d+$", submitted.output, re.MULTILINE)[0])
    assert result.state == "COMPLETED", result
    # What srun says where the controller has not yet noted
    # that the step before has ended.
    busy = (
        r"srun: (Job \d+ step creation temporarily disabled, retrying|"
        r"Step created for job)"
    )
    lines = [line for line in result.output.splitlines() if not re.match(busy, line)]
    assert lines[-1].startswith(last_line), result
    assert not [line for line in lines if "srun: " in line], result


@pytest.mark.parametrize("folder", ["single_gpu", "imagenet"])
def test_job_that_submits_the_next(jobs, user, folder, tmp_path):
    """A job has a folder of its own under /tmp, also one that another job submits."""
    arguments, runs = (
        ([*TINY, "--epochs=1"], user) if folder == "imagenet" else (ONE_EPOCH, jobs)
    )
    flags = ["--nodes=1", *TWO, f"--output={jobs.logs}/%j.out"]
    then = shlex.join(["sbatch", "--parsable", *flags, "job.sh", *arguments])
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\nsource ./job.sh {shlex.join(arguments)}\n{then}\n")
    first = runs.sbatch(folder, *flags, script)
    second = runs.wait(re.findall(r"^\d+$", first.output, re.MULTILINE)[-1])
    for result in (first, second):
        assert result.state == "COMPLETED", result
        if folder == "imagenet":
            assert f"/tmp/slurm-job-{result.job}/data: " in result.output, result


def test_two_jobs_at_once_on_one_node(jobs):
    flags = [*SMALL, "--nodelist=node1", "--ntasks-per-node=2", "--gpus-per-node=2"]
    ids = [jobs.submit("multi_gpu", *flags, "job.sh", *ONE_EPOCH) for _ in range(2)]
    results = [jobs.wait(job) for job in ids]
    for result in results:
        result.trained(2, batch_size=4)
    first, second = (jobs.show(job) for job in ids)
    assert max(first["StartTime"], second["StartTime"]) < min(
        first["EndTime"], second["EndTime"]
    )


def test_slurm_tmpdir_of_the_cluster(jobs):
    """Data goes where the cluster says, on every node, and stays for it to remove."""
    flags = [*SMALL, "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1"]
    result = jobs.sbatch(
        "multi_node", *flags, "job.sh", *ONE_EPOCH, SLURM_TMPDIR="/tmp/local disk"
    )
    result.trained(2, batch_size=4)
    for node in ("node1", "node2"):
        on_node = jobs.cluster.namespaces(node)
        listing = jobs.run([*on_node, "ls", "/tmp/local disk/data/cifar-10-batches-py"])
        assert "test_batch" in listing.output, node
        jobs.run([*on_node, "rm", "-r", "/tmp/local disk"])


def test_progress_bar_in_a_terminal(jobs, archive):
    """Under `srun --pty`, an epoch has a bar, which gives way to the epoch's line."""
    command = [
        "salloc",
        *SMALL,
        "--ntasks=1",
        "srun",
        "--pty",
        "uv",
        "run",
        "python",
        "main.py",
    ]
    command += ["--data-dir", str(archive.parent), *ONE_EPOCH]
    # script(1) gives it a terminal.
    in_terminal = f"stty cols 100 rows 30; {shlex.join(command)}"
    result = jobs.run(
        ["script", "--quiet", "--return", "--command", in_terminal, "/dev/null"],
        "single_gpu",
    )
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", result.output)  # without colours
    assert result.exit_code == 0, text
    assert re.search(r"\rEpoch 1: .*\| *\d+/27 ", text), text
    assert re.search(r"[\r\n]Epoch 1: train loss .* images/s\r\n", text), text
    assert re.search(r"[\r\n]Test loss .*%\r\n", text), text


def test_no_progress_bar_in_a_file(jobs):
    result = jobs.sbatch("single_gpu", *SMALL, "job.sh", *ONE_EPOCH)
    result.trained(1, batch_size=4)
    assert (
        "\r" not in result.output
        and "it/s" not in result.output
        and "step/s" not in result.output
    ), result
