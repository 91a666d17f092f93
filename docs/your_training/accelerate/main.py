"""Accelerate: saves when Slurm warns, and goes on in the middle of the epoch."""

import glob
import os
import shutil
import time

import resume
import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

os.environ["RANK"] = os.environ["SLURM_PROCID"]
os.environ["LOCAL_RANK"] = os.environ["SLURM_LOCALID"]
os.environ["WORLD_SIZE"] = os.environ["SLURM_STEP_NUM_TASKS"]
# Its order of the samples follows from the seed and the epoch.
loading = DataLoaderConfiguration(use_seedable_sampler=True)
cpu = not torch.cuda.is_available()  # without it, ranks on CPUs would train alone
# Or a scheduler would step as often as there are ranks.
accelerator = Accelerator(
    cpu=cpu, dataloader_config=loading, step_scheduler_with_optimizer=False
)
torch.manual_seed(0)
points = torch.rand(16384, 2)  # your data
dataset = TensorDataset(points, (points.square().sum(1) < 0.64).long())
own = torch.Generator()  # or each new loop would draw one of dropout's random numbers
loader = DataLoader(dataset, 64, shuffle=True, drop_last=True, generator=own)
model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
run_dir = os.environ.get("RUN_DIR", ".")  # job.sh makes one for each job
batch_size = loader.total_batch_size  # of all ranks
if len(loader) == 0:  # Accelerate would train on nothing, and say nothing
    resume.fail(f"{len(dataset)} samples are too few")


def save(epoch, samples):
    accelerator.save_state(f"{run_dir}/partial")
    accelerator.wait_for_everyone()  # until all have saved
    if accelerator.is_main_process:
        old = glob.glob(f"{run_dir}/checkpoint-*")
        new = f"{run_dir}/checkpoint-{epoch:04}-{samples:012}"
        os.rename(f"{run_dir}/partial", new)
        for folder in old:
            shutil.rmtree(folder)
    accelerator.wait_for_everyone()


def any_warned():
    return resume.reduce([len(resume.warned)])[0] > 0


found = max(glob.glob(f"{run_dir}/checkpoint-*"), default=f"{run_dir}/-0-0")
first, done = map(int, found.split("-")[-2:])
if not found.endswith("/-0-0"):
    accelerator.load_state(found, map_location="cpu")  # or AdamW would wait for the GPU
for epoch in range(first, 5):
    loader.set_epoch(epoch)
    for inputs, targets in skip_first_batches(loader, done // batch_size):
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        done += batch_size
        if done // batch_size % 10 == 0:  # ten steps and a save: less than 180 s
            if any_warned():
                save(epoch, done)
                resume.leave(75)  # not finished: job.sh starts the job again
    done = 0
    model.eval()
    inputs, targets = (tensor.to(accelerator.device) for tensor in dataset.tensors)
    with torch.no_grad():
        loss = F.cross_entropy(model(inputs), targets)
    model.train()
    if accelerator.is_main_process:
        print(f"Epoch {epoch}: loss {loss:.4f}", flush=True)
    save(epoch + 1, 0)
    if any_warned():  # an epoch may have fewer than ten steps
        resume.leave(75)
time.sleep(0.1)  # gloo, on CPUs, still frees tensors: Python must not end yet
