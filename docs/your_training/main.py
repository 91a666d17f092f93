"""A typical training script, with a DataLoader."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

rank = int(os.environ["SLURM_PROCID"])
local_rank = int(os.environ["SLURM_LOCALID"])
world_size = int(os.environ["SLURM_NTASKS"])
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if device.type == "cuda":
    torch.cuda.set_device(local_rank)
dist.init_process_group(
    "nccl" if device.type == "cuda" else "gloo", rank=rank, world_size=world_size
)
torch.manual_seed(0)

points = torch.rand(4096, 2)  # your data
dataset = TensorDataset(points, (points.square().sum(1) < 0.64).long())
loader = DataLoader(
    dataset, 64, sampler=DistributedSampler(dataset, drop_last=True), drop_last=True
)

# Your model.
model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

for epoch in range(5):
    loader.sampler.set_epoch(epoch)
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
    if rank == 0:
        print(
            f"Epoch {epoch}: loss {total / count:.4f} over {count:.0f} samples",
            flush=True,
        )
        torch.save(model.module.state_dict(), "model.pt")
dist.barrier()  # or gloo, on CPUs, may abort when Python ends
dist.destroy_process_group()
