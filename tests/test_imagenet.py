"""The imagenet example as jobs: staged, stopped, killed, started: the same weights."""

import re
import subprocess
import time

import pytest
from slurm_jobs import TINY, TWO, WEIGHTS_LINE, Result, stop, weights

pytestmark = pytest.mark.usefixtures("nothing_left")
ONE = ["--nodes=1", *TWO]  # rank


def test_the_whole_way(user, tmp_path):
    """From safe_sbatch through a requeue to the end: the weights of an unbroken run."""
    # Links to uv's cache: the nodes' disks here are smaller than the environment.
    flags = [
        *TWO,
        "--parsable",
        f"--output={user.logs}/%j.out",
        "--signal=USR1@90",
        "--time=10",
    ]
    command = ["./safe_sbatch", *flags, "job.sh", *TINY, "--epochs=10"]
    command += ["--timeout=900"]  # a rank is stopped until Slurm warns the job
    # So a second start finds its modules compiled, in an environment that is new again.
    env = {"UV_LINK_MODE": "symlink", "PYTHONPYCACHEPREFIX": str(tmp_path)}

    def submit() -> str:
        result = user.run(command, "imagenet", **env)
        assert result.exit_code == 0, result
        return result.output.split()[-1]

    undisturbed = weights(user.wait(submit()))
    job = submit()
    user.until(job, r"^Epoch 1: ")
    rank = user.pid("node2", "main.py")
    stop(rank)  # the last steps must not be over when the warning comes
    # Slurm looks every 30 seconds whether it is time:
    # 90 seconds before the end, or up to 30 sooner.
    assert user.run(["scontrol", "update", f"job={job}", "TimeLimit=2"]).exit_code == 0
    # Slurm makes a rank that is stopped go on when it warns it.
    user.until(job, r"^Asked to stop: saved step \d+ of epoch \d+")
    user.until(job, r"^job.sh: status 75: to be requeued$")
    user.run(["scontrol", "update", f"job={job}", "TimeLimit=10"])
    result = user.wait(job)
    assert weights(result) == undisturbed
    assert user.show(job)["Restarts"] != "0"
    assert re.search(
        r"^Resuming from .*epoch-\d+-step-\d+.pt$", result.output, re.MULTILINE
    ), result
    assert re.search(
        r"^Commit [0-9a-f]{40} is on the disk of node2",
        result.output,
        re.M,
    )


def test_other_numbers_of_ranks(user, tmp_path):
    """4 ranks, then 2, then 4: the epoch lines count all samples of whole batches."""
    four = [*TWO, "--ntasks-per-node=2", "--gpus-per-node=2"]
    arguments = ["--epochs=3", "--save-steps=2", f"--checkpoint-dir={tmp_path}"]
    stops = [
        (four, "epoch-001-step-000002.pt"),
        (["--nodes=1", *four], "epoch-002-step-000002.pt"),
    ]
    output = ""
    for flags, file in stops:
        job = user.train(*arguments, flags=flags)
        user.until_found(job, lambda file=file: (tmp_path / file).exists(), file, 120)
        output += user.cancel(job).output
    result = user.wait(user.train(*arguments, flags=four))
    weights(Result(output + result.output, result.exit_code, result.state, result.job))
    assert (
        "World size 4: 8 steps an epoch, 4 x 5 samples each, of 160; 24 to validate"
        in result.output
    )


def test_cancelled(user):
    """A cancelled job saves, and does not come back."""
    # Ranks agree in each step: SIGKILL comes in 5 s.
    job = user.train("--epochs=200", "--save-steps=1")
    user.until(job, r"^Epoch 1: ")
    result = user.cancel(job)
    assert result.state == "CANCELLED", result
    (step, epoch) = re.search(
        r"^Asked to stop: saved step (\d+) of epoch (\d+), ",
        result.output,
        re.MULTILINE,
    ).groups()
    assert list(user.checkpoints(job).glob(f"epoch-{epoch:0>3}-step-{step:0>6}.pt")), (
        result
    )
    assert user.show(job)["Restarts"] == "0"


def test_salloc(user, tmp_path):
    command = ["salloc", "--nodes=2", *TWO, "bash", "-euc"]
    on_each_node = "srun --ntasks=2 --ntasks-per-node=1"
    data = '--data-dir "/tmp/slurm-job-$SLURM_JOB_ID"'
    script = f"""
        {on_each_node} uv run --no-sync python prepare_data.py {data}
        srun uv run --no-sync python main.py {data} {" ".join(TINY)} --epochs=1
        {on_each_node} rm -r "/tmp/slurm-job-$SLURM_JOB_ID"
    """
    result = user.run([*command, script], "imagenet", SLURM_CPUS_PER_TASK="1")
    assert result.exit_code == 0, result
    weights(Result(result.output, 0, "COMPLETED"))


