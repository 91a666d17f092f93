"""docs/sharded: it trains as one process does, and goes on where the last job was."""

import sys

import pytest
import torch
from test_your_training import FLAGS, SHARDED, losses, train_alone
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

pytestmark = pytest.mark.usefixtures("nothing_left")


def build() -> tuple:
    """Return the script's model, and its optimizer."""
    text = SHARDED.read_text()
    names = {"nn": nn}
    exec(text[text.index("class Transformer") : text.index("model = Tr")], names)
    model = names["Transformer"]()
    return model, torch.optim.AdamW(model.parameters(), lr=2e-3)


def test_sharded(jobs, several, tmp_path):
    alone = train_alone(4, build)
    assert alone[4] < alone[0] / 2
    scripts = {"sharded": SHARDED, "hsdp": SHARDED.parent / "hsdp" / "main.py"}
    scripts["bf16"] = SHARDED.parent / "bf16" / "main.py"
    folders = {name: several(script) for name, script in scripts.items()}

    def train(name: str) -> dict[int, float]:
        arguments = [*FLAGS.split(), "job.sh"]
        result = jobs.sbatch(folders[name], *arguments, CIFAR10_ARCHIVE="")
        assert result.state == "COMPLETED", result
        return losses(result.output, 4)

    trained = {name: train(name) for name in folders}
    for name, found in trained.items():
        assert list(found) == list(range(5))
        # Later on, Adam makes a difference of a rounding large.
        near = 0.01 if name == "bf16" else 0.0005
        for loss, right in zip(list(found.values())[:3], alone, strict=False):
            assert abs(loss - right) < near, (name, found, alone)
    assert trained["bf16"] != trained["sharded"]

    # Each rank holds a quarter of the weights, and of what Adam remembers of them.
    # With HSDP, a node has all of them, and each of its two ranks a half.
    for name, parts in (("sharded", 4), ("hsdp", 2), ("bf16", 4)):
        reader = FileSystemReader(folders[name] / "checkpoints" / "5")
        saved = reader.read_metadata().state_dict_metadata
        weight = "layers.0.linear1.weight"
        # The optimizer knows it by its number: the seventh of all.
        for key in (f"model.{weight}", "optimizer.state.6.exp_avg"):
            sizes = [list(part.sizes) for part in saved[key].chunks]
            assert sizes == parts * [[64 // parts, 32]], name
            assert saved[key].properties.dtype == torch.float32, name

    # As the page says, for a script that knows nothing of shards.
    folder = folders["sharded"]
    dcp_to_torch_save(folder / "checkpoints" / "5", tmp_path / "model.pt")
    weights = torch.load(tmp_path / "model.pt", weights_only=True)["model"]
    assert weights["head.weight"].shape == (2, 32)
    assert weights["layers.1.linear2.weight"].shape == (32, 64)

    # As if the job had been killed while it saved.
    for epoch in ("4", "5"):
        (folder / "checkpoints" / epoch / ".metadata").unlink()
    resumed = train("sharded")
    assert list(resumed) == [3, 4]
    assert abs(resumed[3] - trained["sharded"][3]) < 0.0005, (resumed, trained)

    # One process, without srun, reads what four have saved.
    again = jobs.run([sys.executable, "main.py"], folder)
    assert again.exit_code == 0 and not again.find("^Epoch"), again
    assert again.find("^checkpoints/5 is the newest"), again
