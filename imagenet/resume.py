"""Saves a training when Slurm warns it, and goes on at its next start. Copy this file.

    import resume  # first: a warning may come early

    run = resume.Run(model=model, optimizer=optimizer, scheduler=scheduler, best=0.0)
    for epoch in run.loop(range(epochs)):
        metrics = run.sums(3, device)
        for inputs, targets in run.loop(loader):
            ...  # one step, which adds to metrics in place
        if accuracy > run.best:
            run.best = accuracy
            run.write("best.pt", model)
        run.log(epoch=epoch, accuracy=accuracy)

The next start runs the lines around the loops again. Then all that Run was given gets
the state that was saved, and the innermost loop goes on with its next turn. Works with
torch.distributed, and in one process without it. To try it: `STOP_AT=7 python main.py`
stops after seven turns of the innermost loop, `python main.py` goes on.
"""

import atexit
import contextlib
import copy
import fcntl
import functools
import hashlib
import io
import itertools
import json
import math
import mmap
import multiprocessing.popen_fork
import multiprocessing.util
import os
import random
import re
import signal
import sys
import tempfile
import time
import types
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NoReturn

# Slurm's warnings: SIGUSR1 before the time limit, SIGTERM before a preemption. They may
# come in the middle of anything, and twice, so the handler does nothing else.
warned = []
for each in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(each, lambda number, frame: warned.append(number))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.data import (  # noqa: E402
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

# The same on all ranks: rank 0's is saved. All else is each rank's own.
SHARED = (
    nn.Module,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.amp.GradScaler,
)
# What else of a run is in its checkpoint.
KEPT = ("epoch", "step", "settings", "_seed", "_totals", "_place", "_own")
KEPT += ("_lines", "_weights")


class RunError(Exception):
    """Why a run must end, in one line."""


class Run:
    """A training, and its checkpoints: epoch-001-step-000123.pt is of 123 turns.

    `parts` are what a turn changes: what has a state_dict, and values (numbers, lists,
    tensors, …), which the script reads and writes as attributes of the run. `settings`
    must stay the same from the first step to the last.
    """

    folder, settings = Path(), {}
    epoch, step = 1, 0  # turns of the outermost loop, from 1; innermost ones in it
    # What else to do at a meeting of the ranks, while one saves, and before they stop.
    on_meeting = staticmethod(lambda totals, turns_per_second: None)
    while_saving = staticmethod(contextlib.nullcontext)
    on_stop = staticmethod(lambda: None)

    def __init__(
        self,
        folder: str | Path | None = None,
        settings: dict | None = None,
        keep: int = 2,
        save_minutes: float = 10,
        save_steps: int = 10**9,
        **parts,
    ):
        self.folder = Path(folder or os.environ.get("RUN_DIR", ".")).absolute()
        self.settings = json.loads(json.dumps(settings or {}, default=str))
        self._keep, self._save_seconds = keep, 60 * save_minutes
        self._save_steps = save_steps
        self._stop_at = int(os.environ.get("STOP_AT") or 0)
        self._names, self._levels = [], [Level()]  # the first is around all loops
        self._sums, self._totals = [], []
        self._seed, self._place, self._own, self._lines = None, [], [], []
        self._weights, self._first_item, self._warnings = {}, None, set()
        self._load()
        self._saved_at = self._met_at = time.monotonic()
        # The first meeting is after one turn: also a start that must stop at once gets
        # further.
        self._turns, self._since_meeting, self._meeting = 0, 0, 1
        self._is_checked, self._is_inside = False, False
        self.add(**parts)

    def __setattr__(self, name: str, value) -> None:
        if not name.startswith("_") and not hasattr(self, name):
            raise AttributeError(
                f"run.{name} is not saved: begin with run.add({name}=…)"
            )
        super().__setattr__(name, value)

    def add(self, **parts) -> None:
        """Add parts, which get what an earlier start has saved of them."""
        for name, part in parts.items():
            if hasattr(self, name) or name == "resume":
                raise AttributeError(f"run.{name} is taken: choose another name")
            vars(self)[name] = part
            self._names.append(name)
        if self._place:
            # An optimizer may still get groups, in a loop.
            self._restore(parts, is_last=False)

    def loop(self, items: Iterable | Callable, group: int = 1) -> Iterator:
        """Yield the items that are left. Save and stop only between turns of a loop.

        `items` is anything that `for` takes. What is done of a range, a list or a
        DataLoader is not read again; of another iterable, it is. Or `items(done)`
        returns an iterable that begins there. With `group`, as where gradients
        accumulate, so many turns belong together.
        """
        self._levels[-1].is_innermost = False
        level = self._begin()
        try:
            if level:  # else an earlier start has left this loop
                self._levels.append(level)
                # Its turns may take longer than those before it.
                self._since_meeting, self._met_at = 0, time.monotonic()
                self._meeting = 1
                rest = self._rest(items, level, group)
                for sums in self._sums:
                    if not sums.is_reduced():
                        sums.before = None
                self._draw("item")
                for item in rest:
                    if isinstance(items, DataLoader):
                        self._note(item)
                    self._draw("turn")
                    yield item
                    self._end_turn(level, group)
                    self._draw("item")
        finally:  # also after a break
            if level in self._levels:
                del self._levels[self._levels.index(level) :]
                level = None
            if level is None:  # else the turn around it has ended before
                for sums in self._sums:  # the script may reduce them
                    sums.keep(len(self._levels))
                self._draw("after")

    def pausable(self, batches: Iterable) -> Iterator:
        """Yield the batches of a validation. Stopped, it begins again.

        It is also made again by a start that goes on behind it.
        """
        level = self._begin()
        count = reduce([length(batches)], dist.ReduceOp.MIN)[0]  # a rank may have fewer
        if isinstance(batches, DataLoader):
            batches = self._rest(batches, level or Level(), 1)
        met = due = 0
        for sums in self._sums:  # what it adds, the next start adds again
            sums.keep(len(self._levels))
        for number, batch in enumerate(batches):
            if level and number == due and number < count:
                self._meet(at_point=True, batches=number - met)
                # At first, nobody knows how long a batch takes.
                met, due = number, number + min(self._meeting, number + 1)
            yield batch
        self._meeting = 1  # a turn may take longer than a batch
        self._draw("after")

    def save(self) -> None:
        """Save now. The next start goes on from here, and must come by here again."""
        if self._begin():
            self._saved_at = -math.inf
            self._meet(at_point=True)

    def sums(self, count: int, device: torch.device | str = "cpu") -> Tensor:
        """Return float64 zeros to add to in place, until this turn ends.

        What earlier starts have added, on all ranks, is in those of rank 0.
        """
        sums = torch.zeros(count, dtype=torch.float64, device=device)
        self._sums.append(Sums(len(self._levels), sums))
        if self._place:
            self._fill_sums(len(self._sums) - 1)
        return sums

    def log(self, **values) -> None:
        """Add a line to metrics.jsonl. A resume drops those after its save."""
        self._lines.append(json.dumps(values, default=float))
        text = "".join(f"{line}\n" for line in self._lines)
        path = self.folder / "metrics.jsonl"
        on_rank_0(f"cannot write {path}", lambda: path.write_text(text))

    def write(self, name: str, content) -> None:
        """Let rank 0 write a file into the run's folder, whole or not at all.

        Of a model, these are the weights, by the names that they have without DDP.
        """
        path = self.folder / name
        if is_model(content):
            check_weights(content, f"cannot write {path}: the weights")
            content = unwrap(content).state_dict()
        function = functools.partial(write, path, content)
        on_rank_0(f"cannot write {path}", function, self.while_saving)

    # Loops

    def _begin(self):
        """Count a loop or another place. Return None where an earlier start left it."""
        if self._seed is None:
            self._seed = tell_all(torch.initial_seed())
        around, depth = self._levels[-1], len(self._levels) - 1
        level = Level(around.places)
        around.places += 1
        if depth < len(self._place):
            number, level.done, level.samples, level.batch = self._place[depth]
            if level.number < number:
                return None
            if depth + 1 == len(self._place):
                self._restore(self._names)
                self._fill_sums()  # again, because this turn may have added to them
                self._saved, self._place = None, []
                self._is_inside = level.done > 0
        return level

    def _end_turn(self, level, group: int) -> None:
        """Count a turn, and let the ranks meet if it is time to."""
        if self._place:
            fail("the loops are not those of the checkpoint: choose another folder")
        if level not in self._levels:
            fail("the turns of two loops alternate: write run.loop(zip(…))")
        depth = self._levels.index(level)
        del self._levels[depth + 1 :]  # of loops that were left by a break
        self._sums = [sums for sums in self._sums if sums.depth <= depth]
        for sums in self._sums:
            if depth < sums.kept_at:
                sums.before = None
        level.done += 1
        self._since_meeting += 1
        if level.is_innermost:
            self._turns, self.step = self._turns + 1, self.step + 1
            if self._turns == self._stop_at:
                warned.append("STOP_AT")
                self._meeting = 0
            if self.step % self._save_steps == 0:
                self._saved_at = -math.inf
                self._meeting = 0
        elif depth == 1:
            self.epoch, self.step = self.epoch + 1, 0
        level.is_innermost, level.places = True, 0
        # Not after the last batch: lines after the loop may need what a turn has made.
        is_last = level.done == level.total and depth > 1
        is_due = self._since_meeting >= self._meeting
        if is_due and not is_last and level.done % group == 0:
            self._meet()

    def _rest(self, items, level, group: int) -> Iterable:
        """Return what is left of a loop."""
        if callable(items):
            return items(level.done)
        if isinstance(items, (range, list, tuple)):
            return items[level.done :]
        if isinstance(items, DataLoader):
            self._count(items, level, group)
            generators = find_generators(parts_of(items))
            order = self._set_order(items, generators)
            is_stream = isinstance(items.dataset, IterableDataset)
            if not is_stream and items.batch_sampler is not None:
                return load_rest(items, level.done, order, generators)
        iterator, done = iter(items), level.done
        for number in range(done):
            level.done = number
            self._draw("item")
            next(iterator)
        level.done = done
        return iterator

    def _count(self, loader: DataLoader, level, group: int) -> None:
        """Count a loader's samples and batches: they must be those of the save."""
        samples, batch = length(loader.dataset), loader.batch_size or 1
        level.total = length(loader)
        replicas = getattr(sampler_of(loader), "num_replicas", 0)
        if replicas and level.done:
            # As many samples are done, in other turns if there are other ranks now.
            done = level.done * level.batch * len(self._own)
            turns = done // (batch * replicas)
            turns -= turns % group
            self.step += turns - level.done
            level.done, level.batch = turns, batch
        differ = level.done and (level.samples, level.batch) != (samples, batch)
        numbers = [differ, level.total, -level.total]
        differ, most, minus_least = reduce(numbers, dist.ReduceOp.MAX)
        # In a validation, a rank may have fewer.
        if most != -minus_least and level in self._levels:
            fail(
                f"one rank has {most:.0f} batches, another {-minus_least:.0f}: "
                "give all as many, as with drop_last=True"
            )
        if differ:
            fail(
                f"an epoch that began with {level.samples} samples, {level.batch} in a "
                f"batch, cannot go on with {samples} samples, {batch} in a batch, or "
                "with others on another rank: take the same, or choose another folder"
            )
        level.samples, level.batch = samples, batch

    def _set_order(self, loader: DataLoader, generators: list) -> int:
        """Let a loader's order follow from its place in the run. Return its seed."""
        # These know nothing of other ranks: each rank has an order of its own.
        alone = RandomSampler, WeightedRandomSampler, SubsetRandomSampler
        sampler = sampler_of(loader)
        own = rank() if isinstance(sampler, alone) else 0
        order = make_seed(self._seed, "order", *self._where()[:-1], own)
        for part in (*parts_of(loader), loader):
            if hasattr(part, "set_epoch"):
                # Of the loop around this one, if there is one.
                part.set_epoch(self._levels[-2:][0].done)
        seed(order, generators)
        if type(sampler) is RandomSampler and len(sampler) == len(loader.dataset):
            self._warn(
                f"each rank reads all {len(sampler)} samples: give the loader a "
                "DistributedSampler, unless each rank has samples of its own"
            )
        return order

    def _warn(self, message: str) -> None:
        if world_size() > 1 and message not in self._warnings:
            self._warnings.add(message)
            say(f"warning: {message}")

    def _where(self) -> list[int]:
        return [n for level in self._levels for n in (level.number, level.done)]

    def _draw(self, what: str) -> None:
        """Let what is drawn from here on follow from the place in the run."""
        places = self._levels[-1].places
        seed(make_seed(self._seed, what, *self._where(), places, rank()))

    # Meetings of the ranks

    def _meet(self, at_point: bool = False, batches: int = 0) -> None:
        """Let the ranks add up what each has to say, and go by that."""
        now = time.monotonic()
        due = now - self._saved_at >= self._save_seconds  # both may be inf
        turns = self._since_meeting + batches
        speed = turns / (now - self._met_at + 1e-6) / world_size()
        sums = [number for sums in self._sums for number in sums.numbers()]
        stop, due, speed, *self._totals = reduce([len(warned), due, speed, *sums])
        self.on_meeting(self._totals if self._since_meeting else [], speed)
        if not self._is_checked:
            self._check()
        if stop or due:
            self._save(at_point)
        if stop:
            say(
                f"Asked to stop: saved step {self.step} of epoch {self.epoch}, "
                "to go on from there"
            )
            self.on_stop()
            leave(75)  # "try again later". For job.sh, any but 0 would do.
        # Again in 20 turns or two seconds: a signal leaves little time.
        self._since_meeting, self._met_at = 0, time.monotonic()
        self._meeting = max(1, min(20, int(2 * speed)))

    def _check(self) -> None:
        """After the first turn, refuse what would go wrong later, or in silence."""
        self._is_checked = True
        self._pack_own()
        for name, weights in self._weights.items():
            if name not in self._names:
                fail(f"the checkpoint has {name}, which Run was not given this time")
            part = unwrap(getattr(self, name))
            trained = set(weights_of(part)) if is_model(part) else weights
            if frozen := [key for key in weights if key not in trained]:
                fail(
                    f"the checkpoint's {name} has trained {frozen[0]}, which is frozen "
                    "now: unfreeze by >= and not by ==, above the inner loop"
                )
            added = [key for key in trained if key not in weights]
            if self._is_inside and is_model(part) and added:
                say(
                    f"warning: {name} trains {added[0]} now, and did not when it was "
                    "saved: freeze by >= and not by ==, above the inner loop"
                )
        first = self._first_item or 0
        least, minus_most = reduce([first, -first], dist.ReduceOp.MIN)
        if first and least == -minus_most:
            self._warn(
                "all ranks have read the same first batch: give the loader a "
                "DistributedSampler, or each rank samples of its own"
            )

    def _note(self, item) -> None:
        """Take a checksum of the first batch, to compare it with other ranks'."""
        if self._first_item is None and world_size() > 1:
            self._first_item = 0
            with contextlib.suppress(Exception):  # it holds what cannot be packed
                self._first_item = zlib.crc32(pack(item))

    def _fill_sums(self, first: int = 0) -> None:
        """Give sums, from the first on, what earlier starts have added, on rank 0."""
        left = iter(self._totals)
        for place, sums in enumerate(self._sums):
            done = list(itertools.islice(left, len(sums.tensor)))
            if place >= first and not sums.is_reduced():
                sums.tensor.zero_()
                if rank() == 0 and done:
                    sums.tensor += sums.tensor.new_tensor(done)

    # Checkpoints

    def _pack_own(self) -> dict[str, bytes]:
        """Return what is this rank's own."""
        packed, problem = {}, None
        for name in self._names:
            part = unwrap(getattr(self, name))
            if isinstance(part, SHARED):
                continue
            try:
                packed[name] = pack(
                    plain(part.state_dict() if is_object(part) else part)
                )
                unpack(packed[name])  # or the next start would fail
            except Exception as error:  # of several kinds
                problem = (
                    f"run.{name} cannot be saved, take numbers, strings, tensors, or "
                    f"lists and dicts of them: {error!r}"
                )
        # It may be one rank's alone, for which the others would wait.
        own = rank() if problem else world_size()
        first = int(reduce([own], dist.ReduceOp.MIN)[0])
        if first < world_size():
            fail(tell_all(problem, first))
        return packed

    def _collect(self, at_point: bool) -> dict:
        """Return what rank 0 is to save."""
        levels = self._levels[1:]
        if at_point:
            levels.append(Level(self._levels[-1].places - 1))
        place = [
            [level.number, level.done, level.samples, level.batch] for level in levels
        ]
        own = self._pack_own()
        about = {name: getattr(self, name) for name in KEPT} | {"_place": place}
        about["_own"] = [tell_all(own, other) for other in range(world_size())]
        parts = {name: unwrap(getattr(self, name)) for name in self._names}
        about["_weights"] = {name: weights_of(part) for name, part in parts.items()}
        state = {}
        for name, part in parts.items():
            if is_model(part):
                state[name] = part.state_dict()
            elif name not in own:
                state[name] = plain(part.state_dict())
        return state | {"resume": about}

    def _save(self, at_point: bool) -> None:
        """Let rank 0 write a checkpoint, while the others wait."""
        path = self.folder / f"epoch-{self.epoch:03}-step-{self.step:06}.pt"
        for name in self._names:
            part = unwrap(getattr(self, name))
            if is_model(part):
                check_weights(part, f"cannot write {path}: the weights of {name}")
        content = self._collect(at_point)

        def write_and_tidy() -> None:
            write(path, content)
            paths = self._paths()
            place = paths.index(path)
            with contextlib.suppress(OSError):  # the checkpoint is whole
                # On more ranks than before, an epoch has fewer turns: what looks newer
                # is of an earlier start.
                for old in paths[:place] + paths[place + self._keep :]:
                    old.unlink()

        on_rank_0(f"cannot write {path}", write_and_tidy, self.while_saving)
        self._saved_at = time.monotonic()

    def _paths(self) -> list[Path]:
        """Return the checkpoints, the newest one first."""
        return sorted(
            self.folder.glob("epoch-*-step-*.pt"),
            key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)],
            reverse=True,
        )

    def _load(self) -> None:
        """Read the newest whole checkpoint, if it is of this run."""
        if reduce([self.settings != tell_all(self.settings)])[0]:
            fail("not every node has the same data and settings: stage it again")
        path = on_rank_0(f"cannot use {self.folder}", self._find)
        if path is None:
            return
        if reduce([not os.path.exists(path)])[0]:
            fail(f"not every node has {path}: move it to a shared disk")
        self._saved = read(path)
        if not set(KEPT) <= set(self._saved.get("resume", ())):
            fail(f"{path} is not of this resume.py: choose another folder")
        about = self._saved["resume"]
        saved, mine = about["settings"], self.settings
        changed = [
            f"{name} {saved.get(name)}, not {mine.get(name)}"
            for name in mine | saved
            if saved.get(name) != mine.get(name)
        ]
        if changed:
            fail(
                f"{path} is of another run, with {'; '.join(changed)}: "
                "go on as it began, or choose another folder"
            )
        say(f"Resuming from {path}")
        for name in KEPT:
            setattr(self, name, about[name])

    def _find(self) -> str | None:
        self.folder.mkdir(parents=True, exist_ok=True)
        lock(self.folder)
        for partial in self.folder.glob("*.pt.partial"):
            partial.unlink()
        for path in self._paths():
            try:
                check(path)
            except ValueError as error:
                say(f"warning: {path} is damaged, trying the one before: {error}")
                path.rename(path.with_suffix(".pt.damaged"))
            else:
                return str(path)
        if list(self.folder.glob("*.damaged")):
            raise RunError(
                f"no whole checkpoint is left in {self.folder}: "
                "remove the damaged ones there to start again from the beginning"
            )
        if os.environ.get("SLURM_RESTART_COUNT", "0") != "0":
            say(
                f"warning: started again, and no checkpoint is in {self.folder}: "
                "none was saved, or the nodes do not share this disk"
            )
        return None

    def _restore(self, names: Iterable, is_last: bool = True) -> None:
        """Give parts the state that was saved of them. At last, all must fit."""
        own = self._own[rank() % len(self._own)]
        for name in names:
            part, state = unwrap(getattr(self, name)), self._saved.get(name)
            if name in own:
                state = unpack(own[name])
            if not is_object(part):
                self._set(name, part, state if name in own else part)
            elif state != {}:  # as of a scaler that was idle, in another precision
                try:
                    # A copy: the tensors lie in the file, which is deleted later.
                    part.load_state_dict(copy.deepcopy(state))
                    saved = self._weights.get(name)
                    if not is_model(part) and saved != weights_of(part):
                        raise ValueError("it is of other weights, or of another kind")
                except Exception as error:  # of several kinds
                    groups = len((state or {}).get("param_groups", ()))
                    if is_last or groups <= len(getattr(part, "param_groups", ())):
                        fail(f"the checkpoint's {name} does not fit: {error!r}")

    def _set(self, name: str, part, state) -> None:
        """Give a value its state, in place where the script may hold it by a name."""
        if sum(getattr(self, other) is part for other in self._names) > 1:
            return setattr(self, name, state)  # each of these has a state of its own
        if isinstance(part, Tensor) and isinstance(state, Tensor):
            if part.shape == state.shape:
                with torch.no_grad():
                    part.copy_(state)
                return
        if isinstance(part, list) and isinstance(state, list):
            part[:] = state
        elif isinstance(part, (dict, set)) and isinstance(state, (dict, set)):
            state = state.copy()
            part.clear()
            part.update(state)
        else:
            setattr(self, name, state)


