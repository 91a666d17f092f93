"""docs/explain.py finds First aid's answer to a log, a job's number, or a line."""

import ast
import itertools
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import explain
import first_aid
import pytest
from slurm_jobs import REPOSITORY
from update_readmes import LITERAL

SCRIPT = REPOSITORY / "docs" / "explain.py"
INDEX = (REPOSITORY / "docs" / "first_aid.rst").read_text()
ENTRIES = explain.read_entries()
PATTERNS = [each for entry in ENTRIES for each in explain.patterns_of(entry)]
MESSAGES = [(m, entry) for entry in ENTRIES for m in entry.messages]


def run(*args, text=None, **options) -> subprocess.CompletedProcess:
    """Run it as on a login node: another folder, and no packages."""
    command = [sys.executable, "-I", SCRIPT, *args]
    source = text.encode() if isinstance(text, str) else text
    options.setdefault("cwd", "/")
    return subprocess.run(command, input=source, capture_output=True, **options)


def first_entry(text: str):
    """Return the entry that comes first for some lines, as the command shows it."""
    found = explain.Findings(PATTERNS)
    for number, line in enumerate(text.splitlines(), 1):
        found.look_at(number, line)
    lines = sorted(found.lines.values(), key=lambda each: each[:2])
    return lines[0][3] if lines else None


def another(message: str) -> str:
    """Return a message as somebody else's log has it."""
    counter = itertools.count(41)
    other = {
        "any": lambda text: "this and that",
        "host": lambda text: f"gpu-b{next(counter)}.cluster",
        "path": lambda text: "/home/you/.venv/bin/python",
        "number": lambda text: str(next(counter)),
    }
    tokens = explain.tokens_of(message)
    return "".join(other.get(kind, str)(text) for kind, text in tokens)


def test_every_message_of_the_index_is_asked():
    listed = INDEX.split("\n.. begin messages")[1].split("\n.. end messages")[0]
    terms = re.findall(r"^\* (.*?): `", listed, re.M)
    assert {m for term in terms for m in LITERAL.findall(term)} == {
        message for message, _ in MESSAGES
    }
    assert len(MESSAGES) > 150


@pytest.mark.parametrize("message, entry", MESSAGES, ids=[m for m, _ in MESSAGES])
def test_another_log_has_the_message(message, entry):
    """With other numbers, nodes and paths, and the words around that programs print."""
    alone = another(message)
    assert first_entry(alone) == entry
    assert first_entry(f"  [rank3]: {alone}") == entry
    assert first_entry(f"slurmstepd-gpu17: error: {alone}, and so on") == entry


SESSIONS = [
    session
    for page in first_aid.PAGES
    for session in first_aid.read_sessions(page)
    if LITERAL.findall(session.heading)
]


@pytest.mark.parametrize("session", SESSIONS, ids=lambda session: session.heading)
def test_what_was_seen_is_explained(session):
    entry = first_entry("".join(printed for _, printed in session.commands))
    messages = LITERAL.findall(session.heading)
    names = {re.sub(r"^(\S+\.(py|sh): )?error: ", "", each) for each in messages}
    assert entry and names & set(entry.messages), entry


# Of public threads: a message of the entry that tells most, and a log that also has
# lines of other entries.
LOGS = [
    (
        "no whole CIFAR-10",
        "main.py: error: no whole CIFAR-10 in x (Temporary failure in name resolution)",
    ),
    (
        "Watchdog caught",
        "NCCL INFO Plugin: libnccl-net.so: cannot open shared object file",
        "[rank3]:[E1119] Watchdog caught collective operation timeout: ",
    ),
    (
        "EADDRINUSE",
        "[c10d] failed to bind (errno: 98 - Address already in use).",
        "ncclRemoteError: A call failed possibly due to a network error",
    ),
    (
        "execve(): torchrun",
        "slurmstepd: error: execve(): torchrun: No such file or directory",
        "srun: error: g1301: task 0: Exited with exit code 2",
    ),
    (
        "slurm_script: No such",
        "slurmstepd: error: execve(): /tmp/9/slurm_script: No such file or directory",
    ),
    (
        "command not found",
        "slurm_script: line 8: conda: command not found",
        "ModuleNotFoundError: No module named 'torch'",
    ),
    (
        "*** JOB 7 ON",
        "slurmstepd: error: *** JOB 8 ON n CANCELLED AT 2024-05-01T12:00:00 ***",
        "slurmstepd: error: *** STEP 8.0 ON n CANCELLED AT 2024-05-01T12:00:00 ***",
    ),
    (
        "DUE TO TIME LIMIT",
        "slurmstepd: error: *** JOB 8 ON n CANCELLED AT 2024 DUE TO TIME LIMIT ***",
        "srun: error: n: task 0: Terminated",
    ),
    (
        "Unable to confirm",
        "srun: error: Unable to confirm allocation for job 8: Invalid job id specified",
    ),
]


