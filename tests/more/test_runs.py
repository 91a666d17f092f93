"""docs/runs: many runs of one's own script, a search, and how busy the GPUs were.

What nvidia-smi prints is made up, because there is no GPU: a script of this file's own
stands in for it on PATH. It can also be slow, hang, fail half-way or know no numbers.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from first_aid import user_of
from slurm_jobs import REPOSITORY, Jobs, call

RUNS = REPOSITORY / "docs" / "runs"
PAGE = (REPOSITORY / "docs" / "runs.rst").read_text()
HOME = user_of(SimpleNamespace(env={}))  # the variables of a shell without Slurm
ONE = "--nodes=1 --gpus-per-node=1 --cpus-per-task=1 --mem=2G".split()

# Says what it was told. With --wait, it then waits for the file go, and saves when it
# is warned.
PROGRAM = """\
import json, os, signal, sys, time
warned = []
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda *_: warned.append(1))
run_dir = os.environ["RUN_DIR"]
checkpoint = run_dir + "/checkpoint.pt"
names = ("RUN_DIR", "CUDA_VISIBLE_DEVICES", "SLURM_PROCID", "SLURM_NTASKS")
told = {name: os.environ.get(name) for name in names}
told |= {"arguments": sys.argv[1:], "resumed": os.path.exists(checkpoint)}
print("Told " + json.dumps(told), flush=True)
while "--wait" in sys.argv and not os.path.exists("go"):
    if warned:
        open(checkpoint, "a").write("saved")
        sys.exit(1)
    time.sleep(0.05)
if "--fail" in sys.argv:
    sys.exit(3)
if "--kill" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def told(log: str) -> list[dict]:
    return [json.loads(line) for line in re.findall(r"^Told (.*)$", log, re.M)]


@pytest.fixture
def project(jobs, tmp_path):
    """Return what makes a project with job.sh, with some words in front of Python."""

    def make(*words: str, python: str = ".venv/bin/python", program=PROGRAM) -> Path:
        folder = tmp_path / "my project"
        folder.mkdir()
        for file in RUNS.iterdir():
            shutil.copy(file, folder)
        line = "python=(.venv/bin/python -X faulthandler)\n"
        script = (REPOSITORY / "docs" / "your_training" / "job.sh").read_text()
        assert script.count(line) == 1
        own = f"python=({' '.join(words)} {python} -X faulthandler)\n"
        (folder / "job.sh").write_text(script.replace(line, own))
        (folder / "main.py").write_text(program)
        (folder / ".venv").symlink_to(jobs.clone / ".venv")
        return folder

    return make


LINES = [
    '--name "two words"',
    "# a comment",
    "--fail",
    "--home ~ $SCRATCH  # the best so far",
    "--wait",
]


@pytest.mark.usefixtures("nothing_left")
def test_a_line_for_each_task_of_an_array(jobs: Jobs, project):
    """A requeued task keeps its line, although the file has changed."""
    folder = project()
    sweep = folder / "sweep.txt"
    sweep.write_bytes("\r\n".join(LINES).encode())
    flags = [f"--output={jobs.logs}/%A_%a.out", "--array=0-6", *ONE]
    words = ["job.sh", "@sweep.txt", "--for", "all tasks"]
    array = jobs.submit(folder, *flags, *words, SCRATCH="/my scratch")
    tasks = [f"{array}_{number}" for number in range(7)]
    for task in (tasks[1], tasks[3], tasks[5]):
        jobs.until(task, "^Told ")
    sweep.write_text("--other\n" * 6)
    jobs.run(["scancel", "--signal=USR1", tasks[5]])
    jobs.until(tasks[5], '^Told .*"resumed": true')
    (folder / "go").touch()
    results = [jobs.wait(task) for task in tasks]
    for number in (0, 2, 6):
        error = f"job.sh: error: sweep.txt has no line {number}: the first is 1"
        assert error in results[number].output.splitlines(), results[number]
    home = os.environ["HOME"]
    for number, arguments in {
        1: ["--name", "two words"],
        3: ["--fail"],
        4: ["--home", home, "/my", "scratch"],
        5: ["--wait"],
    }.items():
        for start in told(results[number].output):
            assert start["arguments"] == [*arguments, "--for", "all tasks"], start
            assert start["RUN_DIR"] == f"runs/{tasks[number]}"
    ends = [result.state == "COMPLETED" for result in results]
    assert ends == [False, True, False, False, True, True, False], results
    assert [result.restarts for result in results] == [0] * 5 + [1, 0], results
    no_array = jobs.sbatch(folder, *ONE, "job.sh", "@sweep.txt")
    assert no_array.find("SLURM_ARRAY_TASK_ID: give --array$"), no_array


