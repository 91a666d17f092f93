"""docs/your_data: recipes train, are stopped and resume, and refuse other data."""

import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from drawn_imagenet import tar_bytes
from PIL import Image
from slurm_jobs import REPOSITORY, TWO, call, every_case, listing

FOLDER = REPOSITORY / "docs" / "your_data"
WHOLE = (REPOSITORY / "docs" / "your_training" / "whole" / "main.py").read_text()
PAGE = (REPOSITORY / "docs" / "your_data.rst").read_text()
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
ALONE = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
# Runs to_arrow.py with each of these lists of arguments.
TO_ARROW = """
import json, runpy, sys
script, *lists = sys.argv[1:]
for arguments in lists:
    sys.argv = [script, *json.loads(arguments)]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        print(error)
"""
# A small model of texts, and its tokenizer.
MAKE_BERT = """
import sys
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast
words, folder = sys.argv[1:]
tokenizer = BertTokenizerFast(words)
tokenizer.save_pretrained(folder)
config = BertConfig(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2,
                    num_attention_heads=2, intermediate_size=64)
BertForSequenceClassification(config).save_pretrained(folder)
"""


def draw(suffix="jpg", mode="RGB", **options) -> bytes:
    file = io.BytesIO()
    image = Image.effect_noise((48, 40), 60).convert(mode)
    image.save(file, Image.registered_extensions()[f".{suffix}"], **options)
    return file.getvalue()


def draw_folders(folder: Path) -> list[str]:
    """Draw 24 images of each of two classes; return the rows of a table."""
    rows = []
    for number in range(48):
        name = ("a cat", "dog")[number % 2]
        path = folder / "train" / name / f"{number}.JPG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(draw())
        rows.append(f"{path}, {name} ")
    shutil.copytree(folder / "train", folder / "val")
    return rows


def write_tables(folder: Path, head: str, train: list, validation=()) -> None:
    """Write train.csv and validation.csv as Excel does."""
    folder.mkdir(exist_ok=True)
    for name, rows in (("train", train), ("validation", validation or train[:6])):
        text = "\r\n".join([f"\ufeff{head}", *rows, ""])
        (folder / f"{name}.csv").write_text(text, encoding="utf-8")


def to_arrow(frameworks: Path, folder: Path, *lists: list) -> str:
    python = [frameworks / "bin" / "python", "-c", TO_ARROW, FOLDER / "to_arrow.py"]
    env = ALONE | OFFLINE | {"HF_HOME": str(folder / "cache")}
    lists = [json.dumps(arguments) for arguments in lists]
    result = call([*python, *lists], cwd=folder, env=env, timeout=400)
    assert result.exit_code == 0 and "Traceback" not in result.output, result
    return result.output


def splice(folder: Path, recipe: str) -> None:
    """Put a recipe into main.py by the page's command, with small crops and models."""
    folder.mkdir(exist_ok=True)
    (folder / "main.py").write_text(WHOLE)
    for path in FOLDER.glob("*.py"):
        text = path.read_text().replace("SIZE = 224", "SIZE = 32")
        text = text.replace("models.resnet18(", "models.shufflenet_v2_x0_5(")
        (folder / path.name).write_text(text)
    command = listing("your_data.rst", "sed -i").replace("table.py", recipe)
    subprocess.run(["bash", "-euc", command], cwd=folder, check=True)
    main = (folder / "main.py").read_text()
    assert "TensorDataset(" not in main and "def build_model" in main
    if recipe == "text.py":
        line = listing("your_data.rst", '"collate_fn"')
        main = main.replace("workers = {\n", f"workers = {{\n{line}")
        (folder / "main.py").write_text(main)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("recipe", every_case("hugging_face.py", "table.py", "text.py"))
