"""docs/your_data: which rank gets which sample, and the kinds of files."""

import csv
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import textwrap
from itertools import chain
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from drawn_imagenet import tar_bytes
from PIL import Image
from slurm_jobs import REPOSITORY, TWO, call, listing
from test_checkpoint import load_module
from torch.utils.data import Dataset

FOLDER = "docs/your_data"
PAGE = (REPOSITORY / "docs" / "your_data.rst").read_text()


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
COUNTS = {"train": (7, 7, 6), "val": (0, 3, 2), "test": (3, 2, 2)}
# Parquet files as on the Hugging Face hub, with its names of splits. And texts: a token
# tells the class.
TO_HUGGING_FACE = """
import pathlib, random, sys
from datasets import ClassLabel, Dataset, Features, Image

folders, hub, texts = map(pathlib.Path, sys.argv[1:])
columns = Features({"image": Image(), "label": ClassLabel(names=list("abc"))})
for split in folders.iterdir():
    paths = sorted(split.glob("*/*.png"))
    labels = ["abc".index(path.parent.name) for path in paths]
    images = [{"bytes": path.read_bytes(), "path": path.name} for path in paths]
    rows = Dataset.from_dict({"image": images, "label": labels}, features=columns)
    name = {"val": "validation"}.get(split.name, split.name)
    rows.select(range(4)).to_parquet(hub / f"{name}-00000-of-00002.parquet")
    rows.select(range(4, len(rows))).to_parquet(hub / f"{name}-00001-of-00002.parquet")
    tokens = [[100 + label] * 5 + [random.randrange(1, 99), 0, 0] for label in labels]
    rows = Dataset.from_dict({"input_ids": tokens, "label": labels})
    rows.save_to_disk(texts / split.name)
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


def write_hugging_face(jobs, project, env, folders, images, texts) -> None:
    """Save images as the page has people do, from files that need no download."""
    hub = images.parent / "parquet files"
    hub.mkdir()
    script = REPOSITORY / FOLDER / "to_disk.py"
    for command in (
        ["-c", TO_HUGGING_FACE, folders, hub, texts],
        [script, hub, images],
    ):
        result = jobs.run([".venv/bin/python", *command], project, **env)
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
    validation = data.Images(tmp_path, "val", seed=0)
    assert [validation[0, i][1] for i in range(5)] == [1, 1, 1, 2, 2]


def test_folders_as_people_have_them(tmp_path, caplog):
    """No splits, a folder above, other files, endings in capitals; labels in a CSV."""
    draw_folders(tmp_path / "drawn")
    top = tmp_path / "data" / "photos of 2024"
    for path in sorted((tmp_path / "drawn").glob("*/*/*.png")):
        target = top / path.parent.name / f"{path.parent.parent.name}-{path.name}"
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
    (top / "c").rename(tmp_path / "elsewhere")
    (top / "c").mkdir()
    (top / "c" / "more").symlink_to(tmp_path / "elsewhere")
    for path in list(top.glob("a/train*")):
        path.rename(path.with_suffix(".PNG"))
    (top / "a" / ".ipynb_checkpoints").mkdir()
    others = "list.md a/notes.txt a/._1.png a/.ipynb_checkpoints/1.png b/1.tif b/2.tif"
    for name in others.split():
        (top / name).write_bytes(b"none")
    data = load("data.py")
    caplog.set_level("INFO")

    def parts(seed: int) -> list[list[str]]:
        sets = [data.Images(tmp_path / "data", split, seed) for split in COUNTS]
        for images in sets:
            labels = ["abc"[label] for label in images.labels.tolist()]
            places = [os.path.relpath(path, top)[0] for path in images.paths]
            assert places == labels
        return [images.paths.tolist() for images in sets]

    train, val, test = parts(seed=0)
    assert (len(train), len(val), len(test)) == (26, 3, 3)
    assert len({*train, *val, *test}) == 32
    assert parts(seed=0) == [train, val, test] != parts(seed=1)
    assert f"train: 26 images of 3 classes in {top}, drawn by --seed" in caplog.messages
    (message,) = {text for text in caplog.messages if "left out: " in text}
    where, left_out = message.split(": left out: ")
    assert where == top.name
    assert sorted(left_out.split(", ")) == ["1 .md", "1 .txt", "2 .tif", "2 hidden"]

    for split, paths in zip(COUNTS, (train, val, test), strict=True):
        names = [os.path.relpath(path, top) for path in paths]
        rows = [f"{name},{name[0]}" for name in names]
        (top / f"{split}.csv").write_text("\n".join(["file,label", *rows]))
    (code,) = re.findall(r"^    def list_csv.*\n(?:    .*\n|\n)+", PAGE, re.MULTILINE)
    names = {"csv": csv}
    exec(textwrap.dedent(code), names)
    labels = dict(names["list_csv"](top, "val"))
    assert labels == {path: "abc".index(os.path.relpath(path, top)[0]) for path in val}


def test_what_shards_leave_out(tmp_path, caplog):
    """Images of all kinds of endings are read, and other members counted."""
    draw_folders(tmp_path / "images")
    write_shards(tmp_path / "images", tmp_path / "a folder above")
    png = next((tmp_path / "images").glob("*/*/*.png")).read_bytes()
    files = {"x.PNG": png, "x.cls": b"0", "x.json": b"", "._x.png": b""}
    shard = tmp_path / "a folder above" / "train" / "2.tar"
    shard.write_bytes(tar_bytes(files))
    shutil.rmtree(tmp_path / "images")
    caplog.set_level("INFO")
    images = load("data_tar.py").Images(tmp_path, "train", seed=0)
    assert len(images) == 21 and images.read(20) == (png, 0)
    assert caplog.messages == ["train: left out: 1 .json, 1 hidden"]


def test_long_tmpdir(tmp_path):
    """A worker's socket would have too long a path there. The training would wait."""
    draw_folders(tmp_path / "data")
    long = tmp_path / ("a site's own folder " * 5)
    long.mkdir()
    command = [sys.executable, REPOSITORY / FOLDER / "main.py"]
    command += ["--data-dir", tmp_path / "data", "--epochs=1", "--batch-size=4"]
    outside = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    outside["TMPDIR"] = str(long)
    result = call(command, cwd=tmp_path, env=outside, timeout=400)
    assert result.exit_code == 0 and result.find("^Test loss"), result
    (weights,) = tmp_path.glob("model-*.pt")
    images = tmp_path / "data" / "train"
    command = [sys.executable, REPOSITORY / FOLDER / "classify.py", weights, images]
    result = call([*command, images / "b" / "0.png"])
    assert result.exit_code == 0, result
    found = result.find(r"^(\S+)% ([abc])$")
    assert {name for _, name in found} == set("abc"), result
    assert 99.5 < sum(float(part) for part, _ in found) < 100.5, result


