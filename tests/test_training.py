"""What the training functions of the examples compute, alone and on 2 and 3 ranks.

The shipped main.py files run as they are: every rank is a process of its own, in a real
process group (gloo) on this machine's CPU. Only the model and the images are small.
"""

import collections
import contextlib
import functools
import io
import itertools
import os
import re
import socket
import sys
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from test_checkpoint import load_module, run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

EXAMPLES = ("single_gpu", "multi_gpu", "multi_node")
DISTRIBUTED = ("multi_gpu", "multi_node")

# A prime: 2 and 3 ranks cannot share the samples evenly.
# Of 12 a step, 7 are left over.
SAMPLES = 103
GLOBAL_BATCH_SIZE = 12
STEPS = 8

# What main() trains with: no number of ranks divides its 1037 samples, either.
MAIN_BATCH_SIZE = 192
MAIN_STEPS = 2 * 5

# The published mean and standard deviation of CIFAR-10's colours, on a scale of 0 to 1.
MEAN = torch.tensor([0.4914, 0.4822, 0.4465], dtype=torch.float64).view(3, 1, 1)
STD = torch.tensor([0.2470, 0.2435, 0.2616], dtype=torch.float64).view(3, 1, 1)

pytestmark = pytest.mark.timeout(180)


# Processes


@functools.cache
def load_example(name: str) -> ModuleType:
    """Return the main.py of an example as a module."""
    return load_module(f"{name}/main.py")


def run_example(example: str, world_size: int, work, *args) -> list:
    """Return what `work(main, *args)` returned on each rank, in their order."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    return run_ranks(world_size, work_on_rank, example, port, work, args)


def work_on_rank(example: str, port: str, work, args: tuple):
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    outside = ("SLURM_", "MASTER_", "RANK", "LOCAL_RANK", "WORLD_SIZE")
    for name in [name for name in os.environ if name.startswith(outside)]:
        del os.environ[name]
    # What srun would tell this rank.
    os.environ |= {
        "CUDA_VISIBLE_DEVICES": "",
        "MASTER_PORT": port,
        "SLURM_STEP_NUM_TASKS": world_size,
        "SLURM_NTASKS": world_size,
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": rank,
    }
    if work is not observe:
        dist.destroy_process_group()  # main() joins it by itself
    return work(load_example(example), *args)


# Models and images


class NormModel(nn.Sequential):
    """A convolution and a BatchNorm, with other statistics than it starts from."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 8, 3, stride=4),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 10),
        )
        self[1].running_mean.uniform_(-1, 1)
        self[1].running_var.uniform_(0.5, 2)
        nn.init.normal_(self[5].weight)


