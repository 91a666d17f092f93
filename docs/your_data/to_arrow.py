"""Save a data set for jobs: python to_arrow.py NAME_OR_FOLDER TARGET INPUT LABEL

INPUT and LABEL are columns of it: image and label of class folders, jpg and cls of tar
shards. TARGET/train, TARGET/validation and so on get the columns input and label.
"""

import contextlib
import glob
import mimetypes
import sys
import tarfile
from collections import Counter
from pathlib import Path

from datasets import ClassLabel, Image, load_dataset

source, target, inputs, label = sys.argv[1:]


def fail(message):
    sys.exit(f"to_arrow.py: error: {source}: {message}")


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
    data = load_dataset(source)
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
if isinstance(features[inputs], Image) and images > sum(data.num_rows.values()):
    why = "the others are HEIC or SVG, behind links, or called like train, test or val"
    fail(f"it has {images} images, and only {data.num_rows} become rows: {why}")
if "validation" not in data:
    print("There is no validation: a tenth of train is held out")
    parts = data["train"].train_test_split(0.1, seed=0)
    data |= {"train": parts["train"], "validation": parts["test"]}
names = getattr(features[label], "names", None)
if names is None:
    values = list(data["train"][label])
    if not all(isinstance(value, int | str) for value in values):
        fail(f"{label} must be whole numbers or words, and none may be missing")
    names = sorted({str(value).strip() for value in values})
    with contextlib.suppress(ValueError):  # words
        names.sort(key=float)  # 2 before 10
if len(names) < 2:
    fail(f"{label} has one class only, {names}")
number_of = {name: number for number, name in enumerate(names)}
for split, rows in list(data.items()):
    labels = list(rows[label])
    if split not in ("train", "validation") and set(labels) <= {None, -1}:
        print(f"{split} is left out: it has no labels")
        del data[split]
        continue
    if missing := rows.data.column(inputs).null_count:
        fail(f"{split}: {missing} rows have no {inputs}")
    if not isinstance(features[label], ClassLabel):
        words = [str(value).strip() for value in labels]
        labels = [number_of.get(word, word) for word in words]
    counts = Counter(labels)
    if other := set(counts) - set(range(len(names))):
        fail(f"{split}: {label} has {other}, which is no class of train")
    print(f"{split}: {len(rows)} rows, {len(counts)} classes")
    for number, count in sorted(counts.items()):
        print(f"    class {number}, {names[number]}: {count} rows")
    rows = rows.select_columns([inputs])
    if inputs != "input":
        rows = rows.rename_column(inputs, "input")
    data[split] = rows.add_column("label", labels, feature=ClassLabel(names=names))
data.save_to_disk(target)
