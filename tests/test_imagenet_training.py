"""What imagenet/main.py and data.py train on and compute, stopped and started again.

The shipped main.py runs as it is, with flags and environment only: every rank is a
process of its own, in a real process group (gloo) on this machine's CPU, without Slurm.
Where a number finer than the printed ones is needed, its functions are called.
"""

import atexit
import collections
import functools
import gzip
import importlib
import itertools
import json
import multiprocessing
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from drawn_imagenet import bad_png
from PIL import Image
from slurm_jobs import ARGUMENTS_LINE, IMAGENET_EPOCH_LINE, call
from test_checkpoint import REPOSITORY, Started
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchvision import models

pytestmark = pytest.mark.timeout(400)

main = importlib.import_module("main")
data = importlib.import_module("data")

CPU = torch.device("cpu")
SAVED = 75  # the status of ranks that were asked to stop
# Of 23 images to validate, neither 2 nor 3 ranks have the same number each.
TINY = [
    "--synthetic",
    "--image-size=32",
    "--limit-train-samples=67",
    "--limit-valid-samples=23",
    "--batch-size=4",
]
DUMMY = [*TINY, "--model=dummy", "--workers=1"]
ENDLESS = [*DUMMY, "--epochs=99999"]
WEIGHTS_LINE = re.compile(r"^Weights SHA-256 ([0-9a-f]{64}), commit \S+$", re.MULTILINE)


# Runs of main.py


