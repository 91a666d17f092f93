"""docs/runs: many runs of one's own script, a search, and how busy the GPUs were.

What nvidia-smi prints is made up, because there is no GPU: a script of this file's own
stands in for it on PATH. It can also be slow, hang, fail half-way or know no numbers.
"""

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from first_aid import user_of
from fork_ranks import Ranks
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
task = os.environ["SLURM_PROCID"] + " of " + os.environ["SLURM_NTASKS"]
told = [sys.argv[1:], run_dir, task, os.path.exists(checkpoint)]
print("Told", json.dumps(told), os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
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


def told(log: str) -> list[list]:
    return [json.loads(line) for line in re.findall(r"^Told (.*) .*$", log, re.M)]


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
    "--name a&b",
    "--wait",
]


@pytest.mark.usefixtures("nothing_left")
def test_a_line_for_each_task_of_an_array(jobs: Jobs, project):
    """A requeued task keeps its line, although the file has changed.

    What else is no line of words: test_words_of_a_line. A seed for each task, and the
    file of a commit: test_array of imagenet, and test_sparse_checkout.
    """
    folder = project()
    sweep = folder / "sweep.txt"
    sweep.write_bytes("\r\n".join(LINES).encode())
    # Slurm gives the array's number to its last task, 6.
    flags = [f"--output={jobs.logs}/%A_%a.out", "--array=0-6", *ONE]
    words = ["job.sh", "@sweep.txt", "--for", "all tasks"]
    array = jobs.submit(folder, *flags, *words, SCRATCH="/my scratch")
    tasks = [f"{array}_{number}" for number in range(7)]
    jobs.until(tasks[6], "^Told ")
    results = [jobs.wait(task) for task in tasks[:6]]
    sweep.write_text("--other\n" * 7)
    jobs.run(["scancel", "--batch", "--signal=USR1", tasks[6]])
    jobs.until(tasks[6], "^Told .* true")
    (folder / "go").touch()
    results.append(jobs.wait(tasks[6]))
    for number in (0, 2):
        error = f"^job.sh: error: sweep.txt: line {number} is empty or missing$"
        assert results[number].find(error), results[number]
    assert "syntax error near unexpected token `&'" in results[5].output, results[5]
    assert results[5].find("^job.sh: error: sweep.txt: line 5 is wrong, see above$")
    lines = [["--name", "two words"], ["--fail"], ["--home", HOME["HOME"]], ["--wait"]]
    lines[2] += ["/my", "scratch"]
    for number, words in zip((1, 3, 4, 6), lines, strict=True):
        start = [[*words, "--for", "all tasks"], f"runs/{tasks[number]}", "0 of 1"]
        starts = [[*start, False], [*start, True]][: 1 + (number == 6)]
        assert told(results[number].output) == starts, results[number]
    ends = [(result.state == "COMPLETED", result.restarts) for result in results]
    wrong, right = (False, 0), (True, 0)
    assert ends == [wrong, right, wrong, wrong, right, wrong, (True, 1)], results
    no_array = jobs.sbatch(folder, *ONE, "job.sh", "@sweep.txt")
    assert no_array.find("SLURM_ARRAY_TASK_ID: give --array$"), no_array


EACH_LINE = ["./each_line", "sweep.txt"]


def logs_of(folder: Path, job: str) -> dict[int, str]:
    """Return the log of each line's run, by the line's number."""
    logs = (folder / "runs" / job).glob("*/log")
    return {int(log.parent.name): log.read_text() for log in logs}


