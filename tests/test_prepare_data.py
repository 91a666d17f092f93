"""imagenet/prepare_data.py: what it stages is whole; one line refuses all else."""

import contextlib
import io
import multiprocessing
import os
import re
import resource
import shutil
import signal
import socket
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
    pixels,
    tar_bytes,
    write_devkit,
    write_zip,
)
from PIL import Image

IMAGENET = Path(__file__).parent.parent / "imagenet"
SCRIPT = Path(os.environ.get("PREPARE_DATA", IMAGENET / "prepare_data.py"))
sys.path.insert(0, str(SCRIPT.parent))
import data  # noqa: E402
import prepare_data  # noqa: E402
from data import BadImage, Images, Synthetic  # noqa: E402

# pytest shows all warnings.
pytestmark = pytest.mark.filterwarnings("ignore:The image decoding and encoding")
HOST = socket.gethostname()
TRAIN, VAL, DEVKIT = (
    "ILSVRC2012_img_train.tar",
    "ILSVRC2012_img_val.tar",
    "ILSVRC2012_devkit_t12.tar.gz",
)
FORMS = [(), ("--extract",), ("--resize", "32")]
JPEG = b"\xff\xd8\xff"


# A forked process has what takes seconds to import. Threads would not survive the fork.
FORK = multiprocessing.get_context("fork")
torch.set_num_threads(1)


def command(source, data_dir, *flags) -> list[str]:
    flags = [f"--source={source}", f"--data-dir={data_dir}", *flags]
    return [sys.executable, str(SCRIPT), *flags]


def environment(**env) -> dict:
    outside = ("SLURM", "IMAGENET")
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(outside)
    } | env


