"""Stage ImageNet, Tiny ImageNet or an archive of your own on a node's disk.

The archives are copied as they are, and an index says where in them every image lies.
Training reads the images from there: no million files.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import archives
import numpy as np
from archives import HOST, Member, Source, StagingError, say

# torchvision 0.29 hands decoding over to another package,
# and would say so at every image.
warnings.filterwarnings(
    "ignore", "The image decoding and encoding capabilities", DeprecationWarning
)

threads = ThreadPoolExecutor(len(os.sched_getaffinity(0)))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
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
        help="write images.zip, with shorter sides of so many pixels",
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    try:
        stage(args)
    except (StagingError, OSError) as error:
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
    remove_abandoned()
    if is_staged(args.data_dir, wanted):
        return say(f"{args.data_dir} is staged already")
    data_dir = args.data_dir.resolve()
    folder = make_folder(data_dir)
    try:
        if args.extract:
            images = extract(source, folder, args.resize)
        elif args.resize:
            source = resize(source, folder, args.resize)
            images = list_images(source)
        else:
            images = list_images(source, copy_to=folder)
        wanted["archives"] = {"train": source.train.name, "val": source.val.name}
        write_index(folder, images, wanted)
        # If nodes share this disk, another one may have been faster.
        if not is_staged(data_dir, wanted):
            folder.rename(data_dir)
    finally:
        # After an error, threads may still be writing there.
        threads.shutdown(cancel_futures=True)
        shutil.rmtree(folder, ignore_errors=True)
    seconds = time.perf_counter() - start
    say(f"staged {len(images)} images in {data_dir} after {seconds:.1f} s")


def is_staged(data_dir: Path, wanted: dict) -> bool:
    """Is that there, and whole? Raises StagingError if something else is."""
    if not any(data_dir.glob("*")):
        return False
    try:
        found = json.loads((data_dir / "index.json").read_text())
    except (OSError, ValueError):  # there is none, or the node went down meanwhile
        found = {}
    if not wanted.items() <= found.items():
        raise StagingError(
            "it has something else in it: choose another --data-dir, or remove it"
        )
    return True


def make_folder(data_dir: Path) -> Path:
    """Make a folder beside data_dir, which gets that name when it is whole.

    Such folders of processes that are gone from this node, killed, are removed.
    """
    folder = data_dir.with_name(f"{data_dir.name}.unfinished-{HOST}.{os.getpid()}")
    data_dir.parent.mkdir(parents=True, exist_ok=True)
    for path in data_dir.parent.glob(f"*.unfinished-{HOST}.*"):
        if not os.path.exists(f"/proc/{path.suffix[1:]}"):
            shutil.rmtree(path, ignore_errors=True)
    folder.mkdir(mode=0o700)
    return folder


def list_images(source: Source, copy_to: Path | None = None) -> list[Member]:
    """Return all images, and copy the archives if there is a folder to copy to."""
    reading = threads.submit(archives.read_devkit, source.devkit)
    parts = []
    for archive in source.paths():
        path = archive
        if copy_to:
            path = copy_to / archive.name
            with open(path, "wb") as file:
                # Nothing is copied yet, and a disk that is too small fails here.
                os.posix_fallocate(file.fileno(), 0, archive.stat().st_size or 1)
        parts += [(archive, path, *part) for part in archives.list_parts(archive)]
    images = run("copied" if copy_to else "listed", copy_part, parts)
    devkit = reading.result()
    with open(copy_to / source.val.name if copy_to else source.val, "rb") as file:
        images += archives.list_images(file, devkit)
    archives.check_images(images, source, devkit)
    return images


def copy_part(
    archive: Path, path: Path, start: int, end: int, class_tar: Member | None
) -> list[Member]:
    """Copy a part of an archive to another path; return its images if it is a class."""
    if path != archive:
        with open(archive, "rb") as source, open(path, "r+b") as copy:
            copy.seek(start)
            while start < end:
                count = os.sendfile(copy.fileno(), source.fileno(), start, end - start)
                if count == 0:
                    raise StagingError(f"{archive.name} has become shorter")
                start += count
    if class_tar is None:
        return []
    with open(path, "rb") as file:  # from memory, if it has just been copied
        return archives.list_class(file, class_tar)


def extract(source: Source, folder: Path, side: int | None) -> list[Member]:
    """Write the images to files in class folders, smaller if there is a `side`."""
    images = list_images(source)
    for class_folder in {os.path.dirname(image.name) for image in images}:
        os.makedirs(folder / class_folder, exist_ok=True)

    def write(name: str, data: bytes) -> None:
        # Refuse two images of one name, as of cat/1.jpg in two folders.
        with open(f"{folder}/{name}", "xb") as file:
            file.write(data)

    return convert(source, images, side, write)


def resize(source: Source, folder: Path, side: int) -> Source:
    """Write the images to a zip, smaller."""
    path = folder / "images.zip"
    one_at_a_time = threading.Lock()
    with zipfile.ZipFile(path, "w") as archive:

        def write(name: str, data: bytes) -> None:
            with one_at_a_time:
                archive.writestr(name, data)

        convert(source, list_images(source), side, write)
    return Source(path, path)


def convert(
    source: Source, images: list[Member], side: int | None, write: Callable
) -> list[Member]:
    """Call write(name, data) for each image, in threads; return the images."""

    def convert_some(some: list[Member]) -> list[Member]:
        with open(source.train, "rb") as train, open(source.val, "rb") as val:
            for image in some:
                file = train if image.name.startswith("train/") else val
                data = archives.read_member(file, image, image.size)
                if len(data) < image.size:
                    raise StagingError(f"it is damaged at {image.name}")
                if side:
                    data = shrink(data, side, image.name)
                write(image.name, data)
        return some

    parts = [(images[i : i + 200],) for i in range(0, len(images), 200)]
    return run("converted", convert_some, parts)


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
    pixels = functional.resize(pixels, [side])
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
    """Call a function for each part in threads; return all the images."""
    futures = [threads.submit(function, *part) for part in parts]
    tenth = len(parts) // 10 + 1
    images = []
    for number, future in enumerate(futures, start=1):
        images += future.result()
        if number % tenth == 0:
            say(f"{done} {number / len(parts):.0%}")
    return images


def remove_abandoned() -> None:
    """Remove the folders that job.sh has made in /tmp for ended jobs of this user.

    If Slurm ends the job, as in a preemption, job.sh cannot: 150 GB would stay.
    """
    if "SLURM_JOB_ID" not in os.environ:
        return
    # Listed first: a job that starts after squeue may make one.
    folders = list(Path("/tmp").glob("slurm-job-*"))
    command = ["squeue", "--me", "--noheader", "--all", "--format=%A"]
    # SQUEUE_PARTITION, say, would hide jobs.
    env = {name: os.environ[name] for name in os.environ if "SQUEUE_" not in name}
    try:
        jobs = subprocess.check_output(command, env=env, text=True).split()
        if os.environ["SLURM_JOB_ID"] not in jobs:
            return  # without this job, it is no list of the jobs here
        for folder in folders:
            job = folder.name.removeprefix("slurm-job-")
            ended = job.isdecimal() and job not in jobs
            if ended and folder.lstat().st_uid == os.geteuid():
                shutil.rmtree(folder, ignore_errors=True)
                say(f"removed {folder}, left by a job of yours that has ended")
    except (OSError, subprocess.CalledProcessError):
        pass  # squeue says why, or another job has just removed it


if __name__ == "__main__":
    main()
