from crops import center_crop, random_crop
from datasets import Image, load_from_disk
from torch.utils.data import Dataset
from torchvision import models


class Images(Dataset):
    """The rows of a split, as to_arrow.py has saved them."""

    def __init__(self, split, crop):
        self.rows, self.crop = load_from_disk(f"images/{split}"), crop

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        try:
            row = self.rows[index]
            return self.crop(row["input"]), row["label"]
        except Exception as error:  # of several libraries
            file = self.rows.cast_column("input", Image(decode=False))[index]["input"]
            where = f"row {index}, {file['path']}"
            raise RuntimeError(f"cannot read {where}: {error}") from None


def build_model():
    return models.resnet18(num_classes=train_set.rows.features["label"].num_classes)


train_set, valid_set = Images("train", random_crop), Images("validation", center_crop)
data_settings = {"data": [part.rows._fingerprint for part in (train_set, valid_set)]}
