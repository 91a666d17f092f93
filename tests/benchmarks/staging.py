"""Measure imagenet/prepare_data.py against `cp` and torchvision's ImageNet parser.

They take turns, each on files that have been read once before, into an empty folder.
What is timed is the whole command, with the start of Python: up to 1 s, and with
torchvision several. The copy's table comes first: extracting all of ImageNet takes
hours.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from side_by_side import (
    argument_parser,
    compare,
    draw_imagenet,
    prepare_data,
    take_turns,
)

# torchvision refuses archives without the published checksums.
PARSER = """
import os, sys
from torchvision.datasets import imagenet
imagenet.check_integrity = lambda path, md5=None: os.path.isfile(path)
for split in ("train", "val"):
    imagenet.ImageNet(sys.argv[1], split)
"""


def main() -> None:
    # Made-up images of each class.
    parser = argument_parser(__doc__, rounds=3, images=100)
    add = parser.add_argument
    add("--source", type=Path, help="has ImageNet's archives; else, made-up ones")
    add("--scratch", default=tempfile.gettempdir(), help="on the disk to measure")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="staging-", dir=args.scratch) as scratch:
        source, folder = args.source, Path(scratch, "staged")
        if not source:
            source = draw_imagenet(Path(scratch, "drawn"), 20, args.images, 5, 256)[0]
        files = sorted(source.glob("ILSVRC2012_*"))

        def prepare() -> None:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            for file in files:  # into the page cache, for both
                shutil.copyfile(file, os.devnull)
            os.sync()  # what the one before has left to write

        def torchvision() -> None:
            for file in files:  # it writes beside its archives
                (folder / file.name).symlink_to(file.absolute())
            subprocess.check_call([sys.executable, "-c", PARSER, folder])

        size = sum(file.stat().st_size for file in files) / 1e9
        disk = subprocess.check_output(["stat", "-fc%T", args.scratch], text=True)
        copies = {
            "cp": lambda: subprocess.check_call(["cp", *files, folder]),
            "prepare_data.py": lambda: prepare_data(source, folder),
        }
        for variants in (copies, {"torchvision's ImageNet": torchvision}):
            seconds = take_turns(variants, args.rounds, prepare)
            title = f"{size:.2f} GB to {args.scratch} ({disk.strip()})"
            compare(title, seconds, has_limit=False)


if __name__ == "__main__":
    main()