class Sums:
    """Sums of a turn. Lines after a loop may reduce them, and each start runs those."""

    before, kept_at = None, 0

    def __init__(self, depth: int, tensor: Tensor):
        self.depth, self.tensor = depth, tensor

    def keep(self, depth: int) -> None:
        """Keep the sums as they are, until the turn of this depth ends."""
        if self.before is None:
            self.before, self.kept_at = self.tensor.tolist(), depth

    def is_reduced(self) -> bool:
        return self.before is not None and self.before != self.tensor.tolist()

    def numbers(self) -> list[float]:
        return self.tensor.tolist() if self.before is None else self.before


class Level:
    """An open loop. Its number counts the loops in this turn of the loop around it."""

    # Of its present turn. A place is a loop, a validation or a save.
    places, is_innermost = 0, True
    total = None  # turns, if known: those of a DataLoader

    def __init__(self, number: int = 0):
        self.number, self.done, self.samples, self.batch = number, 0, 0, 1


def sampler_of(loader: DataLoader):
    """Return what draws the samples. A batch sampler of one's own may hold it."""
    return getattr(loader.batch_sampler, "sampler", loader.sampler)


def parts_of(loader: DataLoader) -> list:
    """Return what may draw in a loader."""
    samplers = [loader.batch_sampler, sampler_of(loader)]
    return [loader.dataset, loader.collate_fn, *samplers, loader.generator]


