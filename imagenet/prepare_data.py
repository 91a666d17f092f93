"""Stage ImageNet, or a zip or tar of your own, on a node's disk.

The archives are copied as they are, and an index says where in them every image lies.
Training reads the images from there, so there are no million small files. Of a tree of
class folders, only the index is made, once on each node.
"""

import argparse
import functools
import json
import logging
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import archives
import numpy as np
from archives import DEVKIT, NODE, TRAIN, VAL, Member, StagingError

PART = 2**24  # bytes that a thread copies at a time


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--source",
        type=absolute_path,
        default=os.environ.get("IMAGENET_DIR", "."),
        help="folder of ImageNet's archives; class folders, or a .zip or .tar of them",
    )
    disk = archives.job_folder() or os.environ.get("SLURM_TMPDIR") or "."
    add(
        "--data-dir",
        type=absolute_path,
        default=f"{disk}/data",
        help="where to stage, on the node's own disk",
    )
    add("--resize", type=int, help="shrink images to shorter sides of so many pixels")
    add("--max-megapixels", type=int, default=200, help="--resize refuses larger ones")
    args = parser.parse_args()
    if args.resize is not None and args.resize < 1:
        parser.error("--resize is not at least 1")
    return args


def absolute_path(text: str) -> Path:
    return Path(text).expanduser().absolute()


def main() -> None:
    args = parse_args()
    sys.stdout.reconfigure(errors="backslashreplace")  # of another locale, as Latin-1
    logging.basicConfig(
        level=logging.INFO, format=f"{NODE}: %(message)s", stream=sys.stdout
    )
    # By an exception, what is not whole is removed.
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit("prepare_data.py: ended by Slurm")
    )
    try:
        remove_abandoned()
        stage(args)
    except (StagingError, OSError) as error:
        sys.exit(
            "prepare_data.py: error: "
            f"cannot stage {args.source} in {args.data_dir} on {NODE}: {error}"
        )


def stage(args: argparse.Namespace) -> None:
    """Stage the source, unless it is there already."""
    start = time.perf_counter()
    source, data_dir = find_source(args.source), args.data_dir
    files = {}
    for path in source.values():
        files |= when_changed(path)
    wanted = {"files": files, "resize": args.resize}
    data_dir.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    refuse_strangers(data_dir)
    if data_dir.is_symlink():
        data_dir = data_dir.resolve()
        refuse_strangers(data_dir)
    if is_staged(data_dir, wanted):
        return logging.info(f"{data_dir} is staged already")
    make_room(data_dir)
    # The folder, which only this user can read, gets its name when it is whole.
    with tempfile.TemporaryDirectory(
        dir=data_dir.parent, prefix=f"{data_dir.name}.unfinished-"
    ) as name:
        folder = Path(name)
        if args.resize:
            write_index(folder, source, wanted)
            source = resize(folder, args)
        elif not source["train"].is_dir():
            source = copy(source, folder)
        images = write_index(folder, source, wanted)
        try:
            folder.rename(data_dir)
        except OSError:
            # If nodes share this disk, another one may have been faster.
            if not is_staged(data_dir, wanted):
                raise
    seconds = time.perf_counter() - start
    logging.info(f"staged {images} images in {data_dir} after {seconds:.1f} s")


def find_source(path: Path) -> dict[str, Path]:
    """Return ImageNet's archives in a folder, or an archive or tree of both splits."""
    names = {"train": TRAIN, "val": VAL, "devkit": DEVKIT}
    of_imagenet = {part: path / name for part, name in names.items()}
    is_there = [archive.exists() for archive in of_imagenet.values()]
    has_no_class = path.is_dir() and not any(path.glob("*/"))
    # In a tree, torchvision leaves the development kit.
    is_tree = archives.has_splits(path) and not all(is_there)
    if not is_tree and (any(is_there) or has_no_class):
        return of_imagenet
    return {"train": path, "val": path}


def when_changed(path: Path) -> dict[str, int]:
    """Return when an archive was changed, or each folder of a tree."""
    found = [path, *path.glob("*/"), *path.glob("*/*/")]
    return {str(file): file.stat().st_mtime_ns for file in found}


def refuse_strangers(data_dir: Path) -> None:
    """Raise StagingError if another user may have made these folders, as in /tmp."""
    for folder in (data_dir.parent, data_dir):
        anybody_can_write = folder.parent.stat().st_mode & stat.S_IWOTH
        if not anybody_can_write or not os.path.lexists(folder):
            continue
        found = folder.lstat()
        mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
        # The job's own has mode 700. A site's may have others.
        shared = str(folder) == archives.job_folder() and found.st_mode & 0o077
        if shared or not mine:
            raise StagingError(
                f"{folder} is a link, another user's, or open to others: remove it, or "
                "choose another --data-dir"
            )


def is_staged(data_dir: Path, wanted: dict) -> bool:
    """Is that there, and whole?"""
    try:
        found = dict(json.loads((data_dir / "index.json").read_text()))
        sizes = {name: (data_dir / name).stat().st_size for name in found["sizes"]}
    # None, another's, the node went down, or a cleaner has removed something.
    except (OSError, TypeError, ValueError, KeyError):
        return False
    return wanted.items() <= found.items() and sizes == found["sizes"]


