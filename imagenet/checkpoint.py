"""Checkpoints, written whole or not at all, and checked before they are read."""

import fcntl
import logging
import mmap
import os
import re
import time
import zipfile
from collections.abc import Callable
from os import environ
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import RunError, do_on_rank_0, gather
from run import Run
from watch import HangWatch


class Checkpoints:
    """The checkpoints of one run, in a folder of its own. The others wait for rank 0.

    epoch-001-step-000123.pt is from after 123 steps of epoch 1; best.pt is the best one
    once more.
    """

    def __init__(self, folder: Path, keep: int, hangs: HangWatch):
        # job.sh sets JOB_WORK_DIR: the code may be a copy, which ends with the job.
        self.folder = Path(environ.get("JOB_WORK_DIR", "")).absolute() / folder
        self.keep, self.hangs = keep, hangs
        self.saved_at = time.monotonic()  # the last checkpoint, or the start

    def load(self, recipe: dict) -> dict | None:
        """Return, on every rank, the newest whole checkpoint, or None.

        Raises RunError where none is whole, where it is of another recipe, where the
        folder cannot be used, and where nodes have different data.
        """
        if any(other != recipe for other in gather(recipe)):
            raise RunError("not every node has the same data: stage it again")
        path = do_on_rank_0(f"cannot use {self.folder}", self._find)
        if path is None:
            if environ.get("SLURM_RESTART_COUNT", "0") != "0":
                logging.warning(
                    f"warning: started again, and no checkpoint is in {self.folder}: "
                    "none was saved, or the nodes do not share this disk"
                )
            return None
        if not all(gather(path.exists())):
            raise RunError(f"not every node has {path}: move it to a shared disk")
        state = read(path)
        saved = state["recipe"]
        changed = [
            f"{name} {saved.get(name)}, not {value}"
            for name, value in recipe.items()
            if saved.get(name) != value
        ]
        if changed:
            raise RunError(
                f"{path} is of another run, with {'; '.join(changed)}: "
                "go on as it began, or choose another --checkpoint-dir"
            )
        images, ranks = state["global_batch_size"], dist.get_world_size()
        if images < ranks:
            raise RunError(
                f"{path} is of a run with {images} images a step, and there are "
                f"{ranks} ranks: resume with {images} ranks or fewer"
            )
        logging.info(f"Resuming from {path}")
        return state

    def save(self, run: Run) -> None:
        """Write a checkpoint. Raises RunError."""
        path = self.folder / f"epoch-{run.epoch:03}-step-{run.step:06}.pt"
        self._on_rank_0(self._save, run, path)
        self.saved_at = time.monotonic()

    def save_if_best(self, run: Run, accuracy: float) -> None:
        """Write the best one of this run once more, as best.pt. Raises RunError."""
        if accuracy <= run.best_accuracy:
            return
        path = self.folder / "best.pt"
        run.best_accuracy = accuracy
        self._on_rank_0(write, run, path)

    def _on_rank_0(self, function: Callable, run: Run, path: Path) -> None:
        """Let rank 0 write while the others wait, however long its disk takes."""

        def write_and_tick() -> None:
            function(run.state_dict(), path)
            # From here on, rank 0 waits for the others: one that is gone is a hang.
            self.hangs.tick("has saved, and waits for other ranks")

        with self.hangs.paused():
            do_on_rank_0(f"cannot write {path}", write_and_tick)

    def _paths(self) -> list[Path]:
        """Return the checkpoints, the newest one first."""
        return sorted(
            self.folder.glob("epoch-*-step-*.pt"),
            key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)],
            reverse=True,
        )

    def _find(self) -> Path | None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock_folder()
        for partial in self.folder.glob("*.pt.partial"):
            partial.unlink()
        for path in self._paths():
            try:
                check(path)
            except ValueError as error:
                logging.warning(
                    f"warning: {path} is damaged, trying the one before: {error}"
                )
                path.rename(path.with_suffix(".pt.damaged"))
            else:
                return path
        if list(self.folder.glob("*.damaged")):
            raise RunError(
                f"no whole checkpoint is left in {self.folder}: "
                "remove the damaged ones there to start again from the beginning"
            )
        return None

    def _save(self, state: dict, path: Path) -> None:
        write(state, path)
        try:
            for old in self._paths()[self.keep :]:
                old.unlink()
        except OSError as error:  # The checkpoint is whole.
            logging.warning(f"warning: {error}")

    def _lock_folder(self) -> None:
        """Keep other runs out of the folder, until this process ends."""
        self.lock_file = open(self.folder / "lock", "a")
        # A job that was just killed may hold the lock a little longer.
        for _ in range(60):
            try:
                return fcntl.flock(self.lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(1)
            except OSError:  # a file system without locks
                return
        raise RunError(
            f"another run writes to {self.folder}: choose another --checkpoint-dir; "
            "if its node is gone, and there is no such run, remove its file named lock"
        )


def write(state: dict, path: Path) -> None:
    """Write a checkpoint that is there whole, or not at all."""
    if not all(weight.isfinite().all() for weight in state["model"].values()):
        raise RunError(f"cannot write {path}: the weights are not finite")
    partial = path.with_suffix(".pt.partial")
    try:
        with open(partial, "wb") as file:
            torch.save(state, file)
            file.flush()
            # The name must not reach the disk before the content.
            os.fsync(file.fileno())
        partial.rename(path)
    except (OSError, RuntimeError) as error:
        partial.unlink(missing_ok=True)  # this makes room on a full disk
        # torch.save raises an error of its own. What the disk has said is its context.
        raise (error.__context__ or error) from None


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


def default_checkpoint_dir() -> Path:
    """Return this job's own folder: Slurm keeps a job's number when it requeues it."""
    if "RUN_DIR" in environ:  # job.sh has made it
        return Path(environ["RUN_DIR"])
    job = environ.get("SLURM_JOB_ID", "none")
    disk = Path(environ.get("SCRATCH", "."))
    # Some clusters have one for each job, and remove it then.
    if re.search(rf"\D{job}\D", f"/{disk}/"):
        disk = Path(".")
    if "SLURM_ARRAY_TASK_ID" in environ:  # as in the name of its log
        job = f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return disk / "checkpoints" / job
