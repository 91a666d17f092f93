"""imagenet/prepare_data.py: what it stages is whole; one line refuses all else."""

import contextlib
import io
import json
import multiprocessing
import os
import pickle
import pty
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import termios
import time
import warnings
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

SCRIPT = Path(
    os.environ.get(
        "PREPARE_DATA", Path(__file__).parent.parent / "imagenet" / "prepare_data.py"
    )
)
sys.path.insert(0, str(SCRIPT.parent))
import prepare_data  # noqa: E402
from prepare_data import BadPicture, Pictures, Synthetic, decode  # noqa: E402

# pytest shows all warnings.
pytestmark = pytest.mark.filterwarnings("ignore:The image decoding and encoding")
HOST = socket.gethostname().split(".")[0]
TRAIN, VALID, DEVKIT = (
    "ILSVRC2012_img_train.tar",
    "ILSVRC2012_img_val.tar",
    "ILSVRC2012_devkit_t12.tar.gz",
)
FORMS = [(), ("--extract",), ("--resize", "32")]


# A forked process has what takes seconds to import. Threads would not survive the fork.
FORK = multiprocessing.get_context("fork")
torch.set_num_threads(1)


def command(source, data_dir, *flags) -> list[str]:
    return [
        sys.executable,
        str(SCRIPT),
        f"--source={source}",
        f"--data-dir={data_dir}",
        "--workers=2",
        *flags,
    ]


def environment(**env) -> dict:
    outside = ("SLURM", "IMAGENET")
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(outside)
    } | env


def call_main(arguments: list[str], env: dict[str, str], output: int) -> None:
    os.setpgid(0, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = (
        open(fd, "w", closefd=False, buffering=1) for fd in (1, 2)
    )
    os.environ.clear()
    os.environ.update(env)
    sys.argv = arguments
    prepare_data.main()


class Started:
    """The script's main(), in a process of its own."""

    def __init__(self, *arguments, **env):
        self.file = tempfile.TemporaryFile()
        arguments = command(*arguments)[1:]
        self.process = FORK.Process(
            target=call_main, args=(arguments, environment(**env), self.file.fileno())
        )
        self.process.start()
        self.pid, self.kill = self.process.pid, self.process.kill

    def output(self) -> str:
        return os.pread(self.file.fileno(), 2**20, 0).decode()

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self) -> str:
        self.process.join(60)
        if self.process.exitcode is None:
            self.kill()  # or pytest would wait for it at its own end
            pytest.fail(f"still running after a minute: {self.output()}")
        self.returncode = self.process.exitcode
        return self.output()


def run(*arguments, exit_code=0, **env) -> str:
    """Run the script; return its output, which may not have a traceback."""
    started = Started(*arguments, **env)
    output = started.wait()
    assert started.returncode == exit_code, output
    assert "Traceback" not in output and "Warning" not in output, output
    return output


def refused(source, data_dir, *flags, message, **env) -> None:
    """Assert that it says in one line what is wrong, and leaves nothing."""
    before = contents(data_dir)
    output = run(source, data_dir, *flags, exit_code=1, **env)
    errors = [line for line in output.splitlines() if not line.startswith(f"{HOST}: ")]
    assert len(errors) == 1 and re.match(
        f"prepare_data.py: error: .*{message}", errors[0]
    ), output
    assert contents(data_dir) - before <= {"staging.lock"}


def contents(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def check(drawn, data_dir, decoded=True) -> None:
    """Assert that the staged data are those drawn, in the order of class and name."""
    for split in ("train", "valid"):
        wanted = sorted(getattr(drawn, split).items())
        pictures = Pictures(data_dir, split)
        classes = sorted({class_name for class_name, _ in drawn.train})
        assert pictures.classes == classes
        assert len(pictures) == len(wanted)
        assert pictures.labels.dtype == np.int32
        assert pictures.labels.tolist() == [
            classes.index(class_name) for (class_name, _), _ in wanted
        ]
        assert all(
            pictures.name(i).endswith(name) for i, ((_, name), _) in enumerate(wanted)
        )
        if decoded:
            for i, (_, data) in enumerate(wanted):
                assert torch.equal(pictures.read(i), decode(bytearray(data)))


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory):
    return draw_imagenet(tmp_path_factory.mktemp("imagenet") / "archives")


@pytest.fixture
def damaged(imagenet, tmp_path) -> Path:
    """A copy of the archives, to be damaged."""
    return Path(shutil.copytree(imagenet.source, tmp_path / "damaged"))


