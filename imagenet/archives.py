"""What lies where in an archive, and whether it is whole.

Archives are ImageNet's three, Tiny ImageNet's zip, or a zip or tar of class folders.
"""

import collections
import os
import socket
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple

import numpy as np

TRAIN = "ILSVRC2012_img_train.tar"  # a tar of a tar for each class
VAL = "ILSVRC2012_img_val.tar"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png")
IMAGE_STARTS = (b"\xff\xd8\xff", b"\x89PN")  # the first bytes of a JPEG, of a PNG
HOST = socket.gethostname().split(".")[0]


class StagingError(Exception):
    """What a user can put right; its text is one line that says how."""


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

    train_counts: dict[str, int]  # images of each class
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
                f"{path} on {HOST} has {len(found)} archives, and no {TRAIN}: "
                "name one archive with --source or IMAGENET_DIR"
            )
        path = found[0]
    return Source(path, path)


def list_class_tars(archive: Path) -> list[Member]:
    """Return the tars of the classes, if it is ImageNet's training set."""
    if archive.name != TRAIN:
        return []
    with open(archive, "rb") as file:
        return list_tar(file, str(archive), archive.stat().st_size)


def list_class(file: BinaryIO, archive: Path, class_tar: Member) -> list[Member]:
    """Return the images of a class of ImageNet's training set."""
    file.seek(class_tar.offset)
    archive_name = f"{archive}: {class_tar.name}"
    members = list_tar(file, archive_name, class_tar.offset + class_tar.size)
    check_starts(file, archive_name, members)
    folder = f"train/{class_tar.name.removesuffix('.tar')}"
    return [member._replace(name=f"{folder}/{member.name}") for member in members]


def list_images(file: BinaryIO, archive: Path, devkit: Devkit | None) -> list[Member]:
    """Return the images of any archive but ImageNet's training set.

    `file` is the archive or a copy of it; errors name the archive.
    """
    if archive.suffix == ".zip":
        members = list_zip(file, archive)
    else:
        members = list_tar(file, str(archive), os.fstat(file.fileno()).st_size)
    if devkit:
        images = label_val(members, archive, devkit)
    else:
        found = [member for member in members if is_image(member.name)]
        images = find_class_folders(found) or hold_out(found, archive)
        images = label_tiny_val(images, members, file)
    check_starts(file, str(archive), images)
    return images


def list_tar(file: BinaryIO, archive_name: str, end: int) -> list[Member]:
    """Return the files in the tar that lies from the file's position to `end`."""
    members = []
    whole = False
    try:
        tar = tarfile.open(fileobj=file, mode="r:")
        while info := tar.next():
            tar.members.clear()  # it would keep a kilobyte of each
            check_name(info.name, archive_name)
            if info.isfile() and not info.issparse():
                members.append(Member(info.name, info.offset_data, info.size))
            elif not info.isdir():
                raise StagingError(
                    f"{archive_name}: {info.name} is a link or a device: refused"
                )
        # tarfile takes a damaged header for the end.
        file.seek(tar.offset)
        whole = file.read(1024) == bytes(1024) and file.tell() <= end
    except tarfile.TarError:
        pass
    if not whole:
        after = f"after {members[-1].name}" if members else "at its start"
        raise StagingError(f"{archive_name} is cut, damaged or compressed, {after}")
    return members


def list_zip(file: BinaryIO, archive: Path) -> list[Member]:
    """Return the files in a zip."""
    members = []
    try:
        listed = zipfile.ZipFile(file).infolist()
    except (zipfile.BadZipFile, ValueError) as error:
        raise StagingError(f"{archive} is damaged: {error}: fetch it again") from None
    for info in listed:
        check_name(info.filename, str(archive))
        # The bytes lie after this header and two fields, whose sizes it has. If bytes
        # are missing before the zip's directory, offsets there become negative.
        header = os.pread(file.fileno(), 30, max(info.header_offset, 0))
        if info.header_offset < 0 or header[:4] != b"PK\3\4":
            raise StagingError(
                f"{archive} is cut or damaged at {info.filename}: fetch it again"
            )
        name_size, extra_size = struct.unpack_from("<HH", header, 26)
        offset = info.header_offset + 30 + name_size + extra_size
        packed = info.compress_size
        if info.compress_type == zipfile.ZIP_STORED:
            packed = 0
        if not info.is_dir():
            members.append(Member(info.filename, offset, info.file_size, packed))
    return members


def find_class_folders(members: list[Member]) -> list[Member]:
    """Return the images in [any/folder/]train/CLASS/[any/folder/], and in val."""
    images = []
    for member in members:
        folders = PurePosixPath(member.name).parts
        for i, folder in enumerate(folders[:-2]):
            if folder in ("train", "val"):
                images.append(member._replace(name="/".join(folders[i:])))
                break
    return images


