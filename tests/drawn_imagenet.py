"""Archives laid out as (Tiny) ImageNet, of made-up images that a model can learn."""

import io
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from scipy.io import savemat

DEVKIT = "ILSVRC2012_devkit_t12"


class Drawn(NamedTuple):
    """A data set's archives and what is in them: {(class, name): bytes of the file}."""

    source: Path
    train: dict[tuple[str, str], bytes]
    valid: dict[tuple[str, str], bytes]


def draw(classes: int, train: int, valid: int, resolution: int, seed: int) -> list:
    """Return each class's wnid, and its images' files to train on and to validate."""
    rng = np.random.default_rng(seed)
    drawn = []
    for label in range(classes):
        pattern = rng.uniform(40, 216, size=(4, 4, 3))
        files = []
        for i in range(train + valid):
            height, width = rng.integers(
                resolution, resolution + resolution // 2, size=2
            ).tolist()
            image = Image.fromarray(pattern.astype(np.uint8)).resize(
                (width, height), Image.BILINEAR
            )
            noise = rng.normal(scale=20, size=(height, width, 3))
            image = Image.fromarray(
                (np.asarray(image) + noise).clip(0, 255).astype(np.uint8)
            )
            # ImageNet has a few of these, too; all are called .JPEG.
            mode, kind = {(0, 0): ("CMYK", "JPEG"), (1, 0): ("RGB", "PNG")}.get(
                (label, i), ("RGB", "JPEG")
            )
            file = io.BytesIO()
            image.convert(mode).save(file, kind)
            files.append(file.getvalue())
        drawn.append((f"n{label + 1:08d}", files[:train], files[train:]))
    return drawn


def tar_bytes(files: dict[str, bytes], mode: str = "w", **options) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode, **options) as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def draw_imagenet(
    folder: Path, classes=4, train=6, valid=3, resolution=48, seed=0
) -> Drawn:
    """Write the three archives of ILSVRC2012 to a folder."""
    drawn = draw(classes, train, valid, resolution, seed)
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    # As in the real one, in another order than the wnids.
    numbers = rng.permutation(classes) + 1
    train_files, tars = {}, {}
    for wnid, images, _ in drawn:
        files = {f"{wnid}_{i}.JPEG": data for i, data in enumerate(images)}
        train_files |= {(wnid, name): data for name, data in files.items()}
        tars[f"{wnid}.tar"] = tar_bytes(files)
    (folder / "ILSVRC2012_img_train.tar").write_bytes(tar_bytes(tars))

    answers = [
        (label, data) for label, (*_, images) in enumerate(drawn) for data in images
    ]
    answers = [answers[i] for i in rng.permutation(len(answers))]
    names = [f"ILSVRC2012_val_{i + 1:08d}.JPEG" for i in range(len(answers))]
    files = {name: data for name, (_, data) in zip(names, answers, strict=True)}
    (folder / "ILSVRC2012_img_val.tar").write_bytes(tar_bytes(files))
    truth = "".join(f"{numbers[label]}\n" for label, _ in answers)
    write_devkit(
        folder,
        {wnid: len(images) for wnid, images, _ in drawn},
        numbers.tolist(),
        truth,
    )
    valid_files = {
        (drawn[label][0], name): data
        for name, (label, data) in zip(names, answers, strict=True)
    }
    return Drawn(folder, train_files, valid_files)


