"""Saves a training when Slurm warns it, and goes on at its next start. Copy this file.

    import resume  # first: a warning may come early

    run = resume.Run(model=model, optimizer=optimizer, scheduler=scheduler, best=0.0)
    for epoch in run.loop(range(epochs)):
        metrics = run.sums(3, device)
        for inputs, targets in run.loop(loader):
            ...  # one step, which adds to metrics in place
        if accuracy > run.best:
            run.best = accuracy
            run.write("best.pt", model.state_dict())

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
import json
import mmap
import multiprocessing.util
import os
import random
import re
import signal
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NoReturn

# Slurm's warnings: SIGUSR1 before the time limit, SIGTERM before a preemption. They may
# come in the middle of anything, and twice, so the handler does nothing else.
SIGNALS = {signal.SIGUSR1, signal.SIGTERM}
warned = []
for each in SIGNALS:
    signal.signal(each, lambda number, frame: warned.append(number))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils._pytree import tree_map  # noqa: E402
from torch.utils.data import DataLoader, IterableDataset, RandomSampler  # noqa: E402

# The same on all ranks: rank 0's is saved. All else is each rank's own.
SHARED = (
    nn.Module,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.amp.GradScaler,
)


class Level:
    """An open loop: the how manieth of its level in this turn of the loop around it."""

    def __init__(self, number: int = 0, done: int = 0):
        self.number, self.done = number, done  # so many turns are done
        self.begin_turn()

    def begin_turn(self) -> None:
        self.points = 0  # loops, validations and saves that this turn has begun
        self.is_innermost = True

    def place(self) -> list[int]:
        return [self.number, self.done]


class Run:
    """A training, and its checkpoints: epoch-001-step-000123.pt is of 123 steps.

    `parts` are what a turn changes: what has a state_dict, and values (numbers, lists,
    tensors, …), which the script reads and writes as attributes of the run. `settings`
    must stay the same from the first step to the last.
    """

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
        own = {"folder": Path(folder or os.environ.get("RUN_DIR", ".")).absolute()}
        own |= {"settings": json.loads(json.dumps(settings or {}, default=str))}
        vars(self).update(own)
        self._keep, self._save_seconds = keep, 60 * save_minutes
        self._save_steps, self._stop_at = save_steps, int(os.environ.get("STOP_AT", 0))
        self._names, self._loaders, self._sums = [], {}, []
        self._levels = [Level()]  # the first is around all loops
        self._seed = None
        self._saved = self._load()  # until the loops have reached its place
        self._saved_at = self._met_at = time.monotonic()
        self._turns = 0  # of innermost loops, in this start
        # The first meeting is after one turn: also a start that must stop at once gets
        # further.
        self._since_meeting, self._meeting = 0, 1
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
        if self._saved:
            self._restore(parts)

    def loop(self, items: Iterable | Callable, group: int = 1) -> Iterator:
        """Yield the items that are left. Save and stop only between turns of a loop.

        `items` is anything that `for` takes. What is done of a range, a list or a
        DataLoader is not read again; of another iterable, it is. Or `items(done)`
        returns an iterable that begins there. With `group`, as where gradients
        accumulate, so many turns belong together.
        """
        level = self._enter(items, group)
        if level is None:  # an earlier start has ended this loop
            return self._draw("after")
        try:
            rest = self._rest(items, level)
            self._draw("item")
            for item in rest:
                self._draw("turn")
                yield item
                level.done += 1
                self._end_turn(level, group)
                self._draw("item")
        finally:  # also after a break
            if level in self._levels:
                del self._levels[self._levels.index(level) :]
            for sums in self._sums:
                sums.at_end = sums.now.clone()
            self._draw("after")

    def pausable(self, batches: Iterable) -> Iterator:
        """Yield the batches of a validation, which may be stopped, and begins again."""
        self._reach_point()
        count = reduce([length(batches)], dist.ReduceOp.MIN)[0]  # a rank may have fewer
        for number, batch in enumerate(batches):
            if number < count and number % 20 == 0 and reduce([len(warned)])[0]:
                self._stop(at_point=True)
            yield batch
        self._draw("after")

    def save(self) -> None:
        """Save now. The next start goes on from here. Not under an `if`."""
        if not self._reach_point():
            self._meet(save=True, at_point=True)

    def sums(self, count: int, device: torch.device | str = "cpu") -> Tensor:
        """Return float64 zeros to add to in place, until this turn ends.

        What earlier starts have added, on all ranks, is in those of rank 0.
        """
        sums = torch.zeros(count, dtype=torch.float64, device=device)
        if self._saved and rank() == 0:
            saved, self._sums_left = self._sums_left[:count], self._sums_left[count:]
            sums[: len(saved)] = torch.tensor(saved, dtype=torch.float64)
        self._sums.append(Sums(sums, len(self._levels)))
        return sums

    def write(self, name: str, content) -> None:
        """Let rank 0 write a file into the run's folder, whole or not at all."""
        path = self.folder / name
        function = functools.partial(write, path, content)
        on_rank_0(f"cannot write {path}", function, self.while_saving)

    # Loops

    def _enter(self, items, group: int) -> Level | None:
        """Begin a loop where it stopped. Return None if it has ended."""
        around, depth = self._levels[-1], len(self._levels) - 1
        around.is_innermost = False
        level = Level(around.points)
        around.points += 1
        turns = length(items)
        most, least = reduce([turns, -turns], dist.ReduceOp.MAX)
        if most + least:
            fail(f"a rank has {most:.0f} turns of a loop, another one {-least:.0f}")
        place = self._saved and self._saved["resume"]["place"]
        if not place or depth >= len(place):
            self._levels.append(level)
            return level
        number, level.done = place[depth]
        if level.number < number:
            return None
        if replicas := getattr(getattr(items, "sampler", None), "num_replicas", None):
            level.done = level.done * self._saved["resume"]["ranks"] // replicas
            level.done -= level.done % group
        if depth + 1 == len(place):
            self._finish_loading()
        self._levels.append(level)
        return level

    def _reach_point(self) -> bool:
        """Count a place outside of loops. Return whether the run goes on from it."""
        around, depth = self._levels[-1], len(self._levels) - 1
        place = self._saved and self._saved["resume"]["place"]
        around.points += 1
        if not place or depth + 1 < len(place):
            return bool(place)
        if around.points - 1 == place[depth][0]:
            self._finish_loading()
        return True

    def _end_turn(self, level: Level, group: int) -> None:
        """Count a turn, and let the ranks meet if it is time to."""
        if self._saved:
            fail("the loops are not those of the checkpoint: choose another folder")
        depth = self._levels.index(level)
        self._sums = [sums for sums in self._sums if sums.depth <= depth]
        if level.is_innermost:
            self._turns += 1
            self.step += 1
        elif depth == 1:
            self.epoch, self.step = self.epoch + 1, 0
        innermost = level.is_innermost
        level.begin_turn()
        self._since_meeting += 1
        stop = 0 < self._stop_at <= self._turns
        save = innermost and self.step % self._save_steps == 0
        if level.done % group == 0:
            if stop or save or self._since_meeting >= self._meeting:
                self._meet(save, stop)

    def _rest(self, items, level: Level) -> Iterable:
        """Return what is left of a loop."""
        if callable(items):
            return items(level.done)
        if isinstance(items, (range, list, tuple)):
            return items[level.done :]
        if isinstance(items, DataLoader):
            order = self._set_order(items)
            if not isinstance(items.dataset, IterableDataset):
                return self._load_rest(items, level.done, order)
        iterator, done = iter(items), level.done
        for level.done in range(done):  # read again
            self._draw("item")
            next(iterator)
        level.done = done
        return iterator

    def _set_order(self, loader: DataLoader) -> int:
        """Let a loader's order follow from its place in the run. Return its seed."""
        # Without a DistributedSampler, each rank has an order of its own.
        own = isinstance(loader.sampler, RandomSampler)
        place = [number for level in self._levels for number in level.place()][:-1]
        order = make_seed(self._seed, "order", *place, rank() if own else 0)
        for part in (loader.dataset, loader.sampler, loader.batch_sampler, loader):
            if hasattr(part, "set_epoch"):
                part.set_epoch(self._levels[-2].done)
            if isinstance(getattr(part, "generator", None), torch.Generator):
                part.generator.manual_seed(order)
        seed(order)
        return order

    def _load_rest(self, loader: DataLoader, done: int, order: int) -> DataLoader:
        """Return a loader of what is left. It does not load what is done."""
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        _, rest = self._loaders.get(id(loader), (loader, None))
        left = list(getattr(loader, name))[done:]
        if rest is None:
            rest = copy.copy(loader)
            vars(rest).update(dataset=Seeded(loader.dataset), _iterator=None)
            vars(rest)[name] = Keys(name == "batch_sampler")
            if loader.persistent_workers:  # their iterator keeps this object
                self._loaders[id(loader)] = loader, rest
        vars(vars(rest)[name]).update(left=left, order=order)
        return rest

    def _draw(self, what: str) -> None:
        """Let what is drawn from here on follow from the place in the run."""
        if self._seed is None:
            self._seed = tell_all(torch.initial_seed())
        place = [number for level in self._levels for number in level.place()]
        points = self._levels[-1].points
        seed(make_seed(self._seed, what, *place, points, rank()))

    # Meetings of the ranks

    def _meet(self, save=False, stop=False, at_point=False) -> None:
        """Let the ranks add up what each has to say, and go by that."""
        seconds = time.monotonic() - self._met_at
        speed = self._since_meeting / max(1e-6, seconds) / world_size()
        due = time.monotonic() - self._saved_at > self._save_seconds
        numbers = [len(warned) + stop, due, speed, *self._own_sums(at_point)]
        stop, due, speed, *self._totals = reduce(numbers)
        self.on_meeting(self._totals, speed)
        if self._turns == 1:
            on_rank_0("cannot save", self._check_values)
        if stop:
            self._stop(at_point)
        if save or due:
            self._save(at_point)
        # Again in 20 turns or two seconds: a signal leaves little time.
        self._since_meeting, self._met_at = 0, time.monotonic()
        self._meeting = max(1, min(20, int(2 * speed)))

    def _own_sums(self, at_point: bool) -> list[float]:
        """Return this rank's sums. At a point, the script may have reduced them."""
        sums = [sums.at_end if at_point else sums.now for sums in self._sums]
        return [number for each in sums for number in each.tolist()]

    def _stop(self, at_point: bool) -> None:
        self._save(at_point)
        say(
            f"Asked to stop: saved step {self.step} of epoch {self.epoch}, "
            "to go on from there"
        )
        self.on_stop()
        leave(75)  # "try again later". For job.sh, any but 0 would do.

    def _check_values(self) -> None:
        """Refuse what cannot be saved now, not when Slurm warns."""
        for name in self._names:
            state = tree_map(
                lambda leaf: 0 if isinstance(leaf, Tensor) else leaf, self._state(name)
            )
            try:
                unpack(pack(state))
            except Exception as error:  # of several kinds
                raise RunError(
                    f"run.{name} cannot be saved, give numbers, strings, tensors, or "
                    f"lists and dicts of these: {str(error).splitlines()[0]}"
                ) from error

    # Checkpoints

    def _state(self, name: str):
        """Return what is saved of a part."""
        part = unwrap(getattr(self, name))
        state = part.state_dict() if hasattr(part, "state_dict") else part
        return tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, state)

    def _save(self, at_point: bool) -> None:
        """Let rank 0 write a checkpoint, while the others wait."""
        place = [level.place() for level in self._levels[1:]]
        if at_point:
            place.append([self._levels[-1].points - 1, 0])
        about = {name: getattr(self, name) for name in ("epoch", "step", "settings")}
        about |= {"place": place, "seed": self._seed, "ranks": world_size()}
        about["sums"] = reduce(self._own_sums(at_point))
        parts = {name: unwrap(getattr(self, name)) for name in self._names}
        shared = [name for name in parts if isinstance(parts[name], SHARED)]
        own = {name: self._state(name) for name in parts if name not in shared}
        models = [name for name in shared if isinstance(parts[name], nn.Module)]
        prints = {name: fingerprint(parts[name]) for name in models}
        everyone = [unpack(packed) for packed in gather(pack([own, prints]))]

        path = self.folder / f"epoch-{self.epoch:03}-step-{self.step:06}.pt"

        def save() -> None:
            for name in models:
                check_weights(name, parts[name], [found[name] for _, found in everyone])
            about["own"] = [pack(own) for own, _ in everyone]
            state = {name: self._state(name) for name in shared}
            write(path, state | {"resume": about})
            with contextlib.suppress(OSError):  # the checkpoint is whole
                for old in self._paths()[self._keep :]:
                    old.unlink()

        on_rank_0(f"cannot write {path}", save, self.while_saving)
        self._saved_at = time.monotonic()

    def _paths(self) -> list[Path]:
        """Return the checkpoints, the newest one first."""
        return sorted(
            self.folder.glob("epoch-*-step-*.pt"),
            key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)],
            reverse=True,
        )

    def _load(self) -> dict | None:
        """Return the newest whole checkpoint, if it is of this run."""
        if reduce([self.settings != tell_all(self.settings)])[0]:
            fail("not every node has the same settings and data: stage it again")
        path = on_rank_0(f"cannot use {self.folder}", self._find)
        if path is None:
            if os.environ.get("SLURM_RESTART_COUNT", "0") != "0":
                say(
                    f"warning: started again, and no checkpoint is in {self.folder}: "
                    "none was saved, or the nodes do not share this disk"
                )
            return None
        if reduce([not os.path.exists(path)])[0]:
            fail(f"not every node has {path}: move it to a shared disk")
        saved = read(path)
        if "resume" not in saved:
            fail(f"{path} is not of this resume.py: choose another folder")
        about = saved["resume"]
        changed = [
            f"{name} {about['settings'].get(name)}, not {self.settings.get(name)}"
            for name in self.settings | about["settings"]
            if about["settings"].get(name) != self.settings.get(name)
        ]
        if changed:
            fail(
                f"{path} is of another run, with {'; '.join(changed)}: "
                "go on as it began, or choose another folder"
            )
        say(f"Resuming from {path}")
        self.epoch, self.step, self._seed = (
            about[n] for n in ("epoch", "step", "seed")
        )
        self._sums_left = about["sums"]
        self._own = about["own"][rank() % len(about["own"])]
        return saved

    def _find(self) -> str | None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock_folder()
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
        return None

    def _lock_folder(self) -> None:
        """Keep other runs out of the folder, until this process ends."""
        # Nobody else may open the file: who can only read the folder could hold it.
        path = self.folder / "lock"
        self._lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        # A job that was just killed may hold the lock a little longer.
        for _ in range(60):
            try:
                return fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(1)
            except OSError:  # a file system without locks
                return
        raise RunError(
            f"another run writes to {self.folder}: choose another folder; "
            "if its node is gone, and there is no such run, remove its file named lock"
        )

    def _restore(self, names: Iterable) -> None:
        """Give parts the state that was saved of them."""
        own = unpack(self._own, on_gpu=True)
        for name in names:
            part = unwrap(getattr(self, name))
            if not hasattr(part, "load_state_dict"):
                setattr(self, name, own.get(name, part))
                continue
            state = self._saved.get(name, own.get(name))
            if state == {} and part.state_dict():
                continue  # a scaler that was idle, in another precision
            try:
                # A copy: the tensors lie in the file, which is deleted later.
                part.load_state_dict(copy.deepcopy(state))
            except Exception as error:  # of several kinds
                fail(f"the checkpoint's {name} does not fit: {error!r}")

    def _finish_loading(self) -> None:
        """The loops have reached the place of the checkpoint."""
        lost = {*self._saved, *unpack(self._own)} - {*self._names, "resume"}
        if lost:
            fail(
                f"the checkpoint has {', '.join(lost)}, which this script does not add"
            )
        self._restore(self._names)
        self._saved = self._own = None


