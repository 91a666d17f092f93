"""Checkpoints, written whole or not at all, and what else a run needs to go on."""

import argparse
import fcntl
import hashlib
import io
import logging
import math
import os
import pickle
import re
import signal
import subprocess
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from os import environ
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset


class RunError(Exception):
    """Why a run cannot go on, in one line; raised on all ranks at once."""


@dataclass
class Run:
    """What a checkpoint holds: all that a run needs to go on as if never stopped."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    recipe: dict  # what must stay as it is from the first step to the last
    global_batch_size: int
    epoch: int = 1
    step: int = 0  # so many steps of the epoch are done
    # Of these steps, on all ranks: [sum of losses, correct, samples].
    metrics: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))
    best_accuracy: float = 0.0

    def start_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.step = 0
        self.metrics = torch.zeros_like(self.metrics)

    def state_dict(self) -> dict:
        return {
            name: value.state_dict() if hasattr(value, "state_dict") else value
            for name, value in vars(self).items()
        }

    def load_state_dict(self, state: dict) -> None:
        """Go on from a checkpoint. Raises RunError where it does not fit the model."""
        try:
            for name, value in vars(self).items():
                if hasattr(value, "load_state_dict"):
                    value.load_state_dict(state[name])
                else:
                    setattr(self, name, state[name])
        except (KeyError, RuntimeError, ValueError) as error:
            raise RunError(
                f"the checkpoint does not fit --model {self.recipe['model']}: "
                f"{' '.join(str(error).split())}"
            ) from error


class Checkpoints:
    """The checkpoints of one run, in a folder of its own. The others wait for rank 0.

    epoch-001-step-000123.pt is from after 123 steps of epoch 1; best.pt is the best one
    once more.
    """

    def __init__(self, folder: Path, keep: int):
        # job.sh sets WORK_DIR: the code may be a copy that does not outlive the job.
        self.folder = Path(environ.get("WORK_DIR", "")).absolute() / folder
        self.keep = keep
        self.saved_at = time.monotonic()  # the last checkpoint, or the start

    def load(self, recipe: dict) -> dict | None:
        """Return, on every rank, the newest whole checkpoint, or None.

        Raises RunError where none is whole, where it is of another recipe, where the
        folder cannot be used, and where nodes have different data.
        """
        recipes = [None] * dist.get_world_size()
        dist.all_gather_object(recipes, recipe)
        if recipes.count(recipe) < len(recipes):
            raise RunError("not every node has the same data: stage it again")
        return do_on_rank_0(f"cannot use {self.folder}", self._load, recipe)

    def save(self, run: Run) -> None:
        """Write a checkpoint, unless there is one of this step. Raises RunError."""
        path = self.folder / f"epoch-{run.epoch:03}-step-{run.step:06}.pt"
        do_on_rank_0(f"cannot write {path}", self._save, run.state_dict(), path)
        self.saved_at = time.monotonic()

    def save_if_best(self, run: Run, accuracy: float) -> None:
        """Write the best one of this run once more, as best.pt. Raises RunError."""
        if accuracy <= run.best_accuracy:
            return
        path = self.folder / "best.pt"
        run.best_accuracy = accuracy
        do_on_rank_0(f"cannot write {path}", write, run.state_dict(), path)

    def _paths(self) -> list[Path]:
        """Return the checkpoints, the newest one first."""
        return sorted(
            self.folder.glob("epoch-*-step-*.pt"),
            key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)],
            reverse=True,
        )

    def _load(self, recipe: dict) -> dict | None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock()
        for partial in self.folder.glob("*.partial"):
            partial.unlink()
        for path in self._paths():
            try:
                state = read(path)
            except ValueError as error:
                logging.warning(
                    f"warning: {path} is damaged, trying the one before: {error}"
                )
                path.rename(path.with_suffix(".pt.damaged"))
            else:
                check_recipe(path, state["recipe"], recipe)
                samples = state["global_batch_size"]
                if samples < dist.get_world_size():
                    raise RunError(f"a step has {samples} samples: start fewer ranks")
                logging.info(f"Resuming from {path}")
                return state
        if list(self.folder.glob("*.damaged")):
            raise RunError(
                f"no whole checkpoint is left in {self.folder}: "
                "remove the damaged ones there to start again from the beginning"
            )
        return None

    def _save(self, state: dict, path: Path) -> None:
        if path.exists():  # an earlier start wrote it: this one made no progress
            return
        write(state, path)
        if "GOT_FURTHER" in environ:  # for job.sh
            Path(environ["GOT_FURTHER"]).touch()
        for old in self._paths()[self.keep :]:
            old.unlink()

    def _lock(self) -> None:
        """Keep other runs out of the folder, until this process ends."""
        self.lock = open(self.folder / "lock", "a")
        # A job that was just killed may hold the lock a little longer.
        for _ in range(60):
            try:
                return fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(1)
            except OSError:  # a file system without locks
                return
        raise RunError(
            f"another run writes to {self.folder}: choose another --checkpoint-dir; "
            "where its node is gone, and there is no such run, remove the file lock"
        )


def do_on_rank_0(failure: str, function: Callable, *arguments):
    """Call a function on rank 0 while the others wait; return on all what it returns.

    An error there is raised as RunError on all, with `failure` and the reason.
    """
    answer = [None, None]
    if dist.get_rank() == 0:
        try:
            answer = [function(*arguments), None]
        except RunError as error:
            answer = [None, error]
        except (OSError, MemoryError) as error:
            reason = getattr(error, "strerror", "Cannot allocate memory")
            answer = [None, RunError(f"{failure}: {reason}")]
    dist.broadcast_object_list(answer, src=0)
    result, error = answer
    if error:
        raise error
    return result


def write(state: dict, path: Path) -> None:
    """Write a checkpoint that is there whole, or not at all."""
    if not all(weight.isfinite().all() for weight in state["model"].values()):
        raise RunError(f"cannot write {path}: the weights are not finite")
    # If torch.save wrote to the disk itself, its error would not say what is wrong.
    content = io.BytesIO()
    torch.save(state, content)
    partial = path.with_suffix(".pt.partial")
    try:
        with open(partial, "wb") as file:
            file.write(content.getbuffer())
            file.flush()
            # The name must not reach the disk before the content.
            os.fsync(file.fileno())
        partial.rename(path)
    except OSError:  # such as a full disk: this makes room on it
        partial.unlink(missing_ok=True)
        raise


def read(path: Path) -> dict:
    """Return what is in a checkpoint. Raises ValueError if it is damaged."""
    # An error of the disk, or too little memory, is no damage of the file.
    content = io.BytesIO(path.read_bytes())
    try:
        # torch.save writes a CRC of each tensor, and torch.load does not look at it. A
        # flipped bit may also make a folder of a tensor, which then is not read at all.
        with zipfile.ZipFile(content) as file:
            if file.testzip() or any(part.external_attr for part in file.infolist()):
                raise ValueError("its content does not match its CRC")
        content.seek(0)
        # With weights_only, no code in the file is run.
        return torch.load(content, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file may raise anything
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            raise MemoryError from error
        reason = str(error).split("\n")[0]
        if isinstance(error, pickle.UnpicklingError):
            reason = "it is not made of weights only, and code in it is not run"
        raise ValueError(reason or "it is cut") from error


def check_recipe(path: Path, saved: dict, asked: dict) -> None:
    """Refuse to go on with other settings than a run has begun with."""
    changed = [
        f"{name} {saved.get(name)}, not {value}"
        for name, value in asked.items()
        if saved.get(name) != value
    ]
    if changed:
        raise RunError(
            f"{path} is of another run, with {'; '.join(changed)}: "
            "go on as it began, or choose another --checkpoint-dir"
        )


def get_recipe(
    args: argparse.Namespace, train_set: Dataset, valid_set: Dataset
) -> dict:
    """Return what must stay as it is from a run's first step to its last."""
    names = (
        "model image_size epochs batch_size accumulate learning_rate weight_decay seed"
    )
    recipe = {name: getattr(args, name) for name in names.split()}
    data = f"{train_set.images.fingerprint} {valid_set.images.fingerprint}"
    return recipe | {"samples": len(train_set), "fingerprints of the data": data}