@pytest.mark.usefixtures("nothing_left")
def test_several_at_once(jobs: Jobs, project):
    """Six lines on three tasks and two GPUs, one failing, through two requeues.

    gpu_report stands in front, as on its page.
    """
    folder = project("./gpu_report", *EACH_LINE)
    sweep = folder / "sweep.txt"
    lines = ["--name 'two words'", "# no", "--wait", "--fail", "--wait", "", "--wait"]
    sweep.write_bytes("\r\n".join([*lines, "--last=$RUN_DIR"]).encode())
    flags = [*ONE, "--ntasks-per-node=3", "--gpus-per-node=2"]
    job = jobs.submit(folder, *flags, "job.sh", "--for-all")

    def waiting(starts: int):
        def find() -> bool:
            logs = logs_of(folder, job)
            return all(logs.get(n, "").count("Told ") == starts for n in (3, 5, 7))

        jobs.until_found(job, find, f"three lines, {starts} times", 300)

    waiting(1)
    sweep.write_text("--other\n")
    jobs.run(["scancel", "--batch", "--signal=USR1", job])
    waiting(2)
    jobs.run(["scontrol", "requeue", job])
    waiting(3)
    (folder / "go").touch()
    result = jobs.wait(job)
    logs = logs_of(folder, job)
    runs = {number: told(log) for number, log in logs.items()}
    lines = {3: "--wait", 5: "--wait", 7: "--wait", 4: "--fail"}
    lines[8] = f"--last=runs/{job}/8"
    # The program takes itself for the only task.
    expected = {
        number: [["--for-all", line], f"runs/{job}/{number}", "0 of 1"]
        for number, line in lines.items()
    }
    expected[1] = [["--for-all", "--name", "two words"], f"runs/{job}/1", "0 of 1"]
    starts = {1: 1, 3: 3, 4: 4, 5: 3, 7: 3, 8: 1}
    assert runs == {
        number: [[*expected[number], n > 0 and number != 4] for n in range(times)]
        for number, times in starts.items()
    }, result
    gpus = {re.search(r"^Told .* (\d)$", log, re.M)[1] for log in logs.values()}
    assert len(gpus) == 2, logs
    # No line starts after a warning.
    parts = result.output.split("\nJob ")
    assert ["Line 8: --last" in part for part in parts] == [False, False, True, False]
    assert result.output.count("Line 4: ended with status 3\n") == 4, result
    assert (result.state, result.restarts) == ("FAILED", 3), result
    last = result.output.splitlines()[-2]  # before that on explain.py
    error = rf"status 1, no new checkpoint in runs/{job} \(.*\): not started again"
    assert re.fullmatch(f"job.sh: error: {error}", last), result


@pytest.mark.usefixtures("nothing_left")
def test_a_line_that_fails_ends_no_other(jobs: Jobs, project):
    """Its task has nothing left to do, and srun ends all with the first that leaves."""
    folder = project(*EACH_LINE)
    (folder / "sweep.txt").write_text("--fail\n--wait\n")
    flags = ["--nodelist=node1", "--ntasks-per-node=2"]
    job = jobs.submit(folder, *ONE, *flags, "job.sh")

    def idle() -> bool:
        return any("flock" in process for process in jobs.cluster.processes("node1"))

    jobs.until_found(job, idle, "a task that waits", 300)
    (folder / "go").touch()
    result = jobs.wait(job)
    assert result.find("^Line (.*)$")[-1] == "1: ended with status 3", result
    assert result.output.count("Line 2: ended with status 0\n") == 1, result