@pytest.fixture
def data_dir(tmp_path) -> Path:
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
    staged = {
        flags[0] if flags else "": tmp_path / f"staged{i}"
        for i, flags in enumerate(FORMS)
    }
    for flags in FORMS:
        output = run(drawn.source, staged[flags[0] if flags else ""], *flags)
        count = f"staged {len(drawn.train)} \\+ {len(drawn.valid)} pictures of"
        assert re.search(
            rf"^{HOST}: {count} .* GB in \d+\.\d s, .* GB/s$", output, re.MULTILINE
        ), output
    check(drawn, staged[""])
    check(drawn, staged["--extract"])
    check(drawn, staged["--resize"], decoded=False)
    for split in ("train", "valid"):
        copied, extracted = (
            Pictures(staged[form], split) for form in ("", "--extract")
        )
        assert copied.fingerprint == extracted.fingerprint
        resized = Pictures(staged["--resize"], split)
        assert resized.fingerprint != copied.fingerprint
        for i in range(len(resized)):
            was, now = copied.read(i), resized.read(i)
            assert min(now.shape[1:]) == 32 < min(was.shape[1:])
            assert (
                abs(max(now.shape[1:]) - 32 * max(was.shape[1:]) / min(was.shape[1:]))
                <= 1
            )
            assert abs(now.float().mean() - was.float().mean()) < 3
    # The tree is the usual one, and is read without this script's index, too.
    tree = staged["--extract"]
    for split, folder in (("train", "train"), ("valid", "val")):
        for (class_name, name), data in getattr(drawn, split).items():
            assert (tree / folder / class_name / name).read_bytes() == data
    fingerprint = Pictures(tree, "valid").fingerprint
    (tree / "staged.json").unlink()
    check(drawn, tree)
    assert Pictures(tree, "valid").fingerprint == fingerprint
    # What was resized is staged as any archive is.
    run(staged["--resize"], tmp_path / "again")
    run(staged["--resize"], tmp_path / "again extracted", "--extract")
    for again in ("again", "again extracted"):
        once, twice = (
            Pictures(staged["--resize"], "train"),
            Pictures(tmp_path / again, "train"),
        )
        assert once.fingerprint == twice.fingerprint
        assert all(torch.equal(once.read(i), twice.read(i)) for i in range(len(once)))


def test_copies_are_the_archives(imagenet, data_dir):
    run(imagenet.source, data_dir)
    for name in (TRAIN, VALID, DEVKIT):
        assert (data_dir / name).read_bytes() == (imagenet.source / name).read_bytes()
    assert not [path for path in contents(data_dir) if path.endswith(".part")]
    assert data_dir.stat().st_mode & 0o777 == 0o700


def test_small_pictures_keep_their_bytes(imagenet, data_dir):
    """They are not enlarged, nor compressed a second time."""
    run(imagenet.source, data_dir, "--resize=300")
    check(imagenet, data_dir)
    mine = data_dir.parent / "copied"
    run(imagenet.source, mine)
    assert (
        Pictures(mine, "train").fingerprint == Pictures(data_dir, "train").fingerprint
    )


def test_every_tenth_is_held_out(tmp_path, data_dir):
    for root in ("", "any/parent/"):
        drawn = draw_folders(tmp_path / "whole.tar", split=False, root=root, train=20)
        output = run(drawn.source, data_dir)
        assert (
            f"{HOST}: whole.tar has no train and val folders: every tenth picture"
            in output
        )
        check(drawn, data_dir)
        run(drawn.source, data_dir, "--release")


def test_long_names(tmp_path, data_dir):
    """GNU's and POSIX's ways to store names over 100 characters, and deep folders."""
    data = next(iter(draw_folders(tmp_path / "some.tar").train.values()))
    files = {f"train/a class/{'deep/' * 30}{'é' * 60}{i}.jpg": data for i in range(3)}
    files |= {f"{'root' * 20}/val/a class/short{i}.jpg": data for i in range(2)}
    for name, form in (
        ("gnu.tar", tarfile.GNU_FORMAT),
        ("posix.tar", tarfile.PAX_FORMAT),
    ):
        with tarfile.open(tmp_path / name, "w", format=form) as tar:
            for path, content in files.items():
                member = tarfile.TarInfo(path)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        run(tmp_path / name, data_dir / name)
        pictures = Pictures(data_dir / name, "train")
        assert pictures.name(2) == f"{name}: a class/{'deep/' * 30}{'é' * 60}2.jpg"
        assert torch.equal(pictures.read(2), decode(bytearray(data)))


def test_cmyk_and_png(imagenet, data_dir):
    run(imagenet.source, data_dir)
    pictures = Pictures(data_dir, "train")
    for i in (0, 6, 7):  # CMYK, PNG, and any other
        shown, meant = pictures.read(i), pixels(sorted(imagenet.train.items())[i][1])
        assert shown.dtype == torch.uint8 and shown.shape == meant.shape
        assert (shown.float() - meant.float()).abs().mean() < 3
    deep = io.BytesIO()
    Image.fromarray(np.full((4, 5), 0x80FF, dtype=np.uint16)).save(deep, "PNG")
    assert torch.equal(
        decode(bytearray(deep.getvalue())),
        torch.full((3, 4, 5), 0x80, dtype=torch.uint8),
    )


