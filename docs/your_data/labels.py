"""The rows of a table, and the classes of labels: for table.py and to_arrow.py."""

import contextlib
import csv
import hashlib
import math
import os
import unicodedata


def refuse(message):
    raise SystemExit(f"main.py: error: {message}")


def read_rows(table):
    """Return the paths and labels of a CSV file, without empty rows."""
    try:
        with open(table, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, restval="", skipinitialspace=True)
            rows, columns = list(reader), reader.fieldnames or ()
    except (OSError, UnicodeError, csv.Error) as error:
        refuse(f"{table}: cannot read it as CSV UTF-8: {error}")
    if not {"path", "label"} <= set(columns):
        refuse(f"{table} has no columns path and label")
    for row in rows:
        if any(row.get(None, ())) or "\n" in row["path"] + row["label"]:
            refuse(f"{table}: a comma or a quote is wrong near {row['path']!r}")
    rows = [(row["path"].strip(), clean(row["label"])) for row in rows]
    return [row for row in rows if any(row)]


def clean(label):
    """Return a word. An é of two letters becomes one: they look the same."""
    return unicodedata.normalize("NFC", str(label)).strip()


def classes_of(labels):
    """Return the number of each class, in order. Among numbers, nan is no class."""
    words = sorted(set(labels) - {""})
    with contextlib.suppress(ValueError):  # words stay in the order of the alphabet
        numbers = [word for word in words if math.isfinite(float(word))]
        words = sorted(numbers, key=float)  # 2 before 10
    return {word: number for number, word in enumerate(words)}


def numbers_of(labels):
    """Return the number that each label is. What is none is left out: NA, nan."""
    numbers = {}
    for word in sorted(set(labels)):
        with contextlib.suppress(ValueError):
            if math.isfinite(float(word)):
                numbers[word] = float(word)
    return numbers


def describe(train, valid):
    """Print the classes; return what must be the same when the job comes back."""
    classes = list(train.target_of)
    both = {path for path, _ in train.rows} & {path for path, _ in valid.rows}
    if os.environ.get("SLURM_PROCID", "0") == "0":
        names = classes if len(classes) < 100 else f"{classes[0]} to {classes[-1]}"
        print(f"{len(classes)} classes, in this order: {names}")
        if both:
            print(f"{len(both)} files are in both tables, such as {min(both)}")
    content = repr((classes, train.rows, valid.rows)).encode()
    rows = f"{len(train)} and {len(valid)} rows, {len(classes)} classes"
    return {"data": f"{rows}, {hashlib.sha256(content).hexdigest()[:8]}"}
