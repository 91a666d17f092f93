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
import time
import zipfile
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from slurm_jobs import REPOSITORY, Jobs, Result

# A program that tells what it is and where, and can wait for a file.
MAIN = """\
import json
import os
import sys
import time

names = ("SLURMD_NODENAME", "SLURM_PROCID", "GIT_COMMIT")
variables = [os.environ.get(name) for name in names]
found = [*variables, os.getcwd(), sys.prefix, "first", sys.argv[1:]]
print("RAN " + json.dumps(found), flush=True)
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
# What a cluster's SLURM_TMPDIR may be: job.sh does not remove it.
LOCAL = "/tmp/local disk"
FLAGS = [
    "--nodelist=node1,node2",
    "--ntasks-per-node=2",
    "--gpus-per-node=0",
    "--cpus-per-task=1",
    "--mem=1G",
]
ONE_TASK = [*FLAGS, "--nodes=1", "--nodelist=node1", "--ntasks-per-node=1"]


class Task(NamedTuple):
    """What one task of a job has printed of itself."""

    node: str
    rank: str
    commit: str
    folder: str
    environment: str
    version: str
    arguments: list[str]


class Repository(Jobs):
    """A git repository laid out as this one; its user is in `examples/imagenet`."""

    def __init__(self, jobs: Jobs, path: Path, files: dict[str, str]):
        super().__init__(jobs.cluster, path / "examples" / "imagenet", path, jobs.logs)
        self.env = jobs.env | {"SLURM_TMPDIR": LOCAL, "IMAGENET_DIR": ""}
        self.root, self.folder = path, self.clone
        self.folder.mkdir(parents=True)
        for name in ("safe_sbatch", "code_checkpointing.sh", "job.sh"):
            shutil.copy(REPOSITORY / "imagenet" / name, self.folder)
        self.write("../../.gitignore", ".venv/\n__pycache__/\n*.ignored\n")
        for name, content in files.items():
            self.write(name, content)
        self.must("git", "init", "--quiet", self.root)
        self.must("git", "config", "user.name", "A user")
        self.must("git", "config", "user.email", "user@localhost")

    def must(self, *command, **env) -> str:
        result = self.run(command, **env)
        assert result.exit_code == 0, result
        return result.output.strip()

    def write(self, name: str, content: str) -> None:
        (self.folder / name).write_text(content)

    def replace(self, name: str, old: str, new: str) -> None:
        content = (self.folder / name).read_text()
        assert old in content
        self.write(name, content.replace(old, new))

    def commit(self) -> str:
        self.must("git", "add", "--all", self.root)
        self.must("git", "commit", "--quiet", "--allow-empty", "--message", "A commit")
        return self.must("git", "rev-parse", "HEAD")

    def safe_sbatch(self, *arguments, **env: str) -> str:
        result = self.run(
            ["./safe_sbatch", f"--output={self.logs}/%j.out", *arguments], **env
        )
        assert result.exit_code == 0, result
        (job,) = re.findall(r"^Submitted batch job (\d+)$", result.output, re.MULTILINE)
        return job

    def wait_until(self, condition, what: str) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, f"not after 60 s: {what}"
            time.sleep(0.1)

    def on(self, node: str, *command) -> Result:
        return self.run([*self.cluster.namespaces(node), *command])

    def processes(self, node: str, text: str) -> int:
        return sum(text in process for process in self.cluster.processes(node))

    @contextmanager
    def git_stops_halfway(self):
        """While this lasts, git archive stops at main.py, after some other files."""
        event = self.root.parent / "git may go on"
        wait = f"while [ ! -e '{event}' ]; do sleep 0.1; done; cat"
        self.must("git", "config", "filter.wait.smudge", wait)
        yield
        event.touch()


def tasks(output: str) -> list[Task]:
    return [
        Task(*json.loads(line))
        for line in re.findall(r"^RAN (.*)$", output, re.MULTILINE)
    ]


def copies(output: str) -> list[str]:
    """Return the nodes that say they have copied a commit."""
    return sorted(
        re.findall(
            r"^Commit [0-9a-f]{40} .* disk of (\w+), after \d+ s$", output, re.MULTILINE
        )
    )


def copy(job: str) -> str:
    """Return the folder on a node's disk that a job runs in."""
    return f"{LOCAL}/code-{job}"


