"""Random crops, and workers that Slurm may signal: Lightning, Trainer, Accelerate."""

import atexit
import multiprocessing.util
import os
import random
import signal
import tempfile

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info


class Seeded(Dataset):
    """A data set whose samples get random numbers by their epoch and their index.

    So does a collator in a worker, which draws after them. Set `epoch` before each
    epoch. Workers that are persistent would not see it.
    """

    epoch = 0

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        seed = hash((self.epoch, index)) % 2**32
        random.seed(seed)
        np.random.seed(seed)
        # Without workers, dropout's numbers must not change.
        with torch.random.fork_rng([], enabled=get_worker_info() is None):
            torch.default_generator.manual_seed(seed)
            return self.data[index]


# Slurm's signals may reach the workers, too, and would end them. What is blocked before
# a fork stays so in the new process.
multiprocessing.set_start_method("fork", force=True)
signals = {signal.SIGUSR1, signal.SIGTERM}
os.register_at_fork(
    before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, signals),
    after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, signals),
)
if len(tempfile.gettempdir()) > 74:
    tempfile.tempdir = "/tmp"  # or the paths of the workers' sockets would be too long
multiprocessing.util.get_temp_dir()  # the workers' sockets: removed at the end


@atexit.register
def end_workers():
    """Kill the workers: Python ends them by TERM, which they block, and waits."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # or DataLoader calls it an error
    for worker in multiprocessing.active_children():
        worker.kill()
