from datasets import load_from_disk
from images import center_crop, random_crop
from torch.utils.data import Dataset
from torchvision import models


class Images(Dataset):
    def __init__(self, split, transform):
        self.rows, self.transform = load_from_disk(f"images/{split}"), transform

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        try:
            row = self.rows[i]
            return self.transform(row["input"]), row["label"]
        except Exception as error:  # of several libraries
            raise RuntimeError(f"row {i} of {self.rows.split}: {error}") from None


dataset = Images("train", random_crop)
valid_set = Images("validation", center_crop)
model = models.resnet18(num_classes=dataset.rows.features["label"].num_classes)
