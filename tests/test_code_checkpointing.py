"""safe_sbatch and code_checkpointing.sh: a job runs the commit it was submitted at.

job.sh is imagenet's own, and main.py a program that tells where it is.
"""

import functools
import http.server
import json
import re
import shlex
import shutil
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from slurm_jobs import REPOSITORY, Jobs, Result

# A program that tells what it is and where, and can wait for a file.
MAIN = """\
import json
import os
import sys
import time

names = ("SLURMD_NODENAME", "GIT_COMMIT", "LOCAL_JOB_DIR", "MASTER_PORT")
found = {name: os.environ.get(name) for name in names}
found |= {"folder": os.getcwd(), "version": "first"}
found["environment"] = os.path.realpath(sys.prefix)
print("RAN " + json.dumps(found | {"arguments": sys.argv[1:]}), flush=True)
while sys.argv[1:2] == ["--wait-for"] and not os.path.exists(sys.argv[2]):
    time.sleep(0.1)
"""
PROJECT = """\
[project]
name = "trivial"
version = "0"
requires-python = ">=3.11"
"""
NODES = ["node1", "node2"]
# What a cluster's SLURM_TMPDIR may be.
LOCAL = "/tmp/local disk"
FLAGS = ["--nodelist=node1,node2", "--ntasks-per-node=2", "--gpus-per-node=0"]
FLAGS += ["--cpus-per-task=1", "--mem=1G"]
ONE_TASK = [*FLAGS, "--nodes=1", "--nodelist=node1", "--ntasks-per-node=1"]


WITHOUT = "safe_sbatch: error: the job would run without these: commit them "
WITHOUT += "(secrets: .gitignore), submodules as files"


class Repository(Jobs):
    """A git repository laid out as this one; its user is in `imagenet`."""

    def __init__(self, jobs: Jobs, path: Path):
        super().__init__(jobs.cluster, path / "imagenet", path, jobs.logs)
        self.env = jobs.env | {"SLURM_TMPDIR": LOCAL, "IMAGENET_DIR": ""}
        self.root, self.folder = path, self.clone
        self.folder.mkdir(parents=True)
        for name in ("safe_sbatch", "code_checkpointing.sh", "job.sh"):
            shutil.copy(REPOSITORY / "imagenet" / name, self.folder)
        self.write("main.py", MAIN)
        self.write("../pyproject.toml", PROJECT)
        ours = (REPOSITORY / ".gitignore").read_text()
        self.write("../.gitignore", f"{ours}*.ignored\n")
        # git archive would leave it out.
        self.write("../.gitattributes", "main.py export-ignore\n")
        self.must("git", "init", "--quiet", self.root)

    def must(self, *command, **env) -> str:
        result = self.run(command, **env)
        assert result.exit_code == 0, result
        return result.output.strip()

    def write(self, name: str, content: str) -> None:
        (self.folder / name).write_text(content)

    def commit(self, *options: str) -> str:
        self.must("git", "add", "--all", self.root)
        git = "git -c user.name=tests -c user.email=tests commit --quiet --message"
        self.must(*git.split(), "A commit", *options)
        self.head = self.must("git", "rev-parse", "HEAD")
        return self.head

    def environment(self, commit: str) -> str:
        """Return the folder of the environment for a commit's uv.lock."""
        lock = self.must("git", "rev-parse", f"{commit}:uv.lock")
        return f"{self.root}/.venvs/{lock}"

    def safe_sbatch(self, *arguments, **env: str) -> str:
        command = ["./safe_sbatch", f"--output={self.logs}/%j.out", *arguments]
        output = self.must(*command, **env)
        (job,) = re.findall(r"^Submitted batch job (\d+)$", output, re.MULTILINE)
        return job

    def refused(self, **env: str) -> str:
        result = self.run(["./safe_sbatch", *FLAGS, "job.sh"], **env)
        assert result.exit_code == 1, result
        return result.output


def tasks(output: str) -> list[dict]:
    """Return what the tasks of a job have printed of themselves."""
    return [json.loads(line) for line in re.findall("^RAN (.*)$", output, re.MULTILINE)]


def copy(job: str) -> str:
    """Return a pattern of the folder on a node's disk that a job runs in."""
    return rf"{LOCAL}/slurm-job-{job}-cluster\.\w{{8}}/code"


def check(repository: Repository, result: Result, commit: str, count: int) -> None:
    """Assert that so many tasks of a job have run a commit, from the local disks."""
    assert (result.exit_code, result.state) == (0, "COMPLETED"), result
    found = tasks(result.output)
    assert [task["version"] for task in found] == count * ["first"], result
    for task in found:
        assert task["GIT_COMMIT"] == commit, result
        # Of this job alone, also where jobs share SLURM_TMPDIR.
        assert re.fullmatch(f"{copy(result.job)}/imagenet", task["folder"]), result
        assert task["environment"] == repository.environment(commit), result