def call_main(arguments: list[str], env: dict[str, str], output: int, hook) -> None:
    os.setpgid(0, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = (
        open(fd, "w", closefd=False, buffering=1) for fd in (1, 2)
    )
    os.environ.clear()
    os.environ.update(env)
    sys.argv = arguments
    if hook:
        sys.addaudithook(hook)
    prepare_data.main()


class Started:
    """The script's main(), in a process of its own.

    Before it opens, makes or renames a file, it calls `hook` with the event and its
    arguments: a test can do something at that very moment.
    """

    def __init__(self, *arguments, hook=None, **env):
        self.file = tempfile.TemporaryFile()
        arguments = command(*arguments)[1:]
        self.process = FORK.Process(
            target=call_main,
            args=(arguments, environment(**env), self.file.fileno(), hook),
        )
        self.process.start()

    def wait(self) -> str:
        self.process.join(60)
        output = os.pread(self.file.fileno(), 2**20, 0).decode()
        if self.process.exitcode is None:
            self.process.kill()  # or pytest would wait for it at its own end
            pytest.fail(f"still running after a minute: {output}")
        self.returncode = self.process.exitcode
        return output


def run(*arguments, exit_code=0, hook=None, **env) -> str:
    """Run the script; return its output, which may not have a traceback."""
    started = Started(*arguments, hook=hook, **env)
    output = started.wait()
    assert started.returncode == exit_code, output
    assert "Traceback" not in output and "Warning" not in output, output
    return output


def refused(source, data_dir, *flags, message, exit_code=1, **env) -> None:
    """Assert that it says in one line what is wrong, and leaves nothing."""
    before = contents(data_dir.parent)
    output = run(source, data_dir, *flags, exit_code=exit_code, **env)
    errors = [line for line in output.splitlines() if not line.startswith(f"{HOST}: ")]
    assert len(errors) == 1, output
    assert re.match(f"prepare_data.py: error: .*{message}", errors[0]), output
    assert contents(data_dir.parent) == before


def contents(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def at(event: str, name: str, do):
    """Return a hook that calls `do` once, at an event about a file of that name."""
    left = [do]

    def hook(happening: str, arguments: tuple) -> None:
        if left and happening == event and str(arguments[0]).endswith(name):
            left.pop()()

    return hook


def signal_itself(number: int):
    return lambda: os.kill(os.getpid(), number)


def decode(content: bytes) -> torch.Tensor:
    return data.decode(torch.frombuffer(bytearray(content), dtype=torch.uint8))


def check(drawn, data_dir, decoded=True) -> None:
    """Assert that the staged data are those drawn, in the order of class and name."""
    classes = sorted({class_name for class_name, _ in drawn.train})
    for split, files in (("train", drawn.train), ("val", drawn.valid)):
        wanted = sorted(files.items())
        images = Images(data_dir, split)
        assert images.classes == classes
        assert images.labels.tolist() == [
            classes.index(class_name) for (class_name, _), _ in wanted
        ]
        for i, ((class_name, name), content) in enumerate(wanted):
            assert images.name(i).endswith(f"{split}/{class_name}/{name}")
            if decoded:
                assert torch.equal(images.read(i), decode(content))


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory):
    return draw_imagenet(tmp_path_factory.mktemp("imagenet") / "archives")


@pytest.fixture
def damaged(imagenet, tmp_path) -> Path:
    """A copy of the archives, to be damaged."""
    return Path(shutil.copytree(imagenet.source, tmp_path / "damaged"))


@pytest.fixture
def data_dir(tmp_path) -> Path:
    """A folder to be made in one that is empty."""
    (tmp_path / "node's disk").mkdir()
    return tmp_path / "node's disk" / "data"


@contextlib.contextmanager
def mounted(folder: Path, options: str):
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def draw_any(layout: str, folder: Path):
    if layout == "imagenet":
        return draw_imagenet(folder)
    if layout == "tiny":
        return draw_tiny_imagenet(folder)
    return draw_folders(
        folder / layout.replace(" ", "."), deflated="deflated" in layout
    )


# What is staged.


@pytest.mark.parametrize(
    "layout", ["imagenet", "tiny", "stored zip", "deflated zip", "own tar"]
)
def test_every_layout_in_every_form(layout, tmp_path):
    drawn = draw_any(layout, tmp_path / "source")
    copied, extracted, resized = (tmp_path / name for name in ("c", "e", "r"))
    for folder, flags in zip((copied, extracted, resized), FORMS, strict=True):
        output = run(drawn.source, folder, *flags)
        line = rf"^{HOST}: staged {len(drawn.train) + len(drawn.valid)} images in "
        assert re.search(rf"{line}\S+ after \d+\.\d s$", output, re.MULTILINE), output
    check(drawn, copied)
    check(drawn, extracted)
    check(drawn, resized, decoded=False)
    for split in ("train", "val"):
        before, after = Images(copied, split), Images(resized, split)
        assert before.fingerprint == Images(extracted, split).fingerprint
        assert before.fingerprint != after.fingerprint
        for i in range(len(before)):
            was, now = before.read(i), after.read(i)
            assert min(now.shape[1:]) == 32 < min(was.shape[1:])
            longer = 32 * max(was.shape[1:]) / min(was.shape[1:])
            assert abs(max(now.shape[1:]) - longer) <= 1
            assert abs(now.float().mean() - was.float().mean()) < 3
    # The tree is the usual one, and is read without the index, too.
    for split, files in (("train", drawn.train), ("val", drawn.valid)):
        for (class_name, name), content in files.items():
            assert (extracted / split / class_name / name).read_bytes() == content
    (extracted / "index.json").unlink()
    check(drawn, extracted)
    assert Images(extracted, "val").fingerprint == Images(copied, "val").fingerprint
    # What was resized is staged as any archive is.
    for again, flags in ((tmp_path / "rc", ()), (tmp_path / "re", ("--extract",))):
        run(resized / "images.zip", again, *flags)
        once, twice = Images(resized, "train"), Images(again, "train")
        assert once.fingerprint == twice.fingerprint
        assert all(torch.equal(once.read(i), twice.read(i)) for i in range(len(once)))


def test_copies_are_the_archives(imagenet, data_dir):
    run(imagenet.source, data_dir)
    for name in (TRAIN, VAL, DEVKIT):
        assert (data_dir / name).read_bytes() == (imagenet.source / name).read_bytes()
    assert data_dir.stat().st_mode & 0o777 == 0o700
    assert {path.name for path in data_dir.parent.iterdir()} == {"data"}


def test_small_images_keep_their_bytes(imagenet, data_dir):
    """They are not enlarged, nor compressed a second time."""
    run(imagenet.source, data_dir, "--resize=300")
    check(imagenet, data_dir)
    run(imagenet.source, data_dir.parent / "copied")
    copied = Images(data_dir.parent / "copied", "train")
    assert copied.fingerprint == Images(data_dir, "train").fingerprint


def test_a_smaller_tree(imagenet, data_dir):
    run(imagenet.source, data_dir, "--resize=32", "--extract")
    check(imagenet, data_dir, decoded=False)
    assert min(Images(data_dir, "val").read(0).shape[1:]) == 32


@pytest.mark.parametrize("root", ["", "any/parent/"])
def test_every_tenth_is_held_out(tmp_path, data_dir, root):
    drawn = draw_folders(tmp_path / "whole.tar", split=False, root=root, train=20)
    output = run(drawn.source, data_dir)
    line = f"{HOST}: whole.tar has no train and val folders: every tenth image"
    assert line in output
    check(drawn, data_dir)


def test_long_names(tmp_path, data_dir):
    """GNU's and POSIX's ways to store names over 100 characters, and deep folders."""
    content = next(iter(draw_folders(tmp_path / "some.tar").train.values()))
    name = f"a class/{'deep/' * 30}{'é' * 60}"
    files = {f"./train/{name}{i}.jpg": content for i in range(3)}
    files |= {f"{'root' * 20}/val/a class/short{i}.jpg": content for i in range(2)}
    for archive, form in (
        ("gnu.tar", tarfile.GNU_FORMAT),
        ("posix.tar", tarfile.PAX_FORMAT),
    ):
        (tmp_path / archive).write_bytes(tar_bytes(files, format=form))
        run(tmp_path / archive, data_dir / archive)
        images = Images(data_dir / archive, "train")
        assert images.name(2) == f"{data_dir / archive / archive}: train/{name}2.jpg"
        assert torch.equal(images.read(2), decode(content))


def test_cmyk_and_png(imagenet, data_dir):
    run(imagenet.source, data_dir)
    images = Images(data_dir, "train")
    for i in (0, 6, 7):  # CMYK, PNG, and any other
        shown, meant = images.read(i), pixels(sorted(imagenet.train.items())[i][1])
        assert shown.dtype == torch.uint8 and shown.shape == meant.shape
        assert (shown.float() - meant.float()).abs().mean() < 3
    deep = io.BytesIO()
    Image.fromarray(np.full((4, 5), 0x80FF, dtype=np.uint16)).save(deep, "PNG")
    gray = torch.full((3, 4, 5), 0x80, dtype=torch.uint8)
    assert torch.equal(decode(deep.getvalue()), gray)


@pytest.mark.parametrize("module", ["data", "prepare_data"])
def test_decoding_is_quiet(imagenet, module):
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); "
        f"import {module}; from torchvision.io import decode_image; import torch; "
        f"content = bytearray({next(iter(imagenet.train.values()))!r}); "
        "decode_image(torch.frombuffer(content, dtype=torch.uint8)); "
        "import warnings; warnings.warn('mine', DeprecationWarning)"
    )
    result = subprocess.run(
        [sys.executable, "-Wdefault", "-c", code], capture_output=True, text=True
    )
    assert "TorchCodec" not in result.stderr and "mine" in result.stderr, result.stderr