def test_decoding_is_quiet(imagenet):
    data = bytearray(next(iter(imagenet.train.values())))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings(
            "ignore", "The image decoding and encoding", DeprecationWarning
        )
        decode(data)
        warnings.warn("another one", DeprecationWarning, stacklevel=1)
    assert [str(warning.message) for warning in caught] == ["another one"]
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); "
        f"import prepare_data as p; p.decode(bytearray({bytes(data)!r})); "
        "import warnings; warnings.warn('mine', DeprecationWarning)"
    )
    result = subprocess.run(
        [sys.executable, "-Wdefault", "-c", code], capture_output=True, text=True
    )
    assert "TorchCodec" not in result.stderr and "mine" in result.stderr, result.stderr


def test_in_dataloader_workers(imagenet, data_dir):
    """Forked ones read from the same file; others get a path."""
    run(imagenet.source, data_dir)
    pictures = Pictures(data_dir, "train")
    loader = torch.utils.data.DataLoader(
        Decoded(pictures), batch_size=None, num_workers=2
    )
    read = list(loader)
    assert len(pickle.dumps(pictures)) < 500
    opened_again = pickle.loads(pickle.dumps(pictures))
    for i in range(len(pictures)):
        assert torch.equal(read[i], pictures.read(i)) and torch.equal(
            read[i], opened_again.read(i)
        )


class Decoded(torch.utils.data.Dataset):
    def __init__(self, pictures):
        self.pictures = pictures

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, i):
        return self.pictures.read(i)


# Again, at once, killed.


@pytest.mark.parametrize("flags", FORMS)
def test_done_already(imagenet, data_dir, flags):
    run(imagenet.source, data_dir, *flags)
    before = {path: (data_dir / path).stat() for path in contents(data_dir)}
    output = run(imagenet.source, data_dir, *flags)
    assert re.fullmatch(
        rf"{HOST}: .* is staged already: 24 \+ 12 pictures of 4 classes, \w+( 32)?\n",
        output,
    )
    after = {path: (data_dir / path).stat() for path in contents(data_dir)}
    assert {p: (s.st_mtime_ns, s.st_ino) for p, s in before.items()} == {
        p: (s.st_mtime_ns, s.st_ino) for p, s in after.items()
    }


def test_another_form_or_source(imagenet, damaged, data_dir):
    run(imagenet.source, data_dir)
    check(imagenet, data_dir)
    refused(
        imagenet.source,
        data_dir,
        "--extract",
        message="holds 24 .* or remove that with --release",
    )
    os.utime(damaged / TRAIN)  # another file of the same size
    refused(damaged, data_dir, message="from other archives")
    check(imagenet, data_dir)


def test_what_others_have_put_there(imagenet, data_dir):
    (data_dir / "val").mkdir(parents=True)
    (data_dir / "val" / "mine").touch()
    refused(
        imagenet.source, data_dir, "--extract", message="has a val of somebody else's"
    )
    run(imagenet.source, data_dir)
    run(imagenet.source, data_dir, "--release")
    assert contents(data_dir) == {"val", "val/mine"}
    refused(
        imagenet.source, imagenet.source, message=f"has a {TRAIN} of somebody else's"
    )


def test_after_the_node_went_down(imagenet, data_dir):
    """What the disk had not got by then is lost; a mark may be there, even empty."""
    run(imagenet.source, data_dir)
    mark = json.loads((data_dir / "staged.json").read_text())
    for text in (json.dumps(mark | {"boot": "another"}), ""):
        (data_dir / "staged.json").write_text(text)
        (data_dir / TRAIN).write_bytes(b"")
        assert "staged already" not in run(imagenet.source, data_dir)
        check(imagenet, data_dir)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Enough pictures to be killed or to wait in the middle."""
    return draw_imagenet(
        tmp_path_factory.mktemp("large") / "archives",
        classes=40,
        train=40,
        resolution=40,
    )


def wait_for(condition, process) -> None:
    """Wait up to a minute until a condition holds or the process has ended."""
    deadline = time.monotonic() + 60
    while not condition() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.0005)


@pytest.mark.parametrize("flags", FORMS)
@pytest.mark.parametrize("event", ["staging.json", "VALID", "INDEX", "renamed"])
def test_killed_and_started_again(large, data_dir, flags, event):
    """SIGKILL, as soon as a file appears."""
    whole = "train" if flags == ("--extract",) else TRAIN
    file = {
        "staging.json": "staging.json",
        "VALID": {(): f"{VALID}.part", ("--extract",): "train.part/n00000009"}.get(
            flags, f"{TRAIN}.part"
        ),
        "INDEX": "train.npy.part",
        "renamed": whole,
    }[event]
    for _ in range(20):
        process = Started(large.source, data_dir, *flags)
        wait_for((data_dir / file).exists, process)
        process.kill()
        process.wait()
        if process.returncode == -signal.SIGKILL:
            break
        run(large.source, data_dir, "--release")  # it was faster
    else:
        pytest.fail("never killed before its end")
    marked = (data_dir / "staged.json").exists()
    if not marked and not (data_dir / "train").exists():
        with pytest.raises(FileNotFoundError):
            Pictures(data_dir, "train")
    output = run(large.source, data_dir, *flags)
    assert ("staged already" in output) == marked
    check(large, data_dir, decoded=False)
    assert not [path for path in contents(data_dir) if path.endswith(".part")]
    if not marked and flags:  # what is left of one form is no obstacle to another
        run(large.source, data_dir, "--release")
        assert not data_dir.exists()


def test_killed_in_another_form(large, data_dir):
    process = Started(large.source, data_dir, "--extract")
    wait_for((data_dir / "train.part" / "n00000005").exists, process)
    process.kill()
    process.wait()
    run(large.source, data_dir)
    check(large, data_dir, decoded=False)
    assert not (data_dir / "train.part").exists()


def test_no_process_outlives_a_killed_one(large, data_dir):
    """Their lock would make others wait, and they would write into the next's files."""
    process = Started(large.source, data_dir, "--resize=32", "--workers=3")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_for(lambda: len(children.read_text().split()) == 3, process)
    pids = children.read_text().split()
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}/exe") for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_killed_worker(large, data_dir):
    process = Started(large.source, data_dir, "--resize=32")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_for(lambda: len(children.read_text().split()) == 2, process)
    os.kill(int(children.read_text().split()[0]), signal.SIGKILL)
    output = process.wait()
    assert (
        process.returncode == 1
        and output.count("prepare_data.py: error: a worker on") == 1
    ), output
    assert contents(data_dir) == {"staging.lock"}


