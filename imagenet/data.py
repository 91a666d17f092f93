"""What a rank trains on: the images of a split, in which order, and their decoding."""

import argparse
import atexit
import hashlib
import itertools
import json
import math
import multiprocessing.util
import os
import signal
import socket
import sys
import warnings
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from checkpoint import Run, RunError
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Sampler
from torchvision.io import decode_image, read_file
from torchvision.transforms import v2

# torchvision 0.29 hands decoding over to another package,
# and would say so at every image.
warnings.filterwarnings(
    "ignore", "The image decoding and encoding capabilities", DeprecationWarning
)


class BadImage(RuntimeError):
    """An image that cannot be decoded; its text is one line that names it."""


class Images:
    """The images of a split, "train" or "val", as prepare_data.py has staged them.

    A tree of class folders, train/CLASS/IMAGE and val/CLASS/IMAGE, will do, too.
    Processes share the index and the file, and no position in it: it may be forked.
    Pickled, it is a path, and a tree's index: to scan a tree again would take long.
    """

    def __init__(self, data_dir: Path, split: str, scanned: np.ndarray | None = None):
        self.data_dir, self.split, self.scanned = Path(data_dir), split, scanned
        self.archive: str | None = None  # that the images are in, if they are in one
        staged = self.data_dir / "index.json"
        if staged.exists():
            index = json.loads(staged.read_text())
            self.classes = index["classes"]
            if not index["extract"]:
                self.archive = index["archives"][split]
            self.index = np.load(self.data_dir / f"{split}.npy", mmap_mode="r")
        elif (self.data_dir / split).is_dir():
            folders = (self.data_dir / "train").iterdir()
            self.classes = sorted(folder.name for folder in folders if folder.is_dir())
            if scanned is None:
                self.scanned = scan(self.data_dir / split, self.classes)
            self.index = self.scanned
        else:
            raise FileNotFoundError(
                f"no data in {self.data_dir.absolute()}: "
                "for job.sh, set IMAGENET_DIR to the archives; "
                "else run prepare_data.py on every node; or use --synthetic"
            )
        self.labels = np.ascontiguousarray(self.index["label"])
        if self.archive:
            self.file = open(self.data_dir / self.archive, "rb")

    def __reduce__(self):
        return Images, (self.data_dir, self.split, self.scanned)

    def __len__(self) -> int:
        return len(self.index)

    @cached_property
    def fingerprint(self) -> str:
        """A checksum of names, labels and sizes, the same however they are staged."""
        digest = hashlib.sha256()
        for field in ("name", "label", "size"):
            digest.update(self.index[field].tobytes())
        return digest.hexdigest()

    def name(self, i: int) -> str:
        name = f"{self.split}/{self.index['name'][i].decode()}"
        return f"{self.archive}: {name}" if self.archive else f"{self.data_dir}/{name}"

    def read(self, i: int) -> Tensor:
        """Return an image: RGB, uint8, of shape (3, height, width).

        Raises BadImage.
        """
        try:
            if self.archive:
                return decode(self.read_bytes(i))
            return decode(read_file(self.name(i)))
        except (OSError, RuntimeError, zlib.error) as error:
            host = socket.gethostname()
            raise BadImage(
                f"cannot decode image {self.name(i)} on {host}: {error}"
            ) from None

    def read_bytes(self, i: int) -> Tensor:
        """Return an image as it is in the archive, or was before it was deflated."""
        _, _, offset, size, packed = self.index[i].tolist()
        data = bytearray(packed or size)
        os.preadv(self.file.fileno(), [data], offset)
        if packed:
            data = bytearray(zlib.decompress(data, wbits=-zlib.MAX_WBITS))
        return torch.frombuffer(data, dtype=torch.uint8)


def decode(data: Tensor) -> Tensor:
    """Return the pixels of a JPEG or PNG: RGB, uint8, of shape (3, height, width)."""
    pixels = decode_image(data, "RGB")
    # A PNG may have 16 bits.
    return v2.functional.to_dtype(pixels, torch.uint8, scale=True)