def test_recipe(recipe, jobs, frameworks, tmp_path):
    """Stopped in mid-epoch, it ends as if it had not been."""
    project = tmp_path / "a project"
    splice(project, recipe)
    if recipe == "text.py":
        texts = [
            f"{'good ' * (i % 9)}word,{'pos' if i % 2 else 'neg'}" for i in range(48)
        ]
        write_tables(project / "t", "text,label", texts)
        to_arrow(frameworks, project, ["t", "texts", "text", "label"])
        words = "[PAD] [UNK] [CLS] [SEP] [MASK] good word".split()
        (project / "words").write_text("\n".join(words))
        python = [frameworks / "bin" / "python", "-c", MAKE_BERT]
        result = call([*python, "words", "bert"], cwd=project)
        assert result.exit_code == 0, result
    else:
        write_tables(project, "path,label", draw_folders(project / "photos"))
    if recipe == "hugging_face.py":
        said = to_arrow(frameworks, project, ["photos", "images", "image", "label"])
        assert "train: 48 rows, 2 classes\n    24 of 0, a cat\n" in said, said
        shutil.rmtree(project / "photos")  # all is in the copy
    (project / ".venv").symlink_to(frameworks)
    shutil.copy(REPOSITORY / "docs/your_training/job.sh", project)
    command = [*TWO, "--nodes=2", "job.sh", "--epochs=4", "--batch-size=2"]
    both = [jobs.submit(project, *command, "--accumulate=1", **OFFLINE) for _ in "ab"]
    stopped = both[1]
    jobs.until(stopped, "^Epoch 0: ")
    result = jobs.run(["scancel", "--signal=USR1", stopped])
    assert result.exit_code == 0, result
    results = [jobs.wait(job) for job in both]
    assert [result.state for result in results] == ["COMPLETED"] * 2, results[1]
    assert [result.restarts for result in results] == [0, 1], results[1]
    (done,) = results[1].find(r"^Resumed .*: epoch \d+, (\d+) samples")
    assert 0 < int(done) <= 48, results[1]
    lines = [
        {re.sub(r", \d+ samples/s", "", line) for line in result.find("^Epoch .*")}
        for result in results
    ]
    assert len(lines[0]) == 4 and lines[0] == lines[1], f"{results[0]}\n{results[1]}"
    assert " over 48 samples, 2 x cpu, valid accuracy " in min(lines[0])