def load_rest(
    loader: DataLoader, done: int, order: int, generators: list
) -> DataLoader:
    """Return a loader of what is left. It does not load what is done."""
    rest = vars(loader).get("_rest")
    if rest is None:
        rest = copy.copy(loader)
        # An iterator of persistent workers keeps the object that tells the batches.
        data = Seeded(loader.dataset, generators)
        vars(rest).update(dataset=data, batch_sampler=Rest(), _iterator=None)
        if loader.persistent_workers:
            vars(loader)["_rest"] = rest
    batches = iter(loader.batch_sampler)
    vars(rest.batch_sampler).update(
        batches=batches, done=done, order=order, generators=generators
    )
    return rest


class Rest:
    """The batches that are left, as keys for Seeded: a seed, the place, the index.

    Batches are asked for one by one, because a sampler may have no end.
    """

    def __iter__(self) -> Iterator[list[tuple]]:
        for number in itertools.count():
            # What a sampler draws follows from the number of the batch.
            order = make_seed(self.order, number)
            seed(order, self.generators)
            batch = next(self.batches, None)
            if batch is None:
                return
            if number >= self.done:
                own = make_seed(order, rank())
                yield [(own, place, index) for place, index in enumerate(batch)]


class Seeded:
    """A data set whose samples draw what follows from their place in the run."""

    data = None  # or __getattr__ would call itself while a worker unpickles this

    def __init__(self, data, generators: list):
        vars(self).update(data=data, generators=generators)

    def __getattr__(self, name: str):
        return getattr(self.data, name)

    def __setattr__(self, name: str, value) -> None:
        setattr(self.data, name, value)  # as a worker_init_fn does

    def __getitem__(self, key: tuple):
        own, place, index = key
        seed(make_seed(own, place), self.generators)
        return self.data[index]

    @property
    def __getitems__(self):
        """How a loader reads a batch, for data sets that can; else None."""
        read = getattr(self.data, "__getitems__", None)
        return read and functools.partial(self._read_batch, read)

    def _read_batch(self, read: Callable, keys: list[tuple]):
        seed(keys[0][0], self.generators)
        return read([index for _, _, index in keys])


