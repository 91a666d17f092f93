"""docs/your_training: a script as a job of one GPU, of several, and how it comes back.

GPUs and disks of nodes are simulated; ranks without Slurm get its names.
"""

import json
import re
import shutil
import signal
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch
from fork_ranks import Ranks
from shapes import HEAD, SHAPES
from slurm_jobs import REPOSITORY, WHAT_NOW, Jobs, Result, listing
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DistributedSampler, TensorDataset

FLAGS = "--nodes=2 --ntasks-per-node=2 --gpus-per-node=2 --cpus-per-task=1 --mem=4G"
PAGE = (REPOSITORY / "docs" / "your_training.rst").read_text()
SCRIPTS = REPOSITORY / "docs" / "your_training"
SEVERAL = SCRIPTS / "several" / "main.py"
WHOLE = SCRIPTS / "whole" / "main.py"
RESUME = REPOSITORY / "imagenet" / "resume.py"


def losses(text: str, processes: int, samples: int = 16384) -> dict[int, float]:
    """Return each epoch's loss, as printed, over so many samples."""
    end = f", {processes} x cpu.*" if processes else ""
    line = rf"^Epoch (\d): loss (\d\.\d{{4}}) over {samples} samples{end}$"
    found = re.findall(line, text, re.MULTILINE)
    return {int(epoch): float(loss) for epoch, loss in found}


def train_alone(world_size: int, build, first: int = 0) -> list[float]:
    """Train in this process, on what all ranks take in each step together.

    `build` returns a model and its optimizer. Return each epoch's loss.
    """
    torch.manual_seed(0)
    points = torch.rand(16384, 2)
    targets = (points.square().sum(1) < 0.64).long()
    dataset = TensorDataset(points)
    samplers = [
        DistributedSampler(dataset, world_size, rank) for rank in range(world_size)
    ]
    model, optimizer = build()
    averages = []
    for epoch in range(first, 5):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        order = torch.tensor(list(chain(*zip(*samplers, strict=True))))
        total = 0.0
        for batch in order.split(64 * world_size):
            loss = F.cross_entropy(model(points[batch]), targets[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
        averages.append(total / 16384)
    return averages


def expected(world_size: int, rate: float | None = None) -> list[float]:
    """Return the losses of the page's script, without DDP."""

    def build() -> tuple:
        model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2))
        learning_rate = rate or 0.05 * world_size
        return model, torch.optim.SGD(model.parameters(), learning_rate, momentum=0.9)

    return train_alone(world_size, build)


@pytest.fixture(scope="module")
def together(jobs: Jobs, several) -> tuple[Path, Result]:
    """The script as a job of four processes on two nodes."""
    folder = several(SEVERAL)
    return folder, jobs.sbatch(folder, *FLAGS.split(), "job.sh")


@pytest.mark.usefixtures("nothing_left")
def test_one_gpu_first(jobs, project):
    """The script runs as it is, and its log is that of the same script at home."""
    shutil.copy(SCRIPTS / "before.py", project / "main.py")
    one = "--cpus-per-task=1 --mem=2G"
    # Another Python's home, of the shell, would stop this one.
    result = jobs.sbatch(project, *one.split(), "job.sh", PYTHONHOME="/nowhere")
    assert result.state == "COMPLETED", result
    found = losses(result.output, 0)
    assert list(found) == list(range(5)) and found[4] < found[0] / 2, result
    assert (project / "model.pt").exists()


def test_your_training(jobs, project, together):
    """A rank's step is a share of what one process computes; old weights fit."""
    folder, result = together
    assert result.state == "COMPLETED", result
    weights = torch.load(folder / "runs" / result.job / "model.pt", weights_only=True)
    shapes = {name: value.shape for name, value in weights.items()}
    assert shapes == {
        name: value.shape
        for name, value in torch.load(project / "model.pt", weights_only=True).items()
    }
    alone = jobs.run([sys.executable, "main.py"], folder)
    for found, processes in ((alone, 1), (result, 4)):
        found = losses(found.output, processes)
        for epoch, loss in enumerate(expected(processes)):
            assert abs(found[epoch] - loss) < 0.002, (found, expected(processes))


