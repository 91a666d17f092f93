"""What imagenet/resume.py does for anyone's script: it ends as if it was never stopped.

Each shape of a script runs undisturbed, and again, stopped after every five turns.
test_shapes, of test_your_training.py, has more of them.
"""

import contextlib
import functools
import hashlib
import io
import itertools
import multiprocessing
import operator
import os
import random
import re
import signal
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from test_checkpoint import refused, resume, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)

pytestmark = pytest.mark.timeout(400)
STOPPED = 75  # the status


def build():
    """Return a model that draws, and its optimizer."""
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1)
    model = DistributedDataParallel(nn.Sequential(*layers))
    model.broadcast_buffers = False
    return model, torch.optim.Adam(model.parameters(), 0.01)


def take_step(model, optimizer, inputs) -> torch.Tensor:
    loss = model(inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


class Crops(Dataset):
    """Samples that draw in all usual ways, also from generators of their own."""

    def __init__(self, size: int = 128):
        self.size = size
        self.transforms = [{"numpy": np.random.default_rng(), "other": Crops.Own()}]

    class Own:
        def __init__(self):
            self.legacy, self.python = np.random.RandomState(), random.Random()
            self.torch = torch.Generator()
            self.torch.seed()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        assert index in range(self.size)
        (own,) = self.transforms
        other = own["other"]
        drawn = own["numpy"].random() + other.legacy.rand() * other.python.random()
        noise = torch.randn(4, generator=other.torch) * drawn
        return noise + index / 99 + torch.randn(4) * random.random() + np.random.rand()


class Batches(Crops):
    """Reads a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        noise = torch.randn(4) + self.transforms[0]["numpy"].random()
        return [index / 99 + noise * random.random() for index in indices]


class Noise:
    def __init__(self):
        self.numpy = np.random.default_rng()

    def collate(self, samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples) * self.numpy.random() + torch.randn(4)


class Stream(IterableDataset):
    def __init__(self):
        self.numpy = np.random.default_rng()

    def __iter__(self):
        buffer = [torch.randn(4) + self.numpy.random()]
        for _ in range(24):
            buffer.append(torch.randn(4) * random.random())
            yield buffer[torch.randint(len(buffer), ()).item()]


def load(data=None, **options) -> DataLoader:
    """Return a loader of eight batches for each of two ranks."""
    data = data or Crops()
    sampler = DistributedSampler(data)
    return DataLoader(data, 8, sampler=sampler, drop_last=True, **options)


# Shapes of scripts


def workers():
    """Signals that are for the rank reach its workers, too. They end none."""
    model, optimizer = build()
    loader = load(num_workers=2, persistent_workers=True)
    run = resume.Run(model=model, optimizer=optimizer, best=0.0)
    for epoch in run.loop(range(3)):
        losses = run.sums(2)
        for inputs in run.loop(loader):
            for worker in multiprocessing.active_children():
                os.kill(worker.pid, signal.SIGTERM)
            losses += torch.stack((take_step(model, optimizer, inputs), torch.ones(())))
        dist.all_reduce(losses)
        assert losses[1] == 16, "a turn is lost, or counts twice"
        for inputs in run.pausable(load()):
            assert len(inputs) == 8
        run.best = max(run.best, losses[0].item() + epoch)
    return model, torch.tensor(run.best)


def two_models_in_two_loops():
    (one, optimizer), (other, other_optimizer) = build(), build()
    run = resume.Run(one=one, optimizer=optimizer, other=other, another=other_optimizer)
    loader = load()
    for _ in run.loop(range(2)):
        for inputs in run.loop(loader):
            take_step(other, other_optimizer, inputs)
        for inputs in run.loop(loader):
            take_step(one, optimizer, inputs)
    for _ in run.loop(range(3)):
        take_step(one, optimizer, torch.randn(8, 4))
    return one, other


def streams():
    """A data set without a length, and a generator: what is done is read again."""
    model, optimizer = build()
    run = resume.Run(model=model, optimizer=optimizer)
    stream = DataLoader(Stream(), 4)
    for _ in run.loop(range(2)):
        for inputs in run.loop(stream):
            take_step(model, optimizer, inputs)
        for inputs in run.loop(torch.randn(4, 4) for _ in range(5)):
            take_step(model, optimizer, inputs + torch.randn(4, 4))
    return (model,)


def batches():
    """A data set that reads a batch at once; a batch sampler of the script's own."""
    model, optimizer = build()
    order, queue, seen = [], torch.zeros(8, 4), {"sum": 0.0}  # by names of its own
    run = resume.Run(order=order, queue=queue, seen=seen, model=model)
    run.add(optimizer=optimizer)
    data = Batches()
    weighted = WeightedRandomSampler(torch.rand(128), 64)
    loaders = [
        load(data, num_workers=1, collate_fn=Noise().collate),
        load(random_split(data, [128, 0])[0]),
    ]
    indices = BatchSampler(weighted, 8, drop_last=False)
    loaders.append(DataLoader(range(128), batch_sampler=indices))
    for _ in run.loop(range(2)):
        for loader in run.loop(loaders):
            for inputs in run.loop(loader):
                if loader is loaders[2]:
                    order += inputs.tolist()
                    inputs = inputs[:, None] / 99 + torch.randn(8, 4)
                take_step(model, optimizer, inputs + queue)
                queue.mul_(0.5).add_(inputs)
                seen["sum"] += inputs.sum().item()
    one, other = (resume.tell_all(order, source) for source in (0, 1))
    assert len(one) == 128 and one != other, "both ranks draw the same samples"
    return model, queue, torch.tensor(seen["sum"])


def steps_with_a_validation():
    model, optimizer = build()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    run = resume.Run(model=model, optimizer=optimizer, scheduler=scheduler, best=9e9)
    zeros = torch.zeros(2)
    run.add(now=zeros, before=zeros)
    for step in run.loop(range(23)):
        if step % 5 == 0:
            scheduler.step()
            batches = run.pausable(load())
            run.best = min(run.best, sum(inputs.sum().item() for inputs in batches))
            run.save()
        take_step(model, optimizer, torch.randn(8, 4))
        run.before, run.now = run.now, run.now + 1
    return model, torch.tensor(run.best), run.now, run.before


def validation_first():
    """It leaves a loop that is held, as by tqdm, and saves in the middle of a turn.

    There, it is stopped once, too, and in the validation.
    """
    model, optimizer = build()
    run = resume.Run(model=model, optimizer=optimizer, losses=[])

    def warn_once() -> None:
        place = f"{dist.get_rank()}-{len(run.losses)}-{run.step}"
        if os.environ["STOP_AT"] != "0" and not (run.folder / place).exists():
            (run.folder / place).touch()
            resume.warned.append("now")

    for _ in run.loop(range(4)):
        validated, loss = run.sums(1), run.sums(1)
        for inputs in run.pausable(load()):
            validated += len(inputs)
            warn_once()
        held = run.loop(load())
        for inputs in held:
            loss += take_step(model, optimizer, inputs)
            if run.step % 3 == 1:
                warn_once()
                run.save()
            if run.step == 6:
                break
        dist.all_reduce(loss)
        dist.all_reduce(validated)
        assert validated == 128, "samples are lost, or count twice"
        run.losses.append(loss.item())
    return model, torch.tensor(run.losses)


class Endless(Sampler):
    """Chooses some samples more than once."""

    def __iter__(self):
        while True:
            yield from torch.randint(8, (8,)).tolist()


class Opened(Crops):
    file = None

    def __getitem__(self, index: int) -> torch.Tensor:
        assert self.file == "open"
        return super().__getitem__(index)


def open_file(worker: int) -> None:
    get_worker_info().dataset.file = "open"


def habits():
    """NumPy's numbers, what a last turn has made, sums that are reduced early.

    And a process of its own, which it ends.
    """
    process = multiprocessing.get_context("fork").Process(target=signal.pause)
    process.start()
    process.terminate()
    process.join()
    model, optimizer = build()
    optimizer.param_groups[0]["lr"] *= np.sqrt(dist.get_world_size())
    seen, losses = set(), []
    run = resume.Run(model=model, optimizer=optimizer, seen=seen, losses=losses)
    endless = DataLoader(
        Opened(8), 8, sampler=Endless(), num_workers=1, worker_init_fn=open_file
    )
    for _ in run.loop(range(4)):
        metrics = run.sums(2)
        for inputs in run.loop(endless):
            assert len(inputs.unique(dim=0)) == 8, "two samples have drawn alike"
            loss = take_step(model, optimizer, inputs)
            metrics += torch.stack((loss, torch.ones(())))
            seen.add(len(seen))
            if len(seen) % 3 == 0:  # so that the fifth turn ends the second loop
                break
        dist.all_reduce(metrics)
        metrics[0] /= metrics[1]
        for inputs in run.loop(load()):
            loss = take_step(model, optimizer, inputs)
        losses += [metrics[0].item(), np.float64(loss)]
    ends = torch.tensor(losses, dtype=torch.float64), torch.tensor(sorted(seen))
    return model, *ends


SHAPES = [
    habits,
    workers,
    validation_first,
    two_models_in_two_loops,
    streams,
    batches,
    steps_with_a_validation,
]


def start(shape, folder, stop_at: int):
    """Return a digest of what a script ends with, or its status."""
    os.environ |= {"RUN_DIR": str(folder), "STOP_AT": str(stop_at)}
    resume.warned.clear()
    try:
        results = shape()
    except SystemExit as stopped:
        return stopped.code
    digest = hashlib.sha256()
    for result in results:
        tensors = [result]
        if isinstance(result, nn.Module):
            # The statistics of BatchNorm are each rank's own. Those of rank 0 count.
            buffers = [] if dist.get_rank() else result.buffers()
            tensors = [*result.parameters(), *buffers]
        for tensor in tensors:
            digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("shape", SHAPES)
def test_stopped_and_resumed(shape, tmp_path):
    right = run_ranks(2, start, shape, tmp_path / "right", 0)
    starts = 0
    while (found := run_ranks(2, start, shape, tmp_path / "stopped", 5)) == [
        STOPPED
    ] * 2:
        starts += 1
        assert starts < 20
    assert found == right and starts >= 3


def test_on_more_ranks(tmp_path):
    """An epoch then has fewer turns: the newest checkpoint may have a lower number."""
    for world_size, stop_at, name in ((1, 6, 6), (2, 1, 4), (2, 1, 5)):
        work = start, two_models_in_two_loops, tmp_path, stop_at
        assert set(run_ranks(world_size, *work)) == {STOPPED}
        assert max(tmp_path.glob("*.pt")).name == f"epoch-001-step-{name:06}.pt"


def read_until(stop_at: int, batch: int) -> list[int]:
    os.environ["STOP_AT"] = str(stop_at)
    run, read, data = resume.Run(), [], range(128)
    loader = DataLoader(data, batch, sampler=DistributedSampler(data))
    with contextlib.suppress(SystemExit):
        for _ in run.loop(range(1)):
            for indices in run.loop(loader):
                read += indices.tolist()
    return read


def test_the_same_batch_on_more_ranks(tmp_path):
    """In the epoch in which it was stopped, it reads what is left."""
    read = run_ranks(1, fail_in, tmp_path, functools.partial(read_until, 3, 16))
    read += run_ranks(2, fail_in, tmp_path, functools.partial(read_until, 0, 8))
    assert sorted(itertools.chain(*read)) == [*range(128)]


# What a script cannot do


def add_what_cannot_be_saved() -> str:
    run = resume.Run(function=lambda: None)
    return refused(lambda: [*run.loop(range(9))])


def forget_a_name() -> str:
    run = resume.Run()
    with pytest.raises(AttributeError) as error:
        run.best = 0.5
    return str(error.value)


def add_what_one_rank_cannot_save() -> str:
    run = resume.Run(last=dist.get_rank() and add_what_cannot_be_saved)
    return printed_in(lambda: [*run.loop(range(9))])


def fail_in(folder, work) -> str:
    os.environ |= {"RUN_DIR": str(folder), "STOP_AT": "0"}
    return work()


@pytest.mark.parametrize(
    "work, said",
    [
        (add_what_cannot_be_saved, "run.function cannot be saved, take numbers, "),
        (forget_a_name, "run.best is not saved: begin with run.add(best=…)"),
    ],
)
def test_refused(work, said, tmp_path):
    (line,) = run_ranks(1, fail_in, tmp_path, work)
    assert line.startswith(said)


def test_what_one_rank_cannot_save(tmp_path):
    """Rank 0 says it, and does not wait for that one."""
    line, _ = run_ranks(2, fail_in, tmp_path, add_what_one_rank_cannot_save)
    assert "error: run.last cannot be saved, take numbers, " in line


def read(kind: str) -> str:
    """Return what a training on a loader prints."""
    loaders = {
        "shares": load(),
        "all": DataLoader(Crops(16), 8, shuffle=True),
        "the same": DataLoader([torch.ones(4)] * 16, 8),
        "uneven": DataLoader([torch.ones(4)] * 8 * (1 + dist.get_rank()), 8),
    }
    loader, (model, optimizer) = loaders[kind], build()
    run = resume.Run(model=model, optimizer=optimizer)
    return printed_in(
        lambda: [take_step(model, optimizer, i) for i in run.loop(loader)]
    )


def printed_in(work) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        work()
    return printed.getvalue()


@pytest.mark.parametrize(
    "kind, said",
    [
        ("shares", ""),
        ("uneven", "error: one rank has 2 batches, another 1: give all as many"),
        ("all", "warning: each rank reads all 16 samples: give the loader a Distr"),
        ("the same", "warning: all ranks have read the same first batch: give the"),
    ],
)
def test_ranks_that_read_the_same(kind, said, tmp_path):
    work = functools.partial(read, kind)
    printed, _ = run_ranks(2, fail_in, tmp_path, work)
    assert said in printed and printed.count("\n") == int(said != "")


def freeze(when, stop_at: int) -> str:
    """Return what a training prints that freezes a layer in its second epoch."""
    os.environ["STOP_AT"] = str(stop_at)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    run = resume.Run(model=model, optimizer=optimizer)

    def train() -> None:
        for epoch in run.loop(range(3)):
            if when(epoch, 1):
                model[0].requires_grad_(False)
            for inputs in run.loop(load()):
                take_step(model, optimizer, inputs)

    return printed_in(train)


@pytest.mark.parametrize("when, warnings", [(operator.ge, 0), (operator.eq, 1)])
def test_a_layer_that_is_frozen_later(when, warnings, tmp_path):
    """A start that does not freeze it again trains it: a line says so."""
    run_ranks(1, fail_in, tmp_path, functools.partial(freeze, when, 40))
    (printed,) = run_ranks(1, fail_in, tmp_path, functools.partial(freeze, when, 0))
    assert (
        len(re.findall("warning: model trains 0.* now, and did ", printed)) == warnings
    )


def warn_in_a_validation() -> int:
    """Return how many batches it validates after a warning in the second one."""
    run, validated = resume.Run(), 0
    with contextlib.suppress(SystemExit):
        for _ in run.loop(range(1)):
            for validated in run.pausable(range(99)):
                if validated == 1:
                    resume.warned.append("now")
    return validated - 1


def test_a_warning_in_a_validation(tmp_path):
    """A batch may take long, so it does not wait for many."""
    (after,) = run_ranks(1, fail_in, tmp_path, warn_in_a_validation)
    assert after <= 1


def warn_in_slow_turns() -> int:
    """Return how many turns it takes after a warning in the second one of 0.5 s."""
    run, turn = resume.Run(), 0
    with contextlib.suppress(SystemExit):
        for _ in run.loop(range(1)):
            for _ in run.loop(range(41)):  # fast ones, a meeting after the last
                pass
            for turn in run.loop(range(40)):
                time.sleep(0.5)
                if turn == 1:
                    resume.warned.append("now")
    return turn - 1


def test_a_warning_in_slow_turns(tmp_path):
    """They come behind fast ones, of which many pass between two meetings."""
    (after,) = run_ranks(1, fail_in, tmp_path, warn_in_slow_turns)
    assert after <= 5


def write_a_compiled_model(folder) -> list[str]:
    os.environ["RUN_DIR"] = str(folder)
    compiled = torch.compile(nn.Linear(2, 2), backend="eager")
    resume.Run().write("model.pt", DistributedDataParallel(compiled))
    return [*torch.load(folder / "model.pt")]


def test_names_of_weights(tmp_path):
    found = run_ranks(1, write_a_compiled_model, tmp_path)
    assert found == [["weight", "bias"]]


def other_loops() -> str:
    (one, optimizer), (other, other_optimizer) = build(), build()
    run = resume.Run(one=one, optimizer=optimizer, other=other, another=other_optimizer)
    return refused(lambda: [*run.loop(range(9))])


def fewer_parts() -> str:
    model, optimizer = build()
    run = resume.Run(one=model, optimizer=optimizer)
    for _ in run.loop(range(2)):
        return refused(lambda: [*run.loop(load())])


def other_data() -> str:
    (one, optimizer), (other, other_optimizer) = build(), build()
    run = resume.Run(one=one, optimizer=optimizer, other=other, another=other_optimizer)
    for _ in run.loop(range(2)):
        return refused(lambda: [*run.loop(load(Crops(64)))])


def other_batch() -> str:
    (one, optimizer), (other, other_optimizer) = build(), build()
    run = resume.Run(one=one, optimizer=optimizer, other=other, another=other_optimizer)
    for _ in run.loop(range(2)):
        return refused(lambda: [*run.loop(DataLoader(Crops(), 4))])


@pytest.mark.parametrize(
    "change, said",
    [
        (other_batch, "8 in a batch, cannot go on with 128 samples, 4 in a batch, or"),
        (fewer_parts, "the checkpoint has other, which Run was not given this time"),
        (other_data, "began with 128 samples, 8 in a batch, cannot go on with 64 sam"),
        (other_loops, "the loops are not those of the checkpoint: choose another"),
    ],
)
def test_another_script(change, said, tmp_path):
    """It does not go on with what this one has saved."""
    run_ranks(1, start, two_models_in_two_loops, tmp_path, 12)
    (line,) = run_ranks(1, fail_in, tmp_path, change)
    assert said in line
