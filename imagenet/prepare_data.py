"""Stage ImageNet, Tiny ImageNet or an archive of your own on a node's disk.

The archives are copied as they are, and an index says where in them every image lies.
Training reads the images from there: no million files.
"""

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
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
stopping = threading.Event()  # something has failed: threads are to end
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
    if args.extract and args.resize:
        parser.error(
            "--extract and --resize are two steps: extract what --resize has written"
        )
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
    stats = {path.name: path.stat() for path in source.paths()}
    files = {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}
    wanted = {"files": files, "extract": args.extract, "resize": args.resize}
    remove_abandoned()
    if is_staged(args.data_dir, wanted):
        return say(f"{args.data_dir} is staged already")
    folder = make_folder(args.data_dir)
    threads = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    try:
        if args.extract or args.resize:
            images, archive_of = convert(source, folder, args.resize, threads)
        else:
            images = list_images(source, threads, copy_to=folder)
            archive_of = {"train": source.train.name, "val": source.val.name}
        summary = write_index(folder, images, wanted | {"archives": archive_of})
        folder.rename(args.data_dir)
    except BaseException:
        stopping.set()
        threads.shutdown(cancel_futures=True)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    seconds = time.perf_counter() - start
    size = sum(stat.st_size for stat in stats.values()) / 1e9
    rate = f"{size:.2f} GB in {seconds:.1f} s, {size / seconds:.2f} GB/s"
    say(f"staged {summary} in {args.data_dir}: {rate}")


def is_staged(data_dir: Path, wanted: dict) -> bool:
    """Is that there, and whole? Raises StagingError if something else is."""
    if not os.path.lexists(data_dir):
        return False
    if data_dir.lstat().st_uid != os.geteuid():
        raise StagingError(
            f"{data_dir} on {HOST} belongs to another user: choose another --data-dir"
        )
    index = data_dir / "index.json"
    if index.exists() and wanted.items() <= json.loads(index.read_text()).items():
        return True
    if any(data_dir.iterdir()):
        raise StagingError(
            f"{data_dir} on {HOST} has something else in it: "
            "choose another --data-dir, or remove it"
        )
    return False


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


def list_images(
    source: Source, threads: ThreadPoolExecutor, copy_to: Path | None = None
) -> list[Member]:
    """Return all images, and copy the archives if there is a folder to copy to."""
    futures = []
    for archive in source.paths():
        start = 0
        size = archive.stat().st_size
        if copy_to:
            with open(copy_to / archive.name, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, size or 1)  # or the disk is full
        for tar in archives.list_class_tars(archive):
            end = tar.offset + tar.size
            call = threads.submit(list_part, archive, start, end, copy_to, tar)
            futures.append(call)
            start = end
        for at in range(start, size, 2**26):
            end = min(at + 2**26, size)
            futures.append(threads.submit(list_part, archive, at, end, copy_to))
    devkit = None
    if source.devkit:
        devkit = archives.read_devkit(source.devkit)  # while the threads copy
    images = follow(futures)
    with open(copy_to / source.val.name if copy_to else source.val, "rb") as file:
        images += archives.list_images(file, source.val, devkit)
    archives.check_images(images, source, devkit)
    return images


def list_part(
    archive: Path,
    start: int,
    end: int,
    copy_to: Path | None,
    class_tar: Member | None = None,
) -> list[Member]:
    """Copy a part of an archive if asked to; return the images if it is a class."""
    path = archive
    if copy_to:
        path = copy_to / archive.name
        copy(archive, path, start, end)
    if class_tar is None:
        return []
    with open(path, "rb") as file:  # from memory: it has just been written
        return archives.list_class(file, archive, class_tar)


def copy(archive: Path, path: Path, start: int, end: int) -> None:
    """Copy a part of an archive to the same place in another file."""
    buffer = memoryview(bytearray(2**20))
    with open(archive, "rb") as source, open(path, "r+b") as target:
        while start < end and not stopping.is_set():
            # Reading and writing release the GIL.
            count = os.preadv(source.fileno(), [buffer[: end - start]], start)
            if count == 0:
                raise StagingError(f"{archive} has become shorter")
            start += os.pwrite(target.fileno(), buffer[:count], start)


def convert(
    source: Source, folder: Path, side: int | None, threads: ThreadPoolExecutor
) -> tuple[list[Member], dict[str, str | None]]:
    """Extract all images or, given a side, write a tar of smaller ones.

    Returns the images, and the archive of each split.
    """
    images = list_images(source, threads)
    function = partial(extract, folder=folder)
    archive_of = {"train": None, "val": None}
    if side:
        tar = tarfile.open(folder / RESIZED, "w", format=tarfile.GNU_FORMAT)
        function = partial(resize, tar=tar, side=side)
        archive_of = {"train": RESIZED, "val": RESIZED}
    futures = []
    for split, archive in (("train", source.train), ("val", source.val)):
        chosen = [image for image in images if image.name.startswith(split)]
        for i in range(0, len(chosen), 200):
            futures.append(threads.submit(function, archive, chosen[i : i + 200]))
    images = follow(futures)
    if side:
        tar.close()
        os.sync()  # it may be read for years, and by other nodes
        with open(folder / RESIZED, "rb") as file:
            images = archives.list_images(file, folder / RESIZED, None)
    return images, archive_of