def test_array(user):
    """Each task of an array has data, a checkpoint folder and a seed of its own.

    They also remove what a job of this user has left there, and nothing of others.
    """
    folders = set(user.checkpoints("").glob("*"))
    flags = [
        "--nodes=1",
        "--nodelist=node1",
        "--array=1-2",
        f"--output={user.logs}/%A_%a.out",
    ]
    node1 = user.cluster.namespaces("node1")
    # One that runs on another node: some nodes share their /tmp.
    running = user.submit("", "--nodelist=node2", "--mem=100M", "--wrap=sleep infinity")
    names = ("99999", "99998", "cache", running)
    folders_of_jobs = abandoned, another, *_ = [
        f"/tmp/slurm-job-{name}" for name in names
    ]
    user.run([*node1, "mkdir", "-p", f"{abandoned}/data", *folders_of_jobs])
    user.run([*node1, "chown", "nobody", another])
    # What a user may have set for squeue hides no job from the examples.
    array = user.train("--epochs=1", flags=[*TWO, *flags], SQUEUE_PARTITION="urgent")
    results = [user.wait(f"{array}_{task}") for task in (1, 2)]
    left = [
        user.run([*node1, "test", "-e", path]).exit_code == 0
        for path in folders_of_jobs
    ]
    user.cancel(running)
    user.run([*node1, "rm", "-r", *folders_of_jobs[1:]])
    assert left == [False, True, True, True]
    assert len({weights(result) for result in results}) == 2  # of two seeds
    told = "".join(result.output for result in results)
    assert f"node1: removed {abandoned}, " in told
    assert told.count("node1: staged ") == 2
    made = set(user.checkpoints("").glob("*")) - folders
    assert [(folder / "best.pt").exists() for folder in made] == [True, True]


def test_torchrun_elastic(user, tmp_path):
    """A node is lost and comes back.

    The other one goes on alone meanwhile, from the newest checkpoint.
    """
    elastic = [
        "--nnodes=1:2",
        "--nproc-per-node=1",
        "--max-restarts=3",
        "--rdzv-backend=c10d",
        "--rdzv-id=1",
    ]
    data = [
        "--synthetic",
        "--limit-train-samples=160",
        f"--checkpoint-dir={tmp_path / 'checkpoints'}",
    ]
    script = ["--rdzv-endpoint=node1:29500", "main.py", *TINY, *data, "--epochs=400"]
    log = tmp_path / "log"
    # Else PyTorch 2.15's first agent keeps the address of its store
    # to itself, and nobody can join.
    env = user.env | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    # As job.sh sets one: an agent that is killed leaves its folders behind.
    env["TMPDIR"] = str(tmp_path)

    def start(node: str) -> subprocess.Popen:
        here = [
            *user.cluster.namespaces(node),
            "env",
            f"--chdir={user.clone / 'imagenet'}",
        ]
        command = [*here, "uv", "run", "--no-sync", "torchrun", *elastic, *script]
        with log.open("a") as file:
            return subprocess.Popen(
                command, env=env, stdout=file, stderr=subprocess.STDOUT
            )

    def until(pattern: str) -> None:
        deadline = time.monotonic() + 150
        while not re.search(pattern, text := log.read_text(), re.DOTALL):
            assert time.monotonic() < deadline, f"no {pattern} in\n{text}"
            time.sleep(0.1)

    agents = [start("node1"), start("node2")]
    try:
        alone, both = "World size 1: 32 steps", "World size 2: 16 steps"
        until(f"{both}.*Epoch 1:")
        user.kill_all("node2")
        # Alone, with the global batch of two.
        until(
            f"{both}.*Resuming from .*"
            "World size 1: 16 steps an epoch, 1 x 10 samples each.*Epoch"
        )
        agents.append(start("node2"))
        until(f"{both}.*World size 1: .*Resuming from .*{both}.*Epoch")
        assert alone not in log.read_text()
    finally:
        for node in ("node1", "node2"):
            user.kill_all(node)
        for agent in agents:
            agent.wait()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["--data-dir=/nowhere"],
            r"^main.py: error: on node\d: no data in /nowhere: .* run prepare_data.py",
        ),
        (["--epochs=0"], r"argument --epochs: must be at least 1: 0"),
        (
            ["--model=resnet5"],
            r"argument --model: invalid choice: 'resnet5' \(choose from .*'resnet50'",
        ),
    ],
)
def test_errors_are_not_tried_again(user, arguments, message):
    result = user.wait(user.train(*arguments, flags=ONE))
    assert result.state == "FAILED", result
    assert re.search(message, result.output, re.MULTILINE), result
    assert "Traceback" not in result.output, result
    assert user.show(result.job)["Restarts"] == "0"


def test_mistyped_archives(user):
    result = user.wait(user.train(IMAGENET_DIR="/no/such/folder"))
    assert result.state == "FAILED", result
    said = re.findall(
        r"^prepare_data.py: error: cannot stage (\S+) in \S+ on node\d: .*No such file",
        result.output,
        re.MULTILINE,
    )
    assert "/no/such/folder" in said, result
    assert (
        "command not found" not in result.output and "World size" not in result.output
    ), result


def test_other_recipe(user):
    job = user.train("--epochs=1", flags=ONE)
    weights(user.wait(job))
    folder = f"--checkpoint-dir={user.checkpoints(job)}"
    result = user.wait(user.train("--epochs=1", "--seed=1", folder, flags=ONE))
    assert result.state == "FAILED", result
    (message,) = re.findall(r"^main.py: error: .*", result.output, re.MULTILINE)
    assert "is of another run, with seed 0, not 1: " in message, result
    # A finished run tells its end again.
    again = user.wait(user.train("--epochs=1", folder, flags=ONE))
    assert weights(again) == WEIGHTS_LINE.search(user.log(job))[1]
