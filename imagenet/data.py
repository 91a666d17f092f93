"""What a rank trains on: the images of a split, in which order, and their decoding."""

import argparse
import functools
import hashlib
import io
import json
import logging
import math
import multiprocessing.util
import os
import sys
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path

import archives
import numpy as np
import resume
import torch
import torch.distributed as dist
from archives import NODE, Member, StagingError
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.io import decode_image, encode_jpeg
from torchvision.transforms import v2

# torchvision 0.29 hands decoding over to another package,
# and would say so at every image.
warnings.filterwarnings(
    "ignore", "The image decoding and encoding capabilities", DeprecationWarning
)
# Palettes with transparency are usual, and so are large images.
warnings.filterwarnings("ignore", "Palette images")
Image.MAX_IMAGE_PIXELS = None


class Images:
    """The images of a split, "train" or "val", as prepare_data.py has staged them.

    A tree of class folders will do, too: see archives.list_tree. Each rank lists it.
    Forked workers share the index and the open archive. Each read names its offset: a
    position in the file would be that of all workers.
    """

    def __init__(self, data_dir: Path, split: str, max_megapixels: int = 200):
        data_dir, self.split = Path(data_dir), split
        self.max_megapixels = max_megapixels
        index = data_dir / f"{split}.npy"
        staged = data_dir / "index.json"  # a tree may have its own
        if index.exists() and staged.exists():
            found = json.loads(staged.read_text())
            self.classes = found["classes"]
            self.index = np.load(index, mmap_mode="r")
            place = data_dir / found["archives"][split]
        else:
            self.classes, indices = list_tree(data_dir)
            self.index = indices[split]
            place = data_dir
        # An open file, unless each image is a file of a tree. If that has no train,
        # one in ten of each CLASS/ is held out.
        self.archive = None if place.is_dir() else open(place, "rb")
        self.folder = place / split if archives.has_splits(place) else place
        self.labels = self.index["label"]

    def __len__(self) -> int:
        return len(self.index)

    @functools.cached_property
    def fingerprint(self) -> str:
        """A checksum of all names and labels. An image may be repaired in a run."""
        digest = hashlib.sha256(self.index["name"].tobytes())
        digest.update(self.labels.tobytes())
        return digest.hexdigest()

    def name(self, i: int) -> str:
        name = self.index["name"][i].decode()
        if self.archive:
            return f"{self.archive.name}: {self.split}/{name}"
        return f"{self.folder}/{name}"

    def read(self, i: int) -> Tensor:
        """Return an image: RGB, uint8, of shape (3, height, width).

        Raises StagingError, which names it.
        """
        try:
            return decode(self.read_bytes(i), self.max_megapixels)
        except Exception as error:  # of several libraries
            raise StagingError(
                f"cannot decode image {self.name(i)} on {NODE}: {error}"
            ) from None

    def read_bytes(self, i: int) -> Tensor:
        """Return an image as it is in its file, or was before a zip deflated it."""
        if not self.archive:
            path = os.fsencode(self.folder) + b"/" + self.index["name"][i]
            return torch.from_numpy(np.fromfile(path, np.uint8))
        row = self.index[i].tolist()  # label, name, offset and so on
        return as_tensor(archives.read_member(self.archive, Member(*row[1:])))


@functools.cache  # for both splits
def list_tree(data_dir: Path) -> tuple[list[str], dict[str, np.ndarray]]:
    """Return the classes of a tree of class folders, and what it has of each split."""
    if not data_dir.is_dir():
        raise FileNotFoundError(
            f"no data in {data_dir.absolute()}: "
            "for job.sh, set IMAGENET_DIR to the archives; "
            "else run prepare_data.py on every node; or use --synthetic"
        )
    return archives.make_index(archives.list_tree(data_dir))


def as_tensor(data: bytes) -> Tensor:
    """Return bytes as a tensor. It is a copy: PyTorch warns of read-only memory."""
    return torch.from_numpy(np.array(bytearray(data)))


