"""Convert parquet files, which cannot be read in a random order, to one Arrow file.

Usage: uv run --group parquet python to_arrow.py train-*.parquet train.arrow
"""

import sys

import pyarrow as pa
from pyarrow import parquet

*sources, target = sys.argv[1:]
with pa.ipc.new_file(target, parquet.read_schema(sources[0])) as file:
    for source in sources:
        for rows in parquet.ParquetFile(source).iter_batches(batch_size=100):
            file.write_batch(rows)