def make_seed(*values) -> int:
    """Return a seed that follows from these values."""
    # NumPy's SeedSequence would take a twentieth of the time of a small image.
    digest = hashlib.sha256(" ".join(map(str, values)).encode()).digest()
    return int.from_bytes(digest[:8], "big")


def find_generators(thing) -> list:
    """Return the random generators that an object's attributes hold, at any depth."""
    kinds = [random.Random, torch.Generator]
    if numpy := sys.modules.get("numpy"):
        kinds += [numpy.random.Generator, numpy.random.RandomState]
    found, seen, left = [], set(), [thing]
    while left and len(seen) < 10000:
        thing = left.pop()
        if id(thing) in seen or isinstance(thing, (type, types.ModuleType)):
            continue
        seen.add(id(thing))
        if isinstance(thing, tuple(kinds)):
            found.append(thing)
        elif isinstance(thing, (list, tuple)):
            left += thing[:100]  # not a million names
        elif isinstance(thing, dict):
            left += list(thing.values())[:100]
        else:
            left += getattr(thing, "__dict__", {}).values()
            left.append(getattr(thing, "__self__", None))  # a method's object
    return found


def seed(number: int, generators: Iterable = ()) -> None:
    """Seed what draws here. torch.manual_seed would take 0.2 ms, for all devices."""
    for place, generator in enumerate(generators):
        own = make_seed(number, place)  # or all would draw alike
        if isinstance(generator, torch.Generator):
            generator.manual_seed(own)
        elif hasattr(generator, "bit_generator"):
            bits = generator.bit_generator
            bits.state = type(bits)(own).state
        else:
            generator.seed(own % 2**32)
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(number)
    random.seed(number)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(number % 2**32)