def extract(archive: Path, images: list[Member], folder: Path) -> list[Member]:
    """Write images to files in class folders."""
    extracted = []
    class_folders = set()
    with open(archive, "rb") as file:
        for image in images:
            if stopping.is_set():
                break
            path = folder / image.name
            if path.parent not in class_folders:
                path.parent.mkdir(parents=True, exist_ok=True)
                class_folders.add(path.parent)
            path.write_bytes(archives.read_member(file, image))
            extracted.append(Member(image.name, 0, image.size))
    return extracted


def resize(
    archive: Path, images: list[Member], tar: tarfile.TarFile, side: int
) -> list[Member]:
    """Add images to a tar, their shorter sides made `side`."""
    with open(archive, "rb") as file:
        for image in images:
            if stopping.is_set():
                break
            try:
                data = shrink(archives.read_member(file, image), side)
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                raise StagingError(
                    f"{archive}: cannot decode image {image.name}: {reason}"
                ) from None
            header = tarfile.TarInfo(image.name)
            header.size = len(data)
            with appending:
                tar.addfile(header, io.BytesIO(data))
                tar.members.clear()  # it would keep a kilobyte of each
    return []


def shrink(data: bytes, side: int) -> bytes:
    """Return a JPEG whose shorter side is `side`, or the image if it is no larger."""
    import torch
    from torchvision.io import decode_image, encode_jpeg
    from torchvision.transforms.v2 import functional

    torch.set_num_threads(1)  # there is a thread for each CPU, outside of PyTorch
    # All of this releases the GIL.
    pixels = decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8), "RGB")
    if min(pixels.shape[1:]) <= side:
        return data
    pixels = functional.to_dtype(pixels, torch.uint8, scale=True)  # a PNG's 16 bits
    pixels = functional.resize(pixels, [side], antialias=True)
    return encode_jpeg(pixels, quality=90).numpy().tobytes()


def write_index(folder: Path, images: list[Member], staged: dict) -> str:
    """Write where the images are, for data.py; return how many they are.

    train.npy and val.npy have a row for each image, in the order of classes and names:
    its label, name, offset and size in the archive and, if it is deflated there, its
    size there as `packed`. index.json has the names of the classes and the rest.
    """
    rows = {"train": [], "val": []}
    for name, offset, size, packed in images:
        split, class_name, name = name.split("/", 2)
        rows[split].append((class_name, name.encode(), offset, size, packed))
    classes = sorted({class_name for class_name, *_ in rows["train"]})
    label_of = {class_name: label for label, class_name in enumerate(classes)}
    for split in rows:
        longest = max(len(name) for _, name, *_ in rows[split])
        index = np.array(
            [(label_of[class_name], *row) for class_name, *row in sorted(rows[split])],
            [
                ("label", "i4"),
                ("name", f"S{longest}"),
                ("offset", "i8"),
                ("size", "i8"),
                ("packed", "i8"),
            ],
        )
        np.save(folder / f"{split}.npy", index)
    (folder / "index.json").write_text(json.dumps(staged | {"classes": classes}))
    counts = f"{len(rows['train'])} + {len(rows['val'])}"
    return f"{counts} images of {len(classes)} classes"


def follow(futures: list[Future]) -> list[Member]:
    """Wait for threads; return their images.

    Meanwhile there is a bar in a terminal, and otherwise a line each tenth.
    """
    start = time.perf_counter()
    images = []
    with tqdm(futures, desc=HOST, unit="part", leave=False, disable=None) as bar:
        for done, future in enumerate(bar, start=1):
            images += future.result()
            tenths = 10 * done // len(futures)
            if bar.disable and 10 * (done - 1) // len(futures) < tenths < 10:
                say(f"{tenths}0% after {time.perf_counter() - start:.0f} s")
    return images


def remove_abandoned() -> None:
    """Remove the folders that job.sh has made in /tmp for ended jobs of this user.

    Where Slurm ends a job, as in a preemption, it cannot: 150 GB would stay.
    """
    folders = {
        path.name.removeprefix("slurm-job-"): path
        for path in Path("/tmp").glob("slurm-job-*")
        if path.lstat().st_uid == os.geteuid()
    }
    # Jobs on other nodes, too: some share their /tmp.
    command = ["squeue", "--noheader", "--all", "--format=%A", f"--user={os.geteuid()}"]
    env = {name: os.environ[name] for name in os.environ if "SQUEUE_" not in name}
    try:
        answer = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return
    jobs = answer.stdout.split()
    # Without this job, the answer is no list of the jobs.
    if os.environ.get("SLURM_JOB_ID") in jobs:
        for job in folders.keys() - jobs:
            shutil.rmtree(folders[job], ignore_errors=True)
            say(f"removed {folders[job]}, left by a job of yours that has ended")


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
