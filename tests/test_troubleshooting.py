"""What docs/troubleshooting.rst shows is what Slurm, PyTorch and the examples print."""

import re

import first_aid
import pytest

# A minute or more, or a cluster of its own; or what test_errors.py always asks for.
SLOW = ["The time limit", *first_aid.LIMITED]
SLOW += ["This is none of the tasks of the job", "A rank has no GPU to itself", "No internet on the nodes"]
SESSIONS = first_aid.read_sessions(first_aid.PAGE.read_text())


def case(session: first_aid.Session):
    marks = [pytest.mark.every_case] if session.heading in SLOW else []
    return pytest.param(session, id=session.heading, marks=marks)


@pytest.fixture(scope="module")
def home(jobs, tmp_path_factory):
    """A clone of someone who does all the page says."""
    env = first_aid.user_of(jobs.cluster)
    return first_aid.make_clone(jobs.clone, tmp_path_factory.mktemp("home"), env)


@pytest.mark.parametrize("session", [case(s) for s in SESSIONS if s.heading not in first_aid.LIMITED])
def test_session(jobs, nothing_left, home, session):
    assert first_aid.rewrite(session, home, first_aid.user_of(jobs.cluster)) == session.text


@pytest.mark.parametrize("session", [case(s) for s in SESSIONS if s.heading in first_aid.LIMITED])
def test_session_with_limited_memory(jobs, home, session):
    with first_aid.start_cluster(limit_memory=True) as cluster:
        assert first_aid.rewrite(session, home, first_aid.user_of(cluster)) == session.text


def test_every_command_is_in_a_session():
    commands = re.findall(r"^ +\$ (.*)", first_aid.PAGE.read_text(), re.MULTILINE)
    assert commands == [command.split("\n")[0] for session in SESSIONS for command, _ in session.commands]