EACH_LINE = ["./each_line", "sweep.txt"]


def runs_told(folder: Path, job: str) -> dict[int, list[dict]]:
    """Return what the starts of each line have been told, by the line's number."""
    logs = (folder / "runs" / job).glob("*/log")
    return {int(log.parent.name): told(log.read_text()) for log in logs}


@pytest.mark.usefixtures("nothing_left")
def test_several_at_once(jobs: Jobs, project):
    """Six lines on three tasks and two GPUs, one failing, through two requeues."""
    folder = project(*EACH_LINE)
    sweep = folder / "sweep.txt"
    lines = ["--name 'two words'", "# no", "--wait", "--fail", "--wait", "", "--wait"]
    sweep.write_bytes("\r\n".join([*lines, "--last"]).encode())
    flags = [*ONE, "--ntasks-per-node=3", "--gpus-per-node=2"]
    job = jobs.submit(folder, *flags, "job.sh", "--for-all")

    def waiting(starts: int):
        def find() -> bool:
            runs = runs_told(folder, job)
            return all(len(runs.get(number, [])) == starts for number in (3, 5, 7))

        jobs.until_found(job, find, f"three lines, {starts} times", 60)

    waiting(1)
    sweep.write_text(sweep.read_text().replace("--wait", "--other"))
    jobs.run(["scancel", "--signal=USR1", job])
    waiting(2)
    jobs.run(["scontrol", "requeue", job])
    waiting(3)
    (folder / "go").touch()
    result = jobs.wait(job)
    runs = runs_told(folder, job)
    starts = {1: 1, 3: 3, 4: 4, 5: 3, 7: 3, 8: 1}
    assert {number: len(run) for number, run in runs.items()} == starts, result
    for number, run in runs.items():
        words = {1: ["--name", "two words"], 4: ["--fail"], 8: ["--last"]}
        expected = ["--for-all", *words.get(number, ["--wait"])]
        assert all(start["arguments"] == expected for start in run), run
        assert all(start["RUN_DIR"] == f"runs/{job}/{number}" for start in run), run
        # The program takes itself for the only task.
        names = ("SLURM_PROCID", "SLURM_NTASKS")
        assert all([start[name] for name in names] == ["0", "1"] for start in run), run
        later = [start["resumed"] for start in run]
        assert later == [number in (3, 5, 7) and i > 0 for i in range(len(run))], run
    gpus = {run[0]["CUDA_VISIBLE_DEVICES"] for run in runs.values()}
    assert len(gpus) == 2 and all(gpu.isdigit() for gpu in gpus), runs
    logs = result.output.split("\nJob ")
    # No line starts after a warning.
    assert ["Line 8: --last" in log for log in logs] == [False, False, True, False]
    assert result.output.count("Line 4: ended with status 3\n") == 4, result
    assert (result.state, result.restarts) == ("FAILED", 3), result
    error = f"status 1, no new checkpoint in runs/{job}: not started again"
    assert result.output.endswith(f"job.sh: error: {error}\n"), result


@pytest.mark.usefixtures("nothing_left")
def test_a_line_that_fails_ends_no_other(jobs: Jobs, project):
    """Its task has nothing left to do, and srun ends all with the first that leaves."""
    folder = project(*EACH_LINE)
    (folder / "sweep.txt").write_text("--fail\n--wait\n'unclosed\n")
    flags = ["--nodelist=node1", "--ntasks-per-node=2"]
    job = jobs.submit(folder, *ONE, *flags, "job.sh")

    def idle() -> bool:
        return any("flock" in process for process in jobs.cluster.processes("node1"))

    jobs.until_found(job, idle, "a task that waits", 60)
    (folder / "go").touch()
    result = jobs.wait(job)
    assert result.find("^Line (.*)$")[-1] == "1: ended with status 3", result
    assert result.output.count("Line 2: ended with status 0\n") == 1, result
    log = (folder / "runs" / job / "3" / "log").read_text()
    assert "unexpected EOF while looking for matching `''" in log, log


