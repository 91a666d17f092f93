"""Images in a folder for each class, and the worker processes that read them."""

import argparse
import logging
import os
import socket
import sys
import tempfile
import warnings
from collections import Counter
from os import environ
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision import models
from torchvision.io import decode_image
from torchvision.transforms import v2

# torchvision 0.29 would say at every image that it hands decoding over to torchcodec.
warnings.filterwarnings("ignore", "The image decoding and encoding capabilities")

# Workers pass their batches on through sockets in TMPDIR, whose paths have a limit.
if len(tempfile.gettempdir()) > 74:
    tempfile.tempdir = "/tmp"

IMAGES = (".jpg", ".jpeg", ".png", ".webp")
SPLITS = ("train", "val", "test")
SIZE = 32  # pixels
augment = v2.Compose([v2.RandomResizedCrop(SIZE), v2.RandomHorizontalFlip()])
center = v2.Compose([v2.Resize(SIZE), v2.CenterCrop(SIZE)])


class Images(Dataset):
    """The images of DATA_DIR/SPLIT/CLASS/, or a part of those of DATA_DIR/CLASS/."""

    def __init__(self, data_dir: str, split: str, seed: int):
        root = find_root(Path(data_dir))
        classes = list_folders(root)
        if any(name.lower() in SPLITS for name in classes):
            classes = list_folders(root / "train")
            files = list_images(root / split, classes)
        else:
            files = list_images(root, classes)
            files = [files[i] for i in part_of(split, len(files), seed)]
            found = f"{len(files)} images of {len(classes)} classes"
            logging.info(f"{split}: {found} in {root}, drawn by --seed")
        # Workers share arrays. Each would end up with a copy of a list.
        self.paths = np.array([path for path, _ in files])
        self.labels = np.array([label for _, label in files])
        self.seed = seed

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        return self.paths[index]

    def read(self, index: int) -> tuple[bytes, int]:
        """Return an image's bytes, a JPEG, PNG or WebP, and its class."""
        return Path(self.paths[index]).read_bytes(), int(self.labels[index])

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int]:
        """Return a sample as an epoch shows it. Epoch 0 is for evaluation."""
        epoch, index = key
        file, label = self.read(index)
        content = torch.frombuffer(bytearray(file), dtype=torch.uint8)
        try:
            image = decode_image(content, "RGB")
        except RuntimeError as error:
            raise RuntimeError(f"cannot decode {self.name(index)}: {error}") from None
        if epoch == 0:
            return center(image), label
        # What is random follows from these three, not from the worker or the rank.
        torch.default_generator.manual_seed(hash((self.seed, epoch, index)))
        return augment(image), label


def find_root(folder: Path) -> Path:
    """Return what has the splits or the classes. An archive may have a folder above."""
    inside = list_folders(folder)
    if len(inside) == 1 and inside[0] not in SPLITS:
        return find_root(folder / inside[0])
    return folder


def list_folders(folder: Path) -> list[str]:
    folders = (path.name for path in folder.iterdir() if path.is_dir())
    return sorted(name for name in folders if not name.startswith("."))


def list_images(folder: Path, classes: list[str]) -> list[tuple[str, int]]:
    """Return the path and the class of each image of folder/CLASS/."""
    images = []
    others = [path.name for path in folder.iterdir() if path.is_file()]
    for name in list_folders(folder):
        if name not in classes:
            raise ValueError(f"class {name} is in {folder.name}, but not in train")
        files = []
        for place, _, names in os.walk(folder / name, followlinks=True):
            files += [os.path.relpath(f"{place}/{file}", folder) for file in names]
        found = sorted(file for file in files if is_image(file))
        if not found:
            raise ValueError(f"no image ({', '.join(IMAGES)}) in {folder / name}")
        label = classes.index(name)
        images += [(f"{folder}/{file}", label) for file in found]
        others += [file for file in files if not is_image(file)]
    tell_left_out(folder.name, others)
    return images


def is_image(path: str) -> bool:
    return path.lower().endswith(IMAGES) and not is_hidden(path)


def is_hidden(path: str) -> bool:
    return any(part.startswith(".") for part in path.split("/"))


