"""What a training and a validation do to an image that Pillow has opened."""

import torch
from PIL import ImageOps
from torchvision.transforms import v2

SIZE = 224


def to_rgb(image):
    """Turn a photograph as its camera was held. Keep the upper 8 bits of 16."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        image = image.point(lambda value: value / 256)
    if image.mode == "F":
        raise ValueError("its pixels are floats: scale them to 0 to 255 first")
    return image.convert("RGB")


to_float = [
    v2.ToImage(),
    v2.ToDtype(torch.float32, scale=True),
    v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
]
crop = [v2.RandomResizedCrop(SIZE), v2.RandomHorizontalFlip()]
random_crop = v2.Compose([to_rgb, *crop, *to_float])
center = [v2.Resize(SIZE * 256 // 224), v2.CenterCrop(SIZE)]
center_crop = v2.Compose([to_rgb, *center, *to_float])
