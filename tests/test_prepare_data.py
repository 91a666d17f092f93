"""imagenet/prepare_data.py: what it stages is whole; one line refuses all else."""

import contextlib
import io
import itertools
import logging
import multiprocessing
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import tempfile
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision.transforms.v2  # noqa: F401  # for the forked processes
from drawn_imagenet import draw_folders, draw_imagenet, encode, tar_bytes, write_zip
from PIL import Image
from test_checkpoint import REPOSITORY, mounted
from torchvision.io import decode_image

SCRIPT = REPOSITORY / "imagenet" / "prepare_data.py"
import data  # noqa: E402
import prepare_data  # noqa: E402
from archives import DEVKIT, NODE, TRAIN, VAL, StagingError  # noqa: E402
from data import Images, Synthetic, decode, list_tree  # noqa: E402

FORMS = [(), ("--resize=32",)]
JPEG = b"\xff\xd8\xff"
SUFFIXES = ("JPG", "jpeg", "png")
# An image of each class in each split.
FOUR = {f"{split}/{name}/1.jpg": JPEG for split in ("train", "val") for name in "ab"}
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
        logging.root.handlers.clear()  # pytest's
        if hook:
            sys.addaudithook(hook)
        prepare_data.main()

    with tempfile.TemporaryFile() as output:
        process = FORK.Process(target=call_main)
        process.start()
        process.join(300)
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
        (error,) = [line for line in lines if not line.startswith(f"{NODE}: ")]
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
    "zip": lambda folder: draw_folders(folder / "mine.zip"),
    "tar": lambda folder: draw_folders(folder / "mine.tar"),
    "one split": lambda folder: draw_folders(folder / "whole.tar", split=False),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_in_every_form(layout, tmp_path):
    drawn = LAYOUTS[layout](tmp_path / "source")
    count = len(drawn.train) + len(drawn.valid)

    def stage(form: str, *flags, source=drawn.source) -> Path:
        folder = tmp_path / "new" / form
        output = run(source, folder, *flags)
        line = rf"^{NODE}: staged {count} images in {folder} after \d+\.\d s$"
        assert re.search(line, output, re.MULTILINE), output
        line = f"{NODE}: whole.tar has no train and val: one image in ten is held out"
        assert (line in output) == (source.name == "whole.tar"), output
        again = run(source, folder, *flags)
        assert again == f"{NODE}: {folder} is staged already\n"
        for made in (folder, folder.parent):  # whatever the modes of the archives
            assert made.stat().st_mode & 0o777 == 0o700
        return folder

    copied = stage("copied")
    check(drawn, copied)
    for archive in (tmp_path / "source").iterdir():
        assert (copied / archive.name).read_bytes() == archive.read_bytes()
    # What is small enough is neither enlarged nor compressed a second time.
    check(drawn, stage("kept", "--resize=300"))
    # What was resized is staged as any archive is.
    resized = stage("resized", "--resize=32")
    check(drawn, resized, same_bytes=False)
    again = stage("again", source=resized / "images.zip")
    for split in ("train", "val"):
        before, after = Images(copied, split), Images(resized, split)
        # A run may go on with other pixels, as of an image that was repaired.
        for folder in (resized, again):
            assert before.fingerprint == Images(folder, split).fingerprint
        for i in range(len(before)):
            was, now = before.read(i), after.read(i)
            assert min(now.shape[1:]) == 32 < min(was.shape[1:])
            assert abs(now.float().mean() - was.float().mean()) < 3


def test_a_tree_of_classes(tmp_path, data_dir):
    """Without train/ and val/, the same images are held out as of an archive."""
    files = {f"{name}/{i}.JPG": JPEG + b"%d" % i for name in "ab" for i in range(21)}
    others = dict.fromkeys(["a/@eaDir/1.jpg", "#recycle/a/1.jpg", "a/x.tif"], b"")
    (tmp_path / "mine.tar").write_bytes(tar_bytes(files | others))
    assert "mine.tar: left out: 2 hidden, 1 .tif" in run(
        tmp_path / "mine.tar", data_dir
    )
    tree = tmp_path / "tree"
    with tarfile.open(tmp_path / "mine.tar") as tar:
        tar.extractall(tree, filter="data")
    (tree / "lost+found").mkdir(mode=0)  # of root
    for split, count in (("train", 36), ("val", 6)):
        images, staged = Images(tree, split), Images(data_dir, split)
        assert len(images) == count and images.fingerprint == staged.fingerprint
    assert images.name(0) == f"{tree}/a/0.JPG"
    # Of a tree, a node makes an index, which all its ranks use.
    index = data_dir.with_name("index")
    run(tree, index)
    assert contents(index) == {"index.json", "train.npy", "val.npy"}
    indexed = Images(index, "val")
    assert indexed.fingerprint == images.fingerprint
    assert torch.equal(indexed.read_bytes(1), images.read_bytes(1))
    assert run(tree, index).endswith(f"{index} is staged already\n")
    (tree / "b" / "99.jpg").write_bytes(JPEG)
    assert "it has something else in it" in run(tree, index, exit_code=1)


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


