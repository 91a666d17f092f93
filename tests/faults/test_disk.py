"""Checkpoints and data that are damaged, missing or not the run's, and full disks."""

import contextlib
import os
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from slurm_jobs import (
    EPOCHS,
    TWO,
    Result,
    User,
    every_case,
    weights,
)

pytestmark = pytest.mark.usefixtures("nothing_left")


def stopped(user: User, folder: Path) -> tuple[str, list[Path]]:
    """Stop a job in its second epoch; return output, and checkpoints newest first."""
    job = user.train(*EPOCHS, "--save-steps=3", RUN_DIR=str(folder))
    user.until_found(
        job, lambda: list(folder.glob("epoch-002-*.pt")), "second epoch", 300, 0.001
    )
    output = user.cancel(job).output
    return output, sorted(folder.glob("epoch-*.pt"), reverse=True)


def errors(result: Result) -> list[str]:
    """Return all error lines but the last one, job.sh's about the requeue."""
    pattern = r"^(?:job.sh|prepare_data.py|main.py): error: (?!status).*"
    return result.find(pattern)


def assert_failed(result: Result, restarts: int = 0) -> None:
    assert (result.state, result.restarts) == ("FAILED", restarts), result


@contextlib.contextmanager
def disk_on(user: User, node: str, path: str, options: str):
    """Make a folder on both nodes, which on one of them is a disk of its own."""
    for name in ("node1", "node2"):
        user.on(name, "mkdir", path)
    user.on(node, "mount", "-t", "tmpfs", "-o", options, "a disk", path)
    try:
        yield
    finally:
        user.on(node, "umount", path)
        for name in ("node1", "node2"):
            user.on(name, "rm", "-rf", path)


@pytest.mark.parametrize("damaged", every_case("the newest", "all"))
def test_damaged_checkpoint(user, undisturbed, tmp_path, damaged):
    """The newest whole one is taken, with a warning; if none, nothing starts anew.

    test_damaged in test_checkpoint.py has more ways to damage one.
    """
    folder = tmp_path / "checkpoints"
    before, (newest, *older) = stopped(user, folder)
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    if damaged == "all":
        for path in older:
            path.write_bytes(b"no checkpoint")
    result = user.wait(user.train(*EPOCHS, RUN_DIR=str(folder)))
    warning = r"^warning: (.*) is damaged, trying the one before: "
    warned = result.find(warning)
    if damaged == "all":
        assert_failed(result)
        assert errors(result) == [
            f"main.py: error: no whole checkpoint is left in {folder}: "
            "remove the damaged ones there to start again from the beginning"
        ], result
        assert warned == [str(path) for path in (newest, *older)], result
    else:
        assert weights(replace(result, output=before + result.output)) == undisturbed
        assert warned == [str(newest)], result
        assert f"\nResuming from {older[0]}\n" in result.output, result


@pytest.mark.parametrize("what", every_case("full", "gone"))
def test_checkpoint_folder(user, tmp_path, what):
    """Training ends and says what is not on disk; checkpoints before the fault stay."""
    disk = "/tmp/a small disk"  # for two checkpoints, not for the third
    folder = (tmp_path if what == "gone" else Path(disk)) / "checkpoints"
    first = folder / "epoch-001-step-000003.pt"
    # All nodes of a job must see its checkpoints.
    nodes = ["--nodes=1", "--nodelist=node1"] if what == "full" else []
    arguments = [*EPOCHS, "--save-steps=3", "--keep=9"]
    with disk_on(user, "node1", disk, "size=8m"):
        job = user.train(*arguments, flags=[*TWO, *nodes], RUN_DIR=str(folder))
        if what == "gone":
            user.until_found(job, first.exists, "checkpoint", 60, 0.001)
            folder.rename(tmp_path / "elsewhere")
        result = user.wait(job)
        left = user.on("node1", "ls", folder).output
    assert ".partial" not in left
    if what == "full":
        # The first start has brought checkpoints, and the second one none.
        assert_failed(result, restarts=1)
        said = rf"main.py: error: cannot write {folder}/epoch-.*.pt: No space left on"
        assert len(errors(result)) == 2, result
        assert all(re.match(said, error) for error in errors(result)), result
        assert first.name in left, result
        assert result.find(r"no new checkpoint in .*: not started again$"), result
    else:
        # It starts again from the beginning.
        assert (result.state, result.restarts) == ("COMPLETED", 1), result
        (error,) = errors(result)
        assert error.endswith(": No such file or directory"), result


