"""Every way to start the examples, on real nodes.

What ran, on how many ranks, and what it left behind.
"""

import contextlib
import http.server
import queue
import re
import shlex
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from slurm_jobs import ARGUMENTS_LINE, TEST_LINE, TINY, TWO

pytestmark = pytest.mark.usefixtures("nothing_left")
SMALL = ["--cpus-per-task=1", "--mem=1G"]
ONE_EPOCH = ["--epochs", "1", "--batch-size", "4"]
# A rank takes 8 seconds of a CPU to import PyTorch: no test has more than it needs.
ONE_EACH = ["--ntasks-per-node=1", "--gpus-per-node=1"]
TWO_EACH = ["--ntasks-per-node=2", "--gpus-per-node=2"]


@pytest.mark.parametrize(
    "folder, script, flags, world_size, nodes",
    [
        ("single_gpu", "job.sh", [], 1, 1),
        ("multi_gpu", "job.sh", [], 4, 1),
        ("multi_node", "job.sh", [], 8, 2),
        ("multi_node", "job.sh", ["--nodes=1", "--ntasks-per-node=1"], 1, 1),
        ("multi_node", "job.sh", ["--nodes=3", *ONE_EACH], 3, 3),
        (
            "multi_node",
            "job.sh",
            ["--nodes=2", "--ntasks=3", "--ntasks-per-node=2"],
            3,
            2,
        ),
        ("multi_node", "job.sh", ["--nodes=1-2", "--ntasks=4", "--gpus=4"], 4, 1),
        ("multi_node", "job_torchrun.sh", [], 8, 2),
        ("multi_node", "job_torchrun.sh", ["--nodes=1", *TWO_EACH], 2, 1),
        ("multi_node", "job_torchrun.sh", ["--nodes=3", *ONE_EACH], 3, 3),
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
        ("multi_node", ["--nodes=1-2", "--ntasks=2", "--gpus=2"], "srun", 2),
        # A step of two tasks on the last node of a job of three.
        (
            "multi_node",
            ["--nodes=3", *TWO_EACH],
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


ONE_GPU_ONLY = "warning: a task sees only one GPU of its node, and NCCL cannot use"
BY_TASK = ["--gpus-per-node=2", "--gpus-per-task=1", "--ntasks-per-node=2"]
# imagenet, without archives.
SYNTHETIC = ["--synthetic", "--limit-train-samples=64", "--limit-valid-samples=8"]
SYNTHETIC += ["--model=dummy", "--image-size=32", "--workers=1"]


@pytest.mark.parametrize(
    "folder, script, world_size",
    [
        ("single_gpu", "job.sh", 1),
        ("multi_gpu", "job.sh", 2),
        ("multi_node", "job.sh", 4),
        ("multi_node", "job_torchrun.sh", 2),
        ("imagenet", "job.sh", 2),
    ],
)
def test_sbatch_gpus_per_task(jobs, folder, script, world_size):
    """job.sh lets every task see all GPUs of its node: NCCL uses them directly."""
    flags = [*SMALL, "--gpus-per-task=1"] if world_size == 1 else [*SMALL, *BY_TASK]
    flags += [] if world_size == 4 else ["--nodes=1"]
    more = SYNTHETIC if folder == "imagenet" else []
    result = jobs.sbatch(folder, *flags, script, *ONE_EPOCH, *more, IMAGENET_DIR="")
    result.output = without_labels(result.output)
    if folder != "imagenet":
        result.trained(world_size, batch_size=4)
    assert result.state == "COMPLETED", result
    assert f"World size {world_size}: " in result.output, result
    assert ONE_GPU_ONLY not in result.output, result


@pytest.mark.parametrize(
    "folder, flags, world_size",
    [
        ("single_gpu", ["--ntasks=1"], 1),
        ("multi_gpu", ["--nodes=1", "--ntasks=2"], 2),
        ("multi_node", ["--nodes=1-2", "--ntasks=2", "--tmp=0"], 2),
        ("imagenet", ["--nodes=2", "--ntasks=4", "--ntasks-per-node=2"], 4),
    ],
)
def test_salloc_gpus_per_task(jobs, archive, folder, flags, world_size, tmp_path):
    """A task takes the only GPU that it sees, and rank 0 tells what that costs."""
    command = ["srun", "uv", "run", "python", "main.py", *ONE_EPOCH]
    if folder == "imagenet":
        command += [*SYNTHETIC, "--checkpoint-dir", tmp_path / "run"]
    else:
        command += ["--data-dir", archive.parent]
    salloc = ["salloc", *SMALL, *flags, "--gpus-per-task=1"]
    result = jobs.run([*salloc, *command], folder, OMP_NUM_THREADS="1")
    if folder != "imagenet":
        result.trained(world_size, batch_size=4)
    assert result.exit_code == 0, result
    assert f"World size {world_size}: " in result.output, result
    assert result.output.count(ONE_GPU_ONLY) == (world_size > 1), result


def test_compile(jobs, tmp_path):
    """A compiled model under DDP trains, too; on a CPU this needs a C++ compiler."""
    flags = [*SMALL, *TWO_EACH]
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    job = jobs.submit("multi_gpu", *flags, "job.sh", *ONE_EPOCH, "--compile", **env)
    jobs.wait(job, timeout=800).trained(2, batch_size=4)
    assert list(tmp_path.rglob("*.so"))  # what it was compiled to


@pytest.mark.parametrize("job", ["job.sh", "job_torchrun.sh"])
def test_uneven_nodes(jobs, job):
    """The job has two GPUs on one node and one on the other; so are the processes."""
    flags = [*SMALL, "--nodes=2", "--ntasks=3", "--gpus=3"]
    script = (
        f"scontrol show --detail job $SLURM_JOB_ID; bash {job} {' '.join(ONE_EPOCH)}"
    )
    result = jobs.run(["salloc", *flags, "bash", "-c", script], "multi_node")
    assert sorted(re.findall(r"Nodes=node\d .*GRES=gpu:(\d)", result.output)) == [
        "1",
        "2",
    ], result
    result.output = without_labels(result.output)
    result.trained(3, batch_size=4)


def test_epochs_and_arguments_with_spaces(jobs, archive):
    """`sbatch job.sh --epochs 2 --data-dir "a b"` reaches main.py as it is."""
    assert " " in str(archive.parent)
    arguments = ["--epochs", "2", "--batch-size", "4", "--data-dir", archive.parent]
    result = jobs.sbatch("single_gpu", *SMALL, "job.sh", *arguments, CIFAR10_ARCHIVE="")
    result.trained(1, batch_size=4, epochs=2)


def test_variables_by_sbatch_export(jobs, archive):
    """Slurm would give the tasks what --export names, and nothing that job.sh sets."""
    export = f"--export=PATH,HOME,PYTHONPATH,CIFAR10_ARCHIVE={archive}"
    flags = [*SMALL, "--nodes=2", *ONE_EACH]
    result = jobs.sbatch(
        "multi_node", *flags, export, "job.sh", *ONE_EPOCH, CIFAR10_ARCHIVE="/nowhere"
    )
    result.trained(2, batch_size=4)


def test_what_the_user_exports_wins(jobs):
    """Whose ranks cannot meet exports NCCL_DEBUG=INFO and calls sbatch again."""
    said = {"NCCL_DEBUG": "INFO", "TORCH_CPP_LOG_LEVEL": "INFO"}
    flags = [*SMALL, "--nodelist=node1", *ONE_EACH]
    many = ["--epochs=1000", "--batch-size=4"]
    job = jobs.submit("multi_gpu", *flags, "job.sh", *many, **said)
    jobs.until(job, r"^Epoch 1: ")
    path = f"/proc/{jobs.pid('node1', 'main.py')}/environ"
    variables = dict(v.split("=", 1) for v in Path(path).read_text().split("\0") if v)
    jobs.cancel(job)
    assert {name: variables[name] for name in said} == said


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
            where = f"/tmp/slurm-job-{result.job}/data"
            assert f" images in {where} after " in result.output, result


def test_two_jobs_at_once_on_one_node(jobs):
    flags = [*SMALL, "--nodelist=node1", *TWO_EACH]
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
    flags = [*SMALL, "--nodes=2", *ONE_EACH]
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


@contextlib.contextmanager
def serve_slowly(path: Path, address: str):
    """Serve a file to nodes, a byte a second, until `go` is set.

    Give its URL, the requests that came, and `go`.
    """
    go, requests = threading.Event(), queue.Queue()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(200)
            self.send_header("Content-Length", str(path.stat().st_size))
            self.end_headers()

        def do_GET(self):
            self.do_HEAD()
            if self.headers["Method"] == "HEAD":  # torchvision looks for redirections
                return
            requests.put(self.path)
            with path.open("rb") as file:
                while not go.wait(1):
                    self.wfile.write(file.read(1))
                self.wfile.write(file.read())

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer((address, 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://{address}:{server.server_port}/{path.name}", requests, go
        finally:
            go.set()
            server.shutdown()


@pytest.mark.parametrize("start, downloads", [("sbatch", 2), ("salloc", 1)])
def test_slow_download(jobs, archive, tmp_path, start, downloads):
    """It meets no timeout: nobody is in the process group yet.

    A node downloads to a disk of its own; to a folder that nodes share, rank 0 does.
    """
    machine = re.match(r"127.*\n(\S+)", (jobs.cluster.state / "hosts").read_text())[1]
    flags = [*SMALL, "--nodelist=node[1-2]", "--ntasks-per-node=2"]
    command = [*flags, "job.sh", *ONE_EPOCH]
    if start == "salloc":
        command = ["salloc", *flags, "srun", "uv", "run", "python", "main.py"]
        command += [*ONE_EPOCH, "--data-dir", tmp_path / "data"]
    run = jobs.sbatch if start == "sbatch" else jobs.run
    arguments = (
        ["multi_node", *command] if start == "sbatch" else [command, "multi_node"]
    )
    with (
        serve_slowly(archive, machine) as (url, requests, go),
        ThreadPoolExecutor() as pool,
    ):
        env = {"CIFAR10_ARCHIVE": "", "CIFAR10_URL": url, "MASTER_PORT": "23457"}
        training = pool.submit(run, *arguments, **env)
        for _ in range(downloads):
            requests.get(timeout=120)
        # Rank 0 listens there from the moment when it joins.
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((jobs.cluster.address("node1"), 23457))
        go.set()
        training.result().trained(4, batch_size=4)
        assert requests.empty()


def test_job_log(jobs):
    """A job's file has no progress bar, and nothing of what uv did not have to do."""
    result = jobs.sbatch("single_gpu", *SMALL, "job.sh", *ONE_EPOCH)
    result.trained(1, batch_size=4)
    assert "\r" not in result.output and "step/s" not in result.output, result
    first, second, *_ = result.output.splitlines()
    assert first.startswith(f"Job {result.job} on node"), result
    assert ARGUMENTS_LINE.match(second), result


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
    shown = re.findall(bar, result.output, re.MULTILINE)
    assert shown and len(shown) == len(set(shown)), result
    assert "\r" not in result.output, result
