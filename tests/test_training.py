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
import tempfile
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from test_checkpoint import load_module, run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

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

pytestmark = pytest.mark.timeout(400)


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
    dist.barrier()  # or another rank, still joining, might meet a closed connection
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
    return main.TensorDataset(images[:samples], labels[:samples])


def pad(main: ModuleType, images: Tensor, labels: Tensor):
    """Return a training set as `load_data` makes it."""
    return main.TensorDataset(F.pad(images, (0, 0, 4, 4, 4, 4)), labels)


on_several_ranks = pytest.mark.parametrize(
    "example, world_size", [("multi_gpu", 2), ("multi_gpu", 3), ("multi_node", 2)]
)
# multi_node computes by the same lines as multi_gpu: its page shows all others.
on_one_and_two = pytest.mark.parametrize(
    "example, world_size", [("single_gpu", 1), ("multi_gpu", 2)]
)


# Evaluation and metrics


def test_evaluation_is_what_plain_code_computes():
    """The reported loss and accuracy are means over the samples, each by itself."""
    torch.manual_seed(0)
    main, model = load_example("single_gpu"), NormModel()
    data = cut_synthetic(main, SAMPLES)
    batches = list(main.evaluation_batches(data, 16))
    loss, accuracy = main.average(main.evaluate(model, batches))
    images, labels = data.tensors
    with torch.no_grad():
        images = images.permute(0, 3, 1, 2)
        logits = model(((images / 255 - MEAN) / STD).float()).double()
    right_loss = F.cross_entropy(logits, labels).item()
    correct = (logits.argmax(dim=1) == labels).sum().item()
    assert loss == pytest.approx(right_loss, abs=1e-6)
    assert accuracy == pytest.approx(correct / SAMPLES)
    assert [len(labels) for _, labels in batches] == [16] * 6 + [7]


# What the model is fed


def test_an_epoch_is_what_plain_code_makes():
    """Every sample comes once, padded with 4 zeros, cut where drawn, flipped if drawn.

    Only the last, incomplete global batch is left out.
    """
    main = load_example("single_gpu")
    data = cut_synthetic(main, SAMPLES)
    draws = main.draw_epoch(SAMPLES, 5, 3, torch.device("cpu"))
    order, top, left, flip = (draw.tolist() for draw in draws)
    train_set = pad(main, *data.tensors)
    fed = list(main.training_batches(train_set, GLOBAL_BATCH_SIZE, 5, 3))
    assert [len(labels) for _, labels in fed] == [GLOBAL_BATCH_SIZE] * STEPS
    images, labels = map(torch.cat, zip(*fed, strict=True))
    used = order[: STEPS * GLOBAL_BATCH_SIZE]
    for sample, image, label in zip(used, images, labels, strict=True):
        padded = torch.zeros(40, 40, 3, dtype=torch.uint8)
        padded[4:36, 4:36] = data[sample][0]
        y, x = top[sample], left[sample]
        right = padded[y : y + 32, x : x + 32]
        assert torch.equal(image, right.flip(1) if flip[sample] else right)
        assert label == data[sample][1]
    assert {flip[sample] for sample in used} == {False, True}


def test_draw_epoch():
    """Every epoch and every seed has its own draws, of every sample and crop.

    Half of the images are mirrored.
    """
    draw_epoch, cpu = load_example("single_gpu").draw_epoch, torch.device("cpu")
    pairs = [(0, 1), (0, 2), (1, 0), (1, 1), (2, 1)]
    draws = [[part.tolist() for part in draw_epoch(1000, *pair, cpu)] for pair in pairs]
    for order, top, left, flip in draws:
        assert 430 < sum(flip) < 570
        assert sorted(order) == list(range(1000))
        assert set(top) == set(left) == set(range(9))
    for one, other in itertools.combinations(draws, 2):
        assert all(part != another for part, another in zip(one, other, strict=True))


# main()