def test_val_in_class_folders(imagenet, damaged, data_dir):
    """As scripts sort ImageNet's val images, here even wrongly: a number is a label."""
    names = sorted(name for _, name in imagenet.valid)
    content = {name: data for (_, name), data in imagenet.valid.items()}
    files = {
        f"./n{len(names) - i}/{name}": content[name] for i, name in enumerate(names)
    }
    (damaged / VAL).write_bytes(tar_bytes(files | {"./._1.JPEG": b""}))
    assert f"{VAL}: left out: 1 hidden" in run(damaged, data_dir)
    check(imagenet, data_dir)


def test_what_is_left_out(tmp_path, data_dir):
    """It is counted. A folder of macOS, suffixes of Windows, names of both."""
    webp = encode(Image.new("RGB", (40, 40)), "WEBP")
    kept = FOUR | {
        f"{split}/a/1.{end}": JPEG for split in ("train", "val") for end in SUFFIXES
    }
    kept["train/a/\u202f.webp"] = kept["val/a/1.JFIF"] = webp
    others = [
        "__MACOSX/train/a/._1.jpg",
        "test/1.jpg",
        "train/a/1.bmp",
        "train/.DS_Store",
    ]
    files = {name.replace("/", "\\"): data for name, data in kept.items()}
    write_zip(tmp_path / "mine.ZIP", files | dict.fromkeys(others, b""))
    output = run(tmp_path / "mine.ZIP", data_dir)
    assert "left out: 2 hidden, 1 .jpg, 1 .bmp" in output
    images = Images(data_dir, "train")
    assert len(images) == len(Images(data_dir, "val")) == 6
    assert images.read(4).shape == (3, 40, 40)


@pytest.mark.parametrize("encoding", ["utf-8", "cp932"])
def test_names_of_other_zips(tmp_path, data_dir, encoding):
    """Programs of macOS and Windows do not say how names are encoded.

    Half of some of these letters is a backslash. Dropbox has a name for the top, too.
    """
    names = ["\u8868\u793a", "\u8868\u9762", "\u30bd", "a"]
    kept = [f"{split}/{name}/1.jpg" for split in ("train", "val") for name in names]

    class Info(zipfile.ZipInfo):
        def _encodeFilenameFlags(self):
            return self.filename.encode(encoding), 0

    with zipfile.ZipFile(tmp_path / "mine.zip", "w") as archive:
        for name in ["/", *kept]:
            archive.writestr(Info(name), JPEG if name in kept else b"")
    run(tmp_path / "mine.zip", data_dir)
    classes = Images(data_dir, "train").classes
    assert len(classes) == 4
    assert encoding != "utf-8" or classes == sorted(names)


def test_more_files_than_a_zip_can_count(tmp_path, data_dir):
    """macOS writes what is left of 65536 into the field, and no other field."""
    path = tmp_path / "mine.zip"
    places = [f"{split}/{name}" for split in ("train", "val") for name in "ab"]
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(2**14 + 1):
            for place in places:
                archive.writestr(f"{place}/{number}.jpg", b"")
    content = path.read_bytes()
    end = content.index(b"PK\6\6")  # what other programs add
    size_and_start = (content[end + at : end + at + 4] for at in (40, 48))
    path.write_bytes(
        content[:end]
        + b"PK\5\6"
        + bytes(4)
        + 2 * b"\4\0"
        + b"".join(size_and_start)
        + bytes(2)
    )
    output = run(path, data_dir)
    assert f"staged {2**16 + 4} images" in output


# Again, killed, at once.