def default_checkpoint_dir() -> Path:
    """Return this job's own folder: Slurm keeps a job's number when it requeues it."""
    job = environ.get("SLURM_JOB_ID") or environ.get("TORCHELASTIC_RUN_ID", "none")
    return Path(environ.get("SCRATCH", ".")) / "checkpoints" / job


_stop_signals = []


def catch_stop_signals() -> None:
    """Note, and survive, SIGUSR1 before the time limit, and SIGTERM.

    They may come in the middle of anything, and twice, from srun and from uv: the
    handler does nothing else.
    """
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, frame: _stop_signals.append(number))


def stop_requested() -> bool:
    """Return whether such a signal has come."""
    return bool(_stop_signals)


def any_rank_must_stop(device: torch.device) -> bool:
    """Return, on all ranks, whether such a signal has come to any of them."""
    stop = torch.tensor(len(_stop_signals), device=device)
    dist.all_reduce(stop)
    return bool(stop)


def find_commit() -> str:
    """Return safe_sbatch's commit, or the one checked out, "-dirty" if files differ."""
    git = "git describe --always --dirty --abbrev=40 --exclude='*' || echo unknown"
    answer = subprocess.run(
        git, shell=True, cwd=Path(__file__).parent, capture_output=True, text=True
    )
    return environ.get("GIT_COMMIT") or answer.stdout.strip()


def log_weights(model: nn.Module, commit: str) -> None:
    """Say what came out of which commit. The SHA-256 is equal if all weights are."""
    sha = hashlib.sha256()
    for tensor in model.state_dict().values():
        sha.update(tensor.cpu().numpy().tobytes())
    logging.info(f"Weights SHA-256 {sha.hexdigest()}, commit {commit}")


def requeues_to_go(samples: int, rate: float) -> str:
    """Return, for rank 0's epoch line, how many requeues so many samples more need."""
    if dist.get_rank() != 0 or rate == 0:  # resumed after the last step of an epoch
        return ""
    job = environ.get("SLURM_JOB_ID")
    answer = subprocess.getoutput(
        "SLURM_TIME_FORMAT=%s timeout 10 "
        f"squeue --noheader --jobs={job} --format='%A %S %e'"
    )
    # An array has the number of one of its tasks: squeue then lists all of them.
    times = re.search(rf"^{job} (\d+) (\d+)$", answer, re.MULTILINE)
    if not times:  # outside a job, or without a time limit
        return ""
    start, end = map(int, times.groups())
    seconds_after_limit = samples / rate - (end - time.time())
    requeues = max(0, math.ceil(seconds_after_limit / (end - start)))
    return f", {requeues} requeues to go"


def settle_buckets(model: nn.parallel.DistributedDataParallel, image_size: int) -> None:
    """Run backward() once: so DDP sorts its buckets before the first step.

    Their order decides how sums are rounded: a run that was stopped would otherwise
    end with other weights.
    """
    model.eval()  # this keeps BatchNorm's statistics as they are
    image = torch.zeros(1, 3, image_size, image_size, device=model.device)
    # With --compile, this must not compile the model for a single image.
    with torch.compiler.set_stance("force_eager"):
        model(image).sum().backward()
    model.zero_grad()