def test_broken_image(tmp_path):
    """It is named: its file, or its place in a shard."""
    draw_folders(tmp_path)
    broken = tmp_path / "train" / "a" / "0.png"
    broken.write_bytes(b"text")
    write_shards(tmp_path, tmp_path / "shards")
    names = {"data.py": str(broken), "data_tar.py": "byte 512 of .*/shards/train/0.tar"}
    for name, place in names.items():
        folder = tmp_path / "shards" if name == "data_tar.py" else tmp_path
        images = load(name).Images(folder, "train", seed=0)
        with pytest.raises(RuntimeError, match=f"^cannot decode .*{place}: "):
            images[1, 0]


def test_what_cannot_be_used(tmp_path, monkeypatch):
    """Each ends with a line that names it, before a worker or a training starts."""
    draw_folders(tmp_path / "images")
    write_shards(tmp_path / "images", tmp_path / "shards")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "1")

    def error(name: str, source: str, breaks) -> str:
        broken = tmp_path / "broken"
        shutil.copytree(tmp_path / source, broken)
        breaks(broken)
        with pytest.raises(SystemExit) as ended:
            load(name).load_data(SimpleNamespace(data_dir=str(broken), seed=0))
        shutil.rmtree(broken, ignore_errors=True)
        message = str(ended.value)
        assert message.startswith(f"data.py: error: {broken} on "), message
        assert "\n" not in message
        return message

    def remove(*names: str):
        return lambda data: [shutil.rmtree(data / name) for name in names]

    for name in COUNTS:
        for kind, source in (("data.py", "images"), ("data_tar.py", "shards")):
            found = error(kind, source, remove(name))
            assert "No such file or directory: " in found and f"/{name}'" in found
    assert "No such file" in error("data.py", "images", shutil.rmtree)
    no_images = [f"test/{name}" for name in "abc"]
    assert "nothing in test" in error("data.py", "images", remove(*no_images))

    def rename(old: str, new: str):
        return lambda data: (data / old).rename(data / new)

    def capitals(data: Path) -> None:
        for split in COUNTS:
            (data / split).rename(data / split.title())

    # Or they would be three classes.
    assert "/train'" in error("data.py", "images", capitals)
    unknown = error("data.py", "images", rename("val/c", "val/d"))
    assert "class d is in val, but not in train" in unknown

    def make_tif(split: str):
        return lambda data: [
            path.rename(path.with_suffix(".tif"))
            for path in list((data / split / "c").iterdir())
        ]

    for split in COUNTS:
        found = error("data.py", "images", make_tif(split))
        assert (
            "no image (.jpg, .jpeg, .png, .webp) in " in found and f"{split}/c" in found
        )

    def write(files: dict[str, bytes]):
        return lambda data: (data / "test" / "2.tar").write_bytes(tar_bytes(files))

    png = next((tmp_path / "images").glob("*/*/*.png")).read_bytes()
    found = error("data_tar.py", "shards", write({"x.png": png, "x.cls": b"3"}))
    assert "classes in test, but not in train: {3}" in found
    named = {"x.png": png, "x.cls": b"cat"}
    assert "no number in x.cls" in error("data_tar.py", "shards", write(named))
    assert "has no x.cls" in error("data_tar.py", "shards", write({"x.png": png}))
    assert "no image" in error(
        "data_tar.py", "shards", write({"x.gif": b"", "x.cls": b""})
    )

    def join(data: Path) -> None:
        with (data / "val" / "0.tar").open("ab") as shard:
            shard.write((data / "val" / "1.tar").read_bytes())

    assert "something after it" in error("data_tar.py", "shards", join)

    def repeat(data: Path) -> None:
        with tarfile.open(data / "val" / "0.tar", "a") as shard:
            shard.addfile(shard.getmembers()[0], io.BytesIO(bytes(1 << 16)))

    assert "has two members of one name" in error("data_tar.py", "shards", repeat)

    def cut(end: int):
        return lambda data: os.truncate(data / "train" / "1.tar", end)

    shard = tmp_path / "shards" / "train" / "1.tar"
    *_, (last, _, _) = load("data_tar.py").list_shard(shard, [])
    # At its start, in an image, and between two files, which tarfile alone takes for
    # the end.
    for end in (9, last + 1, last - 512):
        assert "1.tar is cut or damaged: " in error("data_tar.py", "shards", cut(end))