def ran(
    result: Result, commit: str, versions: tuple[str, ...] = ("first",) * 4
) -> None:
    """Assert that a job has run a commit, from the local disks."""
    assert (result.exit_code, result.state) == (0, "COMPLETED"), result
    assert tuple(task.version for task in tasks(result.output)) == versions, result
    for task in tasks(result.output):
        assert task.commit == commit, result
        assert task.folder == f"{copy(result.job)}/examples/imagenet", result
        assert task.environment == f"{copy(result.job)}/.venv", result


def errors(result: Result) -> list[str]:
    """Return why a job has failed, in its words, without the last line's."""
    assert (result.exit_code, result.state) == (1, "FAILED"), result
    assert tasks(result.output) == [], result
    *found, last = re.findall(r"^job\.sh: error: (.*)$", result.output, re.MULTILINE)
    assert last.endswith(
        ": not requeued. See above. If the time limit was near, ask for more --time"
    ), result
    return found


@pytest.fixture
def repository(jobs, nothing_left, tmp_path):
    """A repository with an environment without packages."""
    (tmp_path / "cache").mkdir()
    project = {
        "main.py": MAIN,
        "a file": 32768 * "a",  # more than git archive keeps in memory before it writes
        "../../pyproject.toml": PROJECT,
        "../../.gitattributes": "main.py filter=wait\n",
    }
    repository = Repository(jobs, tmp_path / "a repository", project)
    repository.env |= {"UV_CACHE_DIR": str(tmp_path / "cache")}
    repository.must("uv", "lock", "--offline")
    repository.commit()
    yield repository
    for node in NODES:
        repository.on(node, "rm", "-rf", LOCAL)


def modify(repository):
    repository.replace("main.py", "first", "second")
    return " M main.py"


def stage(repository):
    modify(repository)
    repository.must("git", "add", "main.py")
    return "M  main.py"


def add(repository):
    repository.write("new.py", "")
    repository.must("git", "config", "status.showUntrackedFiles", "no")
    return "?? new.py"


def add_elsewhere(repository):
    repository.write("../../new.py", "")
    return "?? ../../new.py"


def remove(repository):
    (repository.folder / "main.py").unlink()
    return " D main.py"


@pytest.mark.parametrize("change", [modify, stage, add, add_elsewhere, remove])
def test_refuses_what_is_not_committed(repository, change):
    shown = change(repository)
    result = repository.run(["./safe_sbatch", *FLAGS, "job.sh"])
    assert result.exit_code == 1, result
    *status, error = result.output.splitlines()
    assert status == [shown], result
    assert (
        error.startswith("safe_sbatch: error: ")
        and "commit them, or git stash" in error
    ), result


def test_refuses_where_there_is_no_commit(repository):
    shutil.rmtree(repository.root / ".git")
    result = repository.run(["./safe_sbatch", *FLAGS, "job.sh"])
    assert result.exit_code == 1, result
    assert result.output.startswith(
        "safe_sbatch: error: fatal: not a git repository"
    ), result
    repository.must("git", "init", "--quiet", repository.root)
    result = repository.run(["./safe_sbatch", *FLAGS, "job.sh"])
    assert result.exit_code == 1, result
    assert (
        result.output == f"safe_sbatch: error: {repository.root} has no commit yet\n"
    ), result


def test_everything_reaches_the_job(repository):
    """The commit, all arguments as they are, and a copy on each node's own disk."""
    commit = repository.must("git", "rev-parse", "HEAD")
    repository.write("notes.ignored", "")
    link = repository.root.parent / "a link"
    link.symlink_to(repository.folder / "safe_sbatch")
    arguments = [
        "two words",
        "",
        "'single' \"double\"",
        "$HOME *",
        "--export=NONE",
        "a\nb",
    ]
    flags = [
        *FLAGS,
        f"--output={repository.logs}/%j.out",
        "--job-name=two words",
        "--parsable",
    ]
    environments = {
        "UV_PROJECT_ENVIRONMENT": str(repository.root / ".venv"),
        "VIRTUAL_ENV": "/elsewhere",
    }
    only_id = 'job=$("$@") && echo "job $job"'
    result = repository.run(
        ["sh", "-c", only_id, "sh", link, *flags, "job.sh", *arguments], **environments
    )
    assert result.exit_code == 0, result
    line, job = result.output.splitlines()
    assert line == f"safe_sbatch: commit {commit}", result
    job = job.removeprefix("job ")
    assert " JobName=two words " in repository.must(
        "scontrol", "show", "job", "--oneliner", job
    )
    result = repository.wait(job)
    ran(result, commit)
    assert all(task.arguments == arguments for task in tasks(result.output)), result
    assert sorted((task.node, task.rank) for task in tasks(result.output)) == [
        ("node1", "0"), ("node1", "1"), ("node2", "2"), ("node2", "3")
    ], result  # fmt: skip
    assert copies(result.output) == NODES, result
    assert "warning" not in result.output, result
    disks = {
        repository.on(node, "stat", "--format=%d", f"{copy(job)}/.venv").output
        for node in NODES
    }
    assert len(disks) == 2, disks
    assert not (repository.root / ".venv").exists()