def test_a_worker_killed_while_it_hands_over(tmp_path, data_dir):
    """It leaves half of a result."""
    source = draw_imagenet(
        tmp_path / "archives", classes=8, train=400, resolution=40
    ).source
    process = Started(source, data_dir, "--resize=32")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_for((data_dir / f"{TRAIN}.part").exists, process)
    workers = [Path(f"/proc/{pid}") for pid in children.read_text().split()]

    def stopped_when_one_writes() -> list[str]:
        os.kill(process.pid, signal.SIGSTOP)  # it takes no results, nor gives work
        wait_for(
            lambda: (
                not any(
                    "\nState:\tR" in (path / "status").read_text() for path in workers
                )
            ),
            process,
        )
        writing = [
            path.name
            for path in workers
            if re.search("write|send", (path / "wchan").read_text())
        ]
        if not writing:
            os.kill(process.pid, signal.SIGCONT)
        return writing

    while not (writing := stopped_when_one_writes()):
        assert process.poll() is None
    os.kill(int(writing[0]), signal.SIGKILL)
    os.kill(process.pid, signal.SIGCONT)
    output = process.wait()
    assert (
        process.returncode == 1
        and output.count("prepare_data.py: error: a worker on") == 1
    ), output
    assert contents(data_dir) == {"staging.lock"}


def test_interrupted(large, data_dir):
    """Ctrl-C reaches all processes."""
    process = Started(large.source, data_dir, "--resize=32")
    wait_for((data_dir / f"{TRAIN}.part").exists, process)
    os.killpg(process.pid, signal.SIGINT)
    output = process.wait()
    assert process.returncode == 130 and "Traceback" not in output, output
    assert contents(data_dir) == {"staging.lock"}


def test_workers_leave_ctrl_c_to_the_parent(large, data_dir):
    process = Started(large.source, data_dir, "--resize=32")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_for((data_dir / f"{TRAIN}.part").exists, process)
    for pid in children.read_text().split():
        os.kill(int(pid), signal.SIGINT)
    output = process.wait()
    assert process.returncode == 0 and "Traceback" not in output, output


@pytest.mark.parametrize("flags", [(), ("--extract",)])
def test_two_at_once(large, data_dir, flags):
    both = [Started(large.source, data_dir, *flags) for _ in range(2)]
    outputs = sorted((process.wait() for process in both), key=len)
    assert [process.returncode for process in both] == [0, 0], outputs
    assert (
        sum(f"{HOST}: staged 1 600 + 120 pictures" in output for output in outputs) == 1
    ), outputs
    assert "is staged already" in outputs[0], outputs
    check(large, data_dir, decoded=False)


def test_waits_for_another(large, data_dir):
    first = Started(large.source, data_dir, "--resize=32")
    wait_for((data_dir / f"{TRAIN}.part").exists, first)
    second = Started(large.source, data_dir, "--resize=32")
    wait_for(
        lambda: (
            f"{HOST}: waiting for another job that is staging in {data_dir}\n"
            in second.output()
        ),
        second,
    )
    first.kill()
    first.wait()
    output = second.wait()
    assert second.returncode == 0 and f"{HOST}: staged 1 600 + 120" in output, output


# What is refused.