def test_main_imports_nothing_of_the_staging():
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import main; "
        "print({'archives', 'prepare_data'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"


@pytest.mark.parametrize("flags", [(), ("--extract",)])
@pytest.mark.parametrize("indexed", [True, False])
def test_in_dataloader_workers(imagenet, data_dir, flags, indexed):
    """They read from the same file at the same time."""
    run(imagenet.source, data_dir, *flags)
    if not indexed and flags:
        (data_dir / "index.json").unlink()
    images = Images(data_dir, "train")
    loader = torch.utils.data.DataLoader(
        Decoded(images),
        batch_size=None,
        num_workers=2,
        multiprocessing_context="fork",
    )
    for i, image in enumerate(loader):
        assert torch.equal(image, images.read(i))


class Decoded(torch.utils.data.Dataset):
    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images.read(i)


# Again, killed, at once.


@pytest.mark.parametrize("flags", FORMS)
def test_done_already(imagenet, data_dir, flags):
    run(imagenet.source, data_dir, *flags)

    def stats() -> dict:
        found = {path: (data_dir / path).stat() for path in contents(data_dir)}
        return {path: (stat.st_mtime_ns, stat.st_ino) for path, stat in found.items()}

    before = stats()
    output = run(imagenet.source, data_dir, *flags)
    assert output == f"{HOST}: {data_dir} is staged already\n"
    assert stats() == before


def test_another_form_or_source(imagenet, damaged, data_dir):
    run(imagenet.source, data_dir)
    message = f"{data_dir} on {HOST}: it has something else in it"
    refused(imagenet.source, data_dir, "--extract", message=message)
    refused(imagenet.source, data_dir, "--resize=32", message=message)
    os.utime(damaged / TRAIN)  # another file of the same size
    refused(damaged, data_dir, message=message)
    check(imagenet, data_dir)


@pytest.mark.parametrize("flags", FORMS)
def test_what_others_have_put_there(imagenet, data_dir, flags):
    """Also while it stages, and only an empty folder is taken."""
    message = f"{data_dir} on {HOST}: it has something else in it"
    data_dir.mkdir()
    (data_dir / "mine").write_text("mine")
    refused(imagenet.source, data_dir, *flags, message=message)
    (data_dir / "mine").unlink()

    def put() -> None:
        (data_dir / "mine").write_text("mine")

    hook = at("open", "index.json", put)
    output = run(imagenet.source, data_dir, *flags, hook=hook, exit_code=1)
    assert re.search(message, output), output
    assert contents(data_dir.parent) == {"data", "data/mine"}
    (data_dir / "mine").unlink()
    run(imagenet.source, data_dir, *flags)
    check(imagenet, data_dir, decoded=False)


