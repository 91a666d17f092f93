"""Checkpoints, written whole or not at all, and what else a run needs to go on."""

import argparse
import copy
import fcntl
import hashlib
import io
import logging
import math
import os
import pickle
import re
import shutil
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
        self.epoch, self.step, self.metrics = epoch, 0, torch.zeros_like(self.metrics)

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
        self.newest = (1, 0)  # epoch and step that need not be saved any more
        self.saved_at = time.monotonic()

    def load(self, recipe: dict) -> dict | None:
        """Return, on every rank, the newest whole checkpoint, or None.

        Raises RunError where none is whole, where it is of another recipe, or where
        the folder cannot be used.
        """
        state = do_on_rank_0(f"cannot use {self.folder}", self._load, recipe)
        if state:
            self.newest = (state["epoch"], state["step"])
        return state

    def save(self, run: Run) -> None:
        """Write a checkpoint, unless the newest one is it. Raises RunError."""
        path = self._path(run)
        place = (run.epoch, run.step)
        if place != self.newest:
            do_on_rank_0(f"cannot write {path}", self._write, run.state_dict(), path)
        self.newest = place
        self.saved_at = time.monotonic()

    def mark_best(self, run: Run, accuracy: float) -> None:
        """Make best.pt the checkpoint of this step once more. Raises RunError."""
        best = self.folder / "best.pt"
        do_on_rank_0(f"cannot write {best}", self._link, self._path(run), best)
        run.best_accuracy = accuracy

    def age(self) -> float:
        """Return the seconds since the last checkpoint."""
        return time.monotonic() - self.saved_at

    def _path(self, run: Run) -> Path:
        return self.folder / f"epoch-{run.epoch:03}-step-{run.step:06}.pt"

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
                continue
            check_recipe(path, state["recipe"], recipe)
            logging.info(f"Resuming from {path}")
            return state
        if list(self.folder.glob("*.damaged")):
            raise RunError(
                f"no whole checkpoint is left in {self.folder}: "
                "remove the damaged ones there to start again from the beginning"
            )
        return None

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

    def _write(self, state: dict, path: Path) -> None:
        partial = path.with_suffix(".pt.partial")
        if not all(weight.isfinite().all() for weight in state["model"].values()):
            raise RuntimeError("the weights are not finite")
        try:
            with open(partial, "wb") as file:
                torch.save(state, file)
                file.flush()
                # The name must not reach the disk before the content.
                os.fsync(file.fileno())
            partial.rename(path)
        except Exception:
            partial.unlink(missing_ok=True)
            raise
        if "GOT_FURTHER" in environ:  # for job.sh
            Path(environ["GOT_FURTHER"]).touch()
        for old in self._paths()[self.keep :]:
            old.unlink()

    def _link(self, path: Path, best: Path) -> None:
        partial = best.with_suffix(".pt.partial")
        try:
            os.link(path, partial)  # no bytes are written
        except OSError:  # a file system without links
            shutil.copyfile(path, partial)
        partial.replace(best)
        # It is still there if best.pt was this checkpoint already.
        partial.unlink(missing_ok=True)


def do_on_rank_0(failure: str, function: Callable, *arguments):
    """Call a function on rank 0 while the others wait; return on all what it returns.

    An error there is raised as RunError on all, with `failure` and the reason.
    """
    answer = [None, ""]
    if dist.get_rank() == 0:
        try:
            answer[0] = function(*arguments)
        except RunError as error:
            answer[1] = str(error)
        except (OSError, RuntimeError, MemoryError) as error:
            # torch.save's RuntimeError has the disk's own error as its context.
            reason = error if isinstance(error, OSError) else error.__context__ or error
            text = getattr(reason, "strerror", None) or str(reason).split("\n")[0]
            answer[1] = f"{failure}: {text or 'Cannot allocate memory'}"
    dist.broadcast_object_list(answer, src=0)
    if answer[1]:
        raise RunError(answer[1])
    return answer[0]


