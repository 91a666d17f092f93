"""Checkpoints, written whole or not at all; how a job ends and starts again."""

import argparse
import contextlib
import copy
import errno
import fcntl
import hashlib
import logging
import math
import os
import pickle
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

logger = logging.getLogger("main")

REQUEUE = 75  # exit status "saved, start me again": EX_TEMPFAIL of sysexits.h
STARTS = 4  # from the same checkpoint, before a job counts as broken


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
    step: int = 0  # so many of the epoch are done
    # Of these steps, on all ranks.
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
            # The optimizer takes a state of any shape, and none,
            # and would train on with that.
            wanted = self.optimizer.state or self.optimizer.defaults.get("momentum")
            for parameter in (
                self.model.parameters() if wanted and self.scheduler.last_epoch else []
            ):
                kept = self.optimizer.state.get(parameter, {}).values()
                shapes = {
                    value.shape
                    for value in kept
                    if isinstance(value, Tensor) and value.dim()
                }
                if not kept or shapes - {parameter.shape}:
                    raise ValueError(
                        "the optimizer's state is not that of these weights"
                    )
        except (KeyError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise RunError(
                f"the checkpoint does not fit --model {self.recipe['model']}: {reason}"
            ) from error


class Checkpoints:
    """The checkpoints of one run, in a folder of its own.

    Rank 0 writes them, and reads them for all ranks. epoch-001-step-000123.pt is from
    after 123 steps of epoch 1; best.pt is the best one once more.
    """

    def __init__(self, folder: Path, keep: int):
        # job.sh sets WORK_DIR: the code may run from a copy
        # that does not outlive the job.
        self.folder, self.keep = (
            Path(os.environ.get("WORK_DIR", "")).absolute() / folder,
            keep,
        )
        self.saved_at = time.monotonic()
        self.copy = None  # of what was last saved
        self.failure = ""  # why the last one could not be written
        # One thread: what training hands over is written in that order,
        # while training goes on.
        self.writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")

    def load(self, recipe: dict) -> dict | None:
        """Return, on every rank, the newest whole checkpoint, or None.

        `recipe` is what must not change during a run. Raises RunError, on every rank,
        where it has, where none is whole, or where the folder cannot be used.
        """
        state, reason = self._rank_0_says(self._load, recipe)
        if reason:
            raise RunError(reason)
        return state

    def save(self, state: dict) -> None:
        """Write a checkpoint, with the keys epoch and step, in the background.

        Its tensors may change then. Waits for one that is still being written. A
        failure is an error in the log, and training goes on.
        """
        self._wait()
        if dist.get_rank() == 0:
            self.saved_at = time.monotonic()
            self.copy = copy_to_cpu(state, self.copy)
            self.writer.submit(self._write, self.copy)

    def mark_best(self, run: Run, accuracy: float) -> None:
        """Make best.pt the checkpoint of the run's epoch and step, once it is on disk.

        A failure is an error in the log; the run's best accuracy then
        is again what it was.
        """
        before, run.best_accuracy = run.best_accuracy, accuracy
        if dist.get_rank() == 0:
            self.writer.submit(
                self._link_best, self._path(run.epoch, run.step), run, before
            )

    def age(self) -> float:
        """Return the seconds since the last checkpoint was begun: on rank 0, else 0."""
        return time.monotonic() - self.saved_at if dist.get_rank() == 0 else 0.0

    def finish(self) -> None:
        """Wait until the last checkpoint is on disk.

        Raises RunError, on every rank, if it is not.
        """
        if failure := self._wait():
            raise RunError(f"the last checkpoint is not on disk: {failure}")

    def _wait(self) -> str:
        """Wait, on every rank, for what is being written; return what went wrong."""
        return self._rank_0_says(lambda: self.failure)

    def _rank_0_says(self, function: Callable, *arguments):
        """Return, on every rank, what a function returns on rank 0.

        It is called after all that is being written there.
        """
        answer: list = [None]
        future = (
            self.writer.submit(function, *arguments) if dist.get_rank() == 0 else None
        )
        while answer[0] is None:  # in short waits: a slow disk is no rank that hangs
            if future and wait([future], timeout=1).done:
                answer[0] = (future.result(),)
            dist.broadcast_object_list(answer, src=0)
        return answer[0][0]

    def _load(self, recipe: dict) -> tuple[dict | None, str]:
        """Return the newest whole checkpoint, or why there is none to go on from."""
        try:
            self._open()
            state = self._read_newest(recipe)
            self._count_starts(state)
        except RunError as error:
            return None, str(error)
        except OSError as error:
            return None, f"cannot use {self.folder}: {error.strerror or error}"
        return state, ""

    def _open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = open(self.folder / "lock", "a")
        # A job that was just killed may hold the lock a little longer.
        for waited in range(61):
            try:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if waited == 0:
                    logger.warning(
                        f"warning: another run writes to {self.folder}: "
                        "waiting a minute for its end"
                    )
                time.sleep(1)
            except OSError:  # a file system without locks
                break
        else:
            raise RunError(
                f"another run writes to {self.folder}: "
                "choose another --checkpoint-dir; "
                "where its node is gone, and there is no such run, "
                "remove the file lock there"
            )
        for partial in self.folder.glob("*.partial"):
            partial.unlink()
        (self.folder / "writable.partial").touch()
        (self.folder / "writable.partial").unlink()

    def _read_newest(self, recipe: dict) -> dict | None:
        paths = self._paths()[::-1]
        for path in paths:
            try:
                state = torch.load(path, map_location="cpu", weights_only=True)
                if state.pop("sha256") != digest(state):
                    raise ValueError("its content does not match its SHA-256")
                if missing := {"recipe", "epoch", "step", "global_batch_size"} - set(
                    state
                ):
                    raise ValueError(f"it has no {', '.join(sorted(missing))}")
            except OSError:  # the fault of the disk, and not of the file
                raise
            except Exception as error:  # whatever a torn file makes of itself
                # Where memory is short, PyTorch raises a RuntimeError.
                if not has_memory(2 * path.stat().st_size):
                    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) from error
                reason = str(error).strip().split("\n")[0] or type(error).__name__
                if isinstance(error, pickle.UnpicklingError):
                    reason = "it is not made of weights only, and code in it is not run"
                logger.warning(
                    f"warning: {path} is damaged, trying the one before: {reason}"
                )
                path.rename(path.with_suffix(".pt.damaged"))
                continue
            changed = [
                f"{name} {state['recipe'].get(name)}, not {recipe.get(name)}"
                for name in {**state["recipe"], **recipe}
                if state["recipe"].get(name) != recipe.get(name)
            ]
            if changed:
                raise RunError(
                    f"{path} is of another run, with {'; '.join(changed)}: "
                    "go on as it began, or choose another --checkpoint-dir"
                )
            logger.info(f"Resuming from {path}")
            return state
        if paths or list(self.folder.glob("*.damaged")):
            raise RunError(
                f"no whole checkpoint is left in {self.folder}: "
                "remove the damaged ones there to start anew"
            )
        return None

    def _count_starts(self, state: dict | None) -> None:
        """Refuse to start for ever from the same place.

        What stops this job will not go away by itself.
        """
        log = self.folder / "starts"
        starts = log.read_text().split("\n")[:-1] if log.exists() else []
        here = (
            f"epoch {state['epoch']} step {state['step']}" if state else "the beginning"
        )
        restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        if (
            restarts >= STARTS
            and [line.split(" on ")[0] for line in starts[-STARTS:]] == [here] * STARTS
        ):
            raise RunError(
                f"this job was started {STARTS} times from {here} "
                "and never got to its next checkpoint: not trying again; "
                f"the end of each try is in the log above, {log} has their times; "
                "once that is mended, "
                f"go on in a new job, with --checkpoint-dir {self.folder}"
            )
        with open(log, "a") as file:
            file.write(f"{here} on {time.strftime('%Y-%m-%d at %H:%M:%S')}\n")

    def _paths(self) -> list[Path]:
        """Return the checkpoints, the newest one last."""
        paths = self.folder.glob("epoch-*-step-*.pt")
        return sorted(
            paths,
            key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)],
        )

    def _path(self, epoch: int, step: int) -> Path:
        return self.folder / f"epoch-{epoch:03}-step-{step:06}.pt"

    def _write(self, state: dict) -> None:
        path = self._path(state["epoch"], state["step"])
        partial = path.with_suffix(".pt.partial")
        try:
            if not all(value.isfinite().all() for value in state["model"].values()):
                raise ValueError("the weights are not finite")
            state["sha256"] = digest(state)
            with open(partial, "wb") as file:
                torch.save(state, file)
                file.flush()
                # The name must not reach the disk before the content.
                os.fsync(file.fileno())
            partial.rename(path)
            self.failure = ""
        except (
            Exception
        ) as error:  # for a full disk, a RuntimeError whose context says so
            self.failure = self._give_up(path, partial, error.__context__ or error)
        try:
            for old in self._paths()[: -self.keep]:
                old.unlink(missing_ok=True)
        except OSError as error:
            logger.warning(f"warning: cannot remove an old checkpoint: {error}")

    def _link_best(self, path: Path, run: Run, before: float) -> None:
        partial = self.folder / "best.pt.partial"
        try:
            if not path.exists():  # it could not be written, and that was said
                run.best_accuracy = before
                return
            partial.unlink(missing_ok=True)
            try:
                os.link(path, partial)  # no bytes are written
            except OSError:
                shutil.copyfile(path, partial)
            partial.replace(self.folder / "best.pt")
        except OSError as error:
            run.best_accuracy = before
            self._give_up(self.folder / "best.pt", partial, error)

    def _give_up(self, path: Path, partial: Path, error: Exception) -> str:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        failure = f"cannot write {path}: {reason}"
        logger.error(
            f"error: {failure}; training goes on, the checkpoints before it stay"
        )
        return failure


