"""What imagenet's pages show works as it is typed there, on two small nodes."""

import re
import shlex
import subprocess
import time
from pathlib import Path

import pytest
from slurm_jobs import REPOSITORY, TINY, TWO, listings

PAGE = (REPOSITORY / "imagenet" / "README.rst").read_text()
EXCEPTIONS = (REPOSITORY / "docs" / "imagenet" / "exceptions.rst").read_text()
# What is smaller here: the model, and a node with one rank, one GPU and one CPU.
SMALLER = {
    "--ntasks-per-node=4 --gpus-per-node=4 --cpus-per-task=8 --mem=64G": " ".join(TWO),
    "--nproc-per-node=4": "--nproc-per-node=1",
    "CPUS_PER_TASK=8": "CPUS_PER_TASK=1",
    "OMP_NUM_THREADS=8": "OMP_NUM_THREADS=1",
    "--workers 8": "--workers 1",
}


def joined(listing: str) -> str:
    """Return a listing without its line breaks after a backslash."""
    return re.sub(r" \\\n +", " ", listing)


def make_smaller(listing: str, more: dict[str, str]) -> str:
    for old, new in (SMALLER | more).items():
        listing = listing.replace(old, new)
    return listing


def until(log: Path, pattern: str) -> None:
    """Wait until a log has this, over several lines."""
    deadline = time.monotonic() + 600
    while not re.search(pattern, text := log.read_text(), re.DOTALL):
        assert time.monotonic() < deadline, f"no {pattern} in\n{text}"
        time.sleep(0.1)


