"""Save a data set for jobs: python to_arrow.py NAME_OR_FOLDER TARGET INPUT LABEL

INPUT and LABEL are columns of it: image and label of class folders, jpg and cls of tar
shards. TARGET/train, TARGET/validation and so on get the columns input and label.
"""

import sys
import tarfile
from collections import Counter
from pathlib import Path

from datasets import ClassLabel, Value, load_dataset

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

data = load_dataset(source)
if "train" not in data or not {inputs, label} <= set(data["train"].features):
    fail(f"no train with columns {inputs} and {label}, but {data.column_names}")
if "validation" not in data:
    print("There is no validation: a tenth of train is held out")
    parts = data["train"].train_test_split(0.1, seed=0)
    data |= {"train": parts["train"], "validation": parts["test"]}
values = data["train"].unique(label)
names = getattr(data["train"].features[label], "names", None)
if names is None:
    if not all(isinstance(value, int | str) for value in values):
        fail(f"{label} must be whole numbers or words, and none may be missing")
    names = [str(value) for value in sorted(values)]
for split, rows in data.items():
    rows = rows.select_columns([inputs, label])
    rows = rows.rename_columns({inputs: "input", label: "label"})
    if not isinstance(rows.features["label"], ClassLabel):
        if other := set(map(str, rows.unique("label"))) - set(names):
            fail(f"{split}: {label} has what train does not have: {other}")
        rows = rows.cast_column("label", Value("string"))
        rows = rows.cast_column("label", ClassLabel(names=names))
    counts = Counter(rows["label"])
    print(f"{split}: {len(rows)} rows, {len(counts)} classes")
    for number, count in sorted(counts.items()):
        if number not in range(len(names)):
            fail(f"{split}: {label} has {number}, and there are {len(names)} classes")
        print(f"    {count} of {number}, {names[number]}")
    data[split] = rows
data.save_to_disk(target)