def test_through_a_link(imagenet, tmp_path, data_dir):
    (tmp_path / "elsewhere").mkdir()
    data_dir.symlink_to(tmp_path / "elsewhere")
    run(imagenet.source, data_dir)
    check(imagenet, tmp_path / "elsewhere", decoded=False)


def events_of(source, data_dir, flags) -> list[tuple[str, str]]:
    """Return what a staging does to files on the node's disk, but for its end."""
    seen = FORK.SimpleQueue()

    def note(event: str, arguments: tuple) -> None:
        if on_disk(event, arguments, data_dir):
            seen.put(event)

    run(source, data_dir, *flags, hook=note)
    events = []
    while not seen.empty():
        events.append(seen.get())
    shutil.rmtree(data_dir)
    return events


def on_disk(event: str, arguments: tuple, data_dir: Path) -> bool:
    changes = event in ("open", "os.mkdir", "os.rename", "os.truncate")
    return changes and str(data_dir.parent) in str(arguments[0])


@pytest.mark.parametrize("flags", FORMS)
def test_killed_at_any_moment(imagenet, data_dir, flags):
    """SIGKILL, before any change to the disk; then it is started again."""
    count = len(events_of(imagenet.source, data_dir, flags))
    moments = sorted({*range(0, count, max(1, count // 12)), *range(count - 4, count)})
    for moment in moments:
        before = []

        def kill_at_moment(event: str, arguments: tuple, moment=moment, before=before):
            if on_disk(event, arguments, data_dir):
                before.append(event)
                if len(before) > moment:
                    os.kill(os.getpid(), signal.SIGKILL)

        process = Started(imagenet.source, data_dir, *flags, hook=kill_at_moment)
        output = process.wait()
        assert process.returncode == -signal.SIGKILL, (moment, output)
        assert not data_dir.exists()
        output = run(imagenet.source, data_dir, *flags)
        assert "staged already" not in output
        check(imagenet, data_dir, decoded=False)
        assert {path.name for path in data_dir.parent.iterdir()} == {"data"}
        shutil.rmtree(data_dir)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_in_another_form(imagenet, data_dir, number):
    hook = at("open", "index.json", signal_itself(number))
    process = Started(imagenet.source, data_dir, "--extract", hook=hook)
    process.wait()
    assert process.returncode == -number
    (unfinished,) = data_dir.parent.iterdir()
    assert (unfinished / "train").is_dir()
    run(imagenet.source, data_dir)
    check(imagenet, data_dir)
    assert {path.name for path in data_dir.parent.iterdir()} == {"data"}


@pytest.mark.parametrize("flags", FORMS)
def test_interrupted(imagenet, data_dir, flags):
    """Ctrl-C while threads work and the main thread waits for them."""
    name = {"--extract": ".JPEG", "--resize": VAL}.get(flags[0] if flags else "", TRAIN)
    hook = at("open", name, signal_itself(signal.SIGINT))
    refused(
        imagenet.source,
        data_dir,
        *flags,
        hook=hook,
        message="interrupted",
    )


@pytest.mark.parametrize("same", [True, False])
def test_two_at_once(imagenet, damaged, data_dir, same):
    """The first to be whole stays. The other takes it, or says that it is another."""
    other = imagenet.source if same else damaged
    os.utime(damaged / TRAIN)

    def stage_another() -> None:
        subprocess.run(command(other, data_dir), check=True, env=environment())

    hook = at("open", "train.npy", stage_another)
    output = run(imagenet.source, data_dir, hook=hook, exit_code=0 if same else 1)
    assert same or f"{data_dir} on {HOST}: it has something else in it" in output
    assert {path.name for path in data_dir.parent.iterdir()} == {"data"}
    assert "staged already" in run(other, data_dir)
    check(imagenet, data_dir)


def test_what_another_node_is_staging(imagenet, data_dir):
    """Where they share a disk; there is no such process on this node."""
    other = Path(f"{data_dir}.unfinished-{HOST}2.{2**30}")
    killed = Path(f"{data_dir}.unfinished-{HOST}.{2**30}")
    for folder in (other, killed):
        (folder / "train").mkdir(parents=True)
    run(imagenet.source, data_dir)
    assert set(data_dir.parent.iterdir()) == {data_dir, other}


# What is refused.


def test_nothing_there(tmp_path, data_dir):
    message = f"cannot stage .* on {HOST}: .*No such file or directory: '.*/nowhere'"
    refused(tmp_path / "nowhere", data_dir, message=message)
    (tmp_path / "empty").mkdir()
    message = f"empty in .* on {HOST}: it has 0 archives, and no {TRAIN}"
    refused(tmp_path / "empty", data_dir, message=message)
    (tmp_path / "mine.tar.gz").write_bytes(tar_bytes({"train/a/1.jpg": JPEG}, "w:gz"))
    refused(tmp_path / "mine.tar.gz", data_dir, message="or compressed, at its start")
    message = r"^no data in .*: .* IMAGENET_DIR .* run prepare_data.py on every node"
    with pytest.raises(FileNotFoundError, match=message):
        Images(tmp_path / "empty", "train")


def test_a_tree_without_images(tmp_path):
    (tmp_path / "train" / "a").mkdir(parents=True)
    (tmp_path / "val").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no images in .*train"):
        Images(tmp_path, "train")


@pytest.mark.parametrize("name", [TRAIN, VAL, DEVKIT])
def test_missing_archive(damaged, data_dir, name):
    (damaged / name).unlink()
    refused(damaged, data_dir, message=f"No such file or directory: '.*{name}'")


@pytest.mark.parametrize("flags", FORMS)
@pytest.mark.parametrize("name", [TRAIN, VAL, DEVKIT])
def test_cut_archive(damaged, data_dir, name, flags):
    content = (damaged / name).read_bytes()
    message = f"{name}.* is cut, damaged or compressed, after "
    if name == DEVKIT:
        message = f"{name} is damaged: "
    for keep in (len(content) * 2 // 3, len(content) * 2 // 3 // 512 * 512):
        (damaged / name).write_bytes(content[:keep])
        refused(damaged, data_dir, *flags, message=message)


@pytest.mark.parametrize("ends_with", [b"", bytes(512)])
def test_cut_at_its_end(damaged, data_dir, ends_with):
    """All images are there, and nothing says that there were not more of them."""
    content = (damaged / VAL).read_bytes().rstrip(b"\0")
    (damaged / VAL).write_bytes(content + bytes(-len(content) % 512) + ends_with)
    refused(damaged, data_dir, message=f"{VAL} is cut.* after .*_00000012.JPEG")


def test_cut_while_it_is_copied(damaged, data_dir):
    archive = damaged / VAL
    hook = at("open", str(archive), lambda: os.truncate(archive, 5000))
    refused(damaged, data_dir, message=f"{VAL} has become shorter", hook=hook)


@pytest.mark.parametrize("flags", [(), ("--extract",)])
@pytest.mark.parametrize("byte", [0, 30, 130, 150, 156, 260])
@pytest.mark.parametrize("name", [TRAIN, VAL])
def test_flipped_bit_in_a_header(damaged, data_dir, name, byte, flags):
    content = bytearray((damaged / name).read_bytes())
    wanted, after = "ILSVRC2012_val_00000005.JPEG", "ILSVRC2012_val_00000004.JPEG"
    if name == TRAIN:
        wanted, after = "n00000003_2.JPEG", "n00000003_1.JPEG"
    content[content.index(wanted.encode()) + byte] ^= 1
    (damaged / name).write_bytes(content)
    refused(damaged, data_dir, *flags, message=f"{name}.* is cut, .*, after {after}")


def edit_tars(damaged: Path, edit) -> None:
    """Write the training archive anew, from what `edit` makes of its contents.

    Those are {name of class's tar: {name: bytes}}.
    """
    tars = {}
    with tarfile.open(damaged / TRAIN) as outer:
        for member in outer:
            with tarfile.open(fileobj=outer.extractfile(member)) as inner:
                tars[member.name] = {m.name: inner.extractfile(m).read() for m in inner}
    edit(tars)
    (damaged / TRAIN).write_bytes(
        tar_bytes({name: tar_bytes(files) for name, files in tars.items()})
    )


@pytest.mark.parametrize("flags", FORMS)
@pytest.mark.parametrize(
    "edit, message",
    [
        (
            lambda tars: tars.pop("n00000002.tar"),
            f"{TRAIN} has 18 images, and {DEVKIT} says 24",
        ),
        (
            lambda tars: tars.update({"n7.tar": {"n7_0.JPEG": JPEG}}),
            f"{TRAIN} has 25 images, and {DEVKIT} says 24",
        ),
        (
            lambda tars: tars["n00000002.tar"].popitem(),
            f"{TRAIN} has 23 images, and {DEVKIT} says 24",
        ),
        (
            lambda tars: tars["n00000003.tar"].update({"n00000003_1.JPEG": b"text"}),
            "n00000003_1.JPEG is no JPEG",
        ),
        (
            lambda tars: tars["n00000003.tar"].update({"n00000003_1.JPEG": b""}),
            "n00000003_1.JPEG is no JPEG",
        ),
    ],
)
def test_wrong_train_archive(damaged, data_dir, edit, message, flags):
    edit_tars(damaged, edit)
    refused(damaged, data_dir, *flags, message=message)


@pytest.mark.parametrize(
    "truth, message",
    [
        ("1\n" * 11, f"{VAL} has 12 images, and {DEVKIT} says 11"),
        ("1\n" * 11 + "7\n", rf"{DEVKIT} is damaged: KeyError\(7\)"),
    ],
)
@pytest.mark.parametrize("flags", FORMS)
def test_wrong_ground_truth(damaged, data_dir, truth, message, flags):
    write_devkit(damaged, {f"n0000000{i}": 6 for i in range(1, 5)}, [1, 2, 3, 4], truth)
    refused(damaged, data_dir, *flags, message=message)


def test_wrong_devkit(damaged, data_dir):
    (damaged / DEVKIT).write_bytes(
        tar_bytes({"ILSVRC2012_devkit_t12/data/readme.txt": b""}, "w:gz")
    )
    refused(damaged, data_dir, message=f"{DEVKIT} is damaged")


def edit_zip(path: Path, edit) -> None:
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    edit(files)
    write_zip(path, files)


@pytest.mark.parametrize("flags", FORMS)
@pytest.mark.parametrize(
    "edit",
    [
        lambda files: files.pop("tiny-imagenet-200/val/val_annotations.txt"),
        lambda files: files.update({"tiny-imagenet-200/val/images/new.JPEG": JPEG}),
    ],
)
def test_wrong_tiny_imagenet(tmp_path, data_dir, edit, flags):
    source = draw_tiny_imagenet(tmp_path / "tiny").source
    edit_zip(source / "tiny-imagenet-200.zip", edit)
    message = "tiny-imagenet-200.zip has val images of images, and none to train on"
    refused(source, data_dir, *flags, message=message)


@pytest.mark.parametrize("flags", [(), ("--extract",)])
def test_cut_zip(tmp_path, data_dir, flags):
    path = draw_folders(tmp_path / "mine.zip", deflated=True).source
    content = path.read_bytes()
    for kept in (content[: len(content) // 2], content[:100] + content[5000:]):
        path.write_bytes(kept)
        refused(path, data_dir, *flags, message="mine.zip is .*damaged")


@pytest.mark.parametrize("flags", [("--extract",), ("--resize", "32")])
def test_damaged_in_a_zip(tmp_path, data_dir, flags):
    """It starts well."""
    path, name = tmp_path / "mine.zip", "train/a/1.jpg"
    files = {name: JPEG + 50 * bytes(range(256)), "val/a/1.jpg": JPEG}
    write_zip(path, files, zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(name)
    end = 30 + len(info.filename) + len(info.extra) + info.compress_size
    content = bytearray(path.read_bytes())
    content[end - 60 : end] = b"\xff" * 60
    path.write_bytes(content)
    refused(path, data_dir, *flags, message=f"mine.zip in .* is damaged at {name}")


@pytest.mark.parametrize("flags", FORMS)
@pytest.mark.parametrize(
    "name", ["../x.jpg", "/tmp/x.jpg", "train/a/../../../x.jpg", "train/a/\n.jpg"]
)
@pytest.mark.parametrize("suffix", [".tar", ".zip"])
def test_names_that_lead_elsewhere(tmp_path, data_dir, suffix, name, flags):
    path = tmp_path / f"mine{suffix}"
    draw_folders(path)
    if suffix == ".zip":
        edit_zip(path, lambda files: files.update({name: JPEG}))
    else:
        path.write_bytes(tar_bytes({"train/a/1.jpg": JPEG, name: JPEG}))
    message = f"mine{suffix}: a member's name, {re.escape(repr(name))}, leads"
    refused(path, data_dir, *flags, message=message)


def test_names_that_lead_elsewhere_in_imagenet(damaged, data_dir):
    edit_tars(damaged, lambda tars: tars["n00000003.tar"].update({"../x.JPEG": JPEG}))
    message = f"{TRAIN}: n00000003.tar: a member's name, '../x.JPEG', leads"
    refused(damaged, data_dir, "--extract", message=message)


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE]
)
def test_links_and_devices(tmp_path, data_dir, kind):
    member = tarfile.TarInfo("train/a/link.jpg")
    member.type, member.linkname = kind, "/etc/passwd"
    with tarfile.open(tmp_path / "mine.tar", "w") as tar:
        tar.addfile(member)
    message = "train/a/link.jpg is a link or a device"
    refused(tmp_path / "mine.tar", data_dir, message=message)
    info = zipfile.ZipInfo("train/a/link.jpg")
    info.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "mine.zip", "w") as archive:
        archive.writestr(info, "/etc/passwd")
    message = "train/a/link.jpg is no JPEG and no PNG"  # it has a path in it
    refused(tmp_path / "mine.zip", data_dir, "--extract", message=message)


@pytest.mark.parametrize(
    "files, message",
    [
        ({"train/a/1.jpg": JPEG}, "has no val images in class folders"),
        ({"val/a/1.jpg": JPEG}, "has val images of a, and none to train on"),
        (
            {"train/a/1.jpg": JPEG, "val/b/1.jpg": JPEG},
            "has val images of b, and none to train on",
        ),
        ({"1.txt": JPEG}, "has no .* images in class folders"),
        ({"1.jpg": JPEG}, "has no .* images in class folders"),
        ({"a/1.jpg": JPEG, "b/2.jpg": JPEG}, "has no .* images in class folders"),
        ({"train/a/1.jpg": b"GIF89a", "val/a/1.jpg": JPEG}, "a/1.jpg is no JPEG"),
    ],
)
def test_wrong_folders(tmp_path, data_dir, files, message):
    (tmp_path / "mine.tar").write_bytes(tar_bytes(files))
    refused(tmp_path / "mine.tar", data_dir, message=f"mine.tar.*{message}")


# Disks.


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Enough images to fill a disk in the middle."""
    folder = tmp_path_factory.mktemp("large") / "archives"
    return draw_imagenet(folder, classes=40, train=40, resolution=40)


@pytest.mark.parametrize("flags", FORMS)
def test_no_room(large, tmp_path, flags):
    with mounted(tmp_path / "disk", "size=1m") as disk:
        message = f"{disk}/data on {HOST}: .*No space left on device"
        refused(large.source, disk / "data", *flags, message=message)


def test_no_room_is_said_before_copying(large, tmp_path):
    with mounted(tmp_path / "disk", "size=1m") as disk:
        read = at("open", VAL, signal_itself(signal.SIGKILL))
        message = "No space left on device"
        refused(large.source, disk / "data", message=message, hook=read)


@pytest.mark.parametrize("flags", FORMS)
def test_full_disk(large, tmp_path, flags):
    """Something else fills it after the start."""
    with mounted(tmp_path / "disk", "size=40m") as disk:
        data_dir = disk / "data"

        def fill() -> None:
            with contextlib.suppress(OSError):
                with open(disk / "other", "wb", buffering=0) as file:
                    while file.write(bytes(2**20)):
                        pass

        # When all archives have their room, and in the middle of images.
        name = "n00000020_7.JPEG" if "--extract" in flags else "train.npy"
        if "--resize" in flags:
            name = "images.zip"
        output = run(
            large.source, data_dir, *flags, exit_code=1, hook=at("open", name, fill)
        )
        assert f"{data_dir} on {HOST}: [Errno 28] No space left" in output
        assert contents(disk) == {"other"}
        (disk / "other").unlink()
        run(large.source, data_dir, *flags)


def test_read_only(imagenet, tmp_path):
    with mounted(tmp_path / "disk", "ro") as disk:
        message = f"{disk}/data on {HOST}: .*Read-only file system"
        refused(imagenet.source, disk / "data", message=message)


def test_file_size_limit(imagenet, data_dir):
    """An error in a thread that is none of the archive's."""
    result = subprocess.run(
        command(imagenet.source, data_dir, "--resize=32"),
        env=environment(),
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000)),
    )
    assert result.returncode == 1 and result.stderr.count("\n") == 1, result.stderr
    assert "File too large" in result.stderr
    assert not contents(data_dir.parent)


@pytest.mark.parametrize("name", ["link/data", "/proc/data", "file/data"])
def test_a_folder_that_cannot_be_made(imagenet, data_dir, name):
    (data_dir.parent / "file").touch()
    (data_dir.parent / "link").symlink_to(data_dir.parent / "file")
    output = run(imagenet.source, data_dir.parent / name, exit_code=1)
    assert output.startswith("prepare_data.py: error: cannot stage "), output


# An image that does not decode.


@pytest.fixture
def undecodable(damaged) -> Path:
    def edit(tars):
        files = tars["n00000003.tar"]
        files["n00000003_4.JPEG"] = files["n00000003_4.JPEG"][:300]

    edit_tars(damaged, edit)
    return damaged


@pytest.mark.parametrize("flags", [(), ("--extract",)])
def test_undecodable_when_read(undecodable, data_dir, flags):
    run(undecodable, data_dir, *flags)
    images = Images(data_dir, "train")
    with pytest.raises(BadImage) as caught:
        images.read(16)
    named = f"{data_dir}/" if flags else f"{data_dir}/{TRAIN}: "
    named += "train/n00000003/n00000003_4.JPEG"
    assert str(caught.value).startswith(f"cannot decode image {named} on {HOST}: ")
    assert "\n" not in str(caught.value)
    images.read(17)
    loader = torch.utils.data.DataLoader(
        Decoded(images),
        batch_size=None,
        num_workers=1,
        multiprocessing_context="fork",
    )
    with pytest.raises(BadImage, match=r"cannot decode image .*n00000003_4\.JPEG"):
        list(loader)


def test_undecodable_when_resized(undecodable, data_dir):
    message = "cannot decode image train/n00000003/n00000003_4.JPEG: "
    refused(undecodable, data_dir, "--resize=32", message=message)


def test_archive_cut_after_staging(imagenet, data_dir):
    """The decoder notices, also if only the last bytes are missing."""
    run(imagenet.source, data_dir)
    images = Images(data_dir, "train")
    end = int(images.index["offset"][23] + images.index["size"][23])
    for left in (end - 20, 20000):
        os.truncate(data_dir / TRAIN, left)
        with pytest.raises(BadImage, match=r"n00000004_5\.JPEG"):
            images.read(23)


# What ended jobs have left.


@pytest.fixture
def jobs(tmp_path):
    """Folders of jobs in /tmp, and a squeue that knows of the first two."""
    names = ("900000000", "900000001", "900000002", "90000000x")
    folders = [Path(f"/tmp/slurm-job-{name}") for name in names]
    for folder in folders:
        folder.mkdir()
    (tmp_path / "bin").mkdir()
    squeue = tmp_path / "bin" / "squeue"
    squeue.write_text(
        '#!/bin/sh\necho "$@" > "$0.called"\n'
        '[ -z "$SQUEUE_PARTITION" ] && printf "900000000\\n900000001\\n"'
    )
    squeue.chmod(0o755)
    path = f"{squeue.parent}:{os.environ['PATH']}"
    yield folders, {"PATH": path, "SLURM_JOB_ID": "900000000"}
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def test_what_ended_jobs_have_left(imagenet, data_dir, jobs, tmp_path):
    (running, other, ended, no_job), env = jobs
    (ended / "data").mkdir()
    output = run(imagenet.source, data_dir, SQUEUE_PARTITION="urgent", **env)
    assert f"{HOST}: removed {ended}, left by a job of yours" in output
    assert running.exists() and other.exists() and no_job.exists()
    assert not ended.exists()
    called = (tmp_path / "bin" / "squeue.called").read_text()
    assert "--all" in called and "--me" in called


@pytest.mark.parametrize("why", ["no list", "no job", "another user's"])
def test_what_is_left_alone(imagenet, data_dir, jobs, why):
    folders, env = jobs
    if why == "no list":  # of the jobs of this cluster: this job is not on it
        env["SLURM_JOB_ID"] = "900000003"
    elif why == "no job":
        del env["SLURM_JOB_ID"]
    else:
        os.chown(folders[2], 1234, 1234)
    run(imagenet.source, data_dir, **env)
    assert all(folder.exists() for folder in folders)


# What is said.


def test_lines_in_a_file(large, data_dir):
    *tenths, last = run(large.source, data_dir, "--extract").splitlines()
    for step in ("listed", "converted"):
        found = [line for line in tenths if f" {step} " in line]
        assert 5 <= len(found) <= 10, tenths
        for line in found:
            assert re.fullmatch(rf"{HOST}: {step} \d+%", line), line
    line = rf"{HOST}: staged 1720 images in {data_dir} after \d+\.\d s"
    assert re.fullmatch(line, last), last


def test_help():
    result = subprocess.run(
        [sys.executable, SCRIPT, "--help"],
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert result.returncode == 0
    for flag in ("--source", "--data-dir", "--extract", "--resize"):
        assert f"  {flag} " in result.stdout or f"  {flag}\n" in result.stdout
    assert all(len(line) <= 110 for line in result.stdout.splitlines())


def test_defaults_come_from_slurm(imagenet, tmp_path):
    env = environment(SLURM_TMPDIR=str(tmp_path), IMAGENET_DIR=str(imagenet.source))
    subprocess.run([sys.executable, SCRIPT], env=env, check=True)
    check(imagenet, tmp_path / "data")


# The stand-in.


def test_synthetic():
    train = Synthetic(60, 0, 40)
    val = Synthetic(30, 1, 40)
    assert len(train) == 60 and len(train.classes) == 10
    assert set(train.labels) == set(val.labels) == set(range(10))
    assert torch.equal(train.read(7), Synthetic(60, 0, 40).read(7))
    assert train.fingerprint != val.fingerprint
    shapes = {tuple(train.read(i).shape) for i in range(60)}
    assert len(shapes) > 20
    assert all(c == 3 and 40 <= h <= 50 and 40 <= w <= 50 for c, h, w in shapes)

    def crops(images):
        read = [images.read(i)[:, :40, :40] for i in range(len(images))]
        return torch.stack(read).float()

    train_crops, val_crops = crops(train), crops(val)
    assert train.read(0).dtype == torch.uint8
    assert not any(torch.equal(a, b) for a in train_crops for b in val_crops)
    means = torch.stack(
        [train_crops[train.labels == label].mean(0) for label in range(10)]
    )
    nearest = torch.cdist(val_crops.flatten(1), means.flatten(1)).argmin(1)
    assert (nearest.numpy() == val.labels).mean() > 0.9  # there is something to learn