def test_sbatch_alone_runs_in_place(repository):
    job = repository.submit("", *ONE_TASK, "job.sh")
    result = repository.wait(job)
    assert (result.exit_code, result.state) == (0, "COMPLETED"), result
    (task,) = tasks(result.output)
    assert task.folder == str(repository.folder), result
    assert task.environment == str(repository.root / ".venv"), result
    assert copies(result.output) == [], result


def test_sbatch_in_a_job_of_safe_sbatch(repository):
    """It runs in place, as anywhere else."""
    sbatch = ["sbatch", "--parsable", f"--output={repository.logs}/%j.out", *ONE_TASK]
    then = f'source ./job.sh\ncd "$WORK_DIR"\n{shlex.join([*sbatch, "job.sh"])}\n'
    repository.write("first.sh", f"#!/bin/bash\n{then}")
    commit = repository.commit()
    first = repository.wait(repository.safe_sbatch(*ONE_TASK, "first.sh"))
    ran(first, commit, ("first",))
    second = repository.wait(re.findall(r"^\d+$", first.output, re.MULTILINE)[-1])
    (task,) = tasks(second.output)
    assert (second.state, task.folder) == ("COMPLETED", str(repository.folder)), second


@pytest.mark.parametrize("export", ["NONE", "PATH,HOME,UV_CACHE_DIR"])
def test_sbatch_export_does_not_drop_the_commit(repository, export):
    commit = repository.must("git", "rev-parse", "HEAD")
    if export == "NONE":  # as in a file that sets up its own variables
        lines = "".join(
            f"export {name}='{repository.env[name]}'\n"
            for name in ("PATH", "HOME", "UV_CACHE_DIR")
        )
        repository.replace(
            "job.sh", "set -euo pipefail\n", lines + "set -euo pipefail\n"
        )
        commit = repository.commit()
    result = repository.wait(
        repository.safe_sbatch(*ONE_TASK, f"--export={export}", "job.sh")
    )
    ran(result, commit, ("first",))


def test_changes_after_submission_change_nothing(repository):
    """Neither edits nor commits do, before it starts or before it starts again."""
    commit = repository.must("git", "rev-parse", "HEAD")
    event = repository.root.parent / "an event"
    job = repository.safe_sbatch("--hold", *FLAGS, "job.sh", "--wait-for", event)
    repository.replace("main.py", "first", "second")
    repository.write("code_checkpointing.sh", "exit 9\n")
    repository.write("../../pyproject.toml", PROJECT.replace("3.11", "99"))
    repository.commit()
    repository.replace("main.py", "second", "third")
    repository.must("scontrol", "release", job)
    repository.wait_until(lambda: len(tasks(repository.log(job))) == 4, "4 tasks run")
    repository.must(
        "git", "commit", "--quiet", "--amend", "--all", "--message", "Another"
    )
    repository.must("scontrol", "requeue", job)
    repository.wait_until(
        lambda: repository.show(job)["JobState"] == "PENDING", "the job is requeued"
    )
    event.touch()
    result = repository.wait(job)
    assert repository.show(job)["Restarts"] == "1"
    ran(result, commit, ("first",) * 8)
    assert copies(result.output) == sorted(2 * NODES), result


def test_stopped_halfway(repository):
    """What a start leaves in the middle of the copy is not whole to the next one."""
    commit = repository.must("git", "rev-parse", "HEAD")
    job = repository.safe_sbatch("--hold", *FLAGS, "job.sh")
    stray = f"{copy(job)}/stray"
    with repository.git_stops_halfway():
        repository.must("scontrol", "release", job)
        for node in NODES:
            there = ["test", "-e", f"{copy(job)}/.gitignore"]
            repository.wait_until(
                lambda node=node, there=there: (
                    repository.on(node, *there).exit_code == 0
                ),
                f"some files on {node}",
            )
            assert repository.on(node, "touch", stray).exit_code == 0
        repository.must("scontrol", "requeue", job)
        repository.wait_until(
            lambda: repository.show(job)["JobState"] == "PENDING", "it is requeued"
        )
    result = repository.wait(job)
    ran(result, commit)
    assert copies(result.output) == NODES, result
    for node in NODES:
        assert repository.on(node, "test", "-e", stray).exit_code == 1


