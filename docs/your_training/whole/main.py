"""A training with what most scripts have: arguments, workers, a validation, metrics."""

import argparse
import contextlib
import os
import subprocess
import time

import resume
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.manual_seed(0)

# Your data and model: train_set[index] and valid_set[index] return an input and its
# class, len() is their size, and build_model() returns a model that returns logits.
# data_settings is what must stay the same when the job comes back.


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
data_settings = {"images": len(images)}
# The end of your data and model.


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add = parser.add_argument
    add("--epochs", type=int, default=5)
    add("--batch-size", type=int, default=64, help="samples in a batch of a GPU")
    add("--accumulate", type=int, default=2, help="batches in a step")
    add("--learning-rate", type=float, default=0.005)
    args = parser.parse_args()
    if min(args.epochs, args.batch_size, args.accumulate, args.learning_rate) <= 0:
        parser.error("all of these must be above 0")
    device = join()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    cpus = int(os.environ.get("SLURM_CPUS_PER_TASK", 1))
    options = {"batch_size": args.batch_size, "num_workers": cpus}
    sampler = DistributedSampler(train_set, world_size, rank, drop_last=True)
    loader = DataLoader(train_set, sampler=sampler, drop_last=True, **options)
    if len(loader) == 0:
        resume.fail(f"{len(train_set)} samples: lower --batch-size")
    share = range(rank, len(valid_set), world_size)
    valid_loader = DataLoader(valid_set, sampler=share, **options)

    model = nn.parallel.DistributedDataParallel(build_model().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    half = torch.bfloat16
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(False):
        half = torch.float16  # V100, T4 and RTX 8000, with a scaler
    precision = torch.autocast(device.type, half, enabled=device.type == "cuda")
    scaler = torch.amp.GradScaler(device.type, enabled=half == torch.float16)

    run = resume.Run(settings=vars(args) | data_settings, best=0.0)
    run.add(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler)
    for epoch in run.loop(range(args.epochs)):
        begin, before = time.perf_counter(), run.step
        loss, count = train(args, run, loader, device, precision)
        trained = (run.step - before) * args.batch_size * world_size  # in this start
        rate = trained / (time.perf_counter() - begin)
        run.save()  # a damaged image to validate must not cost the epoch
        accuracy = evaluate(run, valid_loader, device, precision)
        scheduler.step()
        if accuracy > run.best:
            run.best = accuracy
            run.write("best.pt", model)
        run.log(epoch=epoch, loss=loss, accuracy=accuracy)
        resume.say(
            f"Epoch {epoch}: loss {loss:.4f} over {count:.0f} samples, "
            f"{world_size} x {device.type}, {rate:.0f} samples/s, "
            f"valid accuracy {accuracy:.2%} of {len(valid_set)}"
        )
    run.write("model.pt", model)
    dist.barrier()  # srun would end rank 0 a minute after the others
    time.sleep(0.1)  # gloo, on CPUs, still frees tensors: Python must not end yet
    dist.destroy_process_group()


def train(args, run, loader, device, precision):
    """Train for an epoch. Return the mean loss and the number of samples."""
    metrics = run.sums(2, device)
    run.model.train()  # not as from_pretrained() and the validation leave it
    for inputs, targets in run.loop(loader, group=args.accumulate):
        inputs, targets = inputs.to(device), targets.to(device)
        part = run.step % args.accumulate  # of the batches of this step
        parts = min(args.accumulate, len(loader) - run.step + part)
        last = part == parts - 1  # only then, DDP averages the gradients
        with contextlib.nullcontext() if last else run.model.no_sync():
            with precision:
                logits = run.model(inputs).float()
            loss = F.cross_entropy(logits, targets)
            run.scaler.scale(loss / parts).backward()
        metrics[0] += loss.detach() * len(targets)
        metrics[1] += len(targets)
        if last:
            run.scaler.unscale_(run.optimizer)
            nn.utils.clip_grad_norm_(run.model.parameters(), max_norm=1.0)
            run.scaler.step(run.optimizer)
            run.scaler.update()
            run.optimizer.zero_grad()
    dist.all_reduce(metrics)
    return (metrics[0] / metrics[1]).item(), metrics[1].item()


def evaluate(run, loader, device, precision):
    """Return the accuracy on the validation set."""
    model = run.model.module.eval()  # DDP would wait for ranks with a batch less
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)  # BatchNorm's, which differ from rank to rank
    correct = torch.zeros((), dtype=torch.float64, device=device)
    for inputs, targets in run.pausable(loader):
        with torch.no_grad(), precision:
            answers = model(inputs.to(device)).argmax(1)
        correct += (answers == targets.to(device)).sum()
    dist.all_reduce(correct)
    return correct.item() / len(valid_set)


def join():
    """Join the other processes. Return this one's device."""
    env, gpu = os.environ, None
    rank, local_rank = int(env.get("SLURM_PROCID", 0)), int(env.get("SLURM_LOCALID", 0))
    world_size = int(env.get("SLURM_STEP_NUM_TASKS", 1))
    if int(env.get("SLURM_NTASKS", world_size)) != world_size:
        resume.fail("this is no task of the job: start it with srun")
    if world_size == 1:
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    elif "MASTER_ADDR" not in env:  # job.sh sets both, salloc neither
        command = ["scontrol", "show", "hostnames", env["SLURM_STEP_NODELIST"]]
        env["MASTER_ADDR"] = subprocess.check_output(command, text=True).split()[0]
        env["MASTER_PORT"] = str(10000 + int(env["SLURM_JOB_ID"]) % 20000)
    if torch.cuda.is_available():
        gpu = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(gpu)
    backend = "nccl" if gpu else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=world_size, device_id=gpu)
    return gpu or torch.device("cpu")


main()
