from datasets import load_from_disk
from torch import nn
from torch.utils.data import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer

NAME = "bert"  # a folder that save_pretrained() has filled
tokenizer = AutoTokenizer.from_pretrained(NAME)


class Texts(Dataset):
    """Rows of to_arrow.py. A key is an index, for the training (epoch, index)."""

    def __init__(self, split):
        self.rows = load_from_disk(f"texts/{split}")

    def __len__(self):
        return len(self.rows)

    def __getitems__(self, keys):
        """Return a batch, padded to its longest text."""
        rows = self.rows[[key[1] if isinstance(key, tuple) else key for key in keys]]
        options = {"truncation": True, "max_length": 512, "padding": True}
        tokens = tokenizer(rows["input"], return_tensors="pt", **options)
        return list(zip(tokens["input_ids"], rows["label"], strict=True))


class Classifier(nn.Module):
    def __init__(self, classes):
        super().__init__()
        load = AutoModelForSequenceClassification.from_pretrained
        self.model = load(NAME, num_labels=classes)

    def forward(self, tokens):
        mask = tokens != tokenizer.pad_token_id
        return self.model(tokens, attention_mask=mask).logits


def build_model():
    return Classifier(train_set.rows.features["label"].num_classes)


train_set, valid_set = Texts("train"), Texts("validation")