def test_two_jobs_on_one_node(repository):
    """Each has a copy of its own, also where jobs share SLURM_TMPDIR."""
    commit = repository.must("git", "rev-parse", "HEAD")
    event = repository.root.parent / "an event"
    first = repository.safe_sbatch(*ONE_TASK, "job.sh", "--wait-for", event)
    repository.wait_until(lambda: tasks(repository.log(first)), "the first one runs")
    repository.replace("main.py", '"first"', '"second"')
    second = repository.commit()
    result = repository.wait(repository.safe_sbatch(*ONE_TASK, "job.sh"))
    ran(result, second, ("second",))
    main = f"{copy(first)}/examples/imagenet/main.py"
    assert '"first"' in repository.on("node1", "cat", main).output
    event.touch()
    ran(repository.wait(first), commit, ("first",))


def test_missing_commit(repository):
    commit = "0123456789abcdef0123456789abcdef01234567"
    result = repository.wait(
        repository.submit("", *FLAGS, "job.sh", SLURM_GIT_COMMIT=commit)
    )
    where = f"{repository.folder} on node1"
    assert errors(result) == [f"no commit {commit} in {where}"], result
    assert "\nfatal: " in result.output, result  # what git says


COPY = "cannot copy commit {commit} from %s to {code} on node2"
INSTALL = "cannot install what uv.lock lists into {code} on node2. "
ELSEWHERE = "Without internet there, call uv sync --inexact --locked elsewhere first"


@pytest.mark.parametrize(
    "mount_point, options, message",
    [
        # Slurm starts the task in /tmp then.
        ("{root}", "size=1m", COPY % "/tmp"),
        (LOCAL, "ro", "cannot write to {code} on node2"),
        (LOCAL, "size=24k", COPY % "{folder}"),
        (LOCAL, "size=96k", INSTALL + ELSEWHERE),
    ],
    ids=["no repository", "read-only", "no space for the tree", "for the environment"],
)
def test_error_on_one_node(repository, mount_point, options, message):
    commit = repository.must("git", "rev-parse", "HEAD")
    mount_point = mount_point.format(root=repository.root)
    repository.on("node2", "mkdir", "-p", mount_point)
    mount = ["mount", "-t", "tmpfs", "-o", options, "x", mount_point]
    assert repository.on("node2", *mount).exit_code == 0
    try:
        result = repository.wait(repository.safe_sbatch(*FLAGS, "job.sh"))
    finally:
        assert repository.on("node2", "umount", mount_point).exit_code == 0
    names = {"folder": repository.folder, "commit": commit, "code": copy(result.job)}
    assert errors(result) == [message.format(**names)], result


@pytest.fixture
def index(tmp_path):
    """A package index that the nodes cannot reach; it has a package called answer."""
    folder = tmp_path / "index" / "answer"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / "answer-1-py3-none-any.whl", "w") as wheel:
        info = "answer-1.dist-info"
        wheel.writestr("answer.py", "")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: answer\nVersion: 1\n"
        )
        wheel.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(
            f"{info}/RECORD",
            f"answer.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n",
        )
    handler = functools.partial(
        http.server.SimpleHTTPRequestHandler, directory=folder.parent
    )
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_nodes_without_internet(repository, index, tmp_path):
    """safe_sbatch fetches what nodes cannot, even if the environment lacks nothing."""
    dependency = 'dependencies = ["answer"]\n'
    repository.write(
        "../../pyproject.toml",
        f'{PROJECT}{dependency}[[tool.uv.index]]\nurl = "{index}"\ndefault = true\n',
    )
    repository.must("uv", "sync")
    repository.replace("main.py", "import json\n", "import answer\nimport json\n")
    commit = repository.commit()
    in_place = repository.root / ".venv"
    before = in_place.stat().st_mtime_ns
    (tmp_path / "another cache").mkdir()
    repository.env |= {"UV_CACHE_DIR": str(tmp_path / "another cache")}

    result = repository.run(["./safe_sbatch", *FLAGS, "job.sh"], UV_OFFLINE="1")
    assert result.exit_code == 1, result
    error = "safe_sbatch: error: uv cannot install what uv.lock lists: "
    assert result.output.endswith(
        f"\n{error}call uv sync --inexact --locked where there is internet\n"
    ), result
    job = repository.submit(
        "", *FLAGS, "job.sh", SLURM_GIT_COMMIT=commit, UV_HTTP_RETRIES="0"
    )
    result = repository.wait(job)
    failed = [
        re.fullmatch(r"cannot install .* on (\w+)\. Without internet .*", line)[1]
        for line in errors(result)
    ]
    assert sorted(failed) == NODES, result

    ran(repository.wait(repository.safe_sbatch(*FLAGS, "job.sh")), commit)
    assert in_place.stat().st_mtime_ns == before


