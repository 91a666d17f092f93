"""What a model takes of an image that Pillow has opened."""

import torch
from PIL import Image, ImageOps
from torchvision.transforms import v2

SIZE = 224
WHITE = 65535  # of 16 bits; 4095 for a camera of 12
Image.MAX_IMAGE_PIXELS = None  # slides, scans and satellites have more


def to_rgb(image):
    image = ImageOps.exif_transpose(image)  # as the camera was held
    if image.mode.startswith("I"):  # 16 bits, in either order of bytes
        image = image.convert("I").point(lambda value: value * 255 / WHITE)
    elif image.has_transparency_data:  # a black shape on nothing would be all black
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    if image.mode == "F":
        raise ValueError("its pixels are floats: scale them to 0 to 255 first")
    return v2.functional.pil_to_tensor(image.convert("RGB"))


to_float = v2.ToDtype(torch.float32, scale=True)
normalize = v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
crop_and_flip = v2.RandomResizedCrop(SIZE), v2.RandomHorizontalFlip()
random_crop = v2.Compose([to_rgb, *crop_and_flip, to_float, normalize])
center = v2.Resize(SIZE * 256 // 224), v2.CenterCrop(SIZE)
center_crop = v2.Compose([to_rgb, *center, to_float, normalize])
