"""docs/your_data: recipes train, are stopped and resume, and refuse other data."""

import io
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from drawn_imagenet import encode, tar_bytes
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

# Images that Pillow has opened, and the masks of their reddish squares.
MASKS = """
import numpy as np
from crops import crop_and_flip, normalize, to_float, to_rgb
from PIL import Image
from torchvision.transforms import v2
{names}
{crop}


class Masks:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        colors = np.random.default_rng(index).integers(256, size=(4, 4, 3))
        mask = (colors[..., 0] > colors[..., 1]).astype(np.uint8)
        mask[:, : 4 if index % 2 else 2] = 255  # nobody has labelled it
        mask = Image.fromarray(mask)
        image = Image.fromarray(colors.astype(np.uint8)).resize((40, 40), 0)
        mask = mask.resize((40, 40), 0)
        {both}
        {give}


train_set = Masks()
valid_set = torch.utils.data.Subset(train_set, range(20))
build_model = lambda: nn.Conv2d(3, 2, 1)
data_settings = {{}}


"""


def draw(suffix="jpg", mode="RGB", **options) -> bytes:
    image = Image.effect_noise((48, 40), 60).convert(mode)
    return encode(image, Image.registered_extensions()[f".{suffix}"], **options)


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


def write_tables(
    folder: Path, head: str, train: list, validation=(), encoding="utf-8"
) -> None:
    """Write train.csv and validation.csv as Excel does."""
    folder.mkdir(exist_ok=True)
    for name, rows in (("train", train), ("validation", validation or train[:6])):
        mark = "\ufeff" if encoding == "utf-8" else ""
        text = "\r\n".join([f"{mark}{head}", *rows, ""])
        (folder / f"{name}.csv").write_text(text, encoding=encoding)


def to_arrow(frameworks: Path, folder: Path, *lists: list) -> str:
    python = [frameworks / "bin" / "python", "-c", TO_ARROW, FOLDER / "to_arrow.py"]
    env = ALONE | OFFLINE | {"HF_HOME": str(folder / "cache")}
    env["PYTHONPATH"] = str(FOLDER)  # for labels.py: runpy does not look there
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
        main = re.sub("(    options = {.*\n)", rf"\1{line}", main)
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
        assert "train: 48 rows, 2 classes\n    class 0, a cat: 24 rows\n" in said, said
        shutil.rmtree(project / "photos")  # all is in the copy
    (project / ".venv").symlink_to(frameworks)
    shutil.copy(REPOSITORY / "docs" / "your_training" / "job.sh", project)
    command = [*TWO, "--nodes=2", "job.sh", "--epochs=4", "--batch-size=2"]
    command.append("--accumulate=1")
    stopped = jobs.submit(project, *command, **OFFLINE)
    jobs.interrupt(stopped, "^Epoch 0: ", signal.SIGUSR1)
    undisturbed = jobs.submit(project, *command, **OFFLINE)
    results = [jobs.wait(job) for job in (stopped, undisturbed)]
    assert [result.state for result in results] == ["COMPLETED"] * 2, results[0]
    assert [result.restarts for result in results] == [1, 0], results[0]
    assert len(results[0].find(r"^Resuming from .*-step-\d+.pt$")) == 1, results[0]
    lines = [
        {re.sub(r", \d+ samples/s", "", line) for line in result.find("^Epoch .*")}
        for result in results
    ]
    assert len(lines[0]) == 4 and lines[0] == lines[1], f"{results[0]}\n{results[1]}"
    assert " over 48 samples, 2 x cpu, valid accuracy " in min(lines[0])