def length(items) -> int:
    """Return how many items there are; if nobody knows, as many as on other ranks."""
    try:
        return len(items)
    except TypeError:
        return 2**53


# The ranks. All call these functions together.


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def device() -> str:
    """Return where the ranks' messages to each other must be."""
    return "cuda" if dist.is_initialized() and "nccl" in dist.get_backend() else "cpu"


def reduce(numbers: list, operation=dist.ReduceOp.SUM) -> list[float]:
    """Return the sums, or another operation, over all ranks."""
    numbers = torch.tensor(numbers, dtype=torch.float64, device=device())
    if dist.is_initialized():
        dist.all_reduce(numbers, operation)
    return numbers.tolist()


def tell_all(value, source: int = 0):
    """Return on all ranks what one of them has given. No pickled code is run."""
    if not dist.is_initialized():
        return value
    packed = pack(value) if rank() == source else b""
    size = int(reduce([len(packed)])[0])
    message = torch.frombuffer(bytearray(packed.ljust(size)), dtype=torch.uint8)
    message = message.to(device())
    dist.broadcast(message, source)
    return unpack(message.cpu().numpy().tobytes())


def on_rank_0(failure: str, function: Callable, around=contextlib.nullcontext):
    """Call a function on rank 0, while the others wait. Return its answer on all."""
    answer = error = None
    if rank() == 0:
        with around():
            try:
                answer = function()
            except RunError as problem:
                error = str(problem)
            except OSError as problem:
                error = f"{failure}: {problem.strerror or problem}"
        answer, error = tell_all([answer, error])
    else:
        with around():
            answer, error = tell_all(None)
    if error:
        fail(error)
    return answer