class Training(Started):
    """imagenet/main.py on all of its ranks, or on the first ones, and its log."""

    def __init__(
        self, folder: Path, world_size: int, *arguments: str, started=0, **env: str
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self.checkpoints = folder / "checkpoints" / "none"
        log = folder / f"{len(list(folder.glob('*.log')))}.log"
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        env |= {
            "SLURM_NTASKS": str(world_size),
            "SLURM_STEP_NUM_TASKS": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        ranks = range(started or world_size)
        envs = [env | {"SLURM_PROCID": str(rank)} for rank in ranks]
        jobs = [("imagenet", arguments, log, env) for env in envs]
        super().__init__(log, run_main, jobs)

    def __exit__(self, *error):
        for worker in self.children():
            os.kill(worker, signal.SIGKILL)
        super().__exit__(*error)

    def wait_for(self, happened):
        deadline = time.monotonic() + 200
        while not happened():
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.002)

    def wait_for_checkpoint(self, epoch: int, step: int):
        path = self.checkpoints / f"epoch-{epoch:03}-step-{step:06}.pt"
        self.wait_for(path.exists)

    def newest(self) -> Path:
        return max(self.checkpoints.glob("epoch-*"))

    def children(self) -> set[int]:
        """Return the processes that the ranks have started."""
        ranks = ",".join(str(process.pid) for process in self.processes)
        found = subprocess.run(["pgrep", "--parent", ranks], capture_output=True)
        return set(map(int, found.stdout.split()))


def run_main(example: str, arguments, log: Path, environment: dict):
    """Do what `python main.py` does, in a process that has imported most of it."""
    passed_on = {name: os.environ[name] for name in ("PATH", "HOME")}
    environment = passed_on | {"CUDA_VISIBLE_DEVICES": ""} | environment
    torch.set_num_threads(1)
    # As in a process that no forkserver has made.
    multiprocessing.set_start_method("fork", force=True)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(environment.get("FOLDER", log.parent))
    sys.argv = ["main.py", *arguments]
    try:
        if "FLOAT16" in environment:
            main_in_float16()
        else:
            runpy.run_path(str(REPOSITORY / example / "main.py"), run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # which a process of multiprocessing does not


def main_in_float16():
    """Run imagenet's main() as on a GPU that does not compute bfloat16 itself."""
    main.find_dtype = lambda device: torch.float16
    # So the first steps overflow.
    scaler = functools.partial(torch.amp.GradScaler, init_scale=2.0**32)
    torch.amp.GradScaler = scaler
    # This fills what is not initialised with nan.
    torch.use_deterministic_algorithms(True)
    main.main()


def still_running(processes: set[int]) -> list[int]:
    # One that has ended, and only waits for its parent to ask, has no executable.
    return [number for number in processes if os.path.exists(f"/proc/{number}/exe")]


def run_to_its_end(
    folder: Path, world_size: int, *arguments: str, status: int = 0, **env: str
) -> Training:
    with Training(folder, world_size, *arguments, **env) as training:
        assert training.join() == [status] * world_size, training.text()
    return training


def errors(text: str) -> list[str]:
    return [
        line
        for line in text.splitlines()
        if "error" in line.lower() or "Traceback" in line
        if not ARGUMENTS_LINE.match(line)
    ]


# Stopped and started again

# A model with BatchNorm and dropout, on 3 ranks: of 2 numbers, the sum does not depend
# on their order, which rebuild_buckets keeps. A validation takes some seconds.
RANKS = 3
RUN = [
    *TINY,
    "--limit-train-samples=100",
    "--limit-valid-samples=598",
    "--model=mobilenet_v3_small",
    "--epochs=2",
    "--batch-size=2",
    "--accumulate=2",
    "--save-steps=3",
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Training:
    """The run, when nothing happens to it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return run_to_its_end(folder, RANKS, *RUN, "--workers=1")


def test_a_whole_run(undisturbed):
    """It says what it trains with and on, a line an epoch, and last its weights."""
    text = undisturbed.text()
    assert "\n  model: mobilenet_v3_small\n" in text, text
    lines = [line for line in text.splitlines() if not ARGUMENTS_LINE.match(line)]
    no_gpu, head, *epochs, weights, last = lines
    assert no_gpu == "warning: no GPU found, training on the CPU"
    assert head == (
        "World size 3: 8 steps an epoch, 3 x 4 samples each, of 100; "
        "598 to validate; 10 classes, 0 to 9; mobilenet_v3_small, 32 x 32 pixels, "
        "2 epochs; computing in float32"
    )
    assert [IMAGENET_EPOCH_LINE.match(line)[1] for line in epochs] == ["1", "2"]
    assert WEIGHTS_LINE.match(weights)
    best = undisturbed.checkpoints / "best.pt"
    assert last.endswith(f"python classify.py '{best}' IMAGE_OR_FOLDER"), last


def test_the_best_weights_in_plain_code(tmp_path):
    """Two lines load best.pt. Its accuracy is the best one that the log has."""
    training = run_to_its_end(tmp_path, 2, *DUMMY, "--epochs=4", "--learning-rate=50")
    model = main.build_model(options(), 10)
    best = torch.load(training.checkpoints / "best.pt", weights_only=True)
    model.load_state_dict(best["model"])

    _, valid_set = data.load_data(options())
    images, labels = zip(*(valid_set[0, index] for index in range(23)), strict=True)
    logits = model((torch.stack(images) / 255 - MEAN) / STD)
    correct = (logits.argmax(dim=1) == torch.tensor(labels)).sum().item()
    told = [found[4] for found in IMAGENET_EPOCH_LINE.findall(training.text())]
    assert len(set(told)) > 1
    assert f"{100 * correct / 23:.2f}" == max(told, key=float)
    assert best["accuracy"] == correct / 23


def test_images_that_no_model_takes(tmp_path):
    """As a ViT, which takes 224 x 224 pixels only. Here they are too small."""
    arguments = [*DUMMY, "--model=squeezenet1_1", "--image-size=4"]
    text = run_to_its_end(tmp_path, 2, *arguments, status=1).text()
    (line,) = errors(text)
    assert line.startswith("main.py: error: the model does not take --image-size 4: ")


def test_classify(tmp_path):
    """A tree of CLASS/ alone trains, and classify.py is right as often as the log says.

    One image in ten was held out. A damaged image does not end it.
    """
    rng = np.random.default_rng(0)
    photos, held_out = tmp_path / "photos", tmp_path / "apple" / "held out"
    for label, name in enumerate(("a cat", "apple", "Bär")):
        for folder in (photos / name, held_out / name, photos / name / "@eaDir"):
            folder.mkdir(parents=True)
        (photos / name / "@eaDir" / "0.jpg").write_bytes(b"a file server's")
        for number in range(30):
            pixels = rng.integers(0, 200, size=(40, 48, 3))
            pixels[..., label] += rng.integers(0, 50)
            path = photos / name / f"{number:02}.JPG"
            Image.fromarray(pixels.astype(np.uint8)).save(path)
            if number % 10 == 0:
                shutil.copy(path, held_out / name)
    arguments = "--epochs=3 --learning-rate=9 --image-size=32 --batch-size=5".split()
    text = run_to_its_end(
        tmp_path, 2, *DUMMY[-2:], *arguments, f"--data-dir={photos}"
    ).text()
    assert f"{photos} has no train and val: one image in ten is held out" in text
    assert "of 81; 9 to validate; 3 classes, Bär to apple; dummy" in text
    accuracy = max(float(epoch[4]) for epoch in IMAGENET_EPOCH_LINE.findall(text))
    assert accuracy > 40, text

    (held_out / "apple" / "9.png").write_bytes(bad_png())
    for name in ("apple/._1.jpg", "apple/1.gif", "1.jpg"):
        shutil.copy(held_out / "apple" / "00.JPG", held_out / name)
    shutil.copy(held_out / "1.jpg", os.fsencode(held_out) + b"/\xe9.jpg")
    (command,) = re.findall(r"^To use the best weights: \S+ (.*) IMAGE_", text, re.M)
    command = f"'{sys.executable}' {command} '{held_out}'"
    result = call(["bash", "-c", command], cwd=REPOSITORY / "imagenet")
    assert result.exit_code == 0, result
    assert "\n12 images, 1 cannot be decoded; 2 other files\n" in result.output, result
    assert "\n2 are in folders of no class\n" in result.output, result
    assert f"\n{held_out}/\\udce9.jpg " in result.output, result
    assert result.find(r"^\d of 9 are right: (.*)%$") == [f"{accuracy:.2f}"], result
    (broken,) = result.find("^cannot decode image (.*?): ")
    assert broken == f"{held_out}/apple/9.png"
    (found,) = result.find(rf"^{held_out}/a cat/00.JPG (.*)$")
    assert sorted(re.findall(r"[\d.]+% ([^\d%]+?)(?: |$)", found)), found


def stop(
    folder: Path,
    world_size: int,
    arguments,
    number: int,
    epoch: int,
    step: int,
    **env: str,
) -> Path:
    """Signal the last rank when a checkpoint is there; return the one they all leave.

    Slurm signals all of them, but not at the same moment.
    """
    with Training(folder, world_size, *arguments, **env) as training:
        training.wait_for_checkpoint(epoch, step)
        for _ in range(2):  # from srun and from uv
            os.kill(training.processes[-1].pid, number)
        assert training.join() == [SAVED] * world_size, training.text()
    assert not errors(training.text())
    said = r"^Asked to stop: saved step (\d+) of epoch (\d+), to go on from there$"
    ((step, epoch),) = re.findall(said, training.text(), re.MULTILINE)
    newest = training.newest()
    assert newest.name == f"epoch-{int(epoch):03}-step-{int(step):06}.pt"
    return newest


def check_that_nothing_is_lost(folder: Path, newest: Path, right: Training):
    """Run to the end: the same weights to the last bit, and the same epoch lines."""
    resumed = run_to_its_end(folder, RANKS, *RUN, "--workers=1")
    assert f"Resuming from {newest}\n" in resumed.text()
    told = WEIGHTS_LINE.findall(right.text())
    assert WEIGHTS_LINE.findall(resumed.text()) == told
    logs = "".join(path.read_text() for path in folder.glob("*.log"))
    assert set(IMAGENET_EPOCH_LINE.findall(logs)) == set(
        IMAGENET_EPOCH_LINE.findall(right.text())
    )


def test_killed_then_stopped_in_a_validation(undisturbed, tmp_path):
    """A killed rank's workers end, and so do the other ranks, which need it.

    The next start goes on from the newest checkpoint. It is stopped in a validation,
    which may take longer than is left: the start after makes it.
    """
    with Training(tmp_path, RANKS, *RUN, "--workers=2") as training:
        training.wait_for_checkpoint(1, 3)
        workers = training.children()
        training.processes[1].kill()
        first, killed, third = training.join()
        assert killed == -signal.SIGKILL
        # Not as if they had saved.
        assert not {first, third} & {None, 0, SAVED}, training.text()
        newest = training.newest()
        # A worker looks every 5 s whether its parent is there.
        training.wait_for(lambda: not still_running(workers))
    arguments = [*RUN, "--workers=0", "--save-steps=4"]
    stopped = stop(tmp_path, RANKS, arguments, signal.SIGTERM, 1, 8)
    assert stopped.name == "epoch-001-step-000008.pt"
    text = (tmp_path / "1.log").read_text()
    assert f"Resuming from {newest}\n" in text and not IMAGENET_EPOCH_LINE.search(text)
    check_that_nothing_is_lost(tmp_path, stopped, undisturbed)


def test_float16(tmp_path):
    """Steps that overflow change no weight, and a run that was stopped loses nothing.

    It may go on in another precision.
    """
    arguments = [*TINY, "--model=shufflenet_v2_x0_5", "--epochs=2", "--accumulate=2"]
    arguments += ["--save-steps=1", "--keep=99"]
    half = {"FLOAT16": "1"}
    right = run_to_its_end(tmp_path / "right", 2, *arguments, **half)
    assert "; computing in float16\n" in right.text()
    first, second, *_, last = (
        torch.load(path, weights_only=True)
        for path in sorted(right.checkpoints.glob("epoch-*"))
    )
    assert first["scaler"]["scale"] == 2.0**31
    assert last["scaler"]["scale"] < second["scaler"]["scale"]
    for name, weight in first["model"].items():
        stays = torch.equal(weight, second["model"][name])
        # A pass over the images counts, for BatchNorm.
        assert stays != any(part in name for part in ("running", "num_batches")), name
    stop(tmp_path / "stopped", 2, arguments, signal.SIGUSR1, 1, 2, **half)
    shutil.copytree(tmp_path / "stopped", tmp_path / "float32")
    resumed = run_to_its_end(tmp_path / "stopped", 2, *arguments, **half)
    told = WEIGHTS_LINE.findall(right.text())
    assert WEIGHTS_LINE.findall(resumed.text()) == told
    for precision, env in (("float32", {}), ("float16", half)):
        text = run_to_its_end(tmp_path / "float32", 2, *arguments, **env).text()
        assert f"; computing in {precision}\n" in text and not errors(text)


def test_evaluation_does_not_depend_on_the_ranks(undisturbed, tmp_path):
    """One rank makes the last validation again: the same numbers, the same weights.

    It has no need to pad its batches, as the three ranks had.
    """
    shutil.copytree(undisturbed.checkpoints, tmp_path / "checkpoints" / "none")
    again = run_to_its_end(tmp_path, 1, *RUN, "--workers=1").text()
    assert f"Resuming from {tmp_path}/checkpoints/none/epoch-002-step-000008" in again
    right = undisturbed.text()
    (line,) = IMAGENET_EPOCH_LINE.findall(again)
    assert line == IMAGENET_EPOCH_LINE.findall(right)[-1]
    assert WEIGHTS_LINE.findall(again) == WEIGHTS_LINE.findall(right)


PLAIN = ["--epochs=3", "--learning-rate=3", "--seed=5"]


def train_in_plain_code() -> dict[str, torch.Tensor]:
    """Take the steps of a run with PLAIN, of 4 samples each; return the weights.

    The loss is the mean over a global batch, labels smoothed. The rate rises for 8 of
    90 epochs to --learning-rate per 256 samples, then falls. The bias does not decay.
    """
    args = options(*PLAIN)
    train_set, _ = data.load_data(args)
    torch.manual_seed(5)
    model = main.build_model(args, 10)
    weight, bias = model.parameters()
    groups = [{"params": [weight], "weight_decay": 2**-15}, {"params": [bias]}]
    rate = 3 * 4 / 256
    optimizer = torch.optim.SGD(groups, rate, momentum=0.875)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, total_steps=3 * 16, pct_start=8 / 90, cycle_momentum=False
    )
    for epoch in (1, 2, 3):
        order = np.random.default_rng((5, epoch)).permutation(67).tolist()
        for start in range(0, 64, 4):
            samples = (train_set[epoch, index] for index in order[start : start + 4])
            images, labels = zip(*samples, strict=True)
            logits = model((torch.stack(images) / 255 - MEAN) / STD)
            labels = torch.tensor(labels)
            model.zero_grad()
            nn.functional.cross_entropy(logits, labels, label_smoothing=0.1).backward()
            optimizer.step()
            scheduler.step()
    return model.state_dict()


def test_other_numbers_of_ranks(tmp_path):
    """2 ranks, then 3, then 1: steps of 4 samples each, and plain code's weights."""
    # A model without BatchNorm and dropout, whose steps
    # do not depend on how a batch is shared.
    arguments = [*DUMMY, *PLAIN, "--batch-size=1", "--accumulate=2", "--save-steps=2"]
    stop(tmp_path, 2, arguments, signal.SIGUSR1, 1, 2)
    stop(tmp_path, 3, arguments, signal.SIGUSR1, 2, 2)
    last = run_to_its_end(tmp_path, 1, *arguments).newest()
    logs = "".join(path.read_text() for path in sorted(tmp_path.glob("*.log")))
    assert re.findall("^World size (.*), of 67;", logs, re.MULTILINE) == [
        "2: 16 steps an epoch, 2 x 2 samples each",
        "3: 16 steps an epoch, 3 x 1.333 samples each",
        "1: 16 steps an epoch, 1 x 4 samples each",
    ]
    found = torch.load(last, weights_only=True)
    assert found["resume"]["_totals"][2] == 64  # samples
    torch.testing.assert_close(found["model"], train_in_plain_code(), atol=1e-5, rtol=0)


# A run that cannot go on


@pytest.mark.parametrize(
    "argument, message",
    [
        ("--epochs=0", "--epochs: 0 is not at least 1"),
        # In training, it gives more than logits.
        ("--model=googlenet", r"--model: invalid choice: 'googlenet' \(.*'resnet50'"),
        ("--seed=-1", "--seed is out of range"),
        ("--seed=9223372036854775808", "--seed is out of range"),
        ("--learning-rate=-1", "--learning-rate is out of range"),
        ("--learning-rate=nan", "--learning-rate is out of range"),
        ("--workers=-1", "--workers is out of range"),
        # job.sh looks in its RUN_DIR for what is new.
        ("--checkpoint-dir=there", "--checkpoint-dir: instead, export RUN_DIR"),
    ],
)
def test_wrong_argument(argument, message, capsys, monkeypatch):
    monkeypatch.setenv("RUN_DIR", "/scratch/here")
    with pytest.raises(SystemExit):
        options(argument)
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert re.match(f"main.py: error: (argument )?{message}", last_line), last_line


def test_large_batch(tmp_path, caplog):
    """The recipe has not been seen to hold above 8192 images a step."""
    args = options(f"--checkpoint-dir={tmp_path}")
    main.begin_run(args, {}, 8192)
    assert not caplog.text
    main.begin_run(options(f"--checkpoint-dir={tmp_path}2"), {}, 8193)
    assert "warning: 8193 images a step" in caplog.text


def test_synthetic_is_small(monkeypatch):
    """It is the first thing that people type. What else they type, they get."""

    def parse(*arguments: str) -> tuple:
        monkeypatch.setattr(sys, "argv", ["main.py", *arguments])
        args = main.parse_args()
        return args.model, args.image_size, args.batch_size, args.epochs

    assert parse("--synthetic") == ("shufflenet_v2_x0_5", 64, 8, 2)
    full = ("--model=resnet50", "--image-size=224", "--batch-size=256", "--epochs=90")
    assert parse() == parse("--synthetic", *full) == ("resnet50", 224, 256, 90)


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """Images in class folders."""
    folder = tmp_path_factory.mktemp("tree")
    names = itertools.product(("train", "val"), range(3), range(8))
    for split, label, number in names:
        path = folder / split / f"class{label}" / f"{number}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((48, 40), 60).convert("RGB").save(path)
    return folder


@pytest.mark.parametrize(
    "name, content, cause, workers",
    [
        ("train/class1/9.JPEG", b"\xff\xd8\xff" + bytes(999), ".+", 1),
        # torchvision would crash at it.
        ("train/class1/9.png", bad_png(), "broken data stream", 0),
        ("val/class1/9.jpg", b"", "it is no JPEG, PNG or WebP", 0),
    ],
)
def test_an_image_that_does_not_decode(name, content, cause, workers, tree, tmp_path):
    """It is named in one line, and the status is 1."""
    shutil.copytree(tree, tmp_path / "tree")
    bad = tmp_path / "tree" / name
    bad.write_bytes(content)
    arguments = [f"--data-dir={tmp_path}/tree", f"--workers={workers}", "--epochs=1"]
    arguments += ["--image-size=32", "--model=dummy", "--batch-size=5"]
    text = run_to_its_end(tmp_path, 1, *arguments, status=1).text()
    (line,) = errors(text)
    message = f"main.py: error: cannot decode image {bad} on .*: .*{cause}"
    assert re.match(message, line), text


def test_limited_samples(tree):
    """The --limit options choose from all of the data, and so from all classes.

    Accuracies of other numbers of images do not compare: they are of another run.
    """
    args = options(synthetic=False, data_dir=tree, limit_train_samples=13)
    train_set, _ = data.load_data(args)
    assert len(train_set) == 13
    assert {train_set[1, index][1] for index in range(13)} == {0, 1, 2}
    recipes = []
    for args.limit_valid_samples in (5, 6):
        recipes.append(main.get_recipe(args, *data.load_data(args)))
    assert recipes[0] != recipes[1]


# Workers


def test_workers_start_before_the_process_group(tmp_path):
    """To fork a process that has NCCL up may hang."""
    # The group is not up as long as a rank is missing.
    with Training(tmp_path, 2, *ENDLESS, started=1) as training:
        training.wait_for(lambda: len(training.children()) == 1)


def test_workers(tmp_path):
    """They stay from epoch to epoch, and signals do not end them.

    What ends a worker ends the training: see test_data_loader_worker, of the faults.
    """
    with Training(tmp_path, 2, *ENDLESS) as training:
        training.wait_for(lambda: "\nWorld size " in training.text())
        workers = training.children()
        assert len(workers) == 2
        training.wait_for(lambda: "\nEpoch 1: " in training.text())
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            for worker in workers:
                os.kill(worker, number)
        training.wait_for(lambda: "\nEpoch 6: " in training.text())
        assert training.children() >= workers


# What is shown


def test_profile(tmp_path):
    """A trace a rank, and one table of where the time goes.

    In a step, it has one all-reduce of the gradients, also with accumulation. There is
    no collective for BatchNorm's statistics, and no step reads a value.
    """
    arguments = [*TINY, "--model=shufflenet_v2_x0_5", "--limit-train-samples=200"]
    arguments += ["--epochs=1", "--workers=1", "--accumulate=2", "--profile"]
    training = run_to_its_end(tmp_path, 2, *arguments)
    assert training.text().count("Self CPU time total") == 1, training.text()
    for rank in range(2):
        (trace,) = training.checkpoints.glob(f"profile/rank{rank}.*.json.gz")
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        found = collections.Counter(str(event.get("name")) for event in events)
        assert len([name for name in found if name.startswith("ProfilerStep#")]) == 5
        collectives = {name for name in found if name.startswith("c10d::")}
        assert collectives == {"c10d::allreduce_"}
        assert 10 <= found["c10d::allreduce_"] < 15  # two buckets, and meetings
        assert found["aten::_local_scalar_dense"] < 5  # values that are read
        # Two parts a step, no larger than --batch-size. One loss is to be reported.
        assert found["aten::cross_entropy_loss"] == 5 * 2 * 2


# Functions

MEAN, STD = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])[
    ..., None, None
]


def options(*arguments: str, **changes):
    """Return the options of a small run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["main.py", *DUMMY, "--epochs=1", *arguments])
        values = vars(main.parse_args())
    return SimpleNamespace(**values | changes)


# Which samples


class Keys:
    """A sample is its key: the epoch, and a number of its own."""

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, key: tuple[int, int]) -> tuple[int, int]:
        return key


def test_workers_load_ahead():
    """Also at an epoch's end: what validates it comes next, then the next epoch.

    Batches to validate have one size, because --compile compiles for each.
    """
    run = SimpleNamespace(global_batch_size=15, epoch=1, step=0)
    args = SimpleNamespace(seed=0, epochs=2, batch_size=4)
    loader = data.build_loader(Keys(31), Keys(7), 1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    asked, sizes = [], []

    def ask():
        for batch in data.list_batches(loader.dataset, run, args):
            asked.append(batch)
            yield batch

    for _, share in data.load_batches(loader, ask(), CPU):
        sizes.append(len(share))
        assert len(asked) >= min(len(sizes) + 1, 8), asked
    assert sizes == 2 * [15, 15, 4, 4] and len(asked) == 8
    dist.destroy_process_group()


def test_augmentation():
    """Every epoch and seed has crops of its own."""
    train_set, _ = data.load_data(options())
    another_seed, _ = data.load_data(options(seed=1))
    for index in range(12):
        image, _ = train_set[1, index]
        for others, epoch in ((train_set, 2), (another_seed, 1)):
            assert not torch.equal(others[epoch, index][0], image)


# Models and their optimizer


def test_models_of_torchvision():
    """One of each family gives logits of all the classes, in training."""
    # The others are refused: see test_wrong_argument.
    names = models.list_models(module=models, exclude=["googlenet", "inception_v3"])
    families = {re.match("[a-z]+", name)[0]: name for name in names}
    for name in families.values():
        # A RegNet reads the weights that it begins with.
        with torch.device("cpu" if "regnet" in name else "meta"):
            model = main.build_model(options(model=name), 7)
            assert model(torch.empty(2, 3, 224, 224)).shape == (2, 7), name


def test_resnet_as_in_the_recipe():
    """Weights of convolutions and linear layers decay; biases and norms do not.

    The last BatchNorm of a block begins with weights of 0: the block is the identity.
    """
    model = main.build_model(options(model="resnet18"), 10)
    optimizer, _ = main.build_optimizer(model, options(weight_decay=0.03), 256, 10)
    decays = {}
    for group in optimizer.param_groups:
        decays |= dict.fromkeys(group["params"], group["weight_decay"])
    for name, module in model.named_modules():
        norm = isinstance(module, nn.BatchNorm2d)
        if norm:
            assert (module.weight == (0 if name.endswith("bn2") else 1)).all(), name
        for kind, parameter in module.named_parameters(recurse=False):
            right = 0.03 if kind == "weight" and not norm else 0
            assert decays[parameter] == right, name