@pytest.mark.usefixtures("nothing_left")
def test_salloc(jobs, together):
    """srun needs nothing else; without it, the script says so."""
    folder, result = together
    python = "--export=ALL,OMP_NUM_THREADS=1 .venv/bin/python main.py"
    typed = f".venv/bin/python main.py || echo ended $?\nsrun {python}"
    command = ["salloc", "--quiet", *FLAGS.split(), "bash", "-c", typed]
    output = jobs.run(command, folder).output
    error, ended, *_ = output.splitlines()
    assert error.endswith("this is no task of the job: start it with srun"), output
    assert ended == "ended 1", output
    assert losses(output, 4) == losses(result.output, 4), output


@pytest.mark.parametrize("tasks", ["2 ", "1 "])
def test_other_numbers(jobs, together, tasks):
    """Slurm accepts what the page asks for. Two cores would take long to train so."""
    words = f"sbatch --nodes=1 --ntasks-per-node={tasks}"
    typed = 'sbatch() { command sbatch --test-only "$@"; }\n'
    result = jobs.run(
        ["bash", "-euc", typed + listing("your_training.rst", words)], together[0]
    )
    assert result.exit_code == 0, result


@pytest.fixture(scope="module")
def ranks():
    ranks = Ranks(Path(sys.executable))
    yield ranks
    ranks.end()


def write(folder: Path, script: str, *changes: tuple[str, str]) -> Path:
    """Make a folder with resume.py and a script, in which some texts are others."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(RESUME, folder)
    for old, new in changes:
        assert script.count(old) == 1, old
        script = script.replace(old, new)
    (folder / "main.py").write_text(script)
    return folder


def said(starts: list[list[Result]], pattern: str) -> list[str]:
    """Return what rank 0 has printed in some starts."""
    return [line for ranks in starts for line in ranks[0].find(pattern)]


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(ranks, tmp_path, name):
    """Warned by USR1, then by TERM, in mid-epoch: lines and weights are the same."""
    number, text = SHAPES[name]
    undisturbed = ranks(write(tmp_path / "undisturbed", HEAD + text), ranks=number)
    folder = write(tmp_path / "stopped", HEAD + text)
    warnings = [f"10 {int(signal.SIGUSR1)}", f"10 {int(signal.SIGTERM)}", "0 0"]
    starts = [ranks(folder, ranks=number, WARN=warning) for warning in warnings]
    codes = [{rank.exit_code for rank in start} for start in starts]
    assert codes == [{75}, {75}, {0}], starts
    assert len(said(starts, "^Asked to stop: saved step")) == 2, starts
    assert len(said(starts, "^Resuming from ")) == 2, starts
    right = said([undisturbed], "^(?:Shows|Weights) .*")
    assert said(starts, "^(?:Shows|Weights) .*") == right and len(right) > 1


def test_one_gpu_comes_back(ranks, tmp_path):
    """The page's two commands, and then the lines of a script that nothing stops."""
    text = (SCRIPTS / "main.py").read_text()
    (undisturbed,) = ranks(write(tmp_path / "undisturbed", text))
    folder = write(tmp_path / "stopped", text)
    (variable, turns), *_ = re.findall(r"^    (STOP_AT)=(\d+) ", PAGE, re.M)
    starts = [ranks(folder, **{variable: turns}), ranks(folder)]
    assert [start[0].exit_code for start in starts] == [75, 0], starts
    assert said(starts, "^Epoch .*") == undisturbed.find("^Epoch .*"), starts
    assert len(undisturbed.find("^Epoch .*")) == 5, undisturbed
    before, after = (
        torch.load(tmp_path / name / "model.pt") for name in ("undisturbed", "stopped")
    )
    assert all(torch.equal(before[name], after[name]) for name in before)


UNFREEZE = """
    if epoch {when} 2 and not model.module[0].weight.requires_grad:
        model.module[0].requires_grad_(True)
        model = nn.parallel.DistributedDataParallel(model.module)
        {add}
"""
GROUP = 'optimizer.add_param_group({"params": model.module[0].parameters()})'