def hold_out(members: list[Member], archive: Path) -> list[Member]:
    """Return the images in [any/folder/]CLASS/, with every tenth one in val."""
    print(
        f"{HOST}: {archive.name} has no train and val folders: "
        "every tenth image of a class is held out",
        flush=True,
    )
    seen = collections.Counter()
    images = []
    for member in sorted(members):
        path = PurePosixPath(member.name)
        if class_name := path.parent.name:
            seen[class_name] += 1
            split = "train" if seen[class_name] % 10 else "val"
            images.append(member._replace(name=f"{split}/{class_name}/{path.name}"))
    return images


def label_tiny_val(
    images: list[Member], members: list[Member], file: BinaryIO
) -> list[Member]:
    """Give Tiny ImageNet's validation images their classes, if it is Tiny ImageNet.

    They lie all in one folder, and a text file says of which class they are.
    """
    labeled = {}
    for member in members:
        if member.name.endswith("/val_annotations.txt"):
            text = read_member(file, member, member.size).decode()
            for line in text.splitlines():
                name, class_name = line.split("\t")[:2]
                labeled[f"val/images/{name}"] = f"val/{class_name}/{name}"
    return [
        image._replace(name=labeled.get(image.name, image.name)) for image in images
    ]


def label_val(members: list[Member], archive: Path, devkit: Devkit) -> list[Member]:
    """Return ImageNet's validation images, named after their classes."""
    labels = devkit.val_classes
    if len(members) != len(labels):
        raise StagingError(
            f"{archive} has {len(members)} images, and {DEVKIT} {len(labels)} labels"
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
            numbers = [int(line) for line in truth]
        # A synset with children is no class.
        leaves = [s for s in np.atleast_1d(meta["synsets"]) if s["num_children"] == 0]
        class_of = {leaf["ILSVRC2012_ID"]: str(leaf["WNID"]) for leaf in leaves}
        counts = {str(leaf["WNID"]): int(leaf["num_train_images"]) for leaf in leaves}
        return Devkit(counts, [class_of[number] for number in numbers])
    except Exception as error:  # of tarfile, gzip, zlib, SciPy or NumPy
        raise StagingError(f"{archive} is damaged: {error!r}: fetch it again") from None


def read_member(file: BinaryIO, member: Member, size: int) -> bytes:
    """Return the first `size` bytes of a member, or fewer if it is damaged."""
    if not member.packed:
        return os.pread(file.fileno(), size, member.offset)
    enough = min(member.packed, 2 * size + 512)
    packed = os.pread(file.fileno(), enough, member.offset)
    try:
        return zlib.decompressobj(wbits=-zlib.MAX_WBITS).decompress(packed, size)
    except zlib.error:
        return b""


def check_name(name: str, archive_name: str) -> None:
    """Refuse what would be written outside of a folder or break a line of the log."""
    if name.startswith("/") or ".." in name.split("/") or not name.isprintable():
        raise StagingError(
            f"{archive_name}: a member's name, {name!r}, "
            "leads elsewhere or cannot be printed"
        )


def check_starts(file: BinaryIO, archive_name: str, images: list[Member]) -> None:
    """Refuse what is no image, by its first bytes."""
    for image in images:
        if read_member(file, image, 3) not in IMAGE_STARTS:
            raise StagingError(
                f"{archive_name}: {image.name} is no JPEG and no PNG: "
                "convert it, or take it out"
            )


def check_images(images: list[Member], source: Source, devkit: Devkit | None) -> None:
    """Are there images of each class, and as many as the development kit says?"""
    counts = {"train": collections.Counter(), "val": collections.Counter()}
    for image in images:
        split, class_name, _ = image.name.split("/", 2)
        counts[split][class_name] += 1
    if devkit and (different := counts["train"].items() ^ devkit.train_counts.items()):
        name, _ = min(different)
        raise StagingError(
            f"{source.train} has {counts['train'][name]} images of {name}, "
            f"and {DEVKIT} {devkit.train_counts.get(name, 0)}"
        )
    if not counts["val"]:
        raise StagingError(f"{source.val} has no val images in class folders")
    if unknown := counts["val"].keys() - counts["train"].keys():
        raise StagingError(
            f"{source.val} has val images of {min(unknown)}, and none to train on"
        )


def is_image(name: str) -> bool:
    """Is it an image, and not in a hidden folder or in what macOS adds to a zip?"""
    path = f"/{PurePosixPath(name)}"  # without ./
    hidden = "/." in path or "/__MACOSX" in path
    return path.lower().endswith(IMAGE_SUFFIXES) and not hidden