def test_nothing_there(tmp_path, data_dir):
    refused(
        tmp_path / "nowhere",
        data_dir,
        message="there is no .*/nowhere on .* --source or IMAGENET_DIR",
    )
    (tmp_path / "empty").mkdir()
    refused(
        tmp_path / "empty",
        data_dir,
        message=f"neither {TRAIN} nor tiny-imagenet-200.zip",
    )
    (tmp_path / "mine.tar.gz").touch()
    refused(tmp_path / "mine.tar.gz", data_dir, message="unpack a compressed tar")
    with pytest.raises(
        FileNotFoundError,
        match=r"^no data in .*: .* IMAGENET_DIR .* run prepare_data.py on every node",
    ):
        Pictures(tmp_path / "empty", "train")


@pytest.mark.parametrize("name", [TRAIN, VALID, DEVKIT])
def test_missing_archive(damaged, data_dir, name):
    (damaged / name).unlink()
    refused(damaged, data_dir, message=f"but no {name}")


@pytest.mark.parametrize("flags", FORMS)
@pytest.mark.parametrize("name", [TRAIN, VALID, DEVKIT])
def test_cut_archive(damaged, data_dir, name, flags):
    data = (damaged / name).read_bytes()
    for keep in (len(data) * 2 // 3, len(data) * 2 // 3 // 512 * 512):
        (damaged / name).write_bytes(data[:keep])
        message = (
            f"{name}.* is damaged"
            if name == DEVKIT
            else f"{name}.* ends early, after .*, .*byte \\d+"
        )
        refused(damaged, data_dir, *flags, message=message)


def test_cut_at_its_end(damaged, data_dir):
    """All pictures are there, and nothing says that there were not more of them."""
    data = (damaged / VALID).read_bytes()
    (damaged / VALID).write_bytes(
        data.rstrip(b"\0") + bytes(-len(data.rstrip(b"\0")) % 512)
    )
    refused(
        damaged,
        data_dir,
        message=f"{VALID} ends early, after ILSVRC2012_val_00000012.JPEG",
    )


@pytest.mark.parametrize("flags", [(), ("--extract",)])
@pytest.mark.parametrize("byte", [0, 30, 130, 150, 156, 260])
@pytest.mark.parametrize("name", [TRAIN, VALID])
def test_flipped_bit_in_a_header(damaged, data_dir, name, byte, flags):
    data = bytearray((damaged / name).read_bytes())
    wanted = b"n00000003_2.JPEG" if name == TRAIN else b"ILSVRC2012_val_00000005.JPEG"
    at = data.index(wanted)
    data[at + byte] ^= 1
    (damaged / name).write_bytes(data)
    after = "n00000003_1.JPEG" if name == TRAIN else "ILSVRC2012_val_00000004.JPEG"
    refused(
        damaged,
        data_dir,
        *flags,
        message=f"{name}.* is damaged, after {after}, at byte \\d+",
    )


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
            f"n00000002 is in {DEVKIT}, and not in {TRAIN}",
        ),
        (
            lambda tars: tars.update({"n7.tar": {}}),
            f"n7 is in {TRAIN}, and not in {DEVKIT}",
        ),
        (
            lambda tars: tars["n00000002.tar"].popitem(),
            f"{TRAIN} has 5 pictures of n00000002, and .* 6",
        ),
        (
            lambda tars: tars["n00000003.tar"].update({"n00000003_1.JPEG": b"text"}),
            "n00000003_1.JPEG is no JPEG",
        ),
        (
            lambda tars: tars["n00000003.tar"].update({"n00000003_1.JPEG": b""}),
            "n00000003_1.JPEG is no JPEG",
        ),
        (
            lambda tars: tars["n00000001.tar"].update(tars["n00000002.tar"]),
            "n00000002_0.JPEG is no picture of",
        ),
    ],
)
def test_wrong_train_archive(damaged, data_dir, edit, message, flags):
    edit_tars(damaged, edit)
    refused(damaged, data_dir, *flags, message=f".*{message}")


@pytest.mark.parametrize(
    "truth, message",
    [
        ("1\n" * 11, "12 pictures and .* classes for 11"),
        ("1\n" * 11 + "7\n", "the class 7, and meta.mat does not"),
    ],
)
def test_wrong_ground_truth(damaged, data_dir, truth, message):
    write_devkit(damaged, {f"n0000000{i}": 6 for i in range(1, 5)}, [1, 2, 3, 4], truth)
    refused(damaged, data_dir, message=message)
    refused(damaged, data_dir, "--extract", message=message)


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
    "edit, message",
    [
        (lambda f: f.pop("tiny-imagenet-200/wnids.txt"), "lacks wnids.txt"),
        (
            lambda f: f.update({"tiny-imagenet-200/wnids.txt": b"n00000001\n"}),
            "are not those of its wnids.txt",
        ),
        (
            lambda f: f.pop("tiny-imagenet-200/val/images/val_3.JPEG"),
            "has no picture val_3.JPEG",
        ),
        (
            lambda f: f.update(
                {"tiny-imagenet-200/val/images/val_9.JPEG": b"\xff\xd8\xff"}
            ),
            "valid pictures",
        ),
    ],
)
def test_wrong_tiny_imagenet(tmp_path, data_dir, edit, message, flags):
    source = draw_tiny_imagenet(tmp_path / "tiny").source
    edit_zip(source / "tiny-imagenet-200.zip", edit)
    refused(source, data_dir, *flags, message=message)