class RunError(Exception):
    """Why a run must end, in one line."""


class Sums:
    """What this rank has added up, now and when its last loop ended."""

    def __init__(self, now: Tensor, depth: int):
        self.now, self.depth = now, depth
        self.at_end = now.clone()


class Seeded:
    """A data set whose samples draw what follows from their order and index."""

    def __init__(self, data):
        self.data = data

    def __getattr__(self, name: str):
        if name == "data":  # not there yet
            raise AttributeError(name)
        return getattr(self.data, name)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, key: tuple):
        seed(make_seed(*key))
        return self.data[key[1]]

    def __getitems__(self, keys: list[tuple]) -> list:
        if not hasattr(self.data, "__getitems__"):
            return [self[key] for key in keys]
        seed(make_seed(*keys[0]))
        return self.data.__getitems__([index for _, index in keys])


class Keys:
    """A sampler's indices, or batches of them, each with the order's seed."""

    left, order = [], 0

    def __init__(self, batched: bool):
        self.batched = batched

    def __len__(self) -> int:
        return len(self.left)

    def __iter__(self) -> Iterator:
        for item in self.left:
            if self.batched:
                yield [(self.order, index) for index in item]
            else:
                yield self.order, item


def make_seed(*values) -> int:
    """Return a seed that follows from these values."""
    # NumPy's SeedSequence would take a twentieth of the time of a small image.
    digest = hashlib.sha256(" ".join(map(str, values)).encode()).digest()
    return int.from_bytes(digest[:8], "big")


