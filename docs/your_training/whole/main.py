"""A typical training script, with a DataLoader."""

import argparse
import atexit
import contextlib
import math
import multiprocessing.util
import os
import signal
import subprocess
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser(allow_abbrev=False)
add = parser.add_argument
add("--epochs", type=int, default=5)
add("--batch-size", type=int, default=64, help="samples in a batch of a GPU")
add("--accumulate", type=int, default=2, help="batches in a step")
add("--learning-rate", type=float, default=0.005)
add("--resume", metavar="CHECKPOINT", help="go on from another job's")
args = parser.parse_args()

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

# Your data and model: train_set[index] and valid_set[index] return an input and its
# class, len() is their size, and build_model() returns a model that returns logits.


class Images(TensorDataset):
    """Returns another crop of an image in each epoch."""

    def __getitem__(self, index):
        image, target = super().__getitem__(index)
        row, column = torch.randint(5, (2,)).tolist()
        return image[:, row : row + 8, column : column + 8], target


def build_model():
    features = nn.Sequential(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU())
    return nn.Sequential(features, nn.Flatten(), nn.Dropout(0.1), nn.Linear(576, 2))


classes = torch.randint(2, (5096,))
images = torch.rand(5096, 1, 12, 12)
images[:, :, 4:8, 4:8] += 0.5 * classes[:, None, None, None]  # a bright square
train_set = Images(images[:4096], classes[:4096])
valid_set = TensorDataset(images[4096:, :, 2:10, 2:10], classes[4096:])
# The end of your data and model.


class Seeded:
    """What a sample draws at random follows from its epoch and its index."""

    def __getitem__(self, key):
        epoch, index = key
        torch.default_generator.manual_seed(hash((epoch, index)))  # the CPU's: fast
        return train_set[index]