def run_main(main: ModuleType, batch_size: int, build, *more: str) -> dict:
    """Call main() with a small model, as a step's task.

    Return the model's state, the learning rate of each step, what was printed, and how
    many images the model has computed.
    """
    sys.argv = ["main.py", "--synthetic", f"--batch-size={batch_size}", "--epochs=2"]
    sys.argv += ["--learning-rate=1", "--seed=3", *more]
    model, rates, counts = build(), [], []
    model.register_forward_pre_hook(lambda _, inputs: counts.append(len(inputs[0])))
    main.build_model = lambda: model
    register_optimizer_step_pre_hook(
        lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"])
    )
    output = io.TextIOWrapper(io.BytesIO(), write_through=True)
    with (
        tempfile.TemporaryDirectory() as folder,  # for the weights
        contextlib.chdir(folder),
        contextlib.redirect_stdout(output),
    ):
        main.main()
    printed = output.buffer.getvalue().decode()
    found = {"state": model.state_dict(), "rates": rates, "output": printed}
    return found | {"images": sum(counts)}


@functools.cache
def main_on(example: str, world_size: int, build=ExactModel) -> list[dict]:
    """Return what each rank's main() does with its share of every global batch."""
    share = MAIN_BATCH_SIZE // world_size
    return run_example(example, world_size, run_main, share, build)


class LoudModel(ExactModel):
    """Its gradients are so large that float16 overflows in the first steps."""

    def forward(self, images: Tensor) -> Tensor:
        return 64 * nn.Sequential.forward(self, images)


def in_float16(main: ModuleType, batch_size: int) -> dict:
    """Run main() as on a GPU that does not compute bfloat16 itself."""
    # This fills what is not initialised with nan.
    torch.use_deterministic_algorithms(True)
    main.find_dtype = lambda device: torch.float16
    return run_main(main, batch_size, LoudModel, "--learning-rate=1e-3")


