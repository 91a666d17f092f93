from datasets import load_from_disk
from images import cut
from torch.utils.data import Dataset
from torchvision import models


class Images(Dataset):
    """Rows of to_arrow.py. A key is an index, for the training (epoch, index)."""

    def __init__(self, split):
        self.rows = load_from_disk(f"images/{split}")

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, key):
        index = key[1] if isinstance(key, tuple) else key
        try:
            row = self.rows[index]
            return cut(row["input"], key), row["label"]
        except Exception as error:  # of several libraries
            where = f"row {index} of {self.rows.split}"
            raise RuntimeError(f"cannot read {where}: {error}") from None


def build_model():
    return models.resnet18(num_classes=train_set.rows.features["label"].num_classes)


train_set, valid_set = Images("train"), Images("validation")
