"""What lies where in an archive, and whether it is whole.

Archives are ImageNet's three, Tiny ImageNet's zip, or a zip or tar of class folders.
"""

import collections
import os
import re
import socket
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple

TRAIN = "ILSVRC2012_img_train.tar"  # a tar of a tar for each class
VAL = "ILSVRC2012_img_val.tar"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
IMAGE_STARTS = (b"\xff\xd8\xff", b"\x89PN")  # the first bytes of a JPEG, of a PNG
HOST = socket.gethostname()


class StagingError(Exception):
    """What a user can put right; its text says how."""


class Source(NamedTuple):
    """A data set's archives. Without `devkit`, one archive has both splits."""

    train: Path
    val: Path
    devkit: Path | None = None

    def paths(self) -> list[Path]:
        return sorted({path for path in self if path})


class Member(NamedTuple):
    """A file in an archive.

    An image has the name train/CLASS/NAME or val/CLASS/NAME, whatever it is called in
    the archive. If it is deflated there, `packed` is its size in the archive, else 0.
    """

    name: str
    offset: int
    size: int
    packed: int = 0


class Devkit(NamedTuple):
    """What ImageNet's development kit says about the images."""

    train_images: int
    val_classes: list[str]  # of each image, in the order of their names


def find_source(path: Path) -> Source:
    """Return the archives that `path` names or has."""
    imagenet = Source(path / TRAIN, path / VAL, path / DEVKIT)
    if any(archive.exists() for archive in imagenet):
        return imagenet
    if path.is_dir():
        found = [*path.glob("*.zip"), *path.glob("*.tar")]
        if len(found) != 1:
            raise StagingError(
                f"it has {len(found)} archives, and no {TRAIN}: "
                "name one archive with --source or IMAGENET_DIR"
            )
        path = found[0]
    return Source(path, path)


def list_parts(archive: Path) -> list[tuple]:
    """Return an archive's parts, to be copied in parallel: (start, end, class tar).

    A part is a class of ImageNet's training set, or 64 MB of anything else.
    """
    size = archive.stat().st_size
    parts = []
    start = 0
    if archive.name == TRAIN:
        with open(archive, "rb") as file:
            for class_tar in list_tar(file, TRAIN):
                end = class_tar.offset + class_tar.size
                parts.append((start, end, class_tar))
                start = end
    for at in range(start, size, 2**26):
        parts.append((at, min(at + 2**26, size), None))
    return parts


def list_class(file: BinaryIO, class_tar: Member) -> list[Member]:
    """Return the images of a class of ImageNet's training set."""
    file.seek(class_tar.offset)
    archive = f"{TRAIN}: {class_tar.name}"
    members = list_tar(file, archive)
    check_starts(file, archive, members)
    folder = f"train/{class_tar.name.removesuffix('.tar')}"
    return [member._replace(name=f"{folder}/{member.name}") for member in members]


def list_images(file: BinaryIO, devkit: Devkit | None) -> list[Member]:
    """Return the images of any archive but ImageNet's training set."""
    archive = os.path.basename(file.name)
    if archive.endswith(".zip"):
        members = list_zip(file, archive)
    else:
        members = list_tar(file, archive)
    if devkit:
        images = label_val(members, devkit)
    else:
        images = find_class_folders(members, file) or hold_out(members, archive)
    check_starts(file, archive, images)
    return images


def list_tar(file: BinaryIO, archive: str) -> list[Member]:
    """Return the files in the tar that lies at the file's position."""
    members = []
    try:
        tar = tarfile.open(fileobj=file, mode="r:")
        while info := tar.next():
            check_name(info.name, archive)
            if info.isfile():
                members.append(Member(info.name, info.offset_data, info.size))
            elif not info.isdir():
                raise StagingError(
                    f"{archive}: {info.name} is a link or a device: refused"
                )
        # tarfile takes a damaged header for the end, which is 1024 zeros.
        file.seek(tar.offset)
        if file.read(1024) != bytes(1024):
            raise tarfile.ReadError
    except tarfile.TarError:
        after = f"after {members[-1].name}" if members else "at its start"
        raise StagingError(
            f"{archive} is cut, damaged or compressed, {after}"
        ) from None
    return members


def list_zip(file: BinaryIO, archive: str) -> list[Member]:
    """Return the files in a zip."""
    members = []
    try:
        for info in zipfile.ZipFile(file).infolist():
            check_name(info.filename, archive)
            # The bytes lie behind this header and two fields, whose sizes it has.
            header = os.pread(file.fileno(), 30, info.header_offset)
            offset = (
                info.header_offset + 30 + sum(struct.unpack_from("<HH", header, 26))
            )
            packed = info.compress_size if info.compress_type else 0
            members.append(Member(info.filename, offset, info.file_size, packed))
    # If bytes are missing in the middle, offsets are negative: that is an OSError.
    except (zipfile.BadZipFile, struct.error, OSError, ValueError) as error:
        raise StagingError(f"{archive} is damaged: {error}: fetch it again") from None
    return members