@pytest.mark.parametrize("end", ["exit 0", "exit 1", "kill -INT 0"])
def test_leaves_nothing_in_memory(repository, tmp_path, end):
    """The environment that shows what uv has goes, after Ctrl-C, too."""
    uv, seen = tmp_path / "bin" / "uv", tmp_path / "seen"
    uv.parent.mkdir()
    uv.write_text(
        '#!/bin/sh\ntouch "$UV_PROJECT_ENVIRONMENT/a file"\n'
        f'echo "$UV_PROJECT_ENVIRONMENT" > "{seen}"\n{end}\n'
    )
    uv.chmod(0o755)
    # In a session of its own, as Ctrl-C reaches it: not this process.
    command = ["setsid", "--wait", "./safe_sbatch", "--test-only", *FLAGS, "job.sh"]
    path = f"{uv.parent}:{repository.env['PATH']}"
    result = repository.run(command, PATH=path)
    assert (result.exit_code == 0) == (end == "exit 0"), result
    assert not Path(seen.read_text().strip()).exists(), result


SWEEP = """\
--learning-rate 0.1 --name 'two words' ""
--name="two  'more' words" '*' '$HOME' \\"
--name=don't
"""
WORDS = [
    ["--learning-rate", "0.1", "--name", "two words", ""],
    ["--name=two  'more' words", "*", "$HOME", '"'],
]


def test_sweep(repository):
    """Each task of an array takes its own line of the file, instead of a seed."""
    repository.write("sweep.txt", SWEEP)
    commit = repository.commit()
    flags = [f"--output={repository.logs}/%A_%a.out", *ONE_TASK, "--array=1-4"]
    common = ["--epochs", "two words"]
    array = repository.safe_sbatch(*flags, "job.sh", "@sweep.txt", *common)
    repository.replace("sweep.txt", "0.1", "0.2")  # the job sees nothing of that
    *whole, torn, missing = [repository.wait(f"{array}_{i}") for i in (1, 2, 3, 4)]
    for result, words in zip(whole, WORDS, strict=True):
        (task,) = tasks(result.output)
        assert (result.state, task.commit) == ("COMPLETED", commit), result
        assert task.arguments == [*words, *common], result
    assert errors(torn) == [] and "\nxargs: unmatched single quote" in torn.output
    assert errors(missing) == ["sweep.txt has no line 4"], missing


def test_seeds_of_an_array(repository):
    """Without a sweep, a task's number is its seed, unless the arguments name one."""
    flags = [f"--output={repository.logs}/%A_%a.out", *ONE_TASK, "--array=7"]
    array = repository.safe_sbatch(*flags, "job.sh", "--seed=1")
    (task,) = tasks(repository.wait(f"{array}_7").output)
    assert task.arguments == ["--seed=7", "--seed=1"]


def test_this_environment(jobs, tmp_path, nothing_left):
    """The project's own environment is complete on each node.

    It is linked: a copy is larger than the disks.
    """
    files = {
        f"../../{name}": (REPOSITORY / name).read_text()
        for name in ("pyproject.toml", "uv.lock")
    }
    imports = "import json\nimport torch\n"
    repository = Repository(
        jobs,
        tmp_path / "a repository",
        {"main.py": MAIN.replace("import json\n", imports)} | files,
    )
    commit = repository.commit()
    flags = [*FLAGS, "--ntasks-per-node=1", "job.sh"]
    try:
        result = repository.wait(
            repository.safe_sbatch(*flags, UV_LINK_MODE="symlink", CIFAR10_ARCHIVE="")
        )
    finally:
        for node in NODES:
            repository.on(node, "rm", "-rf", LOCAL)
    ran(result, commit, ("first",) * 2)
    assert copies(result.output) == NODES, result
