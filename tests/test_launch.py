"""Every way to start the examples, on real nodes: what ran, on how many ranks, and what it left behind."""

import pytest

SMALL = ["--cpus-per-task=1", "--mem=1G"]
ONE_EPOCH = ["--epochs", "1", "--batch-size", "4"]


@pytest.fixture(autouse=True)
def nothing_left(jobs):
    yield
    assert jobs.leftovers() == []


@pytest.mark.parametrize(
    "folder, script, flags, world_size, nodes",
    [
        ("single_gpu", "job.sh", [], 1, 1),
        ("multi_gpu", "job.sh", [], 4, 1),
        ("multi_gpu", "job.sh", ["--ntasks-per-node=2", "--gpus-per-node=2"], 2, 1),
        ("multi_node", "job.sh", [], 8, 2),
        ("multi_node", "job.sh", ["--nodes=1", "--ntasks-per-node=1"], 1, 1),
        ("multi_node", "job.sh", ["--nodes=3", "--ntasks-per-node=2", "--gpus-per-node=2"], 6, 3),
        ("multi_node", "job.sh", ["--ntasks=3", "--nodes=2"], 3, 2),
        ("multi_node", "job.sh", ["--nodes=1-2", "--ntasks=4", "--gpus=4"], 4, None),
        ("multi_node", "job_torchrun.sh", [], 8, 2),
        ("multi_node", "job_torchrun.sh", ["--nodes=1"], 4, 1),
        ("multi_node", "job_torchrun.sh", ["--nodes=3", "--ntasks-per-node=2", "--gpus-per-node=2"], 6, 3),
        ("multi_node", "job_torchrun.sh", ["--nodes=1-2", "--ntasks=4", "--gpus=4"], 4, None),
    ],
)
def test_sbatch(jobs, folder, script, flags, world_size, nodes):
    result = jobs.sbatch(folder, *SMALL, *flags, script, *ONE_EPOCH)
    if script == "job_torchrun.sh":
        result.output = "\n".join(line.partition(": ")[2] for line in result.output.splitlines())  # srun -l
    result.trained(world_size, batch_size=4)
    assert nodes in (None, jobs.nodes_of(result))
