"""What the training functions of the examples compute, alone and on 2 and 3 ranks.

The shipped main.py files run as they are: every rank is a process of its own, in a real
process group (gloo) on this machine's CPU. Only the model and the images are small.
"""

import argparse
import collections
import contextlib
import functools
import importlib.util
import io
import itertools
import os
import re
import socket
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.distributed as dist
from test_checkpoint import REPOSITORY, run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

EXAMPLES = ("single_gpu", "multi_gpu", "multi_node")
DISTRIBUTED = ("multi_gpu", "multi_node")

# A prime: 2 and 3 ranks cannot share the samples evenly.
# Of 12 a step, 7 are left over.
SAMPLES = 103
GLOBAL_BATCH_SIZE = 12
STEPS = 8

# The published mean and standard deviation of CIFAR-10's colours, on a scale of 0 to 1.
MEAN = torch.tensor([0.4914, 0.4822, 0.4465], dtype=torch.float64).view(3, 1, 1)
STD = torch.tensor([0.2470, 0.2435, 0.2616], dtype=torch.float64).view(3, 1, 1)

pytestmark = pytest.mark.timeout(180)


# Processes


@functools.cache
def load_example(name: str) -> ModuleType:
    """Return the main.py of an example as a module."""
    path = REPOSITORY / name / "main.py"
    spec = importlib.util.spec_from_file_location(f"{name}_main", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_example(example: str, world_size: int, work, *args) -> list:
    """Return what `work(main, *args)` returned on each rank, in their order."""
    return run_ranks(world_size, work_on_rank, example, work, args)


def work_on_rank(example: str, work, args: tuple):
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    with socket.create_server(("127.0.0.1", 0)) as server:
        ports = [server.getsockname()[1]]
    dist.broadcast_object_list(ports)
    outside = ("SLURM_", "MASTER_", "RANK", "LOCAL_RANK", "WORLD_SIZE")
    for name in [name for name in os.environ if name.startswith(outside)]:
        del os.environ[name]
    # What srun would tell this rank.
    os.environ |= {
        "CUDA_VISIBLE_DEVICES": "",
        "MASTER_PORT": str(ports[0]),
        "SLURM_STEP_NUM_TASKS": world_size,
        "SLURM_NTASKS": world_size,
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": rank,
    }
    main = load_example(example)
    if example == "single_gpu" or work is not observe:
        dist.destroy_process_group()  # main() joins it by itself
    else:
        main.set_ranks()
    return work(main, *args)


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
        with torch.autocast(images.device.type, enabled=False):
            return super().forward(images)


class RecordingModel(nn.Module):
    """Keeps every batch it is given; knows the class of `draw_marked`'s images."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(10))
        self.batches = []

    def forward(self, images: Tensor) -> Tensor:
        assert images.dtype == torch.float32
        assert images.is_contiguous(memory_format=torch.channels_last)
        self.batches.append(images.clone())
        return 9.0 * F.one_hot(read_samples(images) % 10, 10) + self.weight


def draw_marked(main: ModuleType):
    """Return images that tell of each pixel where it is from.

    Red is 1 + the sample's number, green 1 + the row, and blue 1 + the column.
    """
    sample, line = torch.arange(SAMPLES), torch.arange(32)
    images = torch.empty(SAMPLES, 3, 32, 32, dtype=torch.uint8)
    images[:, 0] = 1 + sample[:, None, None]
    images[:, 1] = 1 + line[:, None]
    images[:, 2] = 1 + line
    return main.Split(images, sample % 10)


def read_samples(images: Tensor) -> Tensor:
    """Return which samples these images, augmented from `draw_marked`'s, are."""
    pixels = (255 * (images.double() * STD + MEAN)).round()
    return pixels[:, 0].amax(dim=(1, 2)).long() - 1


def cut_synthetic(main: ModuleType, samples: int):
    """Return the first ones of the images that --synthetic trains on."""
    images, labels, *_ = main.draw_synthetic()
    return main.Split(images[:samples], labels[:samples])


# What a rank does


def observe(main: ModuleType) -> dict:
    """Return what a rank is fed, learns and measures."""
    return {
        "evaluation": evaluate(main),
        "fed": train(main, RecordingModel, draw_marked(main), 0.2),
        "exact": train(main, ExactModel, cut_synthetic(main, SAMPLES), 10.0),
        "norm": train(main, NormModel, cut_synthetic(main, SAMPLES), 1.0),
    }


@functools.cache
def observed(example: str, world_size: int) -> list[dict]:
    return run_example(example, world_size, observe)


def alone() -> dict:
    return observed("single_gpu", 1)[0]


def evaluate(main: ModuleType) -> tuple[float, float, set[int]]:
    torch.manual_seed(0)
    model = NormModel()
    batches = list(main.evaluation_batches(cut_synthetic(main, SAMPLES), 16))
    metrics = main.evaluate(model, batches)
    sizes = {len(images) for images, _ in batches}
    return *main.average(metrics, SAMPLES), sizes


def train(main: ModuleType, build, data, learning_rate: float) -> dict:
    """Train as main() does, for the third epoch of a run whose seed is 5."""
    torch.manual_seed(0)
    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    args = argparse.Namespace(learning_rate=learning_rate, weight_decay=5e-4, epochs=1)
    optimizer, scheduler = main.build_optimizer(model, args, GLOBAL_BATCH_SIZE, STEPS)
    ddp_model = model
    if dist.is_initialized():
        ddp_model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        ddp_model.broadcast_buffers = False
    train_set = main.Split(main.view_crops(data.images), data.labels)
    batches = main.training_batches(train_set, GLOBAL_BATCH_SIZE, 5, 3)
    bar = main.progress(3, STEPS)
    metrics = main.train(ddp_model, optimizer, scheduler, batches, bar)
    return {
        "batches": getattr(model, "batches", []),
        "metrics": main.average(metrics, STEPS * GLOBAL_BATCH_SIZE),
        "before": before,
        "after": model.state_dict(),
        "last rate": optimizer.param_groups[0]["lr"],
    }


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
    losses, correct = [], 0
    for image, label in zip(data.images, data.labels, strict=True):
        with torch.no_grad():
            logits = model(((image / 255 - MEAN) / STD).float()[None])[0].double()
        losses.append(torch.logsumexp(logits, 0) - logits[label])
        correct += int(logits.argmax() == label)
    loss, accuracy, sizes = alone()["evaluation"]
    assert loss == pytest.approx(float(sum(losses)) / SAMPLES, abs=1e-6)
    assert accuracy == pytest.approx(correct / SAMPLES)
    assert sizes == {16}


# What the model is fed


@on_several_ranks
def test_ranks_share_every_global_batch(example, world_size):
    """Any number of GPUs trains on the same augmented images, in the same steps."""
    right = alone()["fed"]
    ranks = [rank["fed"] for rank in observed(example, world_size)]
    steps = zip(right["batches"], *(rank["batches"] for rank in ranks), strict=True)
    for whole, *shares in steps:
        sizes = [len(share) for share in shares]
        assert sizes == [GLOBAL_BATCH_SIZE // world_size] * world_size
        # An image's marks tell its sample, crop and flip: equal ones are equal draws.
        images = sorted(image.numpy().tobytes() for image in torch.cat(shares))
        assert images == sorted(image.numpy().tobytes() for image in whole)
    for rank in ranks:
        assert rank["metrics"] == pytest.approx(right["metrics"], abs=1e-6)


def test_an_epoch_has_every_sample_once():
    """No sample is trained on twice in an epoch.

    Only the last, incomplete global batch is left out.
    """
    fed = alone()["fed"]
    assert [len(batch) for batch in fed["batches"]] == [GLOBAL_BATCH_SIZE] * STEPS
    samples = read_samples(torch.cat(fed["batches"])).tolist()
    assert len(set(samples)) == STEPS * GLOBAL_BATCH_SIZE
    # The model knows every image's class, so that it is always right
    # if images and labels stay together.
    assert fed["metrics"][1] == 1


def test_crop_and_flip_are_what_plain_code_makes():
    """A training image is padded with 4 zeros, flipped, cut where drawn, normalised."""
    main = load_example("single_gpu")
    images = draw_marked(main).images
    order, top, left, flip = main.draw_epoch(SAMPLES, 5, 3)
    used = order[: STEPS * GLOBAL_BATCH_SIZE].tolist()
    found = torch.cat(alone()["fed"]["batches"])
    for sample, image in zip(used, found, strict=True):
        padded = np.zeros((3, 40, 40))
        padded[:, 4:36, 4:36] = images[sample]
        expected = np.empty((3, 32, 32))
        for row in range(32):
            for column in range(32):
                source = left[sample] + column
                source = 39 - source if flip[sample] else source
                expected[:, row, column] = padded[:, top[sample] + row, source]
        expected = (torch.from_numpy(expected) / 255 - MEAN) / STD
        torch.testing.assert_close(image.double(), expected, atol=1e-5, rtol=0)


def test_draw_epoch():
    """Every epoch and every seed has its own draws, the same ones in every run.

    Two epochs in a row show each image once as it is and once mirrored.
    """
    draw_epoch = load_example("single_gpu").draw_epoch
    pairs = [(0, 1), (0, 2), (1, 0), (1, 1), (2, 1)]
    draws, again = (
        [[part.tolist() for part in draw_epoch(1000, *pair)] for pair in pairs]
        for _ in range(2)
    )
    assert draws == again
    for order, top, left, _ in draws:
        assert sorted(order) == list(range(1000))
        assert set(top) == set(left) == set(range(9))
    for one, other in itertools.combinations(draws, 2):
        assert all(part != another for part, another in zip(one, other, strict=True))
    flips = zip(draws[0][3], draws[1][3], strict=True)
    assert {flip + next_flip for flip, next_flip in flips} == {1}


# What the ranks learn


@on_several_ranks
def test_ranks_agree_after_training(example, world_size):
    """After an epoch all ranks have the same parameters and statistics, bit for bit."""
    first, *others = (rank["norm"] for rank in observed(example, world_size))
    assert first["after"]["1.num_batches_tracked"] == STEPS
    for name, value in first["after"].items():
        assert not torch.equal(value, first["before"][name]), f"{name} is not trained"
        for other in others:
            assert torch.equal(other["after"][name], value), f"{name} differs"


@on_several_ranks
def test_ranks_take_the_steps_of_one(example, world_size):
    """BatchNorm aside, GPUs that share a batch learn what one learns from it."""
    to_vector = nn.utils.parameters_to_vector
    before = to_vector(alone()["exact"]["before"].values())
    right = to_vector(alone()["exact"]["after"].values())
    for rank in observed(example, world_size):
        found = to_vector(rank["exact"]["after"].values())
        # Of how far it went. With gradients summed, not averaged: 0.9.
        # Without DDP, or on equal shares: 0.7.
        assert (found - right).norm() < 1e-4 * (right - before).norm()


@pytest.mark.parametrize("example", EXAMPLES)
def test_learning_rate(example):
    """The rate peaks at --learning-rate per 256 samples, and is lowest in the end."""
    main = load_example(example)
    args = argparse.Namespace(learning_rate=0.4, weight_decay=0, epochs=4)
    optimizer, scheduler = main.build_optimizer(nn.Linear(1, 1), args, 32, 5)
    rates, peak = [], 0.4 * 32 / 256
    for _ in range(20):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    # OneCycleLR rises for 0.23 of the steps, and then falls from between two.
    assert 0.99 * peak < max(rates) <= peak
    assert rates.index(max(rates)) == 4
    assert rates[0] == pytest.approx(peak / 25)
    assert rates[-1] == pytest.approx(peak / 25 / 1e4)
    # train() moves the schedule on.
    for rank in observed(example, 2 if example in DISTRIBUTED else 1):
        first = 10 * GLOBAL_BATCH_SIZE / 256 / 25
        assert rank["exact"]["last rate"] > 1.2 * first


# main()


def run_main(main: ModuleType, batch_size: int, *more: str, build=None) -> dict:
    """Call main() with a small model, as a step's task; return parameters and lines."""
    sys.argv = ["main.py", "--synthetic", f"--batch-size={batch_size}", "--epochs=2"]
    sys.argv += ["--learning-rate=1", "--seed=3", *more]
    models = []
    main.build_model = lambda: models.append((build or ExactModel)()) or models[0]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        main.main()
    return {
        "parameters": torch.cat([p.detach().flatten() for p in models[0].parameters()]),
        "lines": output.getvalue().splitlines(),
    }


@functools.cache
def run_main_alone() -> dict:
    return run_example("single_gpu", 1, run_main, 256)[0]


@pytest.mark.parametrize("example", DISTRIBUTED)
def test_main_on_two_ranks(example):
    """Two tasks with half the batch size print what one GPU prints, and only once."""
    first, second = run_example(example, 2, run_main, 128)
    alone = run_main_alone()
    assert torch.equal(first["parameters"], second["parameters"])
    # Seen: 1e-6. Gradients summed, not averaged: 0.7. Without DDP: 0.13.
    torch.testing.assert_close(
        first["parameters"], alone["parameters"], atol=1e-4, rtol=0
    )

    assert first["lines"][-3].startswith("Epoch 1: ")
    for line, alone_line in zip(first["lines"][-3:], alone["lines"][-3:], strict=True):
        numbers, right = (
            re.findall(r"(?<=loss )[\d.]+|[\d.]+(?=%)", text)
            for text in (line, alone_line)
        )
        assert len(numbers) == (4 if line.startswith("Epoch") else 2)
        assert [float(n) for n in numbers] == pytest.approx(
            [float(n) for n in right], abs=0.002
        )
    assert not second["lines"]


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
        run_main(main, batch_size, "--epochs=1", build=NormModel)
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


def test_global_batch_larger_than_the_training_set():
    with pytest.raises(SystemExit) as end:
        load_example("multi_node").count_steps(108, 128, 2)
    assert str(end.value) == (
        "main.py: error: a step takes 128 samples and there are only 108 to train on: "
        "choose --batch-size 54 or less"
    )
