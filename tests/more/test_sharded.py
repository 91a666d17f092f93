"""docs/sharded: it trains as one process does, and goes on where the last job was."""

import shutil
import sys

import pytest
import torch
from slurm_jobs import REPOSITORY
from test_your_training import FLAGS, losses, train_alone
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

pytestmark = pytest.mark.usefixtures("nothing_left")
SCRIPT = REPOSITORY / "docs" / "sharded" / "main.py"


def build() -> tuple:
    """Return the script's model, and its optimizer."""
    text = SCRIPT.read_text()
    names = {"nn": nn}
    exec(text[text.index("class Transformer") : text.index("model = Tr")], names)
    model = names["Transformer"]()
    return model, torch.optim.AdamW(model.parameters(), lr=2e-3)


def test_sharded(jobs, tmp_path):
    folder = jobs.clone / "docs" / "sharded"
    alone = train_alone(4, build)
    assert alone[4] < alone[0] / 2

    def train(where: str) -> dict[int, float]:
        script = "../" * (2 + where.count("/")) + "multi_node/job.sh"
        arguments = [*FLAGS.split(), script]
        result = jobs.sbatch(f"docs/{where}", *arguments, CIFAR10_ARCHIVE="")
        assert result.state == "COMPLETED", result
        return losses(result.output, 4)

    try:
        sharded = train("sharded")
        for found in (sharded, train("sharded/hsdp")):
            assert list(found) == list(range(5))
            # Later on, Adam makes a difference of a rounding large.
            for loss, right in zip(list(found.values())[:3], alone, strict=False):
                assert abs(loss - right) < 0.0005, (found, alone)

        # Each rank holds a quarter of the weights, and of what Adam remembers of them.
        # With HSDP, a node has all of them, and each of its two ranks a half.
        for run, parts in ((folder, 4), (folder / "hsdp", 2)):
            reader = FileSystemReader(run / "checkpoints" / "5")
            saved = reader.read_metadata().state_dict_metadata
            weight = "layers.0.linear1.weight"
            # The optimizer knows it by its number: the seventh of all.
            for name in (f"model.{weight}", "optimizer.state.6.exp_avg"):
                sizes = [list(part.sizes) for part in saved[name].chunks]
                assert sizes == parts * [[64 // parts, 32]], (run, name)

        # As the page says, for a script that knows nothing of shards.
        dcp_to_torch_save(folder / "checkpoints" / "5", tmp_path / "model.pt")
        weights = torch.load(tmp_path / "model.pt", weights_only=True)["model"]
        assert weights["head.weight"].shape == (2, 32)
        assert weights["layers.1.linear2.weight"].shape == (32, 64)

        # As if the job had been killed while it saved.
        for epoch in ("4", "5"):
            (folder / "checkpoints" / epoch / ".metadata").unlink()
        resumed = train("sharded")
        assert list(resumed) == [3, 4]
        assert abs(resumed[3] - sharded[3]) < 0.0005, (resumed, sharded)

        # One process, without srun, reads what four have saved.
        again = jobs.run([sys.executable, "main.py"], folder)
        assert again.exit_code == 0 and not again.find("^Epoch"), again
        assert again.find("^Nothing to do: "), again
    finally:
        for run in (folder, folder / "hsdp"):
            shutil.rmtree(run / "checkpoints", ignore_errors=True)
