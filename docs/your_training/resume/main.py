"""A typical training script, with a DataLoader."""

import fcntl
import os
import subprocess

import torch
import torch.distributed as dist
from torch import nn
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

# Your model.
model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * world_size, momentum=0.9)

start = [{"epoch": -1}]
if rank == 0 and os.path.exists("checkpoint.pt"):
    start = [torch.load("checkpoint.pt", map_location="cpu", weights_only=True)]
    print(f"checkpoint.pt is of epoch {start[0]['epoch']}. To start over, remove it")
dist.broadcast_object_list(start)  # rank 0 decides for all
first = start[0]["epoch"] + 1
if first > 0:
    model.module.load_state_dict(start[0]["model"])
    optimizer.load_state_dict(optimizer.state_dict() | {"state": start[0]["momentum"]})
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
    weights = model.module.state_dict()
    if not all(weight.isfinite().all() for weight in weights.values()):
        raise SystemExit(f"main.py: error: NaN in the weights after epoch {epoch}")
    error = [None]
    if rank == 0:
        print(
            f"Epoch {epoch}: loss {total / count:.4f} over {count:.0f} samples, "
            f"{world_size} x {device.type}",
            flush=True,
        )
        momentum = optimizer.state_dict()["state"]
        checkpoint = {"model": weights, "momentum": momentum, "epoch": epoch}
        try:
            with open("checkpoint.partial", "wb") as file:
                torch.save(checkpoint, file)
            os.replace("checkpoint.partial", "checkpoint.pt")
        except (OSError, RuntimeError) as failure:
            os.remove("checkpoint.partial")  # torch.save hides the disk's own error
            error = [f"main.py: error: checkpoint.pt: {failure.__context__ or failure}"]
    dist.broadcast_object_list(error)
    if error[0]:
        raise SystemExit(error[0])
dist.barrier()  # or gloo, on CPUs, may abort when Python ends
dist.destroy_process_group()
