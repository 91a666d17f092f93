"""docs/your_training: a script as a job of one GPU, of several, and how it comes back.

GPUs, disks of nodes and a loss of NaN are simulated; ranks without Slurm get its names.
"""

import re
import shutil
import signal
import socket
import subprocess
import sys
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from first_aid import user_of
from slurm_jobs import REPOSITORY, Jobs, Result, every_case, listing
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DistributedSampler, TensorDataset

FLAGS = "--nodes=2 --ntasks-per-node=2 --gpus-per-node=2 --cpus-per-task=1 --mem=4G"
PAGE = (REPOSITORY / "docs" / "your_training.rst").read_text()
SCRIPTS = REPOSITORY / "docs" / "your_training"
RESUME = SCRIPTS / "resume" / "main.py"
WHOLE = SCRIPTS / "whole" / "main.py"
SHARDED = REPOSITORY / "docs" / "sharded" / "main.py"
HOME = user_of(SimpleNamespace(env={}))  # the variables of a shell without Slurm


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
    folder = several(SCRIPTS / "main.py")
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


def start(script: Path, *folders: Path, arguments=(), **more: str) -> list[Result]:
    """Train without Slurm, one rank in each folder; return how each has ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    env |= {"SLURM_STEP_NUM_TASKS": str(len(folders))} | more
    ranks = [
        subprocess.Popen(
            ["timeout", "240", sys.executable, script, *arguments],
            cwd=folder,
            env=HOME | env | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, folder in enumerate(folders)
    ]
    return [Result(rank.communicate()[0], rank.returncode) for rank in ranks]


def changed(folder: Path, old: str, new: str, script: Path = RESUME) -> Path:
    """Return a copy of a script, with another text in one place."""
    text = script.read_text()
    assert text.count(old) == 1, old
    folder.mkdir(exist_ok=True)
    (folder / "changed.py").write_text(text.replace(old, new))
    return folder / "changed.py"


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Path:
    """A script of one's own, made from resume's, in which a test lets things happen.

    Before its imports, and after a step, it runs what a variable holds.
    """
    folder = tmp_path_factory.mktemp("scripts") / "own"
    folder.mkdir()
    text = RESUME.read_text().replace("nn.ReLU(),", "nn.ReLU(), nn.Dropout(0.5),")
    text = text.replace("16384, 2", "2048, 2").replace("epochs = 5", "epochs = 3")
    step = "        mine += len(targets)\n"
    assert text.count(step) == 1
    happens = '        exec(os.environ.get(f"AT_{epoch}_{mine}", ""))\n'
    first = 'import os\nexec(os.environ.get("AT_IMPORT", ""))\n'
    (folder / "main.py").write_text(first + text.replace(step, step + happens))
    return folder / "main.py"


@pytest.fixture(scope="module")
def own_folder(several, own) -> Path:
    return several(own)


WAIT = "print('waits', flush=True)\nwhile not warned:\n    time.sleep(0.01)"
ONCE = """import time
mark = os.environ["RUN_DIR"] + "/once-" + os.environ["SLURM_PROCID"]
if not os.path.exists(mark):
    open(mark, "w").close()
    """
TWO = ["--nodes=2", "--nodelist=node[1-2]"]
TWO += "--ntasks-per-node=1 --cpus-per-task=1 --mem=2G".split()
ONE = "--cpus-per-task=1 --mem=2G".split()


@pytest.mark.usefixtures("nothing_left")
def test_it_comes_back_and_goes_on(jobs, own, own_folder, tmp_path):
    """Preempted in its imports, then warned of the time limit, then requeued.

    Its losses are those of a run that nothing has happened to.
    """
    happens = {"AT_0_640": WAIT, "AT_2_320": WAIT}
    happens["AT_IMPORT"] = ONCE + "print('imports', flush=True); time.sleep(600)"
    limits = ["--signal=B:USR1@175", "--time=10"]
    job = jobs.submit(own_folder, *TWO, *limits, "job.sh", **happens)
    jobs.until(job, "(?s)(imports.*){2}")
    sleep = "--wrap=exec sleep infinity"
    grace = "scontrol update PartitionName=main GraceTime="
    jobs.run(f"{grace}15".split())
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
    assert len(result.find(f"^Resumed runs/{job}/checkpoint.pt: epoch")) == 2, result
    undisturbed, _ = start(own, tmp_path, tmp_path)
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
if happens == "preempted" and first:
    time.sleep(600)
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
if happens == "full":  # what torch.save leaves, in each start
    open(f"{run_dir}/checkpoint.pt.tmp", "w").close()
if happens == "killed" and first:
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(happens in ("fails", "full") or (happens == "warned" and first))
"""