def get_recipe(args: argparse.Namespace, data: Dataset) -> dict:
    """Return what must stay as it is from a run's first step to its last."""
    names = (
        "model image_size epochs batch_size accumulate "
        "learning_rate weight_decay seed sync_batchnorm"
    )
    recipe = {name: getattr(args, name) for name in names.split()}
    return recipe | {
        "samples": len(data),
        "fingerprint of the data": data.pictures.fingerprint,
    }


def copy_to_cpu(tree, kept=None):
    """Return nested dicts, lists and tensors, the tensors copied to the CPU's memory.

    It goes where an earlier copy, `kept`, has that tensor:
    memory that is new takes several times as long.
    """
    if isinstance(tree, dict):
        kept = kept if isinstance(kept, dict) else {}
        return {key: copy_to_cpu(value, kept.get(key)) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        kept = (
            kept
            if isinstance(kept, list) and len(kept) == len(tree)
            else [None] * len(tree)
        )
        return [
            copy_to_cpu(value, place) for value, place in zip(tree, kept, strict=True)
        ]
    if not isinstance(tree, Tensor):
        return tree
    if not isinstance(kept, Tensor) or (kept.shape, kept.dtype) != (
        tree.shape,
        tree.dtype,
    ):
        kept = torch.empty_like(
            tree, device="cpu", requires_grad=False, pin_memory=tree.is_cuda
        )
    return kept.copy_(tree.detach())


def digest(tree) -> str:
    """Return the SHA-256 of nested dicts, lists, tensors and numbers.

    It is that of their names, types, shapes and bytes.
    """
    sha = hashlib.sha256()

    def add(name: str, value) -> None:
        if isinstance(value, dict):
            for key in value:
                add(f"{name}/{key}", value[key])
        elif isinstance(value, list | tuple):
            for number, item in enumerate(value):
                add(f"{name}/{number}", item)
        elif isinstance(value, Tensor):
            sha.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            sha.update(
                value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            )
        else:
            sha.update(f"{name} {value!r}\n".encode())

    add("", tree)
    return sha.hexdigest()


def has_memory(size: int) -> bool:
    """Say whether this process could have so many bytes more."""
    try:
        torch.empty(size, dtype=torch.uint8)
    except RuntimeError:
        return False
    return True


def default_checkpoint_dir() -> Path:
    """Return this job's own folder: Slurm keeps a job's number when it requeues it."""
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get(
        "TORCHELASTIC_RUN_ID", "none"
    )
    return Path(os.environ.get("SCRATCH", ".")) / "checkpoints" / job.replace("/", "-")


_stop_signals = []


def catch_stop_signals() -> None:
    """Note, and survive, what asks this process to end.

    That is SIGUSR1 before the time limit, SIGTERM otherwise.
    """
    for number in (signal.SIGUSR1, signal.SIGTERM):
        # It may come in the middle of anything, and twice, from srun and from uv:
        # so this does nothing else.
        signal.signal(number, lambda number, frame: _stop_signals.append(number))
    dist.barrier()  # job.sh signals all ranks once one of them has made the mark
    if mark := training_mark():
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def stop_requested() -> bool:
    """Return whether such a signal has come."""
    return bool(_stop_signals)


def ignore_signals(worker: int = 0) -> None:
    """Leave signals to the process that trains: it would die of a worker's death."""
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def commit() -> str:
    """Return the commit that runs, "-dirty" if files differ from it.

    It is safe_sbatch's, or the one checked out.
    """
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        answer = subprocess.run(
            command,
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return os.environ.get("GIT_COMMIT", "unknown")
    return os.environ.get("GIT_COMMIT") or answer.stdout.strip() or "unknown"


def training_mark() -> Path | None:
    """Return the file that tells job.sh that main.py takes signals now.

    It also tells that to try again may help.
    """
    folder = os.environ.get("SLURM_TMPDIR")
    return (
        Path(folder) / f"{os.environ.get('SLURM_JOB_ID', 'none')}.training"
        if folder
        else None
    )


def requeues_to_go(samples: int, rate: float) -> str:
    """Return, for the epoch line, how many requeues so many samples more need."""
    if dist.get_rank() != 0 or not rate:
        return ""
    job = os.environ.get("SLURM_JOB_ID", "")
    # With the number of an array, squeue tells of all its tasks.
    command = [
        "squeue",
        "--noheader",
        "--jobs",
        job,
        "--format=%A %S %e",
    ]
    try:
        times = subprocess.run(
            command,
            env={**os.environ, "SLURM_TIME_FORMAT": "%s"},
            capture_output=True,
            text=True,
            timeout=10,
        )
        ((_, start, end),) = [
            line.split()
            for line in times.stdout.splitlines()
            if line.split()[:1] == [job]
        ]
        start, end = int(start), int(end)
    except (
        OSError,
        ValueError,
        subprocess.TimeoutExpired,
    ):
        # Outside a job, or without a time limit.
        return ""
    requeues = max(0, math.ceil((samples / rate - (end - time.time())) / (end - start)))
    return f", {requeues} requeues to go"


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