def test_words_of_a_line(tmp_path):
    """A run has the words of its line, or one line of the log says why not."""
    lines = {
        "--lr 0.1 --glob * --run $RUN_DIR": [
            "--lr",
            "0.1",
            "--glob",
            "*",
            "--run",
            "7/1",
        ],
        """--name="two  'more' words" '$HOME' \\" ''""": [
            "--name=two  'more' words",
            "$HOME",
            '"',
            "",
        ],
        "--lr 0.1 \\": "it ends in a backslash: a run is one line",
        "--data $SCRATHC/x": "SCRATHC: unbound variable",
        "--name a&b": "syntax error near unexpected token `&'",
        "--name=don't": "unexpected EOF while looking for matching `''",
        "--lr 0.2": ["--lr", "0.2"],
    }
    (tmp_path / "sweep.txt").write_text("\n".join(lines))
    env = {"LOCAL_JOB_DIR": str(tmp_path), "SLURM_NNODES": "1", "SLURM_LOCALID": "2"}
    # What a rank has of job.sh, and of an MPI that Slurm knows.
    env |= {"RUN_DIR": "7", "RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "3"}
    env |= {"PMI_RANK": "2", "PMI_SIZE": "3", "PMIX_RANK": "2"}
    env |= {"OMPI_COMM_WORLD_SIZE": "3", "MV2_COMM_WORLD_SIZE": "3"}
    ranks = (
        "env | grep -E '^(PMI|OMPI|MV2)|RANK|WORLD_SIZE' | sort; printf '%s\\n' \"$@\""
    )
    command = [RUNS / "each_line", "sweep.txt", "bash", "-c", ranks, "bash"]
    result = call(command, cwd=tmp_path, env=HOME | env)
    assert result.exit_code == 1, result
    errors = result.find("^each_line: error: sweep.txt: line (.*)$")
    alone = ["LOCAL_RANK=0", "RANK=0", "WORLD_SIZE=1"]
    for number, expected in enumerate(lines.values(), 1):
        log = (tmp_path / "7" / str(number) / "log").read_text().splitlines()
        if isinstance(expected, list):
            assert log == alone + expected, log
        else:
            assert f"{number}: {expected}" in errors, result
            assert log == [f"each_line: error: sweep.txt: line {number}: {expected}"]
    assert len(errors) == 4, result


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


@pytest.mark.parametrize("room", [2, 4])  # for `taken` alone, or also a line
def test_full_disk_of_the_node(tmp_path, room):
    """Lines that it cannot take are named, and it fails."""
    (tmp_path / "sweep.txt").write_text("1\n2\n")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"nr_inodes={room}", "none", disk]
    subprocess.run(mount, check=True)
    env = {"LOCAL_JOB_DIR": str(disk), "SLURM_JOB_ID": "7", "SLURM_NNODES": "1"}
    env |= {"SLURM_LOCALID": "0", "ROCR_VISIBLE_DEVICES": "4,5"}
    (tmp_path / "none.txt").write_text("# 1\n\n")
    none = {"RUN_DIR": "none"}
    result = call([RUNS / "each_line", "none.txt"], cwd=tmp_path, env=HOME | env | none)
    assert result.exit_code == 1 and result.find("none.txt is empty$"), result
    command = [RUNS / "each_line", "sweep.txt", "bash", "-c", "env; echo $0"]
    result = call(command, cwd=tmp_path, env=HOME | env)
    subprocess.run(["umount", disk], check=True)
    assert result.exit_code == 1, result
    if room == 2:
        assert result.find("taken/lock: No space left on device$"), result
        return
    assert result.find("^Line (.*)$") == [
        "1: 1, in runs/7/1/log",
        "1: ended with status 0",
        f"2: cannot write to {disk}/taken",
    ], result
    log = (tmp_path / "runs" / "7" / "1" / "log").read_text()
    assert "\nROCR_VISIBLE_DEVICES=4\n" in log and log.endswith("\n1\n"), log


