"""Checkpoints and data that are damaged, missing or not the run's, and full disks."""

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
    User,
    every_case,
    weights,
)

pytestmark = pytest.mark.usefixtures("nothing_left")


def stopped(user: User, folder: Path, *arguments: str) -> tuple[str, list[Path]]:
    """Stop a job in its second epoch; return output, and checkpoints newest first."""
    job = user.train(
        *EPOCHS, "--save-steps=3", f"--checkpoint-dir={folder}", *arguments
    )
    user.until_found(
        job, lambda: list(folder.glob("epoch-002-*.pt")), "second epoch", 120, 0.001
    )
    output = user.cancel(job).output
    return output, sorted(folder.glob("epoch-*.pt"), reverse=True)


def errors(output: str) -> list[str]:
    """Return all error lines but the last one, job.sh's about the requeue."""
    return re.findall(
        r"^(?:job.sh|prepare_data.py|main.py): error: (?!status).*",
        output,
        re.MULTILINE,
    )


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
    if damage in ("bit", "all"):
        newest.write_bytes(content)
    elif damage == "code":
        newest.write_bytes(pickle.dumps(Malicious(proof)))
    else:
        newest.write_bytes(content[: len(content) // 2] if damage == "cut" else b"")
    if damage == "all":
        for path in older:
            path.write_bytes(b"no checkpoint")
    result = user.wait(user.train(*EPOCHS, f"--checkpoint-dir={folder}"))
    warnings = re.findall(
        r"^warning: (.*) is damaged, trying the one before: ",
        result.output,
        re.MULTILINE,
    )
    if damage == "all":
        assert result.state == "FAILED" and user.show(result.job)["Restarts"] == "0", (
            result
        )
        assert errors(result.output) == [
            f"main.py: error: no whole checkpoint is left in {folder}: "
            "remove the damaged ones there to start again from the beginning"
        ], result
        assert warnings == [str(path) for path in (newest, *older)], result
    else:
        assert weights(replace(result, output=before + result.output)) == undisturbed
        assert warnings == [str(newest)], result
        assert f"\nResuming from {older[0]}\n" in result.output, result
    assert not proof.exists()


CHANGES = every_case(
    "model", "data", "seed", "batch size", "entry", "missing entry", "further entry"
)


@pytest.mark.parametrize("change", CHANGES)
def test_checkpoint_of_another_run(user, tmp_path, change):
    """It is refused with the reason."""
    folder = tmp_path / "checkpoints"
    _, (newest, *_) = stopped(user, folder)
    other = {
        "model": (["--model=resnet18"], "with model shufflenet_v2_x0_5, not resnet18"),
        "data": ([], "with fingerprints of the data"),
        "seed": (["--seed=1"], "with seed 0, not 1"),
        "batch size": (["--batch-size=4"], "with batch_size 5, not 4"),
        "entry": ([], "does not fit --model shufflenet_v2_x0_5: "),
        "missing entry": ([], 'Missing key(s) in state_dict: "fc.bias"'),
        "further entry": ([], 'Unexpected key(s) in state_dict: "fc.more"'),
    }
    arguments, reason = other[change]
    # Whole, but with a tensor of another shape, too few or too many.
    if "entry" in change:
        state = torch.load(newest, weights_only=True)
        if change == "missing entry":
            del state["model"]["fc.bias"]
        else:
            state["model"]["fc.bias" if change == "entry" else "fc.more"] = torch.zeros(
                7
            )
        torch.save(state, newest)
    env = {}
    if change == "data":  # as many pictures, but others
        draw(tmp_path / "others", resolution=44)
        env = {"IMAGENET_DIR": str(tmp_path / "others")}
    result = user.wait(
        user.train(*EPOCHS, f"--checkpoint-dir={folder}", *arguments, **env)
    )
    assert result.state == "FAILED" and user.show(result.job)["Restarts"] == "0", result
    (error,) = errors(result.output)
    assert reason in error, result
    assert newest.exists()


@pytest.mark.parametrize("what", every_case("full", "gone", "read-only"))
def test_checkpoint_folder(user, tmp_path, what):
    """Training ends and says what is not on disk; checkpoints before the fault stay."""
    # A disk of rank 0's node: enough for the staged data
    # and two checkpoints, not for the third.
    disk, node1 = "/tmp/a small disk", user.cluster.namespaces("node1")
    folder = Path(f"{disk}/checkpoints")
    user.run([*node1, "mkdir", "-p", disk])
    size = "size=64m" if what == "gone" else "size=8m"
    user.run([*node1, "mount", "-t", "tmpfs", "-o", size, "checkpoints", disk])
    if what == "read-only":
        user.run([*node1, "mount", "-o", "remount,ro", disk])
    try:
        job = user.train(
            *EPOCHS, "--save-steps=3", "--keep=9", f"--checkpoint-dir={folder}"
        )
        if what == "gone":
            there = [*node1, "ls", f"{folder}/epoch-001-step-000003.pt"]
            user.until_found(
                job, lambda: user.run(there).exit_code == 0, "checkpoint", 60, 0.001
            )
            user.run([*node1, "rm", "-rf", folder])
        result = user.wait(job)
        left = user.run([*node1, "ls", folder]).output.split()
    finally:
        user.run([*node1, "umount", disk])
        user.run([*node1, "rmdir", disk])
    restarts = user.show(job)["Restarts"]
    if what == "read-only":
        assert (result.state, restarts) == ("FAILED", "0"), result
        assert errors(result.output) == [
            f"main.py: error: cannot use {folder}: Read-only file system"
        ], result
    elif what == "full":
        # The first start has brought checkpoints, and the second one none.
        assert (result.state, restarts) == ("FAILED", "1"), result
        assert re.fullmatch(
            rf"(main.py: error: cannot write {folder}/epoch-.*.pt: "
            r"No space left on device(\n|$)){2}",
            "\n".join(errors(result.output)),
        ), result
    else:
        # It starts again from the beginning.
        assert (result.state, restarts) == ("COMPLETED", "1"), result
        (error,) = errors(result.output)
        assert error.endswith(": No such file or directory"), result
    assert not [name for name in left if name.endswith(".partial")]
    if what == "full":
        assert "epoch-001-step-000003.pt" in left


def draw(folder: Path, resolution: int = 40) -> None:
    draw_imagenet(
        folder,
        classes=4,
        train=PICTURES // 4,
        valid=VALID_PICTURES // 4,
        resolution=resolution,
    )


@pytest.mark.parametrize(
    "what", every_case("bad picture", "missing", "cut", "labels", "member outside")
)
def test_bad_data(user, tmp_path, what):
    """It is named, before training if possible, and is no reason to try again."""
    source = tmp_path / "archives"
    draw(source)
    train = source / "ILSVRC2012_img_train.tar"
    if what == "bad picture":
        content = bytearray(train.read_bytes())
        # A JPEG's first bytes.
        start = content.index(b"\xff\xd8\xff", len(content) // 2)
        content[start + 20 : start + 400] = bytes(380)
        train.write_bytes(content)
        message = r"main.py: error: .*n0000000\d_\d+.JPEG"
    elif what == "missing":
        train.unlink()
        message = f"prepare_data.py: error: .*{train.name}"
    elif what == "cut":
        os.truncate(train, train.stat().st_size // 2)
        message = f"prepare_data.py: error: .*{train.name}"
    elif what == "labels":
        valid = source / "ILSVRC2012_img_val.tar"
        valid.write_bytes(tar_bytes({"ILSVRC2012_val_00000001.JPEG": b"\xff\xd8\xff"}))
        message = f"prepare_data.py: error: .*{valid.name}"
    else:
        name, picture = (
            "train/a/../../../../../../../../tmp/outside.jpg",
            b"\xff\xd8\xff",
        )
        source = tmp_path / "mine.tar"
        source.write_bytes(
            tar_bytes({"train/a/1.jpg": picture, "val/a/1.jpg": picture, name: picture})
        )
        message = (
            "prepare_data.py: error: .*mine.tar: "
            f"a member's name, '{name}', leads elsewhere"
        )
    result = user.wait(user.train(*EPOCHS, IMAGENET_DIR=str(source)))
    assert result.state == "FAILED" and user.show(result.job)["Restarts"] == "0", result
    assert re.match(message, errors(result.output)[0]), result
    assert len(set(errors(result.output))) <= 2, result  # one for each node
    for node in ("node1", "node2"):
        assert (
            user.run(
                [*user.cluster.namespaces(node), "ls", "/tmp/outside.jpg"]
            ).exit_code
            != 0
        )


@pytest.mark.parametrize("what", every_case("full", "read-only"))
def test_slurm_tmpdir(user, what):
    """A node's disk without room, or that cannot be written to, is named."""
    disk, node2 = "/tmp/a site's disk", user.cluster.namespaces("node2")
    for node in ("node1", "node2"):
        user.run([*user.cluster.namespaces(node), "mkdir", "-p", disk])
    user.run([*node2, "mount", "-t", "tmpfs", "-o", "size=200k", "data", disk])
    if what == "read-only":
        user.run([*node2, "mount", "-o", "remount,ro", disk])
    try:
        result = user.wait(user.train(*EPOCHS, SLURM_TMPDIR=disk, flags=TWO))
    finally:
        user.run([*node2, "umount", disk])
        for node in ("node1", "node2"):
            user.run([*user.cluster.namespaces(node), "rm", "-rf", disk])
    assert result.state == "FAILED" and user.show(result.job)["Restarts"] == "0", result
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
    path, node1 = f"/tmp/slurm-job-{job}", user.cluster.namespaces("node1")
    if made == "folder":
        user.run([*node1, "install", "-d", "-m", "777", "-o", "nobody", path])
    else:
        if folder == "imagenet":
            # As a run of the user leaves one. job.sh must not go by it.
            (own / f"{job}.got_further").touch()
        user.run([*node1, "ln", "-s", own, path])
        user.run([*node1, "chown", "-h", "nobody", path])
    assert user.run(["scontrol", "release", job]).exit_code == 0
    result = user.wait(job)
    assert result.state == "FAILED", result
    if folder == "imagenet":
        there = "is another user's: sbatch again"
        said = [f"job.sh: error: {path} on node1 {there}"]
        assert errors(result.output) == said, result
    else:
        said = f"mkdir: cannot create directory '{path}': File exists"
        assert said in result.output.replace("\u2018", "'").replace("\u2019", "'")
    assert "World size" not in result.output, result
    assert not list(own.iterdir())
