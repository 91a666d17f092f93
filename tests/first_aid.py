"""Run the commands of docs/troubleshooting.rst; write what they print into it.

    uv run python tests/first_aid.py            all of them, as root
    uv run python tests/first_aid.py preempt    those under headings with this word

A literal block whose lines begin with `$ ` is a session in a shell that starts in the
clone's root: commands (`> ` goes on with one), and under each what it prints. After
sbatch, the job is waited for until it runs, and before a command that names its log
(but `until …`) until it is over. Job 7 of the page is whatever number Slurm gives out,
and times are others. Lines that are still right stay.
"""

import argparse
import contextlib
import os
import re
import subprocess
import tempfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import cluster as slurm

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "troubleshooting.rst"
BLOCK = re.compile(r"::\n\n((?:    .*\n|\n)+)")
HEADING = re.compile(r"^(\S.*)\n([=-])\2+$", re.MULTILINE)
SUBMITTED = re.compile(r"Submitted batch job (\d+)")
# What stands before the number of a job.
JOB = (
    r"(?:\bjob |JobId=|--jobs=|StepId=|STEP |JOB |slurm-|slurm-job-|"
    r"logs/|checkpoints/|scancel |^)"
)
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")
# Sessions under these headings want a cluster that limits memory.
LIMITED = ["Out of memory, says Slurm", "No new checkpoint since this start"]
OVER = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "PREEMPTED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
)


@dataclass
class Session:
    """A literal block of the page: commands, each with the lines under it."""

    heading: str
    text: str  # as it stands in the page
    commands: list[tuple[str, list[str]]]


def read_sessions(page: str) -> list[Session]:
    sessions = []
    for block in BLOCK.finditer(page):
        lines = [line.removeprefix("    ") for line in block[1].rstrip().split("\n")]
        if not lines[0].startswith("$ "):
            continue
        commands: list[tuple[str, list[str]]] = []
        for line in lines:
            if line.startswith("$ "):
                commands.append((line.removeprefix("$ "), []))
            elif line.startswith("> ") and not commands[-1][1]:  # the command goes on
                command, _ = commands.pop()
                commands.append((f"{command}\n{line.removeprefix('> ')}", []))
            else:
                commands[-1][1].append(line)
        heading = HEADING.findall(page[: block.start()])[-1][0]
        sessions.append(Session(heading, block[1].rstrip("\n") + "\n", commands))
    return sessions