def find_class_folders(members: list[Member], file: BinaryIO) -> list[Member]:
    """Return the images in [any/folder/]train/CLASS/[any/folder/], and in val.

    Tiny ImageNet's val images all lie in one folder, and a text file has their classes.
    """
    class_of = {}
    for member in members:
        if member.name.endswith("/val_annotations.txt"):
            lines = read_member(file, member, member.size).decode().splitlines()
            class_of = dict(line.split("\t")[:2] for line in lines)
    images = []
    for member in members:
        place = re.search("/(train|val)/([^/]+)/(.+)", f"/{member.name}")
        if place and is_image(member.name):
            split, class_name, name = place.groups()
            class_name = class_of.get(name, class_name)
            images.append(member._replace(name=f"{split}/{class_name}/{name}"))
    return images


def hold_out(members: list[Member], archive: str) -> list[Member]:
    """Return the images in [any/folder/]CLASS/, with every tenth one in val."""
    say(
        f"{archive} has no train and val folders: "
        "every tenth image of a class is held out"
    )
    seen = collections.Counter()
    images = []
    for member in sorted(members):
        path = PurePosixPath(member.name)
        class_name = path.parent.name
        if class_name and is_image(member.name):
            seen[class_name] += 1
            split = "train" if seen[class_name] % 10 else "val"
            images.append(member._replace(name=f"{split}/{class_name}/{path.name}"))
    return images


def label_val(members: list[Member], devkit: Devkit) -> list[Member]:
    """Return ImageNet's validation images, named after their classes."""
    labels = devkit.val_classes
    if len(members) != len(labels):
        raise StagingError(
            f"{VAL} has {len(members)} images, and {DEVKIT} says {len(labels)}"
        )
    return [
        member._replace(name=f"val/{label}/{member.name}")
        for label, member in zip(labels, sorted(members), strict=True)
    ]


def read_devkit(archive: Path | None) -> Devkit | None:
    """Return what the development kit says about the images, if there is one."""
    if archive is None:
        return None
    from scipy.io import loadmat  # half a second, and for ImageNet only

    folder = f"{DEVKIT.removesuffix('.tar.gz')}/data"
    try:
        with tarfile.open(archive) as tar:
            meta = loadmat(tar.extractfile(f"{folder}/meta.mat"), squeeze_me=True)
            truth = tar.extractfile(f"{folder}/ILSVRC2012_validation_ground_truth.txt")
            numbers = truth.readlines()
        # A synset with children is no class.
        classes = [s for s in meta["synsets"] if s["num_children"] == 0]
        name_of = {synset["ILSVRC2012_ID"]: str(synset["WNID"]) for synset in classes}
        train_images = sum(int(synset["num_train_images"]) for synset in classes)
        return Devkit(train_images, [name_of[int(number)] for number in numbers])
    except Exception as error:  # of tarfile, gzip, zlib, SciPy or NumPy
        raise StagingError(f"{DEVKIT} is damaged: {error!r}: fetch it again") from None


def read_member(file: BinaryIO, member: Member, size: int) -> bytes:
    """Return the first `size` bytes of a member, or fewer if it is damaged."""
    if not member.packed:
        return os.pread(file.fileno(), size, member.offset)
    enough = min(member.packed, 2 * size + 512)
    packed = os.pread(file.fileno(), enough, member.offset)
    try:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, size)
    except zlib.error:
        return b""


def check_name(name: str, archive: str) -> None:
    """Refuse what would be written outside of a folder or break a line of the log."""
    if name.startswith("/") or ".." in name.split("/") or not name.isprintable():
        raise StagingError(
            f"{archive}: a member's name, {name!r}, leads elsewhere or is not printable"
        )


def check_starts(file: BinaryIO, archive: str, images: list[Member]) -> None:
    """Refuse what is no image, by its first bytes."""
    for image in images:
        if read_member(file, image, 3) not in IMAGE_STARTS:
            raise StagingError(
                f"{archive}: {image.name} is no JPEG and no PNG, or damaged: "
                "convert it, or take it out"
            )


def check_images(images: list[Member], source: Source, devkit: Devkit | None) -> None:
    """Are there images of each class, and as many as the development kit says?"""
    classes = {"train": [], "val": []}
    for image in images:
        split, class_name, _ = image.name.split("/", 2)
        classes[split].append(class_name)
    if devkit and len(classes["train"]) != devkit.train_images:
        raise StagingError(
            f"{TRAIN} has {len(classes['train'])} images, "
            f"and {DEVKIT} says {devkit.train_images}"
        )
    if not classes["val"]:
        raise StagingError(f"{source.val.name} has no val images in class folders")
    if unknown := set(classes["val"]).difference(classes["train"]):
        raise StagingError(
            f"{source.val.name} has val images of {min(unknown)}, and none to train on"
        )


def is_image(name: str) -> bool:
    """Is it an image, and not hidden, as is what macOS adds to a zip?"""
    path = f"/{PurePosixPath(name)}"  # without ./
    return path.lower().endswith((".jpg", ".jpeg", ".png")) and "/." not in path


def say(line: str) -> None:
    print(f"{HOST}: {line}", flush=True)