def test_something_else_is_there(imagenet, damaged, data_dir):
    """What others have put there, also while it stages; another form or source."""
    message = f"{data_dir} on {NODE}: it has something else in it"
    mine = data_dir / "mine"
    data_dir.mkdir(parents=True)
    for name in ("mine", "index.json"):
        (data_dir / name).write_text("[]")
        refused(imagenet.source, data_dir, message)
        (data_dir / name).unlink()
    hook = at("index.json", mine.touch, number=2)  # when it is written
    output = run(imagenet.source, data_dir, hook=hook, exit_code=1)
    assert f"{data_dir} on {NODE}: [Errno 39] Directory not empty" in output, output
    assert contents(data_dir.parent) == {"data", "data/mine"}
    # Only an empty folder is taken.
    mine.unlink()
    run(imagenet.source, data_dir)
    refused(imagenet.source, data_dir, message, FORMS[1:])
    os.utime(damaged / TRAIN)  # another file of the same size
    refused(damaged, data_dir, message)
    check(imagenet, data_dir)


def test_left_by_an_earlier_start(imagenet, damaged, tmp_path, monkeypatch):
    """Slurm ended the job while it removed its data, or you have touched an archive."""
    folder = tmp_path / "slurm-job-7-cluster"
    monkeypatch.setenv("LOCAL_JOB_DIR", str(folder))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_CLUSTER_NAME", raising=False)
    run(imagenet.source, folder / "data")
    (folder / "data" / "index.json").unlink()
    (folder / "data" / VAL).unlink()
    run(imagenet.source, folder / "data")
    os.utime(damaged / TRAIN)
    assert "staged" in run(damaged, folder / "data")
    check(imagenet, folder / "data")


@pytest.mark.parametrize("who", ["stranger", "link", "open"])
@pytest.mark.parametrize("which", ["slurm-job-7-x.x", "slurm-job-7-x.x/data"])
def test_a_stranger_was_first(imagenet, tmp_path, monkeypatch, who, which):
    """In a folder where all can write, as /tmp, whose names they can foresee."""
    staged = tmp_path / "theirs" / which
    monkeypatch.setenv("LOCAL_JOB_DIR", str(tmp_path / "theirs" / which.split("/")[0]))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    run(imagenet.source, staged if which.endswith("data") else staged / "data")
    disk = tmp_path / "disk"
    disk.mkdir()
    place = disk / which
    place.parent.mkdir(exist_ok=True)
    monkeypatch.setenv("LOCAL_JOB_DIR", str(disk / which.split("/")[0]))
    place.parent.chmod(0o1777)
    if who == "link":
        place.symlink_to(staged)
    else:
        shutil.copytree(staged, place)
        place.chmod(0o755 if who == "open" else 0o700)
        os.chown(place, 65534 if who == "stranger" else 0, -1)
    data_dir = place if which.endswith("data") else place / "data"
    if who == "open" and place == data_dir:
        assert "is staged already" in run(imagenet.source, data_dir)
        return  # Its own folder keeps others out.
    message = f"{place} is a link, another user's, or open to others: remove it"
    refused(imagenet.source, data_dir, message)


@pytest.mark.parametrize("flags", FORMS)
def test_killed_at_any_moment(tmp_path, data_dir, flags):
    """SIGKILL before the first change to the disk, the second, ... and the last.

    What it has written by then, job.sh removes.
    """
    drawn = draw_imagenet(tmp_path / "few", classes=2, train=1, valid=1)
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
    others = {path.name.partition(".")[2] for path in data_dir.parent.iterdir()} - {""}
    assert all(name.startswith("unfinished-") for name in others)


def test_ended_by_slurm(imagenet, data_dir):
    """TERM leaves time to remove what is not whole."""

    def end() -> None:
        # resume.py blocks it in what a test forks.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.kill(os.getpid(), signal.SIGTERM)

    code, output = call(imagenet.source, data_dir, hook=at("train.npy", end))
    assert (code, output) == (1, "prepare_data.py: ended by Slurm\n")
    assert not list(data_dir.parent.iterdir())


def test_two_at_once(imagenet, data_dir):
    """Nodes may share a disk. The first to be whole stays, and the other takes it.

    The other one runs as a command: what it prints has no warning, either.
    """
    beside = Path(f"{data_dir}.unfinished-{NODE}2.{2**30}")  # of another node
    beside.mkdir(parents=True)

    def stage_it() -> None:
        subprocess.run([sys.executable, *command(*arguments)], check=True)

    arguments = (imagenet.source, data_dir, "--resize=32")
    run(*arguments, hook=at("train.npy", stage_it))
    assert set(data_dir.parent.iterdir()) == {data_dir, beside}
    check(imagenet, data_dir, same_bytes=False)