def write_devkit(
    folder: Path, counts: dict[str, int], numbers: list[int], truth: str
) -> None:
    """Write the development kit: classes, a synset above them, validation's answers."""
    fields = (
        "ILSVRC2012_ID WNID words gloss "
        "num_children children wordnet_height num_train_images"
    ).split()
    synsets = np.zeros(
        (len(counts) + 1, 1), dtype=[(field, object) for field in fields]
    )
    rows = sorted(zip(numbers, counts.items(), strict=True))
    for row, (number, (wnid, count)) in enumerate(rows):
        synsets[row, 0] = (
            number,
            wnid,
            f"thing {number}",
            "a thing",
            0,
            np.zeros((1, 0)),
            0,
            count,
        )
    children = np.array([sorted(numbers)])
    above = (len(counts) + 1, "n99999999", "entity", "all", len(counts), children, 1, 0)
    synsets[-1, 0] = above
    matrix = io.BytesIO()
    savemat(matrix, {"synsets": synsets})
    files = {
        "meta.mat": matrix.getvalue(),
        "ILSVRC2012_validation_ground_truth.txt": truth.encode(),
    }
    files = {f"{DEVKIT}/data/{name}": data for name, data in files.items()}
    (folder / f"{DEVKIT}.tar.gz").write_bytes(tar_bytes(files, "w:gz"))


def draw_tiny_imagenet(folder: Path, classes=3, train=5, valid=2, seed=1) -> Drawn:
    """Write tiny-imagenet-200.zip to a folder."""
    root, texts, images, annotations = "tiny-imagenet-200", {}, {}, []
    train_files, valid_files = {}, {}
    for wnid, train_set, valid_set in draw(classes, train, valid, 64, seed):
        for i, data in enumerate(train_set):
            name = f"images/{wnid}_{i}.JPEG"
            images[f"{root}/train/{wnid}/{name}"] = train_files[wnid, name] = data
        texts[f"{root}/train/{wnid}/{wnid}_boxes.txt"] = "a box\n"
        for data in valid_set:
            name = f"val_{len(annotations)}.JPEG"
            images[f"{root}/val/images/{name}"] = valid_files[wnid, name] = data
            annotations.append(f"{name}\t{wnid}\t0\t0\t63\t63\n")
    texts[f"{root}/wnids.txt"] = "".join(
        f"n{label + 1:08d}\n" for label in reversed(range(classes))
    )
    texts[f"{root}/val/val_annotations.txt"] = "".join(annotations)
    images[f"{root}/test/images/test_0.JPEG"] = data
    files = {name: text.encode() for name, text in texts.items()} | images
    folder.mkdir(parents=True, exist_ok=True)
    write_zip(folder / f"{root}.zip", files)
    return Drawn(folder, train_files, valid_files)


def draw_folders(
    path: Path, deflated=False, split=True, root="mine/", train=10, seed=2
) -> Drawn:
    """Write a zip or tar of class folders, with or without folders for the splits."""
    files, found = {}, {"train": {}, "valid": {}}
    for wnid, train_set, valid_set in draw(3, train, 2, 40, seed):
        for i, data in enumerate(train_set + valid_set):
            name = f"{i:02d}.jpg"
            held_out = i >= train if split else i % 10 == 9
            folder = ("val/" if held_out else "train/") if split else ""
            files[f"{root}{folder}class {wnid}/{name}"] = data
            found["valid" if held_out else "train"][f"class {wnid}", name] = data
    files |= {
        f"{root}README.txt": b"Mine.\n",
        f"__MACOSX/{root}train/class a/._00.jpg": b"not an image",
        f"{root}train/class a/.hidden/00.jpg": b"not an image",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".zip":
        write_zip(path, files, zipfile.ZIP_DEFLATED if deflated else zipfile.ZIP_STORED)
    else:
        path.write_bytes(tar_bytes(files))
    return Drawn(path, **found)


def write_zip(
    path: Path, files: dict[str, bytes], compression=zipfile.ZIP_STORED
) -> None:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in files.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = compression
            info.extra = b"UT\5\0\1" + bytes(4)  # as Info-ZIP's zip adds the time
            archive.writestr(info, data)


def pixels(data: bytes) -> torch.Tensor:
    """Return what Pillow, another decoder, makes of a file."""
    image = np.array(Image.open(io.BytesIO(data)).convert("RGB"))
    return torch.from_numpy(image).permute(2, 0, 1)
