"""What watches a training: its metrics, a profile, the wait for data."""

import argparse
import contextlib
import logging
import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import resume
import torch
import torch.distributed as dist
from hangs import SLOW, HangWatch
from torch import nn


class Watch:
    """All that watches one run. Its files are in the run's checkpoint folder."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.hangs = HangWatch(args.timeout)

    def begin(
        self, run: resume.Run, model: nn.parallel.DistributedDataParallel, steps: int
    ) -> None:
        """Watch the training, too, with so many steps an epoch. All ranks have met."""
        self.run, self.steps_an_epoch = run, steps
        device = model.device
        self.on_gpu = device.type == "cuda"
        self.forwards = []  # when each began, and when it ended
        # Hooks that return None change nothing.
        model.register_forward_pre_hook(lambda *_: self.forwards.append([self._now()]))
        model.register_forward_hook(lambda *_: self.forwards[-1].append(self._now()))
        self.profile = start_profile(run.folder, device) if self.args.profile else None
        self.hangs.connect()
        with self.hangs.paused("has not asked for a batch yet"):
            # Rank 0 may wait here for W&B's server, for 90 seconds.
            self.tracker = Tracker(self.args, run)
            dist.barrier()
        self.steps = 0  # stays so if an earlier start has taken all of the first loop
        self.logged_at = time.monotonic()
        run.on_meeting, run.on_stop = self.meet, self.close
        run.while_saving = self.hangs.paused

    def meet(self, totals: list[float], speed: float) -> None:
        """Log the epoch so far, over all ranks; a line of it every minute."""
        if not totals:  # the epoch is over
            return
        run, (loss, correct, samples) = self.run, totals
        if not math.isfinite(loss):
            resume.fail(
                f"the loss is {loss} before step {run.step} of epoch {run.epoch}: "
                "nothing of it is saved; "
                "try a smaller --learning-rate, or look at the data"
            )
        loss, accuracy = loss / samples, correct / samples
        self.log({"train/loss": loss, "train/accuracy": accuracy})
        seconds = time.monotonic() - self.logged_at
        if seconds > 60:
            self.logged_at += seconds
            logging.info(
                f"Epoch {run.epoch}, step {run.step} of {self.steps_an_epoch}: "
                f"train loss {loss:.3f} accuracy {accuracy:.2%}, "
                f"{speed * run.global_batch_size:.0f} images/s"
            )

    def log(self, values: dict[str, float]) -> None:
        self.tracker.log(self.run.scheduler.last_epoch, values)

    def batches(self, batches: Iterable) -> Iterator:
        """Yield a loop's batches, and measure its speed and its waits for them."""
        working = "works on a batch, or waits there for other ranks"
        self.steps = 0
        self.start = time.perf_counter()
        self.waits = []  # for batches: when each began, and when it ended
        self.forwards.clear()
        self.hangs.tick("waits for its first batch")
        begin = self._now()
        for batch in batches:
            self.waits.append((begin, self._now()))
            # The first step may compile, which takes longer than a hang.
            compiling = self.args.compile and self.steps == 0
            self.hangs.tick(working, SLOW if compiling else 0)
            self.steps += 1
            yield batch
            if compiling:  # on a GPU, this rank may be here long before the others
                dist.barrier()
            if self.profile:
                self.profile.step()
            self.hangs.tick("waits for its next batch")
            begin = self._now()
        self.hangs.tick(working)

    def speed(self, images: int) -> tuple[dict[str, float], str]:
        """Return how fast this loop was, of so many images a step: numbers, and words.

        No numbers, if it had no step: an earlier start has taken them all.
        """
        if self.steps == 0:
            return {}, "nothing was left to train"
        seconds = time.perf_counter() - self.start
        rate, waiting = self.steps * images / seconds, self._sum(self.waits) / seconds
        self._name_slow(waiting, self._sum(self.forwards))
        speed = {"images/s": rate, "usage/waiting for data": waiting}
        words = f"{rate:.0f} images/s, {waiting:.0%} waiting for data"
        if self.on_gpu:
            free, total = torch.cuda.mem_get_info()
            speed["usage/memory in use"] = 1 - free / total
            words += f", {1 - free / total:.0%} memory in use"
        return speed, words

    def _name_slow(self, waiting: float, forward: float) -> None:
        """Name a rank for which all others wait. backward() takes all equally long."""
        waits, forwards = _of_all_ranks(waiting), _of_all_ranks(forward)
        median, worst = waits.median(), int(waits.argmax())
        if waits[worst] > median + 0.1:
            logging.warning(
                f"warning: rank {worst} on {self.hangs.hosts[worst]} waits for data "
                f"{waits[worst]:.0%} of the time (median {median:.0%})"
            )
        median, worst = forwards.median(), int(forwards.argmax())
        if forwards[worst] > 1.5 * median:
            logging.warning(
                f"warning: rank {worst} on {self.hangs.hosts[worst]} is slow: its "
                f"forward() takes {forwards[worst] / median:.1f} times the median"
            )

    def close(self) -> None:
        """End the profile and the metrics. Other ranks may wait for rank 0 to do so."""
        self.hangs.tick("ends", SLOW)
        if self.profile:
            self.profile.stop()
        self.tracker.close()

    def _now(self):
        """Return the time at which the device has done all that it was given."""
        if not self.on_gpu:
            return time.perf_counter()
        # The CPU runs ahead of the GPU: the GPU notes the time when it comes here.
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _sum(self, spans: list) -> float:
        """Return the seconds of all spans, [begin, end]."""
        if not self.on_gpu:
            return sum(end - begin for begin, end in spans)
        torch.cuda.synchronize()
        return sum(begin.elapsed_time(end) for begin, end in spans) / 1000