@pytest.mark.parametrize("lost", ["removed", "cut", "moved"])
def test_staged_data_that_has_changed(tmp_path, data_dir, lost):
    """A cleaner has removed something, or the tree is another one: it is noticed."""
    source = tmp_path / "mine.tar"
    source.write_bytes(tar_bytes(FOUR))
    if lost == "moved":
        with tarfile.open(source) as tar:
            tar.extractall(tmp_path / "tree", filter="data")
        source = tmp_path / "tree"
    run(source, data_dir)
    if lost == "removed":
        (data_dir / "mine.tar").unlink()
    elif lost == "cut":
        os.truncate(data_dir / "mine.tar", 10)
    else:
        source = source.rename(tmp_path / "moved")
    refused(source, data_dir, "it has something else in it", FORMS[:1])


def test_a_data_folder_that_is_a_link(tmp_path, data_dir):
    (tmp_path / "mine.tar").write_bytes(tar_bytes(FOUR))
    (tmp_path / "large").mkdir()
    data_dir.parent.mkdir()
    data_dir.symlink_to(tmp_path / "large")
    run(tmp_path / "mine.tar", data_dir)
    assert len(Images(data_dir, "train")) == 2
    assert list(data_dir.parent.iterdir()) == [data_dir]


def test_what_lies_beside_the_classes(tmp_path, data_dir):
    """Of tar -C folder ., all names begin with ./"""
    files = {f"./{c}/{i}.jpg": JPEG for c in "ab" for i in range(2)}
    (tmp_path / "mine.tar").write_bytes(tar_bytes({"./cover.jpg": JPEG} | files))
    assert "mine.tar: left out: 1 .jpg\n" in run(tmp_path / "mine.tar", data_dir)
    assert len(Images(data_dir, "train")) == len(Images(data_dir, "val")) == 2


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_an_image_that_was_mended_by_appending(tmp_path, data_dir, kind):
    """Of several members of one name, the last one counts, as for tar itself."""
    source = tmp_path / f"mine.{kind}"
    if kind == "zip":
        write_zip(source, FOUR)
        with zipfile.ZipFile(source, "a") as archive, pytest.warns(match="Duplicate"):
            archive.writestr("train/a/1.jpg", b"good")
    else:
        source.write_bytes(tar_bytes(FOUR))
        with tarfile.open(source, "a") as tar:
            member = tarfile.TarInfo("train/a/1.jpg")
            member.size = 4
            tar.addfile(member, io.BytesIO(b"good"))
    run(source, data_dir)
    images = Images(data_dir, "train")
    assert len(images) == 2 and bytes(images.read_bytes(0).numpy()) == b"good"


def test_a_tree_beside_the_development_kit(tmp_path, data_dir):
    """torchvision leaves it there. The archives may have been removed."""
    with tarfile.open(fileobj=io.BytesIO(tar_bytes(FOUR))) as tar:
        tar.extractall(tmp_path / "tree", filter="data")
    (tmp_path / "tree" / DEVKIT).touch()
    run(tmp_path / "tree", data_dir)
    assert len(Images(data_dir, "train")) == 2


# What is refused.


def test_nothing_there(damaged, tmp_path, data_dir):
    """No folder, or nothing staged: see test_missing_data."""
    empty, compressed = tmp_path / "empty", tmp_path / "mine.tar.gz"
    empty.mkdir()
    refused(empty, data_dir, f"No such file or directory: .*{TRAIN}")
    compressed.write_bytes(tar_bytes({"train/a/1.jpg": JPEG}, "w:gz"))
    refused(compressed, data_dir, "compressed, or several in one")
    for name in (VAL, TRAIN):
        (damaged / name).unlink()
        refused(damaged, data_dir, f"No such file or directory: '.*{name}'")
    # And main.py, where class folders are empty.
    for split in ("train", "val"):
        (empty / split / "a").mkdir(parents=True)
    with pytest.raises(StagingError, match=f"{empty} has its images in .*put train/"):
        Images(empty, "train")


