"""docs/your_data: which rank gets which sample, and the three kinds of files."""

import re
import subprocess
import tarfile
from itertools import chain
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from drawn_imagenet import tar_bytes
from PIL import Image
from slurm_jobs import REPOSITORY, TWO
from test_checkpoint import load_module
from torch.utils.data import Dataset

FOLDER = "docs/your_data"


class Keys(Dataset):
    """A sample is its key."""

    def __len__(self) -> int:
        return 31  # what no world size from 2 on divides

    def __getitem__(self, key: tuple[int, int]) -> tuple[int, int]:
        return key


def load(name: str) -> ModuleType:
    """Return a module of docs/your_data, without a process group."""
    module = load_module(f"{FOLDER}/{name}")
    module.dist = SimpleNamespace()
    return module


def test_shares():
    """Ranks share a global batch, whatever their number; each sample counts once."""
    data = load("data.py")
    keys = data.Split(Keys())

    def read(world_size: int, epoch: int, batches, *arguments) -> list[list[list]]:
        """Return each rank's batches, lists of indices, all of this epoch."""
        data.dist.get_world_size = lambda: world_size
        ranks = []
        for rank in range(world_size):
            data.dist.get_rank = lambda rank=rank: rank
            loaded = list(batches(keys, *arguments))
            assert all((epochs == epoch).all() for epochs, _ in loaded)
            ranks.append([indices.tolist() for _, indices in loaded])
        return ranks

    def draw(world_size: int, seed: int, epoch: int) -> list[list]:
        """Return an epoch's global batches, each in the order of its samples."""
        ranks = read(world_size, epoch, data.training_batches, 12, seed, epoch)
        assert {len(batch) for rank in ranks for batch in rank} == {12 // world_size}
        return [sorted(chain(*step)) for step in zip(*ranks, strict=True)]

    first = draw(1, seed=0, epoch=1)
    assert len(first) == 2 and len(set(chain(*first))) == 24, first
    others = [draw(1, seed=0, epoch=2), draw(1, seed=1, epoch=1)]
    assert first not in others, "seed and epoch do not change the order"
    for world_size in (2, 3, 4):
        assert draw(world_size, seed=0, epoch=1) == first, world_size

    for world_size in (1, 2, 3, 4, 40):
        ranks = read(world_size, 0, data.evaluation_batches, 4)
        batches = list(chain(*ranks))
        assert sorted(chain(*batches)) == list(range(31)), world_size
        assert max(map(len, batches)) == 4 or world_size == 40


# Images of the classes a, b and c. The validation set has none of class a.
COUNTS = {"train": (7, 7, 6), "validation": (0, 3, 2), "test": (3, 2, 2)}
TO_PARQUET = """
import pathlib, sys
import pyarrow as pa
from pyarrow import parquet

source, target = map(pathlib.Path, sys.argv[1:])
for split in source.iterdir():
    paths = sorted(split.glob("*/*.png"))
    rows = [
        {
            "image": {"bytes": path.read_bytes(), "path": path.name},
            "label": "abc".index(path.parent.name),
        }
        for path in paths
    ]
    for part in range(2):
        table = pa.Table.from_pylist(rows[part * 4 :] if part else rows[:4])
        parquet.write_table(table, target / f"{split.name}-{part:05}-of-00002.parquet")
"""


def draw_folders(folder: Path) -> None:
    """Draw images of several sizes in SPLIT/CLASS/NAME.png."""
    rng = np.random.default_rng(0)
    for split, counts in COUNTS.items():
        for class_name, count in zip("abc", counts, strict=True):
            if count:
                (folder / split / class_name).mkdir(parents=True)
            for i in range(count):
                size = (*rng.integers(32, 64, size=2), 3)
                pixels = rng.integers(256, size=size, dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / class_name / f"{i}.png")


def write_shards(folders: Path, target: Path) -> None:
    """Write them to SPLIT/0.tar and SPLIT/1.tar, as WebDataset does."""
    for split in COUNTS:
        (target / split).mkdir(parents=True)
        paths = sorted((folders / split).glob("*/*.png"))
        for number, part in enumerate((paths[:4], paths[4:])):
            files = {}
            for path in part:
                name = f"{path.parent.name}{path.stem}"
                files[f"{name}.png"] = path.read_bytes()
                files[f"{name}.cls"] = str("abc".index(path.parent.name)).encode()
            (target / split / f"{number}.tar").write_bytes(tar_bytes(files))


def write_arrow(jobs, folders: Path, target: Path) -> None:
    """Write parquet files with the columns of the Hugging Face hub; convert them."""
    parquet = target.parent / "parquet files"
    for folder in (target, parquet):
        folder.mkdir()
    python = ["uv", "run", "--locked", "--group", "parquet", "python"]
    result = jobs.run([*python, "-c", TO_PARQUET, folders, parquet], FOLDER)
    assert result.exit_code == 0, result
    for split in COUNTS:
        parts = sorted(parquet.glob(f"{split}-*.parquet"))
        assert len(parts) == 2
        command = [*python, "to_arrow.py", *parts, target / f"{split}.arrow"]
        result = jobs.run(command, FOLDER)
        assert result.exit_code == 0, result


def test_images(tmp_path):
    """Crops follow from seed, epoch and sample; the classes are those of train."""
    draw_folders(tmp_path)
    data = load("data.py")

    def crops(seed: int) -> list[bytes]:
        images = data.Images(tmp_path, "train", seed)
        return [images[epoch, 3][0].numpy().tobytes() for epoch in (0, 1, 2)]

    assert crops(0) == crops(0)
    # Epoch 0 does not depend on the seed.
    assert len({*crops(0), *crops(1)}) == 5
    validation = data.Images(tmp_path, "validation", seed=0)
    assert [validation[0, i][1] for i in range(5)] == [1, 1, 1, 2, 2]


def test_cut_shard(tmp_path):
    draw_folders(tmp_path)
    write_shards(tmp_path, tmp_path / "shards")
    path = tmp_path / "shards" / "train" / "1.tar"
    list_shard = load("data_tar.py").list_shard
    content = path.read_bytes()
    shard = list(list_shard(path))
    assert len(shard) == 16
    last, _, _ = shard[-1]
    # In an image, and between two files, which tarfile alone takes for the end.
    for end in (last + 1, last - 512):
        path.write_bytes(content[:end])
        with pytest.raises(tarfile.ReadError):
            list(list_shard(path))


@pytest.mark.usefixtures("nothing_left")
def test_kinds_of_files(jobs, tmp_path):
    """The same images train the same, from folders, tar shards and Arrow files."""
    kinds = {name: tmp_path / name for name in ("data", "data_tar", "data_arrow")}
    draw_folders(kinds["data"])
    write_shards(kinds["data"], kinds["data_tar"])
    write_arrow(jobs, kinds["data"], kinds["data_arrow"])
    results = []
    try:
        for name, source in kinds.items():
            archive = tmp_path / f"{name}.tar"
            subprocess.run(["tar", "-cf", archive, "-C", source, "."], check=True)
            code = jobs.clone / FOLDER / "data.py"
            code.write_text((REPOSITORY / FOLDER / f"{name}.py").read_text())
            command = ["../../multi_node/job.sh", "--epochs=1", "--batch-size=4"]
            result = jobs.sbatch(FOLDER, *TWO, *command, CIFAR10_ARCHIVE=str(archive))
            assert result.state == "COMPLETED", result
            assert (
                "World size 2: 2 steps an epoch, 2 x 4 samples each, of 20; "
                "5 to validate, 7 to test" in result.output
            ), result
            results.append(result)
    finally:
        jobs.run(["git", "checkout", "--", "."], FOLDER)
    logs = [re.sub(r", \d+ images/s", "", result.output) for result in results]
    metrics = [re.findall(r"^(?:Epoch|Test) .*", log, re.MULTILINE) for log in logs]
    assert len(metrics[0]) == 2, results[0]
    assert metrics[0] == metrics[1] == metrics[2], "\n".join(map(str, results))
    for log in logs:  # the only warning is that there is no GPU
        assert len(re.findall("warning", log, re.IGNORECASE)) == 1, log