def test_full_disk_of_the_log(user, undisturbed):
    """The job is requeued, though nothing can be said there any more."""
    disk = "/tmp/a disk of logs"
    with disk_on(user, "node1", disk, "size=1m"):
        flags = [*TWO, "--nodelist=node[1-2]", f"--output={disk}/log"]
        job = user.train(*EPOCHS, "--save-steps=3", flags=flags)
        user.until_file(job, "*-step-000003.pt")
        user.on("node1", "dd", "if=/dev/zero", f"of={disk}/all the rest")
        # The last page of the log has room, too.
        fill = f"cat /dev/zero >> '{disk}/log'"
        assert "No space left" in user.on("node1", "sh", "-c", fill).output
        user.run(["scancel", "--batch", "--signal=USR1", job])
        user.until_found(
            job, lambda: user.show(job)["Restarts"] == "1", "a requeue", 120
        )
        user.on("node1", "rm", f"{disk}/all the rest")
        result = user.wait(job)
        log = user.on("node1", "cat", f"{disk}/log").output
    assert weights(replace(result, output=log)) == undisturbed


def test_a_node_is_emptied(user, same_end):
    """An epilog of another job removes the folder: one line names it.

    What was saved counts, and the data is staged again.
    """
    job = user.train(*EPOCHS, "--save-steps=3")
    rank = user.stop_rank(job)
    folder = user.job_folder(job)
    for node in ("node1", "node2"):
        assert user.on(node, "rm", "-r", folder).exit_code == 0
    os.kill(rank, signal.SIGCONT)
    result = same_end(job)
    pattern = (
        rf"main.py: error: node\d has lost {folder}/pymp-\w+, with the sockets of "
    )
    assert all(re.match(pattern, error) for error in errors(result)), result
    assert errors(result) and "Traceback" not in result.output, result


def test_folder_that_cannot_be_removed(user, undisturbed):
    """A job that is to be requeued is requeued, whatever is left in its folder."""
    job = user.train(*EPOCHS, "--save-steps=3")
    user.until_file(job, "*-step-000003.pt")
    folder = user.job_folder(job)
    with disk_on(user, "node1", f"{folder}/busy", "size=1m"):
        user.warn(job)
        user.until(job, "^rm: cannot remove .*/busy': Device or resource busy$")
        # The next start cannot remove it, either, and trains.
        user.until(job, "^Job .* requeued 1 times$(?s:.*)^World size")
    assert weights(user.wait(job)) == undisturbed
    assert user.on("node1", "rmdir", folder).exit_code == 0


@pytest.mark.parametrize("what", every_case("full", "read-only"))
def test_slurm_tmpdir(user, what):
    """A node's disk without room, or that cannot be written to, is named."""
    disk = "/tmp/a site's disk"
    options = "size=200k" if what == "full" else "ro"
    with disk_on(user, "node2", disk, options):
        result = user.wait(user.train(*EPOCHS, SLURM_TMPDIR=disk))
    assert_failed(result)
    assert re.search(f"(?:error: |cannot ).*{disk}", result.output), result
    assert any("node2" in line for line in errors(result)), result
    assert "World size" not in result.output, result


def test_number_of_an_older_job(user, tmp_path):
    """Slurm's numbers begin again: a new job leaves alone what an older one saved."""
    folder = tmp_path / "checkpoints"
    _, (newest, *_) = stopped(user, folder)
    job = user.train(flags=[*TWO, "--hold"])
    older = shutil.copytree(folder, user.checkpoints(job))
    before = {path.name: path.read_bytes() for path in older.glob("*.pt")}
    assert user.run(["scontrol", "release", job]).exit_code == 0
    result = user.wait(job)
    assert_failed(result)
    assert errors(result) == [
        f"job.sh: error: {older} is an earlier job's: move it away, or export "
        f"RUN_DIR='{older}'"
    ], result
    assert {path.name: path.read_bytes() for path in older.glob("*.pt")} == before
    # What is named is meant.
    job = user.train(*EPOCHS, "--save-steps=3", RUN_DIR=str(older))
    result = user.wait(job)
    assert result.state == "COMPLETED", result
    assert f"\nResuming from {older / newest.name}\n" in result.output, result
