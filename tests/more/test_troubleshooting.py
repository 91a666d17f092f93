"""What docs/troubleshooting.rst shows is what Slurm, PyTorch and the examples print."""

import re

import cluster as slurm
import first_aid
import pytest

# A minute or more, or a cluster of its own.
SLOW = ["The time limit", *first_aid.LIMITED]
# The page is about Slurm 22.05; from these releases on, what it shows is another thing.
NOT_FROM = {
    "There is no log": ((23, 2), "makes the folder of --output"),
    "One CPU for a task": ((23, 11), "hands the job's --cpus-per-task on to srun"),
    "Out of memory, says Slurm": ((23, 2), "says it in other words"),
}
# Commands that end a job as the rows of the first table say, by their exit code.
PYTHON = "srun --kill-on-bad-exit=1 python3 -c 'import os, time; {}'"
VICTIM = 'time.sleep(60 * (os.environ["SLURM_PROCID"] == "0")); 1 / 0'
ENDS = {
    "1:0": PYTHON.format("1 / 0"),
    "2:0": "srun --kill-on-bad-exit=1 nowhere/python main.py",
    "127:0": "no_such_program",
    "134:0": PYTHON.format("os.abort()"),
    "135:0": PYTHON.format("os.kill(os.getpid(), 7)"),
    "137:0": PYTHON.format("os.kill(os.getpid(), 9)"),
    "139:0": PYTHON.format("os.kill(os.getpid(), 11)"),
    "143:0": PYTHON.format(VICTIM),
    "0:9": "kill -9 $$",
    "0:15": "scancel $SLURM_JOB_ID; sleep 60",
}
SESSIONS = first_aid.read_sessions(first_aid.PAGE.read_text())


def sessions(limited: bool) -> list:
    return [
        pytest.param(
            session,
            id=session.heading,
            marks=[pytest.mark.every_case] if session.heading in SLOW else [],
        )
        for session in SESSIONS
        if (session.heading in first_aid.LIMITED) == limited
    ]


@pytest.fixture(scope="module")
def home(jobs, tmp_path_factory):
    """A clone of someone who does all the page says."""
    env = first_aid.user_of(jobs.cluster)
    return first_aid.make_clone(jobs.clone, tmp_path_factory.mktemp("home"), env)


@pytest.fixture
def page_holds(jobs, session):
    version, does = NOT_FROM.get(session.heading, ((99, 0), ""))
    if jobs.slurm_version() >= version:
        pytest.skip(f"this Slurm {does}")


@pytest.mark.parametrize("session", sessions(limited=False))
def test_session(jobs, page_holds, nothing_left, home, session):
    env = first_aid.user_of(jobs.cluster)
    assert first_aid.rewrite(session, home, env) == session.text


@pytest.mark.parametrize("session", sessions(limited=True))
def test_session_with_limited_memory(jobs, page_holds, home, session, pytestconfig):
    if not slurm.MEMORY.exists():
        pytest.skip(
            "the test cluster limits memory by control groups of version 1, "
            "which are not here"
        )
    release = pytestconfig.getoption("slurm") or "installed"
    with first_aid.start_cluster(slurm=release, **first_aid.LIMITS) as cluster:
        env = first_aid.user_of(cluster)
        assert first_aid.rewrite(session, home, env) == session.text


def test_every_command_is_in_a_session():
    commands = re.findall(r"^ +\$ (.*)", first_aid.PAGE.read_text(), re.MULTILINE)
    assert commands == [
        command.split("\n")[0]
        for session in SESSIONS
        for command, _ in session.commands
    ]


def test_how_the_job_ended(jobs, nothing_left):
    """Slurm gives a job the state and the exit code of the first table."""
    row = r"^   \* - ([A-Z_]+)\n     - ``([\d:]+)``$"
    states = dict(
        (code, state)
        for state, code in re.findall(row, first_aid.PAGE.read_text(), re.MULTILINE)
    )
    # Of a job without an error, and in sessions of their own.
    assert states.keys() - ENDS.keys() == {"0:0", "0:53", "0:125"}
    submitted = {
        code: jobs.submit(
            "",
            f"--ntasks={1 + (code == '143:0')}",
            "--no-requeue",
            f"--wrap={command}",
        )
        for code, command in ENDS.items()
    }
    for code, job in submitted.items():
        result = jobs.wait(job)
        assert (result.state, jobs.show(job)["ExitCode"]) == (states[code], code)


def test_other_messages(jobs, nothing_left):
    """The last section's, as far as they need no odd disk and no GPU."""
    page = first_aid.PAGE.read_text().split("Other messages\n===")[1]
    job = jobs.submit("", "--no-requeue", "--time=1:00", "--wrap=hostname; sleep 60")
    jobs.until(job, "node")
    limit = jobs.run(["squeue", "--noheader", f"--jobs={job}", "--format=%l"])
    assert limit.output == "1:00\n"
    python = ["uv", "run", "--no-sync", "python", "main.py", "--nodes=3"]
    shown = [
        jobs.run(["scontrol", "requeue", job]).output,
        jobs.run(python, "single_gpu").output,
    ]
    jobs.cancel(job)
    for output, words in zip(
        shown,
        (
            "Requested operation is presently disabled",
            "unrecognized arguments: --nodes=3",
        ),
        strict=True,
    ):
        assert words in output and f"``{words}``" in page, output
