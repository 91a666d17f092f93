"""Archives laid out as ImageNet, of made-up images that a model can learn."""

import io
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from scipy.io import savemat

DEVKIT = "ILSVRC2012_devkit_t12"


class Drawn(NamedTuple):
    """A data set's archives and what is in them: {(class, name): bytes of the file}."""

    source: Path
    train: dict[tuple[str, str], bytes]
    valid: dict[tuple[str, str], bytes]


def encode(image: Image.Image, kind: str, **options) -> bytes:
    """Return an image's file, of a kind such as PNG."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def draw(classes: int, train: int, valid: int, resolution: int, seed: int):
    """Yield each class's wnid, and its images' files to train on and to validate."""
    rng = np.random.default_rng(seed)
    for label in range(classes):
        pattern = rng.uniform(40, 216, size=(4, 4, 3)).astype(np.uint8)
        files = []
        for i in range(train + valid):
            height, width = rng.integers(resolution, resolution * 3 // 2, 2).tolist()
            resized = Image.fromarray(pattern).resize((width, height), Image.BILINEAR)
            image = np.asarray(resized) + rng.normal(scale=20, size=(height, width, 3))
            image = Image.fromarray(image.clip(0, 255).astype(np.uint8))
            # ImageNet has a few of these, too; all are called .JPEG.
            mode = "CMYK" if (label, i) == (0, 0) else "RGB"
            kind = "PNG" if (label, i) == (1, 0) else "JPEG"
            files.append(encode(image.convert(mode), kind))
        yield f"n{label + 1:08d}", files[:train], files[train:]


def tar_bytes(files: dict[str, bytes], mode: str = "w", **options) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode, **options) as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def bad_png() -> bytes:
    """Return a PNG whose checksum is right, and whose compressed pixels are not."""
    data = bytearray(encode(Image.effect_noise((48, 40), 60).convert("RGB"), "PNG"))
    start = data.index(b"IDAT")
    size = int.from_bytes(data[start - 4 : start])
    end = start + 4 + size
    data[start + 4 + size // 2] ^= 255
    data[end : end + 4] = zlib.crc32(data[start:end]).to_bytes(4)
    return bytes(data)


def draw_imagenet(folder: Path, classes=4, train=6, valid=3, resolution=48) -> Drawn:
    """Write the three archives of ILSVRC2012 to a folder."""
    drawn = draw(classes, train, valid, resolution, seed=0)
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    # As in the real one, in another order than the wnids.
    numbers = (rng.permutation(classes) + 1).tolist()
    found, tars = Drawn(folder, {}, {}), {}
    answers, synsets = [], []
    for number, (wnid, images, valid_images) in zip(numbers, drawn, strict=True):
        files = {f"{wnid}_{i}.JPEG": data for i, data in enumerate(images)}
        for name in files:
            found.train[wnid, name] = files[name]
        tars[f"{wnid}.tar"] = tar_bytes(files)
        answers += [(number, wnid, data) for data in valid_images]
        synsets.append((number, wnid, "a word", "a gloss", 0, train))
    (folder / "ILSVRC2012_img_train.tar").write_bytes(tar_bytes(tars))

    rng.shuffle(answers)
    val, truth = {}, ""
    for i, (number, wnid, data) in enumerate(answers, start=1):
        name = f"ILSVRC2012_val_{i:08d}.JPEG"
        val[name] = found.valid[wnid, name] = data
        truth += f"{number}\n"
    (folder / "ILSVRC2012_img_val.tar").write_bytes(tar_bytes(val))

    # A synset above them. torchvision reads fields by their place.
    synsets.append((classes + 1, "n99999999", "above", "all", classes, 0))
    fields = "ILSVRC2012_ID WNID words gloss num_children num_train_images"
    kind = [(field, object) for field in fields.split()]
    matrix = io.BytesIO()
    savemat(matrix, {"synsets": np.array(synsets, dtype=kind)[:, None]})
    files = {
        f"{DEVKIT}/data/meta.mat": matrix.getvalue(),
        f"{DEVKIT}/data/ILSVRC2012_validation_ground_truth.txt": truth.encode(),
    }
    (folder / f"{DEVKIT}.tar.gz").write_bytes(tar_bytes(files, "w:gz"))
    return found


def draw_folders(path: Path, split=True) -> Drawn:
    """Write a zip or tar of class folders, with or without folders for the splits.

    Tar has two ways to store long names: GNU's and POSIX's.
    """
    files, found = {}, Drawn(path, {}, {})
    for wnid, train_set, valid_set in draw(3, 10, 2, 40, seed=2):
        class_name = f"class {wnid}"
        for i, data in enumerate(train_set + valid_set):
            held_out = i >= len(train_set) if split else i % 10 == 0
            name = f"{'deep/' * 30 if split else 'é' * 60}{i:02d}.jpg"
            folder = ("val/" if held_out else "train/") if split else ""
            files[f"mine/{folder}{class_name}/{name}"] = data
            (found.valid if held_out else found.train)[class_name, name] = data
    for name in ("README.txt", "train/class a/.hidden/00.jpg", "__MACOSX/a/._00.jpg"):
        files[f"mine/{name}"] = b"not an image"
    files["mine/Test/00.jpg"] = data  # without a label
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".zip":
        write_zip(path, files, zipfile.ZIP_DEFLATED)
    else:
        form = tarfile.GNU_FORMAT if split else tarfile.PAX_FORMAT
        path.write_bytes(tar_bytes(files, format=form))
    return found


def write_zip(
    path: Path, files: dict[str, bytes], compression=zipfile.ZIP_STORED
) -> None:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in files.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = compression
            info.extra = b"UT\5\0\1" + bytes(4)  # as Info-ZIP's zip adds the time
            archive.writestr(info, data)
