"""First aid has the messages that Slurm, PyTorch and the examples really print."""

import re

import cluster as slurm
import first_aid
import pytest
from slurm_jobs import REPOSITORY, listings
from update_readmes import ENTRY, LITERAL

# Sections of the pages that show lines of their sessions.
SHOWN = ["The earliest error is the cause", "A node that fails a job again and again"]
# A minute or more, or a cluster of its own.
SLOW = ["``DUE TO TIME LIMIT``", *first_aid.LIMITED]
# The pages are about Slurm 22.05; from these releases on, Slurm does another thing.
NOT_FROM = {
    "``ExitCode=0:53``": ((23, 2), "makes the folder of --output"),
    "CPUs and steps": ((23, 11), "hands the job's --cpus-per-task on to srun"),
    first_aid.LIMITED[0]: ((23, 2), "says it in other words"),
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
    "152:0": PYTHON.format("os.kill(os.getpid(), 24)"),
    "0:9": "kill -9 $$",
    "0:15": "scancel $SLURM_JOB_ID; exec sleep 60",
}
SESSIONS = [
    session for page in first_aid.PAGES for session in first_aid.read_sessions(page)
]
DOCS = REPOSITORY / "docs"
TABLE = (DOCS / "first_aid.rst").read_text()
PAGES = [
    TABLE,
    *(path.read_text() for path in sorted((DOCS / "first_aid").glob("*.rst"))),
    (DOCS / "imagenet" / "exceptions.rst").read_text(),
    (DOCS / "after_a_job.rst").read_text(),
]
# Every state of a job, with the exit code of scontrol, and sacct's if it differs.
ROWS = re.findall(r"^([A-Z_]+) +``([\d:]+)``(?: \(``([\d:]+)``\))? ", TABLE, re.M)


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
    """A clone of someone who does all that the pages say."""
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
    text = "".join(page.read_text() for page in first_aid.PAGES)
    assert re.findall(r"^ +\$ (.*)", text, re.MULTILINE) == [
        command.split("\n")[0]
        for session in SESSIONS
        for command, _ in session.commands
    ]


def messages() -> list[str]:
    """Return the messages of the pages' entries, which are in the index, too."""
    terms = [term for page in PAGES for term, _ in ENTRY.findall(page)]
    return [message for term in terms for message in LITERAL.findall(term)]


@pytest.mark.parametrize("session", SESSIONS, ids=lambda session: session.heading)
def test_the_pages_say_what_was_seen(session):
    """An entry has the message that its session prints; a section, what it shows."""
    if message := LITERAL.findall(session.heading):
        output = "".join(printed for _, printed in session.commands)
        for each in message:
            assert each in messages()
            assert re.search(".*".join(map(re.escape, each.split("…"))), output), each
        return
    (page,) = [page for page in PAGES if f"\n{session.heading}\n" in page]
    if session.heading in SHOWN:
        shown = listings(page, session.heading)[0]
        assert not [line for line in shown.splitlines() if line not in session.text]


def test_other_messages(jobs, nothing_left):
    """Some that need no session, no odd disk and no GPU."""
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
        assert words in output and words in messages(), output
