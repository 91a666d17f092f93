"""What the training functions of the examples compute, alone and on 2, 3 and 4 ranks.

The shipped main.py files run as they are: every rank is a process of its own, in a real
process group (gloo) on this machine's CPU. Only the model and the pictures are small.
"""

import argparse
import collections
import contextlib
import functools
import importlib.util
import io
import itertools
import multiprocessing
import os
import re
import socket
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

REPOSITORY = Path(__file__).resolve().parents[1]
EXAMPLES = ("single_gpu", "multi_gpu", "multi_node")
DISTRIBUTED = ("multi_gpu", "multi_node")

# A prime: 2, 3 and 4 ranks cannot share the samples evenly.
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
    spec = importlib.util.spec_from_file_location(
        f"{name}_main", REPOSITORY / name / "main.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_ranks(example: str, world_size: int, work, *args) -> list:
    """Return what `work(main, *args)` returned on each rank, in their order."""
    # Every rank is forked from a process that has imported all this once;
    # importing takes seconds.
    multiprocessing.set_forkserver_preload(
        ["pytest", "torch._dynamo", "torch.profiler", "torchvision", "tqdm"]
    )
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            run_rank,
            (example, world_size, work, args, Path(folder)),
            nprocs=world_size,
            start_method="forkserver",
        )
        return [
            torch.load(Path(folder, f"{rank}.pt"), weights_only=False)
            for rank in range(world_size)
        ]


def run_rank(
    rank: int, example: str, world_size: int, work, args: tuple, folder: Path
) -> None:
    torch.set_num_threads(1)
    for name in list(os.environ):
        if name.startswith(("SLURM_", "MASTER_", "RANK", "LOCAL_RANK", "WORLD_SIZE")):
            del os.environ[name]
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    # What srun would tell this rank, for main(),
    # which joins the process group by itself.
    os.environ |= {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(world_size),
        "ENVIRONMENT": "BATCH",
    }
    os.environ |= {
        "SLURM_NTASKS": str(world_size),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
    }
    join = example in DISTRIBUTED and work not in (run_main, count_collectives)
    if join:
        load_example(example).set_ranks()
        store = f"file://{folder}/store"
        timeout = timedelta(seconds=60)
        dist.init_process_group(
            "gloo", store, timeout, rank=rank, world_size=world_size
        )
    torch.manual_seed(0)
    torch.save(work(load_example(example), *args), folder / f"{rank}.pt")
    if join:
        dist.barrier()
        dist.destroy_process_group()


def wrap(model: nn.Module) -> nn.Module:
    """Return what main() gives to train()."""
    if not dist.is_initialized():
        return model
    ddp_model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    ddp_model.broadcast_buffers = False
    return ddp_model


# Models and pictures


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
    """Keeps every batch it is given; knows the class of `draw_marked`'s pictures."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(10))
        self.batches = []

    def forward(self, images: Tensor) -> Tensor:
        self.batches.append(images.clone())
        return 9.0 * F.one_hot(read_samples(images) % 10, 10) + self.weight


def draw_marked(main: ModuleType):
    """Return pictures that tell of each pixel where it is from.

    Red is 1 + the sample's number, green 1 + the row, and blue 1 + the column.
    """
    sample, line = torch.arange(SAMPLES), torch.arange(32)
    images = torch.empty(SAMPLES, 3, 32, 32, dtype=torch.uint8)
    images[:, 0] = 1 + sample[:, None, None]
    images[:, 1] = 1 + line[:, None]
    images[:, 2] = 1 + line
    return main.Split(images, sample % 10)


def read_samples(images: Tensor) -> Tensor:
    """Return which samples these pictures, augmented from `draw_marked`'s, are."""
    pixels = (255 * (images.double() * STD + MEAN)).round()
    return pixels[:, 0].amax(dim=(1, 2)).long() - 1


def cut_synthetic(main: ModuleType, samples: int):
    """Return the first ones of the images that --synthetic trains on."""
    images, labels, *_ = main.draw_synthetic()
    return main.Split(images[:samples], labels[:samples])