def lock(folder: Path) -> None:
    """Keep other runs out of a folder, until this process ends."""
    # Nobody else may open the file: who can only read the folder could hold it.
    file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    # A job that was just killed may hold the lock a little longer.
    for _ in range(60):
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(1)
        except OSError:  # a file system without locks
            return
    raise RunError(
        f"another run writes to {folder}: choose another folder; "
        "if its node is gone, and there is no such run, remove its file named lock"
    )


def say(text: str) -> None:
    if rank() == 0:
        with contextlib.suppress(OSError):  # the log's disk may be full
            print(text, flush=True)


def fail(message: str) -> NoReturn:
    """End all ranks. Rank 0 says why."""
    say(f"{Path(sys.argv[0]).name}: error: {message}")
    leave(1)


def leave(status: int) -> NoReturn:
    """End this rank together with the others."""
    if dist.is_initialized():
        dist.barrier()
        time.sleep(0.1)  # gloo, on CPUs, still frees tensors: Python must not end yet
        dist.destroy_process_group()
    raise SystemExit(status)


# What is saved


def unwrap(part):
    """Return the model within torch.compile and DDP."""
    part = getattr(part, "_orig_mod", part)
    if isinstance(part, nn.parallel.DistributedDataParallel):
        part = part.module
    return getattr(part, "_orig_mod", part)


