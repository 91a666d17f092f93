"""Scripts of many shapes, each as its owner would change it to come back.

Each calls tick() in its innermost loop, which may send this process a signal of Slurm's
there, and prints its weights at its end. Ranks other than 0 print nothing.
"""

HEAD = """\
import hashlib, itertools, os, random, signal, time
import resume
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(0)
ticks = 0


def tick():
    global ticks
    ticks += 1
    turn, number = os.environ.get("WARN", "0 0").split()
    if ticks == int(turn) and rank == world_size - 1:
        os.kill(os.getpid(), int(number))


def show(*values):
    values = [f"{float(value):.9g}" for value in values]
    if rank == 0:
        print("Shows", *values, flush=True)


def end(*models):
    sha = hashlib.sha256()
    for model in models:
        for tensor in model.state_dict().values():
            sha.update(tensor.numpy().tobytes())
    if rank == 0:
        print("Weights", sha.hexdigest(), flush=True)
    if dist.is_initialized():
        dist.barrier()
        time.sleep(0.1)
        dist.destroy_process_group()


def several(model):
    return nn.parallel.DistributedDataParallel(model)


def net(*sizes):
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in
              itertools.pairwise(sizes)]
    return nn.Sequential(*layers, nn.Dropout(0.1))


def step(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


points = torch.rand(1200, 2)
dataset = TensorDataset(points, points.square().sum(1, keepdim=True))
"""
JOIN = 'dist.init_process_group("gloo")\n'
SHARE = """\
sampler = DistributedSampler(dataset, world_size, rank, drop_last=True)
loader = DataLoader(dataset, 10, sampler=sampler, drop_last=True)
"""

