"""Lightning: saves when Slurm warns, and goes on in the middle of the epoch."""

import os
import signal

import lightning as L
import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

rank, world_size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
checkpoint = f"{os.environ['RUN_DIR']}/checkpoint.ckpt"


class SaveAndStop(L.Callback):
    def on_train_start(self, trainer, module):  # after Lightning has set its own handlers
        self.warned = []  # by Slurm: USR1 before the time limit, TERM before a preemption
        for name in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(name, lambda number, frame: self.warned.append(number))

    def on_train_batch_start(self, trainer, module, batch, step):
        if step % 10 == 0:  # ten steps must take less than the warning
            stop = trainer.strategy.reduce_boolean_decision(bool(self.warned), all=False)
            if stop or step == 0:
                trainer.save_checkpoint(checkpoint)
            if stop:
                raise SystemExit(1)  # not finished: job.sh starts the job again
            torch.manual_seed(hash((trainer.global_step, rank)))  # as after a resume


class Sampler(DistributedSampler):
    done = {}  # an epoch's samples that Lightning would repeat after a resume

    def __iter__(self):
        yield from list(super().__iter__())[self.done.get(self.epoch, 0) :]


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

    def on_load_checkpoint(self, saved):
        progress = saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]
        sampler.done = {saved["epoch"]: 64 * progress["processed"]}
        sampler.set_epoch(saved["epoch"])


L.seed_everything(0)
points = torch.rand(16384, 2)  # your data
dataset = TensorDataset(points, (points.square().sum(1) < 0.64).long())
sampler = Sampler(dataset, world_size, rank, drop_last=True)
loader = DataLoader(dataset, 64, sampler=sampler, drop_last=True)
trainer = L.Trainer(
    max_epochs=5,
    num_nodes=int(os.environ["SLURM_NNODES"]),
    devices=int(os.environ["SLURM_NTASKS_PER_NODE"]),
    plugins=[SLURMEnvironment(auto_requeue=False)],
    callbacks=[SaveAndStop()],
    default_root_dir=os.environ["RUN_DIR"],
    enable_progress_bar=False,
)
module = Module(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
path = checkpoint if os.path.exists(checkpoint) else None
trainer.fit(module, loader, DataLoader(dataset, 4096), ckpt_path=path)