def is_model(part) -> bool:
    return isinstance(part, nn.Module)


def is_object(part) -> bool:
    return hasattr(part, "load_state_dict")


def check_weights(model: nn.Module, failure: str) -> None:
    """End all ranks where weights are not finite, or differ between the ranks."""
    total = sum(
        float(weight.detach().double().abs().sum()) for weight in model.parameters()
    )
    bad = not math.isfinite(total) or any(b.isnan().any() for b in model.buffers())
    bad, most, minus_least = reduce([bad, total, -total], dist.ReduceOp.MAX)
    if bad:
        fail(f"{failure} are not finite")
    # The same numbers, added up by another kind of processor, differ a little.
    if most + minus_least > 1e-9 * most:
        fail(f"{failure} differ between ranks: call DDP's forward() in each turn")


def weights_of(part) -> list:
    """Return which weights a model trains, or what an optimizer has in each group."""
    if isinstance(part, nn.Module):
        return [name for name, w in part.named_parameters() if w.requires_grad]
    groups = getattr(part, "param_groups", ())
    shapes = [[list(weight.shape) for weight in group["params"]] for group in groups]
    return [type(part).__name__, *shapes]


def plain(value):
    """Return a value with numbers in place of NumPy's, which no start could read."""
    if isinstance(value, dict):
        value = value.copy()
        for key, part in value.items():
            value[key] = plain(part)
        return value
    if isinstance(value, list):
        return list(map(plain, value))
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    numpy = sys.modules.get("numpy")
    return value.item() if numpy and isinstance(value, numpy.generic) else value


