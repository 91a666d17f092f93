"""What lies where in an archive or a tree, and whether it is whole.

Archives are ImageNet's three, or a zip or tar of class folders.
"""

import collections
import contextlib
import logging
import os
import re
import socket
import stat
import tarfile
import unicodedata
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple

import numpy as np

TRAIN = "ILSVRC2012_img_train.tar"  # a tar of a tar for each class
VAL = "ILSVRC2012_img_val.tar"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
IMAGES = (".jpg", ".jpeg", ".jfif", ".png", ".webp")
SPLIT = re.compile("(|.*?/)((?:train|val)/[^/]+/.*)")
# Beside classes, a folder that is called so is a split. But train may be a class.
NO_CLASS = re.compile(
    r"(?!(train|val|test)$)(seg[ _-]?)?(train|test|val|valid)(ing|idation)?"
    r"[ _-]?(set|split|data|images?)?",
    re.IGNORECASE,
)
# And what macOS and file servers add to folders.
HIDDEN = re.compile(
    r"(^|/)(\.[^/]|__MACOSX/|@eaDir/|#recycle/|#snapshot/|\$RECYCLE\.BIN/|"
    r"lost\+found/|Icon\r)"
)
# What breaks a line of the log, changes a terminal, or is no UTF-8.
UNPRINTABLE = re.compile("[\0-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
MOST_INFLATED = 2**28  # bytes: a small zip could ask for all the memory
# This node's name, as --exclude takes it.
NODE = os.environ.get("SLURMD_NODENAME", socket.gethostname())


class StagingError(Exception):
    """What a user can put right; its text says how."""


class Member(NamedTuple):
    """A file in an archive or a tree; a folder, if its name ends in a slash.

    An image has the name train/CLASS/NAME or val/CLASS/NAME, whatever it is called in
    the archive. If it is deflated there, `packed` is its size in the archive, else 0.
    A zip has its checksum, too.
    """

    name: str
    offset: int = 0
    size: int = 0
    packed: int = 0
    crc: int = 0


def job_folder() -> str:
    """Return the folder that job.sh has made on the node's disk for this job, or ""."""
    folder = os.environ.get("LOCAL_JOB_DIR", "")
    # What another job has left in the shell that submitted this one does not count.
    return folder if f"/slurm-job-{os.environ.get('SLURM_JOB_ID')}-" in folder else ""


def list_class(train: Path, class_tar: Member) -> list[Member]:
    """Return the images of a class of ImageNet's training set."""
    with open(train, "rb") as file:
        members = list_tar(file, class_tar.offset, class_tar.size, class_tar.name)
    class_name = PurePosixPath(class_tar.name).stem
    names = {m.name: f"train/{class_name}/{os.path.basename(m.name)}" for m in members}
    return select(members, names, class_tar.name)


def list_val(val: Path, devkit: Path) -> list[Member]:
    """Return ImageNet's validation images.

    An image's number says its class, whatever folder it has been put in.
    """
    class_of_number = read_devkit(devkit)
    members = list_members(val)
    new_names = {}
    for member in members:
        name = os.path.basename(member.name)
        number = re.search(r"val_(\d+)", name)
        if number and int(number[1]) in class_of_number:
            new_names[member.name] = f"val/{class_of_number[int(number[1])]}/{name}"
    return select(members, new_names, val.name)


def read_devkit(devkit: Path) -> dict[int, str]:
    """Return the class of each of ImageNet's validation images, by their numbers."""
    from scipy.io import loadmat  # half a second, and for ImageNet only

    folder = f"{DEVKIT.removesuffix('.tar.gz')}/data"
    try:
        with tarfile.open(devkit) as tar:
            meta = loadmat(tar.extractfile(f"{folder}/meta.mat"), squeeze_me=True)
            truth = tar.extractfile(f"{folder}/ILSVRC2012_validation_ground_truth.txt")
            answers = [int(line) for line in truth]
        class_of = {s["ILSVRC2012_ID"]: str(s["WNID"]) for s in meta["synsets"]}
        return {i: class_of[answer] for i, answer in enumerate(answers, 1)}
    except Exception as error:  # of tarfile, gzip, zlib, SciPy or NumPy
        raise StagingError(f"{DEVKIT} is damaged: {error!r}: fetch it again") from None


def list_members(path: Path) -> list[Member]:
    """Return what is in a tar or a zip."""
    if path.suffix.lower() == ".zip":
        return list_zip(path)
    with open(path, "rb") as file:
        return list_tar(file, 0, path.stat().st_size, path.name)


def list_tar(file: BinaryIO, start: int, size: int, where: str) -> list[Member]:
    """Return what is in the tar that lies there in a file."""
    members = {}  # by name: a tar may have several of one, and the last one counts
    file.seek(start)
    try:
        tar = tarfile.open(fileobj=file, mode="r:")
        for info in tar:
            if info.isdir():
                members[info.name] = Member(f"{info.name}/")
            elif info.isfile() and not info.issparse():
                members[info.name] = Member(info.name, info.offset_data, info.size)
            else:
                raise StagingError(
                    f"{where}: {info.name!r} is a link, a device or sparse: make the "
                    "tar with --dereference --hard-dereference, and without --sparse"
                )
        # tarfile takes a damaged header for the end, which is 1024 zeros, or more. All
        # of a tar is blocks of 512.
        left = start + size - tar.offset
        plausible = left in range(1024, 2**20, 512)
        if not plausible or any(os.pread(file.fileno(), left, tar.offset)):
            raise tarfile.ReadError(f"no end after {len(members)} files")
    except tarfile.TarError as error:
        raise StagingError(
            f"{where} is cut, damaged, compressed, or several in one ({error}): "
            "fetch it again, or make one .tar"
        ) from None
    return list(members.values())


def list_zip(path: Path) -> list[Member]:
    """Return what is in a zip."""
    try:
        with zipfile.ZipFile(path) as listed:
            # By name: as in a tar, the last one of a name counts.
            infos = {info.filename: info for info in listed.infolist()}
            return [find_in_zip(listed, info) for info in infos.values()]
    # If bytes are missing in the middle, offsets are negative: that is an OSError.
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise StagingError(
            f"{path.name}: {error}: fetch it again, or pack a .tar (macOS makes zips "
            "of over 4 GB that cannot be read)"
        ) from None


def find_in_zip(listed: zipfile.ZipFile, info: zipfile.ZipInfo) -> Member:
    """Return where a file is in a zip. Raises ValueError if it cannot be used."""
    name = info.filename
    if not info.flag_bits & 0x800:
        # Finder, for one, writes UTF-8 and does not say so.
        with contextlib.suppress(UnicodeError):
            name = name.encode("cp437").decode()
    if "/" not in name:  # Some of Windows' programs write backslashes.
        name = name.replace("\\", "/")
    encrypted, link = info.flag_bits & 1, stat.S_ISLNK(info.external_attr >> 16)
    deflated = info.compress_type == zipfile.ZIP_DEFLATED
    known = deflated or info.compress_type == zipfile.ZIP_STORED
    large = deflated and info.file_size > MOST_INFLATED
    if encrypted or link or not known or large:
        raise ValueError(
            f"{name!r} is encrypted, a link, compressed by another method than "
            "deflate, or of more than 256 MB"
        )
    with listed.open(info):  # compares two headers, and reads one
        offset = listed.fp.tell()
    packed = info.compress_size if deflated else 0
    return Member(name, offset, info.file_size, packed, info.CRC)


def read_member(file: BinaryIO, member: Member) -> bytes:
    """Return a member. Raises ValueError or zlib.error."""
    data = os.pread(file.fileno(), member.packed or member.size, member.offset)
    if member.packed:
        # A damaged or hostile zip may inflate to far more than it says.
        inflate = zlib.decompressobj(-zlib.MAX_WBITS)
        data = inflate.decompress(data, member.size + 1)
    if len(data) != member.size or (member.crc and member.crc != zlib.crc32(data)):
        raise ValueError("its bytes are damaged")
    return data


def list_tree(folder: Path) -> list[Member]:
    """Return the images of a tree: of train/CLASS/ and val/CLASS/, or of CLASS/."""
    tops = [folder]
    if has_splits(folder):
        tops = [top for top in (folder / "train", folder / "val") if top.is_dir()]
    paths = [path.removeprefix(f"{folder}/") for top in tops for path in walk(top)]
    # In UTF-8 in any locale: it may be another one at the next start.
    names = [os.fsencode(path).decode(errors="surrogateescape") for path in paths]
    members = [Member(name) for name in names]
    return find_images(members, str(folder), in_place=True)


def has_splits(folder: Path) -> bool:
    """Has a tree train/CLASS/? A folder train that has images itself is a class."""
    return any((folder / "train").glob("*/"))


def walk(top: Path) -> Iterator[str]:
    """Yield all paths below a folder. Those of folders end in a slash."""

    def fail(error: OSError) -> None:
        raise error

    seen = set()
    for path, folders, names in os.walk(top, onerror=fail, followlinks=True):
        if (real := os.path.realpath(path)) in seen:
            raise StagingError(f"{path} is {real} again: remove a link")
        seen.add(real)
        folders[:] = [name for name in folders if not is_hidden(f"{name}/")]
        for name in [f"{name}/" for name in folders] + names:
            yield f"{path}/{name}"


def find_images(
    members: list[Member], where: str, in_place: bool = False
) -> list[Member]:
    """Return the images in [any/folder/]train/CLASS/[any/folder/], and in val.

    If there are none, those in [any/folder/]CLASS/, with every tenth one in val. In a
    tree, which is read in place, no folder may be above them.
    """
    names = [member.name for member in members if not is_hidden(member.name)]
    found = [match for match in map(SPLIT.fullmatch, names) if match]
    new_names = {match[0]: match[2] for match in found}
    tops = {match[1] for match in found if is_image(match[0])}
    held_out = not tops
    if held_out:
        folders = {os.path.dirname(name) for name in names if is_image(name)}
        # What lies beside the folders of the classes is left out.
        folders -= set(map(os.path.dirname, folders))
        tops = set(map(os.path.dirname, folders))
    if len(tops) != 1 or (in_place and tops != {""}):
        # Such as masks beside the images, or several folds.
        raise StagingError(
            f"{where} has its images in {sorted(tops)[:3] or 'no folder'}: put "
            "train/CLASS/ and val/CLASS/, or all classes' folders, into one folder"
        )
    if held_out:
        logging.info(f"{where} has no train and val: one image in ten is held out")
        new_names = hold_out(names, *tops)
    images = select(members, new_names, where)
    check_classes(images, new_names.values(), where)
    return images


def hold_out(names: list[str], top: str) -> dict[str, str]:
    """Return new names for what is in [top/]CLASS/, with every tenth image in val."""
    seen = collections.Counter()
    new_names = {}
    for name in sorted(names):
        folder, base = os.path.split(name)
        class_name = os.path.basename(folder)
        if not class_name or os.path.dirname(folder) != top:
            continue
        if class_name.lower() in ("val", "test"):
            continue  # Images that lie in it have no class.
        split = "train"
        if is_image(name):
            if NO_CLASS.fullmatch(class_name):
                raise StagingError(
                    f"{class_name}, beside the classes, is called like a split: make "
                    "train/CLASS/ and val/CLASS/, or take it out, or rename it"
                )
            seen[class_name] += 1
            if seen[class_name] % 10 == 1:
                split = "val"
        new_names[name] = f"{split}/{class_name}/{base}"
    return new_names


def select(
    members: list[Member], new_names: dict[str, str], where: str
) -> list[Member]:
    """Return the images, renamed; say in a line what is left out."""
    images = []
    left_out = collections.Counter()
    for member in members:
        name = member.name
        if is_hidden(name):
            left_out["hidden"] += not name.endswith("/")
        elif UNPRINTABLE.search(name):
            raise StagingError(f"{where}: {name!r} is not printable: rename it")
        elif name in new_names and is_image(name):
            images.append(member._replace(name=new_names[name]))
        elif not name.endswith("/"):
            left_out[PurePosixPath(name).suffix.lower() or "without a suffix"] += 1
    if left_out:
        counts = [f"{count} {kind}" for kind, count in left_out.items()]
        logging.info(f"{where}: left out: {', '.join(counts)}")
    return images


def check_classes(images: list[Member], names: Iterable[str], where: str) -> None:
    """Has each class, of these names and of the images, images of both splits?"""
    found = {"train": set(), "val": set()}
    for image in images:
        found[image.name.split("/")[0]].add(class_of(image.name))
    classes = found["train"].union(found["val"], map(class_of, names))
    if len(classes) < 2:
        raise StagingError(
            f"{where} has one class, {min(classes, default='of no images')}: put the "
            "images of each class in a folder of its own"
        )
    for split in found:
        if missing := classes - found[split]:
            raise StagingError(
                f"{where} has no {split} images of {min(missing)}: put JPEG, PNG or "
                "WebP into train/CLASS/ and val/CLASS/, or remove the class"
            )


def make_index(images: list[Member]) -> tuple[list[str], dict[str, np.ndarray]]:
    """Return the classes, and for train and val a row for each image: see Member.

    Rows are sorted by label and name, which is CLASS/NAME. Labels are places in the
    list of classes.
    """
    classes = sorted({class_of(image.name) for image in images})
    label_of = {class_name: label for label, class_name in enumerate(classes)}
    rows = {"train": [], "val": []}
    for image in images:
        split, name = image.name.split("/", 1)
        label = label_of[class_of(image.name)]
        rows[split].append((label, name.encode(), *image[1:]))
    fields = "label, name, offset, size, packed, crc"
    return classes, {
        split: np.rec.fromrecords(sorted(rows[split]), names=fields) for split in rows
    }


def class_of(name: str) -> str:
    """Return the class of train/CLASS/NAME."""
    return one_form(name.split("/")[1])


def one_form(name: str) -> str:
    """Return a name that equals others which look alike. macOS writes é as two."""
    return unicodedata.normalize("NFC", name)


def is_image(name: str) -> bool:
    return name.lower().endswith(IMAGES)


def is_hidden(name: str) -> bool:
    return bool(HIDDEN.search(name))
