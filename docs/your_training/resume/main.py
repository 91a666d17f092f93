"""A typical training script, with a DataLoader."""

import os
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

rank = int(os.environ.get("SLURM_PROCID", 0))
local_rank = int(os.environ.get("SLURM_LOCALID", 0))
world_size = int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))
if int(os.environ.get("SLURM_NTASKS", world_size)) != world_size:
    raise SystemExit("main.py: error: this is no task of the job: start it with srun")
warned = []  # by Slurm: USR1 before the time limit, TERM before a preemption
for name in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(name, lambda number, frame: warned.append(number))
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
batches = []  # what is left of the epoch
loader = DataLoader(dataset, batch_sampler=batches, generator=torch.Generator())
if len(sampler) < 64:
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
# In its first backward(), DDP sorts the gradients. Their order decides how the sums of
# more than two ranks are rounded, so each start begins with one that changes nothing.
inputs, _ = loader.collate_fn([dataset[0]])
model.eval()(inputs.to(device)).sum().backward()
model.train()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * world_size, momentum=0.9)

run_dir = os.environ.get("RUN_DIR", ".")  # job.sh makes one for each job
first, done = 0, torch.zeros(2, dtype=torch.float64)  # its loss and samples so far
path = [f"{run_dir}/checkpoint.pt"]
if not os.path.exists(path[0]):
    path = sys.argv[1:2] or [None]  # another job's: sbatch job.sh runs/8/checkpoint.pt
dist.broadcast_object_list(path)  # rank 0 decides for all
if path[0]:
    saved = torch.load(path[0], map_location="cpu", mmap=True, weights_only=True)
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(optimizer.state_dict() | {"state": saved["optimizer"]})
    first, done = saved["epoch"], saved["done"]
    if rank == 0:
        again = int(done[1]) % world_size  # with another number of ranks
        print(f"Resumed {path[0]}: epoch {first}, {done[1]:.0f} samples, {again} again")


def save(name, content):
    """Rank 0 saves, the others wait. The old file stays until the new one is whole."""
    weights = model.module.state_dict().values()
    if any(weight.isnan().any() for weight in weights):  # -inf may be a mask
        raise SystemExit(f"main.py: error: NaN in the weights: {name} is not saved")
    if rank == 0:
        try:
            with open(f"{run_dir}/partial", "wb") as file:
                torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(f"{run_dir}/partial", f"{run_dir}/{name}")
        except (OSError, RuntimeError) as error:  # torch.save hides the disk's own one
            reason = error.__context__ or error
            raise SystemExit(f"main.py: error: {name}: {reason}") from None
        print(f"Saved {run_dir}/{name}")
    dist.barrier()


saved_at = met_at = time.monotonic()
since_meeting, meeting = 0, 1  # steps since the ranks met, and when they meet again
for epoch in range(first, epochs):
    sampler.set_epoch(epoch)
    mine = int(done[1]) // world_size  # how many of this rank's samples are done
    batches[:] = BatchSampler(list(sampler)[mine:], 64, drop_last=True)
    torch.manual_seed(hash((epoch, mine, rank)))  # of dropout and random crops
    metrics = done.to(device) * (rank == 0)  # or they would count on every rank
    done.zero_()
    for inputs, targets in loader:
        inputs, targets = inputs.to(device), targets.to(device)
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        metrics[0] += loss.detach() * len(targets)
        metrics[1] += len(targets)
        mine += len(targets)
        torch.manual_seed(hash((epoch, mine, rank)))  # the same after a resume
        since_meeting += 1
        if since_meeting == meeting:  # the ranks agree whether to save, and to stop
            due = time.monotonic() - saved_at > 600
            speed = since_meeting / (time.monotonic() - met_at)
            sums = torch.cat([metrics, metrics.new_tensor([due, len(warned), speed])])
            dist.all_reduce(sums)
            *_, due, stop, speed = sums.tolist()
            if due or stop:
                momentum = optimizer.state_dict()["state"]  # the rate is the script's
                state = {"model": model.module.state_dict(), "optimizer": momentum}
                save("checkpoint.pt", state | {"epoch": epoch, "done": sums[:-3]})
                saved_at = time.monotonic()
            if stop:
                raise SystemExit(1)  # not finished: job.sh starts the job again
            since_meeting, met_at = 0, time.monotonic()
            meeting = max(1, min(20, int(2 * speed / world_size)))  # two seconds
    dist.all_reduce(metrics)
    total, count = metrics
    if rank == 0:
        print(
            f"Epoch {epoch}: loss {total / count:.4f} over {count:.0f} samples, "
            f"{world_size} x {device.type}"
        )
save("model.pt", model.module.state_dict())
dist.barrier()  # srun would end rank 0 a minute after the others
time.sleep(0.1)  # gloo, on CPUs, still frees tensors: Python must not end yet
dist.destroy_process_group()