def pack(value) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def unpack(packed: bytes):
    """Return what was packed; on this rank's GPU, what came from one."""

    def place(storage, location: str):
        return storage if location == "cpu" else storage.cuda()

    return torch.load(io.BytesIO(packed), map_location=place, weights_only=True)


def write(path: Path, content) -> None:
    """Write a file that is there whole, or not at all."""
    partial = Path(f"{path}.partial")
    try:
        with open(partial, "wb") as file:
            torch.save(content, file)
            file.flush()
            # The name must not reach the disk before the content.
            os.fsync(file.fileno())
        partial.rename(path)
    except Exception as error:  # of several kinds
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)  # this makes room on a full disk
        # torch.save raises an error of its own. What the disk has said is deeper.
        reason = error
        while reason.__context__ and not isinstance(reason, OSError):
            reason = reason.__context__
        if isinstance(reason, OSError):
            raise reason from None
        raise RunError(f"cannot write {path}: {error!r}") from None


def check(path: Path) -> None:
    """Raise ValueError if a checkpoint is damaged."""
    with open(path, "rb") as file:
        # A disk that does not read, or too little memory, is no damage of the file. It
        # raises an OSError here. zipfile and PyTorch would raise other errors.
        while file.read(2**24):
            pass
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ).close()
    try:
        # torch.save writes a CRC of each tensor, and torch.load does not look at it.
        # Neither does testzip, if a flipped bit marks a tensor as a folder.
        with zipfile.ZipFile(path) as file:
            if file.testzip() or any(part.external_attr for part in file.infolist()):
                raise ValueError("its content does not match its CRC")
        read(path)
    except Exception as error:  # a damaged file may raise anything
        raise ValueError(str(error).split("\n")[0]) from error


def read(path: Path) -> dict:
    """Return what is in a checkpoint, which takes no memory before it is used."""
    # With weights_only, no code in the file is run.
    return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def before_fork() -> None:
    """Keep Slurm's signals from a loader's workers, which they would end."""
    # What is blocked before a fork stays so in the new process.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    if len(tempfile.gettempdir()) > 74:
        tempfile.tempdir = "/tmp"  # or the paths of the sockets would be too long
    multiprocessing.util.get_temp_dir()  # the workers' sockets: removed at the end


def after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


SIGNALS = {signal.SIGUSR1, signal.SIGTERM, signal.SIGINT}
# Workers that are not forked would not inherit what is blocked.
multiprocessing.set_start_method("fork", force=True)
os.register_at_fork(before=before_fork, after_in_parent=after_fork)


# What is forked blocks SIGTERM, and Python would wait for it for ever.
multiprocessing.popen_fork.Popen.terminate = multiprocessing.popen_fork.Popen.kill


@atexit.register
def end_workers() -> None:
    """Kill the workers: asked to end, they would remove what may be gone already."""
    # DataLoader's handler would call their end an error, with a traceback.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for process in multiprocessing.active_children():
        if process.daemon:  # others are the script's own
            process.kill()