@pytest.mark.usefixtures("nothing_left")
def test_an_allocation_and_torchrun(user, tmp_path):
    """Staged, trained by srun, trained by torchrun on what is left when a node is lost.

    test_torchrun_elastic has the node come back.
    """
    train = f"main.py {' '.join(TINY)}"
    data = {"/datasets/imagenet": user.env["IMAGENET_DIR"]}
    folder = {"checkpoints/": f"{tmp_path}/checkpoints/"}
    (allocation,) = listings(PAGE, "In an allocation")
    allocation = make_smaller(
        allocation, data | folder | {"main.py": f"{train} --epochs=1"}
    )
    (torchrun,) = listings(EXCEPTIONS, "With torchrun")
    torchrun = make_smaller(
        torchrun, folder | {"main.py": f"{train} --epochs=12 --save-steps=4"}
    )
    sync, salloc, *inside, remove = joined(allocation).splitlines()
    assert (sync, salloc.split()[0]) == ("uv sync --locked", "salloc")
    inside = "\n".join(
        ['echo "This is job $SLURM_JOB_ID"', *inside, "echo trained", torchrun, remove]
    )
    # srun tells of the node that is lost: no -e.
    script = f"{sync}\n{salloc} bash -uc {shlex.quote(inside)}"
    log = tmp_path / "log"
    env = {"TMPDIR": str(tmp_path)}
    with log.open("w") as file:
        shell = subprocess.Popen(
            ["bash", "-uc", script],
            cwd=user.clone / "imagenet",
            env=user.env | env,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        until(log, r"\ntrained\n.*\nEpoch 2: ")
        user.kill_all("node2")
        shell.wait(timeout=600)
    finally:
        output = log.read_text()
        for job in re.findall("^This is job (.*)", output, re.MULTILINE):
            user.run(["scancel", job])
            # The listing's last line has removed it.
            test = ["test", "!", "-e", f"/tmp/slurm-job-{job}-cluster"]
            folders = [user.on(node, *test) for node in ("node1", "node2")]
    by_srun, by_torchrun = output.split("\ntrained\n")
    assert by_srun.count("staged ") == 2, output
    assert "World size 2: 16 steps" in by_srun, output
    assert "Weights SHA-256 " in by_srun, output
    both, alone = "World size 2: 16 steps", "World size 1: 16 steps an epoch, 1 x 10"
    assert re.search(
        f"{both}.*Resuming from .*{alone} .*Epoch 12: .*Weights SHA-256 ",
        by_torchrun,
        re.DOTALL,
    ), output
    assert [result.exit_code for result in folders] == [0, 0], folders


@pytest.mark.every_case
@pytest.mark.usefixtures("nothing_left")
def test_torchrun_elastic(user, tmp_path):
    """A node is lost and comes back.

    The other one goes on alone meanwhile, from the newest checkpoint.
    """
    launch = (
        "uv run --no-sync torchrun --nnodes=1:2 --nproc-per-node=1 --max-restarts=3 "
        "--rdzv-backend=c10d --rdzv-endpoint=node1:29500 --rdzv-id=1 "
        "main.py --synthetic --limit-train-samples=160 --epochs=400"
    )
    folder = f"--checkpoint-dir={tmp_path / 'checkpoints'}"
    command = [*launch.split(), *TINY, folder]
    log = tmp_path / "log"
    # Else PyTorch 2.15's first agent keeps the address of its store
    # to itself, and nobody can join.
    env = user.env | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    # As job.sh sets one: an agent that is killed leaves its folders behind.
    env["TMPDIR"] = str(tmp_path)

    def start(node: str) -> subprocess.Popen:
        cd = f"--chdir={user.clone / 'imagenet'}"
        here = [*user.cluster.namespaces(node), "env", cd]
        with log.open("a") as file:
            return subprocess.Popen(
                [*here, *command], env=env, stdout=file, stderr=subprocess.STDOUT
            )

    agents = [start("node1"), start("node2")]
    try:
        alone, both = "World size 1: 32 steps", "World size 2: 16 steps"
        until(log, f"{both}.*Epoch 1:")
        user.kill_all("node2")
        # Alone, with the global batch of two.
        until(
            log,
            f"{both}.*Resuming from .*"
            "World size 1: 16 steps an epoch, 1 x 10 samples each.*Epoch",
        )
        agents.append(start("node2"))
        until(log, f"{both}.*World size 1: .*Resuming from .*{both}.*Epoch")
        assert alone not in log.read_text()
    finally:
        for node in ("node1", "node2"):
            user.kill_all(node)
        for agent in agents:
            agent.wait()


@pytest.mark.usefixtures("nothing_left")
def test_a_sweep(user):
    """Each task trains with its line of the file, and with the common arguments.

    With --synthetic, in the file, too, none stages ImageNet. The command that lists the
    best one first: test_after_a_job.py.
    """
    (sweep,) = [text for text in listings(PAGE, "Many runs") if "cat sweep.txt" in text]
    _, *lines, command = sweep.splitlines()
    assert command.startswith("$ ./safe_sbatch --array=1-3 job.sh @sweep.txt ")
    flags = f"--nodes=1 {' '.join(TWO)} --parsable --output={user.logs}/%A_%a.out"
    small = "--limit-train-samples=40 --limit-valid-samples=40"
    command = command.removeprefix("$ ").replace("sbatch", f"sbatch {flags}")
    command = command.replace("--epochs 50", f"--epochs 1 {small} {' '.join(TINY)}")
    git = ["git", "-c", "user.name=tests", "-c", "user.email=tests"]
    file = user.clone / "imagenet" / "sweep.txt"
    file.write_text("".join(f"{line} --synthetic\n" for line in lines))
    try:
        for words in (["add", file], ["commit", "-qm", "Add a sweep"]):
            assert user.run([*git, *words]).exit_code == 0
        # Links to uv's cache: the nodes' disks here are smaller than the environment.
        result = user.run(shlex.split(command), "imagenet")
        assert result.exit_code == 0, result
        array = result.output.split()[-1]
        results = [user.wait(f"{array}_{task}") for task in (1, 2, 3)]
    finally:
        user.run(["git", "reset", "-q", "--hard", "HEAD~1"])
    settings = "^  learning_rate: (.+)\n  weight_decay: (.+)\n  seed: 0$"
    trained = [result.find(settings) for result in results]
    default = str(2**-15)
    expected = [("0.1", default), ("0.2", default), ("0.2", "0.0001")]
    assert trained == [[settings] for settings in expected], results
    for result in results:
        assert result.state == "COMPLETED" and "staged" not in result.output, result