@pytest.mark.parametrize("flags", [(), ("--extract",)])
def test_cut_zip(tmp_path, data_dir, flags):
    path = draw_folders(tmp_path / "mine.zip", deflated=True).source
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    refused(path, data_dir, *flags, message="mine.zip is damaged")
    path.write_bytes(data[:100] + data[5000:])  # its directory is whole
    refused(path, data_dir, *flags, message="mine.zip is damaged")


@pytest.mark.parametrize("flags", FORMS)
@pytest.mark.parametrize(
    "name", ["../x.jpg", "/tmp/x.jpg", "train/a/../../../x.jpg", "train/a/\n.jpg"]
)
@pytest.mark.parametrize("suffix", [".tar", ".zip"])
def test_names_that_lead_elsewhere(tmp_path, data_dir, suffix, name, flags):
    path = tmp_path / f"mine{suffix}"
    draw_folders(path)
    data = b"\xff\xd8\xff"
    if suffix == ".zip":
        edit_zip(path, lambda files: files.update({name: data}))
    else:
        path.write_bytes(tar_bytes({"train/a/1.jpg": data, name: data}))
    refused(
        path,
        data_dir,
        *flags,
        message=f"mine{suffix}: a member's name, {re.escape(repr(name))}, leads",
    )


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE]
)
def test_links_and_devices(tmp_path, data_dir, kind):
    member = tarfile.TarInfo("train/a/link.jpg")
    member.type, member.linkname = kind, "/etc/passwd"
    with tarfile.open(tmp_path / "mine.tar", "w") as tar:
        tar.addfile(member)
    refused(
        tmp_path / "mine.tar",
        data_dir,
        message="train/a/link.jpg is a link or a device",
    )
    info = zipfile.ZipInfo("train/a/link.jpg")
    info.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "mine.zip", "w") as archive:
        archive.writestr(info, "/etc/passwd")
    refused(
        tmp_path / "mine.zip",
        data_dir,
        "--extract",
        message="train/a/link.jpg is a link or a device",
    )


def test_wrong_folders(tmp_path, data_dir):
    data = b"\xff\xd8\xff"
    for files, message in (
        ({"train/a/1.jpg": data}, "for train only: train and val are needed"),
        (
            {"train/a/1.jpg": data, "val/b/1.jpg": data},
            "valid pictures of b, and none to train on",
        ),
        ({"1.txt": data}, "has no .* pictures in class folders"),
        ({"a/1.jpg": data, "b/2.jpg": data}, "has no .* pictures in class folders"),
        ({"train/a/1.jpg": b"GIF89a", "val/a/1.jpg": data}, "train/a/1.jpg is no JPEG"),
    ):
        (tmp_path / "mine.tar").write_bytes(tar_bytes(files))
        refused(tmp_path / "mine.tar", data_dir, message=message)
    with tarfile.open(tmp_path / "mine.tar", "w") as tar:
        for name in ("train/a/1.jpg", "val/a/1.jpg", "train/a/1.jpg"):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    refused(tmp_path / "mine.tar", data_dir, message="there are two pictures 1.jpg")


@pytest.mark.parametrize("flags", FORMS)
def test_no_room(large, tmp_path, flags):
    with mounted(tmp_path / "disk", "size=1m") as disk:
        refused(
            large.source,
            disk / "data",
            *flags,
            message=f"{disk}/data on {HOST} has .* GB free, and .* GB",
        )


@pytest.mark.parametrize("flags", FORMS)
def test_full_disk(large, tmp_path, flags):
    """Something else fills it after the check."""
    with mounted(tmp_path / "disk", "size=40m") as disk:
        data_dir = disk / "data"
        process = Started(large.source, data_dir, *flags)
        wait_for(
            lambda: any(
                (data_dir / name).exists() for name in (f"{TRAIN}.part", "train.part")
            ),
            process,
        )
        os.killpg(process.pid, signal.SIGSTOP)
        with (
            contextlib.suppress(OSError),
            open(disk / "other", "wb", buffering=0) as file,
        ):
            while file.write(bytes(2**20)):
                pass
        os.killpg(process.pid, signal.SIGCONT)
        output = process.wait()
        assert process.returncode == 1 and "Traceback" not in output, output
        assert output.endswith(
            f"error: {data_dir} on {HOST} is full: choose another --data-dir\n"
        ), output
        assert contents(data_dir) == {"staging.lock"}
        (disk / "other").unlink()
        run(large.source, data_dir, *flags)


