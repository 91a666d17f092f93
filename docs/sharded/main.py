"""A typical training script, with a DataLoader."""

import fcntl
import os
import subprocess
from glob import glob

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

rank = int(os.environ.get("SLURM_PROCID", 0))
local_rank = int(os.environ.get("SLURM_LOCALID", 0))
world_size = int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))
if "SLURM_JOB_ID" in os.environ and "SLURM_STEP_NUM_TASKS" not in os.environ:
    raise SystemExit("main.py: error: start it with srun, not in the job's shell")
if world_size == 1:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
elif "MASTER_ADDR" not in os.environ:  # job.sh sets both, salloc neither
    command = ["scontrol", "show", "hostnames", os.environ["SLURM_STEP_NODELIST"]]
    os.environ["MASTER_ADDR"] = subprocess.check_output(command, text=True).split()[0]
    os.environ["MASTER_PORT"] = str(10000 + int(os.environ["SLURM_JOB_ID"]) % 20000)
if rank == 0:
    lock = open("checkpoint.lock", "w")  # held until this process ends
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SystemExit("main.py: error: another job trains in this folder") from None
    except OSError:
        pass  # a file system without locks
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if device.type == "cuda":
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
dist.init_process_group(
    "nccl" if device.type == "cuda" else "gloo", rank=rank, world_size=world_size
)
torch.manual_seed(0)
epochs = 5

points = torch.rand(16384, 2)  # your data
dataset = TensorDataset(points, (points.square().sum(1) < 0.64).long())
loader = DataLoader(
    dataset, 64, sampler=DistributedSampler(dataset, drop_last=True), drop_last=True
)


class Transformer(nn.Module):
    """Your model."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(1, 32)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, nhead=4, dim_feedforward=64, dropout=0.0)
            for _ in range(2)
        )
        self.head = nn.Linear(32, 2)

    def forward(self, points):
        tokens = self.embed(points.T.unsqueeze(2))  # each coordinate is a token
        for layer in self.layers:
            tokens = layer(tokens)
        return self.head(tokens.mean(0))


model = Transformer()
for layer in model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

run = {"model": model, "optimizer": optimizer}
whole = [int(path.split("/")[1]) for path in glob("checkpoints/*/.metadata")]
start = [max(whole, default=0)]
dist.broadcast_object_list(start)  # rank 0 decides for all
first = start[0]
if first > 0:
    if rank == 0:
        print(f"checkpoints/{first} is the newest. To start over, remove checkpoints")
    get_optimizer_state_dict(model, optimizer)  # makes what load fills
    dcp.load(run, checkpoint_id=f"checkpoints/{first}")
for epoch in range(first, epochs):
    loader.sampler.set_epoch(epoch)
    torch.manual_seed(world_size * (epoch + 1) + rank)  # of dropout and random crops
    metrics = torch.zeros(2, dtype=torch.float64, device=device)
    for inputs, targets in loader:
        inputs, targets = inputs.to(device), targets.to(device)
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        metrics[0] += loss.detach() * len(targets)
        metrics[1] += len(targets)
    dist.all_reduce(metrics)
    total, count = metrics
    weights = model.state_dict()
    if not all(weight.isfinite().all() for weight in weights.values()):
        raise SystemExit(f"main.py: error: NaN in the weights after epoch {epoch}")
    if rank == 0:
        print(
            f"Epoch {epoch}: loss {total / count:.4f} over {count:.0f} samples, "
            f"{world_size} x {device.type}",
            flush=True,
        )
    try:
        dcp.save(run, checkpoint_id=f"checkpoints/{epoch + 1}")
    except dcp.CheckpointException as failure:  # the same on all ranks
        # On a full disk, PyTorch may say "unexpected pos" in place of "No space left".
        error, _ = next(iter(failure.failures.values()))
        path = f"checkpoints/{epoch + 1}"
        raise SystemExit(
            f"main.py: error: cannot write {path}, is the disk full? {error}"
        ) from None
dist.barrier()  # or gloo, on CPUs, may abort when Python ends
dist.destroy_process_group()
