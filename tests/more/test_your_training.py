"""docs/your_training: the script before, and after it as a job of multi_node."""

import re
import shutil
import sys

import pytest
import torch
from slurm_jobs import REPOSITORY, call

pytestmark = pytest.mark.usefixtures("nothing_left")
FLAGS = "--nodes=2 --ntasks-per-node=2 --gpus-per-node=2 --cpus-per-task=1 --mem=4G"
FLAGS = FLAGS.split()


def epochs(text: str) -> list[float]:
    """Assert that 5 epochs have lines, each over 4096 samples; return the losses."""
    lines = re.findall(
        r"^Epoch (\d): loss (\d\.\d{4}) over 4096 samples$", text, re.MULTILINE
    )
    assert [epoch for epoch, _ in lines] == list("01234"), text
    return [float(loss) for _, loss in lines]


def test_your_training(jobs, tmp_path):
    """Both learn, and the weights of the job fit the script before."""
    shutil.copy(REPOSITORY / "docs" / "your_training" / "before.py", tmp_path)
    command = [sys.executable, "before.py"]
    before = call(command, cwd=tmp_path).output
    folder = "docs/your_training"
    result = jobs.sbatch(folder, *FLAGS, "../../multi_node/job.sh", CIFAR10_ARCHIVE="")
    assert result.state == "COMPLETED", result
    for losses in (epochs(before), epochs(result.output)):
        assert losses[0] > 0.15 and losses[-1] < 0.15, (before, result)
    paths = [path / "model.pt" for path in (tmp_path, jobs.clone / folder)]
    alone, together = (torch.load(path, weights_only=True) for path in paths)
    paths[1].unlink()  # or the clone would be dirty
    shapes = [
        {name: value.shape for name, value in model.items()}
        for model in (alone, together)
    ]
    assert shapes[0] == shapes[1]
    # Each has written a file of its own.
    assert all(not torch.equal(alone[name], together[name]) for name in alone)
