"""Trainer: saves when Slurm warns, and goes on in the middle of the epoch."""

import os
import shutil
import time
from pathlib import Path

import resume
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from transformers import Trainer, TrainerCallback, TrainingArguments

os.environ["RANK"] = os.environ["SLURM_PROCID"]
os.environ["LOCAL_RANK"] = os.environ["SLURM_LOCALID"]
os.environ["WORLD_SIZE"] = os.environ["SLURM_STEP_NUM_TASKS"]
run_dir = os.environ.get("RUN_DIR", ".")  # job.sh makes one for each job
# Another number of ranks has another folder: it starts from the beginning.
folder = Path(run_dir, f"{os.environ['WORLD_SIZE']}-ranks")


class SeedEpoch(TrainerCallback):
    def on_epoch_begin(self, args, state, control, **kwargs):
        torch.manual_seed(hash((args.seed, int(state.epoch))))  # of group_by_length


class SaveAndStop(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        self.stop = 0
        if state.global_step % 10 == 0 and state.epoch % 1 > 0:  # no epoch's last step
            self.agree(control)

    def on_epoch_end(self, args, state, control, **kwargs):  # saves after evaluation
        self.agree(control)

    def agree(self, control):
        self.stop += resume.reduce([len(resume.warned)])[0]  # of all ranks
        control.should_save |= self.stop > 0

    def on_save(self, args, state, control, **kwargs):
        dist.barrier()  # until all have saved
        if self.stop > 0:
            resume.leave(75)  # not finished: job.sh starts the job again


class Model(nn.Sequential):
    def forward(self, inputs, labels):
        logits = super().forward(inputs)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


torch.manual_seed(0)
points = torch.rand(16384, 2)  # your data
targets = (points.square().sum(1) < 0.64).long()
dataset = [{"inputs": x, "labels": y} for x, y in zip(points, targets, strict=True)]
args = TrainingArguments(
    folder,
    use_cpu=not torch.cuda.is_available(),
    num_train_epochs=5,
    per_device_train_batch_size=64,
    learning_rate=0.01,
    eval_strategy="epoch",
    per_device_eval_batch_size=4096,
    save_total_limit=2,
    restore_callback_states_from_checkpoint=True,  # such as EarlyStoppingCallback's
    ddp_find_unused_parameters=False,
    disable_tqdm=True,
)
model = Model(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
callbacks = [SeedEpoch(), SaveAndStop()]
trainer = Trainer(
    model, args, train_dataset=dataset, eval_dataset=dataset, callbacks=callbacks
)
# A job that was killed while it saved leaves a checkpoint without this file.
whole = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
last = max(whole, key=lambda path: int(path.name.split("-")[1]), default=None)
try:
    trainer.train(resume_from_checkpoint=last and str(last))
except Exception:  # such as a full disk: job.sh would take what is not whole for new
    for path in folder.glob("checkpoint-*"):
        if not (path / "trainer_state.json").exists():
            shutil.rmtree(path, ignore_errors=True)  # each rank comes here
    raise
trainer.save_model(folder / "model")
dist.barrier()  # srun would end rank 0 a minute after the others
time.sleep(0.1)  # gloo, on CPUs, still frees tensors: Python must not end yet