def train_in_plain_float16(world_size: int) -> dict[str, Tensor]:
    """Take the steps of such a run: each that overflows is left out, but counted.

    The mean over a rank's share, not over all, is what overflows.
    """
    main = load_example("single_gpu")
    images, labels, *_ = main.draw_synthetic()
    train_set = pad(main, images[:1037], labels[:1037])
    torch.manual_seed(0)
    model = LoudModel().to(memory_format=torch.channels_last)
    rates = iter(main_on("single_gpu", 1)[0]["rates"])  # for a peak of 1
    momenta = [torch.zeros_like(weight) for weight in model.parameters()]
    scale, skipped = 2.0**16, []
    for epoch, step in itertools.product((1, 2), range(MAIN_STEPS // 2)):
        batches = main.training_batches(train_set, MAIN_BATCH_SIZE, 3, epoch)
        images, labels = next(itertools.islice(batches, step, None))
        model.zero_grad()
        for rank in range(world_size):
            share = slice(rank, None, world_size)
            with torch.autocast("cpu", torch.float16):
                logits = model(main.normalize(images[share]))
                loss = F.cross_entropy(logits, labels[share])
            (scale * loss).backward()
        rate = 1e-3 * next(rates)
        finite = all(weight.grad.isfinite().all() for weight in model.parameters())
        skipped.append(not finite)
        if not finite:
            scale /= 2
            continue
        with torch.no_grad():
            for weight, momentum in zip(model.parameters(), momenta, strict=True):
                gradient = weight.grad / scale / world_size + 5e-4 * weight
                momentum.mul_(0.9).add_(gradient)
                weight -= rate * (gradient + 0.9 * momentum)
    assert skipped[0] and not skipped[-1], skipped
    return model.state_dict()


@on_one_and_two
def test_float16(example, world_size):
    """Steps that overflow, the first one among them, change no weight on any rank."""
    share = MAIN_BATCH_SIZE // world_size
    right = train_in_plain_float16(world_size)
    for rank in run_example(example, world_size, in_float16, share):
        # Seen: 2e-5, where the steps move weights by 0.007 and more.
        torch.testing.assert_close(rank["state"], right, atol=1e-4, rtol=0)


def meet_another_gpu(main: ModuleType) -> str:
    main.set_ranks()
    main.find_dtype = lambda _: (torch.bfloat16, torch.float16)[dist.get_rank()]
    with pytest.raises(SystemExit) as end:
        main.setup_distributed()
    dist.barrier()
    return str(end.value)


@pytest.mark.parametrize("example", ["multi_node", "imagenet"])
def test_gpus_of_two_kinds(example):
    """Some would add gradients that a scaler has multiplied: no rank trains."""
    lines = run_example(example, 2, meet_another_gpu)
    assert len(lines) == 2
    for line in lines:
        assert "error: ask for GPUs of one kind, as in --gpus-per-node=a100:4: " in line
        assert "torch.bfloat16" in line and "torch.float16" in line


def read_numbers(output: str) -> list[float]:
    """Return the losses and accuracies: four an epoch, and two of the test."""
    found = re.findall(r"(?<=loss )[\d.]+|[\d.]+(?=%)", output)
    assert len(found) == 10, output
    return [float(number) for number in found]


@on_several_ranks
def test_main_does_not_depend_on_the_ranks(example, world_size):
    """GPUs that share the images learn and print what one does, and print it once."""
    (right,) = main_on("single_gpu", 1)
    first, *others = main_on(example, world_size)
    # Seen: 1e-6. Gradients summed, not averaged: 0.7. Without DDP: 0.13.
    torch.testing.assert_close(first["state"], right["state"], atol=1e-4, rtol=0)
    numbers = read_numbers(first["output"])
    assert numbers == pytest.approx(read_numbers(right["output"]), abs=0.002)
    assert not any(other["output"] for other in others)
    assert sum(rank["images"] for rank in (first, *others)) == right["images"]


@on_several_ranks
def test_ranks_agree_after_training(example, world_size):
    """All have the same parameters and statistics of BatchNorm, bit for bit."""
    first, *others = main_on(example, world_size, NormModel)
    assert first["state"]["1.num_batches_tracked"] == MAIN_STEPS
    for other in others:
        torch.testing.assert_close(other["state"], first["state"], atol=0, rtol=0)


@on_one_and_two
def test_learning_rate(example, world_size):
    """The rate peaks at --learning-rate per 256 samples, and is lowest in the end."""
    rates = main_on(example, world_size)[0]["rates"]
    peak = MAIN_BATCH_SIZE / 256
    assert len(rates) == MAIN_STEPS
    # It rises in a line for 0.3 of the steps from a tenth, and then falls in a line.
    rise = [peak * (0.1 + 0.9 * step / 2) for step in range(3)]
    fall = [peak * step / 7 for step in range(6, -1, -1)]
    assert rates == pytest.approx(rise + fall, rel=0.01, abs=1e-5)


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


@on_one_and_two
def test_steps_neither_wait_nor_talk(example, world_size):
    """No step reads a tensor's value or runs a collective beyond DDP's own.

    Both would make every GPU wait. This counts, on the CPU, Python's calls (`.item()`,
    `.tolist()`, `if tensor`) and the operators that hand a value to Python, those of
    the optimizer and the scheduler included: fused, they read none. It does not see
    `.to("cpu")`, nor what waits on CUDA alone, such as a copy from memory that is not
    pinned. Once an epoch, all is allowed: epochs of 4 and 8 steps are compared.
    """
    few, many = (
        run_example(example, world_size, count_calls, 256 // parts // world_size)
        for parts in (1, 2)
    )
    for one, other in zip(few, many, strict=True):
        growth = {name: other[name] - one[name] for name in {*one, *other}}
        # Those of the steps, and those of the evaluations.
        assert growth.pop("losses") >= 4
        # The gradients are one bucket here.
        assert growth.pop("c10d::allreduce_", 0) == (4 if world_size == 2 else 0)
        assert not any(growth.values()), growth
