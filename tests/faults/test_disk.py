"""Checkpoints and data that are damaged, missing or not the run's, and full disks."""

import contextlib
import itertools
import os
import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drawn_imagenet import draw_imagenet, tar_bytes
from slurm_jobs import (
    EPOCHS,
    PICTURES,
    TWO,
    VALID_PICTURES,
    Result,
    User,
    every_case,
    weights,
)

pytestmark = pytest.mark.usefixtures("nothing_left")


def stopped(user: User, folder: Path) -> tuple[str, list[Path]]:
    """Stop a job in its second epoch; return output, and checkpoints newest first."""
    job = user.train(*EPOCHS, "--save-steps=3", f"--checkpoint-dir={folder}")
    user.until_found(
        job, lambda: list(folder.glob("epoch-002-*.pt")), "second epoch", 120, 0.001
    )
    output = user.cancel(job).output
    return output, sorted(folder.glob("epoch-*.pt"), reverse=True)


def errors(result: Result) -> list[str]:
    """Return all error lines but the last one, job.sh's about the requeue."""
    pattern = r"^(?:job.sh|prepare_data.py|main.py): error: (?!status).*"
    return re.findall(pattern, result.output, re.MULTILINE)


def assert_failed(user: User, result: Result, restarts: str = "0") -> None:
    assert result.state == "FAILED", result
    assert user.show(result.job)["Restarts"] == restarts, result


def on(user: User, node: str, *command) -> Result:
    """Run a command on a node."""
    return user.run([*user.cluster.namespaces(node), *command])


@contextlib.contextmanager
def disk_on(user: User, node: str, path: str, options: str):
    """Make a folder on both nodes, which on one of them is a disk of its own."""
    for name in ("node1", "node2"):
        on(user, name, "mkdir", path)
    on(user, node, "mount", "-t", "tmpfs", "-o", options, "a disk", path)
    try:
        yield
    finally:
        on(user, node, "umount", path)
        for name in ("node1", "node2"):
            on(user, name, "rm", "-rf", path)