def test_nothing_to_test_with(tmp_path):
    """The script itself says so, at once."""
    draw_folders(tmp_path)
    shutil.rmtree(tmp_path / "test")
    command = [sys.executable, REPOSITORY / FOLDER / "main.py", "--data-dir", tmp_path]
    outside = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    result = call(command, cwd=tmp_path, env=outside)
    assert result.exit_code == 1, result
    assert result.output.splitlines()[1].startswith("data.py: error: "), result
    assert len(result.output.splitlines()) == 2, result


@pytest.mark.parametrize("kind", ["numbers", "masks"])
def test_regression_and_masks(tmp_path, kind):
    """With what the page changes, the test loss is the mean over the samples."""
    shape, model, label = {
        "numbers": ("(30, 8)", "nn.Linear(8, 1)", "float(x.sum())"),
        "masks": ("(30, 3, 6, 6)", "nn.Conv2d(3, 2, 1)", "(x[0] > x[1]).long()"),
    }[kind]
    samples = f"""class Texts(Dataset):
    def __init__(self, data_dir, split):
        draw = torch.Generator().manual_seed(len(split))
        self.rows = torch.rand({shape}, generator=draw)

    def __len__(self):
        return 30

    def __getitem__(self, key):
        x = self.rows[key[1]]
        return x, {label}


"""
    data = (REPOSITORY / FOLDER / "data_text.py").read_text()
    data = data.replace("from datasets import load_from_disk\n", "")
    data = re.sub(r"class Texts.*?(?=class Split)", samples, data, flags=re.DOTALL)
    data = re.sub(r"    @property\n.*?\n\n", "", data, flags=re.DOTALL)
    data = re.sub(r"def check_sets.*?(?=def training)", "", data, flags=re.DOTALL)
    data = data.replace("        check_sets(*sets)\n", "")
    data = re.sub(
        r"def build_model.*", f"build_model = lambda: {model}\n", data, flags=re.S
    )
    (tmp_path / "data.py").write_text(data)
    main = (REPOSITORY / FOLDER / "main.py").read_text()
    main = main.replace("build_model(train_set.classes)", "build_model()")
    (loss,) = re.findall(r"``(F\.mse_loss\(.*\))``,$", PAGE, re.MULTILINE)
    summed = 'F.cross_entropy(logits, labels, reduction="sum")'
    correct = "(logits.argmax(1) == labels).sum()"
    assert main.count(summed) == 1 and main.count(correct) == 2
    if kind == "numbers":
        main = main.replace(summed, loss[:-1] + ', reduction="sum")')
        main = main.replace("F.cross_entropy(logits, labels)", loss)
        main = main.replace(f"        metrics[1] += {correct}\n", "")
    else:
        (pixels,) = re.findall(r"``(labels\[0\].*?)``", PAGE)
        for sums in (summed, correct):
            main = main.replace(sums, f"{sums} / {pixels}")
    (tmp_path / "main.py").write_text(main)
    outside = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    command = [sys.executable, "main.py", "--epochs=3", "--batch-size=5"]
    result = call(command, cwd=tmp_path, env=outside, timeout=400)
    (loss, accuracy), *_ = result.find(r"^Test loss (\S+) accuracy (\S+)%$")
    names = {}
    exec(data, names)
    rows = names["Texts"]("", "test")
    inputs = torch.stack([rows[0, i][0] for i in range(30)])
    labels = torch.stack([torch.as_tensor(rows[0, i][1]) for i in range(30)])
    model = names["build_model"]()
    (weights,) = tmp_path.glob("model-*.pt")
    model.load_state_dict(torch.load(weights, weights_only=True))
    with torch.no_grad():
        answers = model(inputs)
    if kind == "numbers":
        right, hits = (answers.squeeze(1) - labels).square().mean(), 0
    else:
        right = torch.nn.functional.cross_entropy(answers, labels)
        hits = 100 * (answers.argmax(1) == labels).double().mean()
    assert abs(float(loss) - right) < 0.001, (result, right)
    assert abs(float(accuracy) - hits) < 0.01, (result, hits)