class Shell:
    """A shell that starts in the clone, whose user has the cluster's commands."""

    def __init__(self, clone: Path, env: dict[str, str]):
        self.clone, self.env = clone, env
        self.process = subprocess.Popen(
            ["bash"],
            cwd=clone,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.jobs: dict[
            str, str
        ] = {}  # numbers of the page, and what Slurm has given out

    def run(self, command: str, expected: list[str]) -> list[str]:
        """Return the lines that a command prints, as the page shows them."""
        for number, job in self.jobs.items():
            if f"slurm-{number}.out" in command and not command.startswith("until "):
                self.wait(job, OVER)
        command = rename(command, self.jobs)
        self.process.stdin.write(
            f"{{ {command}\n}} < /dev/null\necho; echo the-end-of-it\n"
        )
        self.process.stdin.flush()
        lines = []
        for line in self.process.stdout:
            if line == "the-end-of-it\n":
                break
            lines.append(
                line.rstrip().replace(str(self.clone), "/home/you/pytorch_on_slurm")
            )
        # The line end before the end, which is there for output without one.
        if lines and not lines[-1]:
            lines.pop()
        if (given := SUBMITTED.search("\n".join(lines))) and (
            told := SUBMITTED.search("\n".join(expected))
        ):
            self.jobs[told[1]] = given[1]
            self.wait(given[1], ("RUNNING", "PENDING BeginTime", *OVER))
        return [
            rename(line, {job: number for number, job in self.jobs.items()})
            for line in lines
        ]

    def wait(self, job: str, states: tuple[str, ...]) -> None:
        """Wait until a job is in one of these states, each perhaps with a reason."""
        command = [
            "squeue",
            "--noheader",
            "--states=all",
            f"--jobs={job}",
            "--format=%T %r",
        ]
        deadline = time.monotonic() + 600
        while not (
            state := subprocess.check_output(command, env=self.env, text=True)
        ).startswith(states):
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {job} is still {state}")
            time.sleep(0.2)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def rename(text: str, jobs: dict[str, str]) -> str:
    """Return text with other numbers for some jobs."""
    numbers = "|".join(jobs) or "none"
    return re.sub(
        rf"({JOB})({numbers})\b", lambda match: match[1] + jobs[match[2]], text
    )


def agree(expected: list[str], lines: list[str]) -> bool:
    """Say whether lines are those of the page, but for the time of the day."""
    return [TIME.sub("T", line) for line in expected] == [
        TIME.sub("T", line) for line in lines
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("word", nargs="?", default="", help="of a heading")
    args = parser.parse_args()
    page = PAGE.read_text()
    sessions = [
        item
        for item in read_sessions(page)
        if args.word.lower() in item.heading.lower()
    ]
    with tempfile.TemporaryDirectory(dir=slurm.PARENT) as folder:
        for limited in (False, True):
            chosen = [
                session
                for session in sessions
                if (session.heading in LIMITED) == limited
            ]
            if chosen:
                with start_cluster(limited) as cluster:
                    clone = make_clone(
                        ROOT, Path(folder) / str(limited), user_of(cluster)
                    )
                    for session in chosen:
                        page = page.replace(
                            session.text, rewrite(session, clone, user_of(cluster))
                        )
                        PAGE.write_text(page)


@contextlib.contextmanager
def start_cluster(
    limit_memory: bool, release: str = "installed"
) -> Iterator[slurm.Cluster]:
    read_end, write_end = os.pipe()
    how = {"limit_memory": True, "proctrack": "cgroup"} if limit_memory else {}
    cluster, supervisor = slurm.start(
        nodes=3, gpus=4, cpus=64, slurm=release, lifeline=read_end, **how
    )
    os.close(read_end)
    try:
        yield cluster
    finally:
        os.close(write_end)
        supervisor.wait()


def make_clone(source: Path, folder: Path, env: dict[str, str]) -> Path:
    """Return a clone with its environment: the nodes have no internet."""
    clone = folder / "pytorch_on_slurm"
    subprocess.run(["git", "clone", "--quiet", source, clone], check=True)
    subprocess.run(
        ["uv", "sync", "--quiet", "--locked"], cwd=clone, env=env, check=True
    )
    return clone


def rewrite(session: Session, clone: Path, env: dict[str, str]) -> str:
    """Return the text of a session with what its commands print now."""
    subprocess.run(["git", "clean", "-dxfq", "--exclude=.venv"], cwd=clone, check=True)
    shell = Shell(clone, env)
    text = ""
    try:
        for command, expected in session.commands:
            lines = shell.run(command, expected)
            fine = agree(expected, lines)
            verdict = "as before" if fine else "other lines"
            print(f"{session.heading}: {verdict}: {command}", flush=True)
            lines = [
                "$ " + command.replace("\n", "\n> "),
                *(expected if fine else lines),
            ]
            text += textwrap.indent("\n".join(lines) + "\n", "    ")
    finally:
        shell.close()
    return text


def user_of(cluster: slurm.Cluster) -> dict[str, str]:
    """Return a cluster user's variables, without those of whoever runs this."""
    outside = (
        "SLURM",
        "SBATCH",
        "SALLOC",
        "SRUN",
        "UV_",
        "VIRTUAL_ENV",
        "MASTER_",
        "PYTHON",
        "COLUMNS",
    )
    outside += ("CIFAR10", "IMAGENET", "SCRATCH", "GLOO", "NCCL", "TORCH", "OMP")
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(outside)
    } | cluster.env


if __name__ == "__main__":
    main()