def train(main: ModuleType, model, optimizer, scheduler, data, *epoch: int) -> Tensor:
    """Train as main() does: on these images, for one of its epochs."""
    global_batch_size = epoch[0]
    train_set = main.Split(main.view_crops(data.images), data.labels)
    batches = main.training_batches(train_set, *epoch)
    bar = main.progress(epoch[-1], len(data) // global_batch_size)
    return main.train(model, optimizer, scheduler, batches, bar)


def evaluate_on(main: ModuleType, model: nn.Module, data, batch_size: int) -> Tensor:
    return main.evaluate(model, main.evaluation_batches(data, batch_size))


def build_optimizer(
    main: ModuleType, model: nn.Module, steps: int, learning_rate: float = 0.2
):
    args = argparse.Namespace(learning_rate=learning_rate, weight_decay=5e-4, epochs=1)
    return main.build_optimizer(model, args, GLOBAL_BATCH_SIZE, steps)


# Evaluation and metrics


def evaluate(main: ModuleType) -> tuple[float, float]:
    metrics = evaluate_on(main, NormModel(), cut_synthetic(main, SAMPLES), 16)
    return main.average(metrics, SAMPLES)


@functools.cache
def evaluate_alone() -> tuple[float, float]:
    return run_ranks("single_gpu", 1, evaluate)[0]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("example", DISTRIBUTED)
def test_evaluation_does_not_depend_on_the_ranks(example, world_size):
    """Any number of GPUs reports the same loss and accuracy for the same weights."""
    alone_loss, alone_accuracy = evaluate_alone()
    for loss, accuracy in run_ranks(example, world_size, evaluate):
        assert loss == pytest.approx(alone_loss, abs=1e-6, rel=0)
        assert accuracy == alone_accuracy


def test_evaluation_is_what_plain_code_computes():
    """The reported loss and accuracy are means over the samples, each by itself."""
    main = load_example("single_gpu")
    torch.manual_seed(0)
    model, data = NormModel().eval(), cut_synthetic(main, SAMPLES)
    losses, correct = [], 0
    for image, label in zip(data.images, data.labels, strict=True):
        with torch.no_grad():
            logits = model(((image / 255 - MEAN) / STD).float()[None])[0].double()
        losses.append(torch.logsumexp(logits, 0) - logits[label])
        correct += int(logits.argmax() == label)
    loss, accuracy = evaluate_alone()
    assert loss == pytest.approx(float(sum(losses)) / SAMPLES, abs=1e-6)
    assert accuracy == pytest.approx(correct / SAMPLES)


def count_uneven_batches(main: ModuleType) -> dict:
    """Measure 22 samples in batches of 5, 5, 3, 5 and 4; two ranks share them."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(22, 10, generator=generator).bfloat16()
    labels = torch.randint(10, (22,), generator=generator)
    pieces = list(
        zip(logits.split([5, 5, 3, 5, 4]), labels.split([5, 5, 3, 5, 4]), strict=True)
    )
    if dist.is_initialized():
        pieces = pieces[:3] if dist.get_rank() == 0 else pieces[3:]
    metrics = torch.zeros(3, dtype=torch.float64)
    for some_logits, some_labels in pieces:
        main.measure(metrics, some_logits, some_labels)
    outcome = {"average": main.average(metrics.clone(), 22)}
    for samples in (21, 23):
        try:
            outcome[samples] = main.average(metrics.clone(), samples)
        except AssertionError as error:
            outcome[samples] = str(error)
    right = logits.double().log_softmax(dim=1)[torch.arange(22), labels]
    outcome["right"] = (
        -right.mean().item(),
        (logits.argmax(dim=1) == labels).double().mean().item(),
    )
    return outcome


@pytest.mark.parametrize("example", EXAMPLES)
def test_metrics_are_averaged_over_samples(example):
    """A small last batch weighs by its samples.

    A sample too many or too few stops the run.
    """
    for outcome in run_ranks(
        example, 2 if example in DISTRIBUTED else 1, count_uneven_batches
    ):
        assert outcome["average"] == pytest.approx(outcome["right"], abs=1e-6)
        assert outcome[21] == "22 samples were counted, not 21"
        assert outcome[23] == "22 samples were counted, not 23"


# What the model is fed


def record(main: ModuleType) -> dict:
    """Train for an epoch; return the batches the model was given, and the metrics."""
    model = RecordingModel()
    optimizer, scheduler = build_optimizer(main, model, STEPS)
    epoch = (GLOBAL_BATCH_SIZE, 5, 3)
    metrics = train(main, wrap(model), optimizer, scheduler, draw_marked(main), *epoch)
    return {
        "batches": model.batches,
        "metrics": main.average(metrics, STEPS * GLOBAL_BATCH_SIZE),
    }


@functools.cache
def record_alone() -> dict:
    return run_ranks("single_gpu", 1, record)[0]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("example", DISTRIBUTED)
def test_ranks_share_every_global_batch(example, world_size):
    """Any number of GPUs trains on the same augmented pictures, in the same steps."""
    alone = record_alone()
    ranks = run_ranks(example, world_size, record)
    assert [len(rank["batches"]) for rank in ranks] == [STEPS] * world_size
    for step, alone_batch in enumerate(alone["batches"]):
        shares = [rank["batches"][step] for rank in ranks]
        assert [len(share) for share in shares] == [
            GLOBAL_BATCH_SIZE // world_size
        ] * world_size
        # A picture's marks tell its sample, crop and flip:
        # equal pictures are equal draws.
        pictures = sorted(picture.numpy().tobytes() for picture in torch.cat(shares))
        assert pictures == sorted(picture.numpy().tobytes() for picture in alone_batch)
    for rank in ranks:
        assert rank["metrics"] == pytest.approx(alone["metrics"], abs=1e-6)


def test_an_epoch_has_every_sample_once():
    """No sample is trained on twice in an epoch.

    Only the last, incomplete global batch is left out.
    """
    alone = record_alone()
    assert [len(batch) for batch in alone["batches"]] == [GLOBAL_BATCH_SIZE] * STEPS
    assert (
        len(set(read_samples(torch.cat(alone["batches"])).tolist()))
        == STEPS * GLOBAL_BATCH_SIZE
    )
    # The model knows every picture's class, so that it is always right
    # if pictures and labels stay together.
    assert alone["metrics"][1] == 1


@pytest.mark.parametrize("example", EXAMPLES)
def test_crop_and_flip_are_what_plain_code_makes(example):
    """A training picture is padded with 4 zeros, flipped, and cut where drawn."""
    recorded = (
        record_alone() if example == "single_gpu" else run_ranks(example, 1, record)[0]
    )
    main = load_example(example)
    images = draw_marked(main).images
    order, top, left, flip = main.draw_epoch(SAMPLES, 5, 3)
    used = order[: STEPS * GLOBAL_BATCH_SIZE].tolist()
    for sample, picture in zip(used, torch.cat(recorded["batches"]), strict=True):
        padded = np.zeros((3, 40, 40))
        padded[:, 4:36, 4:36] = images[sample]
        expected = np.empty((3, 32, 32))
        for row in range(32):
            for column in range(32):
                source = left[sample] + column
                source = 39 - source if flip[sample] else source
                expected[:, row, column] = padded[:, top[sample] + row, source]
        expected = (torch.from_numpy(expected) / 255 - MEAN) / STD
        torch.testing.assert_close(picture.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("example", EXAMPLES)
def test_normalize(example):
    """Colours at CIFAR-10's mean become 0, one standard deviation above it 1.

    They are float32 in channels_last.
    """
    main = load_example(example)
    values = (
        torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 3, 16, 16)
    )
    normal = main.normalize(values)
    assert normal.dtype == torch.float32
    assert normal.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(
        normal.double(), (values / 255 - MEAN) / STD, atol=1e-5, rtol=0
    )
    for target, colours in ((0, MEAN), (1, MEAN + STD)):
        # To the nearest of 256 levels: at most half a level, 1/510, off.
        image = (255 * colours).round().byte().expand(1, 3, 32, 32)
        assert (
            main.normalize(image).double() - target
        ).abs().max() <= 1 / 510 / STD.min()


@pytest.mark.parametrize("example", EXAMPLES)
def test_draw_epoch(example):
    """Every epoch and every seed has its own draws, the same ones in every run."""
    draw_epoch = load_example(example).draw_epoch
    arguments = [(0, 1), (0, 2), (1, 0), (1, 1), (2, 1)]
    draws = {pair: draw_epoch(1000, *pair) for pair in arguments}
    for pair, (order, top, left, flip) in draws.items():
        assert sorted(order.tolist()) == list(range(1000))
        assert set(top.tolist()) == set(left.tolist()) == set(range(9))
        assert set(flip.tolist()) == {0, 1}
        assert (top != left).any()
        for drawn, again in zip(draws[pair], draw_epoch(1000, *pair), strict=True):
            assert (drawn == again).all()
        for other in arguments:
            if other != pair:
                for drawn, another in zip(draws[pair], draws[other], strict=True):
                    assert (drawn != another).any()


@pytest.mark.parametrize("example", EXAMPLES)
def test_flips_alternate(example):
    """Two epochs in a row show each image once as it is and once mirrored."""
    draw_epoch = load_example(example).draw_epoch
    flips = [draw_epoch(1000, 3, epoch)[3] for epoch in range(1, 6)]
    for flip, next_flip in itertools.pairwise(flips):
        assert (flip + next_flip == 1).all()


# What the ranks learn


def learn(main: ModuleType, build, learning_rate: float) -> tuple[dict, dict]:
    """Return the state of a model before and after 4 steps."""
    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer, scheduler = build_optimizer(main, model, 4, learning_rate=learning_rate)
    data = cut_synthetic(main, 4 * GLOBAL_BATCH_SIZE + 1)
    train(main, wrap(model), optimizer, scheduler, data, GLOBAL_BATCH_SIZE, 0, 1)
    return before, model.state_dict()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("example", DISTRIBUTED)
def test_ranks_agree_after_training(example, world_size):
    """After an epoch all ranks have the same parameters and statistics, bit for bit."""
    ranks = run_ranks(example, world_size, learn, NormModel, 1.0)
    before, first = ranks[0]
    assert first["1.num_batches_tracked"] == 4
    for name, value in first.items():
        assert not torch.equal(value, before[name]), f"{name} has not been trained"
        for _, after in ranks[1:]:
            assert torch.equal(after[name], value), f"{name} differs between ranks"


def relative_change(states: tuple[dict, dict], reference: tuple[dict, dict]) -> float:
    """Return how far these are from the reference, in units of how far it went."""
    before, after = (
        nn.utils.parameters_to_vector(state.values()) for state in reference
    )
    return float(
        (nn.utils.parameters_to_vector(states[1].values()) - after).norm()
        / (after - before).norm()
    )


@functools.cache
def learn_alone() -> tuple[dict, dict]:
    return run_ranks("single_gpu", 1, learn, ExactModel, 10.0)[0]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("example", DISTRIBUTED)
def test_ranks_take_the_steps_of_one(example, world_size):
    """BatchNorm aside, two GPUs with half the batch each learn what one learns."""
    for states in run_ranks(example, world_size, learn, ExactModel, 10.0):
        # Seen: 4e-7. With gradients summed, not averaged: 0.9.
        # Without DDP, or on equal shares: 0.7.
        assert relative_change(states, learn_alone()) < 1e-4


def learn_rates(main: ModuleType, global_batch_size: int) -> dict:
    """Train for 4 epochs of 5 steps and return the learning rate of every step."""
    model = ExactModel()
    args = argparse.Namespace(learning_rate=0.4, weight_decay=0, epochs=4)
    optimizer, scheduler = main.build_optimizer(model, args, global_batch_size, 5)
    rates = []
    optimizer.register_step_pre_hook(
        lambda *_: rates.append(optimizer.param_groups[0]["lr"])
    )
    ddp_model = wrap(model)
    data = cut_synthetic(main, 6 * global_batch_size - 1)
    for number in range(1, 5):
        epoch = (global_batch_size, 0, number)
        train(main, ddp_model, optimizer, scheduler, data, *epoch)
    try:
        scheduler.step()
    except ValueError:
        return {"rates": rates, "at its end": True}
    return {"rates": rates, "at its end": False}


@pytest.mark.parametrize("global_batch_size", [8, 32])
@pytest.mark.parametrize("example", EXAMPLES)
def test_learning_rate(example, global_batch_size):
    """The rate peaks at --learning-rate per 256 samples, and is lowest in the end."""
    world_size = 2 if example in DISTRIBUTED else 1
    for learned in run_ranks(example, world_size, learn_rates, global_batch_size):
        rates, peak = learned["rates"], 0.4 * global_batch_size / 256
        assert len(rates) == 20
        # OneCycleLR rises for 0.23 of the steps, and then falls from between two.
        assert 0.99 * peak < max(rates) <= peak
        assert rates.index(max(rates)) == 4
        assert rates[0] == pytest.approx(peak / 25)
        assert rates[-1] == pytest.approx(peak / 25 / 1e4)
        assert learned["at its end"]


# What a step costs

READING_FUNCTIONS = (
    "item",
    "tolist",
    "numpy",
    "cpu",
    "__bool__",
    "__float__",
    "__int__",
    "__array__",
)
READING_OPERATORS = (
    "aten::_local_scalar_dense",
    "aten::is_nonzero",
    "aten::equal",
    "aten::nonzero",
)


class CallCounter(TorchFunctionMode):
    """Counts the functions that Python calls on tensors."""

    def __init__(self):
        super().__init__()
        self.calls = collections.Counter()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.calls[getattr(function, "__name__", "")] += 1
        return function(*args, **(kwargs or {}))


def count_calls(work) -> dict:
    """Run `work()`; count the collectives, and the waits for a tensor's values."""
    with (
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU]
        ) as profile,
        CallCounter() as counter,
    ):
        work()
    operators = collections.Counter(event.name for event in profile.events())
    return {
        "collectives": collections.Counter(
            {n: c for n, c in operators.items() if n.startswith("c10d::")}
        ),
        "reads": {name: operators[name] for name in READING_OPERATORS}
        | {name: counter.calls[name] for name in READING_FUNCTIONS},
        "losses": operators["aten::cross_entropy_loss"],
    }