FRAMEWORKS = """\
import os, runpy, sys
if sys.argv[1] == "torchrun":
    torchrun = [sys.executable, *"-m torch.distributed.run --standalone".split()]
    torchrun += ["--log-dir", os.environ["RUN_DIR"]]  # or it leaves a folder in /tmp
    os.execv(sys.executable, [*torchrun, sys.argv[0], "worker"])
elif sys.argv[1] == "worker":
    import torch.distributed as dist
    dist.init_process_group("gloo")
    dist.barrier()
    print("Epoch 4: world size", dist.get_world_size())
else:
    runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.mark.usefixtures("nothing_left")
def test_frameworks_are_alone(jobs: Jobs, project, frameworks):
    """A run of two scripts of the page and one of torchrun, at once, each alone."""
    python = f"{frameworks}/bin/python"
    folder = project(*EACH_LINE, python=python, program=FRAMEWORKS)
    shutil.copy(REPOSITORY / "imagenet" / "resume.py", folder)
    names = ("lightning", "accelerate")
    lines = [f"'{REPOSITORY}/docs/your_training/{name}/main.py'" for name in names]
    (folder / "sweep.txt").write_text("\n".join([*lines, "torchrun", ""]))
    flags = [*ONE, "--ntasks-per-node=3", "--mem=8G"]
    result = jobs.sbatch(folder, *flags, "job.sh", OMP_NUM_THREADS="1")
    ends = ["^Epoch 4: loss ", "^Epoch 4: loss ", "^Epoch 4: world size 1$"]
    for number, end in enumerate(ends, 1):
        log = (folder / "runs" / result.job / str(number) / "log").read_text()
        assert len(re.findall(end, log, re.M)) == 1, log
    assert (result.state, result.restarts) == ("COMPLETED", 0), result


# Prints how the trials of a journal have ended, and the folders of their jobs.
TRIALS = """\
import sys, json, optuna
backend = optuna.storages.journal.JournalFileBackend(sys.argv[1])
storage = optuna.storages.JournalStorage(backend)
study = optuna.load_study(storage=storage, study_name=sys.argv[2])
print(json.dumps([[t.state.name, t.value, t.user_attrs] for t in study.trials]))
"""


def trials(folder: Path, job: str, frameworks: Path) -> list[list]:
    command = [frameworks / "bin" / "python", "-c", TRIALS, f"runs/{job}.journal", job]
    return json.loads(subprocess.check_output(command, cwd=folder))


def make_search(folder: Path) -> str:
    """Return the script that the page's diff makes, with what it imports beside it."""
    (rows,) = re.findall(r"^   --- whole/main.py\n(?:(?:   .*)?\n)+", PAGE, re.M)
    lines = [row[3:] or " " for row in rows.rstrip("\n").split("\n")]
    shutil.copy(REPOSITORY / "docs" / "your_training" / "whole" / "main.py", folder)
    for file in (RUNS / "search.py", REPOSITORY / "imagenet" / "resume.py"):
        shutil.copy(file, folder)
    patch = ["patch", "--fuzz=0", "main.py"]
    subprocess.run(
        patch, cwd=folder, input="\n".join(lines) + "\n", text=True, check=True
    )
    return (folder / "main.py").read_text()


@pytest.mark.usefixtures("nothing_left")
def test_search(jobs: Jobs, project, frameworks):
    """A task is warned, one requeued, one killed: no trial is lost, or made twice."""
    folder = project(python=f"{frameworks}/bin/python")
    make_search(folder)
    flags = [f"--output={jobs.logs}/%A_%a.out", "--array=1-4%3", "--mem=4G"]
    flags += "--ntasks-per-node=2 --cpus-per-task=1".split()
    # On one node: the next start removes what a requeue leaves no time for.
    flags.append("--nodelist=node1")
    array = jobs.submit(folder, *flags, "job.sh", "--epochs=4")
    tasks = [f"{array}_{number}" for number in range(1, 5)]
    warned, requeued, killed, undisturbed = tasks
    ends = {
        # Only the training, step 2, before its first checkpoint, and not the job.
        killed: ["scancel", "--signal=KILL", f"{killed}.2"],
        warned: ["scancel", "--batch", "--signal=USR1", warned],
        requeued: ["scontrol", "requeue", requeued],
    }

    def begun() -> list[str]:
        return [task for task in ends if "\nTrial: " in jobs.log(task)]

    while ends:
        for task in jobs.until_found(array, begun, "a trial", 300, 0.01):
            jobs.run(ends.pop(task))
    failed = jobs.wait(killed)
    assert failed.find("no new checkpoint in .*: not started again$"), failed
    assert jobs.run(["scontrol", "requeue", killed]).exit_code == 0
    for task in tasks:
        result = jobs.wait(task)
        assert result.state == "COMPLETED", result
        assert result.restarts == (task != undisturbed), result
        # After its second start, it has the settings of the first.
        assert len(set(result.find("^Trial: .*"))) == 1, result
        resumed = len(result.find("^Resuming "))
        # Slurm gives the requeued one a few seconds: at its start, that may be too few.
        assert resumed == (task == warned) or task == requeued, result
    ended = trials(folder, array, frameworks)
    assert {state for state, _, _ in ended} <= {"COMPLETE", "PRUNED"}, ended
    assert len(ended) == 4
    folders = [attributes["run_dir"] for _, _, attributes in ended]
    assert sorted(folders) == [f"runs/{task}" for task in tasks]
    (command,) = re.findall(r"^    (grep -h .*)$", PAGE, re.M)
    command = command.replace("slurm-30_*.out", f"'{jobs.logs}'/{array}_*.out")
    best = jobs.run(["bash", "-c", command]).output
    value = max(value for state, value, _ in ended if state == "COMPLETE")
    (won,) = re.findall(f": {value} .*'(runs/.*)'", best)  # others may be as good
    assert (value, won) in [(value, folder["run_dir"]) for _, value, folder in ended]
    history = (folder / won / "metrics.jsonl").read_text().splitlines()
    assert value == max(json.loads(line)["accuracy"] for line in history)
    assert (folder / won / "best.pt").exists()


