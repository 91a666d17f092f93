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
import sys
import time
import uuid
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from os import environ
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset


class RunError(Exception):
    """Why a run cannot go on, in one line; raised on all ranks at once."""


class StopRequested(Exception):
    """Slurm asks the job to end, and the run is saved; raised on all ranks at once."""


@dataclass
class Run:
    """What a checkpoint holds: all that a run needs to go on as if never stopped."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    scaler: torch.amp.GradScaler
    dtype: torch.dtype  # that convolutions compute in
    recipe: dict  # what must stay as it is from the first step to the last
    global_batch_size: int
    epoch: int = 1
    step: int = 0  # so many steps of the epoch are done
    # Of these steps, on all ranks: [sum of losses, correct, samples].
    metrics: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))
    best_accuracy: float = 0.0
    id: str = field(default_factory=lambda: uuid.uuid4().hex)  # W&B's

    @property
    def steps(self) -> int:
        """Return the steps of an epoch."""
        return self.recipe["samples"] // self.global_batch_size

    def state_dict(self) -> dict:
        return {
            name: value.state_dict() if hasattr(value, "state_dict") else value
            for name, value in vars(self).items()
        }

    def load_state_dict(self, state: dict) -> None:
        """Go on from a checkpoint. Raises RunError where it does not fit the model."""
        if state.get("dtype") != self.dtype:
            logging.warning(
                f"warning: this run was in {state.get('dtype')}, and is in {self.dtype}"
            )
            # A scaler that is in use cannot load what an idle one has saved.
            state |= {"dtype": self.dtype, "scaler": self.scaler.state_dict()}
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


class Coordinator:
    """Lets the ranks decide together when to save and when to stop.

    They meet after some of their steps, add up what each has to say, and go by that.
    """

    def __init__(self, run: Run, checkpoints, watch, args: argparse.Namespace):
        self.run, self.checkpoints = run, checkpoints
        self.watch, self.args = watch, args
        # A start that must stop at once has got further, too.
        self.steps_to_meeting = 1
        self.tenth = math.ceil(run.steps / 10)  # of an epoch
        self.logged_at = time.monotonic()

    def after_step(self, metrics: Tensor) -> None:
        """Count a step, and meet if it is time to. Raises StopRequested, RunError."""
        self.run.step += 1
        self.steps_to_meeting -= 1
        if self.steps_to_meeting == 0:
            self._meet(metrics)

    def validation(self, batches: Iterable) -> Iterator:
        """Yield the batches of a validation. Raises StopRequested.

        The epoch is saved before, and the next start goes on with its validation.
        """
        for number, (images, labels) in enumerate(batches):
            if number % 20 == 0:
                stop = torch.tensor(len(_stop_signals), device=images.device)
                dist.all_reduce(stop)
                if stop:
                    raise StopRequested
            yield images, labels

    def end_epoch(self, values: dict[str, float]) -> None:
        """Log the epoch's metrics, keep its model if it is the best, and go on."""
        run = self.run
        self.watch.tracker.log(run.scheduler.last_epoch, values)
        with self.watch.hangs.paused():
            self.checkpoints.save_if_best(run, values["valid/accuracy"])
        run.epoch += 1
        run.step = 0
        run.metrics = torch.zeros_like(run.metrics)

    def _meet(self, metrics: Tensor) -> None:
        run, save_steps = self.run, self.args.save_steps
        stop, due, speed = self._add_up(metrics)
        self._check_loss()
        self._log(speed)
        if stop or due or run.step % save_steps == 0 or run.step == run.steps:
            with self.watch.hangs.paused():
                self.checkpoints.save(run)
        if stop:
            raise StopRequested
        # Again in 20 steps or two seconds: a signal leaves little time. Checkpoints,
        # lines of the log and the end of the epoch have steps of their own.
        soon = max(1, min(20, int(2 * speed)))
        done = run.step % run.steps
        marks = (save_steps, self.tenth, run.steps)
        self.steps_to_meeting = min(soon, *(mark - done % mark for mark in marks))

    def _add_up(self, metrics: Tensor) -> tuple[float, float, float]:
        """Return how many ranks must stop, and should save, and their mean speed."""
        due = time.monotonic() - self.checkpoints.saved_at > 60 * self.args.save_minutes
        speed = self.watch.steps_per_second() / dist.get_world_size()
        mine = metrics.new_tensor([bool(_stop_signals), due, speed])
        sums = torch.cat((metrics, mine))
        dist.all_reduce(sums)
        *totals, stop, due, speed = sums.tolist()
        self.run.metrics = torch.tensor(totals, dtype=torch.float64)
        return stop, due, speed

    def _check_loss(self) -> None:
        loss = self.run.metrics[0].item()
        if not math.isfinite(loss):
            raise RunError(
                f"the loss is {loss} before step {self.run.step} of epoch "
                f"{self.run.epoch}: nothing of it is saved; "
                "try a smaller --learning-rate, or look at the data"
            )

    def _log(self, speed: float) -> None:
        """Log the epoch so far, over all ranks; a line at every tenth of it."""
        run = self.run
        loss, correct, samples = run.metrics.tolist()
        loss, accuracy = loss / samples, correct / samples
        values = {"train/loss": loss, "train/accuracy": accuracy}
        self.watch.tracker.log(run.scheduler.last_epoch, values)
        seconds = time.monotonic() - self.logged_at
        # In a terminal, there is a bar.
        if run.step % self.tenth == 0 and seconds > 10 and not sys.stderr.isatty():
            self.logged_at += seconds
            logging.info(
                f"Epoch {run.epoch}, step {run.step} of {run.steps}: "
                f"train loss {loss:.3f} accuracy {accuracy:.2%}, "
                f"{speed * run.global_batch_size:.0f} images/s"
            )