@pytest.mark.parametrize(
    "when, add, said",
    [
        (">=", GROUP, ""),
        ("==", GROUP, "^main.py: error: the checkpoint's optimizer does not fit: .*gr"),
        ("==", "", "^main.py: error: the checkpoint's model has trained 0.weight, whi"),
    ],
)
def test_layers_that_are_unfrozen_later(when, add, said, ranks, tmp_path):
    """They are trained in the next start, too, or one line says that they are not."""
    wrap = "model = nn.parallel.DistributedDataParallel(model)\n"
    loop = "    metrics = run.sums(2, device)\n"
    trained = "model.module[2].parameters()" if add else "model.parameters()"
    changes = (
        ("16384, 2", "1280, 2"),
        (wrap, f"model[0].requires_grad_(False)\n{wrap}"),
        ("SGD(model.parameters()", f"SGD({trained}"),
        (loop, UNFREEZE.format(when=when, add=add) + loop),
    )
    folder = write(tmp_path / "stopped", SEVERAL.read_text(), *changes)
    starts = [ranks(folder, ranks=2, STOP_AT="35"), ranks(folder, ranks=2)]
    assert [rank.exit_code for rank in starts[0]] == [75, 75], starts
    assert {rank.exit_code for rank in starts[1]} == {int(said != "")}, starts
    if said:
        assert len(starts[1][0].find(said)) == 1, starts
        assert "Traceback" not in starts[1][0].output, starts
        return
    folder = write(tmp_path / "undisturbed", SEVERAL.read_text(), *changes)
    right = losses(ranks(folder, ranks=2)[0].output, 2, 1280)
    found = losses("".join(start[0].output for start in starts), 2, 1280)
    assert found == right and len(found) == 5, starts


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Path:
    """A script of one's own, made from the page's, in which a test lets things happen.

    Before its imports, and after a step, it runs what a variable holds.
    """
    text = SEVERAL.read_text().replace("nn.ReLU(),", "nn.ReLU(), nn.Dropout(0.5),")
    text = text.replace("16384, 2", "2048, 2").replace("epochs = 5", "epochs = 3")
    step = "        metrics[1] += len(targets)\n"
    happens = '        exec(os.environ.get(f"AT_{epoch}_{run.step}", ""))\n'
    first = 'import os\nexec(os.environ.get("AT_IMPORT", ""))\n'
    folder = tmp_path_factory.mktemp("scripts") / "own"
    return write(folder, first + text, (step, step + happens)) / "main.py"


@pytest.fixture(scope="module")
def own_folder(several, own) -> Path:
    return several(own)


WAIT = "print('waits', flush=True)\nwhile not resume.warned:\n    time.sleep(0.01)"
ONCE = """import time
mark = os.environ["RUN_DIR"] + "/once-" + os.environ["SLURM_PROCID"]
if not os.path.exists(mark):
    open(mark, "w").close()
    """
TWO = ["--nodes=2", "--nodelist=node[1-2]"]
TWO += "--ntasks-per-node=1 --cpus-per-task=1 --mem=2G".split()
ONE = "--cpus-per-task=1 --mem=2G".split()