# Five trials that no other can beat.
GOOD = """\
import optuna
backend = optuna.storages.journal.JournalFileBackend("runs/7.journal")
storage = optuna.storages.JournalStorage(backend)
study = optuna.create_study(storage=storage, study_name="7", direction="maximize")
for _ in range(5):
    values = {epoch: 2.0 for epoch in range(9)}
    study.add_trial(optuna.trial.create_trial(value=2.0, intermediate_values=values))
"""


@pytest.fixture(scope="module")
def ranks(frameworks):
    ranks = Ranks(frameworks / "bin" / "python")
    yield ranks
    ranks.end()


def test_all_ranks_leave_a_trial_that_is_stopped(tmp_path, frameworks, ranks):
    python = frameworks / "bin" / "python"
    (tmp_path / "runs" / "7_1").mkdir(parents=True)
    subprocess.run([python, "-c", GOOD], cwd=tmp_path, check=True)
    make_search(tmp_path)
    env = {"RUN_DIR": "runs/7_1", "SLURM_ARRAY_JOB_ID": "7"}
    ended = ranks(tmp_path, "--epochs=3", ranks=2, **env)
    assert [rank.exit_code for rank in ended] == [0, 0], ended
    assert len(ended[0].find("^Epoch ")) == 1, ended
    assert ended[0].find("^Best of 5: 2.0 "), ended
    assert trials(tmp_path, "7", frameworks)[-1][::2] == [
        "PRUNED",
        {"run_dir": "runs/7_1"},
    ]
    # Its trial has ended.
    ended = ranks(tmp_path, "--epochs=3", ranks=2, **env)
    assert [rank.exit_code for rank in ended] == [1, 1], ended
    assert ended[0].find("^main.py: error: its trial is PRUNED$"), ended


