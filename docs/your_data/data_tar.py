"""Images in tar shards, and the worker processes that read them."""

import argparse
import os
import tarfile
import warnings
from collections.abc import Iterator
from os import environ
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.io import decode_image
from torchvision.transforms import v2

# torchvision 0.29 would say at every image that it hands decoding over to torchcodec.
warnings.filterwarnings("ignore", "The image decoding and encoding capabilities")

IMAGES = (".jpg", ".jpeg", ".png")
SPLITS = ("train", "validation", "test")
SIZE = 32  # pixels
augment = v2.Compose([v2.RandomResizedCrop(SIZE), v2.RandomHorizontalFlip()])
center = v2.Compose([v2.Resize(SIZE), v2.CenterCrop(SIZE)])


class Images(Dataset):
    """The images of DATA_DIR/SPLIT/*.tar, each NAME.jpg with its class in NAME.cls."""

    def __init__(self, data_dir: str, split: str, seed: int):
        paths = sorted(Path(data_dir, split).glob("*.tar"))
        self.shards = [open(path, "rb") for path in paths]
        rows = [(n, *row) for n, path in enumerate(paths) for row in list_shard(path)]
        # Workers share an array. Each would end up with a copy of a list.
        self.index = np.array(rows)
        self.seed = seed

    def __len__(self) -> int:
        return len(self.index)

    def read(self, index: int) -> tuple[bytes, int]:
        """Return an image's file, a JPEG or PNG, and its class."""
        shard, offset, size, label = self.index[index].tolist()
        return os.pread(self.shards[shard].fileno(), size, offset), label

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int]:
        """Return a sample as an epoch shows it. Epoch 0 is for evaluation."""
        epoch, index = key
        file, label = self.read(index)
        image = decode_image(
            torch.frombuffer(bytearray(file), dtype=torch.uint8), "RGB"
        )
        if epoch == 0:
            return center(image), label
        # What is random follows from these three, not from the worker or the rank.
        torch.default_generator.manual_seed(hash((self.seed, epoch, index)))
        return augment(image), label


def list_shard(path: Path) -> Iterator[tuple[int, int, int]]:
    """Yield each image's offset, size and class."""
    with tarfile.open(path, "r:") as tar:
        members = {member.name: member for member in tar}
        # tarfile takes a damaged header for the end, which is 1024 zeros.
        tar.fileobj.seek(tar.offset)
        if tar.fileobj.read(1024) != bytes(1024):
            raise tarfile.ReadError(f"{path} is cut or damaged")
        for name, image in members.items():
            stem, suffix = os.path.splitext(name)
            if suffix in IMAGES:
                label = tar.extractfile(members[f"{stem}.cls"]).read()
                yield image.offset_data, image.size, int(label)


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


def load_data(args: argparse.Namespace) -> list[Split]:
    """Return the training, validation and test sets.

    Call this before CUDA and NCCL are up: to fork a process that has them up hangs on
    some networks.
    """
    return [Split(Images(args.data_dir, split, args.seed)) for split in SPLITS]


def training_batches(data: Split, global_batch_size: int, seed: int, epoch: int):
    """Yield this rank's share of an epoch: as many batches on every rank."""
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
