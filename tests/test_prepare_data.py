"""imagenet/prepare_data.py: what it stages is whole; one line refuses all else."""

import contextlib
import io
import itertools
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision.transforms.v2  # noqa: F401  # for the forked processes
from drawn_imagenet import (
    draw_folders,
    draw_imagenet,
    draw_tiny_imagenet,
    tar_bytes,
    write_zip,
)
from PIL import Image
from test_checkpoint import REPOSITORY, mounted

SCRIPT = REPOSITORY / "imagenet" / "prepare_data.py"
import prepare_data  # noqa: E402
from archives import DEVKIT, HOST, TRAIN, VAL  # noqa: E402
from data import BadImage, Images, Synthetic  # noqa: E402

# pytest shows all warnings.
pytestmark = pytest.mark.filterwarnings("ignore:The image decoding and encoding")
FORMS = [(), ("--extract",), ("--resize=32",)]
JPEG = b"\xff\xd8\xff"
# A forked process has what takes seconds to import. Threads would not survive the fork.
FORK = multiprocessing.get_context("fork")
torch.set_num_threads(1)


def command(source, data_dir, *flags) -> list[str]:
    return [str(SCRIPT), f"--source={source}", f"--data-dir={data_dir}", *flags]


def call(*arguments, hook=None) -> tuple[int | None, str]:
    """Run the script's main() in a process of its own; return exit code and output.

    Before it opens, makes or renames a file, it calls `hook` with the event and its
    arguments: a test can do something at that very moment.
    """

    def call_main() -> None:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        sys.stdout, sys.stderr = open(1, "w", buffering=1), open(2, "w", buffering=1)
        sys.argv = command(*arguments)
        if hook:
            sys.addaudithook(hook)
        prepare_data.main()

    with tempfile.TemporaryFile() as output:
        process = FORK.Process(target=call_main)
        process.start()
        process.join(60)
        return process.exitcode, os.pread(output.fileno(), 2**20, 0).decode()


def run(*arguments, exit_code=0, hook=None) -> str:
    """Run the script; return its output, which may not have a traceback."""
    code, output = call(*arguments, hook=hook)
    assert code == exit_code, f"exit code {code}:\n{output}"
    assert "Traceback" not in output and "Warning" not in output, output
    return output


def refused(source, data_dir, message, forms=FORMS, hook=None) -> None:
    """Assert that it says in one line what is wrong, and leaves nothing."""
    before = contents(data_dir.parent)
    for flags in forms:
        output = run(source, data_dir, *flags, exit_code=1, hook=hook)
        lines = output.splitlines()
        (error,) = [line for line in lines if not line.startswith(f"{HOST}: ")]
        assert re.match(f"prepare_data.py: error: .*{message}", error), output
        assert contents(data_dir.parent) == before, flags


def contents(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def at(path: str, do, number: int = 1, events=("open",)):
    """Return a hook that calls `do` at the event of that number about such a path."""
    seen = itertools.count(1)

    def hook(event: str, arguments: tuple) -> None:
        if event in events and path in str(arguments[0]) and next(seen) == number:
            do()

    return hook


def end_by(number: int):
    return lambda: os.kill(os.getpid(), number)


def check(drawn, data_dir, same_bytes=True) -> None:
    """Assert that the staged data are those drawn, in the order of class and name."""
    classes = sorted({class_name for class_name, _ in drawn.train})
    for split, files in (("train", drawn.train), ("val", drawn.valid)):
        images = Images(data_dir, split)
        assert images.classes == classes
        assert len(images) == len(files)
        for i, ((class_name, name), content) in enumerate(sorted(files.items())):
            assert images.labels[i] == classes.index(class_name)
            assert images.name(i).endswith(f"{split}/{class_name}/{name}")
            if same_bytes:
                assert images.read_bytes(i).numpy().tobytes() == content, name


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory):
    return draw_imagenet(tmp_path_factory.mktemp("imagenet") / "archives")