def read(path: Path) -> dict:
    """Return what is in a checkpoint. Raises ValueError if it is damaged."""
    # Before all else: if the disk does not read, that is no damage of the file.
    content = io.BytesIO(path.read_bytes())
    try:
        # torch.save writes a CRC of each tensor. torch.load does not look at it, and
        # reads nothing where the attributes say that this is a folder.
        with zipfile.ZipFile(content) as file:
            if file.testzip() or any(part.external_attr for part in file.infolist()):
                raise ValueError("its content does not match its CRC")
        content.seek(0)
        return torch.load(content, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a torn file makes of itself
        reason = str(error).split("\n")[0]
        if "allocate memory" in reason:
            raise
        if isinstance(error, pickle.UnpicklingError):
            reason = "it is not made of weights only, and code in it is not run"
        raise ValueError(reason or "it is cut") from error


def check_recipe(path: Path, saved: dict, asked: dict) -> None:
    """Refuse to go on with other settings than a run has begun with."""
    changed = [
        f"{name} {saved.get(name)}, not {asked.get(name)}"
        for name in {**saved, **asked}
        if saved.get(name) != asked.get(name)
    ]
    if changed:
        raise RunError(
            f"{path} is of another run, with {'; '.join(changed)}: "
            "go on as it began, or choose another --checkpoint-dir"
        )


def get_recipe(args: argparse.Namespace, data: Dataset) -> dict:
    """Return what must stay as it is from a run's first step to its last."""
    names = (
        "model image_size epochs batch_size accumulate learning_rate weight_decay seed"
    )
    recipe = {name: getattr(args, name) for name in names.split()}
    return recipe | {
        "samples": len(data),
        "fingerprint of the data": data.images.fingerprint,
    }


def default_checkpoint_dir() -> Path:
    """Return this job's own folder: Slurm keeps a job's number when it requeues it."""
    job = environ.get("SLURM_JOB_ID") or environ.get("TORCHELASTIC_RUN_ID", "none")
    return Path(environ.get("SCRATCH", ".")) / "checkpoints" / job.replace("/", "-")


def digest(weights: dict[str, Tensor]) -> str:
    """Return the SHA-256 of a model's state: equal only if all is, bit for bit."""
    sha = hashlib.sha256()
    for name, tensor in weights.items():
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha.update(tensor.cpu().contiguous().numpy())
    return sha.hexdigest()


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
    stop = torch.tensor(float(stop_requested()), device=device)
    dist.all_reduce(stop)
    return bool(stop)


def commit() -> str:
    """Return the commit that runs, "-dirty" if files differ from it.

    It is safe_sbatch's, or the one checked out.
    """
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        answer = subprocess.check_output(
            command,
            cwd=Path(__file__).parent,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        answer = "unknown"
    return environ.get("GIT_COMMIT") or answer.strip()


def requeues_to_go(samples: int, rate: float) -> str:
    """Return, for rank 0's epoch line, how many requeues so many samples more need."""
    if dist.get_rank() != 0 or rate == 0:  # resumed after the last step of an epoch
        return ""
    job = environ.get("SLURM_JOB_ID", "")
    # An array's number, too, is that of a task: squeue tells of all of them then.
    command = ["squeue", "--noheader", f"--jobs={job}", "--format=%A %S %e"]
    try:
        answer = subprocess.check_output(
            command,
            env=environ | {"SLURM_TIME_FORMAT": "%s"},
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=10,
        )
        times = dict(line.split(maxsplit=1) for line in answer.splitlines())
        start, end = map(int, times[job].split())
    except (OSError, subprocess.SubprocessError, KeyError, ValueError):
        return ""  # outside a job, or without a time limit
    left = end - time.time()
    return (
        f", {max(0, math.ceil((samples / rate - left) / (end - start)))} requeues to go"
    )


def settle_buckets(
    model: nn.parallel.DistributedDataParallel, batch_size: int, image_size: int
) -> None:
    """Let DDP sort its buckets, as after its first backward(), before the first step.

    Their order decides how sums are rounded: a run that was stopped would otherwise
    end with other weights.
    """
    weights = copy.deepcopy(model.module.state_dict())
    images = torch.zeros(batch_size, 3, image_size, image_size, device=model.device)
    bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    for _ in range(2):
        with torch.autocast(model.device.type, torch.bfloat16, bfloat16):
            logits = model(images.contiguous(memory_format=torch.channels_last))
        logits.float().sum().backward()
    model.zero_grad()
    model.module.load_state_dict(weights)