# By name: the number of ranks, and the script.
SHAPES = {
    "one GPU, without torch.distributed": (
        1,
        """
loader = DataLoader(dataset, 20, shuffle=True)
model = net(2, 8, 1)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, 3 * len(loader))
run = resume.Run(model=model, optimizer=optimizer, scheduler=scheduler)
for epoch in run.loop(range(3)):
    metrics = run.sums(1)
    for inputs, targets in run.loop(loader):
        loss = F.mse_loss(model(inputs), targets)
        step(optimizer, loss)
        scheduler.step()
        metrics += loss.detach()
        tick()
    show(metrics, scheduler.get_last_lr()[0])
end(model)
""",
    ),
    "two models and optimizers": (
        2,
        JOIN
        + SHARE
        + """
norm = nn.SyncBatchNorm.convert_sync_batchnorm if torch.cuda.is_available() else id
made = several(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
told = several(net(2, 8, 1))
made_optimizer = torch.optim.Adam(made.parameters(), 0.01, betas=(0.5, 0.9))
told_optimizer = torch.optim.Adam(told.parameters(), 0.01)
run = resume.Run(made=made, told=told, made_optimizer=made_optimizer)
run.add(told_optimizer=told_optimizer, fixed=torch.randn(4, 4))
for epoch in run.loop(range(3)):
    for real, _ in run.loop(loader):
        fake = made(torch.randn(len(real), 4))
        step(told_optimizer, told(fake.detach()).mean() - told(real).mean())
        loss = -told(fake).mean()
        step(made_optimizer, loss)
        tick()
    with torch.no_grad():
        show(loss, made.module(run.fixed).sum())
for buffer in made.module.buffers():
    dist.broadcast(buffer, 0)
end(made.module, told.module)
""",
    ),
    "a hidden state": (
        2,
        JOIN
        + """
cell = several(nn.RNN(1, 8, batch_first=True))
optimizer = torch.optim.SGD(cell.parameters(), 0.05)
run = resume.Run(cell=cell, optimizer=optimizer, hidden=None, total=0.0)
sound = torch.sin(torch.arange(6000.0) / (5 + rank)).reshape(1, -1, 1)
for epoch in run.loop(range(2)):
    run.hidden = torch.zeros(1, 1, 8)
    for begin in run.loop(range(0, 5980, 60)):
        part = sound[:, begin : begin + 61]
        out, hidden = cell(part[:, :-1], run.hidden)
        loss = F.mse_loss(out[..., :1], part[:, 1:])
        step(optimizer, loss)
        run.hidden = hidden.detach()
        run.total += loss.item()
        tick()
    show(run.total, run.hidden.sum())
end(cell.module)
""",
    ),
    "rollouts": (
        2,
        JOIN
        + """
actor = several(net(2, 16, 2))
optimizer = torch.optim.Adam(actor.parameters(), 0.01)
run = resume.Run(actor=actor, optimizer=optimizer, place=torch.zeros(4, 2), steps=0)
for update in run.loop(range(60)):
    rewards, logs = [], []
    for _ in range(8):  # the game
        shape = torch.distributions.Categorical(logits=actor(run.place))
        action = shape.sample()
        moved = 0.1 * F.one_hot(action, 2) - 0.05 + 0.01 * torch.randn(4, 2)
        run.place = run.place + moved
        rewards.append(-run.place.norm(dim=1) + 0.1 * random.random())
        logs.append(shape.log_prob(action))
        run.steps += 1
    loss = -(torch.stack(rewards) * torch.stack(logs)).mean()
    step(optimizer, loss)
    tick()
    if update % 10 == 9:
        show(loss, run.place.sum(), run.steps)
end(actor.module)
""",
    ),
    "full batches": (
        1,
        """
model = net(2, 8, 1)
optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=2)
run = resume.Run(model=model, optimizer=optimizer, best=1e9)
for epoch in run.loop(range(60)):
    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(dataset.tensors[0]), dataset.tensors[1])
        loss.backward()
        return loss
    loss = optimizer.step(closure).item()
    run.best = min(run.best, loss)
    show(loss, run.best)
    tick()
end(model)
""",
    ),
    "EMA": (
        2,
        JOIN
        + SHARE
        + """
model = several(net(2, 8, 1))
averaging = torch.optim.swa_utils.get_ema_multi_avg_fn(0.99)
ema = torch.optim.swa_utils.AveragedModel(model.module, multi_avg_fn=averaging)
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
run = resume.Run(model=model, optimizer=optimizer, ema=ema)
for epoch in run.loop(range(3)):
    for inputs, targets in run.loop(loader):
        loss = F.mse_loss(model(inputs), targets)
        step(optimizer, loss)
        ema.update_parameters(model.module)
        tick()
    ema.eval()
    show(loss, F.mse_loss(ema(dataset.tensors[0]), dataset.tensors[1]))
    ema.train()
end(model.module, ema)
""",
    ),
    "accumulation": (
        2,
        JOIN
        + SHARE
        + """
model = several(net(2, 8, 1))
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
run = resume.Run(model=model, optimizer=optimizer)
for epoch in run.loop(range(3)):
    for inputs, targets in run.loop(loader, group=4):
        loss = F.mse_loss(model(inputs), targets) / 4
        loss.backward()
        if run.step % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
        tick()
    show(loss)
end(model.module)
""",
    ),
    "an endless loader": (
        2,
        JOIN
        + SHARE
        + """
def endless():
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


model = several(net(2, 8, 1))
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
run = resume.Run(model=model, optimizer=optimizer)
for number, (inputs, targets) in run.loop(enumerate(endless(), 1)):
    loss = F.mse_loss(model(inputs), targets)
    step(optimizer, loss)
    tick()
    if number % 50 == 0:
        show(loss)
    if number == 150:
        break
end(model.module)
""",
    ),
    "workers with crops": (
        2,
        JOIN
        + """
import numpy as np


class Crops(TensorDataset):
    def __getitem__(self, index):
        inputs, targets = super().__getitem__(index)
        drawn = torch.rand(1) + random.random() + np.random.rand()
        return (inputs + 0.1 * drawn).float(), targets


dataset = Crops(*dataset.tensors)
"""
        + SHARE.replace("drop_last=True)\n", "drop_last=True, **workers)\n")
        .replace("rank, drop_last=True, **workers", "rank, drop_last=True")
        .replace(
            "sampler =",
            "workers = dict(num_workers=2, persistent_workers=True)\nsampler =",
        )
        + """
model = several(net(2, 8, 1))
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
run = resume.Run(settings={"samples": len(dataset)}, model=model, optimizer=optimizer)
for epoch in run.loop(range(3)):
    metrics = run.sums(1)
    for inputs, targets in run.loop(loader):
        loss = F.mse_loss(model(inputs), targets)
        step(optimizer, loss)
        metrics += loss.detach()
        tick()
    dist.all_reduce(metrics)
    show(metrics)
end(model.module)
""",
    ),
    "a library's loop": (
        2,
        JOIN
        + SHARE
        + """
class Trainer:  # a library's
    def __init__(self, model, loader, epochs):
        self.model, self.loader, self.epochs = model, loader, epochs
        self.optimizer = torch.optim.AdamW(model.parameters(), 0.01)

    def run_step(self, batch):
        loss = F.mse_loss(self.model(batch[0]), batch[1])
        step(self.optimizer, loss)
        tick()
        return loss

    def fit(self):
        for epoch in self.epochs:
            for batch in self.loader:
                loss = self.run_step(batch)
            show(loss)


class Batches:  # a new loop in each epoch
    def __iter__(self):
        return run.loop(loader)


trainer = Trainer(several(net(2, 8, 1)), Batches(), range(3))
run = resume.Run(model=trainer.model, optimizer=trainer.optimizer)
trainer.epochs = run.loop(range(3))
trainer.fit()
end(trainer.model.module)
""",
    ),
    "its own DDP, by RANK": (
        2,
        """
ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    dist.init_process_group("gloo")
torch.manual_seed(1337 + rank)
text = torch.randint(64, (5000,), generator=torch.Generator().manual_seed(0))


def get_batch():
    begin = torch.randint(len(text) - 9, (8,))
    part = torch.stack([text[i : i + 9] for i in begin])
    return part[:, :-1], part[:, 1:]


torch.manual_seed(1)
model = several(nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 64)))
torch.manual_seed(1337 + rank)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
batch = get_batch()
run = resume.Run(model=model, optimizer=optimizer, batch=batch)
for iteration in run.loop(range(120)):
    for micro_step in range(2):
        model.require_backward_grad_sync = micro_step == 1
        inputs, targets = run.batch
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        run.batch = get_batch()
        (loss / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
    tick()
    if iteration % 20 == 0:
        show(loss)
end(model.module)
""",
    ),
}
