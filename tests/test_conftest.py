"""What the tests take from a clone, and what they leave behind when they are killed."""

import os
import subprocess
import sys
import time
from pathlib import Path

from slurm_jobs import REPOSITORY, copy_tracked, tracked

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


# What the clone of a user may hold.
OF_A_USER = """
.env .envrc .venv2/bin/python .vscode/settings.json .idea/workspace.xml .main.py.swp
notes.txt docs/notes.rst mine/job.sh mine/main.py single_gpu/model-none.pt
single_gpu/model-8.pt single_gpu/slurm-8.out single_gpu/data/cifar-10-python.tar.gz
single_gpu/torch.py imagenet/runs/7/checkpoint.pt imagenet/checkpoints/8/best.pt
imagenet/wandb/run/log multi_node/cifar-10-python.tar.gz multi_node/core.1
tests/data/batch tests/test_of_mine.py
""".split()


def test_what_a_user_has_in_a_clone(tmp_path):
    """The tests copy what git tracks, and nothing else of a clone that is in use."""
    source = copy_tracked(REPOSITORY, tmp_path / "a clone")
    git = "git -c user.name=tests -c user.email=tests"
    for command in ("init -q", "add --all", "commit -qm Now"):
        subprocess.run(f"{git} {command}".split(), cwd=source, check=True)
    for name in OF_A_USER:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("mine")
    (source / "README.rst").write_text("edited")
    copy = copy_tracked(source, tmp_path / "copy")
    arrived = {path.relative_to(copy) for path in copy.rglob("*") if path.is_file()}
    assert arrived == set(tracked(REPOSITORY))
    assert (copy / "README.rst").read_text() == "edited"


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
