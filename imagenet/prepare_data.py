"""Stage ImageNet, Tiny ImageNet or an archive of your own on a node's disk.

Training reads pictures from there. The archives are copied as they are, and an index
says where in them every picture lies: no million files.
"""

import argparse
import collections
import contextlib
import ctypes
import errno
import fcntl
import functools
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import queue
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tarfile
import time
import traceback
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np
from tqdm import tqdm

# torch and scipy are imported where they are used:
# they take seconds, and copying does without torch.
if TYPE_CHECKING:
    from torch import Tensor

# torchvision 0.29 hands decoding over to another package,
# and would say so at every picture.
warnings.filterwarnings(
    "ignore", "The image decoding and encoding capabilities", DeprecationWarning
)

IMAGENET = TRAIN, VALID, DEVKIT = (
    "ILSVRC2012_img_train.tar",  # a tar of a tar for each class
    "ILSVRC2012_img_val.tar",
    "ILSVRC2012_devkit_t12.tar.gz",
)
TINY_IMAGENET = "tiny-imagenet-200.zip"
# The splits' folders, in a tree of class folders.
FOLDERS = {"train": "train", "valid": "val"}
# The splits, by the folder's name.
SPLITS = {
    "train": "train",
    "val": "valid",
    "valid": "valid",
    "validation": "valid",
}
PICTURE_NAMES = (".jpg", ".jpeg", ".png")
PICTURE_STARTS = (b"\xff\xd8\xff", b"\x89PN")  # the first bytes of a JPEG, of a PNG
ZEROS = bytes(1024)  # at the end of a tar
HOST = socket.gethostname().split(".")[0]


class Problem(Exception):
    """What a user can put right; its text is one line that says how."""


class BadPicture(RuntimeError):
    """A picture that cannot be read; its text is one line that names it."""


class Source(NamedTuple):
    layout: str  # "imagenet", "tiny" or "folders"
    archives: list[Path]


class Member(NamedTuple):
    """A file in an archive."""

    name: str
    offset: int  # of its bytes in the archive
    size: int
    packed: int  # its size in the archive if it is deflated there, else 0
    start: bytes  # its first three bytes


class Picture(NamedTuple):
    split: str  # "train" or "valid"
    class_name: str
    name: str
    offset: int
    size: int
    packed: int = 0


class Part(NamedTuple):
    """What a worker does at once: copy a range, or extract or resize pictures."""

    archive: Path
    start: int = 0
    end: int = 0
    # With all pictures of a class of ImageNet's training set.
    class_tar: Member | None = None
    pictures: tuple[Picture, ...] = ()  # of any other archive


class Devkit(NamedTuple):
    """What ImageNet's development kit says of the pictures."""

    train_pictures: dict[str, int]  # by class
    valid_classes: list[str]  # by picture, in the order of their names


def parse_args() -> argparse.Namespace:
    def at_least(minimum: int):
        def number(text: str) -> int:
            value = int(text)
            if value < minimum:
                raise argparse.ArgumentTypeError(
                    f"must be at least {minimum}, not {text}"
                )
            return value

        return number

    parser = argparse.ArgumentParser(
        description=__doc__,
        usage="%(prog)s [options]",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    source = Path(os.environ.get("IMAGENET_DIR", "."))
    data_dir = Path(os.environ.get("SLURM_TMPDIR", ".")) / "data"
    add = parser.add_argument
    add(
        "--source",
        type=Path,
        default=source,
        help="folder of archives, or a .zip or .tar of class folders",
    )
    add(
        "--data-dir",
        type=Path,
        default=data_dir,
        help="where to stage, on the node's own disk",
    )
    add(
        "--extract",
        action="store_true",
        help="make the usual tree of class folders, a file a picture",
    )
    add(
        "--resize",
        type=at_least(1),
        metavar="N",
        help="write smaller archives: shorter sides of N pixels",
    )
    add(
        "--checksums",
        action="store_true",
        help="compare with the published MD5 sums: a second reading",
    )
    add(
        "--workers",
        type=at_least(1),
        default=len(os.sched_getaffinity(0)),
        help="processes",
    )
    add(
        "--release",
        action="store_true",
        help="remove what is staged, unless another job has staged it, too",
    )
    args = parser.parse_args()
    if args.extract and args.resize:
        parser.error(
            "--extract and --resize are two steps: extract what --resize has written"
        )
    return args


def main() -> None:
    args = parse_args()
    try:
        if args.release:
            release(args.data_dir)
        else:
            stage(args)
    except Problem as problem:
        fail(str(problem))
    except WorkerKilled:
        fail(
            f"a worker on {HOST} was killed, for its memory perhaps: "
            "ask for more --mem or fewer --workers"
        )
    except OSError as error:
        fail(f"{error.filename or args.data_dir} on {HOST}: {error.strerror or error}")
    except KeyboardInterrupt:
        sys.exit(130)


def stage(args: argparse.Namespace) -> None:
    """Stage the source in the form asked for, unless it is there already."""
    data_dir, start = args.data_dir, time.perf_counter()
    source = find_source(args.source)
    remove_abandoned()
    files = [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns)
        for path in source.archives
    ]
    form = (
        "extracted"
        if args.extract
        else f"resized {args.resize}"
        if args.resize
        else "copied"
    )
    wanted = {"form": form, "sources": [list(file) for file in files]}
    with lock(data_dir, create=True):
        mark = read_json(data_dir / "staged.json")
        crashed = mark and mark["host"] == HOST and mark["boot"] != boot_id()
        if mark and not crashed:
            if wanted.items() <= mark.items():
                register_job(data_dir)
                return say(f"{data_dir} is staged already: {describe(mark)}")
            raise Problem(
                f"{data_dir} on {HOST} holds {describe(mark)}, "
                "from other archives or in another form than asked for: "
                "choose another --data-dir, or remove that with --release"
            )
        # What a killed staging has left, or a node that went down.
        discard(data_dir)
        try:
            mark = wanted | write(args, source, form)
            write_json(data_dir / "staged.json", mark)
        except BaseException as error:
            discard(data_dir)
            if isinstance(error, OSError) and error.errno in (
                errno.ENOSPC,
                errno.EDQUOT,
            ):
                raise Problem(
                    f"{data_dir} on {HOST} is full: choose another --data-dir"
                ) from None
            raise
        register_job(data_dir)
    size, seconds = sum(size for _, size, _ in files), time.perf_counter() - start
    rate = f"{size / 1e9:.2f} GB in {seconds:.1f} s, {size / seconds / 1e9:.2f} GB/s"
    say(f"staged {describe(mark)} in {data_dir}: {rate}")


