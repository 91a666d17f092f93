"""A typical training script, with a DataLoader."""

import os
import subprocess
import time

import resume
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

rank = int(os.environ.get("SLURM_PROCID", 0))
local_rank = int(os.environ.get("SLURM_LOCALID", 0))
world_size = int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))
if int(os.environ.get("SLURM_NTASKS", world_size)) != world_size:
    raise SystemExit("main.py: error: this is no task of the job: start it with srun")
if world_size == 1:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
elif "MASTER_ADDR" not in os.environ:  # job.sh sets both, salloc neither
    command = ["scontrol", "show", "hostnames", os.environ["SLURM_STEP_NODELIST"]]
    os.environ["MASTER_ADDR"] = subprocess.check_output(command, text=True).split()[0]
    os.environ["MASTER_PORT"] = str(10000 + int(os.environ["SLURM_JOB_ID"]) % 20000)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
epochs = 5

points = torch.rand(16384, 2)  # your data
dataset = TensorDataset(points, (points.square().sum(1) < 0.64).long())
sampler = DistributedSampler(dataset, world_size, rank, drop_last=True)
loader = DataLoader(dataset, 64, sampler=sampler, drop_last=True)
if len(loader) == 0:
    raise SystemExit(f"main.py: error: {len(dataset)} samples are too few")

gpu = None
if device.type == "cuda":
    gpu = device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
backend = "nccl" if gpu else "gloo"
dist.init_process_group(backend, rank=rank, world_size=world_size, device_id=gpu)

# Your model.
model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * world_size, momentum=0.9)

run = resume.Run(model=model, optimizer=optimizer)
for epoch in run.loop(range(epochs)):
    metrics = run.sums(2, device)
    for inputs, targets in run.loop(loader):
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
            f"Epoch {epoch}: loss {total / count:.4f} over {count:.0f} samples, "
            f"{world_size} x {device.type}"
        )
    run.write("model.pt", model)
dist.barrier()  # srun would end rank 0 a minute after the others
time.sleep(0.1)  # gloo, on CPUs, still frees tensors: Python must not end yet
dist.destroy_process_group()