def decode(data: Tensor, max_megapixels: int = 200) -> Tensor:
    """Return an image's pixels: RGB, uint8, of shape (3, height, width)."""
    file = io.BytesIO(data.numpy())
    try:
        image = Image.open(file, formats=("JPEG", "PNG", "WEBP"))  # reads its header
    except UnidentifiedImageError:
        raise ValueError("it is no JPEG, PNG or WebP") from None
    width, height = image.size
    # A few bytes may ask for gigabytes of pixels, and the worker would be killed.
    if width * height > max_megapixels * 10**6:
        raise ValueError(
            f"{width} x {height} pixels are more than --max-megapixels {max_megapixels}"
        )
    # center_crop() enlarges the shorter side, and the longer one with it.
    if max(width, height) > 1000 * min(width, height):
        raise ValueError(f"{width} x {height} pixels are too thin")
    if image.format in ("JPEG", "MPO"):  # MPO: a JPEG with more of them behind it
        return decode_image(data, "RGB", apply_exif_orientation=True)
    # torchvision does not turn a WebP, and a damaged PNG may crash it, and with it this
    # process. Pillow raises, and verify() looks at the checksums of a PNG. Of an
    # animation, this is the first image.
    image.verify()
    image = Image.open(file)
    if image.mode == "I;16":  # of these 16 bits, convert() would take the lower ones
        image = image.point(lambda value: value / 256)
    image = ImageOps.exif_transpose(image)
    if image.has_transparency_data:
        # Or what is transparent would mostly be black, as is what is drawn on it.
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return v2.functional.pil_to_tensor(image.convert("RGB"))


def shrink(images: Images, i: int, side: int) -> bytes:
    """Return a JPEG whose shorter side is `side`, or the image if it is no larger."""
    pixels = images.read(i)
    if min(pixels.shape[1:]) <= side:
        return images.read_bytes(i).numpy().tobytes()
    pixels = v2.functional.resize(pixels, [side])
    return encode_jpeg(pixels, quality=90).numpy().tobytes()


class Synthetic:
    """Images of ten classes, drawn from a seed: a colour a class, hidden in noise.

    Another seed gives other images of the same classes.
    """

    def __init__(self, samples: int, seed: int, resolution: int):
        self.seed, self.resolution = seed, resolution
        self.classes = [str(label) for label in range(10)]
        self.labels = np.arange(samples) % 10
        self.fingerprint = f"synthetic {samples, seed, resolution}"
        rng = np.random.default_rng(11)  # its first ten colours are far apart
        self.colors = rng.integers(128, size=(10, 3, 1, 1), dtype=np.uint8)

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, i: int) -> Tensor:
        """Return an image: RGB, uint8, of shape (3, height, width)."""
        rng = np.random.default_rng((self.seed, i))
        # Seven bits of each byte: rng.integers(128) takes ten times as long.
        noise = np.frombuffer(rng.bytes(3 * self.resolution**2), np.uint8) & 127
        noise = noise.reshape(3, self.resolution, self.resolution)
        return torch.from_numpy(self.colors[self.labels[i]] + noise)


class RandomResizedCrop(v2.RandomResizedCrop):
    """Keeps a pixel's colours side by side, as decoded: so they are resized faster."""

    def transform(self, inpt: Tensor, params: dict[str, int]) -> Tensor:
        crop = v2.functional.crop(inpt, **params)[None]
        crop = crop.contiguous(memory_format=torch.channels_last)
        return v2.functional.resize(crop[0], self.size)


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
        self.chosen = range(len(images))
        if limit:
            order = np.random.default_rng(0).permutation(len(images))
            self.chosen = np.sort(order[:limit])
        self.crop_and_flip = v2.Compose(
            [RandomResizedCrop(size), v2.RandomHorizontalFlip()]
        )
        self.center = center_crop(args.image_size)

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int]:
        epoch, index = key  # epoch 0 is not for training
        if index < 0:
            # Padding: a label of -100 counts nowhere.
            return torch.zeros(3, *self.size, dtype=torch.uint8), -100
        number = self.chosen[index]
        image, label = self.images.read(number), int(self.images.labels[number])
        if epoch == 0:
            return self.center(image), label
        # The draw follows from these three, not from the worker or the rank that
        # makes it. torch.manual_seed would seed every kind of device: 0.2 ms.
        draw = resume.make_seed(self.seed, epoch, index)
        torch.default_generator.manual_seed(draw)
        return self.crop_and_flip(image), label