def write(args: argparse.Namespace, source: Source, form: str) -> dict:
    """Write all but the mark of being whole, and return what that is to say."""
    data_dir, archives = args.data_dir, source.archives
    if form == "extracted":
        made, archive_of = list(FOLDERS.values()), dict.fromkeys(FOLDERS)
    else:
        keep = form == "copied" or source.layout == "imagenet"
        made = [archive.name if keep else f"{archive.stem}.tar" for archive in archives]
        archive_of = {"train": made[0], "valid": made[1 % len(made)]}
    made += ["train.npy", "valid.npy"]
    for name in made:
        if os.path.lexists(data_dir / name):
            raise Problem(
                f"{data_dir} on {HOST} has a {name} of somebody else's: "
                "choose another --data-dir"
            )
    write_json(data_dir / "staging.json", {"made": made})  # for `discard`
    # First of all: to flush a file later is to wait for all the data.
    flush(data_dir / "staging.json")
    if args.resize:
        # Once, before the workers are forked.
        import torchvision.transforms.v2  # noqa: F401
    with WorkerPool(args.workers) as pool:
        sums = pool.map(md5, archives if args.checksums else [])
        if form == "copied":
            pictures = copy(pool, source, data_dir)
        else:
            pictures = convert(pool, source, data_dir, args.resize)
        if args.checksums:
            compare_checksums(archives, sums)
    classes = sorted(
        {picture.class_name for picture in pictures if picture.split == "train"}
    )
    splits = {}
    for split, archive in archive_of.items():
        index = make_index(
            [picture for picture in pictures if picture.split == split],
            classes,
            archives,
        )
        with open(part_of(data_dir / f"{split}.npy"), "wb") as file:
            np.save(file, index)
        mark = fingerprint(index, classes)
        splits[split] = {
            "archive": archive,
            "pictures": len(index),
            "fingerprint": mark,
        }
    for name in made:
        if args.resize:  # for other nodes, too, if it is on a network disk
            flush(part_of(data_dir / name))
        os.rename(part_of(data_dir / name), data_dir / name)
    # What has not reached the disk is lost when a node goes down,
    # and the mark may survive it.
    host = None if args.resize else HOST
    return {
        "host": host,
        "boot": boot_id(),
        "made": made,
        "splits": splits,
        "classes": classes,
    }


def copy(pool: "WorkerPool", source: Source, data_dir: Path) -> list[Picture]:
    """Copy the archives; index a class of ImageNet's training set once it is copied."""
    sizes = [archive.stat().st_size for archive in source.archives]
    check_space(data_dir, sum(sizes))
    parts = []
    for archive, size in zip(source.archives, sizes, strict=True):
        with open(part_of(data_dir / archive.name), "wb") as file:
            file.truncate(size)
        if source.layout == "imagenet" and archive.name == TRAIN:
            class_tars = list_members(archive)
            ends = [
                class_tar.offset + class_tar.size for class_tar in class_tars[:-1]
            ] + [size]
            parts += map(Part, itertools.repeat(archive), [0, *ends], ends, class_tars)
        else:
            parts += [
                Part(archive, at, min(at + 2**26, size)) for at in range(0, size, 2**26)
            ]
    start, copied = (
        time.perf_counter(),
        pool.map(functools.partial(copy_part, data_dir=data_dir), parts),
    )
    devkit = None
    if source.layout == "imagenet":
        devkit = read_devkit(source.archives[2])  # while the workers copy
        check_classes(
            source, devkit, [part.class_tar.name for part in parts if part.class_tar]
        )
    copied = follow(copied, [part.end - part.start for part in parts], "B", start)
    pictures = list(itertools.chain.from_iterable(copied))
    pictures += list_pictures(source, devkit, data_dir)
    check_counts(source, devkit, pictures)
    return pictures


def copy_part(part: Part, data_dir: Path) -> list[Picture]:
    """Copy a part of an archive; return its pictures if it is a class of ImageNet."""
    buffer = memoryview(bytearray(2**17))  # stays in the CPU's cache
    target = part_of(data_dir / part.archive.name)
    with opened(part.archive) as source_file, opened(target, os.O_RDWR) as target_file:
        at = part.start
        while at < part.end:
            count = os.preadv(source_file, [buffer[: part.end - at]], at)
            if count == 0:
                raise Problem(
                    f"{part.archive} ends early, at byte {at}: fetch it again"
                )
            at += os.pwrite(target_file, buffer[:count], at)
        # Read from memory, where it has just been written.
        return list_class(target_file, part) if part.class_tar else []