@pytest.fixture
def damaged(imagenet, tmp_path) -> Path:
    """A copy of the archives, to be damaged."""
    return shutil.copytree(imagenet.source, tmp_path / "damaged")


@pytest.fixture
def data_dir(tmp_path) -> Path:
    """A folder to be made, in another one."""
    return tmp_path / "node's disk" / "data"


# What is staged.

LAYOUTS = {
    "imagenet": draw_imagenet,
    "tiny": draw_tiny_imagenet,
    "zip": lambda folder: draw_folders(folder / "mine.zip"),
    "tar": lambda folder: draw_folders(folder / "mine.tar"),
    "one split": lambda folder: draw_folders(folder / "whole.tar", split=False),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_in_every_form(layout, tmp_path):
    drawn = LAYOUTS[layout](tmp_path / "source")
    count = len(drawn.train) + len(drawn.valid)

    def stage(form: str, *flags, source=drawn.source) -> Path:
        folder = tmp_path / form
        output = run(source, folder, *flags)
        line = rf"^{HOST}: staged {count} images in {folder} after \d+\.\d s$"
        assert re.search(line, output, re.MULTILINE), output
        line = f"{HOST}: whole.tar has no train and val folders: every tenth image of"
        assert (line in output) == (source.name == "whole.tar"), output
        again = run(source, folder, *flags)
        assert again == f"{HOST}: {folder} is staged already\n"
        assert folder.stat().st_mode & 0o777 == 0o700
        return folder

    copied = stage("copied")
    check(drawn, copied)
    for archive in (tmp_path / "source").iterdir():
        assert (copied / archive.name).read_bytes() == archive.read_bytes()
    # The tree is the usual one, and is read without the index, too.
    extracted = stage("extracted", "--extract")
    check(drawn, extracted)
    (extracted / "index.json").unlink()
    check(drawn, extracted)
    # What is small enough is neither enlarged nor compressed a second time.
    check(drawn, stage("kept", "--resize=300"))
    # What was resized is staged as any archive is.
    resized = stage("resized", "--resize=32")
    check(drawn, resized, same_bytes=False)
    smaller = stage("smaller", "--resize=32", "--extract")
    again = stage("again", source=resized / "images.zip")
    for split in ("train", "val"):
        before, after = Images(copied, split), Images(resized, split)
        assert before.fingerprint == Images(extracted, split).fingerprint
        assert before.fingerprint != after.fingerprint
        for folder in (smaller, again):
            assert after.fingerprint == Images(folder, split).fingerprint
        for i in range(len(before)):
            was, now = before.read(i), after.read(i)
            assert min(now.shape[1:]) == 32 < min(was.shape[1:])
            assert abs(now.float().mean() - was.float().mean()) < 3


def test_in_dataloader_workers(imagenet, data_dir):
    """They read from the same file at the same time. Some images are CMYK or PNG."""
    run(imagenet.source, data_dir)
    images = Images(data_dir, "train")
    loader = torch.utils.data.DataLoader(
        range(len(images)),
        batch_size=None,
        collate_fn=images.read,
        num_workers=2,
        multiprocessing_context="fork",
    )
    files = sorted(imagenet.train.items())
    for (name, content), shown in zip(files, loader, strict=True):
        meant = np.array(Image.open(io.BytesIO(content)).convert("RGB"))
        difference = shown.permute(1, 2, 0).numpy() - meant.astype(float)
        assert abs(difference).mean() < 3, name


# Again, killed, at once.


def test_another_form_or_source(imagenet, damaged, data_dir):
    run(imagenet.source, data_dir)
    message = f"{data_dir} on {HOST}: it has something else in it"
    refused(imagenet.source, data_dir, message, FORMS[1:])
    os.utime(damaged / TRAIN)  # another file of the same size
    refused(damaged, data_dir, message)
    check(imagenet, data_dir)


def test_what_others_have_put_there(imagenet, data_dir):
    """Also while it stages, and only an empty folder is taken."""
    message = f"{data_dir} on {HOST}: it has something else in it"
    mine = data_dir / "mine"
    data_dir.mkdir(parents=True)
    mine.touch()
    refused(imagenet.source, data_dir, message)
    mine.unlink()
    hook = at("index.json", mine.touch)
    output = run(imagenet.source, data_dir, hook=hook, exit_code=1)
    assert message in output, output
    assert contents(data_dir.parent) == {"data", "data/mine"}


@pytest.mark.parametrize("flags", FORMS)
def test_killed_at_any_moment(tmp_path, data_dir, flags):
    """SIGKILL before the first change to the disk, the second, ... and the last."""
    drawn = draw_imagenet(tmp_path / "few", classes=2, train=2, valid=1)
    changes = ("open", "os.mkdir", "os.rename")
    for moment in itertools.count(1):
        hook = at(str(data_dir.parent), end_by(signal.SIGKILL), moment, changes)
        code, output = call(drawn.source, data_dir, *flags, hook=hook)
        if code == 0:
            break
        assert code == -signal.SIGKILL, output
        assert not data_dir.exists()
    assert moment > 5
    check(drawn, data_dir, same_bytes=False)
    assert list(data_dir.parent.iterdir()) == [data_dir]


def test_interrupted(imagenet, data_dir):
    """Ctrl-C while threads work and the main thread waits for them."""
    hook = at(".JPEG", end_by(signal.SIGINT))
    refused(imagenet.source, data_dir, "interrupted", [("--extract",)], hook)


def test_two_at_once(imagenet, data_dir):
    """Nodes may share a disk. The first to be whole stays, and the other takes it.

    The other one runs as a command: what it prints has no warning, either.
    """
    beside = Path(f"{data_dir}.unfinished-{HOST}2.{2**30}")  # of another node
    beside.mkdir(parents=True)

    def stage_it() -> None:
        subprocess.run([sys.executable, *command(*arguments)], check=True)

    arguments = (imagenet.source, data_dir, "--resize=32")
    run(*arguments, hook=at("train.npy", stage_it))
    assert set(data_dir.parent.iterdir()) == {data_dir, beside}
    check(imagenet, data_dir, same_bytes=False)


# What is refused.


def test_nothing_there(damaged, tmp_path, data_dir):
    """No folder, or nothing staged: see test_missing_data."""
    empty, compressed = tmp_path / "empty", tmp_path / "mine.tar.gz"
    empty.mkdir()
    refused(empty, data_dir, f"empty in .*: it has 0 archives, and no {TRAIN}")
    compressed.write_bytes(tar_bytes({"train/a/1.jpg": JPEG}, "w:gz"))
    refused(compressed, data_dir, "or compressed, at its start")
    for name in (VAL, TRAIN):
        (damaged / name).unlink()
        refused(damaged, data_dir, f"No such file or directory: '.*{name}'")
    # And main.py, where class folders are empty.
    (empty / "train" / "a").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"no images in .*train"):
        Images(empty, "train")