class Malicious:
    """What torch.load must not run."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("damage", every_case("bit", "cut", "empty", "code", "all"))
def test_damaged_checkpoint(user, undisturbed, tmp_path, damage):
    """The newest whole one is taken, with a warning; if none, nothing starts anew."""
    folder, proof = tmp_path / "checkpoints", tmp_path / "code has run"
    before, (newest, *older) = stopped(user, folder)
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    others = {
        "cut": content[: len(content) // 2],
        "empty": b"",
        "code": pickle.dumps(Malicious(proof)),
    }
    newest.write_bytes(others.get(damage, content))
    if damage == "all":
        for path in older:
            path.write_bytes(b"no checkpoint")
    result = user.wait(user.train(*EPOCHS, f"--checkpoint-dir={folder}"))
    warning = r"^warning: (.*) is damaged, trying the one before: "
    warned = re.findall(warning, result.output, re.MULTILINE)
    if damage == "all":
        assert_failed(user, result)
        assert errors(result) == [
            f"main.py: error: no whole checkpoint is left in {folder}: "
            "remove the damaged ones there to start again from the beginning"
        ], result
        assert warned == [str(path) for path in (newest, *older)], result
    else:
        assert weights(replace(result, output=before + result.output)) == undisturbed
        assert warned == [str(newest)], result
        assert f"\nResuming from {older[0]}\n" in result.output, result
    assert not proof.exists()


# What else main.py is told, and why it refuses.
CHANGES = {
    "model": ("--model=resnet18", "with model shufflenet_v2_x0_5, not resnet18"),
    "data": ("", "with fingerprints of the data"),
    "seed": ("--seed=1", "with seed 0, not 1"),
    "batch size": ("--batch-size=4", "with batch_size 5, not 4"),
    "entry": ("", "does not fit --model shufflenet_v2_x0_5: "),
    "missing entry": ("", 'Missing key(s) in state_dict: "fc.bias"'),
    "further entry": ("", 'Unexpected key(s) in state_dict: "fc.more"'),
}


@pytest.mark.parametrize("change", every_case(*CHANGES))
def test_checkpoint_of_another_run(user, tmp_path, change):
    """It is refused with the reason."""
    folder = tmp_path / "checkpoints"
    _, (newest, *_) = stopped(user, folder)
    # Whole, but with a tensor of another shape, too few or too many.
    if "entry" in change:
        state = torch.load(newest, weights_only=True)
        if change == "missing entry":
            del state["model"]["fc.bias"]
        else:
            name = "fc.bias" if change == "entry" else "fc.more"
            state["model"][name] = torch.zeros(7)
        torch.save(state, newest)
    env = {}
    if change == "data":  # as many images, but others
        draw(tmp_path / "others", resolution=44)
        env = {"IMAGENET_DIR": str(tmp_path / "others")}
    flag, reason = CHANGES[change]
    job = user.train(*EPOCHS, f"--checkpoint-dir={folder}", *flag.split(), **env)
    result = user.wait(job)
    assert_failed(user, result)
    (error,) = errors(result)
    assert reason in error, result
    assert newest.exists()


@pytest.mark.parametrize("what", every_case("full", "gone", "read-only"))
def test_checkpoint_folder(user, tmp_path, what):
    """Training ends and says what is not on disk; checkpoints before the fault stay."""
    disk = "/tmp/a small disk"  # for two checkpoints, not for the third
    folder = (tmp_path if what == "gone" else Path(disk)) / "checkpoints"
    first = folder / "epoch-001-step-000003.pt"
    with disk_on(user, "node1", disk, "ro" if what == "read-only" else "size=8m"):
        job = user.train(
            *EPOCHS, "--save-steps=3", "--keep=9", f"--checkpoint-dir={folder}"
        )
        if what == "gone":
            user.until_found(job, first.exists, "checkpoint", 60, 0.001)
            folder.rename(tmp_path / "elsewhere")
        result = user.wait(job)
        left = on(user, "node1", "ls", folder).output
    assert ".partial" not in left
    if what == "read-only":
        assert_failed(user, result)
        said = f"main.py: error: cannot use {folder}: Read-only file system"
        assert errors(result) == [said], result
    elif what == "full":
        # The first start has brought checkpoints, and the second one none.
        assert_failed(user, result, restarts="1")
        said = rf"main.py: error: cannot write {folder}/epoch-.*.pt: No space left on"
        assert len(errors(result)) == 2, result
        assert all(re.match(said, error) for error in errors(result)), result
        assert first.name in left, result
    else:
        # It starts again from the beginning.
        assert result.state == "COMPLETED", result
        assert user.show(job)["Restarts"] == "1", result
        (error,) = errors(result)
        assert error.endswith(": No such file or directory"), result


def draw(folder: Path, resolution: int = 40) -> None:
    counts = {"train": PICTURES // 4, "valid": VALID_PICTURES // 4}
    draw_imagenet(folder, classes=4, **counts, resolution=resolution)


@pytest.mark.parametrize(
    "what", every_case("bad picture", "missing", "cut", "labels", "member outside")
)
def test_bad_data(user, tmp_path, what):
    """It is named, before training if possible, and is no reason to try again."""
    source = tmp_path / "archives"
    draw(source)
    train, valid = (source / f"ILSVRC2012_img_{part}.tar" for part in ("train", "val"))
    jpeg = b"\xff\xd8\xff"  # the first bytes of one
    message = f"prepare_data.py: error: .*{train.name}"
    if what == "bad picture":
        content = bytearray(train.read_bytes())
        start = content.index(jpeg, len(content) // 2)
        content[start + 20 : start + 400] = bytes(380)
        train.write_bytes(content)
        message = r"main.py: error: .*n0000000\d_\d+.JPEG"
    elif what == "missing":
        train.unlink()
    elif what == "cut":
        os.truncate(train, train.stat().st_size // 2)
    elif what == "labels":
        valid.write_bytes(tar_bytes({"ILSVRC2012_val_00000001.JPEG": jpeg}))
        message = f"prepare_data.py: error: .*{valid.name}"
    else:
        name = "train/a/../../../../../../../../tmp/outside.jpg"
        source = tmp_path / "mine.tar"
        source.write_bytes(
            tar_bytes({"train/a/1.jpg": jpeg, "val/a/1.jpg": jpeg, name: jpeg})
        )
        leads = f"a member's name, '{name}', leads elsewhere"
        message = f"prepare_data.py: error: .*mine.tar: {leads}"
    result = user.wait(user.train(*EPOCHS, IMAGENET_DIR=str(source)))
    assert_failed(user, result)
    assert re.match(message, errors(result)[0]), result
    assert len(set(errors(result))) <= 2, result  # one for each node
    for node in ("node1", "node2"):
        assert on(user, node, "ls", "/tmp/outside.jpg").exit_code != 0


def test_folder_that_cannot_be_removed(user, undisturbed):
    """A job that is to be requeued is requeued, whatever is left in its folder."""
    job = user.train(*EPOCHS, "--save-steps=3")
    user.until_file(job, "*-step-000003.pt")
    with disk_on(user, "node1", f"/tmp/slurm-job-{job}/busy", "size=1m"):
        user.warn(job)
        user.until(job, "^rm: cannot remove .*/busy': Device or resource busy$")
        user.until(job, "^Job .* requeued 1 times$")
    assert weights(user.wait(job)) == undisturbed


@pytest.mark.parametrize("what", every_case("full", "read-only"))
def test_slurm_tmpdir(user, what):
    """A node's disk without room, or that cannot be written to, is named."""
    disk = "/tmp/a site's disk"
    options = "size=200k" if what == "full" else "ro"
    with disk_on(user, "node2", disk, options):
        result = user.wait(user.train(*EPOCHS, SLURM_TMPDIR=disk))
    assert_failed(user, result)
    assert re.search(rf"error: .*{disk}|cannot .*{disk}", result.output), result
    assert "node2" in result.output and "World size" not in result.output, result


EXAMPLES = ("imagenet", "multi_node", "multi_gpu", "single_gpu")


@pytest.mark.parametrize(
    "made, folder", every_case(*itertools.product(("folder", "link"), EXAMPLES))
)
def test_folder_of_someone_else(user, tmp_path, made, folder):
    """Another user has made what job.sh would make.

    A folder to look into, or a link to one of the user's.
    """
    own = tmp_path / "own"
    own.mkdir()
    job = user.submit(
        folder, "--hold", "--nodelist=node1", "--nodes=1", *TWO, "job.sh", "--synthetic"
    )
    path = f"/tmp/slurm-job-{job}"
    if made == "folder":
        on(user, "node1", "install", "-d", "-m", "777", "-o", "nobody", path)
    else:
        if folder == "imagenet":
            # As a run of the user leaves one. job.sh must not go by it.
            (own / f"{job}.got_further").touch()
        on(user, "node1", "ln", "-s", own, path)
        on(user, "node1", "chown", "-h", "nobody", path)
    assert user.run(["scontrol", "release", job]).exit_code == 0
    result = user.wait(job)
    assert result.state == "FAILED", result
    if folder == "imagenet":
        there = "is another user's: sbatch again"
        assert errors(result) == [f"job.sh: error: {path} on node1 {there}"], result
    else:
        said = f"mkdir: cannot create directory '{path}': File exists"
        output = result.output.replace("\u2018", "'").replace("\u2019", "'")
        assert said in output, result
    assert "World size" not in result.output, result
    assert not list(own.iterdir())