def seed(number: int) -> None:
    """Seed what draws here. torch.manual_seed would take 0.2 ms, for all devices."""
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(number)
    random.seed(number)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(number % 2**32)


def length(items) -> int:
    """Return how many items there are, or 0 if nobody knows."""
    try:
        return len(items)
    except TypeError:
        return 0


# The ranks. All call these functions together.


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def place_of_messages() -> str:
    return "cuda" if dist.is_initialized() and "nccl" in dist.get_backend() else "cpu"


def reduce(numbers: list, operation=dist.ReduceOp.SUM) -> list[float]:
    """Return the sums, or another operation, over all ranks."""
    numbers = torch.tensor(numbers, dtype=torch.float64, device=place_of_messages())
    if dist.is_initialized():
        dist.all_reduce(numbers, operation)
    return numbers.tolist()


def gather(message: bytes) -> list[bytes]:
    """Return on rank 0 what each rank has given."""
    if not dist.is_initialized():
        return [message]
    sizes = reduce([len(message) * (r == rank()) for r in range(world_size())])
    padded = message.ljust(int(max(sizes)))
    mine = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
    mine = mine.to(place_of_messages())
    parts = [torch.empty_like(mine) for _ in sizes] if rank() == 0 else None
    dist.gather(mine, parts)
    found = [part.cpu().numpy().tobytes() for part in parts or []]
    return [part[: int(size)] for part, size in zip(found, sizes, strict=False)]