def errors(result: Result) -> list[str]:
    """Return why a job has failed, in its words, without the last line's."""
    assert (result.exit_code, result.state) == (1, "FAILED"), result
    assert tasks(result.output) == [], result
    *found, last = result.find(r"^job\.sh: error: (.*)$")
    assert last.endswith(": not started again"), result
    return found


@pytest.fixture
def repository(jobs, nothing_left, tmp_path):
    """A repository with an environment without packages."""
    repository = Repository(jobs, tmp_path / "a repository")
    repository.env["UV_CACHE_DIR"] = str(tmp_path / "cache")
    repository.must("uv", "lock", "--offline")
    repository.commit()
    for node in NODES:
        repository.on(node, "mkdir", LOCAL)
    yield repository
    for node in NODES:
        repository.on(node, "rm", "-rf", LOCAL)


def test_refuses_what_is_not_committed(repository):
    """It shows what is modified, staged, missing or new, wherever it is."""
    repository.write("job.sh", "")
    repository.must("git", "add", "job.sh")
    repository.write("main.py", "")
    (repository.folder / "code_checkpointing.sh").unlink()
    for name in ("new.py", "../new.py", "notes.ignored"):
        repository.write(name, "")
    repository.must("git", "config", "status.showUntrackedFiles", "no")
    for setting in ("status.branch true", "color.ui always"):
        repository.must("git", "config", *setting.split())
    error, *status = repository.refused().splitlines()
    here = "imagenet"
    changed = [f" D {here}/code_checkpointing.sh", f"M  {here}/job.sh"]
    assert status == [*changed, f" M {here}/main.py", f"?? {here}/new.py", "?? new.py"]
    assert error == WITHOUT
    repository.must("git", "reset", "--quiet", "--hard")
    repository.must("git", "clean", "--quiet", "-d", "--force", repository.root)
    command = ["imagenet/safe_sbatch", "imagenet/job.sh"]
    result = repository.run(command, "..")
    folder = repository.folder.parent
    error = f"safe_sbatch: error: no {folder}/main.py\n"
    assert (result.exit_code, result.output) == (1, error)
    repository.must("./safe_sbatch", "--test-only", *FLAGS, "job.sh")


def test_refuses_where_there_is_no_commit(repository):
    shutil.rmtree(repository.root / ".git")
    result = repository.run(["./safe_sbatch", *FLAGS, "job.sh"])
    assert result.exit_code and result.output.startswith("fatal: not a git repository")
    repository.must("git", "init", "--quiet", repository.root)
    error = f"safe_sbatch: error: {repository.root} has no commit yet\n"
    assert repository.refused() == error


def test_everything_reaches_the_job(repository):
    """The commit, all arguments as they are, and a copy on each node's own disk."""
    commit = repository.head
    arguments = ["two words", "", "'single' \"double\"", "$HOME *", "--export=NONE"]
    arguments += ["a\nb"]
    env = {
        "UV_PROJECT_ENVIRONMENT": str(repository.root / ".venv"),
        "VIRTUAL_ENV": "/elsewhere",
        "GIT_DIR": "/elsewhere/.git",
        "GIT_WORK_TREE": "/elsewhere",
    }
    # Slurm then drops the other variables, but not the commit.
    flags = [*FLAGS, f"--export=PATH,HOME,UV_CACHE_DIR,{','.join(env)}"]
    flags += ["--parsable", f"--output={repository.logs}/%j.out"]
    only_its_number = ["sh", "-c", './safe_sbatch "$@" 2> /dev/null', "sh"]
    job = repository.must(*only_its_number, *flags, "job.sh", *arguments, **env)
    result = repository.wait(job)
    check(repository, result, commit, 4)
    found = tasks(result.output)
    assert all(task["arguments"] == arguments for task in found), result
    assert {task["SLURMD_NODENAME"] for task in found} == {*NODES}, result
    copied = result.find(r" on the disk of (\w+), after \d+ s$")
    assert sorted(copied) == NODES, result
    assert "warning" not in result.output, result
    assert not (repository.root / ".venv").exists()


def test_sbatch_alone_runs_in_place(repository):
    """As anywhere, so in a job of safe_sbatch, with a folder and port of its own."""
    sbatch = ["sbatch", "--parsable", f"--output={repository.logs}/%j.out", *ONE_TASK]
    then = f'source ./job.sh\ncd "$JOB_WORK_DIR"\n{shlex.join([*sbatch, "job.sh"])}\n'
    repository.write("first.sh", f"#!/bin/bash\n{then}")
    commit = repository.commit()
    repository.must("uv", "sync", "--offline")
    first = repository.wait(repository.safe_sbatch(*ONE_TASK, "first.sh"))
    check(repository, first, commit, 1)
    second = repository.wait(first.find(r"^\d+$")[-1])
    (task,) = tasks(second.output)
    assert second.state == "COMPLETED", second
    assert re.fullmatch(copy(second.job), task["LOCAL_JOB_DIR"] + "/code"), second
    assert task["MASTER_PORT"] == str(10000 + int(second.job) % 20000), second
    assert task["folder"] == str(repository.folder), second
    assert task["environment"] == str(repository.root / ".venv"), second


