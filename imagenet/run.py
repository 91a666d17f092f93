"""What a run is: its parts, its settings, its commit, its weights."""

import argparse
import copy
import hashlib
import logging
import subprocess
import uuid
from dataclasses import dataclass, field
from os import environ
from pathlib import Path

import torch
from ranks import RunError
from torch import Tensor, nn
from torch.utils.data import Dataset


@dataclass
class Run:
    """What a checkpoint holds: all that a run needs to resume as if never stopped."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    scaler: torch.amp.GradScaler
    recipe: dict  # what must stay as it is from the first step to the last
    global_batch_size: int
    classes: list[str]  # in the order of the logits
    epoch: int = 1
    step: int = 0  # so many steps of the epoch are done
    # Of these steps, on all ranks: [sum of losses, correct, samples].
    metrics: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))
    best_accuracy: float = -1.0  # before the first validation
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
        """Go on from a checkpoint. Raises RunError where it does not fit the model.

        A checkpoint of an older version may lack a field that has a default.
        """
        # The tensors in `state` are parts of the file, which is deleted later. An
        # optimizer on a CPU keeps the tensors that it is given: it gets copies.
        for name, value in vars(self).items():
            if not hasattr(value, "load_state_dict"):
                setattr(self, name, copy.deepcopy(state.get(name, value)))
                continue
            if name == "scaler" and not state.get(name):
                continue  # it was idle, in another precision
            try:
                value.load_state_dict(copy.deepcopy(state[name]))
            except (KeyError, RuntimeError, ValueError) as error:
                raise RunError(
                    f"the checkpoint's {name} does not fit --model "
                    f"{self.recipe['model']}: {error!r}"
                ) from error

    def log_weights(self, commit: str, folder: Path) -> None:
        """Say what came out of which commit: equal weights have an equal SHA-256."""
        sha = hashlib.sha256()
        for tensor in self.model.state_dict().values():
            sha.update(tensor.cpu().numpy().tobytes())
        logging.info(f"Weights SHA-256 {sha.hexdigest()}, commit {commit}")
        logging.info(
            "To use the best weights: ../.venv/bin/python classify.py "
            f"'{folder}/best.pt' IMAGE_OR_FOLDER"
        )


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
            raise RunError(
                f"the model does not take --image-size {image_size}: {error}"
            ) from error