def center_crop(size: int) -> v2.Transform:
    """Return what an evaluation does to an image of any size."""
    return v2.Compose([v2.Resize(size * 256 // 224), v2.CenterCrop(size)])


class BothSplits(Dataset):
    """What the workers load: training images, and for epoch 0 those to validate."""

    def __init__(self, train: Augmented, valid: Augmented):
        self.train, self.valid = train, valid

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int]:
        return self.train[key] if key[0] else self.valid[key]


class BatchSampler:
    """The batches of a loader. Its workers start before they are known."""

    batches = ()

    def __iter__(self):
        return iter(self.batches)


def load_data(args: argparse.Namespace) -> tuple[Augmented, Augmented]:
    """Return the training and the validation set. Exits where this node has none."""
    if os.environ.get("OMP_PROC_BIND", "false").lower() != "false":
        logging.warning("warning: OMP_PROC_BIND keeps all workers on one CPU: unset it")
    size = args.image_size * 256 // 224
    try:
        if args.synthetic:
            train = Synthetic(args.limit_train_samples or 2304, 0, size)
            valid = Synthetic(args.limit_valid_samples or 256, 1, size)
        else:
            train = Images(args.data_dir, "train", args.max_megapixels)
            valid = Images(args.data_dir, "val", args.max_megapixels)
    except (OSError, ValueError, StagingError) as error:
        sys.exit(f"main.py: error: on {NODE}: {error}")
    return (
        Augmented(train, args.limit_train_samples, args),
        Augmented(valid, args.limit_valid_samples, args),
    )


def build_loader(train: Augmented, valid: Augmented, workers: int) -> DataLoader:
    """Return a loader whose workers are running, and stay to the end of the run.

    Call this before CUDA and NCCL are up: to fork a process that has them up hangs on
    some networks, as the docstring of DistributedDataParallel says. That is why this
    does not take pin_memory, which asks for the GPU.
    """
    # The workers' sockets lie in the temporary folder. A killed rank would leave them
    # in the site's. What is in the job's own, job.sh removes.
    folder = archives.job_folder()  # under salloc, perhaps not made yet
    if os.path.isdir(folder):
        tempfile.tempdir = folder
        # In /tmp, another user could put code into PyTorch's cache. job.sh sets this.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/compiled"
    loader = DataLoader(
        BothSplits(train, valid),
        batch_sampler=BatchSampler(),
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
        persistent_workers=workers > 0,
    )
    if workers:
        iter(loader)  # starts them
    return loader


def list_batches(data: BothSplits, run: resume.Run, args: argparse.Namespace):
    """Yield this rank's share of the batches that are left, as lists of (epoch, index).

    They are those of each epoch's steps, and then those that validate it, of epoch 0.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    done = run.step
    for epoch in range(run.epoch, args.epochs + 1):
        steps = training_batches(len(data.train), args.seed, epoch, run)[done:]
        to_validate = evaluation_batches(len(data.valid), world_size * args.batch_size)
        for number, batches in (epoch, steps), (0, to_validate):
            for batch in batches[:, rank::world_size]:
                yield [(number, index) for index in batch.tolist()]
        done = 0


def training_batches(
    samples: int, seed: int, epoch: int, run: resume.Run
) -> np.ndarray:
    """Return an epoch's steps: a row each, of indices. They are the same on all ranks.

    The order does not depend on how many GPUs share the work.
    """
    order = np.random.default_rng((seed, epoch)).permutation(samples)
    steps = samples // run.global_batch_size
    return order[: steps * run.global_batch_size].reshape(steps, -1)


def evaluation_batches(samples: int, global_batch_size: int) -> np.ndarray:
    """Return rows of one size, because --compile compiles for each.

    The last one is padded with -1: images of label -100, which count nowhere.
    """
    steps = math.ceil(samples / global_batch_size)
    order = np.arange(steps * global_batch_size)
    order[samples:] = -1
    return order.reshape(steps, -1)


def load_batches(loader: DataLoader, batches: Iterable, device: torch.device):
    """Yield batches on the device: uint8 (samples, 3, size, size), and their classes.

    All of a run are one stream: while the ranks take the last steps of an epoch, the
    workers load what comes next. No epoch begins with a wait.
    """
    loader.batch_sampler.batches = batches
    folder = multiprocessing.util.get_temp_dir()
    try:
        os.stat(folder)  # without it, a worker would never answer
        for batch in loader:
            if device.type == "cuda":
                # Or the CPU would wait for the copy, and for the GPU's work before it.
                batch = [part.pin_memory() for part in batch]
            yield [part.to(device, non_blocking=True) for part in batch]
    except FileNotFoundError:
        resume.end_workers()  # each would say at its end that its socket is not there
        os.makedirs(folder, exist_ok=True)  # or Python would say so at its end
        raise StagingError(
            f"{NODE} has lost {folder}, with the sockets of its workers: does "
            "another job's epilog, or a cleaner, remove files there?"
        ) from None


def normalize(images: Tensor) -> Tensor:
    """Return uint8 images as float32 of mean 0 and deviation 1, in channels_last."""
    mean, std = mean_and_std(images.device)
    return ((images - mean) / std).contiguous(memory_format=torch.channels_last)


@functools.cache  # A copy to the GPU in every step would make the CPU wait.
def mean_and_std(device: torch.device) -> Tensor:
    values = [[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]
    return 255 * torch.tensor(values, device=device).view(2, 3, 1, 1)