@pytest.mark.usefixtures("nothing_left")
def test_it_comes_back_and_goes_on(jobs, ranks, own, own_folder):
    """Preempted in its imports, then warned of the time limit, then requeued.

    Its losses are those of a run that nothing has happened to.
    """
    happens = {"AT_0_10": WAIT, "AT_2_5": WAIT}
    happens["AT_IMPORT"] = ONCE + "print('imports', flush=True); time.sleep(600)"
    limits = ["--signal=B:USR1@175", "--time=10"]
    job = jobs.submit(own_folder, *TWO, *limits, "job.sh", **happens)
    jobs.until(job, "(?s)(imports.*){2}")
    sleep = "--wrap=exec sleep infinity"
    grace = "scontrol update PartitionName=main GraceTime="
    jobs.run(f"{grace}60".split())
    urgent = jobs.submit("", "--partition=urgent", "--nodes=3", "--exclusive", sleep)
    jobs.until(job, r"^job.sh: status \d+: starts again, to resume$")
    jobs.run(f"{grace}0".split())
    jobs.run(["scancel", urgent])
    jobs.until(job, "(?s)(waits.*){2}")
    # Slurm warns the job at once when it gets a limit of three minutes.
    jobs.run(["scontrol", "update", f"job={job}", "TimeLimit=3"])
    jobs.until(job, r"(?s)(job.sh: status \d+: starts again.*){2}")
    jobs.run(["scontrol", "update", f"job={job}", "TimeLimit=10"])
    jobs.until(job, "(?s)(waits.*){4}")
    assert jobs.run(["scontrol", "requeue", job]).exit_code == 0
    result = jobs.wait(job)
    state = jobs.state_after_preemption()
    assert (result.state, result.restarts) == (state, 3), result
    assert len(result.find(f"^Resuming from .*/runs/{job}/epoch-00")) == 2, result
    undisturbed, _ = ranks(own.parent, ranks=2)
    assert losses(result.output, 2, 2048) == losses(undisturbed.output, 2, 2048)
    assert len(losses(undisturbed.output, 2, 2048)) == 3, undisturbed


# A script of the standard library alone: what job.sh does is quickly seen with it.
LIGHT = """
import os, signal, sys, time

run_dir, rank = os.environ["RUN_DIR"], os.environ["SLURM_PROCID"]
happens = sys.argv[1]
first = not os.path.exists(f"{run_dir}/started-{rank}")
open(f"{run_dir}/started-{rank}", "w").close()
print("starts", flush=True)
warned = []
for name in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(name, lambda number, frame: warned.append(number))
if happens == "warned" and first:
    print("waits", flush=True)
    while not warned:
        time.sleep(0.05)
if first:
    os.makedirs(f"{run_dir}/below", exist_ok=True)
    open(f"{run_dir}/below/checkpoint-{rank}", "w").close()
if happens == "killed" and first:
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(happens == "fails" or (happens == "warned" and first))
"""


