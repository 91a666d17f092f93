"""Images in tar shards, and the worker processes that read them."""

import argparse
import logging
import os
import socket
import sys
import tarfile
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
    """The images of DATA_DIR/SPLIT/*.tar, each NAME.jpg with its class in NAME.cls."""

    def __init__(self, data_dir: str, split: str, seed: int):
        folder = find_root(Path(data_dir)) / split
        paths = sorted(folder.glob("*.tar"))
        others = [path.name for path in folder.iterdir() if path not in paths]
        rows = []
        for number, path in enumerate(paths):
            rows += [(number, *row) for row in list_shard(path, others)]
        tell_left_out(split, others)
        self.shards = [open(path, "rb") for path in paths]
        # Workers share an array. Each would end up with a copy of a list.
        self.index = np.array(rows, dtype=np.int64).reshape(-1, 4)
        self.labels = self.index[:, 3]
        self.seed = seed

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        shard, offset, *_ = self.index[index].tolist()
        return f"the image at byte {offset} of {self.shards[shard].name}"

    def read(self, index: int) -> tuple[bytes, int]:
        """Return an image's bytes, a JPEG, PNG or WebP, and its class."""
        shard, offset, size, label = self.index[index].tolist()
        return os.pread(self.shards[shard].fileno(), size, offset), label

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


def list_shard(path: Path, others: list[str]) -> list[tuple[int, int, int]]:
    """Return each image's offset, size and class. Add other files to `others`."""
    with open(path, "rb") as file:
        try:
            tar = tarfile.open(fileobj=file, mode="r:")
            members = {member.name: member for member in tar}
            files = [member for member in tar.getmembers() if not member.isdir()]
            # tarfile takes a damaged header for the end, and ignores what follows it.
            file.seek(tar.offset)
            if file.read(1024) != bytes(1024) or file.read().strip(b"\0"):
                raise tarfile.ReadError("it has no end, or something after it")
        except tarfile.TarError as error:
            raise ValueError(f"{path} is cut or damaged: {error}") from error
        if len(members) < len(tar.getmembers()):
            raise ValueError(f"{path} has two members of one name")
        rows = []
        for member in files:
            stem, suffix = os.path.splitext(member.name)
            if is_image(os.path.normpath(member.name)):
                if f"{stem}.cls" not in members:
                    raise ValueError(f"{path} has no {stem}.cls")
                if not member.isreg() or member.issparse():
                    raise ValueError(f"{path}: {member.name} is a link, or sparse")
                label = tar.extractfile(members[f"{stem}.cls"]).read()
                if not label.strip().isdigit():
                    raise ValueError(f"{path}: there is no number in {stem}.cls")
                rows.append((member.offset_data, member.size, int(label)))
            elif suffix != ".cls":
                others.append(os.path.normpath(member.name))
    if not rows:
        raise ValueError(f"no image ({', '.join(IMAGES)}) in {path}")
    return rows


def is_image(path: str) -> bool:
    return path.lower().endswith(IMAGES) and not is_hidden(path)


def is_hidden(path: str) -> bool:
    return any(part.startswith(".") for part in path.split("/"))


def tell_left_out(where: str, paths: list[str]) -> None:
    """Log how many files of which kind are no images."""
    kinds = Counter(
        "hidden" if is_hidden(path) else os.path.splitext(path)[1] or "without ending"
        for path in paths
    )
    if kinds:
        counts = [f"{count} {kind}" for kind, count in kinds.most_common()]
        logging.info(f"{where}: left out: {', '.join(counts)}")


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