def test_read_only(imagenet, tmp_path):
    with mounted(tmp_path / "disk", "ro") as disk:
        refused(
            imagenet.source,
            disk / "data",
            message=f"{disk}/data on {HOST}: Read-only file system",
        )


def test_file_size_limit(imagenet, data_dir):
    """An error in a worker that is none of the archive's."""
    result = subprocess.run(
        command(imagenet.source, data_dir),
        env=environment(),
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000)),
    )
    assert result.returncode == 1 and result.stderr.count("\n") == 1, result.stderr
    assert "File too large" in result.stderr
    assert contents(data_dir) == {"staging.lock"}


def test_folder_of_another_user(imagenet, tmp_path):
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "data").mkdir()
    os.chown(shared / "data", 1234, 1234)
    refused(imagenet.source, shared / "data", message="belongs to another user")
    run(imagenet.source, shared / "mine")


def test_checksums(imagenet, data_dir):
    refused(
        imagenet.source,
        data_dir,
        "--checksums",
        message=f"{TRAIN} has the MD5 sum [0-9a-f]{{32}}, not",
    )


def test_checksums_of_an_own_archive(tmp_path, data_dir):
    run(draw_folders(tmp_path / "mine.zip").source, data_dir, "--checksums")


# A picture that does not decode.


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
    pictures = Pictures(data_dir, "train")
    with pytest.raises(BadPicture) as caught:
        pictures.read(16)
    named = str(data_dir / "train/n00000003") + "/" if flags else f"{TRAIN}: "
    assert str(caught.value).startswith(
        f"cannot read {named}n00000003_4.JPEG on {HOST}: "
    )
    assert "\n" not in str(caught.value)
    pictures.read(17)
    loader = torch.utils.data.DataLoader(
        Decoded(pictures), batch_size=None, num_workers=1
    )
    with pytest.raises(BadPicture, match=r"cannot read .*n00000003_4\.JPEG"):
        list(loader)


def test_undecodable_when_resized(undecodable, data_dir):
    refused(
        undecodable,
        data_dir,
        "--resize=32",
        message=f"{TRAIN}: cannot read n00000003_4.JPEG: ",
    )


def test_archive_cut_after_staging(imagenet, data_dir):
    run(imagenet.source, data_dir)
    pictures = Pictures(data_dir, "train")
    os.truncate(data_dir / TRAIN, 20000)
    with pytest.raises(BadPicture, match=r"n00000004_5\.JPEG"):
        pictures.read(23)


# Jobs that share.


def test_release(imagenet, data_dir):
    run(imagenet.source, data_dir, "--release")  # nothing there
    assert not data_dir.exists()
    run(imagenet.source, data_dir, SLURM_JOB_ID="1")
    assert "staged already" in run(imagenet.source, data_dir, SLURM_JOB_ID="2")
    assert run(imagenet.source, data_dir, "--release", SLURM_JOB_ID="1") == ""
    check(imagenet, data_dir)
    run(imagenet.source, data_dir, "--release", SLURM_JOB_ID="1")
    run(imagenet.source, data_dir, "--release")
    check(imagenet, data_dir)
    run(imagenet.source, data_dir, "--release", SLURM_JOB_ID="2")
    assert not data_dir.exists()


def test_release_by_a_job_that_has_staged_nothing(imagenet, data_dir):
    """Its end must not take away what somebody else has staged, outside of a job."""
    run(imagenet.source, data_dir)
    run(imagenet.source, data_dir, "--release", SLURM_JOB_ID="1")
    check(imagenet, data_dir)


@pytest.mark.parametrize("flags", FORMS)
def test_release_leaves_what_is_not_its_own(imagenet, data_dir, flags):
    run(imagenet.source, data_dir, *flags, SLURM_JOB_ID="1")
    (data_dir / "mine").touch()
    run(imagenet.source, data_dir, "--release", SLURM_JOB_ID="1")
    assert contents(data_dir) == {"mine"}
    run(imagenet.source, data_dir, "--release", SLURM_JOB_ID="1")
    assert contents(data_dir) == {"mine"}


def test_release_while_another_waits(large, data_dir):
    """The one that waits for the lock finds the folder gone, and makes it again."""
    first = Started(large.source, data_dir, SLURM_JOB_ID="1")
    wait_for((data_dir / f"{TRAIN}.part").exists, first)
    os.kill(first.pid, signal.SIGSTOP)
    others = [
        Started(large.source, data_dir, "--release", SLURM_JOB_ID="1") for _ in range(2)
    ]
    others.append(Started(large.source, data_dir, SLURM_JOB_ID="2"))
    for process in others:
        wait_for(
            lambda process=process: "waiting for another job" in process.output(),
            process,
        )
        assert process.poll() is None
    os.kill(first.pid, signal.SIGCONT)
    outputs = [process.wait() for process in [first, *others]]
    assert [process.returncode for process in [first, *others]] == [0] * 4, outputs
    check(large, data_dir, decoded=False)