def _of_all_ranks(number: float) -> torch.Tensor:
    numbers = [0.0] * dist.get_world_size()
    numbers[dist.get_rank()] = number
    return torch.tensor(resume.reduce(numbers))


class Tracker:
    """Writes rank 0's metrics for TensorBoard, and to W&B if asked.

    A training is worth more than its metrics: no error of theirs ends it.
    """

    def __init__(self, args: argparse.Namespace, run: resume.Run):
        self.tensorboard = self.wandb = None
        if dist.get_rank() != 0:
            return
        with self._survive_errors("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            # Its own thread writes to the disk: where that is slow, no step waits.
            self.tensorboard = SummaryWriter(
                str(run.folder / "tensorboard"),
                # From this step on, TensorBoard drops what an earlier start has logged:
                # these steps are done, and logged, once more.
                purge_step=run.scheduler.last_epoch + 1,
                max_queue=0,  # no limit
                flush_secs=1,
            )
        if args.wandb:
            hint = " (no internet? export WANDB_MODE=offline)"
            with self._survive_errors("wandb", hint):
                self.wandb = start_wandb(run.folder, args, run.id)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Write the metrics after so many steps."""
        if self.tensorboard:
            with self._survive_errors("tensorboard"):
                for name, value in values.items():
                    self.tensorboard.add_scalar(name, value, step)
        if self.wandb:
            with self._survive_errors("wandb"):
                self.wandb.log(values, step)

    def close(self) -> None:
        if self.tensorboard:
            with self._survive_errors("tensorboard"):
                self.tensorboard.close()
        if self.wandb:
            with self._survive_errors("wandb"):
                self.wandb.finish()

    @contextlib.contextmanager
    def _survive_errors(self, writer: str, hint: str = ""):
        try:
            yield
        except Exception as error:
            setattr(self, writer, None)
            logging.warning(f"warning: no more metrics go to {writer}{hint}: {error!r}")


def start_wandb(folder: Path, args: argparse.Namespace, run_id: str):
    """Return the W&B run of this id, the same one on every start.

    Slurm may send SIGTERM to all processes of a job. That ends W&B's own process, for
    the rest of this start (github.com/wandb/wandb/issues/9963). What was logged a
    second before is on disk.
    """
    import wandb

    return wandb.init(
        project=args.wandb,
        name=folder.name,
        id=run_id,
        resume="allow",
        dir=folder,
        config=vars(args),
        settings=wandb.Settings(
            console="off",  # leave the log to Slurm
            x_transaction_log_flush_interval=1,
            finish_timeout=60,  # seconds
        ),
    )


def start_profile(folder: Path, device: torch.device) -> torch.profiler.profile:
    """Profile five steps: a trace a rank for ui.perfetto.dev, and rank 0's table."""
    write_trace = torch.profiler.tensorboard_trace_handler(
        str(folder / "profile"), f"rank{dist.get_rank()}", use_gzip=True
    )

    def report(profile: torch.profiler.profile) -> None:
        write_trace(profile)
        order = f"self_{device.type}_time_total"
        logging.info(profile.key_averages().table(order, row_limit=20))

    schedule = torch.profiler.schedule(wait=5, warmup=1, active=5, repeat=1)
    profile = torch.profiler.profile(schedule=schedule, on_trace_ready=report)
    profile.start()
    return profile
