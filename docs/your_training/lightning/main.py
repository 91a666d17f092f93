"""Lightning: saves when Slurm warns, and goes on in the middle of the epoch."""

import glob
import os
import signal
import time

import lightning as L
import resume
import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

rank, world_size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
run_dir = os.environ.get("RUN_DIR", ".")  # job.sh makes one for each job
# Another number of ranks has other files: it starts from the beginning. job.sh takes a
# name that no earlier start had for progress.
checkpoint = f"{run_dir}/{world_size}-ranks-step-%09d.ckpt"


class SaveAndStop(L.Callback):
    def on_train_start(self, trainer, module):  # Lightning has set its own handlers
        self.first_step = trainer.global_step
        for name in (signal.SIGUSR1, signal.SIGTERM):  # time limit, preemption
            signal.signal(name, lambda number, frame: resume.warned.append(number))

    def on_train_batch_start(self, trainer, module, batch, step):
        if step % 10 == 0:  # ten steps and a save must take less than 180 s
            stop = resume.reduce([len(resume.warned)])[0]  # if one rank was warned
            # Also at the start of each later epoch.
            if stop or (step == 0 and trainer.global_step > self.first_step):
                trainer.save_checkpoint(f"{run_dir}/partial")
                if rank == 0:  # the old one stays until the new one is whole
                    new = checkpoint % trainer.global_step
                    os.replace(f"{run_dir}/partial", new)
                    for old in set(find_checkpoints()) - {new}:
                        os.remove(old)
                trainer.strategy.barrier()
            if stop:
                resume.leave(75)  # not finished: job.sh starts the job again
            torch.manual_seed(hash((trainer.global_step, rank)))  # as after a resume

    def on_load_checkpoint(self, trainer, module, saved):
        progress = saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]
        sampler.done = saved["epoch"], loader.batch_size * progress["processed"]
        sampler.set_epoch(saved["epoch"])


def find_checkpoints():
    return sorted(glob.glob(f"{run_dir}/{world_size}-ranks-step-*.ckpt"))


class Sampler(DistributedSampler):
    done = 0, 0  # an epoch, and its samples that Lightning would repeat after a resume

    def __iter__(self):
        epoch, samples = self.done
        yield from list(super().__iter__())[samples if epoch == self.epoch else 0 :]


class Module(L.LightningModule):
    def __init__(self, *layers):
        super().__init__()
        self.model = nn.Sequential(*layers)

    def training_step(self, batch):
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def validation_step(self, batch):
        self.log("loss", self.training_step(batch), sync_dist=True)

    def on_train_epoch_end(self):
        loss = self.trainer.callback_metrics["loss"]
        self.print(f"Epoch {self.current_epoch}: loss {loss:.4f}", flush=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


L.seed_everything(0)
points = torch.rand(16384, 2)  # your data
dataset = TensorDataset(points, (points.square().sum(1) < 0.64).long())
sampler = Sampler(dataset, world_size, rank, drop_last=True)
loader = DataLoader(dataset, 64, sampler=sampler, drop_last=True)
trainer = L.Trainer(
    max_epochs=5,
    num_nodes=int(os.environ["SLURM_NNODES"]),
    devices=int(os.environ.get("SLURM_NTASKS_PER_NODE", "1")),
    plugins=[SLURMEnvironment(auto_requeue=False)],
    callbacks=[SaveAndStop()],
    default_root_dir=run_dir,
    enable_progress_bar=False,
)
module = Module(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
path = [None, *find_checkpoints()][-1]
trainer.fit(module, loader, DataLoader(dataset, 4096), ckpt_path=path)
time.sleep(0.1)  # gloo, on CPUs, still frees tensors: Python must not end yet