def test_ranking(tmp_path):
    """The best validation accuracy of each run; those that have failed are last."""
    page = (REPOSITORY / "docs" / "after_a_job.rst").read_text()
    (typed,) = re.findall(r"^    for run in runs/28_\*; do\n(?:    .*\n)+", page, re.M)
    for number, accuracies in (
        (1, [0.5, 0.9, 0.7]),
        (2, None),
        (3, [0.97]),
        (4, [1e-5]),
    ):
        run = tmp_path / "runs" / f"28_{number}"
        run.mkdir(parents=True)
        (run / "line").write_text(f"--lr {number}\n")
        if accuracies:
            rows = [json.dumps({"loss": 1 / a, "accuracy": a}) for a in accuracies]
            (run / "metrics.jsonl").write_text("\n".join(rows))
    ranked = call(["bash", "-c", typed], cwd=tmp_path)
    assert ranked.output.splitlines() == [
        '"accuracy": 0.97 runs/28_3 --lr 3',
        '"accuracy": 0.9 runs/28_1 --lr 1',
        '"accuracy": 1e-05 runs/28_4 --lr 4',
        '"accuracy": none runs/28_2 --lr 2',
    ], ranked


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
    jobs.until_found(job, lambda: len(told(jobs.log(job))) == 4, "all tasks", 300)
    samples = folder / "runs" / job / "gpus"

    def sampled() -> bool:
        counts = [path.read_text().count("\n") for path in samples.glob("*.csv")]
        return len(counts) == 2 and min(counts) >= 2

    jobs.until_found(job, sampled, "samples of both nodes", 60)
    jobs.run(["scancel", "--batch", "--signal=USR1", job])
    jobs.until_found(job, lambda: len(told(jobs.log(job))) == 8, "a requeue", 300)
    (folder / "go").touch()
    result = jobs.wait(job)
    nodes = [BOTH, BOTH.replace("node1", "node2")]
    assert result.find("^node.: .*") == 2 * nodes, result
    assert len(result.find(r"^4 GPUs, 0\.\d\d GPU-hours, 46% busy$")) == 2, result
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


# It waits for samples, signals all its processes, waits for more, and is killed.
PROGRAM_OF_BASH = """\
until_samples() {
    until [ "$(wc -l < "$RUN_DIR/gpus/node1.csv")" -gt $1 ]; do sleep 0.1; done
}
trap '' USR1 TERM
until_samples 1 2> /dev/null
kill -USR1 0; kill -TERM 0
until_samples 5
kill -9 $$
"""


@pytest.mark.parametrize(
    "kind, node, total",
    [
        ("slow", BOTH, "2 GPUs, 0.00 GPU-hours, 46% busy"),
        (
            "half",
            BOTH.replace("46", "90").replace("1: 3%", "0: 90%").replace("50%", "0%"),
            "1 GPUs, 0.00 GPU-hours, 90% busy",
        ),
        ("unknown", "", rf"{NO_SAMPLE}: node1, 1, \[N/A\], .*"),
        ("fails", "", rf"{NO_SAMPLE}: node1, NVIDIA-SMI has failed .*"),
        ("missing", "", rf"{NO_SAMPLE}: node1, .*nvidia-smi.*No such file.*"),
    ],
)
def test_nvidia_smi_in_trouble(tmp_path, path, kind, node, total):
    """The program and its status are not concerned, and the report says it.

    Some clusters send a warning to all processes, and the program may go on after it.
    """
    if kind == "missing":
        path = os.environ["PATH"]
    program = sample(tmp_path, path, PROGRAM_OF_BASH, KIND=kind)
    assert program.wait(timeout=60) == -signal.SIGKILL
    lines = report(tmp_path)
    assert re.fullmatch(total, lines[-1]), lines
    assert lines[:-1] == ([node] if node else []), lines


def test_nvidia_smi_hangs(tmp_path, path):
    """The program does not wait for it."""
    program = sample(tmp_path, path, "exit 7", KIND="hangs")
    assert program.wait(timeout=10) == 7
    assert report(tmp_path) == [NO_SAMPLE]


def test_gpu_hours(tmp_path):
    """Two GPUs for an hour, and for half an hour after a requeue."""
    folder = tmp_path / "gpus"
    folder.mkdir()
    times = [*range(0, 3601, 10), *range(0, 1801, 10)]
    rows = [f"{t}, node1, {gpu}, 50, 300, 1, 81559" for t in times for gpu in (0, 1)]
    (folder / "node1.csv").write_text("\n".join(rows))
    assert report(tmp_path)[-1] == "2 GPUs, 3.00 GPU-hours, 50% busy"
