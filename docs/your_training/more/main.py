"""A typical training script, with a DataLoader."""

import contextlib
import os
import subprocess
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

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
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
epochs = 5

points = torch.rand(16384, 2)  # your data
dataset = TensorDataset(points, (points.square().sum(1) < 0.64).long())
loader = DataLoader(
    dataset,
    64,
    sampler=DistributedSampler(dataset, world_size, rank, drop_last=True),
    drop_last=True,
    num_workers=int(os.environ.get("SLURM_CPUS_PER_TASK", 1)),
    multiprocessing_context="fork",
    persistent_workers=True,
)
if len(tempfile.gettempdir()) > 74:
    tempfile.tempdir = "/tmp"  # or the paths of the workers' sockets would be too long
iter(loader)  # starts the workers, before NCCL is up

points = torch.rand(1000, 2)  # your validation data
valid_set = TensorDataset(points, (points.square().sum(1) < 0.64).long())
share = Subset(valid_set, range(rank, len(valid_set), world_size))
valid_loader = DataLoader(share, 64)

if device.type == "cuda":
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
dist.init_process_group(
    "nccl" if device.type == "cuda" else "gloo", rank=rank, world_size=world_size
)

# Your model.
model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
model = model.to(device)
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
half = torch.bfloat16
if device.type == "cuda" and torch.cuda.get_device_capability() < (8, 0):
    half = torch.float16  # V100, T4 and RTX 8000
scaler = torch.amp.GradScaler(device.type, enabled=half == torch.float16)
accumulate = 2  # batches a step

for epoch in range(epochs):
    loader.sampler.set_epoch(epoch)
    torch.manual_seed(world_size * (epoch + 1) + rank)  # of dropout and random crops
    begin = time.perf_counter()
    optimizer.zero_grad()  # a batch that was left over made no step
    metrics = torch.zeros(2, dtype=torch.float64, device=device)
    for batch, (inputs, targets) in enumerate(loader, start=1):
        inputs, targets = inputs.to(device), targets.to(device)
        step = batch % accumulate == 0
        with contextlib.nullcontext() if step else model.no_sync():
            with torch.autocast(device.type, half):
                loss = F.cross_entropy(model(inputs).float(), targets)
            scaler.scale(loss / accumulate).backward()
        if step:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        metrics[0] += loss.detach() * len(targets)
        metrics[1] += len(targets)
    dist.all_reduce(metrics)
    total, count = metrics
    rate = count / (time.perf_counter() - begin)

    model.eval()
    correct = torch.zeros(2, dtype=torch.float64, device=device)
    for inputs, targets in valid_loader:
        inputs, targets = inputs.to(device), targets.to(device)
        with torch.no_grad():
            answers = model.module(inputs).argmax(1)
        correct[0] += (answers == targets).sum()
        correct[1] += len(targets)
    dist.all_reduce(correct)
    model.train()

    weights = model.module.state_dict()
    if not all(weight.isfinite().all() for weight in weights.values()):
        raise SystemExit(f"main.py: error: NaN in the weights after epoch {epoch}")
    if rank == 0:
        print(
            f"Epoch {epoch}: loss {total / count:.4f} over {count:.0f} samples, "
            f"{world_size} x {device.type}, {rate:.0f} samples/s, "
            f"valid accuracy {correct[0] / correct[1]:.2%} of {correct[1]:.0f}",
            flush=True,
        )
        torch.save(weights, "model.partial")
        os.replace("model.partial", "model.pt")
dist.barrier()  # or gloo, on CPUs, may abort when Python ends
dist.destroy_process_group()