def test_masks_are_cropped_with_their_images():
    """The call on the page does both."""
    names = {"augment": load("data.py").augment}
    (code,) = re.findall(r"``(image, mask =\s+augment\(.*?\))``", PAGE, re.DOTALL)
    (needs,) = re.findall(r"``(from torchvision import tv_tensors)``", PAGE)
    # Four squares of one colour each.
    squares = (
        torch.arange(4).view(2, 2).repeat_interleave(64, 0).repeat_interleave(64, 1)
    )
    names |= {
        "image": squares.mul(80).to(torch.uint8).expand(3, -1, -1),
        "mask": squares,
    }
    exec(f"{needs}\n{code.replace(chr(10), ' ')}", names)
    assert names["mask"].shape == (32, 32)
    near = (names["image"][0] / 80).round() == names["mask"]
    assert near.double().mean() > 0.9


@pytest.mark.usefixtures("nothing_left")
def test_kinds_of_files(jobs, several, tmp_path):
    """The same images train the same, from folders, tar shards and Hugging Face."""
    names = ("data", "data_tar", "data_hf", "data_text")
    kinds = {name: tmp_path / name for name in names}
    draw_folders(kinds["data"])
    write_shards(kinds["data"], kinds["data_tar"])
    offline = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    project = several(REPOSITORY / FOLDER / "main.py")
    for words in ("uv add torch numpy", "uv add datasets"):
        (line, *_) = listing("your_data.rst", words).splitlines()
        jobs.type_in(project.parent, line)
    folders = (kinds["data"], kinds["data_hf"], kinds["data_text"])
    write_hugging_face(jobs, project, offline, *folders)
    (patch,) = re.findall(r"^   (--- data.py\n(?:   .*\n|\n)+)", PAGE, re.MULTILINE)
    patch = re.sub("^   ", "", patch, flags=re.MULTILINE)
    results = {}
    for name, source in kinds.items():
        archive = tmp_path / f"{name}.tar"
        subprocess.run(["tar", "-cf", archive, "-C", source, "."], check=True)
        code = project / "data.py"
        if name == "data_hf":  # a diff on the page
            shutil.copy(REPOSITORY / FOLDER / "data.py", code)
            subprocess.run(["patch", "--quiet", code], input=patch.encode(), check=True)
        else:
            shutil.copy(REPOSITORY / FOLDER / f"{name}.py", code)
        command = ["job.sh", "--epochs=1", "--batch-size=4"]
        if name == "data_text":
            command += ["--epochs=20", "--learning-rate=20"]
        env = offline | {"CIFAR10_ARCHIVE": str(archive)}
        result = jobs.sbatch(project, *TWO, *command, **env)
        assert result.state == "COMPLETED", result
        assert (
            "World size 2: 2 steps an epoch, 2 x 4 samples each, of 20; "
            "5 to validate, 7 to test" in result.output
        ), result
        results[name] = result
    for result in results.values():  # the only warning is that there is no GPU
        assert len(re.findall("warning", result.output, re.IGNORECASE)) == 1, result
    text = results.pop("data_text")
    assert text.find("^Test loss .* accuracy 100.00%$"), text
    logs = [re.sub(r", \d+ images/s", "", result.output) for result in results.values()]
    metrics = [re.findall(r"^(?:Epoch|Test) .*", log, re.MULTILINE) for log in logs]
    assert len(metrics[0]) == 2, results["data"]
    assert metrics[0] == metrics[1] == metrics[2], "\n".join(map(str, results.values()))
    weights = project / f"model-{results['data'].job}.pt"
    weights = torch.load(weights, weights_only=True)
    assert weights["fc.weight"].shape == (3, 512)  # as many classes as train has
