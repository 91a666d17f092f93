import torch
from datasets import load_from_disk
from torch import nn
from torch.utils.data import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer

NAME = "bert"  # a folder that has what save_pretrained() has written
tokenizer = AutoTokenizer.from_pretrained(NAME)


class Texts(Dataset):
    def __init__(self, split):
        self.rows = load_from_disk(f"texts/{split}")

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        row = self.rows[i]
        return tokenizer(row["input"], truncation=True, max_length=512), row["label"]


def collate(samples):
    """Pad the texts of a batch to the longest one."""
    tokens = tokenizer.pad([text for text, _ in samples], return_tensors="pt")
    return tokens["input_ids"], torch.tensor([label for _, label in samples])


class Classifier(nn.Module):
    def __init__(self, classes):
        super().__init__()
        load = AutoModelForSequenceClassification.from_pretrained
        self.model = load(NAME, num_labels=classes)

    def forward(self, tokens):
        mask = (tokens != tokenizer.pad_token_id).long()
        return self.model(tokens, attention_mask=mask).logits


dataset, valid_set = Texts("train"), Texts("validation")
model = Classifier(dataset.rows.features["label"].num_classes)
