"""What lies where in an archive or a tree, and whether it is whole.

Archives are ImageNet's three, Tiny ImageNet's zip, or a zip or tar of class folders.
"""

import collections
import contextlib
import logging
import os
import re
import socket
import stat
import tarfile
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
# Training, seg_test, trainA: folders that are called so are splits. A valve is a class.
SPLIT = re.compile(
    "(^|[^a-z])(train|val|test)(ing|id|idation)?(?-i:(?![a-z]))", re.IGNORECASE
)
# Beside classes, train (of a railway) or test_positive is a class. These are splits.
NO_CLASS = re.compile(
    r"(?!(train|val|test)$)(seg[ _-]?)?(train|test|training|testing|val|valid|"
    r"validation)[ _-]?(set|split|data|images?|imgs?|photos?|pictures?|\d{4})?",
    re.IGNORECASE,
)
# And what macOS and file servers add to folders.
HIDDEN = re.compile(
    r"(^|/)(\.|__MACOSX/|@eaDir/|#recycle/|#snapshot/|\$RECYCLE\.BIN/|lost\+found/|"
    r"Icon\r)"
)
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


class Devkit(NamedTuple):
    """What ImageNet's development kit says about the images."""

    train_images: int
    val_classes: list[str]  # of each image, in the order of their names


def job_folder() -> str:
    """Return the folder that job.sh has made on the node's disk for this job, or ""."""
    folder = os.environ.get("LOCAL_JOB_DIR", "")
    # What another job has left in the shell that submitted this one does not count.
    return folder if f"/slurm-job-{os.environ.get('SLURM_JOB_ID')}-" in folder else ""


