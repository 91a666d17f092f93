"""What a run of the tests leaves behind when it is killed: nothing."""

import os
import subprocess
import sys
import time
from pathlib import Path

from slurm_jobs import REPOSITORY

TEST = """\
import subprocess


def test_that_does_not_end(cluster, tmp_path):
    subprocess.run(["mount", "-t", "tmpfs", "none", tmp_path], check=True)
    sleep = ["sleep", "SECONDS"]
    subprocess.Popen(sleep, start_new_session=True)
    subprocess.Popen([*cluster.namespaces("node1"), *sleep])
    print(f"\\n{cluster.state} {tmp_path}", flush=True)
    subprocess.run(sleep)
"""


def what_names(*texts: str) -> list[str]:
    """Return the processes and the mounts that name one of these."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found.append((process / "cmdline").read_text().replace("\0", " "))
            found += (process / "mounts").read_text().splitlines()
        except OSError:
            pass  # it has ended
    return [line for line in found if any(text in line for text in texts)]


def test_run_that_is_killed(cluster, tmp_path):
    """Not even SIGKILL leaves a process, a mount or a cluster to the next run."""
    test = tmp_path / "test_it.py"
    seconds = f"{time.time_ns()}"
    test.write_text(TEST.replace("SECONDS", seconds))
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "--capture=no", test]
    environment = os.environ | {"PYTHONPATH": f"{REPOSITORY / 'tests'}"}
    with subprocess.Popen(
        command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as run:
        said = []
        while not said or not said[-1].startswith("/var/tmp/"):
            said.append(run.stdout.readline())
            assert said[-1], "".join(said)
        traces = [*said[-1].split(" ", 1), f"sleep {seconds}"]
        assert len(what_names(*traces)) > 6
        run.kill()
        run.wait()
        deadline = time.monotonic() + 20
        while left := what_names(*traces):
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
