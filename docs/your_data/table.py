import os

from crops import center_crop, random_crop
from labels import classes_of, describe, read_rows, refuse
from PIL import Image
from torch.utils.data import Dataset
from torchvision import models


class Table(Dataset):
    """The images of a CSV file with the columns path and label."""

    def __init__(self, table, crop, target_of=None):
        self.rows, self.crop = read_rows(table), crop
        self.target_of = target_of or classes_of(label for _, label in self.rows)
        if not self.rows or len(self.target_of) < 2:
            refuse(f"{table} has no rows, or one class only")
        for path, label in self.rows:
            if label not in self.target_of:
                refuse(f"{table}: {path}: no class {label!r}")
            if os.environ.get("SLURM_LOCALID", "0") == "0" and not os.path.isfile(path):
                refuse(f"{table}: no file {path}")

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        path, label = self.rows[index]
        try:
            return self.crop(Image.open(path)), self.target_of[label]
        except Exception as error:  # of several kinds
            raise RuntimeError(f"cannot read {path}: {error}") from None


def build_model():
    return models.resnet18(num_classes=len(train_set.target_of))


train_set = Table("train.csv", random_crop)
valid_set = Table("validation.csv", center_crop, train_set.target_of)
data_settings = describe(train_set, valid_set)
