"""What is said of a run: its settings, its folder, its commit, its weights."""

import argparse
import hashlib
import logging
import math
import subprocess
import uuid
from os import environ
from pathlib import Path

import resume
import torch
from torch import nn
from torch.utils.data import Dataset


def begin_run(args: argparse.Namespace, recipe: dict, images: int) -> resume.Run:
    """Return the run in the checkpoint folder; a new one has so many images a step."""
    # job.sh sets JOB_WORK_DIR: the code may be a copy, which ends with the job.
    folder = Path(environ.get("JOB_WORK_DIR", "")).absolute() / args.checkpoint_dir
    run = resume.Run(folder, recipe, args.keep, args.save_minutes, args.save_steps)
    # The global batch stays, also on another number of GPUs. The id is W&B's.
    run.add(global_batch_size=images, id=uuid.uuid4().hex, best_accuracy=-1.0)
    if run.global_batch_size > 8192:
        logging.warning(
            f"warning: {run.global_batch_size} images a step: above 8192, a learning "
            "rate that follows the batch loses accuracy (Goyal et al. 2017)"
        )
    if run.global_batch_size < resume.world_size():
        resume.fail(
            f"the checkpoint is of a run with {run.global_batch_size} images a step, "
            f"and there are {resume.world_size()} ranks: resume with "
            f"{run.global_batch_size} ranks or fewer"
        )
    return run


def get_recipe(
    args: argparse.Namespace, train_set: Dataset, valid_set: Dataset
) -> dict:
    """Return what must stay as it is from a run's first step to its last."""
    settings = (
        "model",
        "image_size",
        "epochs",
        "batch_size",
        "accumulate",
        "learning_rate",
        "weight_decay",
        "seed",
    )
    return {name: getattr(args, name) for name in settings} | {
        "samples": len(train_set),
        "samples to validate": len(valid_set),  # or accuracies would not compare
        "fingerprints of the data": [
            part.images.fingerprint for part in (train_set, valid_set)
        ],
        "draws": "by SHA-256",  # Others would give other crops and flips.
    }


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


def rebuild_buckets(
    model: nn.parallel.DistributedDataParallel, image_size: int
) -> None:
    """Run backward() once: so DDP sorts its buckets before the first step.

    Their order decides how sums are rounded: a run that was stopped would otherwise
    end with other weights.
    """
    model.eval()  # this keeps BatchNorm's statistics as they are
    image = torch.zeros(1, 3, image_size, image_size, device=model.device)
    # With --compile, this must not compile the model for a single image.
    with torch.compiler.set_stance("force_eager"):
        try:
            model(image).sum().backward()  # each step begins with zero_grad()
        except (AssertionError, RuntimeError, ValueError) as error:
            resume.fail(f"the model does not take --image-size {image_size}: {error}")


def save_if_best(
    run: resume.Run, classes: list[str], loss: float, accuracy: float
) -> None:
    """Write the weights as best.pt if they are the best of this run, from any start."""
    if not math.isfinite(loss):
        resume.fail(f"the loss is not finite: validated, it is {loss}")
    if accuracy > run.best_accuracy:
        run.best_accuracy = accuracy
        best = {"model": run.model.state_dict(), "classes": classes}
        run.write("best.pt", best | {"recipe": run.settings, "accuracy": accuracy})


def log_weights(run: resume.Run, commit: str) -> None:
    """Say what came out of which commit: equal weights have an equal SHA-256."""
    sha = hashlib.sha256()
    for tensor in run.model.state_dict().values():
        sha.update(tensor.cpu().numpy().tobytes())
    logging.info(f"Weights SHA-256 {sha.hexdigest()}, commit {commit}")
    logging.info(
        "To use the best weights: ../.venv/bin/python classify.py "
        f"'{run.folder}/best.pt' IMAGE_OR_FOLDER"
    )


def checkpoint_dir(text: str) -> Path:
    """Return an option's value, for argparse."""
    path = Path(text).expanduser()
    if "RUN_DIR" in environ and path != default_checkpoint_dir():
        # job.sh would not see the checkpoints there, and not start the job again.
        raise argparse.ArgumentTypeError("instead, export RUN_DIR before sbatch")
    return path


def default_checkpoint_dir() -> Path:
    """Return this job's own folder: Slurm keeps a job's number when it requeues it."""
    if "RUN_DIR" in environ:  # job.sh has made it
        return Path(environ["RUN_DIR"])
    job = environ.get("SLURM_JOB_ID", "none")
    if "SLURM_ARRAY_TASK_ID" in environ:  # as in the name of its log
        job = f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return Path("checkpoints", job)