def count_steps(main: ModuleType, steps: int) -> dict:
    """Count what so many steps of train, evaluate and bare DDP call, and `average`."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    data = cut_synthetic(main, steps * GLOBAL_BATCH_SIZE)
    model = NormModel()
    ddp_model, bare_model = wrap(model), wrap(NormModel())
    optimizer, scheduler = build_optimizer(main, model, steps)

    def run_bare_steps():
        for images in data.images.float().split(GLOBAL_BATCH_SIZE):
            bare_model(images).sum().backward()

    metrics = torch.ones(3, dtype=torch.float64)
    return {
        "train": count_calls(
            lambda: train(
                main, ddp_model, optimizer, scheduler, data, GLOBAL_BATCH_SIZE, 0, 1
            )
        ),
        "evaluate": count_calls(
            lambda: evaluate_on(main, model, data, GLOBAL_BATCH_SIZE // world_size)
        ),
        "bare DDP": count_calls(run_bare_steps),
        "average": count_calls(lambda: main.average(metrics, world_size)),
    }


def count_2_and_6_steps(main: ModuleType) -> tuple[dict, dict]:
    return count_steps(main, 2), count_steps(main, 6)


@pytest.mark.parametrize("example", EXAMPLES)
def test_steps_neither_wait_nor_talk(example):
    """No step reads a tensor's value or runs a collective beyond DDP's own.

    Both would make every GPU wait. This counts, on the CPU, Python's calls (`.item()`,
    `.tolist()`, `if tensor`) and the operators that hand a value to Python, those of
    the optimizer and the scheduler included: fused, they read none. It does not see
    `.to("cpu")`, nor what waits on CUDA alone, such as a copy from memory that is not
    pinned. Once an epoch, all is allowed: 2 steps are compared with 6.
    """
    for few, many in run_ranks(
        example, 2 if example in DISTRIBUTED else 1, count_2_and_6_steps
    ):
        for work in ("train", "evaluate"):
            assert many[work]["losses"] == 3 * few[work]["losses"] > 0
            assert many[work]["reads"] == few[work]["reads"]
        growth = {
            work: many[work]["collectives"] - few[work]["collectives"] for work in many
        }
        assert growth["train"] == growth["bare DDP"]
        assert not growth["evaluate"]
        if example in DISTRIBUTED:
            assert growth["bare DDP"]["c10d::allreduce_"] == 4
            assert few["average"]["collectives"] == {"c10d::allreduce_": 1}
        else:
            assert not growth["train"]


# main()


def run_main(main: ModuleType, batch_size: int, port: int, *more, build=None) -> dict:
    """Call main() with a small model, as a step's task; return parameters and lines."""
    os.environ["MASTER_PORT"] = str(port)
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