@pytest.mark.parametrize("name", [TRAIN, VAL, DEVKIT])
def test_cut_archive(damaged, data_dir, name):
    content = (damaged / name).read_bytes()
    middle = len(content) * 2 // 3
    for keep in (middle, middle // 512 * 512):
        (damaged / name).write_bytes(content[:keep])
        refused(damaged, data_dir, f"{name}.* is .*damaged")


def test_damaged_between_images(damaged, data_dir):
    """In a header, or cut when all images are there: there may have been more."""
    content = (damaged / VAL).read_bytes()
    end = len(content.rstrip(b"\0")) // 512 * 512 + 512
    flipped = content.replace(b"_00000005.JPEG", b"_00000004.JPEG")
    for bad, last in ((content[:end], 12), (content[: end + 512], 12), (flipped, 4)):
        (damaged / VAL).write_bytes(bad)
        message = f"{VAL}.* is cut, .*, after ILSVRC2012_val_{last:08}.JPEG"
        refused(damaged, data_dir, message)


def test_cut_while_it_is_copied(damaged, data_dir):
    archive = damaged / VAL
    hook = at(str(archive), lambda: os.truncate(archive, 5000))
    refused(damaged, data_dir, f"{VAL} has become shorter", [()], hook)


@pytest.mark.parametrize(
    "counts, name, message",
    [
        ({"train": 5}, TRAIN, f"{TRAIN} has 20 images, and {DEVKIT} says 24"),
        ({"train": 7}, TRAIN, f"{TRAIN} has 28 images, and {DEVKIT} says 24"),
        ({"valid": 2}, VAL, f"{VAL} has 8 images, and {DEVKIT} says 12"),
    ],
)
def test_archive_of_another_set(damaged, tmp_path, data_dir, counts, name, message):
    draw_imagenet(tmp_path / "another", **counts)
    shutil.copy(tmp_path / "another" / name, damaged)
    refused(damaged, data_dir, message)


def test_damaged_zip(tmp_path, data_dir):
    """It is cut, or bytes of it are missing, or wrong in an image that starts well."""
    path, name = tmp_path / "mine.zip", "train/a/1.jpg"
    files = {name: JPEG + 50 * bytes(range(256)), "val/a/1.jpg": JPEG}
    write_zip(path, files, zipfile.ZIP_DEFLATED)
    content = path.read_bytes()
    for kept in (content[: len(content) // 2], content[:100] + content[200:]):
        path.write_bytes(kept)
        refused(path, data_dir, "mine.zip is .*damaged")
    path.write_bytes(content.replace(content[200:260], b"\xff" * 60))
    refused(path, data_dir, f"mine.zip in .* is damaged at {name}", FORMS[1:])


@pytest.mark.parametrize(
    "name", ["../x.jpg", "/tmp/x.jpg", "train/a/../../../x.jpg", "train/a/\n.jpg"]
)
def test_names_that_lead_elsewhere(tmp_path, data_dir, name):
    files = {"train/a/1.jpg": JPEG, name: JPEG}
    (tmp_path / "mine.tar").write_bytes(tar_bytes(files))
    write_zip(tmp_path / "mine.zip", files)
    for archive in ("mine.tar", "mine.zip"):
        message = f"{archive}: a member's name, {re.escape(repr(name))}, leads"
        refused(tmp_path / archive, data_dir, message)


def test_links(tmp_path, data_dir):
    path = tmp_path / "mine.tar"
    member = tarfile.TarInfo("train/a/link.jpg")
    member.linkname = "/etc/passwd"
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
        member.type = kind
        with tarfile.open(path, "w") as tar:
            tar.addfile(member)
        refused(path, data_dir, "train/a/link.jpg is a link or a device")


@pytest.mark.parametrize(
    "files, message",
    [
        ({"train/a/1.jpg": JPEG}, "has no val images in class folders"),
        (
            # As Tiny ImageNet. The text file has nothing of this image.
            {
                "train/a/1.jpg": JPEG,
                "val/images/1.jpg": JPEG,
                "val/val_annotations.txt": b"2.jpg\ta\n",
            },
            "has val images of images, and none to train on",
        ),
        ({"1.txt": JPEG, "1.jpg": JPEG}, "has no .* images in class folders"),
        ({"train/a/1.jpg": b"GIF89a", "val/a/1.jpg": JPEG}, "a/1.jpg is no JPEG"),
    ],
)
def test_wrong_folders(tmp_path, data_dir, files, message):
    (tmp_path / "mine.tar").write_bytes(tar_bytes(files))
    refused(tmp_path / "mine.tar", data_dir, f"mine.tar.*{message}")


def test_two_images_of_one_name(tmp_path, data_dir):
    """In an extracted tree, the second would overwrite the first."""
    files = {f"{part}/cat/{i}.jpg": JPEG for part in "ab" for i in range(10)}
    (tmp_path / "mine.tar").write_bytes(tar_bytes(files))
    message = r"mine.tar.*File exists: .*/cat/\d.jpg"
    refused(tmp_path / "mine.tar", data_dir, message, forms=[["--extract"]])


# Disks.


def test_no_room(imagenet, tmp_path):
    """It is said before copying: the validation's archive is not even opened."""
    with mounted(tmp_path / "disk", "size=32k") as disk:
        message = f"{disk}/data on {HOST}: .*No space left on device"
        opened = at(VAL, end_by(signal.SIGKILL))
        refused(imagenet.source, disk / "data", message, [()], opened)


@pytest.mark.parametrize(
    "flags, name",
    [
        (FORMS[0], "train.npy"),  # when all archives have their room
        (FORMS[1], "n00000003_2.JPEG"),  # in the middle of images
        (FORMS[2], "images.zip"),
    ],
)
def test_full_disk(imagenet, tmp_path, flags, name):
    """Something else fills it after the start."""
    with mounted(tmp_path / "disk", "size=2m") as disk:

        def fill() -> None:
            with contextlib.suppress(OSError):
                (disk / "other").write_bytes(bytes(2**22))

        arguments = (imagenet.source, disk / "data", *flags)
        output = run(*arguments, exit_code=1, hook=at(name, fill))
        assert f"{disk}/data on {HOST}: [Errno 28] No space left" in output
        assert contents(disk) == {"other"}
        (disk / "other").unlink()
        run(*arguments)


def test_a_folder_that_cannot_be_made(imagenet, tmp_path):
    with mounted(tmp_path / "disk", "ro") as disk:
        message = f"cannot stage .* in {disk}/data on {HOST}: .*Read-only file system"
        refused(imagenet.source, disk / "data", message)


# An image that does not decode.


def test_damaged_image(imagenet, damaged, data_dir):
    """It is found by its first bytes, when it is resized, or when it is read."""
    name, archive = "n00000003_4.JPEG", damaged / TRAIN
    content, image = archive.read_bytes(), imagenet.train["n00000003", name]
    archive.write_bytes(content.replace(image, bytes(len(image))))
    refused(damaged, data_dir, f"{TRAIN}.*{name} is no JPEG")
    cut = image[:300].ljust(len(image), b"\0")
    archive.write_bytes(content.replace(image, cut))
    message = f"cannot decode image train/n00000003/{name}: "
    refused(damaged, data_dir, message, [("--resize=32",)])
    run(damaged, data_dir)
    images = Images(data_dir, "train")
    place = f"{data_dir}/{TRAIN}: train/n00000003/{name} on {HOST}: "
    with pytest.raises(BadImage, match=rf"^cannot decode image {place}.*\Z"):
        images.read(16)


# What ended jobs have left.


def test_what_ended_jobs_have_left(imagenet, data_dir, tmp_path, monkeypatch):
    """It stays if squeue does not know this job: the list is of another cluster.

    What else stays: see test_array in test_imagenet.py.
    """
    left = Path("/tmp/slurm-job-900000001")
    left.mkdir(exist_ok=True)
    squeue = tmp_path / "squeue"
    # It knows this job, and those of all other folders that are here.
    others = "ls /tmp | sed -n 's/^slurm-job-//p' | grep -vx 900000001; echo 900000000"
    squeue.write_text(f'#!/bin/sh\ncase "$*" in *--me*--all*) {others};; esac\n')
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "900000009")
    assert "removed" not in run(imagenet.source, data_dir)
    monkeypatch.setenv("SLURM_JOB_ID", "900000000")
    output = run(imagenet.source, data_dir)
    assert f"{HOST}: removed {left}, left by a job of yours" in output
    assert not left.exists()


# The stand-in.


def test_synthetic():
    """Another seed gives other images of the same classes, which can be learned."""
    train, val = Synthetic(60, 0, 40), Synthetic(30, 1, 40)
    colors, val_colors = (
        torch.stack([images.read(i).float().mean((1, 2)) for i in range(len(images))])
        for images in (train, val)
    )
    assert not torch.equal(colors[0], val_colors[0])
    nearest = torch.cdist(val_colors, colors).argmin(1)
    assert (train.labels[nearest] == val.labels).mean() > 0.9
