"""CIFAR-10's files as its publisher lays them out, of random pictures."""

import pickle
from pathlib import Path

import numpy as np


def draw_cifar10(folder: Path, train: int, test: int) -> Path:
    """Write cifar-10-batches-py to a folder, and return its path.

    Of pictures to train on, there are as many as five files can share evenly.
    """
    rng = np.random.default_rng(0)
    batches = folder / "cifar-10-batches-py"
    batches.mkdir()
    counts = {f"data_batch_{i}": train // 5 for i in range(1, 6)} | {"test_batch": test}
    for name, samples in counts.items():
        data = rng.integers(256, size=(samples, 3072), dtype=np.uint8)
        batch = {"data": data, "labels": rng.integers(10, size=samples).tolist()}
        (batches / name).write_bytes(pickle.dumps(batch))
    meta = {"label_names": [str(i) for i in range(10)]}
    (batches / "batches.meta").write_bytes(pickle.dumps(meta))
    return batches