def find_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def count_collectives(main: ModuleType, port: int, epochs: int) -> dict:
    counts = count_calls(
        lambda: run_main(main, 128, port, f"--epochs={epochs}", build=NormModel)
    )
    return counts["collectives"]


@pytest.mark.parametrize("example", DISTRIBUTED)
def test_collectives_of_an_epoch(example):
    """Each step sums its gradients, in one bucket here. All else is once an epoch."""
    few, many = (
        run_ranks(example, 2, count_collectives, find_port(), epochs)
        for epochs in (1, 2)
    )
    steps, buffers = 4, 3  # 1037 images in steps of 256; BatchNorm's statistics
    for one, two in zip(few, many, strict=True):
        growth = {name: two[name] - one[name] for name in two}
        # The metrics of training and those of validation are a sum each.
        assert growth.pop("c10d::allreduce_") == steps + 2
        assert growth.pop("c10d::broadcast_") == buffers
        assert not any(growth.values()), growth


def count_compilations(main: ModuleType) -> dict:
    torch._dynamo.reset()
    run_main(main, 32, 0, "--epochs=1", "--compile", build=NormModel)
    return dict(torch._dynamo.utils.counters["stats"])


def test_compile_once_for_training_and_once_for_evaluation():
    """115 images to validate and 256 to test end with short batches: no new shape."""
    (stats,) = run_ranks("single_gpu", 1, count_compilations)
    assert stats["unique_graphs"] == 2, stats


@functools.cache
def run_main_alone() -> dict:
    return run_ranks("single_gpu", 1, run_main, 256, 0)[0]


@pytest.mark.parametrize("example", DISTRIBUTED)
def test_main_on_two_ranks(example):
    """Two tasks with half the batch size print what one GPU prints, and only once."""
    first, second = run_ranks(example, 2, run_main, 128, find_port())
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