class Checkpoints:
    """The checkpoints of one run, in a folder of its own. The others wait for rank 0.

    epoch-001-step-000123.pt is from after 123 steps of epoch 1; best.pt is the best one
    once more.
    """

    def __init__(self, folder: Path, keep: int):
        # job.sh sets WORK_DIR: the code may be a copy that does not outlive the job.
        self.folder = Path(environ.get("WORK_DIR", "")).absolute() / folder
        # By default, each batch job has its own. But Slurm's numbers begin again with a
        # new controller, and two clusters may share a disk.
        self.must_be_new = (
            folder == default_checkpoint_dir()
            and environ.get("ENVIRONMENT") == "BATCH"
            and not environ.keys() & {"SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID"}
        )
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
        if self._paths() and self.must_be_new:
            raise RunError(
                f"an older job of this number has saved in {self.folder}: name another "
                "--checkpoint-dir, or this one with its whole path, to go on from it"
            )
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
    if "SLURM_ARRAY_TASK_ID" in environ:  # as in the name of its log
        job = f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return Path(environ.get("SCRATCH", ".")) / "checkpoints" / job


_stop_signals = []


def catch_stop_signals() -> None:
    """Note, and survive, SIGUSR1 before the time limit, and SIGTERM.

    They may come in the middle of anything, and twice, from srun and from uv: the
    handler does nothing else.
    """
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, frame: _stop_signals.append(number))


def find_commit() -> str:
    """Return safe_sbatch's commit, or the one checked out, "-dirty" if files differ.

    On rank 0 only: git reads many files.
    """
    if environ["RANK"] != "0":
        return ""
    script = """
        unset GIT_DIR GIT_WORK_TREE  # of a shell for another repository
        git describe --always --dirty --abbrev=40 --exclude='*' || echo unknown
    """
    answer = subprocess.run(
        script, shell=True, cwd=Path(__file__).parent, capture_output=True, text=True
    )
    return environ.get("GIT_COMMIT") or answer.stdout.strip()


def log_weights(model: nn.Module, commit: str) -> None:
    """Say what came out of which commit. The SHA-256 is equal if all weights are."""
    sha = hashlib.sha256()
    for tensor in model.state_dict().values():
        sha.update(tensor.cpu().numpy().tobytes())
    logging.info(f"Weights SHA-256 {sha.hexdigest()}, commit {commit}")


def settle_buckets(model: nn.parallel.DistributedDataParallel, image_size: int) -> None:
    """Run backward() once: so DDP sorts its buckets before the first step.

    Their order decides how sums are rounded: a run that was stopped would otherwise
    end with other weights.
    """
    model.eval()  # this keeps BatchNorm's statistics as they are
    image = torch.zeros(1, 3, image_size, image_size, device=model.device)
    # With --compile, this must not compile the model for a single image.
    with torch.compiler.set_stance("force_eager"):
        model(image).sum().backward()  # each step begins with zero_grad()
