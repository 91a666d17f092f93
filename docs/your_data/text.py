import torch
from datasets import load_from_disk
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

NAME = "bert"  # a folder that save_pretrained() has filled
tokenizer = AutoTokenizer.from_pretrained(NAME)


def collate(rows):
    """Return a batch, padded to its longest text."""
    texts = [row["input"] for row in rows]
    options = {"truncation": True, "max_length": 512, "padding": True}
    tokens = tokenizer(texts, return_tensors="pt", **options)
    return tokens["input_ids"], torch.tensor([row["label"] for row in rows])


class Classifier(nn.Module):
    def __init__(self, classes):
        super().__init__()
        load = AutoModelForSequenceClassification.from_pretrained
        self.model = load(NAME, num_labels=classes)

    def forward(self, tokens):
        mask = tokens != tokenizer.pad_token_id
        return self.model(tokens, attention_mask=mask).logits


def build_model():
    return Classifier(train_set.features["label"].num_classes)


train_set = load_from_disk("texts/train")
valid_set = load_from_disk("texts/validation")
data_settings = {"data": [part._fingerprint for part in (train_set, valid_set)]}
