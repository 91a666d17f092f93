import contextlib
import csv
import os

from crops import center_crop, random_crop
from PIL import Image
from torch.utils.data import Dataset
from torchvision import models


class Table(Dataset):
    """The images of a CSV file with the columns path and label."""

    def __init__(self, table, crop, classes=()):
        try:
            with open(table, newline="", encoding="utf-8-sig") as file:
                reader = csv.DictReader(file, restval="", skipinitialspace=True)
                rows, columns = list(reader), reader.fieldnames or ()
        except (OSError, UnicodeError, csv.Error) as error:
            why = f"cannot read it as CSV UTF-8: {error}"
            raise SystemExit(f"main.py: error: {table}: {why}") from None
        if not {"path", "label"} <= set(columns):
            raise SystemExit(f"main.py: error: {table} has no columns path and label")
        for row in rows:
            if any(row.get(None, ())) or "\n" in row["path"] + row["label"]:
                why = f"a comma or a quote is wrong near {row['path']!r}"
                raise SystemExit(f"main.py: error: {table}: {why}")
        pairs = [(row["path"].strip(), row["label"].strip()) for row in rows]
        self.rows, self.crop = [pair for pair in pairs if any(pair)], crop
        self.classes = classes or sorted({label for _, label in self.rows} - {""})
        with contextlib.suppress(ValueError):  # words stay in the order of the alphabet
            self.classes.sort(key=float)  # 2 before 10
        if not self.rows or len(self.classes) < 2:
            raise SystemExit(f"main.py: error: {table} has no rows, or one class only")
        for path, label in self.rows:
            if label not in self.classes:
                raise SystemExit(f"main.py: error: {table}: {path}: no class {label!r}")
            if not os.path.isfile(path):
                raise SystemExit(f"main.py: error: {table}: no file {path}")

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        path, label = self.rows[index]
        try:
            return self.crop(Image.open(path)), self.classes.index(label)
        except Exception as error:  # of several kinds
            raise RuntimeError(f"cannot read {path}: {error}") from None


def build_model():
    return models.resnet18(num_classes=len(train_set.classes))


train_set = Table("train.csv", random_crop)
valid_set = Table("validation.csv", center_crop, train_set.classes)
if os.environ.get("SLURM_PROCID", "0") == "0":
    print(f"{len(train_set.classes)} classes, in this order: {train_set.classes}")
