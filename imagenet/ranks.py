"""How the ranks act as one: they tell each other, and end for one reason."""

from collections.abc import Callable

import torch.distributed as dist


class RunError(Exception):
    """Why a run must end, in one line; raised on all ranks at once."""


class StopRequested(Exception):
    """Slurm asks the job to end, and the run is saved; raised on all ranks at once."""


def gather(value) -> list:
    """Return what each rank has given, on all ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def do_on_rank_0(failure: str, function: Callable):
    """Call a function on rank 0 while the others wait; return on all what it returns.

    An error there is raised as RunError on all, with `failure` and the reason.
    """
    answer = None
    if dist.get_rank() == 0:
        try:
            answer = function()
        except RunError as error:
            answer = error
        except OSError as error:
            answer = RunError(f"{failure}: {error.strerror or error}")
    answers = [answer]
    dist.broadcast_object_list(answers, src=0)
    if isinstance(answers[0], RunError):
        raise answers[0]
    return answers[0]
