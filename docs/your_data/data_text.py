"""Tokens of a Hugging Face data set, and the worker processes that read them."""

import argparse
import socket
import sys
import tempfile
from os import environ

import numpy as np
import torch
import torch.distributed as dist
from datasets import load_from_disk
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

# Workers pass their batches on through sockets in TMPDIR, whose paths have a limit.
if len(tempfile.gettempdir()) > 74:
    tempfile.tempdir = "/tmp"

SPLITS = ("train", "val", "test")
VOCABULARY = 30522  # how many tokens your tokenizer knows


class Texts(Dataset):
    """The rows of DATA_DIR/SPLIT, a file that all processes of a node share."""

    def __init__(self, data_dir: str, split: str):
        self.rows = load_from_disk(f"{data_dir}/{split}")
        self.labels = np.array(self.rows["label"])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int]:
        """Return a text's tokens, whose number is the same for all, and its class."""
        _, index = key
        return torch.tensor(self.rows[index]["input_ids"]), int(self.labels[index])


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
        sets = [Texts(args.data_dir, split) for split in SPLITS]
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


def normalize(tokens: Tensor) -> Tensor:
    return tokens


def build_model(classes: int) -> nn.Module:
    """Return a model that averages the vectors of a text's tokens."""
    average = nn.EmbeddingBag(VOCABULARY, 128, padding_idx=0)
    return nn.Sequential(average, nn.Linear(128, classes))
