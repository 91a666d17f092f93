"""What a rank trains on: which samples, in which order, decoded by its processes."""

import argparse
import atexit
import math
import multiprocessing.util
import signal
import socket
import sys
from collections.abc import Iterable

import numpy as np
import torch
import torch.distributed as dist
from checkpoint import Run, RunError
from prepare_data import Pictures, Synthetic
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Sampler
from torchvision.transforms import v2


class RandomResizedCrop(v2.RandomResizedCrop):
    """Keeps a pixel's colours side by side, as decoded: so they are resized faster."""

    def transform(self, inpt: Tensor, params: dict[str, int]) -> Tensor:
        crop = v2.functional.crop(inpt, **params)[None].contiguous(
            memory_format=torch.channels_last
        )
        return F.interpolate(crop, self.size, mode="bilinear", antialias=True)[0]


class Augmented(Dataset):
    """Pictures as a step takes them, uint8 in (3, size, size), and their classes."""

    def __init__(
        self,
        pictures: Pictures | Synthetic,
        limit: int | None,
        args: argparse.Namespace,
    ):
        self.size = size = (args.image_size, args.image_size)
        self.pictures, self.seed = pictures, args.seed
        self.chosen = np.sort(
            np.random.default_rng(0).permutation(len(pictures))[:limit]
        )
        self.crop_and_flip = v2.Compose(
            [RandomResizedCrop(size), v2.RandomHorizontalFlip()]
        )
        self.center = v2.Compose(
            [v2.Resize(args.image_size * 256 // 224), v2.CenterCrop(size)]
        )

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int]:
        epoch, index = key  # epoch 0 is not for training
        if index < 0:
            # Padding: a label of -100 counts nowhere.
            return torch.zeros(3, *self.size, dtype=torch.uint8), -100
        if epoch:
            # The draw follows from these three, not from the worker or the rank that
            # makes it. torch.manual_seed would seed every kind of device: 0.2 ms.
            torch.default_generator.manual_seed(mix(self.seed, epoch, index))
        transform = self.crop_and_flip if epoch else self.center
        return transform(self.pictures.read(self.chosen[index])), int(
            self.pictures.labels[self.chosen[index]]
        )


def load_data(args: argparse.Namespace) -> tuple[Augmented, Augmented]:
    """Return the training and the validation set. Exits where this node has none."""
    size = args.image_size * 256 // 224
    try:
        if args.synthetic:
            train = Synthetic(args.limit_train_samples or 2304, 10, 0, size)
            valid = Synthetic(args.limit_valid_samples or 256, 10, 1, size)
        else:
            train = Pictures(args.data_dir, "train")
            valid = Pictures(args.data_dir, "valid")
    except (OSError, ValueError) as error:
        sys.exit(f"main.py: error: on {socket.gethostname()}: {error}")
    return (
        Augmented(train, args.limit_train_samples, args),
        Augmented(valid, args.limit_valid_samples, args),
    )


def check_same_data(*data_sets: Augmented) -> None:
    """Refuse nodes with different data: each has a disk of its own."""
    mine = [data_set.pictures.fingerprint for data_set in data_sets]
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    if any(fingerprints != mine for fingerprints in found):
        raise RunError("not every node has the same data: stage it again")


class Batches(Sampler):
    """The keys of the samples of each batch: none, until an epoch begins."""

    keys: Iterable[list[tuple[int, int]]] = ()

    def __iter__(self):
        return iter(self.keys)


def build_loader(data_set: Augmented, workers: int) -> DataLoader:
    """Return a loader whose workers are running, and stay to the end of the run.

    Call this before CUDA and NCCL are up: to fork a process that has them up hangs on
    some networks, as the docstring of DistributedDataParallel says. That is why this
    does not take pin_memory, which asks for the GPU.
    """
    loader = DataLoader(
        data_set,
        batch_sampler=Batches(),
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
        persistent_workers=workers > 0,
        worker_init_fn=ignore_signals,
    )
    if workers:
        # They pass on batches by sockets there. Each would leave its own when killed.
        multiprocessing.util.get_temp_dir()
        iter(loader)  # starts them
        atexit.register(end_workers)
    return loader


def ignore_signals(worker: int) -> None:
    """Leave Slurm's signals to the rank: it would die of its worker's death."""
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def end_workers() -> None:
    """Kill the workers: Python ends them by SIGTERM, which they ignore, and waits."""
    # Or DataLoader's handler would have something to say about their end.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in multiprocessing.active_children():
        worker.kill()


def training_batches(loader: DataLoader, run: Run, device: torch.device):
    """Yield this rank's share of each step of an epoch, from the run's step on.

    That is uint8 images of shape (share, 3, size, size) and their classes.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    order = draw_epoch(len(loader.dataset), loader.dataset.seed, run.epoch)
    steps = len(order) // run.global_batch_size
    shares = order[: steps * run.global_batch_size].reshape(steps, -1)
    shares = shares[run.step :, rank::world_size]
    keys = ([(run.epoch, index) for index in share.tolist()] for share in shares)
    loader.batch_sampler.keys = keys
    return to_device(loader, device)


def evaluation_batches(loader: DataLoader, batch_size: int, device: torch.device):
    """Yield this rank's share, in batches of one size: --compile compiles for each.

    All ranks have as many. The last ones are padded with images of label -100, which
    count nowhere.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    samples = len(loader.dataset)
    batches = math.ceil(samples / world_size / batch_size)
    share = list(range(rank, samples, world_size))
    share += [-1] * (batches * batch_size - len(share))
    keys = [(0, index) for index in share]
    starts = range(0, len(keys), batch_size)
    loader.batch_sampler.keys = [keys[start : start + batch_size] for start in starts]
    return to_device(loader, device)


def to_device(batches, device: torch.device):
    for images, labels in batches:
        if device.type == "cuda":
            # Or the CPU would wait for the copy, and for all the GPU's work before it.
            images, labels = images.pin_memory(), labels.pin_memory()
        yield (
            images.to(device, non_blocking=True),
            labels.to(device, non_blocking=True),
        )


def draw_epoch(samples: int, seed: int, epoch: int) -> np.ndarray:
    """Draw the order of an epoch, the same however many GPUs share the work."""
    return np.random.default_rng((seed, epoch)).permutation(samples)


def seed_torch(*numbers: int) -> None:
    """Seed PyTorch with all of these numbers."""
    torch.manual_seed(mix(*numbers))


def mix(*numbers: int) -> int:
    """Return a seed that follows from all of these numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])