def scan(folder: Path, classes: list[str]) -> np.ndarray:
    """Return the index of a tree of class folders, as prepare_data.py writes it."""

    def scan_class(label: int) -> list[tuple]:
        rows = []
        for file in (folder / classes[label]).rglob("*.*"):
            if file.suffix.lower() in (".jpg", ".jpeg", ".png"):
                name = str(file.relative_to(folder)).encode()
                rows.append((label, name, 0, file.stat().st_size, 0))
        return sorted(rows)

    # A network disk answers slowly, but many at a time.
    with ThreadPoolExecutor(32) as threads:
        found = list(threads.map(scan_class, range(len(classes))))
    rows = list(itertools.chain.from_iterable(found))
    if not rows:
        raise FileNotFoundError(f"no images in {folder}")
    return np.rec.fromrecords(rows, names="label, name, offset, size, packed")


class Synthetic:
    """Images to learn from, drawn from a seed.

    Each class is a plaid of its own, hidden in noise.
    Another seed gives other images of the same classes.
    """

    def __init__(
        self, samples: int, classes: int, seed: int = 0, resolution: int = 256
    ):
        self.seed, self.shortest = seed, resolution
        self.longest = resolution + resolution // 4
        self.classes = [f"plaid {i}" for i in range(classes)]
        self.labels = np.arange(samples) % classes
        self.fingerprint = f"synthetic {samples, classes, seed, resolution}"
        generator = torch.Generator().manual_seed(0)
        stripes = 64 * torch.rand(2 * classes, 3, 8, generator=generator)
        stripes = F.interpolate(stripes, self.longest, mode="linear").byte()
        rows, columns = stripes.split(classes)
        self.plaids = rows[:, :, :, None] + columns[:, :, None, :]

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, i: int) -> str:
        return f"synthetic image {i}"

    def read(self, i: int) -> Tensor:
        """Return an image: RGB, uint8, of shape (3, height, width)."""
        rng = np.random.default_rng((self.seed, i))
        height, width = rng.integers(self.shortest, self.longest, 2, endpoint=True)
        noise = rng.integers(128, size=(3, height, width), dtype=np.uint8)
        plaid = self.plaids[self.labels[i], :, :height, :width]
        return plaid + torch.from_numpy(noise)


class RandomResizedCrop(v2.RandomResizedCrop):
    """Keeps a pixel's colours side by side, as decoded: so they are resized faster."""

    def transform(self, inpt: Tensor, params: dict[str, int]) -> Tensor:
        crop = v2.functional.crop(inpt, **params)[None].contiguous(
            memory_format=torch.channels_last
        )
        return F.interpolate(crop, self.size, mode="bilinear", antialias=True)[0]


class Augmented(Dataset):
    """Images as a step takes them, uint8 in (3, size, size), and their classes."""

    def __init__(
        self,
        images: Images | Synthetic,
        limit: int | None,
        args: argparse.Namespace,
    ):
        self.size = size = (args.image_size, args.image_size)
        self.images, self.seed = images, args.seed
        self.chosen = np.sort(np.random.default_rng(0).permutation(len(images))[:limit])
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
        return transform(self.images.read(self.chosen[index])), int(
            self.images.labels[self.chosen[index]]
        )


def load_data(args: argparse.Namespace) -> tuple[Augmented, Augmented]:
    """Return the training and the validation set. Exits where this node has none."""
    size = args.image_size * 256 // 224
    try:
        if args.synthetic:
            train = Synthetic(args.limit_train_samples or 2304, 10, 0, size)
            valid = Synthetic(args.limit_valid_samples or 256, 10, 1, size)
        else:
            train = Images(args.data_dir, "train")
            valid = Images(args.data_dir, "val")
    except (OSError, ValueError) as error:
        sys.exit(f"main.py: error: on {socket.gethostname()}: {error}")
    return (
        Augmented(train, args.limit_train_samples, args),
        Augmented(valid, args.limit_valid_samples, args),
    )


def check_same_data(*data_sets: Augmented) -> None:
    """Refuse nodes with different data: each has a disk of its own."""
    mine = [data_set.images.fingerprint for data_set in data_sets]
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