def make_room(data_dir: Path) -> None:
    """Remove other data from the job's own folder. Refuse to remove any elsewhere."""
    if not any(data_dir.glob("*")):
        return
    if str(data_dir.parent) != archives.job_folder():
        raise StagingError(
            "it has something else in it: choose another --data-dir, or remove it"
        )
    # Slurm may have ended an earlier start of this job while it removed the data.
    logging.info(f"{data_dir} is not whole, or of other archives: stages it again")
    shutil.rmtree(data_dir)


def copy(source: dict[str, Path], folder: Path) -> dict[str, Path]:
    """Copy the archives to a folder, in parts, and return the copies."""
    parts = []
    for path in dict.fromkeys(source.values()):  # each once: both splits may share it
        size = path.stat().st_size
        with open(folder / path.name, "wb") as file:
            # Nothing is copied yet, and a disk that is too small fails here.
            os.posix_fallocate(file.fileno(), 0, size or 1)
        parts += [(path, start) for start in range(0, size, PART)]

    def copy_part(part: tuple[Path, int]) -> None:
        path, start = part
        with open(path, "rb") as old, open(folder / path.name, "r+b") as new:
            old.seek(start)
            new.seek(start)
            new.write(old.read(PART))

    run_in_threads(copy_part, parts)
    return {part: folder / path.name for part, path in source.items()}


def write_index(folder: Path, source: dict[str, Path], wanted: dict) -> int:
    """Write where the images are, for data.py. Return how many there are."""
    images = list_images(source)
    classes, indices = archives.make_index(images)
    for split, index in indices.items():
        np.save(folder / f"{split}.npy", index)
    names, sizes = {}, {}
    for split in ("train", "val"):
        path = source[split]
        # Without the name of this folder, which changes.
        names[split] = str(path).removeprefix(f"{folder}/")
        if path.parent == folder:
            sizes[names[split]] = path.stat().st_size
    index = wanted | {"classes": classes, "archives": names, "sizes": sizes}
    (folder / "index.json").write_text(json.dumps(index))
    return len(images)


def list_images(source: dict[str, Path]) -> list[Member]:
    """Return all images of the archives."""
    train = source["train"]
    if train.is_dir():
        return archives.list_tree(train)
    members = archives.list_members(train)
    if "devkit" not in source:
        return archives.find_images(members, train.name)
    images = archives.list_val(source["val"], source["devkit"])
    # ImageNet's training set has a tar for each class.
    tars = [member for member in members if member.name.endswith(".tar")]
    list_class = functools.partial(archives.list_class, train)
    for found in run_in_threads(list_class, tars):
        images += found
    archives.check_classes(images, [], "ImageNet")
    return images


def resize(folder: Path, args: argparse.Namespace) -> dict[str, Path]:
    """Write the images of an index to a zip, the large ones smaller, and return it."""
    import data  # takes seconds
    import torch

    torch.set_num_threads(1)  # there is one of these threads for each CPU
    path = folder / "images.zip"
    one_at_a_time = threading.Lock()

    def resize_some(images: data.Images, numbers: np.ndarray) -> None:
        for i in numbers:
            content = data.shrink(images, i, args.resize)  # releases the GIL
            name = images.index["name"][i].decode()
            with one_at_a_time:
                resized.writestr(f"{images.split}/{name}", content)

    with zipfile.ZipFile(path, "w") as resized:
        for split in ("train", "val"):
            images = data.Images(folder, split, args.max_megapixels)
            parts = np.array_split(np.arange(len(images)), len(images) // 200 + 1)
            run_in_threads(functools.partial(resize_some, images), parts)
    return {"train": path, "val": path}


def run_in_threads(function: Callable, parts: Sequence) -> list:
    """Return what the function returns for each part.

    After an error, no part begins any more, and this waits for those that have begun.
    """
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(function, parts))


def remove_abandoned() -> None:
    """Remove the folders that job.sh has made on this disk for ended jobs of this user.

    If Slurm ends the job, as in a preemption, job.sh cannot: 150 GB would stay.
    """
    this_folder, this_job = archives.job_folder(), os.environ.get("SLURM_JOB_ID")
    # Another cluster's jobs have numbers of their own, and may share the disk.
    cluster = re.escape(os.environ.get("SLURM_CLUSTER_NAME", ""))
    job_of = {}
    try:
        for folder in Path(this_folder).parent.glob("slurm-job-*"):
            found = re.fullmatch(rf"slurm-job-(\d+)-{cluster}(\.\w+)?", folder.name)
            mine = folder.lstat().st_uid == os.geteuid()
            if found and mine and found[1] != this_job:
                job_of[folder] = found[1]
        if not this_folder or not job_of:
            return
        # Listed after the folders, which a job that starts meanwhile may make.
        command = ["squeue", "--me", "--noheader", "--all", "--array", "--format=%A"]
        # SQUEUE_PARTITION, say, would hide jobs.
        env = {name: os.environ[name] for name in os.environ if "SQUEUE_" not in name}
        jobs = subprocess.check_output(command, env=env, text=True).split()
        if this_job not in jobs:
            return  # without this job, it is no list of the jobs here
        for folder, job in job_of.items():
            if job not in jobs:
                shutil.rmtree(folder)
                logging.info(f"removed {folder}, which an ended job of yours left")
    except (OSError, subprocess.CalledProcessError):
        pass  # squeue says why, or another job has just removed it


if __name__ == "__main__":
    main()
