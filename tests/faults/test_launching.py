"""Jobs that share a node or start in odd places."""

import shutil
import socket
from pathlib import Path

import pytest
from slurm_jobs import EPOCHS, PICTURES, TWO, every_case, weights

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_same_port(user):
    """With one port for two jobs on a node, the second says so, and only it ends."""
    one = ["--nodes=1", "--nodelist=node1", *TWO]
    first = user.train("--epochs=40", flags=one, MASTER_PORT="23456")
    user.until(first, "^World size")
    second = user.wait(user.train(*EPOCHS, flags=one, MASTER_PORT="23456"))
    assert (second.state, second.restarts) == ("FAILED", 0), second
    (error,) = second.find("^main.py: error: .*")
    assert "MASTER_PORT=23456" in error and "address already in use" in error, second
    user.until(first, "^Epoch 2: ")
    assert "to be requeued" not in user.cancel(first).output


@pytest.mark.parametrize("when", every_case("they train", "they meet"))
def test_stranger_at_the_port(user, undisturbed, when):
    """Someone who speaks to rank 0's port in another language changes nothing."""
    job = user.train(*EPOCHS, "--save-steps=3", MASTER_PORT="23457")
    port = (user.cluster.address("node1"), 23457)

    def speak() -> bool:
        try:
            for message in (b"GET / HTTP/1.1\r\n\r\n", bytes(4096), b"\xff" * 4096):
                with socket.create_connection(port, timeout=10) as connection:
                    connection.sendall(message)
        except OSError:
            return False
        return True

    if when == "they train":
        user.until_file(job, "*-step-000003.pt")
        assert speak()
    else:
        user.until_found(job, speak, "listener", 120, 0.001)
        assert "World size" not in user.log(job)
    result = user.wait(job)
    assert weights(result) == undisturbed
    assert result.restarts == 0
    assert not speak()  # it is open no longer than the job


def test_quotes_and_spaces(user, tmp_path, undisturbed):
    """Any character may be in a path. (The repository's has a space, too.)"""
    name = """a 'single' and a "double" quote, $HOME, `date`, a*? and \\"""
    folder, source, disk = (
        tmp_path / name,
        tmp_path / f"from {name}",
        Path("/tmp", name),
    )
    shutil.copytree(user.env["IMAGENET_DIR"], source)
    job = user.train(
        *EPOCHS,
        f"--checkpoint-dir={folder}",
        IMAGENET_DIR=str(source),
        SLURM_TMPDIR=str(disk),
    )
    result = user.wait(job)
    for node in ("node1", "node2"):
        assert user.on(node, "test", "-d", disk / "data").exit_code == 0
        user.on(node, "rm", "-r", disk)
    assert weights(result) == undisturbed
    assert (folder / "best.pt").exists()


@pytest.mark.parametrize("tasks", every_case(4, 24))
def test_many_tasks_start_at_once(user, tasks):
    """All of them start uv and import torch at once, without a way to the internet."""
    flags = f"--ntasks-per-node={tasks // 2} --gpus-per-node=0 --cpus-per-task=1"
    flags = [*flags.split(), "--mem=16G"]
    arguments = ["--epochs=1", "--batch-size=1", "--image-size=64", "--workers=0"]
    result = user.wait(user.train(*arguments, flags=flags), timeout=800)
    weights(result, pictures=PICTURES - PICTURES % tasks)
    assert f"World size {tasks}: " in result.output


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("count, at_once", every_case((6, 3), (100, 50)))
def test_many_short_jobs(user, count, at_once):
    """An array of short jobs: none is lost."""
    flags = "--nodes=1 --ntasks-per-node=1 --gpus-per-node=0 --cpus-per-task=1 --mem=1G"
    flags += f" --array=1-{count}%{at_once} --output={user.logs}/%A_%a.out"
    arguments = ["--epochs=1", "--model=dummy", "--workers=0"]
    array = user.train(*arguments, flags=flags.split())
    tasks = range(1, count + 1)
    results = [user.wait(f"{array}_{task}", timeout=3000) for task in tasks]
    # Each has a seed of its own.
    assert len({weights(result) for result in results}) == count