class ExactModel(nn.Sequential):
    """A convolution without BatchNorm.

    It computes in float32: bfloat16 would hide differences below 1%.
    """

    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 8, 3, stride=4),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(32, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert images.abs().max() < 3  # normalised
        with torch.autocast(images.device.type, enabled=False):
            return super().forward(images)


def cut_synthetic(main: ModuleType, samples: int):
    """Return the first ones of the images that --synthetic trains on."""
    images, labels, *_ = main.draw_synthetic()
    return main.Split(images[:samples], labels[:samples])


# What a rank does


def observe(main: ModuleType) -> dict:
    """Return what a rank measures, and is fed in the third epoch if the seed is 5."""
    torch.manual_seed(0)
    model, data = NormModel(), cut_synthetic(main, SAMPLES)
    batches = list(main.evaluation_batches(data, 16))
    sizes = {len(images) for images, _ in batches}
    metrics = main.average(main.evaluate(model, batches), SAMPLES)
    train_set = main.Split(main.view_crops(data.images), data.labels)
    return {
        "evaluation": (*metrics, sizes),
        "fed": list(main.training_batches(train_set, GLOBAL_BATCH_SIZE, 5, 3)),
    }


@functools.cache
def observed(example: str, world_size: int) -> list[dict]:
    return run_example(example, world_size, observe)


def alone() -> dict:
    return observed("single_gpu", 1)[0]


on_several_ranks = pytest.mark.parametrize(
    "example, world_size", list(itertools.product(DISTRIBUTED, (2, 3)))
)


# Evaluation and metrics


@on_several_ranks
def test_evaluation_does_not_depend_on_the_ranks(example, world_size):
    """Any number of GPUs reports the same loss and accuracy for the same weights.

    Batches have one size: --compile compiles for each.
    """
    right_loss, right_accuracy, _ = alone()["evaluation"]
    for rank in observed(example, world_size):
        loss, accuracy, sizes = rank["evaluation"]
        assert loss == pytest.approx(right_loss, abs=1e-6, rel=0)
        assert accuracy == right_accuracy
        assert sizes == {16}


def test_evaluation_is_what_plain_code_computes():
    """The reported loss and accuracy are means over the samples, each by itself."""
    torch.manual_seed(0)
    model = NormModel().eval()
    data = cut_synthetic(load_example("single_gpu"), SAMPLES)
    with torch.no_grad():
        logits = model(((data.images / 255 - MEAN) / STD).float()).double()
    right_loss = F.cross_entropy(logits, data.labels).item()
    correct = (logits.argmax(dim=1) == data.labels).sum().item()
    loss, accuracy, sizes = alone()["evaluation"]
    assert loss == pytest.approx(right_loss, abs=1e-6)
    assert accuracy == pytest.approx(correct / SAMPLES)
    assert sizes == {16}


# What the model is fed


def list_pairs(batch) -> list[tuple[bytes, int]]:
    """Return the images of a batch, each with its class."""
    pairs = zip(*batch, strict=True)
    return [(image.numpy().tobytes(), label.item()) for image, label in pairs]


@on_several_ranks
def test_ranks_share_every_global_batch(example, world_size):
    """Any number of GPUs trains on the same augmented images, in the same steps."""
    ranks = [rank["fed"] for rank in observed(example, world_size)]
    for whole, *shares in zip(alone()["fed"], *ranks, strict=True):
        sizes = [len(labels) for _, labels in shares]
        assert sizes == [GLOBAL_BATCH_SIZE // world_size] * world_size
        found = itertools.chain(*map(list_pairs, shares))
        assert sorted(found) == sorted(list_pairs(whole))


def test_an_epoch_is_what_plain_code_makes():
    """Every sample comes once, padded with 4 zeros, flipped, cut where drawn.

    Only the last, incomplete global batch is left out.
    """
    main = load_example("single_gpu")
    data = cut_synthetic(main, SAMPLES)
    order, top, left, flip = main.draw_epoch(SAMPLES, 5, 3)
    fed = alone()["fed"]
    assert [len(labels) for _, labels in fed] == [GLOBAL_BATCH_SIZE] * STEPS
    images, labels = map(torch.cat, zip(*fed, strict=True))
    used = order[: STEPS * GLOBAL_BATCH_SIZE].tolist()
    for sample, image, label in zip(used, images, labels, strict=True):
        padded = F.pad(data.images[sample], (4, 4, 4, 4))
        if flip[sample]:
            padded = padded.flip(2)
        y, x = top[sample], left[sample]
        assert torch.equal(image, padded[:, y : y + 32, x : x + 32])
        assert label == data.labels[sample]


def test_draw_epoch():
    """Every epoch and every seed has its own draws, of every sample and crop.

    Two epochs in a row show each image once as it is and once mirrored.
    """
    draw_epoch = load_example("single_gpu").draw_epoch
    pairs = [(0, 1), (0, 2), (1, 0), (1, 1), (2, 1)]
    draws = [[part.tolist() for part in draw_epoch(1000, *pair)] for pair in pairs]
    for order, top, left, _ in draws:
        assert sorted(order) == list(range(1000))
        assert set(top) == set(left) == set(range(9))
    for one, other in itertools.combinations(draws, 2):
        assert all(part != another for part, another in zip(one, other, strict=True))
    flips = zip(draws[0][3], draws[1][3], strict=True)
    assert {flip + next_flip for flip, next_flip in flips} == {1}


# main()


def run_main(main: ModuleType, batch_size: int, build, *more: str) -> dict:
    """Call main() with a small model, as a step's task.

    Return the model's state, the learning rate of each step, and what was printed.
    """
    sys.argv = ["main.py", "--synthetic", f"--batch-size={batch_size}", "--epochs=2"]
    sys.argv += ["--learning-rate=1", "--seed=3", *more]
    model, rates = build(), []
    main.build_model = lambda: model
    register_optimizer_step_pre_hook(
        lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"])
    )
    with contextlib.redirect_stdout(io.StringIO()) as output:
        main.main()
    return {"state": model.state_dict(), "rates": rates, "output": output.getvalue()}


@functools.cache
def main_on(example: str, world_size: int, build=ExactModel) -> list[dict]:
    """Return what each rank's main() does with its share of every global batch."""
    share = MAIN_BATCH_SIZE // world_size
    return run_example(example, world_size, run_main, share, build)


def read_numbers(output: str) -> list[float]:
    """Return the losses and accuracies: four an epoch, and two of the test."""
    found = re.findall(r"(?<=loss )[\d.]+|[\d.]+(?=%)", output)
    assert len(found) == 10, output
    return [float(number) for number in found]


@on_several_ranks
def test_main_does_not_depend_on_the_ranks(example, world_size):
    """GPUs that share a batch learn and print what one does, and print it only once."""
    (right,) = main_on("single_gpu", 1)
    first, *others = main_on(example, world_size)
    # Seen: 1e-6. Gradients summed, not averaged: 0.7. Without DDP: 0.13.
    torch.testing.assert_close(first["state"], right["state"], atol=1e-4, rtol=0)
    numbers = read_numbers(first["output"])
    assert numbers == pytest.approx(read_numbers(right["output"]), abs=0.002)
    assert not any(other["output"] for other in others)


@on_several_ranks
def test_ranks_agree_after_training(example, world_size):
    """All have the same parameters and statistics of BatchNorm, bit for bit."""
    first, *others = main_on(example, world_size, NormModel)
    assert first["state"]["1.num_batches_tracked"] == MAIN_STEPS
    for other in others:
        torch.testing.assert_close(other["state"], first["state"], atol=0, rtol=0)


@pytest.mark.parametrize("example", EXAMPLES)
def test_learning_rate(example):
    """The rate peaks at --learning-rate per 256 samples, and is lowest in the end."""
    rates = main_on(example, 2 if example in DISTRIBUTED else 1)[0]["rates"]
    peak = MAIN_BATCH_SIZE / 256
    assert len(rates) == MAIN_STEPS
    # OneCycleLR rises for 0.23 of the steps, and then falls from between two.
    assert rates.index(max(rates)) == 2
    found = [rates[0], max(rates), rates[-1]]
    assert found == pytest.approx([peak / 25, peak, peak / 25 / 1e4], rel=0.03)


READING_FUNCTIONS = "item tolist numpy cpu __bool__ __float__ __int__ __array__".split()
READING_OPERATORS = (
    "aten::_local_scalar_dense aten::is_nonzero aten::equal aten::nonzero".split()
)


class CallCounter(TorchFunctionMode):
    """Counts the functions that Python calls on tensors."""

    def __init__(self):
        super().__init__()
        self.calls = collections.Counter()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.calls[getattr(function, "__name__", "")] += 1
        return function(*args, **(kwargs or {}))


def count_calls(main: ModuleType, batch_size: int) -> collections.Counter:
    """Count main()'s losses, collectives, and waits for a tensor's values."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        torch.profiler.profile(activities=activities) as profile,
        CallCounter() as mode,
    ):
        run_main(main, batch_size, NormModel, "--epochs=1")
    operators = collections.Counter(event.name for event in profile.events())
    return collections.Counter(
        {n: c for n, c in operators.items() if n.startswith("c10d::")}
        | {name: operators[name] for name in READING_OPERATORS}
        | {name: mode.calls[name] for name in READING_FUNCTIONS}
        | {"losses": operators["aten::cross_entropy_loss"]}
    )


@pytest.mark.parametrize("example", EXAMPLES)
def test_steps_neither_wait_nor_talk(example):
    """No step reads a tensor's value or runs a collective beyond DDP's own.

    Both would make every GPU wait. This counts, on the CPU, Python's calls (`.item()`,
    `.tolist()`, `if tensor`) and the operators that hand a value to Python, those of
    the optimizer and the scheduler included: fused, they read none. It does not see
    `.to("cpu")`, nor what waits on CUDA alone, such as a copy from memory that is not
    pinned. Once an epoch, all is allowed: epochs of 4 and 8 steps are compared.
    """
    world_size = 2 if example in DISTRIBUTED else 1
    few, many = (
        run_example(example, world_size, count_calls, 256 // parts // world_size)
        for parts in (1, 2)
    )
    for one, other in zip(few, many, strict=True):
        growth = {name: other[name] - one[name] for name in {*one, *other}}
        # A loss to learn from and one to report, and those of the evaluations.
        assert growth.pop("losses") >= 2 * 4
        # The gradients are one bucket here.
        assert growth.pop("c10d::allreduce_", 0) == (4 if world_size == 2 else 0)
        assert not any(growth.values()), growth
