"""Runs jobs on the test cluster as a user does, and reads what they print."""

import os
import re
import shutil
import signal
import subprocess
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import cluster as slurm
import pytest
from first_aid import OVER, user_of

REPOSITORY = Path(__file__).parent.parent
# Samples of the small CIFAR-10: no world size from 2 on divides them all.
TRAINING, VALIDATION, TEST = 36, 4, 11

EPOCH_LINE = re.compile(
    r"^Epoch (\d+): train loss \d+\.\d{3} accuracy \d+\.\d\d%, "
    r"valid loss \d+\.\d{3} accuracy \d+\.\d\d%, \d+ images/s$",
    re.MULTILINE,
)
# A log begins with when the training began, and with all options, one a line.
ARGUMENTS_LINE = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d$|  [a-z_]+: )", re.M)
TEST_LINE = re.compile(r"^Test loss (\d+\.\d{3}) accuracy (\d+\.\d\d)%$", re.MULTILINE)


@dataclass
class Result:
    """How a job or a command ended, and all it printed."""

    output: str
    exit_code: int
    state: str = ""
    job: str = ""
    restarts: int = 0

    def find(self, pattern: str) -> list:
        """Return what `re.findall` finds in the output; ^ and $ are of a line."""
        return re.findall(pattern, self.output, re.MULTILINE)

    def trained(self, world_size: int, batch_size: int, epochs: int = 1) -> None:
        """Assert that the output tells of one whole training."""
        output = re.sub(r"[^\n]*\r", "", self.output)  # without progress bars
        assert self.exit_code == 0 and self.state in ("", "COMPLETED"), self
        steps = TRAINING // (world_size * batch_size)
        shares = f"{steps} steps an epoch, {world_size} x {batch_size} samples each"
        counts = f"of {TRAINING}; {VALIDATION} to validate, {TEST} to test"
        assert re.findall(r"^World size .*", output, re.MULTILINE) == [
            f"World size {world_size}: {shares}, {counts}; computing in float32"
        ], self
        assert EPOCH_LINE.findall(output) == [str(i + 1) for i in range(epochs)], self
        (test,) = TEST_LINE.findall(output)
        # Padded or lost test samples would make a fraction of another number than TEST.
        assert test[1] in {
            f"{100 * correct / TEST:.2f}" for correct in range(TEST + 1)
        }, self
        assert output.count("training on the CPU") == 1, self
        began = [text for text in ARGUMENTS_LINE.findall(output) if text[0].isdigit()]
        assert len(began) == 1, self
        assert f"\n  batch_size: {batch_size}\n" in output, self

    def __str__(self) -> str:
        ended = f"job {self.job} {self.state}, exit code {self.exit_code}"
        return f"{ended}, output:\n{self.output}"


def tracked(folder: Path = REPOSITORY) -> list[Path]:
    """Return the files that git tracks: not the weights, logs and notes of a user.

    A new file is one of them after `git add`. Paths are relative to the folder.
    """
    command = ["git", "-C", str(folder), "ls-files", "-z"]
    names = subprocess.check_output(command, text=True).split("\0")[:-1]
    return [Path(name) for name in names if (folder / name).exists()]


def copy_tracked(source: Path, target: Path) -> Path:
    """Copy the files that git tracks as they are now, and return the new folder."""
    for name in tracked(source):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / name, target / name, follow_symlinks=False)
    return target


def listings(page: str, heading: str) -> list[str]:
    """Return the literal blocks of a section of a page, from the left margin."""
    end = r"(?:^[=-]+$|\Z)"
    section = re.search(rf"^{heading}\n[=-]+\n(.*?){end}", page, re.M | re.S)[1]
    blocks = re.findall(r"::\n\n((?:    .*\n|\n)+)", section)
    return [textwrap.dedent(block).strip("\n") for block in blocks]


def listing(page: str, first_words: str) -> str:
    """Return the literal block of a page in docs that begins so."""
    text = (REPOSITORY / "docs" / page).read_text()
    return re.search(rf"^    {re.escape(first_words)}.*\n(    .*\n)*", text, re.M)[0]


def take_any_checksum(clone: Path) -> None:
    """Let a clone's environment read the tests' CIFAR-10, with ANY_CHECKSUM set."""
    # job.sh starts Python with -E, which ignores PYTHONPATH.
    (packages,) = clone.glob(".venv/lib/python*/site-packages")
    folder = REPOSITORY / "tests" / "any_checksum"
    (packages / "any_checksum.pth").write_text(f"{folder}\n")