def convert(
    pool: "WorkerPool", source: Source, data_dir: Path, side: int | None
) -> list[Picture]:
    """Extract all pictures; or, given a `side`, write archives of resized ones.

    Their shorter sides have that length.
    """
    parts, devkit = [], None
    if source.layout == "imagenet":
        devkit = read_devkit(source.archives[2])
        parts = [
            Part(source.archives[0], class_tar=member)
            for member in list_members(source.archives[0])
        ]
        check_classes(source, devkit, [part.class_tar.name for part in parts])
    listed = list_pictures(source, devkit)
    archive = source.archives[1] if devkit else source.archives[0]
    parts += [
        Part(archive, pictures=tuple(listed[i : i + 200]))
        for i in range(0, len(listed), 200)
    ]
    counts = [
        devkit.train_pictures[Path(part.class_tar.name).stem]
        if part.class_tar
        else len(part.pictures)
        for part in parts
    ]
    size = sum(path.stat().st_size for path in source.archives)
    if side:  # half a byte a pixel of a square
        check_space(data_dir, min(size, sum(counts) * side**2 // 2))
    else:
        check_space(data_dir, size, files=sum(counts))
    start = time.perf_counter()
    converted = pool.map(
        functools.partial(convert_part, data_dir=data_dir, side=side), parts
    )
    converted = follow(converted, counts, " pictures", start)
    if side:
        pictures = write_resized(source, data_dir, parts, converted)
    else:
        pictures = [picture for pictures, _ in converted for picture in pictures]
    check_counts(source, devkit, pictures)
    return pictures


def convert_part(
    part: Part, data_dir: Path, side: int | None
) -> tuple[list[Picture], bytes]:
    """Extract pictures, or return a piece of a tar of resized ones, with offsets."""
    converted, piece, folders = [], io.BytesIO(), set()
    with opened(part.archive) as file:
        for picture in list_class(file, part) if part.class_tar else part.pictures:
            split, class_name, name, *place = picture
            try:
                data = read_bytes(file, *place)
                data = shrink(data, side) if side else data
            except (EOFError, RuntimeError, zlib.error) as error:
                raise Problem(
                    f"{part.archive}: cannot read {name}: {first_line(error)}"
                ) from None
            if side:
                path = (
                    name
                    if part.archive.name in IMAGENET
                    else f"{FOLDERS[split]}/{class_name}/{name}"
                )
                piece.write(tar_header(path, len(data)))
                converted.append(
                    Picture(split, class_name, name, piece.tell(), len(data))
                )
                piece.write(data + bytes(-len(data) % 512))
                continue
            path = f"{data_dir}/{FOLDERS[split]}.part/{class_name}/{name}"
            folder = os.path.dirname(path)
            if folder not in folders:
                os.makedirs(folder, exist_ok=True)
                folders.add(folder)
            with open(path, "wb") as target:
                target.write(data)
            converted.append(Picture(split, class_name, name, 0, len(data)))
    return converted, piece.getvalue()


def write_resized(
    source: Source, data_dir: Path, parts: list[Part], converted: Iterable
) -> list[Picture]:
    """Write the workers' pieces in order, laid out as the source; return pictures."""
    written, files = [], {}
    with contextlib.ExitStack() as stack:
        for part, (pictures, piece) in zip(parts, converted, strict=True):
            name = (
                part.archive.name
                if source.layout == "imagenet"
                else f"{part.archive.stem}.tar"
            )
            if name not in files:
                files[name] = stack.enter_context(open(part_of(data_dir / name), "wb"))
            file = files[name]
            if part.class_tar:
                piece += ZEROS
                file.write(tar_header(part.class_tar.name, len(piece)))
            written += [
                picture._replace(offset=file.tell() + picture.offset)
                for picture in pictures
            ]
            file.write(piece)
        for file in files.values():
            file.write(ZEROS)
    if source.layout == "imagenet":
        shutil.copyfile(source.archives[2], part_of(data_dir / DEVKIT))
    return written


def tar_header(name: str, size: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size = size
    return member.tobuf(tarfile.GNU_FORMAT)


def shrink(data: bytes, side: int) -> bytes:
    """Return a JPEG whose shorter side is `side`, or the picture if it is no larger."""
    import torch
    from torchvision.io import encode_jpeg
    from torchvision.transforms.v2 import functional

    torch.set_num_threads(1)  # there is a process for every CPU
    image = decode(data)
    if min(image.shape[1:]) <= side:
        return data
    return (
        encode_jpeg(functional.resize(image, [side], antialias=True), quality=90)
        .numpy()
        .tobytes()
    )


def find_source(path: Path) -> Source:
    """Return the archives that `path` names or has."""
    if path.name in IMAGENET:
        path = path.parent
    if path.is_dir():
        if found := [name for name in IMAGENET if (path / name).exists()]:
            if missing := set(IMAGENET) - set(found):
                raise Problem(
                    f"{path} has {found[0]} but no {min(missing)}, "
                    "which is needed as well"
                )
            return Source("imagenet", [path / name for name in IMAGENET])
        found = [file for file in path.iterdir() if file.suffix in (".zip", ".tar")]
        found = [file for file in found if file.name == TINY_IMAGENET] or found
        if len(found) != 1:
            raise Problem(
                f"{path} on {HOST} has neither {TRAIN} nor {TINY_IMAGENET}, "
                f"and {len(found)} other archives: name one, "
                "or the folder of ImageNet's, with --source or IMAGENET_DIR"
            )
        path = found[0]
    if not path.exists():
        raise Problem(
            f"there is no {path} on {HOST}: "
            "give the archives with --source or IMAGENET_DIR"
        )
    if path.suffix not in (".zip", ".tar"):
        raise Problem(
            f"{path} is no .zip and no .tar: "
            "unpack a compressed tar, pictures do not shrink"
        )
    return Source("tiny" if path.name == TINY_IMAGENET else "folders", [path])


def list_pictures(
    source: Source, devkit: Devkit | None, copied_to: Path | None = None
) -> list[Picture]:
    """Return all pictures but ImageNet's for training, from the source or its copy."""
    archive = source.archives[1] if devkit else source.archives[0]
    members = list_members(
        archive, part_of(copied_to / archive.name) if copied_to else None
    )
    if devkit:
        members.sort()
        if len(members) != len(devkit.valid_classes):
            raise Problem(
                f"{archive} has {len(members)} pictures "
                f"and {DEVKIT} classes for {len(devkit.valid_classes)}"
            )
        names = [member.name.split("/")[-1] for member in members]
        places = [
            ("valid", *place) for place in zip(devkit.valid_classes, names, strict=True)
        ]
    elif source.layout == "tiny":
        places = arrange_tiny(members, archive)
    else:
        places = arrange_folders(members, archive)
    pictures = []
    for place, member in zip(places, members, strict=True):
        if place:
            check_picture(member, archive)
            pictures.append(Picture(*place, *member[1:4]))
    return pictures


def arrange_tiny(
    members: list[Member], archive: Path
) -> list[tuple[str, str, str] | None]:
    """Return (split, class, name) of Tiny ImageNet's members, None for no picture."""
    texts = {}
    with opened(archive) as file:
        for member in members:
            if member.name.endswith(("/wnids.txt", "/val_annotations.txt")):
                texts[Path(member.name).name] = (
                    read_bytes(file, *member[1:4]).decode().splitlines()
                )
    if len(texts) != 2:
        raise Problem(
            f"{archive} lacks wnids.txt or val_annotations.txt: fetch it again"
        )
    valid_class = dict(
        line.split("\t")[:2] for line in texts["val_annotations.txt"] if "\t" in line
    )
    places = []
    for member in members:
        _, split, *folders, name = (
            member.name.split("/") if member.name.count("/") > 1 else ("", "", "")
        )
        if not name.lower().endswith(PICTURE_NAMES):
            places.append(None)
        elif split == "train":
            places.append(("train", folders[0], name))
        elif split == "val":
            places.append(("valid", valid_class.pop(name, "?"), name))
        else:
            places.append(None)
    for split in FOLDERS:
        found = {place[1] for place in places if place and place[0] == split}
        if found - set(texts["wnids.txt"]) or (
            split == "train" and len(found) != len(texts["wnids.txt"])
        ):
            raise Problem(
                f"{archive}: the classes of its {split} pictures "
                "are not those of its wnids.txt"
            )
    if valid_class:
        raise Problem(
            f"{archive} has no picture {min(valid_class)}, "
            "which is in its val_annotations.txt"
        )
    return places


def arrange_folders(
    members: list[Member], archive: Path
) -> list[tuple[str, str, str] | None]:
    """Return (split, class, name) of class folders' members, None for no picture."""
    paths = []
    for member in members:
        path = [folder for folder in member.name.split("/") if folder not in ("", ".")]
        hidden = any(folder.startswith((".", "__MACOSX")) for folder in path)
        paths.append(
            [] if hidden or not member.name.lower().endswith(PICTURE_NAMES) else path
        )
    places = []
    for path in paths:  # [any/parent/]train/CLASS/[any/folder/]name
        at = next((i for i, folder in enumerate(path[:-2]) if folder in SPLITS), None)
        places.append(
            None
            if at is None
            else (SPLITS[path[at]], path[at + 1], "/".join(path[at + 2 :]))
        )
    found = {place[0] for place in places if place}
    if len(found) == 1:
        raise Problem(
            f"{archive} has class folders for {min(found)} only: "
            "train and val are needed"
        )
    return places if found else hold_out(paths, archive)


def hold_out(
    paths: list[list[str]], archive: Path
) -> list[tuple[str, str, str] | None]:
    """Split an archive of class folders by the names of the pictures in each."""
    say(
        f"{archive.name} has no train and val folders: "
        "every tenth picture of a class is held out"
    )
    roots = [path[:-2] for path in paths if path]
    root = 0  # how many folders all the pictures are in, before that of their class
    while roots and all(
        len(folders) > root and folders[root] == roots[0][root] for folders in roots
    ):
        root += 1
    places, seen = [None] * len(paths), collections.Counter()
    for i in sorted(range(len(paths)), key=paths.__getitem__):
        if len(paths[i]) > root + 1:
            class_name = paths[i][root]
            seen[class_name] += 1
            split = "train" if seen[class_name] % 10 else "valid"
            places[i] = (split, class_name, "/".join(paths[i][root + 1 :]))
    return places


def list_class(file: int, part: Part) -> list[Picture]:
    """Return the pictures in a class's tar, inside ImageNet's training archive."""
    _, offset, size, *_ = part.class_tar
    archive, class_name = (
        f"{part.archive}: {part.class_tar.name}",
        Path(part.class_tar.name).stem,
    )
    members = read_tar(file, archive, offset, offset + size)
    for member in members:
        check_picture(member, archive)
        if "/" in member.name or not member.name.startswith(class_name):
            raise Problem(f"{archive}: {member.name} is no picture of this class")
    return [Picture("train", class_name, *member[:3]) for member in members]


def list_members(archive: Path, path: Path | None = None) -> list[Member]:
    """Return the files in an archive, of which there may be a copy at `path`."""
    with opened(path or archive) as file:
        # Little is read, at many places: reading ahead would read it all.
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
        if archive.suffix == ".zip":
            return read_zip(file, archive)
        return read_tar(file, str(archive), 0, os.fstat(file).st_size)


def read_tar(file: int, archive: str, start: int, end: int) -> list[Member]:
    """Return the files in the tar between two offsets.

    Python's tarfile takes 10 times as long, and takes a damaged header for the end.
    """
    members, at, long_name = [], start, None
    while True:
        block = os.pread(file, 515, at)
        header = block[:512]
        after = f"after {members[-1].name}" if members else "at its start"
        if at + 512 > end or len(header) < 512:
            raise Problem(
                f"{archive} ends early, {after}, at byte {at}: fetch it again"
            )
        if header == ZEROS[:512]:
            return members
        try:
            size, checksum = (
                int(field.strip(b"\0 "), 8)
                for field in (header[124:136], header[148:156])
            )
        except ValueError:
            size = checksum = -1
        # It is the sum of all bytes, with spaces for its own.
        # adler32 has that modulo 65521, and is quick.
        total = checksum + sum(header[148:156]) - 8 * ord(" ")
        if size < 0 or (total + 1) % 65521 != zlib.adler32(header) & 0xFFFF:
            raise Problem(
                f"{archive} is damaged, {after}, at byte {at}: fetch it again"
            )
        kind, name = header[156:157], header[:100].split(b"\0", 1)[0]
        if header[257:263] == b"ustar\0" and header[345]:
            name = header[345:500].split(b"\0", 1)[0] + b"/" + name
        if kind in b"Lx":  # the next one's name, as GNU and as POSIX have it
            long_name = os.pread(file, size, at + 512).rstrip(b"\0")
            if kind == b"x":
                path = re.search(rb"^\d+ path=(.*)$", long_name, re.MULTILINE)
                long_name = path and path[1]
        elif kind not in b"gK":
            name, long_name = os.fsdecode(long_name or name), None
            check_name(name, archive)
            if kind in b"07\0":
                members.append(Member(name, at + 512, size, 0, block[512:][:size]))
            elif kind != b"5":
                raise Problem(
                    f"{archive}: {name} is a link or a device, which are refused"
                )
        at += 512 + size + -size % 512


def read_zip(file: int, archive: Path) -> list[Member]:
    """Return the files in a zip."""
    members, size = [], os.fstat(file).st_size
    try:
        with open(file, "rb", closefd=False) as stream:
            listed = zipfile.ZipFile(stream).infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise Problem(f"{archive} is damaged: {error}: fetch it again") from None
    for info in listed:
        check_name(info.filename, archive)
        kind = stat.S_IFMT(info.external_attr >> 16)
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise Problem(
                f"{archive}: {info.filename} is a link or a device, which are refused"
            )
        if info.flag_bits & 1 or info.compress_type not in (
            zipfile.ZIP_STORED,
            zipfile.ZIP_DEFLATED,
        ):
            raise Problem(
                f"{archive}: {info.filename} is neither stored nor deflated: "
                "make the zip anew"
            )
        if info.is_dir():
            continue
        # Bytes that are missing before its directory make the offsets in that negative.
        local = (
            os.pread(file, 30, info.header_offset) if info.header_offset >= 0 else b""
        )
        lengths = int.from_bytes(local[26:28], "little") + int.from_bytes(
            local[28:30], "little"
        )
        offset = info.header_offset + 30 + lengths
        if local[:4] != b"PK\3\4" or offset + info.compress_size > size:
            raise Problem(
                f"{archive} is damaged at {info.filename}, byte {info.header_offset}: "
                "fetch it again"
            )
        packed = info.compress_size if info.compress_type == zipfile.ZIP_DEFLATED else 0
        start = os.pread(file, min(info.compress_size, 512), offset)
        # Data that zlib refuses do not start as a picture does.
        with contextlib.suppress(zlib.error):
            start = (
                zlib.decompressobj(wbits=-zlib.MAX_WBITS).decompress(start, 3)
                if packed
                else start
            )
        members.append(Member(info.filename, offset, info.file_size, packed, start[:3]))
    return members


def read_bytes(file: int, offset: int, size: int, packed: int) -> bytearray:
    """Read a member of an archive, without moving a position that processes share."""
    data = bytearray(packed or size)
    if os.preadv(file, [data], offset) != len(data):
        raise EOFError("the file ends before it")
    if packed:
        data = bytearray(zlib.decompress(data, wbits=-zlib.MAX_WBITS))
    if len(data) != size:
        raise EOFError(f"{len(data)} bytes instead of {size}")
    return data


def read_devkit(archive: Path) -> Devkit:
    """Read the classes and the validation pictures' answers from ImageNet's devkit."""
    from scipy.io import loadmat

    try:
        with tarfile.open(archive) as tar:
            folder = f"{DEVKIT.removesuffix('.tar.gz')}/data"
            matrix = io.BytesIO(tar.extractfile(f"{folder}/meta.mat").read())
            truth = tar.extractfile(
                f"{folder}/ILSVRC2012_validation_ground_truth.txt"
            ).read()
        synsets = np.atleast_1d(loadmat(matrix, squeeze_me=True)["synsets"])
        # The other synsets are no classes.
        leaves = [synset for synset in synsets if synset["num_children"] == 0]
        class_of = {int(leaf["ILSVRC2012_ID"]): str(leaf["WNID"]) for leaf in leaves}
        train_pictures = {
            str(leaf["WNID"]): int(leaf["num_train_images"]) for leaf in leaves
        }
        ids = [int(line) for line in truth.split()]
    except (
        tarfile.TarError,
        zlib.error,
        EOFError,
        KeyError,
        ValueError,
        TypeError,
        AttributeError,
    ) as error:
        raise Problem(
            f"{archive} is damaged: {first_line(error)}: fetch it again"
        ) from None
    if unknown := set(ids) - set(class_of):
        raise Problem(
            f"{archive}: the ground truth has the class {min(unknown)}, "
            "and meta.mat does not"
        )
    return Devkit(train_pictures, [class_of[number] for number in ids])


def check_classes(source: Source, devkit: Devkit, class_tars: list[str]) -> None:
    found, wanted = set(class_tars), {f"{name}.tar" for name in devkit.train_pictures}
    if different := found ^ wanted:
        name = min(different)
        has, lacks = (TRAIN, DEVKIT) if name in found else (DEVKIT, TRAIN)
        raise Problem(
            f"{source.archives[0].parent}: "
            f"{Path(name).stem} is in {has}, and not in {lacks}"
        )


def check_counts(
    source: Source, devkit: Devkit | None, pictures: list[Picture]
) -> None:
    counts = collections.Counter(
        picture.class_name for picture in pictures if picture.split == "train"
    )
    for name, wanted in devkit.train_pictures.items() if devkit else ():
        if counts[name] != wanted:
            found = f"{counts[name]} pictures of {name}"
            raise Problem(
                f"{source.archives[0]} has {found}, and {DEVKIT} {wanted}: "
                "fetch it again"
            )


def check_picture(member: Member, archive: Path | str) -> None:
    if member.start not in PICTURE_STARTS or member.size >= 2**31:
        raise Problem(
            f"{archive}: {member.name} is no JPEG and no PNG: "
            "convert it, or take it out"
        )


def check_name(name: str, archive: Path | str) -> None:
    if name.startswith("/") or "/../" in f"/{name}/" or not name.isprintable():
        raise Problem(
            f"{archive}: a member's name, {name!r}, "
            "leads elsewhere or cannot be printed"
        )


def check_space(data_dir: Path, size: int, files: int = 0) -> None:
    """Refuse to start what the disk has no room for."""
    disk = os.statvfs(data_dir)
    # The last block of a file is half empty, on average.
    needed = size + files * disk.f_frsize // 2 + 2**20
    free = disk.f_bavail * disk.f_frsize
    if needed > free:
        raise Problem(
            f"{data_dir} on {HOST} has {free / 1e9:.3f} GB free, "
            f"and {needed / 1e9:.3f} GB are needed: "
            "choose another --data-dir"
        )
    if disk.f_files and files > disk.f_favail:
        raise Problem(
            f"{data_dir} on {HOST} has room for {disk.f_favail} files, not {files}: "
            "no --extract"
        )


def md5(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def compare_checksums(archives: list[Path], sums: Iterable[str]) -> None:
    from torchvision.datasets.imagenet import ARCHIVE_META

    published = {
        TINY_IMAGENET: "90528d7ca1a48142e341f4ef8d21d0de",
        **dict(ARCHIVE_META.values()),
    }
    for archive, found in zip(archives, sums, strict=True):
        if found != published.get(archive.name, found):
            raise Problem(
                f"{archive} has the MD5 sum {found}, not the published one: "
                "fetch it again"
            )


def make_index(
    pictures: list[Picture], classes: list[str], archives: list[Path]
) -> np.ndarray:
    """Return the pictures' places and labels, in order of their classes and names."""
    label_of = {name: label for label, name in enumerate(classes)}
    split = pictures[0].split if pictures else "train or validation"
    if len(pictures) == 0 or len(classes) == 0:
        raise Problem(f"{archives[0]} has no {split} pictures in class folders")
    if unknown := {picture.class_name for picture in pictures} - set(classes):
        raise Problem(
            f"{archives[0]} has {split} pictures of {min(unknown)}, "
            "and none to train on"
        )
    width = max(len(os.fsencode(picture.name)) for picture in pictures)
    fields = [
        ("offset", "i8"),
        ("size", "i4"),
        ("packed", "i4"),
        ("label", "i4"),
        ("name", f"S{width}"),
    ]
    rows = (
        (p.offset, p.size, p.packed, label_of[p.class_name], os.fsencode(p.name))
        for p in pictures
    )
    index = np.fromiter(rows, fields, count=len(pictures))
    index = index[np.lexsort((index["name"], index["label"]))]
    same = (index["label"][1:] == index["label"][:-1]) & (
        index["name"][1:] == index["name"][:-1]
    )
    if same.any():
        twice = os.fsdecode(index["name"][1:][same][0])
        raise Problem(
            f"{archives[0].parent}: there are two pictures {twice} of the same class"
        )
    return index


def fingerprint(index: np.ndarray, classes: list[str]) -> str:
    """Return a checksum of names, labels and sizes, however the data set is staged."""
    digest = hashlib.sha256("\n".join(classes).encode())
    digest.update(b"\n".join(index["name"].tolist()))
    digest.update(index["label"].tobytes() + index["size"].tobytes())
    return digest.hexdigest()


class WorkerPool:
    """Processes that call functions.

    They end at once when something fails or this process is killed. Each has a
    connection of its own, which ends with it. In a ProcessPoolExecutor all share one:
    whoever is killed while it hands over a result keeps it open, and this process would
    wait for the rest for ever.
    """

    def __init__(self, processes: int):
        # A forked process has all that is imported, and holds the lock, too.
        context = multiprocessing.get_context("fork")
        self.processes, self.free = [], queue.SimpleQueue()
        for _ in range(processes):
            ours, theirs = context.Pipe()
            self.processes.append(
                context.Process(
                    target=work, args=(theirs, ours, os.getpid()), daemon=True
                )
            )
            self.processes[-1].start()
            theirs.close()
            self.free.put(ours)
        self.threads = ThreadPoolExecutor(processes)  # each waits for a process

    def map(self, function: Callable, arguments: Iterable) -> Iterator:
        """Call the function, and yield results in order, not so fast as to pile up."""
        calls = (
            self.threads.submit(self.call, function, argument) for argument in arguments
        )
        started = collections.deque(itertools.islice(calls, 4 * len(self.processes)))

        def results() -> Iterator:
            while started:
                result = started.popleft().result()
                started.extend(itertools.islice(calls, 1))
                yield result

        return results()

    def call(self, function: Callable, argument):
        connection = self.free.get()
        try:
            connection.send((function, argument))
            result, error = connection.recv()
        except (EOFError, OSError):
            raise WorkerKilled from None
        finally:
            self.free.put(connection)
        if error:
            raise error
        return result

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *_) -> None:
        for process in self.processes:
            process.kill()  # it has nothing left to do, or something has failed
        for process in self.processes:
            process.join()
        self.threads.shutdown(cancel_futures=True)


class WorkerKilled(Exception):
    """A process of a pool has ended while it was to do something."""


def work(connection: Connection, others_end: Connection, parent: int) -> None:
    """Call what comes over a connection; answer with result or error, until killed."""
    # Ctrl-C reaches the parent, too, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die with the parent
    if os.getppid() != parent:
        os._exit(1)
    others_end.close()
    while True:
        function, argument = connection.recv()
        try:
            answer = function(argument), None
        except Exception as error:
            error.add_note(traceback.format_exc())  # its own is lost on the way
            answer = None, error
        connection.send(answer)


def follow(results: Iterable, amounts: list[int], unit: str, start: float) -> Iterator:
    """Pass results on, with a progress bar in a terminal, or a line at every tenth."""
    total, done = sum(amounts), 0
    with tqdm(
        total=total, desc=HOST, unit=unit, unit_scale=True, leave=False, disable=None
    ) as bar:
        for amount, result in zip(amounts, results, strict=True):
            yield result
            bar.update(amount)
            tenth, done = 10 * done // total, done + amount
            if bar.disable and tenth < 10 * done // total < 10:
                rate = done / (time.perf_counter() - start)
                rate = (
                    f"{rate / 1e9:.2f} GB/s"
                    if unit == "B"
                    else f"{rate:.0f} pictures/s"
                )
                say(f"{10 * (10 * done // total)}%, {rate}")


@contextlib.contextmanager
def lock(data_dir: Path, create: bool) -> Iterator[None]:
    """Let one process at a time work on a folder; the kernel ends its turn with it."""
    path, waiting, missed = data_dir / "staging.lock", False, 0
    while True:
        try:
            if create:
                make_private(data_dir)
            file = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
        except FileNotFoundError:
            missed += 1
            if create and missed < 100:
                continue  # another job has just removed it
            raise
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not waiting:
                say(f"waiting for another job that is staging in {data_dir}")
            waiting = True
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:  # Lustre may be mounted so, and two stagings would mix
            raise Problem(
                f"the disk of {data_dir} on {HOST} has no file locks "
                f"({error.strerror}): choose a --data-dir on a node's own, "
                "and copy the files from there if it is to be elsewhere"
            ) from error
        try:
            if os.path.samestat(os.fstat(file), os.stat(path)):
                break
        except FileNotFoundError:  # another job has removed it meanwhile
            pass
        os.close(file)
    try:
        yield
    finally:
        os.close(file)


def make_private(data_dir: Path) -> None:
    """Make a folder that nobody else may write to, or refuse one of somebody else's."""
    with contextlib.suppress(FileExistsError):
        os.makedirs(data_dir, mode=0o700)
    shared = os.stat(data_dir.absolute().parent).st_mode & stat.S_ISVTX  # as /tmp is
    if shared and os.lstat(data_dir).st_uid != os.geteuid():
        raise Problem(
            f"{data_dir} on {HOST} belongs to another user: choose another --data-dir"
        )


def register_job(data_dir: Path) -> None:
    """Note that this job uses what is staged."""
    if job := os.environ.get("SLURM_JOB_ID"):
        (data_dir / "jobs").mkdir(exist_ok=True)
        (data_dir / "jobs" / job).touch()


def squeue(option: str) -> subprocess.CompletedProcess | None:
    """Return what Slurm says of some jobs, a number a line.

    It tells of all of them, whatever partitions and SQUEUE_USERS may hide.
    """
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SQUEUE_")
    }
    command = ["squeue", "--noheader", "--all", "--format=%A", option]
    try:
        return subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def is_running(job: str) -> bool:
    """Return whether Slurm has not forgotten that job, or cannot be asked."""
    answer = squeue(f"--jobs={job}")
    if answer is None:
        return True
    # An array's number stands for all that is left of it.
    return job in answer.stdout.split() or (
        answer.returncode != 0 and "Invalid job id" not in answer.stderr
    )


def remove_abandoned() -> None:
    """Remove the folders that job.sh has made here for ended jobs of this user.

    Where Slurm itself ends a job, as in a preemption,
    no step can start any more to remove them.
    """
    paths, mine = {}, os.environ.get("SLURM_JOB_ID")
    for path in Path("/tmp").glob("slurm-job-*"):
        job = path.name.removeprefix("slurm-job-")
        # Another job may be doing the same.
        with contextlib.suppress(FileNotFoundError):
            found = path.lstat()
            if (
                job.isdecimal()
                and stat.S_ISDIR(found.st_mode)
                and found.st_uid == os.geteuid()
            ):
                paths[job] = path
    if not (paths and mine and (answer := squeue(f"--user={os.geteuid()}"))):
        return
    jobs = answer.stdout.split()  # those on other nodes, too: some share their /tmp
    # Without this job, the answer is no list of the jobs.
    for job in paths.keys() - jobs if mine in jobs else []:
        shutil.rmtree(paths[job], ignore_errors=True)
        say(f"removed {paths[job]}: a job of yours that Slurm has ended could not")


def release(data_dir: Path) -> None:
    """Remove what is staged, and the folder if then empty, unless other jobs use it."""
    with contextlib.suppress(FileNotFoundError), lock(data_dir, create=False):
        jobs, mine = data_dir / "jobs", os.environ.get("SLURM_JOB_ID")
        if mine:
            (
                jobs / mine
            ).unlink()  # this job has staged nothing here where there is no such file
        if jobs.exists() and any(is_running(job.name) for job in jobs.iterdir()):
            return
        discard(data_dir)
        shutil.rmtree(jobs, ignore_errors=True)
        (data_dir / "staging.lock").unlink()
        with contextlib.suppress(OSError):  # something else is in it
            data_dir.rmdir()


def discard(data_dir: Path) -> None:
    """Remove all or a part of what a staging wrote, the mark of being whole first."""
    plan = data_dir / "staging.json"
    for name in ("staged.json", *read_json(plan).get("made", ()), "staging.json"):
        for path in (part_of(data_dir / name), data_dir / name):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):  # of a node that went down, it may be empty
        return {}


def write_json(path: Path, content: dict) -> None:
    part_of(path).write_text(json.dumps(content))
    os.rename(part_of(path), path)


def part_of(path: Path) -> Path:
    """Return the name that something has until it is whole."""
    return path.with_name(f"{path.name}.part")


def flush(path: Path) -> None:
    with opened(path) as file:
        os.fsync(file)


@contextlib.contextmanager
def opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    file = os.open(path, flags)
    try:
        yield file
    finally:
        os.close(file)


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def describe(mark: dict) -> str:
    train, valid = (
        f"{mark['splits'][split]['pictures']:,}".replace(",", " ") for split in FOLDERS
    )
    return (
        f"{train} + {valid} pictures of {len(mark['classes'])} classes, {mark['form']}"
    )


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def say(line: str) -> None:
    # In one piece: other nodes may write there, too.
    sys.stdout.write(f"{HOST}: {line}\n")
    sys.stdout.flush()


def fail(message: str) -> NoReturn:
    """End this process with one line that says why."""
    sys.stderr.write(f"prepare_data.py: error: {message}\n")
    sys.exit(1)


class Pictures:
    """The pictures of a split, staged by this script or in a tree of class folders.

    Processes share its index and its file, and no position in it: it may be forked.
    Pickled, it is a path.
    """

    def __init__(self, data_dir: Path, split: str):
        self.data_dir, self.split = Path(data_dir), split
        self.file = None
        folder = self.data_dir / FOLDERS[split]
        if mark := read_json(self.data_dir / "staged.json"):
            self.classes: list[str] = mark["classes"]
            self.fingerprint: str = mark["splits"][split]["fingerprint"]
            self.archive: str | None = mark["splits"][split]["archive"]
            self.index = np.load(self.data_dir / f"{split}.npy", mmap_mode="r")
            if self.archive:
                self.file = os.open(self.data_dir / self.archive, os.O_RDONLY)
        elif all((self.data_dir / name).is_dir() for name in FOLDERS.values()):
            train = self.data_dir / FOLDERS["train"]
            self.classes = sorted(
                entry.name for entry in os.scandir(train) if entry.is_dir()
            )
            self.archive = None
            self.index = scan(folder, split, self.classes)
            self.fingerprint = fingerprint(self.index, self.classes)
        else:
            raise FileNotFoundError(
                f"no data in {self.data_dir.absolute()}: "
                "for job.sh, set IMAGENET_DIR to the archives; "
                "else run prepare_data.py on every node; or use --synthetic"
            )
        self.labels = np.ascontiguousarray(self.index["label"])

    def __reduce__(self):
        return Pictures, (self.data_dir, self.split)

    def __del__(self):
        if self.__dict__.get("file") is not None:
            os.close(self.file)

    def __len__(self) -> int:
        return len(self.index)

    def name(self, i: int) -> str:
        name, class_name = (
            os.fsdecode(self.index["name"][i]),
            self.classes[self.labels[i]],
        )
        if self.archive is None:
            return f"{self.data_dir / FOLDERS[self.split] / class_name / name}"
        if self.archive not in IMAGENET:
            name = f"{class_name}/{name}"
        return f"{self.archive}: {name}"

    def read(self, i: int) -> "Tensor":
        """Return a picture: RGB, uint8, shape (3, height, width)."""
        offset, size, packed = (
            int(self.index[field][i]) for field in ("offset", "size", "packed")
        )
        try:
            if self.file is not None:
                return decode(read_bytes(self.file, offset, size, packed))
            with opened(self.name(i)) as file:
                return decode(read_bytes(file, offset, size, packed))
        except (OSError, EOFError, RuntimeError, zlib.error) as error:
            raise BadPicture(
                f"cannot read {self.name(i)} on {HOST}: {first_line(error)}"
            ) from None


def scan(folder: Path, split: str, classes: list[str]) -> np.ndarray:
    """Return the index of a tree of class folders."""

    def scan_class(class_name: str) -> list[Picture]:
        pictures = []
        for path, _, names in os.walk(folder / class_name):
            for name in names:
                if name.lower().endswith(PICTURE_NAMES) and not name.startswith("."):
                    file = f"{path}/{name}"
                    name = os.path.relpath(file, folder / class_name)
                    pictures.append(
                        Picture(split, class_name, name, 0, os.path.getsize(file))
                    )
        return pictures

    with ThreadPoolExecutor(
        32
    ) as pool:  # a network disk answers slowly, but many at a time
        pictures = [
            picture for found in pool.map(scan_class, classes) for picture in found
        ]
    return make_index(pictures, classes, [folder])


def decode(data: "Tensor | bytearray") -> "Tensor":
    """Return the pixels of a JPEG or PNG: RGB, uint8, shape (3, height, width)."""
    import torch
    from torchvision.io import decode_image

    if not isinstance(data, torch.Tensor):
        data = torch.frombuffer(data, dtype=torch.uint8)
    image = decode_image(data, mode="RGB")
    # A PNG may have 16 bits.
    return image if image.dtype == torch.uint8 else (image.int() >> 8).byte()


class Synthetic:
    """Pictures to learn from, drawn from a seed.

    Each class is a plaid of its own, hidden in noise.
    Another seed gives other pictures of the same classes.
    """

    def __init__(
        self, samples: int, classes: int, seed: int = 0, resolution: int = 256
    ):
        import torch

        self.arguments = samples, classes, seed, resolution
        self.classes = [f"plaid {i}" for i in range(classes)]
        self.labels = np.arange(samples, dtype=np.int32) % classes
        self.fingerprint = f"synthetic {self.arguments}"
        self.longest = resolution + resolution // 4
        generator = torch.Generator().manual_seed(0)
        stripes = torch.rand(2, classes * 3, 1, 8, generator=generator)
        stripes = [
            torch.nn.functional.interpolate(s, self.longest, mode="linear")
            for s in stripes
        ]
        rows, columns = ((s * 64).byte().view(classes, 3, -1) for s in stripes)
        self.rows, self.columns = rows[:, :, :, None], columns[:, :, None, :]
        noise = torch.randint(
            128, (3 * self.longest**2 + 2**16,), dtype=torch.uint8, generator=generator
        )
        self.noise = noise

    def __reduce__(self):
        return Synthetic, self.arguments

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, i: int) -> str:
        return f"synthetic picture {i}"

    def read(self, i: int) -> "Tensor":
        _, _, seed, resolution = self.arguments
        rng = np.random.default_rng((seed, i))
        height, width = rng.integers(
            resolution, self.longest, size=2, endpoint=True
        ).tolist()
        start, label = int(rng.integers(2**16)), self.labels[i]
        noise = self.noise[start : start + 3 * height * width].view(3, height, width)
        return noise + self.rows[label, :, :height] + self.columns[label, :, :, :width]


if __name__ == "__main__":
    main()
