"""docs/sharded: it trains as DDP does, and a job goes on where the last one was."""

import shutil

import pytest
import torch
from slurm_jobs import TWO, Result
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

pytestmark = pytest.mark.usefixtures("nothing_left")


def losses(result: Result) -> dict[str, str]:
    """Assert that the job was done; return each epoch's loss, as printed."""
    assert result.state == "COMPLETED", result
    line = r"^Epoch (\d): loss (\d\.\d{4}) over 4096 samples$"
    return dict(result.find(line))


def test_sharded(jobs, tmp_path):
    folder = jobs.clone / "docs" / "sharded" / "checkpoints"
    command = [*TWO, "../../multi_node/job.sh"]
    replicated = losses(jobs.sbatch("docs/your_training", *command, CIFAR10_ARCHIVE=""))
    (jobs.clone / "docs" / "your_training" / "model.pt").unlink()
    try:
        sharded = losses(jobs.sbatch("docs/sharded", *command, CIFAR10_ARCHIVE=""))
        assert list(sharded) == list(replicated) == list("01234")
        for epoch, loss in sharded.items():
            # They are printed with 4 digits, and may be rounded to either side.
            assert abs(float(loss) - float(replicated[epoch])) < 0.00015, sharded

        # Each rank holds a half of the weights and of the momentum.
        saved = FileSystemReader(folder / "5").read_metadata().state_dict_metadata
        for name in ("model.0.weight", "optimizer.state.0.momentum_buffer"):
            assert [list(part.sizes) for part in saved[name].chunks] == 2 * [[32, 2]]

        # As the page says, for a script that knows nothing of shards.
        dcp_to_torch_save(folder / "5", tmp_path / "model.pt")
        weights = torch.load(tmp_path / "model.pt", weights_only=True)["model"]
        assert {name: tuple(value.shape) for name, value in weights.items()} == {
            "0.weight": (64, 2),
            "0.bias": (64,),
            "2.weight": (2, 64),
            "2.bias": (2,),
        }

        # As if the job had been killed while it saved.
        for epoch in ("4", "5"):
            (folder / epoch / ".metadata").unlink()
        resumed = losses(jobs.sbatch("docs/sharded", *command, CIFAR10_ARCHIVE=""))
        assert resumed == {epoch: sharded[epoch] for epoch in "34"}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