@pytest.mark.parametrize("log", LOGS, ids=[log[0] for log in LOGS])
def test_the_line_that_tells_most_comes_first(log):
    message, *lines = log
    entry = first_entry("\n".join(lines))
    assert entry and any(message in each for each in entry.messages), entry


LOG = """\
World size 8: 129 steps an epoch
[c10d] The hostname of the client socket cannot be retrieved. err=-3
[rank0]: RuntimeError: Connection closed by peer
srun: error: node4: task 0: Exited with exit code 1
\x1b[31mtorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\x1b[0m
OSError: [Errno 28] No space left on device: '/home/me/\u009b31m\u202egpj.\x1b]0;x\x07x'
"""


def test_the_cause_comes_first(tmp_path):
    """Not what other ranks said about it, and nothing harmless; three and no more."""
    log = tmp_path / "slurm-812_3.out"
    log.write_text(LOG)
    result = run(log, env={"LC_ALL": "C.UTF-8", "COLUMNS": "90"})
    assert result.returncode == 0, result
    output = result.stdout.decode()
    assert re.findall(r"^line (\d+): ", output, re.M) == ["5", "6", "3"]
    assert "[docs/first_aid/ranks.rst: CUDA out of memory]" in output
    # A page that another one links to, in a command's place, and the job's own number.
    assert "docs/resources.rst" in output and "`du -h --max-depth=1 . |" in output
    # What would act on a terminal, of the log alone: it has no such sequence of ours.
    assert all(c.isprintable() or c == "\n" for c in output)
    assert "\u202e" not in output and "`__" not in output and "``" not in output


def test_lines_from_a_pipe_where_no_letter_but_ascii_is_known():
    line = "(QOSMaxJobsPerUserLimit)\n"
    result = run(text=line, env={"LC_ALL": "C", "PYTHONUTF8": "0"})
    assert b"A limit of your QOS or account." in result.stdout, result
    assert result.returncode == 0 and not result.stderr, result


def test_nothing_known():
    lines = "all is well\n" * 9 + "Traceback:\nKeyError: 'loss'\nFatal: x\n"
    result = run(text=lines)
    output = result.stdout.decode()
    assert result.returncode == 1, result
    assert "line 11: KeyError: 'loss'\nline 12: Fatal: x\n" in output
    assert "the job script, the whole log" in " ".join(output.split())
    assert explain.ERROR == re.search(r'grep -nE "(.*?)" slurm-7.out', INDEX)[1]


def test_an_error_of_ours():
    """First aid has none that says what to do. No support knows these scripts."""
    error = "main.py: error: in place of 3, give --x 4\n"
    end = "srun: error: node1: task 0: Exited with exit code 1\n"
    end += "job.sh: error: status 1, no new checkpoint in /x: not started again\n"
    for log in (error, error + end):
        output = run(text=log).stdout.decode()
        assert f"line 1: {error}" in output
        assert "This line says what to do." in output and "support" not in output


