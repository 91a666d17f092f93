"""What a rank trains on: the images of a split, in which order, and their decoding."""

import argparse
import atexit
import hashlib
import itertools
import json
import math
import mmap
import multiprocessing.util
import os
import signal
import socket
import tempfile
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from multiprocessing.reduction import DupFd
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from checkpoint import Run, RunError, ignore_signals
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
        pictures: Images | Synthetic,
        limit: int | None,
        args: argparse.Namespace,
    ):
        size = (args.image_size, args.image_size)
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
        if epoch:
            # The draw follows from these three, not from the worker or the rank that
            # makes it. torch.manual_seed would seed every kind of device: 0.2 ms.
            torch.default_generator.manual_seed(mix(self.seed, epoch, index))
        transform = self.crop_and_flip if epoch else self.center
        return transform(self.pictures.read(self.chosen[index])), int(
            self.pictures.labels[self.chosen[index]]
        )


class SharedBatch:
    """Samples on their way to a rank, in memory that is gone with its last process.

    PyTorch's own way begins with a file in /dev/shm,
    which stays there if the worker is killed just then.
    """

    def __init__(self, samples: list[tuple[Tensor, int]]):
        images, self.labels = zip(*samples, strict=True)
        # As a step takes them: channels_last.
        images = [image.permute(1, 2, 0) for image in images]
        self.shape = (len(images), *images[0].shape)
        self.memory = tempfile.TemporaryFile(dir="/dev/shm")  # it has no name
        try:
            os.posix_fallocate(self.memory.fileno(), 0, math.prod(self.shape))
        except OSError as error:
            raise RuntimeError(
                f"no room in /dev/shm for a batch ({error}): use fewer --workers"
            ) from error
        torch.stack(images, out=view_memory(self.memory.fileno(), self.shape))

    def __reduce__(self):  # what the rank unpickles is a pair of tensors
        return receive, (DupFd(self.memory.fileno()), self.shape, self.labels)


def receive(
    duplicate: DupFd, shape: tuple[int, ...], labels: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Return uint8 images, of shape (samples, 3, size, size), and their classes."""
    try:
        memory = duplicate.detach()
    except (ConnectionError, EOFError) as error:
        raise RuntimeError(
            "a DataLoader worker is killed: is --mem too small?"
        ) from error
    try:
        return view_memory(memory, shape).permute(0, 3, 1, 2), torch.tensor(labels)
    finally:
        os.close(memory)


def view_memory(memory: int, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(mmap.mmap(memory, 0), dtype=torch.uint8).view(shape)


class Batches(Sampler):
    """This rank's share of each batch of an epoch, from the run's step on."""

    def __init__(self, samples: int, run: Run, args: argparse.Namespace):
        self.samples, self.run, self.seed = samples, run, args.seed
        if run.global_batch_size < dist.get_world_size():
            raise RunError(
                f"a step of {run.global_batch_size} samples "
                "leaves some ranks none: start fewer"
            )
        share = len(
            range(dist.get_rank(), run.global_batch_size, dist.get_world_size())
        )
        # It is worked on in parts, in as many as the largest share has:
        # SyncBatchNorm has them meet in each.
        most = math.ceil(run.global_batch_size / dist.get_world_size())
        parts = math.ceil(most / args.batch_size)
        if (
            args.sync_batchnorm
            and parts > run.global_batch_size // dist.get_world_size()
        ):
            raise RunError(
                f"with SyncBatchNorm, {most} batches of one are too many "
                "for some ranks: start fewer"
            )
        self.parts = min(parts, share)

    def __iter__(self):
        order = draw_epoch(self.samples, self.seed, self.run.epoch)
        steps = len(order) // self.run.global_batch_size
        batches = order[: steps * self.run.global_batch_size].view(
            steps, self.run.global_batch_size
        )
        # This rank's share of each batch.
        batches = batches[:, dist.get_rank() :: dist.get_world_size()]
        for batch in batches[self.run.step :]:
            for part in batch.tensor_split(self.parts):
                yield [(self.run.epoch, index) for index in part.tolist()]


def load_data(args: argparse.Namespace) -> tuple[Augmented, Augmented]:
    """Return the training and the validation set.

    Raises RunError, on every rank, where a node has none.
    """
    problem, size = "", args.image_size * 256 // 224
    try:
        if args.synthetic:
            train = Synthetic(args.limit_train_samples or 2304, 10, 0, size)
            valid = Synthetic(args.limit_valid_samples or 256, 10, 1, size)
        else:
            train, valid = (
                Images(args.data_dir, "train"),
                Images(args.data_dir, "val"),
            )
    except (OSError, ValueError) as error:
        problem = f"on {socket.gethostname()}: {error}"
    # Each node has a disk of its own, and may lack what the others have.
    answers: list = [None] * dist.get_world_size()
    dist.all_gather_object(
        answers, (problem, "" if problem else train.fingerprint + valid.fingerprint)
    )
    for found in answers:
        if found[0]:
            raise RunError(found[0])
        if found != answers[0]:
            raise RunError(
                f"not every node has the same data in {args.data_dir}: stage it anew"
            )
    return Augmented(train, args.limit_train_samples, args), Augmented(
        valid, args.limit_valid_samples, args
    )


def build_loaders(
    train_set: Augmented, valid_set: Augmented, run: Run, args: argparse.Namespace
):
    """Return the loaders of epochs' batches and the validation set, with workers."""
    atexit.register(end_workers)
    # Workers share a folder, of sockets to pass on batches:
    # their own would stay where they are killed.
    # A socket's name is added to the folder's.
    if args.workers and len(folder := multiprocessing.util.get_temp_dir()) > 89:
        raise RunError(
            f"no socket's path can begin with {folder}: choose a shorter TMPDIR"
        )
    options = {
        "multiprocessing_context": "fork"
        if args.workers
        else None,  # others import PyTorch in each worker
        "num_workers": args.workers,
        "collate_fn": SharedBatch if args.workers else None,
        "pin_memory": torch.cuda.is_available(),
        "worker_init_fn": ignore_signals,
    }
    batches = Batches(len(train_set), run, args)
    train_loader = DataLoader(
        train_set, batch_sampler=batches, persistent_workers=args.workers > 0, **options
    )
    # Not all ranks have a share of the same length.
    share = range(dist.get_rank(), len(valid_set), dist.get_world_size())
    keys = [(0, index) for index in share]
    batches = [
        keys[first : first + args.batch_size]
        for first in range(0, len(keys), args.batch_size)
    ]
    return train_loader, DataLoader(valid_set, batch_sampler=batches, **options)


def end_workers() -> None:
    """Kill the workers: Python ends them by SIGTERM, which they ignore, and waits."""
    # Or DataLoader's handler would have something to say about their end.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in multiprocessing.active_children():
        worker.kill()


def draw_epoch(samples: int, seed: int, epoch: int) -> Tensor:
    """Draw the order of an epoch, the same however many GPUs share the work."""
    return torch.from_numpy(np.random.default_rng((seed, epoch)).permutation(samples))


def seed_torch(*numbers: int) -> None:
    """Seed PyTorch with all of these numbers."""
    torch.manual_seed(mix(*numbers))


def mix(*numbers: int) -> int:
    """Return a seed that follows from all of these numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])
