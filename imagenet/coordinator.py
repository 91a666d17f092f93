"""When the ranks save, and when they stop: they decide it together."""

import argparse
import logging
import math
import signal
import time
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from checkpoint import Checkpoints
from ranks import RunError, StopRequested
from run import Run
from torch import Tensor
from watch import Watch

# What Slurm has sent to this process.
stop_signals = []


def catch_stop_signals() -> None:
    """Note, and survive, SIGUSR1 before the time limit, and SIGTERM.

    They may come in the middle of anything, and twice, from srun and from uv: the
    handler does nothing else.
    """

    def note(number, frame):
        stop_signals.append(number)

    signal.signal(signal.SIGUSR1, note)
    signal.signal(signal.SIGTERM, note)


class Coordinator:
    """Lets the ranks decide together when to save and when to stop.

    They meet after some of their steps, add up what each has to say, and go by that.
    """

    def __init__(
        self,
        run: Run,
        checkpoints: Checkpoints,
        watch: Watch,
        args: argparse.Namespace,
    ):
        self.run, self.checkpoints = run, checkpoints
        self.watch, self.args = watch, args
        # After one step: even a start that must stop at once gets one step further.
        self.steps_to_meeting = 1
        self.logged_at = time.monotonic()

    def after_step(self, metrics: Tensor) -> None:
        """Count a step, and meet if it is time to. Raises StopRequested, RunError."""
        run = self.run
        run.step += 1
        self.steps_to_meeting -= 1
        save = run.step % self.args.save_steps == 0 or run.step == run.steps
        if save or self.steps_to_meeting == 0:
            self._meet(metrics, save)

    def validation(self, batches: Iterable) -> Iterator:
        """Yield the batches of a validation. Raises StopRequested.

        Nothing is lost: the epoch's last step is saved, and the next start begins with
        this validation.
        """
        for done, (images, labels) in enumerate(self.watch.batches(batches)):
            if done % 20 == 0:
                stop = torch.tensor(len(stop_signals), device=images.device)
                dist.all_reduce(stop)
                if stop:
                    raise StopRequested
            yield images, labels

    def end_epoch(self, values: dict[str, float]) -> None:
        """Log the epoch's metrics, keep its model if it is the best, and go on."""
        run = self.run
        self.watch.tracker.log(run.scheduler.last_epoch, values)
        self.checkpoints.save_if_best(run, values["valid/accuracy"])
        run.epoch += 1
        run.step = 0
        run.metrics = torch.zeros_like(run.metrics)

    def _meet(self, metrics: Tensor, save: bool) -> None:
        run = self.run
        due = time.monotonic() - self.checkpoints.saved_at > 60 * self.args.save_minutes
        speed = self.watch.steps_per_second() / dist.get_world_size()
        mine = metrics.new_tensor([bool(stop_signals), due, speed])
        sums = torch.cat((metrics, mine))
        dist.all_reduce(sums)
        # Of all ranks: how many must stop, how many should save, and their mean speed.
        *totals, stop, due, speed = sums.tolist()
        run.metrics = torch.tensor(totals, dtype=torch.float64)
        loss = totals[0]
        if not math.isfinite(loss):
            raise RunError(
                f"the loss is {loss} before step {run.step} of epoch {run.epoch}: "
                "nothing of it is saved; "
                "try a smaller --learning-rate, or look at the data"
            )
        self._log(speed)
        if save or stop or due:
            self.checkpoints.save(run)
        if stop:
            raise StopRequested
        # Again in 20 steps or two seconds: a signal leaves little time.
        self.steps_to_meeting = max(1, min(20, int(2 * speed)))

    def _log(self, speed: float) -> None:
        """Log the epoch so far, over all ranks; a line of it every minute."""
        run = self.run
        loss, correct, samples = run.metrics.tolist()
        loss, accuracy = loss / samples, correct / samples
        values = {"train/loss": loss, "train/accuracy": accuracy}
        self.watch.tracker.log(run.scheduler.last_epoch, values)
        seconds = time.monotonic() - self.logged_at
        if seconds > 60:
            self.logged_at += seconds
            logging.info(
                f"Epoch {run.epoch}, step {run.step} of {run.steps}: "
                f"train loss {loss:.3f} accuracy {accuracy:.2%}, "
                f"{speed * run.global_batch_size:.0f} images/s"
            )