def test_a_huge_log_in_bounded_memory(tmp_path):
    """400 MB of a progress bar in one line, and then what ended it."""
    log = tmp_path / "slurm-9.out"
    bar = b"".join(
        b"\r %5d/99999 [01:23<04:56, 31.2 images/s]" % n for n in range(25000)
    )
    with log.open("wb") as file:
        for _ in range(400):
            file.write(bar)
        file.write(
            b"x" * (3 << 20) + b"\r\nsrun: error: node3: task 5: Out Of Memory\n"
        )
    begin = time.monotonic()
    code = "import resource, runpy, sys; sys.argv = sys.argv[1:]\n"
    code += "resource.setrlimit(resource.RLIMIT_AS, (300 << 20,) * 2)\n"
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", code, SCRIPT, log]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result
    assert "line 2: srun: error: node3: task 5: Out Of Memory" in result.stdout
    assert time.monotonic() - begin < 200


def test_a_huge_log_of_errors(tmp_path):
    """Its beginning and its end are looked at."""
    log = tmp_path / "errors"
    log.write_bytes(b"error: once more\n" * 3_000_000 + b"x: oom-kill event\n")
    output = run(log).stdout.decode()
    assert "(its beginning and its end)" in output
    assert "line 3000001: x: oom-kill event\n" in output


def commands(folder: Path, **printed: str) -> dict[str, str]:
    """Return variables with which Slurm's commands print this, as it was seen."""
    for name, text in printed.items():
        (folder / name).write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "COLUMNS": "200"}


def test_the_number_of_a_job(tmp_path):
    """State, exit code and log are Slurm's: here, answers of 22.05 that were seen."""
    log = tmp_path / "some log.txt"
    log.write_text("srun: error: node1: task 0: Out Of Memory\n")
    shown = "JobId=12 JobName=x\n   JobState=FAILED Reason=NonZeroExitCode\n"
    shown += f"   ExitCode=137:0\n   StdOut={log}\n   WorkDir=/"
    result = run("12", env=commands(tmp_path, scontrol=shown))
    output = result.stdout.decode()
    assert "Job 12: FAILED, exit code 137:0\n    Killed with SIGKILL." in output, result
    assert "line 1: srun: error: node1: task 0: Out Of Memory" in output
    # Slurm has forgotten it; it has kept an account, and the log is where it began.
    (tmp_path / "slurm-13.out").write_text("RuntimeError: no kernel image\n")
    env = commands(tmp_path, scontrol="", sacct=f"CANCELLED by 0|0:0|{tmp_path}")
    output = run("13", env=env).stdout.decode()
    assert "Job 13: CANCELLED, exit code 0:0\n    `scancel`, by you" in output
    assert "line 1: RuntimeError: no kernel image" in output
    # It has not begun.
    shown = "JobId=14\n JobState=PENDING Reason=QOSGrpGRES\n ExitCode=0:0\n StdOut=/x\n"
    output = run("14", env=commands(tmp_path, scontrol=shown)).stdout.decode()
    assert "(QOSGrpGRES)\n    A limit of your QOS or account." in output
    # Nobody knows it.
    result = run("15", env=commands(tmp_path, scontrol="", sacct=""))
    assert result.returncode == 1 and b"Slurm does not know job 15" in result.stderr


@pytest.mark.parametrize(
    "state, code, words",
    [
        ("FAILED", "3:0", "The earliest error is the cause"),
        ("FAILED", "152:0", "A limit on CPU time"),
        ("TIMEOUT", "0:0", "It reached `--time`"),
        ("OUT_OF_MEMORY", "0:125", "Out of memory"),
    ],
)
def test_an_exit_code(state, code, words):
    row = explain.row_of(state, code)
    assert explain.plain(row, explain.FIRST_AID, None).startswith(words)


def test_a_log_that_is_not_there():
    result = run("/nowhere/slurm-7.out")
    message = b"explain.py: error: /nowhere/slurm-7.out: No such file or directory\n"
    assert (result.returncode, result.stderr) == (1, message)


def test_it_runs_with_an_old_python():
    """3.6 is that of RHEL 8. Here, its syntax, and what its library does not have."""
    text = SCRIPT.read_text()
    ast.parse(text, feature_version=(3, 6))
    later = ":=|removeprefix|removesuffix|capture_output|dataclass|isascii|text=|future"
    assert not re.search(later, text)