def tell_left_out(where: str, paths: list[str]) -> None:
    """Log how many files of which kind are no images, or not in a class folder."""
    kinds = Counter(
        "hidden" if is_hidden(path) else os.path.splitext(path)[1] or "without ending"
        for path in paths
    )
    if kinds:
        counts = [f"{count} {kind}" for kind, count in kinds.most_common()]
        logging.info(f"{where}: left out: {', '.join(counts)}")


def part_of(split: str, samples: int, seed: int) -> list[int]:
    """Draw the samples of a split: a tenth each to validate and to test."""
    order = np.random.default_rng(seed).permutation(samples).tolist()
    tenth = samples // 10
    parts = {"val": slice(tenth), "test": slice(tenth, 2 * tenth)}
    return order[parts.get(split, slice(2 * tenth, None))]


class Split:
    """A data set, and the workers that read it."""

    def __init__(self, samples: Dataset):
        self.samples = samples
        self.batches = []  # lists of keys; `load` fills it for each epoch
        self.loader = DataLoader(
            samples,
            batch_sampler=self.batches,
            num_workers=int(environ.get("SLURM_CPUS_PER_TASK", 2)),
            multiprocessing_context="fork",
            persistent_workers=True,
        )
        iter(self.loader)  # starts the workers, which stay

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def classes(self) -> int:
        return int(self.samples.labels.max()) + 1


def load_data(args: argparse.Namespace) -> list[Split]:
    """Return the training, validation and test sets.

    Call this before CUDA and NCCL are up: to fork a process that has them up hangs on
    some networks.
    """
    try:
        sets = [Images(args.data_dir, split, args.seed) for split in SPLITS]
        check_sets(*sets)
    except (OSError, ValueError) as error:
        sys.exit(f"data.py: error: {args.data_dir} on {socket.gethostname()}: {error}")
    return [Split(samples) for samples in sets]


def check_sets(train: Dataset, *others: Dataset) -> None:
    """Raise ValueError if one is empty, or a class is not in train."""
    for split, samples in zip(SPLITS, (train, *others), strict=True):
        if len(samples) == 0:
            raise ValueError(f"there is nothing in {split}")
    classes = set(train.labels.tolist())
    if wrong := classes ^ set(range(max(classes) + 1)):
        raise ValueError(
            f"train has no sample of a class, or a negative class: {wrong}"
        )
    for split, samples in zip(SPLITS[1:], others, strict=True):
        if unknown := set(samples.labels.tolist()) - classes:
            raise ValueError(f"classes in {split}, but not in train: {unknown}")


def training_batches(data: Split, global_batch_size: int, seed: int, epoch: int):
    """Yield this rank's share of an epoch: equally many batches on every rank."""
    order = np.random.default_rng((seed, epoch)).permutation(len(data))
    steps = len(data) // global_batch_size
    batches = order[: steps * global_batch_size].reshape(steps, global_batch_size)
    return load(data, epoch, batches[:, dist.get_rank() :: dist.get_world_size()])


def evaluation_batches(data: Split, batch_size: int):
    """Yield this rank's share: each sample once, on any number of ranks."""
    share = range(dist.get_rank(), len(data), dist.get_world_size())
    batches = [share[i : i + batch_size] for i in range(0, len(share), batch_size)]
    return load(data, 0, batches)


def load(data: Split, epoch: int, batches):
    """Yield the images and classes of batches of indices, on this process's device."""
    data.batches[:] = [[(epoch, int(index)) for index in batch] for batch in batches]
    for images, labels in data.loader:
        if torch.cuda.is_available():
            # Or the CPU would wait for the copy, and for all the GPU's work before it.
            images = images.pin_memory().cuda(non_blocking=True)
            labels = labels.pin_memory().cuda(non_blocking=True)
        yield images, labels


def normalize(images: Tensor) -> Tensor:
    """Return uint8 images as float32 of about mean 0 and deviation 1."""
    return ((images - 114.0) / 58.0).contiguous(memory_format=torch.channels_last)


def build_model(classes: int) -> nn.Module:
    """Return a ResNet-18 for 32 x 32 pixels, which ImageNet's would shrink to 8 x 8."""
    model = models.resnet18(num_classes=classes)
    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model
