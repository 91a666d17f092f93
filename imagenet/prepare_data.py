"""Stage ImageNet, Tiny ImageNet or an archive of your own on a node's disk.

The archives are copied as they are, and an index says where in them every image lies.
Training reads the images from there: no million files.
"""

import argparse
import io
import json
import math
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import archives
import numpy as np
from archives import HOST, Member, Source, StagingError
from tqdm import tqdm

# torchvision 0.29 hands decoding over to another package,
# and would say so at every image.
warnings.filterwarnings(
    "ignore", "The image decoding and encoding capabilities", DeprecationWarning
)

RESIZED = "images.tar"
threads = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
appending = threading.Lock()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        usage="%(prog)s [options]",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--source",
        type=Path,
        default=os.environ.get("IMAGENET_DIR", "."),
        help="folder of archives, or a .zip or .tar of class folders",
    )
    add(
        "--data-dir",
        type=Path,
        default=os.path.join(os.environ.get("SLURM_TMPDIR", "."), "data"),
        help="where to stage, on the node's own disk",
    )
    add(
        "--extract",
        action="store_true",
        help="make the usual tree of class folders, a file an image",
    )
    add(
        "--resize",
        type=int,
        metavar="N",
        help=f"write {RESIZED}, with shorter sides of N pixels",
    )
    args = parser.parse_args()
    if args.resize is not None and args.resize < 1:
        parser.error("--resize must be at least 1")
    return args


def main() -> None:
    args = parse_args()
    try:
        stage(args)
    except StagingError as error:
        fail(str(error))
    except OSError as error:
        fail(f"cannot stage {args.source} in {args.data_dir} on {HOST}: {error}")
    except KeyboardInterrupt:
        fail("interrupted", status=130)


def stage(args: argparse.Namespace) -> None:
    """Stage the source in the form asked for, unless it is there already."""
    start = time.perf_counter()
    source = archives.find_source(args.source)
    files = {
        path.name: [path.stat().st_size, path.stat().st_mtime_ns]
        for path in source.paths()
    }
    wanted = {"files": files, "extract": args.extract, "resize": args.resize}
    remove_abandoned()
    if is_staged(args.data_dir, wanted):
        return say(f"{args.data_dir} is staged already")
    data_dir = args.data_dir.resolve()
    folder = make_folder(data_dir)
    try:
        if args.extract or args.resize:
            images, source = convert(source, folder, args)
        else:
            images = list_images(source, copy_to=folder)
        wanted["archives"] = {"train": source.train.name, "val": source.val.name}
        write_index(folder, images, wanted)
        folder.rename(data_dir)
    except BaseException:
        threads.shutdown(cancel_futures=True)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    seconds = time.perf_counter() - start
    say(f"staged {len(images)} images in {data_dir} after {seconds:.1f} s")


def is_staged(data_dir: Path, wanted: dict) -> bool:
    """Is that there, and whole? Raises StagingError if something else is."""
    if not os.path.lexists(data_dir):
        return False
    mine = data_dir.lstat().st_uid == os.geteuid()
    if mine and not any(data_dir.iterdir()):
        return False
    try:
        found = json.loads((data_dir / "index.json").read_text())
    except (OSError, ValueError):  # there is none, or the node went down meanwhile
        found = {}
    if not mine or not wanted.items() <= found.items():
        raise StagingError(
            f"{data_dir} on {HOST} is another user's, or has something else in it: "
            "choose another --data-dir, or remove it"
        )
    return True


def make_folder(data_dir: Path) -> Path:
    """Make a folder beside data_dir, which gets that name when it is whole.

    Those that killed stagings have left there are removed.
    """
    prefix = f"{data_dir.name}.unfinished-"
    data_dir.parent.mkdir(parents=True, exist_ok=True)
    for path in data_dir.parent.iterdir():
        if path.name.startswith(prefix):
            shutil.rmtree(path, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=prefix, dir=data_dir.parent))