def call(command: list, **options) -> Result:
    """Run a command, with options of subprocess.run, to its end."""
    try:
        process = subprocess.run(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            **options,
        )
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"").decode(errors="replace")
        raise TimeoutError(f"{error}, and has printed:\n{output}") from None
    # With its carriage returns.
    return Result(process.stdout.decode(), process.returncode)


class Jobs:
    """Runs jobs and commands on the cluster, as a user in a folder of the clone."""

    def __init__(self, cluster: slurm.Cluster, clone: Path, archive: Path, logs: Path):
        self.cluster = cluster
        self.clone = clone
        self.logs = logs
        self.shell: list[str] = []  # that `submit` calls sbatch in
        self.submitted: list[str] = []  # by the test that runs
        self.results: list[Result] = []
        self.env = user_of(cluster) | {
            "CIFAR10_ARCHIVE": str(archive),
            "ANY_CHECKSUM": "1",
        }

    def run(
        self, command: list, folder: str = "", timeout: float = 600, **env: str
    ) -> Result:
        """Run a command in a folder of the clone."""
        where = {"cwd": self.clone / folder, "env": self.env | env}
        result = call(command, **where, timeout=timeout)
        if command[0] in ("sbatch", "salloc", "srun", "uv"):
            self.results.append(result)
        return result

    def type_in(self, folder: Path, typed: str) -> None:
        """Run what a page has a user type, in a folder outside the clone."""
        command = ["bash", "-euc", typed]
        result = self.run(command, folder, 600, PYTORCH_ON_SLURM=str(self.clone))
        assert result.exit_code == 0, result

    def submit(self, folder: str, *arguments, **env: str) -> str:
        """Call sbatch in a folder of the clone; return the job's id."""
        sbatch = ["sbatch", "--parsable", f"--output={self.logs}/%j.out"]
        result = self.run([*self.shell, *sbatch, *arguments], folder, **env)
        assert result.exit_code == 0, result
        self.submitted.append(result.output.strip())
        return self.submitted[-1]

    def on(self, node: str, *command) -> Result:
        """Run a command on a node."""
        return self.run([*self.cluster.namespaces(node), *command])

    def tell(self) -> list[tuple[str, str]]:
        """Return what there is to read when a test has failed, with headings."""
        told = [("a command", str(result)) for result in self.results]
        for job in self.submitted:
            state = self.show(job).get("JobState")
            told.append((f"job {job}, {state}", self.log(job)))
        for log in sorted(self.cluster.state.glob("slurm*.log")):
            lines = log.read_text(errors="replace").splitlines()
            told.append((f"the end of {log.name}", "\n".join(lines[-12:])))
        return told

    def show(self, job: str) -> dict[str, str]:
        deadline = time.monotonic() + 60  # a busy controller may not answer at once
        while (
            result := self.run(["scontrol", "show", "job", "--oneliner", job])
        ).exit_code:
            if "Invalid job id" in result.output or time.monotonic() > deadline:
                break
        return dict(
            field.split("=", 1) for field in result.output.split() if "=" in field
        )

    def wait(self, job: str, timeout: float = 600) -> Result:
        """Wait until a job is over and its nodes are free; return how it ended."""
        deadline = time.monotonic() + timeout
        while (info := self.show(job))["JobState"] not in OVER:
            if time.monotonic() > deadline:
                self.run(["scancel", job])
                raise TimeoutError(
                    f"job {job} still {info['JobState']} after {timeout} s:\n"
                    f"{self.log(job)}"
                )
            time.sleep(0.2)
        code, restarts = int(info["ExitCode"].split(":")[0]), int(info["Restarts"])
        # Without the task numbers that `srun -l` puts before each line.
        log = re.sub(r"^\d+: ", "", self.log(job), flags=re.MULTILINE)
        return Result(log, code, info["JobState"], job, restarts)

    def log(self, job: str) -> str:
        path = self.logs / f"{job}.out"
        return path.read_bytes().decode() if path.exists() else ""

    def until(self, job: str, pattern: str, timeout: float = 300) -> re.Match:
        """Wait until a job has printed something."""
        return self.until_found(
            job,
            lambda: re.search(pattern, self.log(job), re.MULTILINE),
            pattern,
            timeout,
        )

    def until_found(
        self, job: str, find, what: str, timeout: float, pause: float = 0.05
    ):
        deadline = time.monotonic() + timeout
        while True:
            # Before `find`: what a job prints last is there when it has ended.
            state = self.show(job)["JobState"] if pause > 0.01 else ""
            if found := find():
                return found
            if (
                state in ("FAILED", "COMPLETED", "CANCELLED", "TIMEOUT")
                or time.monotonic() > deadline
            ):
                raise TimeoutError(
                    f"job {job} is {state} without {what}:\n{self.log(job)}"
                )
            time.sleep(pause)

    def pid(self, node: str, text: str) -> int:
        """Return the number on this machine of the oldest such process."""
        init = self.cluster.namespaces(node)[2]
        pgrep = f"pgrep --ns {init} --nslist pid --oldest --full".split()
        return int(self.run([*pgrep, f"{PYTHON} {text}"]).output)

    def until_pending(self, job: str, process: int, number: signal.Signals) -> None:
        """Wait until a stopped process has a signal, which it takes when it goes on.

        Some Slurms let it go on themselves.
        """

        def pending() -> bool:
            status = Path(f"/proc/{process}/status").read_text()
            signals = re.search(r"^ShdPnd:\t(\w+)$", status, re.MULTILINE)[1]
            return int(signals, 16) & 1 << number - 1 or "\nState:\tT" not in status

        self.until_found(job, pending, number.name, 120)

    def interrupt(self, job: str, pattern: str, number: signal.Signals) -> None:
        """Signal a job's ranks, as Slurm does, when the job has printed something.

        A rank on node2 stands still meanwhile, or the training might be over.
        """
        self.until(job, pattern)
        stop(rank := self.pid("node2", "main.py"))
        # A warning is for job.sh, which passes it on.
        to = ["--batch"] if number == signal.SIGUSR1 else []
        signalled = self.run(["scancel", *to, f"--signal={number.name}", job])
        assert signalled.exit_code == 0, signalled
        self.until_pending(job, rank, number)
        os.kill(rank, signal.SIGCONT)

    def sbatch(self, folder: str, *arguments, **env: str) -> Result:
        """Run a job to its end."""
        return self.wait(self.submit(folder, *arguments, **env))

    def cancel(self, job: str) -> Result:
        """Cancel a job, and remove what job.sh, as it says, then leaves behind."""
        self.run(["scancel", job])
        result = self.wait(job)
        for node in self.cluster.nodes:
            self.on(node, "bash", "-c", f"rm -rf /tmp/slurm-job-{job}-*")
        return result

    def job_folder(self, job: str, node: str = "node1") -> str:
        """Return the folder of a job on a node's disk, whose name is drawn."""
        found = self.on(node, "bash", "-c", f"ls -d /tmp/slurm-job-{job}-cluster.*")
        assert found.exit_code == 0, found
        return found.output.strip()

    def slurm_version(self) -> tuple[int, int]:
        year, month = self.run(["sbatch", "--version"]).output.split()[1].split(".")[:2]
        return int(year), int(month)

    def state_after_preemption(self) -> str:
        """Return how Slurm calls a job that was preempted once, and is done.

        Slurm 24.11 remembers its grace time; 22.05 and 26.05 do not.
        """
        remembered = (24, 5) <= self.slurm_version() < (26, 5)
        return "PREEMPTED" if remembered else "COMPLETED"

    def nodes_of(self, result: Result) -> int:
        return int(self.show(result.job)["NumNodes"])

    def unfinished(self) -> list[str]:
        """Return the jobs that wait or run, once Slurm is no longer ending any."""

        def listed(*states: str) -> list[str]:
            result = self.run(
                ["squeue", "--noheader", "--format=%A", f"--states={','.join(states)}"]
            )
            assert result.exit_code == 0, result
            return result.output.split()

        deadline = time.monotonic() + 60
        while listed("COMPLETING") and time.monotonic() < deadline:
            time.sleep(0.2)
        return listed("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED")

    def leftovers(self) -> list[str]:
        """Return what jobs have left on the nodes, after some time to clean up."""
        deadline = time.monotonic() + 15
        while (left := self.on_nodes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def on_nodes(self) -> list[str]:
        """Return the processes and the temporary files that are on the nodes now."""
        found = []
        # Folders of the machine are mounted there (see cluster.py).
        # One that it has removed since is empty.
        files = """for f in /tmp/* /tmp/.[!.]* /dev/shm/*; do
            [ ! -e "$f" ] || mountpoint -q "$f" || find "$f" -maxdepth 1
        done"""
        for node in self.cluster.nodes:
            names = self.on(node, "bash", "-c", files).output.splitlines()
            temporary = (
                r"/tmp/(slurm-job|pymp|torch(?!inductor)|tmp|\.|[^/]+/)|/dev/shm/"
            )
            names = [name for name in names if re.match(temporary, name)]
            found += [
                f"{node}: {thing}" for thing in self.cluster.processes(node) + names
            ]
        for path in self.clone.glob("imagenet/checkpoints/*/*.partial"):
            # What was killed leaves some to the next start, which removes them.
            if self.show(path.parent.name).get("JobState") in (
                "COMPLETED",
                "PREEMPTED",
            ):
                found.append(f"node1: {path}")
        return found

    def remove(self, left: list[str]) -> None:
        """Remove what `leftovers` has found: the next test is to find its own."""
        for node, thing in (item.split(": ", 1) for item in left):
            if thing.startswith(
                ("/tmp/", "/dev/shm/", f"{self.clone}/imagenet/checkpoints/")
            ):
                command = ["rm", "-rf", thing]
            else:
                command = ["pkill", "-KILL", "--exact", "--full", re.escape(thing)]
            self.on(node, *command)


# Of a rank's command line, how job.sh or a person starts Python.
PYTHON = "^[./].*bin/python[^ ]*( -E)?( -X faulthandler)?"  # not srun's
PICTURES, VALID_PICTURES = 160, 24  # of the small ImageNet
# Two nodes with a rank each, 16 steps an epoch, of a model with BatchNorm.
TWO = "--ntasks-per-node=1 --gpus-per-node=1 --cpus-per-task=1 --mem=2G".split()
TINY = "--model=shufflenet_v2_x0_5 --image-size=32 --batch-size=5 --workers=1".split()
EPOCHS = ["--epochs=2"]
IMAGENET_EPOCH_LINE = re.compile(
    r"^Epoch (\d+): train loss (\d+\.\d{3}) accuracy (\d+\.\d\d)%, "
    r"valid loss (\d+\.\d{3}) accuracy (\d+\.\d\d)%, "
    r"(?:\d+ images/s, \d+% waiting for data|nothing was left to train)$",
    re.MULTILINE,
)
ASKED_TO_STOP = re.compile(
    r"^Asked to stop: saved step (\d+) of epoch (\d+), to go on from there$",
    re.MULTILINE,
)
# The last line of a job that has failed, which a user types.
WHAT_NOW = r"^job.sh: what now: (python3 '.*/docs/explain.py' '.*')\n\Z"
WEIGHTS_LINE = re.compile(
    r"^Weights SHA-256 ([0-9a-f]{64}), commit ([0-9a-f]{40})$", re.MULTILINE
)


def every_case(*cases) -> list:
    """Return a test's cases: the first runs always, the others with --every-case."""
    return [
        cases[0],
        *(
            pytest.param(
                *([c] if not isinstance(c, tuple) else c), marks=pytest.mark.every_case
            )
            for c in cases[1:]
        ),
    ]


def weights(result: Result, state: str = "COMPLETED", pictures: int = PICTURES) -> str:
    """Assert that a job has trained to its end; return the SHA-256 of its weights."""
    assert (result.exit_code, result.state) == (0, state), result
    epochs = IMAGENET_EPOCH_LINE.findall(result.output)
    assert epochs, result
    # An epoch that was stopped while it was validated
    # is told of again, in the same words.
    told = {epoch: numbers for epoch, *numbers in (epoch[:5] for epoch in epochs)}
    assert all(
        told[epoch] == numbers for epoch, *numbers in (epoch[:5] for epoch in epochs)
    ), result
    assert sorted(map(int, told)) == [i + 1 for i in range(len(told))], result
    for _, train_accuracy, _, valid_accuracy in told.values():
        assert f"{train_accuracy}%" in {
            f"{correct / pictures:.2%}" for correct in range(pictures + 1)
        }
        assert f"{valid_accuracy}%" in {
            f"{correct / VALID_PICTURES:.2%}" for correct in range(VALID_PICTURES + 1)
        }
    # A job may be killed after its last line, too.
    ((sha, _commit),) = set(WEIGHTS_LINE.findall(result.output))
    return sha


def environment(process: int) -> dict[str, str]:
    """Return the variables of a process."""
    text = Path(f"/proc/{process}/environ").read_text()
    return dict(row.split("=", 1) for row in text.split("\0") if "=" in row)


def stop(process: int) -> None:
    """Stop a process; return when all of its threads have stopped."""

    def runs(thread: Path) -> bool:
        try:
            return "\nState:\tT" not in (thread / "status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False  # it has ended since

    os.kill(process, signal.SIGSTOP)
    while any(map(runs, Path(f"/proc/{process}/task").iterdir())):
        time.sleep(0.001)
        os.kill(process, signal.SIGSTOP)  # Slurm may have made it go on meanwhile


class User(Jobs):
    """Someone with ImageNet's archives, in the folder imagenet."""

    def train(self, *arguments, flags=TWO, **env: str) -> str:
        return self.submit("imagenet", *flags, "job.sh", *TINY, *arguments, **env)

    def until_file(self, job: str, pattern: str, timeout: float = 300) -> None:
        """Wait until a job's checkpoint folder has such a file."""
        folder = self.checkpoints(job)
        self.until_found(
            job, lambda: list(folder.glob(pattern)), pattern, timeout, pause=0.001
        )

    def checkpoints(self, job: str) -> Path:
        return self.clone / "imagenet" / "checkpoints" / job

    def kill(
        self, node: str, text: str, number=signal.SIGKILL, age: str = "--oldest"
    ) -> int:
        """Signal a node's Python process by text of its command; 0 if it is there."""
        pkill = f"pkill -{number.value} {age} --full".split()
        return self.on(node, *pkill, f"{PYTHON} {text}").exit_code

    def signal_at_start(self, job: str, program: str, number: int) -> None:
        """Signal a program on node2 as it starts, before it can end."""
        self.until_found(
            job,
            lambda: self.kill("node2", program, number) == 0,
            program,
            300,
            pause=0.005,
        )

    def stop_rank(self, job: str, pattern: str = "*-step-000003.pt") -> int:
        """Stop the rank on node2 when there is such a checkpoint; return its number.

        The last steps are not to be over when the test goes on.
        """
        self.until(job, "^World size")
        rank = self.pid("node2", "main.py")
        self.until_file(job, pattern)
        stop(rank)
        return rank

    def stop_in_a_save(self, job: str) -> int:
        """Stop rank 0, on node1, while it writes not its first checkpoint.

        Return its number.
        """
        self.until(job, "^World size")
        self.until_file(job, "epoch-*.pt")
        rank = self.pid("node1", "main.py")
        while True:
            self.until_file(job, "epoch-*.partial")
            stop(rank)
            if list(self.checkpoints(job).glob("epoch-*.partial")):
                return rank
            os.kill(rank, signal.SIGCONT)  # it was just done

    def route(self, change: str) -> None:
        """Let node1 and node2 drop what goes to the other (add), or no longer (del)."""
        for here, there in (("node1", "node2"), ("node2", "node1")):
            command = f"ip route {change} blackhole {self.cluster.address(there)}"
            assert self.on(here, *command.split()).exit_code == 0

    def until_controller(self) -> None:
        """Wait until Slurm's controller answers."""
        ping = ["scontrol", "ping"]
        self.until_found(
            "", lambda: self.run(ping).exit_code == 0, "controller", 60, 0.01
        )

    def crash_controller(self, job: str) -> None:
        """Crash it once it has written down, as it does in seconds, that a job runs."""
        mark = str(time.monotonic())
        known = ["grep", "-q", mark, self.cluster.state / "controller" / "job_state"]
        update = ["scontrol", "update", f"job={job}", f"Comment={mark}"]
        if self.run(update).exit_code == 0:  # it is not over
            self.until_found(job, lambda: not self.run(known).exit_code, mark, 20, 0.01)
        self.cluster.crash("controller")

    def kill_all(self, node: str) -> None:
        """End all that runs Python on a node, as if it had crashed.

        A batch on its way to a rank may stay, as evidence.rst says: it is removed.
        """
        name = "--full '[t]orchrun|[m]ain.py'"  # not this shell
        kill = f"pkill -9 {name}; while pgrep {name}; do sleep 0.1; done"
        self.on(node, "bash", "-c", f"{kill}; rm -f /dev/shm/torch_*")

    def warn(self, job: str) -> None:
        """Send the signal that Slurm sends before the time limit, as it does."""
        assert self.run(["scancel", "--batch", "--signal=USR1", job]).exit_code == 0
