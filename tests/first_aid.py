"""Run the sessions behind First aid; write what their commands print into them.

    uv run python tests/first_aid.py            all of them, as root
    uv run python tests/first_aid.py preempt    those under headings with this word

They stand in tests/first_aid.rst, and some in docs/after_a_job.rst.

A literal block whose lines begin with `$ ` is a session in a shell that starts in the
clone's root: commands (`> ` goes on with one), and under each what it prints. After
sbatch, the job is waited for until it runs, and before a command that names its log
(but `until …`) until it is over. Job 7 of a page is whatever number Slurm gives out,
and times are others. Lines that are still right stay.
"""

import argparse
import contextlib
import itertools
import os
import re
import subprocess
import tempfile
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path

import cluster as slurm

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "tests" / "first_aid.rst", ROOT / "docs" / "after_a_job.rst"]
BLOCK = re.compile(r"::\n\n((?:    .*\n|\n)+)")
COMMAND = re.compile(r"^\$ (.*(?:\n> .*)*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
HEADING = re.compile(r"^(\S.*)\n([=-])\2+$", re.MULTILINE)
SUBMITTED = re.compile(r"Submitted batch job (\d+)")
# What stands before the number of a job.
JOB = (
    r"(?:\bjob |JobId=|--jobs=|StepId=|STEP |JOB |slurm-|slurm-job-|"
    r"logs/|checkpoints/|scancel |requeuehold |release |^)"
)
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")
END = "the-end-of-it\n"
# Sessions under these headings want a cluster that limits memory.
LIMITED = [
    "``Out Of Memory``, ``oom-kill``",
    "``no new checkpoint in …: not started again``",
]
LIMITS = {"limit_memory": True, "proctrack": "cgroup"}
OVER = tuple(
    "COMPLETED FAILED CANCELLED TIMEOUT PREEMPTED NODE_FAIL OUT_OF_MEMORY".split()
)

# Of a job that does not run before its session goes on.
NOT_YET = ("PENDING BeginTime", "PENDING JobHeldUser", "PENDING JobArrayTaskLimit")


@dataclass
class Session:
    """A literal block of a page: commands, each with what it prints."""

    heading: str
    page: Path
    text: str  # as it stands in the page
    commands: list[tuple[str, str]]


def read_sessions(path: Path) -> list[Session]:
    page, sessions = path.read_text(), []
    for block in BLOCK.finditer(page):
        text = block[1].rstrip("\n") + "\n"
        if text.startswith("    $ "):
            heading = HEADING.findall(page[: block.start()])[-1][0]
            commands = COMMAND.findall(textwrap.dedent(text))
            sessions.append(Session(heading, path, text, commands))
    return sessions


@dataclass
class Shell:
    """A shell that starts in the clone, whose user has the cluster's commands."""

    clone: Path
    env: dict[str, str]
    # Numbers of the page, and what Slurm has given out.
    jobs: dict[str, str] = field(default_factory=dict)

    def __post_init__(self):
        self.process = subprocess.Popen(
            ["bash"],
            cwd=self.clone,
            env=self.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, command: str, expected: str) -> str:
        """Return what a command prints, as the page shows it."""
        for number, job in self.jobs.items():
            if f"slurm-{number}.out" in command and not command.startswith("until "):
                self.wait(job, OVER)
        command = rename(command.replace("\n> ", "\n"), self.jobs)
        # A line end more, for output that has none.
        print(
            f"{{ {command}\n}} < /dev/null\necho; echo {END}",
            file=self.process.stdin,
            flush=True,
        )
        lines = itertools.takewhile(lambda line: line != END, self.process.stdout)
        output = "".join(line.rstrip() + "\n" for line in lines)
        output = re.sub(r"(^|\n)\n$", r"\1", output)
        output = output.replace(str(self.clone), "/home/you/pytorch_on_slurm")
        given, told = SUBMITTED.search(output), SUBMITTED.search(expected)
        if given and told:
            self.jobs[told[1]] = given[1]
            self.wait(given[1], ("RUNNING", *NOT_YET, *OVER))
        return rename(output, {job: number for number, job in self.jobs.items()})

    def wait(self, job: str, states: tuple[str, ...]) -> None:
        """Wait until a job is in one of these states, each perhaps with a reason."""
        command = f"squeue --noheader --states=all --jobs={job} --format='%T %r'"
        deadline = time.monotonic() + 600
        while not (
            state := subprocess.check_output(
                command, shell=True, env=self.env, text=True
            )
        ).startswith(states):
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {job} is still {state}")
            time.sleep(0.2)


def rename(text: str, jobs: dict[str, str]) -> str:
    """Return text with other numbers for some jobs."""
    return re.sub(
        rf"({JOB})({'|'.join(jobs) or 'none'})(?!\d)",
        lambda match: match[1] + jobs[match[2]],
        text,
        flags=re.MULTILINE,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("word", nargs="?", default="", help="of a heading")
    args = parser.parse_args()
    sessions = [session for page in PAGES for session in read_sessions(page)]
    with tempfile.TemporaryDirectory(dir=slurm.PARENT) as folder:
        for how in ({}, LIMITS):
            chosen = [
                session
                for session in sessions
                if args.word.lower() in session.heading.lower()
                and (session.heading in LIMITED) == bool(how)
            ]
            if not chosen:
                continue
            with start_cluster(**how) as cluster:
                env = user_of(cluster)
                clone = make_clone(ROOT, Path(folder, cluster.state.name), env)
                for session in chosen:
                    page = session.page.read_text()
                    new = rewrite(session, clone, env)
                    session.page.write_text(page.replace(session.text, new))


@contextlib.contextmanager
def start_cluster(nodes: int = 3, gpus: int = 4, **how):
    """Start a cluster that ends with this process, however that ends."""
    read_end, write_end = os.pipe()
    writer = os.fdopen(write_end, "wb")
    # What this process forks does not keep the cluster alive.
    os.register_at_fork(after_in_child=writer.close)
    cluster, supervisor = slurm.start(
        nodes=nodes, gpus=gpus, cpus=64, lifeline=read_end, **how
    )
    os.close(read_end)
    try:
        yield cluster
    finally:
        writer.close()
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
    with shell.process:
        for command, expected in session.commands:
            output = shell.run(command, expected)
            # But for the time of the day.
            same = TIME.sub("T", output) == TIME.sub("T", expected)
            verdict = "as before" if same else "other lines"
            print(f"{session.heading}: {verdict}: {command}", flush=True)
            text += f"$ {command}\n{expected if same else output}"
    return textwrap.indent(text, "    ")


def user_of(cluster: slurm.Cluster) -> dict[str, str]:
    """Return a cluster user's variables, without those of whoever runs this.

    Those of an environment that is active here would lead uv away from the clone's own.
    """
    outside = "SLURM SBATCH SALLOC SRUN UV_ VIRTUAL_ENV MASTER_ PYTHON COLUMNS "
    outside += "CIFAR10 IMAGENET SCRATCH GLOO NCCL TORCH OMP"
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(tuple(outside.split()))
    } | cluster.env


if __name__ == "__main__":
    main()