@pytest.mark.usefixtures("nothing_left")
def test_what_comes_back(jobs, tmp_path):
    """Jobs at once in one folder. Each comes back alone, or fails, with a line."""
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

    grace = "scontrol update PartitionName=main GraceTime="
    jobs.run(f"{grace}15".split())
    preempted = submit("preempted", *TWO)
    jobs.until(preempted, "(?s)(starts.*){2}")
    sleep = "--wrap=exec sleep infinity"
    urgent = jobs.submit("", "--partition=urgent", "--nodes=3", "--exclusive", sleep)
    jobs.until(preempted, again)
    jobs.run(["scancel", urgent])
    jobs.run(f"{grace}0".split())

    array = submit("killed", *ONE, "--array=1-2")
    fails = [submit(happens, *ONE) for happens in ("fails", "full")]
    cancelled = submit("warned", *ONE)
    requeued = submit("warned", *ONE)
    limited = submit("warned", *TWO, "--signal=B:USR1@175", "--time=10")
    nothing = submit("", *ONE, DATA_ARCHIVE="/nowhere.tar")
    (tmp_path / "data").mkdir()
    for number in range(9):
        (tmp_path / "data" / str(number)).write_bytes(b"1" * 1024)
    archive = shutil.make_archive(str(tmp_path / "cut"), "tar", tmp_path / "data")
    whole = submit("", *ONE, DATA_ARCHIVE=archive)
    jobs.until(whole, "^starts")
    content = Path(archive).read_bytes()
    Path(archive).write_bytes(content[: content.index(b"./7\0")])  # tar says nothing
    cut = submit("", *ONE, DATA_ARCHIVE=archive)
    # As if an array's task had submitted it; and another job had its number.
    inherited = {"SLURM_ARRAY_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "2"}
    number = submit("", *ONE, "--hold", **inherited)
    (tmp_path / "runs" / number / "below").mkdir(parents=True)
    (tmp_path / "runs" / number / "below" / "checkpoint-5").touch()
    jobs.run(["scontrol", "release", number])
    for job in (cancelled, requeued):
        jobs.until(job, "^waits")
    jobs.run(["scontrol", "requeue", requeued])
    assert jobs.cancel(cancelled).state == "CANCELLED"
    jobs.until(limited, "(?s)(waits.*){2}")
    # Slurm warns the job at once when it gets a limit of three minutes.
    jobs.run(["scontrol", "update", f"job={limited}", "TimeLimit=3"])
    jobs.until(limited, again)
    jobs.run(["scontrol", "update", f"job={limited}", "TimeLimit=10"])

    # When it is warned, the disk of its log is full.
    disk = "/tmp/logs"
    mount = f"mkdir {disk} && mount -t tmpfs -o size=64k none {disk}"
    jobs.on("node1", "sh", "-c", mount)
    unsaid = submit("warned", *ONE, "--nodelist=node1", f"--output={disk}/log")
    waits = ["grep", "-q", "^waits", f"{disk}/log"]
    jobs.until_found(
        unsaid, lambda: jobs.on("node1", *waits).exit_code == 0, "waits", 120
    )
    fill = f"cat /dev/zero > {disk}/rest; cat /dev/zero >> {disk}/log"
    assert "No space left" in jobs.on("node1", "sh", "-c", fill).output
    jobs.run(["scancel", "--batch", "--signal=USR1", unsaid])
    jobs.until_found(
        unsaid, lambda: jobs.show(unsaid)["Restarts"] == "1", "a requeue", 120
    )
    jobs.on("node1", "rm", f"{disk}/rest")
    ended(unsaid, "COMPLETED", 1)
    jobs.on("node1", "sh", "-c", f"umount {disk} && rmdir {disk}")

    ended(preempted, jobs.state_after_preemption(), 1)
    for job in (limited, requeued):
        ended(job, "COMPLETED", 1)
    not_again = (
        r"^job.sh: error: status \d+, no new checkpoint in .*: not started again$"
    )
    for job in fails:
        assert ended(job, "FAILED", 1).find(not_again)
    line = r"^job.sh: error: node\d cannot unpack DATA_ARCHIVE=/nowhere.tar$"
    assert ended(nothing, "FAILED", 0).find(line)
    ended(whole, "COMPLETED", 0)
    assert ended(cut, "FAILED", 0).find("^job.sh: error: .*/cut.tar is cut$")
    line = f"^job.sh: error: runs/{number} is an earlier job's: move it away, or "
    assert ended(number, "FAILED", 0).find(line)
    assert jobs.show(cancelled)["Restarts"] == "0"
    for task in (f"{array}_1", f"{array}_2"):
        ended(task, "COMPLETED", 1)
        assert (tmp_path / "runs" / task / "below" / "checkpoint-0").exists()


def test_nan(tmp_path, own):
    """The last good checkpoint stays, and one line tells."""
    nan = "model.module[0].weight.data.fill_(float('nan'))\nwarned.append(1)"
    line = "main.py: error: NaN in the weights: checkpoint.pt is not saved"
    for happens, last in (
        ({"AT_0_640": "warned.append(1)"}, "Saved ./checkpoint.pt"),
        ({"AT_1_640": nan}, line),
    ):
        (ended,) = start(own, tmp_path, **happens)
        assert ended.exit_code == 1, ended
        assert ended.output.splitlines()[-1] == last, ended
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert all(weight.isfinite().all() for weight in saved["model"].values())


def test_another_number_of_ranks(tmp_path, own):
    """What three ranks have not done, two do, and the line says what repeats."""
    warn = {"AT_0_64": "warned.append(1)"}
    stopped = start(own, *[tmp_path] * 3, **warn)
    assert {rank.exit_code for rank in stopped} == {1}, stopped
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    epoch, done = saved["epoch"], int(saved["done"][1])
    assert done > 0 and done % (3 * 64) == 0
    resumed, _ = start(own, tmp_path, tmp_path)
    line = f"Resumed ./checkpoint.pt: epoch {epoch}, {done} samples, {done % 2} again"
    assert line in resumed.output.splitlines(), resumed
    # The rest of the epoch is shared in whole batches.
    count = done + (2048 - done) // 128 * 128
    epochs = losses(resumed.output, 2, count) | losses(resumed.output, 2, 2048)
    assert list(epochs) == list(range(epoch, 3)), resumed


def test_bit_for_bit(tmp_path, own):
    """Of more than two ranks, the order of a sum decides how it is rounded."""
    weights = []
    for name, stops in (("undisturbed", []), ("stopped", ["AT_0_64", "AT_0_128"])):
        folder = tmp_path / name
        folder.mkdir()
        for stop in stops:
            stopped = start(own, *[folder] * 3, **{stop: "warned.append(1)"})
            assert {rank.exit_code for rank in stopped} == {1}, stopped
        ended = start(own, *[folder] * 3)
        assert {rank.exit_code for rank in ended} == {0}, ended
        weights.append(torch.load(folder / "model.pt", weights_only=True))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_full_disk(tmp_path, own):
    """The last good file stays, and one line tells."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk]
    subprocess.run(mount, check=True)
    (ended,) = start(own, disk, AT_0_640="warned.append(1)")
    assert ended.exit_code == 1, ended
    good = (disk / "checkpoint.pt").read_bytes()
    (disk / "full").write_bytes(bytes(shutil.disk_usage(disk).free - (1 << 12)))
    (ended,) = start(own, disk, AT_1_640="warned.append(1)")
    error = "main.py: error: checkpoint.pt: [Errno 28] No space left on device"
    assert ended.exit_code == 1 and ended.output.splitlines()[-1] == error, ended
    assert (disk / "checkpoint.pt").read_bytes() == good


@pytest.mark.parametrize("script", every_case(WHOLE, RESUME, SCRIPTS / "main.py"))
def test_too_few_samples(tmp_path, script):
    samples = "5096" if script == WHOLE else "16384, 2"
    few = "1064" if script == WHOLE else "100, 2"
    text = script.read_text().replace(samples, few).replace("4096", "64")
    (tmp_path / "few.py").write_text(text)
    for rank in start(tmp_path / "few.py", tmp_path, tmp_path):
        assert rank.exit_code == 1, rank
        end = ": lower --batch-size" if script == WHOLE else " are too few"
        assert re.fullmatch(rf"main.py: error: \d+ samples{end}\n", rank.output)
    assert not list(tmp_path.glob("*.pt"))


def test_ranks_that_differ(tmp_path):
    """A node's own copy of the data is older: no rank waits for the others."""
    data = "Images(images[:4096], classes[:4096])"
    less = "Images(images[rank:4096], classes[rank:4096])"
    for rank in start(changed(tmp_path, data, less, WHOLE), tmp_path, tmp_path):
        assert rank.exit_code == 1, rank
        assert re.search("^main.py: error: ranks differ in .*4095", rank.output, re.M)


@pytest.mark.usefixtures("nothing_left")
def test_whole(jobs, several, tmp_path):
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
    arguments = [*arguments, "--batch-size=64"]
    undisturbed, _ = start(
        WHOLE, tmp_path, tmp_path, arguments=arguments, TMPDIR=str(long)
    )
    result = jobs.wait(job)
    assert (result.state, result.restarts) == ("COMPLETED", 1), result
    assert not result.find("DataLoader worker"), result
    line = r"^Epoch (\d): loss (\S+) over 4096 .* valid accuracy (\S+)% of 1000"
    found = result.find(line)
    assert found == undisturbed.find(line) and len(found) == 4, undisturbed
    assert float(found[-1][2]) > 95
    assert (folder / "runs" / job / "best.pt").exists()


def test_unused_weights(tmp_path):
    """DDP says so in the words of the page, whose two ways out help."""
    script = changed(tmp_path, "16384, 2", "256, 2", SCRIPTS / "main.py")
    wrap = "model = nn.parallel.DistributedDataParallel(model"
    unused = f"model.unused = nn.Parameter(torch.zeros(1))\n{wrap}"
    script = changed(tmp_path, wrap, unused, script)
    assert PAGE.count("Expected to have finished reduction in the prior iteration") == 1
    (failed,) = start(script, tmp_path)
    assert failed.exit_code == 1, failed
    assert "Expected to have finished reduction in the prior iter" in failed.output
    (flag,) = re.findall(r"DistributedDataParallel\(model(, find_.*?)\)", PAGE)
    loss = "F.cross_entropy(model(inputs), targets)"
    for old, new in (
        (wrap, wrap + flag),
        (loss, f"{loss} + 0 * model.module.unused.sum()"),
    ):
        (folder := tmp_path / "helped").mkdir(exist_ok=True)
        (ended,) = start(changed(folder, old, new, script), folder)
        assert ended.exit_code == 0, ended


def test_what_the_rate_does():
    """The losses that the page gives for 16 processes."""
    ((scaled, unscaled),) = re.findall(
        r"loss is (0\.\d\d)\. If the rate stays 0\.05, it is (0\.\d\d)\.", PAGE
    )
    assert f"{expected(16)[-1]:.2f}" == scaled
    assert f"{expected(16, rate=0.05)[-1]:.2f}" == unscaled