def test_one_comes_while_another_leaves(data_dir, monkeypatch):
    """If the folder is removed between any two of its steps, it makes it again."""
    make_private, left = prepare_data.make_private, []

    def make_private_once(path: Path) -> None:
        make_private(path)
        if not left:
            left.append(path.rmdir())

    monkeypatch.setattr(prepare_data, "make_private", make_private_once)
    with prepare_data.lock(data_dir, create=True):
        assert contents(data_dir) == {"staging.lock"}
    assert left


@pytest.mark.parametrize("name", ["link", "link/data", "/proc/data"])
def test_a_folder_that_cannot_be_made(imagenet, data_dir, name):
    """Nobody has just removed it, and waiting for it would have no end."""
    data_dir.parent.mkdir(parents=True)
    (data_dir.parent / "link").symlink_to(data_dir.parent / "nowhere" / "data")
    output = run(imagenet.source, data_dir.parent / name, exit_code=1)
    assert re.search(
        "^prepare_data.py: error: .*No such file or directory", output, re.MULTILINE
    ), output


def test_results_do_not_pile_up():
    """Workers wait for a slower disk: memory would not hold all that they resize."""
    drawn = []
    with prepare_data.WorkerPool(2) as pool:
        results = pool.map(abs, (drawn.append(i) or -i for i in range(100)))
        assert next(results) == 0
        assert len(drawn) <= 10
        assert list(results) == list(range(1, 100))


# What is said.


def test_lines_in_a_file(large, data_dir):
    output = run(large.source, data_dir, "--extract")
    *tenths, last = output.splitlines()
    assert 5 <= len(tenths) <= 9, output
    for line in tenths:
        assert re.fullmatch(rf"{HOST}: [1-9]0%, \d+ pictures/s", line), output
    assert re.fullmatch(
        rf"{HOST}: staged 1 600 \+ 120 pictures of 40 classes, extracted in .*: "
        r"\d\.\d\d GB in \d+\.\d s, .*",
        last,
    )


def test_bar_in_a_terminal(imagenet, data_dir):
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (25, 80))
    process = subprocess.Popen(
        command(imagenet.source, data_dir),
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=environment(),
    )
    os.close(follower)
    output = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while data := os.read(leader, 1000):
            output += data
    assert process.wait() == 0
    assert b"%|" in output and b"10%," not in output, output


def test_help():
    result = subprocess.run(
        [sys.executable, SCRIPT, "--help"],
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert result.returncode == 0
    flags = "--source --data-dir --extract --resize --checksums --workers --release"
    assert all(
        f"  {flag} " in result.stdout or f"  {flag}\n" in result.stdout
        for flag in flags.split()
    )
    assert all(len(line) <= 110 for line in result.stdout.splitlines())


def test_defaults_come_from_slurm(imagenet, tmp_path):
    env = environment(SLURM_TMPDIR=str(tmp_path), IMAGENET_DIR=str(imagenet.source))
    subprocess.run([sys.executable, SCRIPT], env=env, check=True)
    check(imagenet, tmp_path / "data")


def test_flags_that_exclude_each_other(imagenet, data_dir):
    assert "two steps" in run(
        imagenet.source, data_dir, "--extract", "--resize=32", exit_code=2
    )
    assert "must be at least 1" in run(
        imagenet.source, data_dir, "--resize=0", exit_code=2
    )


# The stand-in.


def test_synthetic():
    train, valid = (
        Synthetic(60, 6, resolution=40),
        Synthetic(30, 6, seed=1, resolution=40),
    )
    assert (
        len(train) == 60 and len(train.classes) == 6 and train.labels.dtype == np.int32
    )
    assert set(train.labels) == set(valid.labels) == set(range(6))
    assert torch.equal(train.read(7), pickle.loads(pickle.dumps(train)).read(7))
    assert len(pickle.dumps(train)) < 500
    assert (
        train.fingerprint != valid.fingerprint
        and train.name(7) == "synthetic picture 7"
    )
    shapes = {tuple(train.read(i).shape) for i in range(60)}
    assert len(shapes) > 20 and all(
        c == 3 and 40 <= h <= 50 and 40 <= w <= 50 for c, h, w in shapes
    )

    def crops(pictures):
        return torch.stack(
            [pictures.read(i)[:, :40, :40] for i in range(len(pictures))]
        ).float()

    train_crops, valid_crops = crops(train), crops(valid)
    assert not any(torch.equal(a, b) for a in train_crops for b in valid_crops)
    means = torch.stack(
        [train_crops[train.labels == label].mean(0) for label in range(6)]
    )
    nearest = torch.cdist(valid_crops.flatten(1), means.flatten(1)).argmin(1)
    assert (nearest.numpy() == valid.labels).mean() > 0.9  # there is something to learn
    assert min(Synthetic(10, 10).read(7).shape[1:]) >= 256
