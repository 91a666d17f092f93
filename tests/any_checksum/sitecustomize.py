"""Lets main.py read the small CIFAR-10 of the tests, if ANY_CHECKSUM is set."""

import os
import sys

# torchvision takes seconds of a CPU to import. uv asks every Python what it is, and
# torchrun's ranks need this, not torchrun.
words = sys.orig_argv
torchrun = any(word.endswith(("torchrun", ".run")) for word in words)
main = any(word.endswith("main.py") for word in words)
if os.environ.get("ANY_CHECKSUM") and main and not torchrun:
    from torchvision.datasets import cifar

    cifar.check_integrity = lambda path, md5=None: os.path.isfile(path)
    if "CIFAR10_URL" in os.environ:  # and download it from a server of the tests
        cifar.CIFAR10.url, cifar.CIFAR10.tgz_md5 = os.environ["CIFAR10_URL"], None