def list_images(source: Source, copy_to: Path | None = None) -> list[Member]:
    """Return all images, and copy the archives if there is a folder to copy to."""
    reading = threads.submit(archives.read_devkit, source.devkit)
    parts = []
    for archive in source.paths():
        start = 0
        size = archive.stat().st_size
        if copy_to:
            with open(copy_to / archive.name, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, size or 1)  # or the disk is full
        for tar in archives.list_class_tars(archive):
            end = tar.offset + tar.size
            parts.append((archive, start, end, copy_to, tar))
            start = end
        for at in range(start, size, 2**26):
            parts.append((archive, at, min(at + 2**26, size), copy_to, None))
    images = run("copied" if copy_to else "listed", copy_part, parts)
    devkit = reading.result()
    with open(copy_to / source.val.name if copy_to else source.val, "rb") as file:
        images += archives.list_images(file, source.val, devkit)
    archives.check_images(images, source, devkit)
    return images


def copy_part(
    archive: Path, start: int, end: int, copy_to: Path | None, class_tar: Member | None
) -> list[Member]:
    """Copy a part of an archive if asked to; return the images if it is a class."""
    path = archive
    if copy_to:
        path = copy_to / archive.name
        buffer = memoryview(bytearray(2**20))
        with open(archive, "rb") as source, open(path, "r+b") as target:
            while start < end:
                # Reading and writing release the GIL.
                count = os.preadv(source.fileno(), [buffer[: end - start]], start)
                if count == 0:
                    raise StagingError(f"{archive} has become shorter")
                start += os.pwrite(target.fileno(), buffer[:count], start)
    if class_tar is None:
        return []
    with open(path, "rb") as file:  # from memory: it has just been written
        return archives.list_class(file, archive, class_tar)


def convert(
    source: Source, folder: Path, args: argparse.Namespace
) -> tuple[list[Member], Source]:
    """Write images to files in class folders or, only resized, to a tar.

    Returns the images, and where they are if they are in a tar.
    """
    images = list_images(source)
    tar = None
    if not args.extract:
        tar = tarfile.open(folder / RESIZED, "w", format=tarfile.GNU_FORMAT)
    parts = []
    for split, archive in (("train", source.train), ("val", source.val)):
        chosen = [image for image in images if image.name.startswith(split)]
        for i in range(0, len(chosen), 200):
            parts.append((archive, chosen[i : i + 200], args.resize, folder, tar))
    run("converted", convert_some, parts)
    if tar:
        tar.close()
        os.sync()  # it may be read for years, and by other nodes
        source = Source(folder / RESIZED, folder / RESIZED)
        images = list_images(source)
    return images, source


def convert_some(
    archive: Path,
    images: list[Member],
    side: int | None,
    folder: Path,
    tar: tarfile.TarFile | None,
) -> list[Member]:
    """Write images to a tar, or to files in class folders if there is no tar."""
    if tar is None:
        for class_folder in {os.path.dirname(image.name) for image in images}:
            os.makedirs(folder / class_folder, exist_ok=True)
    with open(archive, "rb") as file:
        for image in images:
            data = archives.read_member(file, image, image.size)
            if len(data) < image.size:
                raise StagingError(f"{archive} is damaged at {image.name}")
            if side:
                data = shrink(data, side, f"{archive}: {image.name}")
            if tar is None:
                with open(f"{folder}/{image.name}", "wb") as target:
                    target.write(data)
            else:
                header = tarfile.TarInfo(image.name)
                header.size = len(data)
                with appending:
                    tar.addfile(header, io.BytesIO(data))
                    tar.members.clear()  # it would keep a kilobyte of each
    return []


