"""Save a data set of the Hugging Face hub, or a folder of parquet files, for a job.

Usage: python to_disk.py NAME_OR_FOLDER TARGET
"""

import sys

from datasets import load_dataset

source, target = sys.argv[1:]
for split, name in {"train": "train", "val": "validation", "test": "test"}.items():
    load_dataset(source, split=name).save_to_disk(f"{target}/{split}")