@pytest.mark.usefixtures("nothing_left")
def test_what_comes_back(jobs, tmp_path):
    """Jobs at once in one folder. Each comes back alone, or fails, with a line.

    A preemption, the time limit and a requeue: test_it_comes_back_and_goes_on. A full
    disk of the log, and an older job's number: test_disk.py, of the faults, because
    job.sh has imagenet's functions.
    """
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(Path(sys.executable).resolve())
    (tmp_path / "main.py").write_text(LIGHT)
    shutil.copy(SCRIPTS / "job.sh", tmp_path)
    again = r"^job.sh: status \d+: starts again, to resume$"

    def submit(happens: str, *flags: str, **env: str) -> str:
        return jobs.submit(tmp_path, *flags, "job.sh", happens, **env)

    def ended(job: str, state: str, restarts: int) -> Result:
        result = jobs.wait(job)
        assert (result.state, result.restarts) == (state, restarts), result
        assert len(result.find(again)) <= restarts, result
        return result

    array = submit("killed", *ONE, "--array=1-2")
    fails = submit("fails", *ONE, PYTORCH_ON_SLURM=str(jobs.clone))
    cancelled = submit("warned", *ONE)
    nothing = submit("", *ONE, DATA_ARCHIVE="/nowhere.tar")
    (tmp_path / "data").mkdir()
    for number in range(9):
        (tmp_path / "data" / str(number)).write_bytes(b"1" * 1024)
    archive = shutil.make_archive(str(tmp_path / "cut"), "tar", tmp_path / "data")
    # As if an array's task had submitted it.
    inherited = {"SLURM_ARRAY_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "2"}
    whole = submit("", *ONE, DATA_ARCHIVE=archive, **inherited)
    jobs.until(whole, "^starts")
    content = Path(archive).read_bytes()
    Path(archive).write_bytes(content[: content.index(b"./7\0")])  # tar says nothing
    cut = submit("", *ONE, DATA_ARCHIVE=archive)
    jobs.until(cancelled, "^waits")
    assert jobs.cancel(cancelled).state == "CANCELLED"

    not_again = (
        r"^job.sh: error: status \d+, no new checkpoint in .*: not started again$"
    )
    result = ended(fails, "FAILED", 1)
    assert result.find(not_again)
    (command,) = result.find(WHAT_NOW)
    told = jobs.run(["bash", "-c", command], "/").output
    assert "This start has saved nothing new" in told, told
    line = r"^job.sh: error: node\d cannot unpack DATA_ARCHIVE=/nowhere.tar$"
    assert ended(nothing, "FAILED", 0).find(line)
    ended(whole, "COMPLETED", 0)
    assert (tmp_path / "runs" / whole).exists()
    assert ended(cut, "FAILED", 0).find("^job.sh: error: .*/cut.tar is cut$")
    assert jobs.show(cancelled)["Restarts"] == "0"
    for task in (f"{array}_1", f"{array}_2"):
        ended(task, "COMPLETED", 1)
        assert (tmp_path / "runs" / task / "below" / "checkpoint-0").exists()


def test_too_few_samples(ranks, tmp_path):
    for name, script, changes, end in (
        ("several", SEVERAL, [("16384, 2", "100, 2")], "100 samples are too few"),
        (
            "whole",
            WHOLE,
            [("images[:4096], classes[:4096]", "images[:64], classes[:64]")],
            "64 samples: lower --batch-size",
        ),
    ):
        folder = write(tmp_path / name, script.read_text(), *changes)
        ended = ranks(folder, ranks=2)
        assert [rank.exit_code for rank in ended] == [1, 1], ended
        assert ended[0].output == f"main.py: error: {end}\n", ended
        assert not list(folder.glob("*.pt"))


def test_ranks_that_differ(ranks, tmp_path):
    """A node's own copy of the data is older: no rank waits for the others."""
    change = '{"images": len(images)}', '{"images": os.environ["RANK"]}'
    ended = ranks(write(tmp_path, WHOLE.read_text(), change), ranks=2)
    assert [rank.exit_code for rank in ended] == [1, 1], ended
    error = "^main.py: error: not every node has the same data and settings"
    assert ended[0].find(error), ended


def test_other_arguments(ranks, tmp_path):
    """A start that would go on with another training ends with a line."""
    folder = write(tmp_path, WHOLE.read_text())
    (ended,) = ranks(folder, "--epochs=2", STOP_AT="3")
    assert ended.exit_code == 75, ended
    (ended,) = ranks(folder, "--epochs=2", "--batch-size=32")
    assert ended.exit_code == 1 and ended.find("batch_size 64, not 32"), ended
    for argument in ("--epochs=0", "--accumulate=-1", "--learning-rate=-1"):
        (ended,) = ranks(folder, argument)
        assert ended.find("^main.py: error: all of these must be above 0$"), ended


def test_damaged_data_to_validate(ranks, tmp_path):
    """It ends the job, and what was trained before it is saved."""
    valid = "valid_set = TensorDataset(images[4096:, :, 2:10, 2:10], classes[4096:])"
    folder = write(tmp_path, WHOLE.read_text(), (valid, "valid_set = [None] * 8"))
    (ended,) = ranks(folder)
    assert ended.exit_code == 1 and ended.find("NoneType"), ended
    assert list(folder.glob("epoch-*.pt")), ended


def test_hang(ranks, tmp_path):
    """With the page's line, both ranks end, and the log says which one slept."""
    (line,) = re.findall("^ +(for epoch in hangs.watched.*)minutes=10.*$", PAGE, re.M)
    shutil.copy(RESUME.with_name("hangs.py"), tmp_path)
    step = "        optimizer.step()\n"
    happens = "        if rank == run.epoch == run.step == 1:\n"
    happens += "            time.sleep(200)\n"
    folder = write(
        tmp_path,
        SEVERAL.read_text().replace("16384, 2", "1280, 2"),
        ("import resume\n", "import hangs\nimport resume\n"),
        ("for epoch in run.loop(range(epochs)):", f"{line}minutes=0.1):"),
        (step, happens + step),
    )
    ended = ranks(folder, ranks=2)
    assert [rank.exit_code for rank in ended] == [1, 1], ended
    told = ended[0]  # what the other one does, too
    assert told.find("^error: rank 1 on .* has not moved for . s: it trains"), ended
    assert len(told.find('main.py", line .* in <module>')) == 2, ended
    # A turn may take nearly as long, also after a save. What comes after the loop may
    # take longer.
    text = (folder / "main.py").read_text().replace(happens, happens[:-5] + "9)\n")
    write(
        folder,
        text,
        ("resume.Run(", "resume.Run(save_steps=1, "),
        ("minutes=0.1", "minutes=0.2"),
        ("dist.barrier()  #", "time.sleep(14)\ndist.barrier()  #"),
    )
    ended = ranks(folder, ranks=2)
    assert [rank.exit_code for rank in ended] == [0, 0], ended


@pytest.mark.usefixtures("nothing_left")
def test_whole(jobs, ranks, several, tmp_path):
    """With all that a real script has, it is warned by TERM, and goes on as if not.

    Every sample is validated once, and the epoch's last step has fewer batches.
    """
    folder = several(WHOLE)
    # 32 batches of a rank, three to a step: the last has two.
    arguments = "--epochs=4 --accumulate=3 --learning-rate=0.01".split()
    job = jobs.submit(folder, *TWO, "job.sh", *arguments)
    jobs.interrupt(job, "^Epoch 0", signal.SIGTERM)
    long = tmp_path / ("a site's own folder " * 5)
    long.mkdir()
    # A worker's socket would have too long a path in TMPDIR. The training would wait.
    alone = write(tmp_path / "alone", WHOLE.read_text())
    undisturbed, _ = ranks(alone, *arguments, ranks=2, TMPDIR=str(long))
    result = jobs.wait(job)
    assert (result.state, result.restarts) == ("COMPLETED", 1), result
    assert not result.find("DataLoader worker"), result
    line = r"^Epoch (\d): loss (\S+) over 4096 .* valid accuracy (\S+)% of 1000"
    found = result.find(line)
    assert found == undisturbed.find(line) and len(found) == 4, undisturbed
    assert float(found[-1][2]) > 95
    for name in ("best.pt", "model.pt"):
        saved = [torch.load(path / name) for path in (folder / "runs" / job, alone)]
        assert all(torch.equal(saved[0][key], saved[1][key]) for key in saved[0])
    lines = (folder / "runs" / job / "metrics.jsonl").read_text()
    assert lines == (alone / "metrics.jsonl").read_text()
    epochs = [json.loads(line)["epoch"] for line in lines.splitlines()]
    assert epochs == [0, 1, 2, 3]


def test_unused_weights(ranks, tmp_path):
    """DDP says so in the words of the page, whose two ways out help."""
    wrap = "model = nn.parallel.DistributedDataParallel(model"
    unused = f"model.unused = nn.Parameter(torch.zeros(1))\n{wrap}"
    assert PAGE.count("Expected to have finished reduction in the prior iteration") == 1
    (flag,) = re.findall(r"DistributedDataParallel\(model(, find_.*?)\)", PAGE)
    loss = "F.cross_entropy(model(inputs), targets)"
    for help_line, status in (
        (("epochs = 5", "epochs = 2"), 1),
        ((f"{wrap})", f"{wrap}{flag})"), 0),
        ((loss, f"{loss} + 0 * model.module.unused.sum()"), 0),
    ):
        text = SEVERAL.read_text().replace("16384, 2", "256, 2")
        folder = write(tmp_path / "own", text, help_line)
        text = (folder / "main.py").read_text()
        write(folder, text, (wrap, unused))
        (ended,) = ranks(folder)
        assert ended.exit_code == status, ended
        said = "Expected to have finished reduction in the prior iter" in ended.output
        assert said == (status == 1), ended


def test_what_the_rate_does():
    """The losses that the page gives for 16 processes."""
    ((scaled, unscaled),) = re.findall(
        r"loss is (0\.\d\d),\s+but (0\.\d\d) if the rate stays 0\.05", PAGE
    )
    assert f"{expected(16)[-1]:.2f}" == scaled
    assert f"{expected(16, rate=0.05)[-1]:.2f}" == unscaled
