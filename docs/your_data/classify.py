"""Name the class of an image: python classify.py model-8.pt images/train cat.jpg"""

import sys
from pathlib import Path

import torch
from data import build_model, center, list_folders, normalize
from torchvision.io import decode_image

weights, train_folder, image = sys.argv[1:]
classes = list_folders(Path(train_folder))  # in the order that the model knows
model = build_model(len(classes))
model.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
model.eval()
with torch.no_grad():
    logits = model(normalize(center(decode_image(image, "RGB"))[None]))
probabilities = logits.softmax(1)[0]
for index in probabilities.argsort(descending=True)[:5].tolist():
    print(f"{probabilities[index]:.1%} {classes[index]}")