def test_changes_after_submission_change_nothing(repository):
    """Neither edits nor commits do, before it starts or before it starts again."""
    commit = repository.head
    event = repository.root.parent / "an event"
    job = repository.safe_sbatch("--hold", *FLAGS, "job.sh", "--wait-for", event)
    repository.write("main.py", MAIN.replace("first", "second"))
    repository.write("code_checkpointing.sh", "exit 9\n")
    # Another environment, too.
    repository.write("../pyproject.toml", PROJECT.replace("trivial", "other"))
    repository.must("uv", "lock", "--offline")
    later = repository.commit()
    repository.must("./safe_sbatch", "--test-only", *FLAGS, "job.sh")
    assert repository.environment(later) != repository.environment(commit)
    repository.write("main.py", MAIN.replace("first", "third"))
    repository.must("scontrol", "release", job)
    repository.until(job, "(?s)(^RAN .*?){4}")
    repository.commit("--amend")
    repository.must("scontrol", "requeue", job)
    repository.until(job, "(?s)(^RAN .*?){8}")
    event.touch()
    result = repository.wait(job)
    assert result.restarts == 1
    check(repository, result, commit, 8)


def test_missing_commit(repository):
    commit = "0123456789abcdef0123456789abcdef01234567"
    job = repository.submit("", *FLAGS, "job.sh", SLURM_GIT_COMMIT=commit)
    result = repository.wait(job)
    assert errors(result) == [f"no commit {commit} in {repository.folder}"], result
    assert "\nfatal: " in result.output, result  # what git says


def run_with_disk(repository: Repository, options: str) -> Result:
    """Run a job, with another disk of node2's own for the copies of the code."""
    mount = ["mount", "-t", "tmpfs", "-o", options, "x", LOCAL]
    assert repository.on("node2", *mount).exit_code == 0
    try:
        return repository.wait(repository.safe_sbatch(*FLAGS, "job.sh"))
    finally:
        assert repository.on("node2", "umount", LOCAL).exit_code == 0


def test_no_space_on_one_node(repository):
    result = run_with_disk(repository, "size=4k")
    where = rf"from {re.escape(str(repository.root))} to {copy(result.job)} on node2"
    (error,) = errors(result)
    pattern = f"cannot copy commit {repository.head} {where}"
    assert re.fullmatch(pattern, error), result


@pytest.fixture
def index(tmp_path):
    """A package index that the nodes cannot reach; it has a package called answer."""
    folder = tmp_path / "index" / "answer"
    folder.mkdir(parents=True)
    info = "answer-1.dist-info"
    files = {
        "answer.py": "",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: answer\nVersion: 1\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n",
        f"{info}/RECORD": "answer.py,,\n",
    }
    with zipfile.ZipFile(folder / "answer-1-py3-none-any.whl", "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)
    handler = functools.partial(
        http.server.SimpleHTTPRequestHandler, directory=folder.parent
    )
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_nodes_without_internet(repository, index, tmp_path):
    """safe_sbatch fetches what nodes cannot, even if the environment lacks nothing.

    What is there is not asked for again, as at a mirror that is gone. Jobs that are
    submitted at once share an environment. A safe_sbatch that was killed harms none.
    """
    source = f'[[tool.uv.index]]\nurl = "{index}"\ndefault = true\n'
    project = f'{PROJECT}dependencies = ["answer"]\n{source}'
    repository.write("../pyproject.toml", project)
    repository.must("uv", "sync")
    repository.write("main.py", f"import answer\n{MAIN}")
    commit = repository.commit()
    repository.env["UV_CACHE_DIR"] = str(tmp_path / "another cache")

    result = repository.run(["./safe_sbatch", *FLAGS, "job.sh"], UV_OFFLINE="1")
    assert result.exit_code != 0 and "answer" in result.output, result
    killed = ["timeout", "--signal=KILL", "0.2", "./safe_sbatch", "--test-only"]
    repository.run([*killed, *FLAGS, "job.sh"])
    mirror = {"UV_DEFAULT_INDEX": "http://mirror.invalid/simple/"}
    with ThreadPoolExecutor() as pool:
        submit = functools.partial(repository.safe_sbatch, *FLAGS, "job.sh", **mirror)
        jobs = [pool.submit(submit) for _ in range(2)]
        for job in jobs:
            check(repository, repository.wait(job.result()), commit, 4)
    # Where it is gone, one line says so, and no rank makes an empty one.
    job = repository.safe_sbatch("--hold", *FLAGS, "job.sh")
    shutil.rmtree(repository.environment(commit))
    repository.must("scontrol", "release", job)
    (error,) = errors(repository.wait(job))
    assert re.fullmatch(r"node\d has no ../.venv/bin/python: uv sync --locked", error)
    assert not Path(repository.environment(commit)).exists()


def test_disk_that_runs_no_programs(repository):
    """The copy of the code may lie on a disk that is mounted noexec."""
    result = run_with_disk(repository, "noexec")
    check(repository, result, repository.head, 4)