def test_tables(tmp_path, monkeypatch, capsys):
    """What a table cannot have ends in a line that names it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(FOLDER)
    (tmp_path / "é 1.JPG").write_bytes(draw())
    (tmp_path / "bad.jpg").write_bytes(b"")

    def read(*rows: str, head="path, label", valid=("é 1.JPG,cat",), encoding="utf-8"):
        rows = ["é 1.JPG,cat", *rows, "", " , "]
        write_tables(tmp_path, head, rows, valid, encoding)
        return runpy.run_path(str(FOLDER / "table.py"))

    found = read("é 1.JPG , dog ", "bad.jpg,cat")["train_set"]
    said = "2 classes, in this order: ['cat', 'dog']\n"
    said += "1 files are in both tables, such as é 1.JPG\n"
    assert capsys.readouterr().out == said
    assert list(found.target_of) == ["cat", "dog"] and len(found) == 3
    image, label = found[1]
    assert image.shape == (3, 224, 224) and label == 1
    with pytest.raises(RuntimeError, match=r"^cannot read bad.jpg: "):
        found[2]
    numbers = [f"é 1.JPG,{label}" for label in (10, 9, -1, 0)]
    write_tables(tmp_path, "path,label", numbers)
    monkeypatch.setenv("SLURM_PROCID", "1")
    found = runpy.run_path(str(FOLDER / "table.py"))["train_set"]
    assert list(found.target_of) == ["-1", "0", "9", "10"]
    assert not capsys.readouterr().out
    write_tables(tmp_path, "path,label", [*numbers, "é 1.JPG,nan"])
    with pytest.raises(SystemExit, match=r"é 1.JPG: no class 'nan'$"):
        runpy.run_path(str(FOLDER / "table.py"))
    accents = [f"é 1.JPG,{name}" for name in ("caf\u00e9", "cafe\u0301", "NA")]
    write_tables(tmp_path, "path,label", accents)
    found = runpy.run_path(str(FOLDER / "table.py"))["train_set"]
    assert found.target_of == {"NA": 0, "caf\u00e9": 1}
    # What a job that comes back compares.
    rows, settings = ["é 1.JPG,cat", "é 1.JPG,dog"], set()
    for change in (rows, rows, [*rows, rows[0]], rows[::-1], ["é 1.JPG,fox", rows[1]]):
        write_tables(tmp_path, "path,label", change, rows[1:])
        settings.add(runpy.run_path(str(FOLDER / "table.py"))["data_settings"]["data"])
    assert len(settings) == 4 and "2 and 1 rows, 2 classes, " in str(settings)
    # A list of so many classes would take minutes, for each rank again.
    write_tables(tmp_path, "path,label", [f"é 1.JPG,{n}" for n in range(40000)])
    begin = time.process_time()
    assert len(runpy.run_path(str(FOLDER / "table.py"))["train_set"]) == 40000
    assert time.process_time() - begin < 10
    monkeypatch.setenv("SLURM_LOCALID", "1")  # another rank of the node looks
    write_tables(tmp_path, "path,label", ["no file,cat", "no file,dog"])
    runpy.run_path(str(FOLDER / "table.py"))
    monkeypatch.delenv("SLURM_LOCALID")
    few = "has no rows, or one class only"
    refused = {
        f"train.csv {few}": ((), {}),
        f"validation.csv {few}": (["é 1.JPG,dog"], {"valid": [""]}),
        "train.csv: cannot read it as CSV UTF-8: .*": (
            ["é 1.JPG,dog"],
            {"encoding": "cp1252"},
        ),
        "train.csv: a comma or a quote is wrong near 'é 1.JPG'": (
            ["é 1.JPG,dog, black", "é 1.JPG,dog"],
            {},
        ),
        "train.csv: a comma or a quote is wrong near 'x.jpg'": (
            ['x.jpg,"b', '1.jpg,"b'],
            {},
        ),
        "train.csv has no columns path and label": ((), {"head": "file,label"}),
        "train.csv: no file none.jpg": (["none.jpg,dog"], {}),
        "train.csv: é 1.JPG: no class ''": (["é 1.JPG", "é 1.JPG,dog"], {}),
        "validation.csv: é 1.JPG: no class 'fox'": (
            ["é 1.JPG,dog"],
            {"valid": ["é 1.JPG,fox"]},
        ),
    }
    for message, (rows, options) in refused.items():
        with pytest.raises(SystemExit, match=f"^main.py: error: {message}$"):
            read(*rows, **options)
    (tmp_path / "train.csv").write_bytes(b"")
    for message in ("has no columns path and label", ".* as CSV UTF-8: .*No such"):
        with pytest.raises(SystemExit, match=f"^main.py: error: train.csv:? {message}"):
            runpy.run_path(str(FOLDER / "table.py"))
        (tmp_path / "train.csv").unlink(missing_ok=True)


def test_kinds_of_images(monkeypatch):
    """Their pixels are right, of 16 bits and of a turned camera, too; or it raises."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10**8)
    to_rgb = runpy.run_path(str(FOLDER / "crops.py"))["to_rgb"]
    grey = np.linspace(0, 65535, 48 * 40).reshape(40, 48).astype(np.uint16)
    for order in "<>":  # ImageJ writes the upper byte first
        image = to_rgb(Image.fromarray(grey.astype(f"{order}u2")))
        assert image.float().mean() == pytest.approx(127.5, abs=1)
    to_rgb.__globals__["WHITE"] = 4095
    assert to_rgb(Image.fromarray(grey // 16)).unique().tolist() == [*range(256)]
    assert Image.MAX_IMAGE_PIXELS is None
    exif = Image.Exif()
    exif[0x0112] = 6
    kinds = [("jpg", "CMYK"), ("jpg", "L"), ("png", "P"), ("png", "LA"), ("tif", "1")]
    for suffix, mode in kinds:
        opened = Image.open(io.BytesIO(draw(suffix, mode)))
        assert to_rgb(opened).shape == (3, 40, 48)
    turned = Image.open(io.BytesIO(draw(exif=exif)))
    assert to_rgb(turned).shape == (3, 48, 40)
    # A black shape on nothing, which is black where its transparency is left out.
    shape = Image.new("RGBA", (48, 40))
    shape.paste("black", (0, 0, 24, 40))
    for image in (shape, shape.convert("LA"), shape.quantize(8)):
        assert to_rgb(image)[:, 0].T.tolist() == [[0] * 3] * 24 + [[255] * 3] * 24
    grey_shape = io.BytesIO(encode(Image.new("L", (8, 8)), "PNG", transparency=0))
    assert to_rgb(Image.open(grey_shape)).unique().tolist() == [255]
    with pytest.raises(ValueError, match="floats"):
        to_rgb(Image.fromarray(grey.astype(np.float32)))


def test_what_to_arrow_refuses(frameworks, tmp_path):
    """Labels that are no classes, rows without an input, images that are in no row."""
    two = ["word, pos", "word,neg "] * 9
    tables = {
        "floats": (["word,0.5", "word,1.5"] * 9, ()),
        "none": ([*two, "word,"], ()),
        "no_word": ([*two, ",pos"], ()),
        "numbers": (["a,1", "b,2"] * 9 + ["c,nan"], ()),
        "unknown": (two, ["word,fox"]),
        "one": (["word,pos"] * 9, ()),
        "empty": (two, [""]),
        "known": (["b,1"] * 9, ["b,"]),
    }
    for name, (train, validation) in tables.items():
        write_tables(tmp_path / name, "text,label", train, validation)
    write_tables(tmp_path / "cp1252", "text,label", [*two, "é,pos"], (), "cp1252")
    head = "dataset_info: {features: [{name: text, dtype: string}, {name: label, "
    head += "dtype: {class_label: {names: {'0': neg, '1': pos}}}}]}"
    (tmp_path / "known" / "README.md").write_text(f"---\n{head}\n---\n")
    shard = {}
    for i in range(9):
        shard |= {f"{i}.jpg": draw(), f"{i}.cls": b"%d" % (i % 2 + 1)}
    shards = {"shards": shard, "damaged": shard}
    shards["mixed"] = shard | {"9.jpeg": draw(), "9.cls": b"1"}
    shards["nothing"] = shard | {"9.jpg": b"", "9.cls": b"1"}
    for name, files in shards.items():
        for split in ("train", "val"):
            (tmp_path / name / split).mkdir(parents=True)
            (tmp_path / name / split / "0.tar").write_bytes(tar_bytes(files))
    path = tmp_path / "damaged" / "train" / "0.tar"
    data = bytearray(path.read_bytes())
    data[data.index(b"5.jpg") + 148] ^= 1  # a digit of its header's checksum
    path.write_bytes(data)
    photos = [f"{name}/{number}.jpg" for name in "ab" for number in range(3)]
    folders = {
        "called": [*photos, "a/train_1.jpg", "b/train_1.jpg"],
        "heic": [*photos, "a/4.HEIC"],
        "stray": [*photos, "cover.jpg"],
        "turned": [*photos, "a/3.jpg", "a/notes.txt", "a/._4.jpg"],
        "bare": [*photos, "b/3.jpg"],
    }
    for folder, names in folders.items():
        for name in names:
            (tmp_path / folder / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / name).write_bytes(draw())
    (tmp_path / "turned" / "a" / "3.jpg").write_bytes(draw()[:100])
    (tmp_path / "bare" / "b" / "3.jpg").write_bytes(b"")
    names = (*tables, "cp1252", "one/train.csv")
    lists = [[name, f"out/{name}", "text", "label"] for name in names]
    lists += [[name, f"out/{name}", "jpg", "cls"] for name in shards]
    lists += [[name, f"out/{name}", "image", "label"] for name in folders]
    said = to_arrow(frameworks, tmp_path, *lists)
    wrong = "label must be whole numbers or words, and none may be missing"
    utf8 = "name a folder, or a data set of the hub; save tables as CSV UTF-8\n"
    for line in (
        f"floats: {wrong}: train has 0.5 in row 0\n",
        f"none: {wrong}: train has '' in row 18\n",
        "no_word: train: 1 rows have no text, such as row 18: ''\n",
        "unknown: validation: label has {'fox'}, which is no class of train\n",
        "one: label has one class only, ['pos']\n",
        "empty: ValueError('Instruction \"validation\" corresponds to no data!'): ",
        "numbers: train: label has {'nan'}, which is no class of train\n",
        "damaged: damaged/train/0.tar is cut or damaged",
        "mixed: train: 1 rows have no jpg, such as row 9: None\n",
        "nothing: train: 1 rows have no jpg, such as row 9: {'bytes': b'', 'path': '9.",
        f"have no image, such as row 2: {{'bytes': None, 'path': '{tmp_path}/bare/b/3",
        "called: it has 8 images, and only {'train': 2} become rows: the others are ",
        "heic: it has 7 images, and only {'train': 6} become rows: the others are ",
        "stray: no split train has the columns image and label; found {'train': ",
        "train: 9 rows, 2 classes\n    class 0, 1: 5 rows\n",
    ):
        assert line in said, f"{line}\n{said}"
    assert re.search(f"known: ValueError.*: {utf8}", said), said
    assert re.search(f"cp1252: UnicodeDecodeError.*: {utf8}", said), said
    assert re.search(f"one/train.csv: .*one/train.csv.*: {utf8}", said), said
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"shards", "turned"}
    # A damaged file is named, whatever row it is in.
    (tmp_path / "images").symlink_to("out/turned")
    script = tmp_path / "read.py"
    recipe = (FOLDER / "hugging_face.py").read_text()
    script.write_text(f"{recipe}\nfor rows in train_set, valid_set: list(rows)\n")
    env = ALONE | OFFLINE | {"PYTHONPATH": str(FOLDER)}
    result = call([frameworks / "bin" / "python", script], cwd=tmp_path, env=env)
    assert result.find(r"^RuntimeError: cannot read row \d, 3.jpg: "), result


def test_labels(frameworks, tmp_path):
    """Classes are in order, of any kind. A split without labels is left out."""
    kinds = {
        "words": ["a, pos", "b,neg "] * 9,
        "bools": ["a,TRUE", "b,FALSE"] * 9,
        "numbers": ["a,10", "b,9", "c,2"] * 9,
        "accents": ["None,NA", "b,caf\u00e9", "c,cafe\u0301"] * 9,
    }
    for name, rows in kinds.items():
        write_tables(tmp_path / name, "input,label", rows)
    (tmp_path / "words" / "test.csv").write_text("input\nword\n")
    (tmp_path / "numbers" / "test.csv").write_text("input,label\nword,-1\n")
    (tmp_path / "digits").mkdir()
    rows = [{"input": "a", "label": str(label)} for label in [10, 9, -1] * 9]
    content = "\n".join(map(json.dumps, rows))
    for split in ("train", "validation"):
        (tmp_path / "digits" / f"{split}.jsonl").write_text(content)
    lists = [[name, f"out/{name}", "input", "label"] for name in (*kinds, "digits")]
    said = to_arrow(frameworks, tmp_path, *lists)
    assert said.count("test is left out: it has no labels\n") == 2, said
    classes = re.findall(r"^train: .*((?:\n    .*)+)", said, re.MULTILINE)
    found = [re.findall(r"class (\d+, .*): \d+ rows", of_split) for of_split in classes]
    assert found == [
        ["0, neg", "1, pos"],
        ["0, False", "1, True"],
        ["0, 2", "1, 9", "2, 10"],
        ["0, NA", "1, caf\u00e9"],
        ["0, -1", "1, 9", "2, 10"],
    ], said
    assert not (tmp_path / "out" / "words" / "test").exists()
    assert "2 inputs of validation are in train, too\n" in said, said


READ = """
import sys
from hugging_face import train_set
print(train_set[0], flush=True)
sys.stdin.readline()
print({train_set.rows.features["label"].int2str(label) for _, label in train_set})
"""
SETTINGS = "import hugging_face; print(hugging_face.data_settings)"


def test_to_arrow_again(frameworks, tmp_path):
    """A job reads on. The new data is there when it is whole. A class is held out."""
    accents = [unicodedata.normalize(form, "café") for form in ("NFC", "NFD")]
    for folder, names in (("old", "abc"), ("new", ["b", "d", *accents])):
        for name in names:
            (tmp_path / folder / name).mkdir(parents=True)
            for number in range(10 if folder == "old" or name in "bd" else 5):
                (tmp_path / folder / name / f"{number}.jpg").write_bytes(draw())
    again = ["new", "images", "image", "label"]
    said = to_arrow(frameworks, tmp_path, ["old", *again[1:]])
    assert "validation: 3 rows, 3 classes\n" in said, said  # a tenth of each
    env = ALONE | OFFLINE | {"PYTHONPATH": str(FOLDER)}
    python = [frameworks / "bin" / "python", "-c"]
    options = {"cwd": tmp_path, "env": env, "text": True, "stdout": subprocess.PIPE}
    job = subprocess.Popen([*python, READ], stdin=subprocess.PIPE, **options)
    job.stdout.readline()
    before = call([*python, SETTINGS], cwd=tmp_path, env=env)
    # While it writes, it is interrupted: nothing has changed.
    script = [*python, TO_ARROW, FOLDER / "to_arrow.py", json.dumps(again)]
    writer = subprocess.Popen(script, **options | {"env": env | {"HF_HOME": "cache"}})
    while not (tmp_path / "images.partial").exists():
        assert writer.poll() is None
    writer.kill()
    writer.communicate()
    assert call([*python, SETTINGS], cwd=tmp_path, env=env) == before
    said = to_arrow(frameworks, tmp_path, again, again)
    assert "class 1, café: 9 rows\n" in said and "3 classes" in said, said
    assert "What images was is images.old now: remove it when no job reads it" in said
    assert "images.old is there: remove it when no job reads it" in said
    assert not (tmp_path / "images.partial").exists()
    after = call([*python, SETTINGS], cwd=tmp_path, env=env)
    assert after.exit_code == 0 and after != before
    assert job.communicate("\n", timeout=60)[0].count("'") == 6  # a, b, c
    assert job.returncode == 0


@pytest.mark.parametrize("kind", ["numbers", "masks"])
def test_numbers_and_masks(kind, tmp_path):
    """The lines of the page, in main.py, train and validate."""
    splice(tmp_path, "table.py")
    lines = [line.strip() for line in re.findall("^    .*", PAGE, re.MULTILINE)]
    known, of, valid, loss, answers, numbers, names, crop, both, give, *mask_loss = (
        next(line for line in lines if line.startswith(words))
        for words in (
            *("from labels import", "self.target_of = numbers_of"),
            'valid_set = Table("validation.csv", center_crop)',
            *("loss = F.mse", "answers =", "correct +="),
            *("from torchvision", "crop = v2", "image, mask =", "return image, mask"),
            *("loss = F.cross", "targets =", "shares =", "correct += shares"),
        )
    )
    main = (tmp_path / "main.py").read_text()
    changes = {"from labels import": known, "self.target_of =": of, "loss = F.": loss}
    changes |= {"valid_set = T": valid, "answers =": answers, "correct +=": numbers}
    if kind == "masks":
        start, end = main.index("import os\n\nfrom crops"), main.index("def main()")
        block = MASKS.format(names=names, crop=crop, both=both, give=give)
        main = main[:start] + block + main[end:]
        mask_loss, *pixels = mask_loss
        changes = {"loss = F.": mask_loss, "correct +=": pixels}
    for old, new in changes.items():
        new = "".join(rf"\g<1>{line}\n" for line in ([new] if new in lines else new))
        main, count = re.subn(rf"(?m)^( +|){re.escape(old)}.*\n", new, main)
        assert count == 1, old
    main = main.replace("(num_classes=len(train_set.target_of))", "(num_classes=1)")
    (tmp_path / "main.py").write_text(main)
    prices = [f"{number}.jpg,{number / 64}" for number in range(64)]
    for number in range(64):
        grey = Image.new("L", (40, 40), 4 * number)
        grey.save(tmp_path / f"{number}.jpg")
    write_tables(tmp_path, "path,label", prices, prices[:20])
    command = [sys.executable, "main.py", "--learning-rate=0.005"]
    command.append(f"--batch-size={1 if kind == 'masks' else 4}")
    result = call([*command, "--epochs=5"], cwd=tmp_path, env=ALONE, timeout=400)
    assert (tmp_path / "model.pt").exists(), result
    found = result.find(r"loss (\S+) over 64 .* valid accuracy (\S+)% of (\d+)$")
    assert len(found) == 5 and float(found[-1][0]) < float(found[0][0]), result
    if kind == "masks":
        # Of what has a label: less than half of every other image.
        assert float(found[-1][1]) > 80, result
        return
    assert 0 < float(found[-1][1]) <= 100 and found[-1][2] == "20", result
    for label in ("nan", "", "inf", "NA", "1,5"):
        prices[17] = f'17.jpg,"{label}"'
        write_tables(tmp_path, "path,label", prices, prices[:12])
        result = call([*command, "--epochs=1"], cwd=tmp_path, env=ALONE)
        error = f"main.py: error: train.csv: 17.jpg: no class '{label}'\n"
        assert result.output == error, result