def find_source(path: Path) -> Source:
    """Return the archives that `path` names or has."""
    imagenet = Source(path / TRAIN, path / VAL, path / DEVKIT)
    if any(archive.exists() for archive in imagenet):
        return imagenet
    if path.is_dir():
        found = [p for p in path.glob("[!.]*") if p.suffix.lower() in (".zip", ".tar")]
        if len(found) != 1:
            raise StagingError(
                f"it has {len(found)} archives, and no {TRAIN}: name one .zip or .tar "
                "with --source or IMAGENET_DIR; main.py --data-dir takes a tree"
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
            members = list_tar(file, TRAIN, 0, size)
        for member in members:
            if member.name.endswith(".tar") and not is_hidden(member.name):
                end = member.offset + member.size
                parts.append((start, end, member))
                start = end
    for at in range(start, size, 2**26):
        parts.append((at, min(at + 2**26, size), None))
    return parts


def list_class(file: BinaryIO, class_tar: Member) -> list[Member]:
    """Return the images of a class of ImageNet's training set."""
    archive = f"{TRAIN}: {class_tar.name}"
    start = class_tar.offset
    members = list_tar(file, archive, start, start + class_tar.size)
    class_name = PurePosixPath(class_tar.name).stem
    names = {m.name: f"train/{class_name}/{os.path.basename(m.name)}" for m in members}
    return select(members, names, archive)


def list_images(file: BinaryIO, devkit: Devkit | None) -> list[Member]:
    """Return the images of any archive but ImageNet's training set."""
    archive = os.path.basename(file.name)
    if archive.lower().endswith(".zip"):
        members = list_zip(file, archive)
    else:
        members = list_tar(file, archive, 0, os.path.getsize(file.name))
    if devkit:
        return select(members, label_val(members, devkit), archive)
    return find_images(members, archive, read_annotations(members, file))


def list_tree(folder: Path) -> list[Member]:
    """Return the images of a tree: of train/CLASS/ and val/CLASS/, or of CLASS/."""
    tops = [folder]
    if (folder / "train").is_dir():
        tops = [top for top in (folder / "train", folder / "val") if top.is_dir()]
    names = [path.removeprefix(f"{folder}/") for top in tops for path in walk(top)]
    depths = {name.count("/") for name in names if is_image(name)}
    if tops == [folder] and 1 not in depths:
        raise StagingError(f"{folder} has neither train/CLASS/ nor CLASS/ with images")
    members = [Member(check_name(name, str(folder))) for name in names]
    return find_images(members, str(folder), {})


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


def list_tar(file: BinaryIO, archive: str, start: int, end: int) -> list[Member]:
    """Return what is in the tar that lies there in a file."""
    members = []
    file.seek(start)
    try:
        tar = tarfile.open(fileobj=file, mode="r:")
        for info in tar:
            name = check_name(info.name, archive)
            if info.isdir():
                members.append(Member(f"{name}/"))
            elif info.isfile() and not info.issparse():
                members.append(Member(name, info.offset_data, info.size))
            else:
                raise StagingError(
                    f"{archive}: {name} is a link, a device or sparse: make the tar "
                    "with --dereference --hard-dereference, and without --sparse"
                )
        # tarfile takes a damaged header for the end, which is 1024 zeros, or more. All
        # of a tar is blocks of 512.
        left = end - tar.offset
        plausible = left in range(1024, 2**20, 512)
        if not plausible or any(os.pread(file.fileno(), left, tar.offset)):
            raise tarfile.ReadError
    except tarfile.TarError:
        after = f"after {members[-1].name}" if members else "at its start"
        raise StagingError(
            f"{archive} is cut, damaged, compressed, or several in one, {after}: "
            "fetch it again, or make one .tar"
        ) from None
    return members


def list_zip(file: BinaryIO, archive: str) -> list[Member]:
    """Return what is in a zip."""
    members = []
    try:
        with zipfile.ZipFile(file) as listed:
            for info in listed.infolist():
                name = info.filename
                if name == "/":  # Dropbox
                    continue
                if not info.flag_bits & 0x800:
                    # Finder, for one, writes UTF-8 and does not say so.
                    with contextlib.suppress(UnicodeError):
                        name = name.encode("cp437").decode()
                if "/" not in name:  # Some of Windows' programs write backslashes.
                    name = name.replace("\\", "/")
                if stat.S_ISLNK(info.external_attr >> 16):
                    raise StagingError(f"{archive}: {name} is a link: zip without -y")
                method = info.compress_type
                if info.flag_bits & 1 or method not in (0, zipfile.ZIP_DEFLATED):
                    raise StagingError(
                        f"{archive}: {name} is encrypted, or compressed by method "
                        f"{method}: make the zip with method 8, deflate, or 0, none"
                    )
                with listed.open(info):  # compares two headers, and reads one
                    offset = file.tell()
                name = check_name(name, archive)
                packed = info.compress_size if method else 0
                members.append(Member(name, offset, info.file_size, packed, info.CRC))
            check_end(file, listed)
    # If bytes are missing in the middle, offsets are negative: that is an OSError.
    except (zipfile.BadZipFile, OSError, RuntimeError, ValueError) as error:
        raise StagingError(
            f"{archive} is damaged: {error}: fetch it again, or pack a .tar (macOS "
            "makes zips of over 4 GB that cannot be read)"
        ) from None
    return members


def check_end(file: BinaryIO, listed: zipfile.ZipFile) -> None:
    """Raise ValueError where zipfile does not see that a zip is not whole.

    Another zip may lie before it, anything after its end, or a damaged entry of its
    list has swallowed the next one.
    """
    starts = [info.header_offset for info in listed.infolist()]
    file.seek(-22 - len(listed.comment), os.SEEK_END)
    end = file.read(12)
    count = int.from_bytes(end[10:], "little")
    # More do not fit: the field has 65535, or macOS's remainder.
    as_listed = count in (65535, len(starts) % 65536)
    if end[:4] != b"PK\5\6" or not as_listed or 0 not in starts:
        raise ValueError("it has more files, or more bytes, than its list says")


def find_images(
    members: list[Member], where: str, class_of: dict[str, str]
) -> list[Member]:
    """Return the images in [any/folder/]train/CLASS/[any/folder/], and in val.

    If there are none, those in [any/folder/]CLASS/, with every tenth one in val.
    `class_of` has the classes of Tiny ImageNet's val images, which share a folder.
    """
    names = [member.name for member in members if not is_hidden(member.name)]
    new_names = {}
    tops = set()
    for name in names:
        if place := re.search("(?:^|/)(train|val)/([^/]+)/(.*)", name):
            split, class_name, rest = place.groups()
            if split == "val":
                class_name = class_of.get(os.path.basename(rest), class_name)
            new_names[name] = f"{split}/{class_name}/{rest}"
            if is_image(name):
                tops.add(name[: place.start()] or ".")
    if len(tops) > 1:
        # Such as masks beside the images, or several folds.
        raise StagingError(
            f"{where} has train/ or val/ in {' and in '.join(sorted(tops))}: keep one"
        )
    if not tops:
        new_names = hold_out(names, where)
    images = select(members, new_names, where)
    # Tiny ImageNet's val/images/ is no class.
    folders = {
        new.split("/")[1]
        for new in new_names.values()
        if new.startswith("train/") or not class_of
    }
    check_classes(images, where, folders)
    return images


def read_annotations(members: list[Member], file: BinaryIO) -> dict[str, str]:
    """Return the classes of Tiny ImageNet's val images, which all lie in one folder."""
    for member in members:
        if member.name.endswith("val/val_annotations.txt"):
            text = read_member(file, member).decode("utf-8-sig", "replace")
            lines = text.splitlines()
            return dict(line.split("\t")[:2] for line in lines if "\t" in line)
    return {}


def hold_out(names: list[str], where: str) -> dict[str, str]:
    """Return new names for what is in [any/folder/]CLASS/, with every tenth in val."""
    places = [name.split("/") for name in sorted(names) if "/" in name]
    images = [place for place in places if is_image(place[-1])]
    # Images that lie in train/ or test/ itself have no class.
    if all(SPLIT.search(class_name) for *_, class_name, _ in images):
        raise StagingError(
            f"{where} has no images in train/CLASS/, val/CLASS/ or CLASS/: "
            "rename a class that is called like train, val or test"
        )
    top = images[0][:-2]
    for image in images:
        if image[:-2] != top:
            raise StagingError(
                f"{where} has no images in train/CLASS/ and val/CLASS/, and "
                f"{'/'.join(image)} is not in a class folder beside the others"
            )
        if NO_CLASS.fullmatch(image[-2]):
            raise StagingError(
                f"{where}: {image[-2]}, beside the classes, is called like a split: "
                "make train/CLASS/ and val/CLASS/, or take it out, or rename it"
            )
    logging.info(f"{where} has no train and val folders: one image in ten is held out")
    seen = collections.Counter()
    new_names = {}
    for *folders, class_name, name in places:
        if folders == top and class_name.lower() not in ("val", "test"):
            seen[class_name] += is_image(name)
            tenth = is_image(name) and seen[class_name] % 10 == 1
            new = f"{'val' if tenth else 'train'}/{class_name}/{name}"
            new_names["/".join([*folders, class_name, name])] = new
    return new_names


def label_val(members: list[Member], devkit: Devkit) -> dict[str, str]:
    """Return new names for ImageNet's validation images.

    An image's number says its class, whatever folder it has been put in.
    """
    class_of = {f"{i:08}": name for i, name in enumerate(devkit.val_classes, start=1)}
    new_names = {}
    for member in members:
        name = os.path.basename(member.name)
        number = re.search(r"val_(\d+)", name)
        if number and number[1] in class_of:
            new_names[member.name] = f"val/{class_of[number[1]]}/{name}"
    return new_names


def select(
    members: list[Member], new_names: dict[str, str], where: str
) -> list[Member]:
    """Return the images, renamed; say in a line what is left out."""
    images = []
    left_out = collections.Counter()
    for member in members:
        name = member.name
        if name.endswith("/"):
            continue
        if is_hidden(name):
            left_out["hidden"] += 1
        elif not is_image(name):
            left_out[PurePosixPath(name).suffix.lower() or "without a suffix"] += 1
        elif name not in new_names:
            left_out["in other places"] += 1
        else:
            images.append(member._replace(name=new_names[name]))
    if left_out:
        counts = [f"{count} {kind}" for kind, count in left_out.items()]
        logging.info(f"{where}: left out: {', '.join(counts)}")
    return images


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


def read_member(file: BinaryIO, member: Member) -> bytes:
    """Return a member. Raises ValueError or zlib.error."""
    data = os.pread(file.fileno(), member.packed or member.size, member.offset)
    if member.packed:
        data = zlib.decompress(data, -zlib.MAX_WBITS)
    if len(data) != member.size or (member.crc and member.crc != zlib.crc32(data)):
        raise ValueError("its bytes are damaged")
    return data


def check_name(name: str, archive: str) -> str:
    """Normalize a name. Refuse one that leads elsewhere or breaks a line of the log."""
    # Finder calls a folder's own icon so.
    strange = re.search("[\0-\x1f\x7f\ud800-\udfff]", name.removesuffix("Icon\r"))
    if strange or name.startswith("/") or ".." in name.split("/"):
        raise StagingError(
            f"{archive}: a member's name, {name!r}, leads elsewhere or is not "
            "printable: remove or rename it"
        )
    return os.path.normpath(name) + "/" * name.endswith("/")


def check_imagenet(images: list[Member], devkit: Devkit) -> None:
    """Are there as many as the development kit says, and images of each class?"""
    for archive, split, right in (
        (TRAIN, "train", devkit.train_images),
        (VAL, "val", len(devkit.val_classes)),
    ):
        count = sum(image.name.startswith(split) for image in images)
        if count != right:
            raise StagingError(
                f"{archive} has {count} images, and {DEVKIT} says {right}"
            )
    check_classes(images, "ImageNet")


def check_classes(
    images: list[Member], where: str, folders: Iterable[str] = ()
) -> None:
    """Has each class, and each of these folders, images of both splits?"""
    classes = {"train": set(), "val": set()}
    names = set()
    for image in images:
        split, class_name, _ = image.name.split("/", 2)
        classes[split].add(class_name)
        if image.name in names:
            raise StagingError(
                f"{where}: there are two images {image.name}: remove one"
            )
        names.add(image.name)
    everything = classes["train"].union(classes["val"], folders)
    if len(everything) == 1:
        raise StagingError(
            f"{where} has a single class, {min(everything)}: "
            "put the images of each class in a folder of its own"
        )
    for split in classes:
        if missing := everything - classes[split]:
            raise StagingError(
                f"{where} has no {split} images of {min(missing)}: "
                "put JPEG, PNG or WebP into train/CLASS/ and val/CLASS/, "
                "or remove the class"
            )


def make_index(images: list[Member]) -> tuple[list[str], dict[str, np.ndarray]]:
    """Return the classes, and for train and val a row for each image: see Member.

    Rows are sorted by label and name, which is CLASS/NAME. Labels are places in the
    list of classes.
    """
    classes = sorted({image.name.split("/")[1] for image in images})
    label_of = {class_name: label for label, class_name in enumerate(classes)}
    rows = {"train": [], "val": []}
    for path, *place in images:
        split, name = path.split("/", 1)
        label = label_of[name.split("/")[0]]
        rows[split].append((label, name.encode(), *place))
    fields = "label, name, offset, size, packed, crc"
    return classes, {
        split: np.rec.fromrecords(sorted(rows[split]), names=fields) for split in rows
    }


def is_image(name: str) -> bool:
    return name.lower().endswith(IMAGES)


def is_hidden(name: str) -> bool:
    return bool(HIDDEN.search(name))
