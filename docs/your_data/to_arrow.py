"""Save a data set for jobs: python to_arrow.py NAME_OR_FOLDER TARGET INPUT LABEL

INPUT and LABEL are columns of it: image and label of class folders, jpg and cls of tar
shards. TARGET/train, TARGET/validation and so on get the columns input and label.
"""

import glob
import mimetypes
import os
import shutil
import sys
import tarfile
from collections import Counter
from pathlib import Path

from datasets import ClassLabel, Image, load_dataset, load_dataset_builder
from labels import classes_of, clean

source, target, inputs, label = sys.argv[1:]
partial, old = f"{os.path.normpath(target)}.partial", f"{os.path.normpath(target)}.old"


def fail(message):
    sys.exit(f"to_arrow.py: error: {source}: {message}")


if os.path.exists(target) and os.path.exists(old):
    fail(f"{old} is there: remove it when no job reads it")
shutil.rmtree(partial, ignore_errors=True)  # of a start that was killed
for path in sorted(Path(source).rglob("*.tar")):
    # A damaged header would end the shard, in silence. After its end are zeros only.
    try:
        with tarfile.open(path, "r:") as tar, open(path, "rb") as file:
            tar.getmembers()
            file.seek(tar.offset)
            if file.read(1024) != bytes(1024) or any(file.read()):
                raise tarfile.ReadError("no end, or something behind it")
    except tarfile.TarError as error:
        fail(f"{path} is cut or damaged: {error}")
try:
    config = load_dataset_builder(source).config
    # In a table, NA and None are words, too.
    options = {"keep_default_na": False} if hasattr(config, "keep_default_na") else {}
    data = load_dataset(source, **options)
except Exception as error:  # of several libraries
    known = "name a folder, or a data set of the hub; save tables as CSV UTF-8"
    fail(f"{error.__cause__ or error!r}: {known}")
features = data["train"].features if "train" in data else {}
if not {inputs, label} <= set(features):
    fail(
        f"no split train has the columns {inputs} and {label}; found "
        f"{data.column_names}. Most often, a file or folder is called like train, test "
        "or val, an image is not in CLASS/ itself, or there is only one class"
    )
found = glob.glob("**", root_dir=source, recursive=True)  # none that is hidden
kinds = [mimetypes.guess_type(name, strict=False)[0] or "" for name in found]
images = sum(kind.startswith("image/") for kind in kinds)
is_image = isinstance(features[inputs], Image)
if is_image and images > sum(data.num_rows.values()):
    why = "the others are HEIC or SVG, behind links, or called like train, test or val"
    fail(f"it has {images} images, and only {data.num_rows} become rows: {why}")

known = dict(enumerate(getattr(features[label], "names", None) or ()))


def words_of(rows):
    """Return labels as words. What is neither a word nor a whole number stays."""
    values = [known.get(value, value) for value in rows[label]]
    return [clean(value) if isinstance(value, int | str) else value for value in values]


words = list(known.values()) or words_of(data["train"])
if wrong := [word for word in words if not isinstance(word, str) or word == ""]:
    why = "must be whole numbers or words, and none may be missing"
    fail(f"{label} {why}: train has {wrong[0]!r} in row {words.index(wrong[0])}")
names = list(dict.fromkeys(map(clean, words)) if known else classes_of(words))
if len(names) < 2:
    fail(f"{label} has one class only, {names}")
number_of = {name: number for number, name in enumerate(names)}
for split, rows in list(data.items()):
    words = words_of(rows)
    if split not in ("train", "validation") and set(words) <= {None, "", "-1", -1}:
        print(f"{split} is left out: it has no labels")
        del data[split]
        continue
    if other := set(words) - set(names):
        fail(f"{split}: {label} has {other}, which is no class of train")
    rows = rows.select_columns([inputs])
    if inputs != "input":
        rows = rows.rename_column(inputs, "input")
    numbers = [number_of[word] for word in words]
    data[split] = rows.add_column("label", numbers, feature=ClassLabel(names=names))
if "validation" not in data:
    print("There is no validation: a tenth of train is held out")
    try:
        parts = data["train"].train_test_split(0.1, seed=0, stratify_by_column="label")
    except ValueError:  # too few rows for a tenth of each class
        parts = data["train"].train_test_split(0.1, seed=0)
    data |= {"train": parts["train"], "validation": parts["test"]}


def content(value):
    """Return a number for an input, 0 for a missing one."""
    if is_image and value:
        file, value = value["path"], value["bytes"]  # b"" of an empty file in a shard
        value = Path(file).read_bytes() if value is None else value
    return hash(value if isinstance(value, bytes) else str(value)) if value else 0


contents = {}
for split, rows in data.items():
    raw = rows.cast_column("input", Image(decode=False)) if is_image else rows
    numbers = [content(value) for value in raw["input"]]
    if missing := numbers.count(0):
        row = numbers.index(0)
        first = f"such as row {row}: {raw[row]['input']!r}"
        fail(f"{split}: {missing} rows have no {inputs}, {first}")
    contents[split] = set(numbers)
    counts = Counter(rows["label"])
    print(f"{split}: {len(rows)} rows, {len(counts)} classes")
    for number, count in sorted(counts.items()):
        print(f"    class {number}, {names[number]}: {count} rows")
if both := contents["train"] & contents["validation"]:
    print(f"{len(both)} inputs of validation are in train, too")
try:
    data.save_to_disk(partial)
    if os.path.exists(target):
        os.rename(target, old)
        print(f"What {target} was is {old} now: remove it when no job reads it")
    os.rename(partial, target)
finally:
    shutil.rmtree(partial, ignore_errors=True)
