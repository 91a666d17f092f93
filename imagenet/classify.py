"""Name the class of images: python classify.py best.pt IMAGE_OR_FOLDER

If folders have the names of classes, it also says how many of their images are right.
"""

import argparse
import sys
from pathlib import Path

import torch
from archives import is_hidden, is_image, one_form, walk
from data import as_tensor, center_crop, decode
from main import build_model, compute_logits


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.stdout.reconfigure(errors="backslashreplace")  # for names of any bytes
    weights, place = sys.argv[1], Path(sys.argv[2]).absolute()
    try:
        saved = torch.load(weights, map_location="cpu", weights_only=True)
        recipe, classes = argparse.Namespace(**saved["recipe"]), saved["classes"]
        model = build_model(recipe, len(classes)).eval().requires_grad_(False)
        model.load_state_dict(saved["model"])
        files = images = [place]
        if place.is_dir():
            files = [Path(name) for name in walk(place) if not name.endswith("/")]
            visible = [path for path in files if not is_hidden(path.name)]
            images = sorted(path for path in visible if is_image(path.name))
    except Exception as error:  # of several kinds
        sys.exit(f"classify.py: error: cannot use {weights} and {place}: {error!r}")
    crop = center_crop(recipe.image_size)
    right, damaged = [], 0
    for path in images:
        try:
            image = crop(decode(as_tensor(path.read_bytes())))
        except Exception as error:  # of several libraries
            print(f"cannot decode image {path}: {error}")
            damaged += 1
            continue
        probabilities = compute_logits(model, image[None])[0].softmax(0)
        order = probabilities.argsort(descending=True).tolist()
        print(path, *[f"{probabilities[i]:.1%} {classes[i]}" for i in order[:5]])
        folders = path.relative_to(place.parent).parts[:-1]  # none above place
        named = [name for name in map(one_form, folders) if name in classes]
        if named:
            right.append(named[-1] == classes[order[0]])
    others = len(files) - len(images)
    print(f"{len(images)} images, {damaged} cannot be decoded; {others} other files")
    if right:
        print(f"{len(images) - damaged - len(right)} are in folders of no class")
        print(f"{sum(right)} of {len(right)} are right: {sum(right) / len(right):.2%}")
    sys.exit(damaged == len(images))  # status 1, if it has named none


if __name__ == "__main__":
    main()