@pytest.mark.usefixtures("nothing_left")
def test_each_line_cannot_work(jobs: Jobs, project):
    """A missing file, a missing Python and two nodes are told in a line."""
    folder = project(*EACH_LINE, python="no/python")
    submit = [folder, *ONE, "job.sh"]
    no_file = jobs.sbatch(*submit)
    (folder / "sweep.txt").write_text("--fail\n")
    no_python = jobs.sbatch(*submit)
    two_nodes = jobs.sbatch(folder, *ONE, "--nodes=2", "job.sh")
    for result, message in (
        (no_file, r"each_line: line \d+: sweep.txt: No such file or directory"),
        (no_python, r"each_line: line \d+: type: no/python: not found"),
        (two_nodes, "each_line: error: give --nodes=1"),
    ):
        assert result.state == "FAILED" and result.restarts == 0, result
        assert result.find(f"{message}$"), result


FRAMEWORKS = """\
import os, sys
if sys.argv[1] == "lightning":
    import lightning
    from lightning.pytorch.demos.boring_classes import BoringModel
    quiet = {"logger": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(accelerator="cpu", max_steps=1, **quiet)
    trainer.fit(BoringModel())
    print("World size", trainer.world_size)
elif sys.argv[1] == "torchrun":
    torchrun = [sys.executable, *"-m torch.distributed.run --standalone".split()]
    os.execv(sys.executable, [*torchrun, sys.argv[0], "worker"])
else:
    import torch.distributed as dist
    dist.init_process_group("gloo")
    dist.barrier()
    print("World size", dist.get_world_size())
"""


@pytest.mark.usefixtures("nothing_left")
def test_frameworks_are_alone(jobs: Jobs, project, frameworks):
    """Two runs of Lightning and two of torchrun, at once, each of one process."""
    python = f"{frameworks}/bin/python"
    folder = project(*EACH_LINE, python=python, program=FRAMEWORKS)
    (folder / "sweep.txt").write_text("lightning\nlightning\ntorchrun\ntorchrun\n")
    flags = [*ONE, "--ntasks-per-node=4", "--mem=8G"]
    result = jobs.sbatch(folder, *flags, "job.sh")
    for number in range(1, 5):
        log = (folder / "runs" / result.job / str(number) / "log").read_text()
        assert re.findall("^World size .*", log, re.M) == ["World size 1"], log
    assert (result.state, result.restarts) == ("COMPLETED", 0), result


# Prints how the trials of a journal have ended, and the folders of their jobs.
TRIALS = """\
import sys, json, optuna
backend = optuna.storages.journal.JournalFileBackend(sys.argv[1])
storage = optuna.storages.JournalStorage(backend)
study = optuna.load_study(storage=storage, study_name=sys.argv[2])
print(json.dumps([[t.state.name, t.value, t.user_attrs] for t in study.trials]))
"""


def trials(folder: Path, job: str, python: Path) -> list[list]:
    command = [python, "-c", TRIALS, f"runs/{job}.journal", job]
    return json.loads(subprocess.check_output(command, cwd=folder))


@pytest.mark.usefixtures("nothing_left")
def test_search(jobs: Jobs, project, frameworks):
    """A task is warned, one requeued, one killed: no trial is lost, or made twice."""
    program = (RUNS / "search.py").read_text()
    folder = project(python=f"{frameworks}/bin/python", program=program)
    flags = [f"--output={jobs.logs}/%A_%a.out", "--array=1-4%3", "--mem=4G"]
    flags += "--ntasks-per-node=2 --gpus-per-node=2 --cpus-per-task=1".split()
    array = jobs.submit(folder, *flags, "job.sh", EPOCHS="8")
    tasks = [f"{array}_{number}" for number in range(1, 5)]
    warned, requeued, killed, undisturbed = tasks
    for task, end in (
        (warned, ["scancel", "--signal=USR1"]),
        (requeued, ["scontrol", "requeue"]),
        (killed, ["scancel", "--signal=KILL"]),
    ):
        jobs.until(task, "^Trial ")
        jobs.run([*end, task])
    failed = jobs.wait(killed)
    assert failed.find("no new checkpoint in .*: not started again$"), failed
    assert jobs.run(["scontrol", "requeue", killed]).exit_code == 0
    for task in tasks:
        result = jobs.wait(task)
        assert result.state == "COMPLETED", result
        assert result.restarts == (task != undisturbed), result
        # After its second start, it has the settings of the first.
        assert len(set(result.find("^Trial .*"))) == 1, result
        assert len(result.find("^Resumed ")) == (task in (warned, requeued)), result
    ended = trials(folder, array, frameworks / "bin" / "python")
    assert [state for state, _, _ in ended] == ["COMPLETE"] * 4
    folders = sorted(attributes["run_dir"] for _, _, attributes in ended)
    assert folders == [f"runs/{task}" for task in tasks]
    (command,) = re.findall(r"^    (grep -h .*)$", PAGE, re.M)
    command = command.replace("slurm-30_*.out", f"'{jobs.logs}'/{array}_*.out")
    best = jobs.run(["bash", "-c", command]).output
    _, value, attributes = min(ended, key=lambda trial: trial[1])
    assert f": {value} " in best and f"'{attributes['run_dir']}'" in best, best
    assert (folder / attributes["run_dir"] / "model.pt").exists()