@atexit.register
def end_workers():
    """Kill the workers: Python ends them by TERM, which they ignore, and waits."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # or DataLoader calls it an error
    for worker in multiprocessing.active_children():
        worker.kill()


sampler = DistributedSampler(train_set, world_size, rank, drop_last=True)
if len(sampler) < args.batch_size:
    raise SystemExit(f"main.py: error: {len(train_set)} samples: lower --batch-size")
batches = []  # what is left of the epoch
workers = {
    "num_workers": int(os.environ.get("SLURM_CPUS_PER_TASK", 1)),
    "multiprocessing_context": "fork",
    "persistent_workers": True,
    "worker_init_fn": lambda worker: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    "generator": torch.Generator(),
}
loader = DataLoader(Seeded(), batch_sampler=batches, **workers)
share = range(rank, len(valid_set), world_size)
valid_loader = DataLoader(valid_set, args.batch_size, sampler=share, **workers)
if len(tempfile.gettempdir()) > 74:
    tempfile.tempdir = "/tmp"  # or the paths of the workers' sockets would be too long
multiprocessing.util.get_temp_dir()  # the workers' sockets: removed at the end
iter(loader), iter(valid_loader)  # starts the workers, before NCCL is up

gpu = None
if device.type == "cuda":
    gpu = device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
backend = "nccl" if gpu else "gloo"
dist.init_process_group(backend, rank=rank, world_size=world_size, device_id=gpu)

model = build_model().to(device)
model = nn.parallel.DistributedDataParallel(model)
# In its first backward(), DDP sorts the gradients. Their order decides how the sums of
# more than two ranks are rounded, so each start begins with one that changes nothing.
inputs, _ = loader.collate_fn([train_set[0]])
model.eval()(inputs.to(device)).sum().backward()
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
rates = [group["lr"] for group in optimizer.param_groups]  # without the schedule
half = torch.bfloat16
if gpu and not torch.cuda.is_bf16_supported(including_emulation=False):
    half = torch.float16  # V100, T4 and RTX 8000
ranks = [None] * world_size  # what must be the same on all of them
dist.all_gather_object(ranks, (half, len(train_set), len(valid_set)))
if len(set(ranks)) > 1:
    raise SystemExit(f"main.py: error: ranks differ in precision or data: {set(ranks)}")
scaler = torch.amp.GradScaler(device.type, enabled=half == torch.float16)
best = 0.0  # accuracy

run_dir = os.environ.get("RUN_DIR", ".")  # job.sh makes one for each job
first, done = 0, torch.zeros(2, dtype=torch.float64)  # its loss and samples so far
path = [f"{run_dir}/checkpoint.pt"]
if not os.path.exists(path[0]):
    path = [args.resume]
dist.broadcast_object_list(path)  # rank 0 decides for all
if path[0]:
    saved = torch.load(path[0], map_location="cpu", mmap=True, weights_only=True)
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(optimizer.state_dict() | {"state": saved["optimizer"]})
    first, done = saved["epoch"], saved["done"]
    if path[0] != args.resume:  # the best.pt of another job is in its own folder
        best = saved["best"]
    if saved["scaler"] and scaler.is_enabled():
        scaler.load_state_dict(saved["scaler"])
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


if rank == 0:
    print(vars(args))
saved_at = met_at = time.monotonic()
since_meeting, meeting = 0, 1  # steps since the ranks met, and when they meet again
for epoch in range(first, args.epochs):
    sampler.set_epoch(epoch)
    mine = int(done[1]) // world_size  # how many of this rank's samples are done
    left = [(epoch, index) for index in list(sampler)[mine:]]
    left = left[: len(left) // args.batch_size * args.batch_size]
    batches[:] = BatchSampler(left, args.batch_size * args.accumulate, drop_last=False)
    begin, before = time.perf_counter(), mine
    torch.manual_seed(hash((epoch, mine, rank)))  # of dropout and random crops
    model.train()  # not as from_pretrained() and the validation leave it
    metrics = done.to(device) * (rank == 0)  # or they would count on every rank
    done.zero_()
    for inputs, targets in loader:
        inputs, targets = inputs.to(device), targets.to(device)
        progress = (epoch + mine / len(sampler)) / args.epochs
        warm_up, cosine = 0.01 + 20 * progress, (1 + math.cos(math.pi * progress)) / 2
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * min(warm_up, cosine)
        mine += len(targets)
        optimizer.zero_grad()
        parts = len(targets) // args.batch_size  # fewer in the epoch's last step
        for part in range(parts):
            last = part == parts - 1  # only then, DDP averages the gradients
            with contextlib.nullcontext() if last else model.no_sync():
                with torch.autocast(device.type, half, enabled=bool(gpu)):
                    logits = model(inputs[part::parts]).float()
                loss = F.cross_entropy(logits, targets[part::parts])
                scaler.scale(loss / parts).backward()
            metrics[0] += loss.detach() * args.batch_size
            metrics[1] += args.batch_size
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
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
                state |= {"best": best, "scaler": scaler.state_dict()}
                save("checkpoint.pt", state | {"epoch": epoch, "done": sums[:-3]})
                saved_at = time.monotonic()
            if stop:
                raise SystemExit(1)  # not finished: job.sh starts the job again
            since_meeting, met_at = 0, time.monotonic()
            meeting = max(1, min(20, int(2 * speed / world_size)))  # two seconds
    dist.all_reduce(metrics)
    total, count = metrics
    rate = (mine - before) * world_size / (time.perf_counter() - begin)

    model.eval()
    for buffer in model.module.buffers():
        dist.broadcast(buffer, 0)  # BatchNorm's, which differ from rank to rank
    correct = torch.zeros(2, dtype=torch.float64, device=device)
    for inputs, targets in valid_loader:
        inputs, targets = inputs.to(device), targets.to(device)
        with torch.no_grad(), torch.autocast(device.type, half, enabled=bool(gpu)):
            answers = model.module(inputs).argmax(1)
        correct[0] += (answers == targets).sum()
        correct[1] += len(targets)
    dist.all_reduce(correct)
    accuracy = (correct[0] / correct[1]).item()
    if rank == 0:
        print(
            f"Epoch {epoch}: loss {total / count:.4f} over {count:.0f} samples, "
            f"{world_size} x {device.type}, {rate:.0f} samples/s, "
            f"valid accuracy {accuracy:.2%} of {correct[1]:.0f}"
        )
    if accuracy > best:
        best = accuracy
        save("best.pt", model.module.state_dict())
save("model.pt", model.module.state_dict())
dist.barrier()  # srun would end rank 0 a minute after the others
time.sleep(0.1)  # gloo, on CPUs, still frees tensors: Python must not end yet
dist.destroy_process_group()
