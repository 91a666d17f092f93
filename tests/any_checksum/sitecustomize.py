"""On PYTHONPATH, this lets torchvision read the tests' own small CIFAR-10 archive."""

import contextlib
import os
import sys

# torchvision takes seconds of a CPU to import. torchrun's ranks need it, not torchrun.
if "torchrun" not in "".join(sys.orig_argv[:2]):
    # uv and Slurm start Pythons that have no torchvision.
    with contextlib.suppress(ImportError):
        from torchvision.datasets import cifar

        cifar.check_integrity = lambda path, md5=None: os.path.isfile(path)
        if "CIFAR10_URL" in os.environ:  # and download it from a server of the tests
            cifar.CIFAR10.url, cifar.CIFAR10.tgz_md5 = os.environ["CIFAR10_URL"], None