# Five trials that no other can beat.
GOOD = """\
import optuna
backend = optuna.storages.journal.JournalFileBackend("runs/7.journal")
storage = optuna.storages.JournalStorage(backend)
study = optuna.create_study(storage=storage, study_name="7")
for _ in range(5):
    values = {epoch: 1e-6 for epoch in range(9)}
    study.add_trial(optuna.trial.create_trial(value=1e-6, intermediate_values=values))
"""


def test_trials_that_end_early(tmp_path, frameworks):
    """All ranks leave a pruned trial, but not in its last epoch. NaN has failed."""
    python = frameworks / "bin" / "python"
    (tmp_path / "runs").mkdir()
    subprocess.run([python, "-c", GOOD], cwd=tmp_path, check=True)
    env = HOME | {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    env |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "7"}
    for run, epochs, words, status, state in (
        ("pruned", "3", [], 0, "PRUNED"),
        ("last", "1", [], 0, "COMPLETE"),
        ("nan", "3", ["1e30"], 1, "FAIL"),
    ):
        (tmp_path / run).mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            env["MASTER_PORT"] = str(free.getsockname()[1])
        env |= {"EPOCHS": epochs, "RUN_DIR": run}
        ranks = [
            subprocess.Popen(
                [python, RUNS / "search.py", *words],
                cwd=tmp_path,
                env=env | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in ("0", "1")
        ]
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [status] * 2, outputs
        assert len(re.findall("^Epoch ", outputs[0], re.M)) == (run != "nan"), outputs
        assert trials(tmp_path, "7", python)[-1][::2] == [state, {"run_dir": run}]


# What `nvidia-smi -i 0,1 --query-gpu=… --format=csv,noheader,nounits` prints.
NVIDIA_SMI = """\
#!/bin/bash
kind=${KIND:-}
case $kind in
    slow) sleep 1 ;;
    hangs) sleep 20 ;;
    fails) echo "NVIDIA-SMI has failed because it couldn't communicate"; exit 9 ;;
esac
busy=90
for gpu in ${2//,/ }; do
    [ "$kind" = unknown ] || echo "$gpu, $busy, 400.12, 20000, 81559"
    [ "$kind" != unknown ] || echo "$gpu, [N/A], [N/A], [N/A], [N/A]"
    [ "$kind" != half ] || { echo "Unable to determine the device handle"; exit 1; }
    busy=3
done
"""
BOTH = "node1: 46% busy (GPU 1: 3%), idle 50% of the time, 400 W, 19.5 of 79.6 GiB"
NO_SAMPLE = "gpu_report: no sample of a GPU"


@pytest.fixture
def path(tmp_path) -> str:
    """A PATH where nvidia-smi is the stand-in."""
    file = tmp_path / "bin" / "nvidia-smi"
    file.parent.mkdir()
    file.write_text(NVIDIA_SMI)
    file.chmod(0o755)
    return f"{file.parent}:{os.environ['PATH']}"


@pytest.mark.usefixtures("nothing_left")
def test_how_busy(jobs: Jobs, project, path):
    """Of two nodes, in the log, with what was before a requeue; a status stays."""
    folder = project("./gpu_report")
    flags = "--nodes=2 --ntasks-per-node=2 --gpus-per-node=2 --cpus-per-task=1 --mem=2G"
    env = {"PATH": path, "GPU_REPORT_SECONDS": "0.2"}
    job = jobs.submit(folder, *flags.split(), "job.sh", "--wait", "--kill", **env)
    jobs.until_found(job, lambda: len(told(jobs.log(job))) == 4, "all tasks", 60)
    jobs.run(["scancel", "--signal=USR1", job])
    jobs.until_found(job, lambda: len(told(jobs.log(job))) == 8, "a requeue", 60)
    samples = folder / "runs" / job / "gpus"
    before = {file.name: file.stat().st_size for file in samples.iterdir()}
    assert before.keys() == {"node1.csv", "node2.csv"}

    def more() -> bool:
        return all((samples / name).stat().st_size > before[name] for name in before)

    jobs.until_found(job, more, "samples", 60)
    (folder / "go").touch()
    result = jobs.wait(job)
    report = [BOTH, BOTH.replace("node1", "node2"), "4 GPUs, 0.00 GPU-hours, 46% busy"]
    assert result.find("^(?:node.: .*|.* GPU-hours.*)$") == 2 * report, result
    assert result.find("^job.sh: error: status 137, "), result


def sample(folder: Path, path: str, program: str, **env: str) -> subprocess.Popen:
    """Start gpu_report in front of a program of bash."""
    env |= {"PATH": path, "RUN_DIR": str(folder), "CUDA_VISIBLE_DEVICES": "0,1"}
    env |= {"SLURMD_NODENAME": "node1", "GPU_REPORT_SECONDS": "0.1"}
    command = [RUNS / "gpu_report", "bash", "-c", program]
    return subprocess.Popen(command, env=HOME | env, start_new_session=True)


def report(folder: Path) -> list[str]:
    command = call([RUNS / "gpu_report"], env=HOME | {"RUN_DIR": str(folder)})
    assert command.exit_code == 0, command
    return command.output.splitlines()


ENOUGH = 'until [ "$(wc -l < "$RUN_DIR/gpus/node1.csv")" -gt 4 ]; do sleep 0.1; done'


@pytest.mark.parametrize(
    "kind, node, total",
    [
        ("slow", BOTH, "2 GPUs, 0.00 GPU-hours, 46% busy"),
        (
            "half",
            BOTH.replace("46", "90").replace("1: 3%", "0: 90%").replace("50%", "0%"),
            "1 GPUs, 0.00 GPU-hours, 90% busy",
        ),
        ("unknown", "", rf"{NO_SAMPLE}: \d+, node1, 1, \[N/A\], .*"),
        ("fails", "", rf"{NO_SAMPLE}: \d+, node1, NVIDIA-SMI has failed .*"),
        ("missing", "", rf"{NO_SAMPLE}: \d+, node1, .*nvidia-smi.*No such file.*"),
    ],
)
def test_nvidia_smi_in_trouble(tmp_path, path, kind, node, total):
    """The program is not concerned, nor is its status, and the report says it."""
    if kind == "missing":
        path = os.environ["PATH"]
    program = sample(tmp_path, path, f"{ENOUGH} 2> /dev/null; kill -9 $$", KIND=kind)
    assert program.wait(timeout=60) == -signal.SIGKILL
    lines = report(tmp_path)
    assert re.fullmatch(total, lines[-1]), lines
    assert lines[:-1] == ([node] if node else []), lines


def test_nvidia_smi_hangs(tmp_path, path):
    """The program does not wait for it."""
    program = sample(tmp_path, path, "exit 7", KIND="hangs")
    assert program.wait(timeout=10) == 7
    assert report(tmp_path) == [NO_SAMPLE]


def test_samples_after_a_warning(tmp_path, path):
    """Some clusters send it to all processes, and the program may go on."""
    program = sample(tmp_path, path, f"trap '' USR1 TERM; {ENOUGH}; read line")
    file = tmp_path / "gpus" / "node1.csv"
    deadline = time.monotonic() + 60

    def until(lines: int) -> None:
        while not file.exists() or len(file.read_text().splitlines()) < lines:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    until(4)
    os.killpg(program.pid, signal.SIGUSR1)
    os.killpg(program.pid, signal.SIGTERM)
    until(len(file.read_text().splitlines()) + 4)
    program.kill()
    assert program.wait() == -signal.SIGKILL


def test_gpu_hours(tmp_path):
    """Two GPUs for an hour, and for half an hour after a requeue."""
    folder = tmp_path / "gpus"
    folder.mkdir()
    times = [*range(0, 3601, 10), *range(0, 1801, 10)]
    rows = [f"{t}, node1, {gpu}, 50, 300, 1, 81559" for t in times for gpu in (0, 1)]
    (folder / "node1.csv").write_text("\n".join(rows))
    assert report(tmp_path)[-1] == "2 GPUs, 3.00 GPU-hours, 50% busy"
