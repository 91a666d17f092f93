"""What a model takes of an image that Pillow has opened."""

import torch
from PIL import ImageOps
from torchvision.transforms import v2

SIZE = 224
random_crop = v2.Compose([v2.RandomResizedCrop(SIZE), v2.RandomHorizontalFlip()])
center_crop = v2.Compose([v2.Resize(SIZE * 256 // 224), v2.CenterCrop(SIZE)])
to_float = v2.ToDtype(torch.float32, scale=True)
normalize = v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])


def cut(image, key):
    """Return a crop that follows from (epoch, index), or for an index the center."""
    image = ImageOps.exif_transpose(image)  # as the camera was held
    if image.mode.startswith("I"):  # of 16 bits, the upper 8
        image = image.point(lambda value: value / 256)
    if image.mode == "F":
        raise ValueError("its pixels are floats: scale them to 0 to 255 first")
    image = v2.functional.pil_to_tensor(image.convert("RGB"))
    if isinstance(key, tuple):
        torch.manual_seed(hash(key))  # whichever process cuts it
        return normalize(to_float(random_crop(image)))
    return normalize(to_float(center_crop(image)))