def shrink(data: bytes, side: int, name: str) -> bytes:
    """Return a JPEG whose shorter side is `side`, or the image if it is no larger."""
    import torch
    from torchvision.io import decode_image, encode_jpeg
    from torchvision.transforms.v2 import functional

    torch.set_num_threads(1)  # there is a thread for each CPU, outside of PyTorch
    try:  # All of this releases the GIL.
        pixels = decode_image(
            torch.frombuffer(bytearray(data), dtype=torch.uint8), "RGB"
        )
    except RuntimeError as error:
        raise StagingError(f"cannot decode image {name}: {error}") from None
    if min(pixels.shape[1:]) <= side:
        return data
    pixels = functional.to_dtype(pixels, torch.uint8, scale=True)  # a PNG's 16 bits
    pixels = functional.resize(pixels, [side], antialias=True)
    return encode_jpeg(pixels, quality=90).numpy().tobytes()


def write_index(folder: Path, images: list[Member], staged: dict) -> None:
    """Write where the images are, for data.py.

    train.npy and val.npy have a row for each image, by label and name: label, name
    (CLASS/NAME), offset and size in the archive and, if it is deflated there, its size
    there as `packed`. index.json has the classes and the rest.
    """
    classes = sorted({image.name.split("/")[1] for image in images})
    label_of = {class_name: label for label, class_name in enumerate(classes)}
    rows = {"train": [], "val": []}
    for path, *place in images:
        split, class_name, name = path.split("/", 2)
        name = f"{class_name}/{name}".encode()
        rows[split].append((label_of[class_name], name, *place))
    for split in rows:
        index = np.rec.fromrecords(
            sorted(rows[split]), names="label, name, offset, size, packed"
        )
        np.save(folder / f"{split}.npy", index)
    (folder / "index.json").write_text(json.dumps(staged | {"classes": classes}))


def run(done: str, function: Callable, parts: list[tuple]) -> list[Member]:
    """Call a function for each part in threads; return all the images.

    Meanwhile there is a bar in a terminal, and otherwise a line each tenth.
    """
    start = time.perf_counter()
    futures = [threads.submit(function, *part) for part in parts]
    tenth = math.ceil(len(futures) / 10)
    images = []
    with tqdm(futures, desc=HOST, unit="part", leave=False, disable=None) as bar:
        for number, future in enumerate(bar, start=1):
            images += future.result()
            if bar.disable and number % tenth == 0:
                seconds = time.perf_counter() - start
                say(f"{done} {number / len(parts):.0%} after {seconds:.0f} s")
    return images


def remove_abandoned() -> None:
    """Remove the folders that job.sh has made in /tmp for ended jobs of this user.

    Where Slurm ends a job, as in a preemption, it cannot: 150 GB would stay.
    """
    folders = list(Path("/tmp").glob("slurm-job-*"))
    mine = os.environ.get("SLURM_JOB_ID")
    if mine is None:
        return
    # Jobs on other nodes, too: some share their /tmp.
    command = ["squeue", "--noheader", "--all", "--format=%A", f"--user={os.geteuid()}"]
    env = {name: os.environ[name] for name in os.environ if "SQUEUE_" not in name}
    try:
        jobs = subprocess.check_output(command, env=env, text=True).split()
        for folder in folders:
            job = folder.name.removeprefix("slurm-job-")
            # Without this job, the answer is no list of the jobs.
            ended = job.isdecimal() and job not in jobs and mine in jobs
            if ended and folder.lstat().st_uid == os.geteuid():
                shutil.rmtree(folder, ignore_errors=True)
                say(f"removed {folder}, left by a job of yours that has ended")
    except (OSError, subprocess.CalledProcessError):
        pass  # squeue says why, or another job has just removed it


def say(line: str) -> None:
    # In one piece: other nodes may write there, too.
    sys.stdout.write(f"{HOST}: {line}\n")
    sys.stdout.flush()


def fail(message: str, status: int = 1) -> NoReturn:
    """End this process with one line that says why."""
    sys.stderr.write(f"prepare_data.py: error: {message}\n")
    sys.exit(status)


if __name__ == "__main__":
    main()