def test_tables(tmp_path, monkeypatch):
    """What a table cannot have ends in a line that names it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(FOLDER)
    (tmp_path / "é 1.JPG").write_bytes(draw())
    (tmp_path / "bad.jpg").write_bytes(b"")

    def read(*rows: str, head="path, label", valid=("é 1.JPG,cat",)):
        write_tables(tmp_path, head, ["é 1.JPG,cat", *rows, "", " , "], valid)
        return runpy.run_path(str(FOLDER / "table.py"))

    found = read("é 1.JPG , dog ", "bad.jpg,cat")["train_set"]
    assert found.classes == ["cat", "dog"] and len(found) == 3
    image, label = found[1]
    assert image.shape == (3, 224, 224) and label == 1
    with pytest.raises(RuntimeError, match=r"^cannot read bad.jpg: "):
        found[2]
    refused = {
        "train.csv has no path,label": ((), {"head": "file,label"}),
        "train.csv: no file none.jpg": (["none.jpg,cat"], {}),
        "train.csv: é 1.JPG: no class ''": (["é 1.JPG"], {}),
        "validation.csv: é 1.JPG: no class 'fox'": ((), {"valid": ["é 1.JPG,fox"]}),
    }
    for message, (rows, options) in refused.items():
        with pytest.raises(SystemExit, match=f"^main.py: error: {message}$"):
            read(*rows, **options)


def test_kinds_of_images(monkeypatch):
    """Their pixels are right, of 16 bits and of a turned camera, too; or it raises."""
    monkeypatch.syspath_prepend(FOLDER)
    to_rgb = runpy.run_path(str(FOLDER / "crops.py"))["to_rgb"]
    grey = np.linspace(0, 65535, 48 * 40).reshape(40, 48).astype(np.uint16)
    assert to_rgb(Image.fromarray(grey)).float().mean() == pytest.approx(127.5, abs=1)
    exif = Image.Exif()
    exif[0x0112] = 6
    kinds = [("jpg", "CMYK"), ("jpg", "L"), ("png", "P"), ("png", "LA"), ("tif", "1")]
    for suffix, mode in kinds:
        opened = Image.open(io.BytesIO(draw(suffix, mode)))
        assert to_rgb(opened).shape == (3, 40, 48)
    turned = Image.open(io.BytesIO(draw(exif=exif)))
    assert to_rgb(turned).shape == (3, 48, 40)
    with pytest.raises(ValueError, match="floats"):
        to_rgb(Image.fromarray(grey.astype(np.float32)))


def test_what_to_arrow_refuses(frameworks, tmp_path):
    """Labels that are no classes, and a shard that Datasets would read in part."""
    pos = ["word,pos"] * 9
    write_tables(tmp_path / "floats", "text,label", ["word,0.5", "word,1.5"] * 9)
    write_tables(tmp_path / "none", "text,label", [*pos, "word,"])
    write_tables(tmp_path / "unknown", "text,label", pos, ["word,neg"])
    shard = {}
    for i in range(9):
        shard |= {f"{i}.jpg": draw(), f"{i}.cls": b"%d" % (i % 2 + 1)}
    for name in ("shards", "damaged"):
        for split in ("train", "val"):
            (tmp_path / name / split).mkdir(parents=True)
            (tmp_path / name / split / "0.tar").write_bytes(tar_bytes(shard))
    path = tmp_path / "damaged" / "train" / "0.tar"
    data = bytearray(path.read_bytes())
    data[data.index(b"5.jpg") + 148] ^= 1  # a digit of its header's checksum
    path.write_bytes(data)
    tables = ("floats", "none", "unknown")
    lists = [[name, f"out/{name}", "text", "label"] for name in tables]
    lists += [[name, f"out/{name}", "jpg", "cls"] for name in ("damaged", "shards")]
    said = to_arrow(frameworks, tmp_path, *lists)
    wrong = "label must be whole numbers or words, and none may be missing"
    assert f"floats: {wrong}\n" in said and f"none: {wrong}\n" in said, said
    assert "unknown: validation: label has what train does not have: {'neg'}\n" in said
    assert "damaged: damaged/train/0.tar is cut or damaged" in said, said
    assert "train: 9 rows, 2 classes\n    5 of 0, 1\n" in said, said
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["shards"]


@pytest.mark.parametrize("kind", ["numbers", "masks"])
def test_numbers_and_masks(kind, tmp_path):
    """The lines of the page, in main.py, train and validate."""
    splice(tmp_path, "table.py")
    lines = [line.strip() for line in re.findall("^    .*", PAGE, re.MULTILINE)]
    loss, answers, numbers, pixels = (
        next(line for line in lines if line.startswith(words))
        for words in ("loss = F.mse", "answers =", "correct[0]", "correct[1]")
    )
    main = (tmp_path / "main.py").read_text()
    start, end = main.index("import csv"), main.index("class Seeded")
    shape, label, model = {
        "numbers": ("64, 8", "float(x.sum())", "nn.Linear(8, 1)"),
        "masks": ("64, 3, 8, 8", "(x[0] > x[1]).long()", "nn.Conv2d(3, 2, 1)"),
    }[kind]
    block = f"train_set = [(x, {label}) for x in torch.rand({shape})]\n"
    block += f"valid_set = train_set[:20]\nbuild_model = lambda: {model}\n\n\n"
    main = main[:start] + block + main[end:]
    changes = {"loss = F.cross": loss, "answers =": answers, "correct[0] +=": numbers}
    if kind == "masks":
        changes = {"correct[1] +=": pixels}
    for old, new in changes.items():
        main, count = re.subn(rf"(?m)^( +){re.escape(old)}.*", rf"\g<1>{new}", main)
        assert count == 1, old
    (tmp_path / "main.py").write_text(main)
    command = [sys.executable, "main.py", "--batch-size=4", "--learning-rate=0.05"]
    result = call([*command, "--epochs=9"], cwd=tmp_path, env=ALONE, timeout=400)
    found = result.find(r"loss (\S+) over 64 .* valid accuracy (\S+)% of (\d+)$")
    assert len(found) == 9 and float(found[-1][0]) < float(found[0][0]), result
    assert 0 < float(found[-1][1]) <= 100, result
    assert found[-1][2] == ("20" if kind == "numbers" else str(20 * 64))
