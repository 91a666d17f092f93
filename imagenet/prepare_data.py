"""Stage ImageNet, Tiny ImageNet or an archive of your own on a node's disk.

The archives are copied as they are, and an index says where in them every image lies.
Training reads the images from there, so there are no million small files.
"""

import argparse
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import archives
import numpy as np
from archives import HOST, Member, Source, StagingError


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--source",
        type=lambda path: Path(path).expanduser(),
        default=os.environ.get("IMAGENET_DIR", "."),
        help="folder of archives, or a .zip or .tar of class folders",
    )
    add(
        "--data-dir",
        type=lambda path: Path(path).expanduser(),
        default=find_data_dir(),
        help="where to stage, on the node's own disk",
    )
    add(
        "--extract",
        action="store_true",
        help="make the usual tree of class folders, one file per image",
    )
    add(
        "--resize",
        type=int,
        help="shrink images to shorter sides of this many pixels",
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    logging.basicConfig(
        level=logging.INFO, format=f"{HOST}: %(message)s", stream=sys.stdout
    )
    try:
        remove_abandoned()
        stage(args)
    except (StagingError, OSError, ValueError, zlib.error) as error:
        sys.exit(
            "prepare_data.py: error: "
            f"cannot stage {args.source} in {args.data_dir} on {HOST}: {error}"
        )
    except KeyboardInterrupt:
        sys.exit("prepare_data.py: error: interrupted")


def stage(args: argparse.Namespace) -> None:
    """Stage the source in the form asked for, unless it is there already."""
    start = time.perf_counter()
    source = archives.find_source(args.source)
    files = {path.name: path.stat().st_mtime_ns for path in source.paths()}
    wanted = {"files": files, "extract": args.extract, "resize": args.resize}
    if is_staged(args.data_dir, wanted):
        return logging.info(f"{args.data_dir} is staged already")
    data_dir = args.data_dir.resolve()
    data_dir.parent.mkdir(parents=True, exist_ok=True)
    # It gets its name when it is whole.
    with tempfile.TemporaryDirectory(
        dir=data_dir.parent, prefix=f"{data_dir.name}.unfinished-"
    ) as name:
        folder = Path(name)
        images = fill(folder, source, wanted)
        # Where the images are, for data.py.
        wanted["classes"], indices = archives.make_index(images)
        for split, index in indices.items():
            np.save(folder / f"{split}.npy", index)
        (folder / "index.json").write_text(json.dumps(wanted))
        # If nodes share this disk, another one may have been faster.
        if not is_staged(data_dir, wanted):
            folder.rename(data_dir)
    seconds = time.perf_counter() - start
    logging.info(f"staged {len(images)} images in {data_dir} after {seconds:.1f} s")


def fill(folder: Path, source: Source, wanted: dict) -> list[Member]:
    """Put the images there in the form that is wanted, and return them."""
    side = wanted["resize"]
    if wanted["extract"]:
        images = list_images(source)
        for class_folder in {os.path.dirname(image.name) for image in images}:
            os.makedirs(folder / class_folder, exist_ok=True)

        def write(name: str, content: bytes) -> None:
            (folder / name).write_bytes(content)

        convert(source, images, side, write)
    elif side:
        path = folder / "images.zip"
        one_at_a_time = threading.Lock()
        with zipfile.ZipFile(path, "w") as archive:

            def write(name: str, content: bytes) -> None:
                with one_at_a_time:
                    archive.writestr(name, content)

            convert(source, list_images(source), side, write)
        source = Source(path, path)
        images = list_images(source)
    else:
        images = list_images(source, copy_to=folder)
    wanted["archives"] = {"train": source.train.name, "val": source.val.name}
    return images


def is_staged(data_dir: Path, wanted: dict) -> bool:
    """Is that there, and whole? Raises StagingError if something else is."""
    if not any(data_dir.glob("*")):
        return False
    try:
        found = dict(json.loads((data_dir / "index.json").read_text()))
    except (OSError, TypeError, ValueError):  # none, another's, or the node went down
        found = {}
    if wanted.items() <= found.items():
        return True
    if archives.job_folder() and data_dir == find_data_dir():
        # Slurm may have ended an earlier start of this job while it removed the data.
        logging.info(f"{data_dir} is not whole, or of other archives: stages it again")
        shutil.rmtree(data_dir)
        return False
    raise StagingError(
        "it has something else in it: choose another --data-dir, or remove it"
    )


def list_images(source: Source, copy_to: Path | None = None) -> list[Member]:
    """Return all images, and copy the archives if there is a folder to copy to."""
    devkit = archives.read_devkit(source.devkit)
    parts = []
    for archive in source.paths():
        path = archive
        if copy_to:
            path = copy_to / archive.name
            with open(path, "wb") as file:
                # Nothing is copied yet, and a disk that is too small fails here.
                os.posix_fallocate(file.fileno(), 0, archive.stat().st_size or 1)
        parts += [(archive, path, *part) for part in archives.list_parts(archive)]
    images = []
    doing = "copied" if copy_to else "listed"
    for found in run_in_threads(doing, lambda part: copy_part(*part), parts):
        images += found
    with open(copy_to / source.val.name if copy_to else source.val, "rb") as file:
        images += archives.list_images(file, devkit)
    if devkit:
        archives.check_imagenet(images, devkit)
    return images


def run_in_threads(doing: str, function: Callable, parts: list) -> list:
    """Return what the function returns for each part; say how far it is.

    After an error, no part begins any more, and this waits for those that have begun:
    they write to what is closed, or removed, next.
    """
    results = []
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for result in pool.map(function, parts):
            results.append(result)
            if len(results) % (len(parts) // 10 + 1) == 0:
                logging.info(f"{doing} {len(results) / len(parts):.0%}")
    return results


def copy_part(
    archive: Path, path: Path, start: int, end: int, class_tar: Member | None
) -> list[Member]:
    """Copy a part of an archive to another path; return its images if it is a class."""
    if path != archive:
        with open(archive, "rb") as source, open(path, "r+b") as copy:
            source.seek(start)
            copy.seek(start)
            while start < end:
                some = source.read(min(2**20, end - start))
                if not some:
                    raise StagingError(f"{archive.name} has become shorter")
                copy.write(some)
                start += len(some)
    if class_tar is None:
        return []
    with open(path, "rb") as file:  # from memory, if it has just been copied
        return archives.list_class(file, class_tar)


def convert(
    source: Source,
    images: list[Member],
    side: int | None,
    write: Callable[[str, bytes], None],
) -> None:
    """Write each image, smaller if there is a side, in threads."""
    if side:
        import data  # takes seconds
        import torch

        torch.set_num_threads(1)  # there is one of these threads for each CPU

    def convert_some(some: list[Member]) -> None:
        with open(source.train, "rb") as train, open(source.val, "rb") as val:
            for image in some:
                file = train if image.name.startswith("train/") else val
                try:
                    content = archives.read_member(file, image)
                    if side:  # this releases the GIL
                        content = data.shrink(content, side)
                except Exception as error:  # of several libraries
                    raise StagingError(
                        f"cannot decode image {file.name}: {image.name} on {HOST}: "
                        f"{error}"
                    ) from None
                write(image.name, content)

    parts = [images[i : i + 200] for i in range(0, len(images), 200)]
    run_in_threads("converted", convert_some, parts)


def find_data_dir() -> Path:
    """Return where this job's data goes, on the node's own disk if there is one."""
    folder = archives.job_folder() or os.environ.get("SLURM_TMPDIR", ".")
    return Path(folder) / "data"


def remove_abandoned() -> None:
    """Remove the folders that job.sh has made on this disk for ended jobs of this user.

    If Slurm ends the job, as in a preemption, job.sh cannot: 150 GB would stay.
    """
    # Another cluster's jobs have numbers of their own, and may share the disk.
    cluster = os.environ.get("SLURM_CLUSTER_NAME")
    if "SLURM_JOB_ID" not in os.environ or cluster is None:
        return
    # Listed first: a job that starts after squeue may make one.
    disk = Path(os.environ.get("LOCAL_JOB_DIR", "/tmp/job")).parent
    folders = list(disk.glob("slurm-job-*"))
    command = ["squeue", "--me", "--noheader", "--all", "--array", "--format=%A"]
    # SQUEUE_PARTITION, say, would hide jobs.
    env = {name: os.environ[name] for name in os.environ if "SQUEUE_" not in name}
    try:
        jobs = subprocess.check_output(command, env=env, text=True).split()
        if os.environ["SLURM_JOB_ID"] not in jobs:
            return  # without this job, it is no list of the jobs here
        for folder in folders:
            name = rf"slurm-job-(\d+)-{re.escape(cluster)}(\.\d+)?"
            found = re.fullmatch(name, folder.name)
            ended = found and found[1] not in jobs
            if ended and folder.lstat().st_uid == os.geteuid():
                shutil.rmtree(folder, ignore_errors=True)
                if not folder.exists():
                    logging.info(f"removed {folder}, which an ended job of yours left")
    except (OSError, subprocess.CalledProcessError):
        pass  # squeue says why, or another job has just removed it


if __name__ == "__main__":
    main()