def tell_all(value):
    """Return on all ranks what rank 0 has given: what JSON can say."""
    if not dist.is_initialized():
        return value
    text = json.dumps(value).encode() if rank() == 0 else b""
    size = int(reduce([len(text)])[0])
    message = torch.frombuffer(bytearray(text.ljust(size)), dtype=torch.uint8)
    message = message.to(place_of_messages())
    dist.broadcast(message, 0)
    return json.loads(message.cpu().numpy().tobytes())


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
    """Return the model within DDP and torch.compile."""
    while hasattr(part, "_orig_mod") or isinstance(part, DistributedDataParallel):
        part = getattr(part, "_orig_mod", None) or part.module
    return part


def fingerprint(model: nn.Module) -> int:
    """Return a number that differs where ranks have different weights."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    # Of integers, the sum does not depend on their order.
    return sum(
        int(weight.detach().view(kinds[weight.element_size()]).sum(dtype=torch.int64))
        for weight in model.parameters()
    )


def check_weights(name: str, model: nn.Module, fingerprints: list[int]) -> None:
    """Raise RunError where ranks have different weights, or a weight is not finite."""
    finite = all(weight.isfinite().all() for weight in model.parameters())
    if not finite or any(buffer.isnan().any() for buffer in model.buffers()):
        raise RunError(f"nothing is saved: the weights of {name} are not finite")
    for other, found in enumerate(fingerprints):
        if found != fingerprints[0]:
            raise RunError(
                f"nothing is saved: the weights of {name} differ between ranks 0 and "
                f"{other}: is DDP's forward() called in each turn?"
            )


def pack(value) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def unpack(packed: bytes, on_gpu: bool = False):
    """Return what was packed; on the GPU, if asked, what came from one."""

    def place(storage, location: str):
        return storage.cuda() if on_gpu and location != "cpu" else storage

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
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)  # this makes room on a full disk
        # torch.save raises an error of its own. What the disk has said is deeper.
        reason = error
        while reason.__context__ and not isinstance(reason, OSError):
            reason = reason.__context__
        raise reason from None


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
    signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THIS_PROCESS)
    if len(tempfile.gettempdir()) > 74:
        tempfile.tempdir = "/tmp"  # or the paths of the sockets would be too long
    multiprocessing.util.get_temp_dir()  # the workers' sockets: removed at the end


def after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FOR_THIS_PROCESS)


FOR_THIS_PROCESS = {*SIGNALS, signal.SIGINT}
multiprocessing.set_start_method("fork", force=True)
os.register_at_fork(before=before_fork, after_in_parent=after_fork)


@atexit.register
def end_workers() -> None:
    """Kill the workers: Python ends them by SIGTERM, which they block, and waits."""
    # DataLoader's handler would call their end an error, with a traceback.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for process in multiprocessing.active_children():
        if process.daemon:  # others are the script's own
            process.kill()