@pytest.mark.parametrize("name", [TRAIN, VAL, DEVKIT])
def test_cut_archive(damaged, data_dir, name):
    content = (damaged / name).read_bytes()
    middle = len(content) * 2 // 3
    for keep in (middle, middle // 512 * 512):
        (damaged / name).write_bytes(content[:keep])
        refused(damaged, data_dir, f"{name}.* is .*damaged")


def test_damaged_between_images(damaged, data_dir):
    """In a header, or cut when all images are there: there may have been more.

    Or bytes of the last one are lost: tars are made of blocks of 512.
    """
    content = (damaged / VAL).read_bytes()
    end = len(content.rstrip(b"\0")) // 512 * 512 + 512
    flipped = content.replace(b"_00000005.JPEG", b"_00000004.JPEG")
    lost = content[: end - 600] + content[end - 500 :]
    at_end = [content[:end], content[: end + 512], lost]
    for bad, count in [(flipped, 4), *((bad, 12) for bad in at_end)]:
        (damaged / VAL).write_bytes(bad)
        message = f"{VAL}.* is cut, .*no end after {count} files"
        refused(damaged, data_dir, message)


def test_missing_class(damaged, tmp_path, data_dir):
    draw_imagenet(tmp_path / "fewer", classes=3)
    shutil.copy(tmp_path / "fewer" / TRAIN, damaged)
    refused(damaged, data_dir, "ImageNet has no train images of n00000004")


@pytest.mark.parametrize("name", ["\n.jpg", "\x1b]0;.jpg", "\x9b.jpg", "\u202egpj.jpg"])
def test_names_that_would_change_a_terminal(tmp_path, data_dir, name):
    files = FOUR | {f"train/a/{name}": JPEG}
    (tmp_path / "mine.tar").write_bytes(tar_bytes(files))
    write_zip(tmp_path / "mine.zip", files)
    for archive in ("mine.tar", "mine.zip"):
        message = f"{archive}: {re.escape(repr(f'train/a/{name}'))} is not printable"
        refused(tmp_path / archive, data_dir, message)


@pytest.mark.parametrize("at, value", [(2, 9), (2, 12), (0, 1)])
def test_other_zips(tmp_path, data_dir, at, value):
    """Deflate64, bzip2, or with a password: so say two headers of each file."""
    path = tmp_path / "mine.zip"
    write_zip(path, FOUR)
    content = bytearray(path.read_bytes())
    for found in re.finditer(rb"(?s)PK\x03\x04..|PK\x01\x02....", bytes(content)):
        content[found.end() + at] |= value
    path.write_bytes(content)
    message = "mine.zip: 'train/a/1.jpg' is encrypted, a link, compressed by another"
    refused(path, data_dir, message)


@pytest.mark.parametrize("options", [[], ["--format=posix", "--sparse-version=1.0"]])
def test_sparse_tar(tmp_path, data_dir, options):
    image = tmp_path / "train" / "a" / "1.jpg"
    image.parent.mkdir(parents=True)
    image.write_bytes(JPEG)
    os.truncate(image, 2**20)
    command = ["tar", "-S", *options, "-cf", "mine.tar", "train"]
    subprocess.run(command, cwd=tmp_path, check=True)
    message = "mine.tar: 'train/a/1.jpg' is a link, a device or sparse"
    refused(tmp_path / "mine.tar", data_dir, message)


def test_links(tmp_path, data_dir):
    path = tmp_path / "mine.tar"
    member = tarfile.TarInfo("train/a/link.jpg")
    member.linkname = "/etc/passwd"
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
        member.type = kind
        with tarfile.open(path, "w") as tar:
            tar.addfile(member)
        refused(path, data_dir, "link.jpg' is a link, a device or sparse")
    info = zipfile.ZipInfo("train/a/link.jpg")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16  # by zip -y
    with zipfile.ZipFile(tmp_path / "mine.zip", "w") as archive:
        archive.writestr(info, "/etc/passwd")
    refused(
        tmp_path / "mine.zip", data_dir, "link.jpg' is encrypted, a link, .* a .tar"
    )


def test_a_few_bytes_that_become_gigabytes(tmp_path, data_dir):
    """A zip that says so is refused. One that lies inflates no further than it says."""
    path = tmp_path / "mine.zip"
    large = FOUR | {"train/a/2.jpg": JPEG + bytes(2**28)}
    write_zip(path, large, zipfile.ZIP_DEFLATED)
    refused(path, data_dir, "'train/a/2.jpg' is encrypted, .* of more than 256 MB")
    size = len(large["train/a/2.jpg"]).to_bytes(4, "little")
    path.write_bytes(path.read_bytes().replace(size, (1000).to_bytes(4, "little")))
    run(path, data_dir)
    images = Images(data_dir, "train")
    tracemalloc.start()
    with pytest.raises(StagingError, match=r"cannot decode image .*train/a/2\.jpg on "):
        images.read(1)
    assert tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.stop()


def test_thin_images():
    """Their crops for a validation would have a thousand times the pixels."""
    with pytest.raises(ValueError, match="3000 x 2 pixels are too thin"):
        decode(data.as_tensor(encode(Image.new("L", (3000, 2)), "PNG")))


def test_more_pixels_than_allowed(tmp_path, data_dir):
    """Their number is in the header of a file of 2 kB. It is read first."""
    small = encode(Image.new("RGB", (40, 40)), "JPEG")
    jpeg = bytearray(small)
    at = jpeg.index(b"\xff\xc0") + 5
    jpeg[at : at + 4] = 2 * (65500).to_bytes(2)
    files = FOUR | {"train/a/2.jpg": bytes(jpeg)}
    (tmp_path / "mine.tar").write_bytes(tar_bytes(files))
    run(tmp_path / "mine.tar", data_dir)
    where = f"cannot decode image .*mine.tar: train/a/2.jpg on {NODE}: 65500 x 65500"
    with pytest.raises(StagingError, match=f"{where} .* --max-megapixels 200"):
        Images(data_dir, "train").read(1)
    other = data_dir.with_name("other")
    for split in ("train", "val"):
        for name in "ab":
            files[f"{split}/{name}/1.jpg"] = small
    (tmp_path / "mine.tar").write_bytes(tar_bytes(files))
    refused(tmp_path / "mine.tar", other, where, FORMS[1:])


def test_normal_forms(tmp_path, data_dir):
    """\u00e9 is one character, or two on a Mac, and one class: in a tree and a tar."""
    linux, mac = ("caf\u00e9", "cafe\u0301")
    split = [f"train/{linux}/1.jpg", f"val/{mac}/1.jpg", "train/b/1.jpg", "val/b/1.jpg"]
    whole = [f"{name}/{i}.jpg" for name in (linux, mac, "b") for i in range(12)]
    for kind, names in (("split", split), ("whole", whole)):
        files = dict.fromkeys(names, JPEG)
        (tmp_path / f"{kind}.tar").write_bytes(tar_bytes(files))
        run(tmp_path / f"{kind}.tar", data_dir / kind)
        with tarfile.open(tmp_path / f"{kind}.tar") as tar:
            tar.extractall(tmp_path / kind, filter="data")
        for folder in (data_dir / kind, tmp_path / kind):
            for split in ("train", "val"):
                images = Images(folder, split)
                assert images.classes == ["b", linux]
                for i in range(len(images)):
                    assert images.read_bytes(i).numpy().tobytes() == JPEG


def test_links_in_a_tree(tmp_path):
    """Folders of others may be linked, each of them once."""
    for name in FOUR:
        (tmp_path / "others" / name).parent.mkdir(parents=True)
        (tmp_path / "others" / name).write_bytes(JPEG)
    tree = tmp_path / "tree"
    (tree / "train").mkdir(parents=True)
    for name in "ab":
        (tree / "train" / name).symlink_to(tmp_path / "others" / "train" / name)
    (tree / "val").symlink_to(tmp_path / "others" / "val")
    assert len(Images(tree, "train")) == len(Images(tree, "val")) == 2
    list_tree.cache_clear()
    again = tmp_path / "others" / "train" / "b" / "again"  # by ln -s, called twice
    again.symlink_to(again.parent)
    with pytest.raises(
        StagingError, match=r"train/b/again is .*/b again: remove a link"
    ):
        Images(tree, "train")


@pytest.mark.parametrize(
    "files, message",
    [
        (
            {"train/a/1.jpg": JPEG, "train/b/1.jpg": JPEG, "val/b/1.jpg": JPEG},
            "has no val images of a",
        ),
        (
            {f"images/{number}.jpg": JPEG for number in range(20)},
            "has one class, images: put the images of each class in a folder",
        ),
        ({"1.txt": JPEG, "1.jpg": JPEG}, "has its images in no folder: put train/"),
        (
            {"x/Train/1.jpg": JPEG, "x/testing/1.jpg": JPEG},
            "testing, beside the classes, is called like a split",
        ),
        (
            {"seg_train/1.jpg": JPEG, "seg_test/1.jpg": JPEG},
            "seg_test, beside the classes, is called like a split",
        ),
        (
            {f"{part}ing/{c}/1.jpg": JPEG for part in ("Train", "Test") for c in "ab"},
            "has its images in .'Testing', 'Training'.: put train/CLASS/ and val/",
        ),
        *[
            (
                {f"x/{c}/1.jpg": JPEG for c in ("a", "b", name)},
                f"{name}, beside the classes, is called like a split: make train/",
            )
            for name in ("Testing", "Test Images", "seg_test", "valid", "validation")
        ],
        (
            {"a/1.jpg": JPEG, "b/c/1.jpg": JPEG},
            "has its images in .'', 'b'.: put train/CLASS/ and val/CLASS/, or",
        ),
        (
            {
                f"{part}/{name}/1.jpg": JPEG
                for part in ("train", "test")
                for name in "ab"
            },
            "has no val images of a: put .* into train/CLASS/ and val/CLASS/",
        ),
        (
            {"train/a/1.jpg": JPEG, "val/a/1.jpg": JPEG, "train/b/1.bmp": b""},
            "has no train images of b",
        ),
        (
            # Folds, or masks beside the images: some would be both trained on and not.
            {f"{part}/train/{c}/{part}.jpg": JPEG for part in ("x", "y") for c in "ab"},
            "has its images in .'x/', 'y/'.: put train/CLASS/ and val/CLASS/, or",
        ),
    ],
)
def test_wrong_folders(tmp_path, data_dir, files, message):
    (tmp_path / "mine.tar").write_bytes(tar_bytes(files))
    refused(tmp_path / "mine.tar", data_dir, f".*{message}")
    with tarfile.open(tmp_path / "mine.tar") as tar:
        tar.extractall(tmp_path / "tree", filter="data")
    # In a tree, its images may lie too deep, or val/ is missing.
    others = f"{tmp_path}/tree has (its images in|no val images of) "
    with pytest.raises((StagingError, OSError), match=f"{message}|{others}"):
        Images(tmp_path / "tree", "train")


@pytest.mark.parametrize(
    "classes",
    [
        ["Train", "invalid", "test tube", "test_pos"],
        ["valve_closed", "valve_open"],
        ["bus", "train"],
    ],
)
def test_classes_that_are_called_like_splits(tmp_path, data_dir, classes):
    """And Finder has given their folder an icon."""
    files = {f"x/{c}/{i}.jpg": JPEG for c in classes for i in range(2)}
    (tmp_path / "mine.tar").write_bytes(tar_bytes({"x/Icon\r": b""} | files))
    run(tmp_path / "mine.tar", data_dir)
    assert Images(data_dir, "train").classes == classes
    with tarfile.open(tmp_path / "mine.tar") as tar:
        tar.extractall(tmp_path, filter="data")
    tree = Images(tmp_path / "x", "train")
    assert tree.classes == classes
    assert tree.name(0) == f"{tmp_path}/x/{classes[0]}/1.jpg"


# Disks.


@pytest.mark.parametrize(
    "options, reason",
    [("size=32k", "No space left on device"), ("ro", "Read-only file system")],
)
def test_no_room(imagenet, tmp_path, options, reason):
    """It is said before copying: the validation's archive is not even opened."""
    with mounted(tmp_path / "disk", options) as disk:
        message = f"cannot stage .* in {disk}/data on {NODE}: .*{reason}"
        opened = at(VAL, end_by(signal.SIGKILL))
        refused(imagenet.source, disk / "data", message, [()], opened)


@pytest.mark.parametrize(
    "flags, name",
    [
        (FORMS[0], "train.npy"),  # when all archives have their room
        (FORMS[1], "images.zip"),
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
        assert f"{disk}/data on {NODE}: [Errno 28] No space left" in output
        assert contents(disk) == {"other"}
        (disk / "other").unlink()
        run(*arguments)


# An image that does not decode.


def test_damaged_image(imagenet, damaged, data_dir):
    """It is named when it is resized, or when it is read."""
    name, archive = "n00000003_4.JPEG", damaged / TRAIN
    content, image = archive.read_bytes(), imagenet.train["n00000003", name]
    cut = image[:300].ljust(len(image), b"\0")
    archive.write_bytes(content.replace(image, cut))
    message = f"cannot decode image .*{TRAIN}: train/n00000003/{name} on "
    refused(damaged, data_dir, message, FORMS[1:])
    run(damaged, data_dir)
    images = Images(data_dir, "train")
    place = f"{data_dir}/{TRAIN}: train/n00000003/{name} on {NODE}: "
    with pytest.raises(StagingError, match=rf"^cannot decode image {place}.*\Z"):
        images.read(16)


def test_no_warning_about_pngs(tmp_path, data_dir):
    """Of a palette with transparency, nor of more pixels than Pillow likes.

    It runs as a command: in a test's process, pytest takes all warnings.
    """
    colors = Image.effect_noise((40, 30), 60).convert("P")
    palette = encode(colors, "PNG", transparency=bytes(range(256)))
    files = {f"{split}/a/1.png": palette for split in ("train", "val")}
    files |= {name.replace("/a/", "/b/"): files[name] for name in files}
    large = Image.new("1", (13400, 13400))  # 0.5 GB as RGB
    files["train/b/2.png"] = encode(large, "PNG")
    write_zip(tmp_path / "mine.zip", files)
    source = tmp_path / "mine.zip"
    resize = [sys.executable, *command(source, data_dir, "--resize=16")]
    result = subprocess.run(resize, capture_output=True, text=True, check=True)
    assert result.stderr == ""
    assert Images(data_dir, "train").read(2).shape == (3, 16, 16)


def test_photographs_of_a_turned_camera():
    """A camera writes how it was held, and the pixels as if it had been upright."""
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    for kind in ("JPEG", "PNG", "WEBP"):
        image = Image.linear_gradient("L").resize((64, 32))
        pixels = decode(data.as_tensor(encode(image, kind, exif=exif)))
        assert pixels.shape == (3, 64, 32)
        assert pixels[0, 32, 0] > 200 > 50 > pixels[0, 32, -1]  # its top is right


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_animations(kind):
    """Their first image is read."""
    first, second = (Image.new("RGB", (40, 30), (0, green, 0)) for green in (200, 0))
    file = encode(first, kind, save_all=True, append_images=[second])
    pixels = decode(data.as_tensor(file))
    assert pixels.shape == (3, 30, 40) and pixels[1].float().mean() > 190


def test_kinds_of_png():
    """They are read as torchvision reads them, also those of 16 bits."""
    grey = Image.fromarray(np.arange(2**16, dtype=np.uint16).reshape(256, 256))
    others = [
        Image.effect_noise((40, 30), 60).convert(m) for m in ("1", "P", "LA", "L")
    ]
    for image in [grey, *others]:
        content = data.as_tensor(encode(image, "PNG"))
        meant = decode_image(content, "RGB")
        scale = 2 ** (8 * meant.element_size() - 8)
        assert torch.equal(decode(content), (meant.int() // scale).byte()), image.mode


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_images_are_laid_on_white(kind, mode):
    """Without their transparency, black drawings would be all black."""
    image = Image.new("RGBA", (40, 30), (0, 0, 0, 0))
    image.paste((0, 0, 0, 255), (0, 0, 20, 30))
    image = image.quantize(8) if mode == "P" else image.convert(mode)
    pixels = decode(data.as_tensor(encode(image, kind, lossless=True)))
    assert pixels[:, :, :20].max() == 0 and pixels[:, :, 20:].min() == 255


# What ended jobs have left.


def test_what_ended_jobs_have_left(imagenet, tmp_path, monkeypatch):
    """Slurm is asked only where there is such a folder of this user's.

    It stays if squeue does not know this job: the list is of another cluster.
    """
    names = ["1-this", "2-this.1", "3-this.Ab3", "4-other.1", "5-this.1", "6-this.1"]
    folders = {name[0]: tmp_path / f"slurm-job-{name}" for name in names}
    asked, squeue = tmp_path / "asked", tmp_path / "squeue"
    squeue.write_text(
        f'#!/bin/sh\ntouch {asked}\ncase "$*" in *--me*--all*) echo 5; echo 9;; esac\n'
    )
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "this")

    def stage(job: str) -> str:
        folder = tmp_path / f"slurm-job-{job}-this.x"
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.setenv("LOCAL_JOB_DIR", str(folder))
        output = run(imagenet.source, folder / "data")
        shutil.rmtree(folder)
        return output

    folders["4"].mkdir()
    folders["6"].mkdir()
    os.chown(folders["6"], 65534, -1)
    stage("9")
    assert not asked.exists()
    for folder in folders.values():
        folder.mkdir(exist_ok=True)
    assert "removed" not in stage("8")
    output = stage("9")
    for name in "123":
        assert f"removed {folders[name]}, which an ended job of yours left" in output
        assert not folders[name].exists()
    assert all(folders[name].exists() for name in "456")


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
