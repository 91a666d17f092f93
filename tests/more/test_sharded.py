"""docs/sharded: it trains as one process does, and goes on where the last job was."""

import os
import shutil
import sys
from itertools import chain

import pytest
import torch
from slurm_jobs import REPOSITORY, Result, call
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.nn import functional as F
from torch.utils.data import DistributedSampler, TensorDataset

pytestmark = pytest.mark.usefixtures("nothing_left")
FLAGS = "--nodes=2 --ntasks-per-node=2 --gpus-per-node=2 --cpus-per-task=1 --mem=4G"
SCRIPT = REPOSITORY / "docs" / "sharded" / "main.py"


def losses(result: Result) -> dict[str, float]:
    """Assert that the job was done; return each epoch's loss, as printed."""
    assert result.state == "COMPLETED", result
    line = r"^Epoch (\d): loss (\d\.\d{4}) over 16384 samples, 4 processes$"
    return {epoch: float(loss) for epoch, loss in result.find(line)}


def expected() -> list[float]:
    """Train the script's model in one process, on what four ranks take together."""
    torch.manual_seed(0)
    points = torch.rand(16384, 2)
    targets = (points.square().sum(1) < 0.64).long()
    samplers = [DistributedSampler(TensorDataset(points), 4, rank) for rank in range(4)]
    text = SCRIPT.read_text()
    names = {"nn": nn}
    exec(text[text.index("class Transformer") : text.index("model = Tr")], names)
    model = names["Transformer"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    averages = []
    for epoch in range(5):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        order = torch.tensor(list(chain(*zip(*samplers, strict=True))))
        total = 0.0
        for batch in order.split(256):
            loss = F.cross_entropy(model(points[batch]), targets[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
        averages.append(total / len(points))
    return averages


def test_sharded(jobs, tmp_path):
    folder = jobs.clone / "docs" / "sharded"
    alone = expected()
    assert alone[4] < alone[0] / 2

    def train(where: str) -> dict[str, float]:
        script = "../" * (2 + where.count("/")) + "multi_node/job.sh"
        arguments = [*FLAGS.split(), script]
        return losses(jobs.sbatch(f"docs/{where}", *arguments, CIFAR10_ARCHIVE=""))

    try:
        sharded = train("sharded")
        for found in (sharded, train("sharded/hsdp")):
            assert list(found) == list("01234")
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
        assert list(resumed) == ["3", "4"]
        assert abs(resumed["3"] - sharded["3"]) < 0.0005, (resumed, sharded)

        # One process, without srun, reads what four have saved.
        outside = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
        again = call([sys.executable, "main.py"], cwd=folder, env=outside)
        assert again.exit_code == 0 and not again.find("^Epoch"), again
        assert again.find("^Nothing to do: "), again
    finally:
        for run in (folder, folder / "hsdp"):
            shutil.rmtree(run / "checkpoints", ignore_errors=True)
