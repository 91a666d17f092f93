"""docs/while_it_runs.rst: a debugger in one rank, and where all ranks of a job are."""

import os
import re
import shutil
import signal
import subprocess

import pytest
from slurm_jobs import REPOSITORY, TINY, stop

pytestmark = pytest.mark.usefixtures("nothing_left")
SHAPE = """--nodes=2 --ntasks-per-node=1 --gpus-per-node=1 --cpus-per-task=1
    --mem=4G""".split()
TRAIN = "uv run --no-sync python main.py --epochs=1 --batch-size=4"
PAGE = (REPOSITORY / "docs" / "while_it_runs.rst").read_text()
LOOP = "    for images, labels in batches:\n"


@pytest.mark.parametrize("rank, flags", [(0, "--pty"), (1, "--input=1 --unbuffered")])
def test_debugger(jobs, archive, rank, flags):
    folder = jobs.clone / f"debugged_{rank}"
    folder.mkdir()
    text = (jobs.clone / "multi_node" / "main.py").read_text()
    stop = f"    if dist.get_rank() == {rank}:\n        breakpoint()\n"
    assert text.index(LOOP) > text.index("\ndef train(")
    (folder / "main.py").write_text(text.replace(LOOP, stop + LOOP, 1))
    (folder / "data").symlink_to(archive.parent)
    command = ["salloc", "--quiet", *SHAPE, "srun", *flags.split(), *TRAIN.split()]
    if flags == "--pty":  # wants a terminal
        script = "script --quiet --return --flush /dev/null --command".split()
        command = [*script, " ".join(command)]
    with subprocess.Popen(
        command,
        cwd=folder,
        env=jobs.env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
    ) as process:
        where = read_until(process.stdout, b"(Pdb) ")
        assert "main.py(…)train()" in PAGE
        assert re.search(r"main\.py\(\d+\)train\(\)", where), where
        process.stdin.write(b"p 'rank', dist.get_rank(), dist.get_world_size()\n")
        assert f"('rank', {rank}, 2)" in read_until(process.stdout, b"(Pdb) ")
        process.stdin.write(b"continue\n")
        output = read_until(process.stdout, b"Test loss")
        output += process.stdout.read().decode()
    assert process.returncode == 0, output
    assert re.search("Epoch .*1.*: train loss ", output), output
    shutil.rmtree(folder)


def read_until(stream, end: bytes) -> str:
    """Return what comes, up to and with `end`, if before the test's time limit."""
    text = b""
    while end not in text:
        piece = stream.read(1000)
        assert piece, text.decode()
        text += piece
    return text.decode()


def test_where_it_is(user, jobs, archive):
    """py-spy tells where every rank of a job is, and so does SIGABRT, which ends it."""
    data = {"CIFAR10_ARCHIVE": str(archive), "ANY_CHECKSUM": "1"}
    job = user.submit(
        "multi_node", *SHAPE, "job.sh", "--epochs=1000", "--batch-size=4", **data
    )
    user.until(job, "^Epoch 1: ")
    download, dump = re.findall(
        r"^    (uv run --no-sync --with py-spy true)\n((?:    .*\n)+)",
        PAGE,
        re.MULTILINE,
    )[0]
    assert user.run(download.split()).exit_code == 0
    result = user.run(["bash", "-c", dump.replace("=7", f"={job}")], "multi_node")
    assert result.exit_code == 0, result
    # Each line begins with the number of the node, which has one rank here.
    assert result.find(r"^(\d): SLURM_PROCID=\1$") in (["0", "1"], ["1", "0"]), result
    assert len(result.find(r'^\d: Thread .*: "MainThread"')) == 2, result
    assert len(result.find(r"^\d:     main \(.*main\.py:\d+\)")) == 2, result
    (command,) = re.findall(r"^    (srun --jobid=7 .* pkill .*)$", PAGE, re.MULTILINE)
    ranks = [user.pid(node, "main.py") for node in ("node1", "node2")]
    # Slurm ends the other one when the first has gone: both are to be told before.
    for rank in ranks:
        stop(rank)
    command = ["bash", "-c", command.replace("=7", f"={job}")]
    assert user.run(command).exit_code == 0
    for rank in ranks:
        user.until_pending(job, rank, signal.SIGABRT)
    for rank in ranks:
        os.kill(rank, signal.SIGCONT)
    result = user.wait(job)
    assert result.state == "FAILED", result
    assert result.output.count("Fatal Python error: Aborted") == 2, result
    where = r'^ *File ".*/main.py", line \d+ in main$'
    assert len(result.find(where)) == 2, result


def test_terminal_of_an_editor(user, tmp_path):
    """A shell without Slurm's variables works in a job, by the page's commands."""
    page = (REPOSITORY / "docs" / "while_it_runs.rst").read_text()
    commands = re.findall(r"^    srun --jobid=1234 .* \\\n.*$", page, re.MULTILINE)
    assert len(commands) == 2
    granted = user.run(["salloc", "--no-shell", *SHAPE])
    (job,) = re.findall(r"Granted job allocation (\d+)", granted.output)
    smaller = {
        "1234": job,
        "-node=4": "-node=1",
        "--cpus-per-task=8": "--cpus-per-task=1",
        "/datasets/imagenet": user.env["IMAGENET_DIR"],
        "main.py": " ".join(["main.py", *TINY, "--epochs=1"]),
        "checkpoints/": f"{tmp_path}/checkpoints/",
    }
    env = {
        "USER": "someone",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(tmp_path),
    }
    try:
        for command in commands:
            for old, new in smaller.items():
                command = command.replace(old, new)
            result = user.run(["bash", "-c", command], "imagenet", **env)
            assert result.exit_code == 0, result
        assert (
            "World size 2: " in result.output and "Weights SHA-256 " in result.output
        ), result
        assert (tmp_path / "checkpoints" / "first-try" / "best.pt").exists()
    finally:
        on_each = f"srun --jobid={job} --nodes=2 --ntasks=2 --ntasks-per-node=1".split()
        user.run([*on_each, "rm", "-rf", "/tmp/someone-imagenet"])
        user.cancel(job)
