"""The imagenet example as jobs: staged, trained, stopped, killed, started again, with the same weights."""

import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from conftest import Jobs, Result
from drawn_imagenet import draw_imagenet

TRAINING, VALIDATION = 160, 24
# Two nodes with a rank each, 16 steps an epoch, of a model with BatchNorm.
TWO = ["--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=1", "--mem=2G"]
TINY = "--model=shufflenet_v2_x0_5 --image-size=32 --batch-size=5 --workers=1".split()
EPOCHS = ["--epochs=2"]
EPOCH_LINE = re.compile(
    r"^Epoch (\d+): train loss (\d+\.\d{3}) accuracy (\d+\.\d\d)%, valid loss (\d+\.\d{3}) "
    r"accuracy (\d+\.\d\d)%, \d+ images/s, \d+% waiting for data(?:, (\d+) requeues to go)?$",
    re.MULTILINE,
)
WEIGHTS_LINE = re.compile(r"^Weights SHA-256 ([0-9a-f]{64}), commit ([0-9a-f]{40})$", re.MULTILINE)


def weights(result: Result) -> str:
    """Assert that a job has trained to its end; return the SHA-256 of its weights."""
    assert (result.exit_code, result.state) == (0, "COMPLETED"), result
    epochs = EPOCH_LINE.findall(result.output)
    assert epochs, result
    # An epoch that was stopped while it was validated is told of again, in the same words.
    told = {epoch: numbers for epoch, *numbers in (epoch[:5] for epoch in epochs)}
    assert all(told[epoch] == numbers for epoch, *numbers in (epoch[:5] for epoch in epochs)), result
    assert sorted(map(int, told)) == [i + 1 for i in range(len(told))], result
    for _, train_accuracy, _, valid_accuracy in told.values():
        assert f"{train_accuracy}%" in {f"{correct / TRAINING:.2%}" for correct in range(TRAINING + 1)}
        assert f"{valid_accuracy}%" in {f"{correct / VALIDATION:.2%}" for correct in range(VALIDATION + 1)}
    # A job may be killed after its last line, too.
    ((sha, _commit),) = set(WEIGHTS_LINE.findall(result.output))
    return sha


class User(Jobs):
    """Someone with ImageNet's archives, in the folder imagenet."""

    def train(self, *arguments, flags=TWO, **env: str) -> str:
        return self.submit("imagenet", *flags, "job.sh", *TINY, *arguments, **env)

    def until(self, job: str, pattern: str, timeout: float = 120) -> re.Match:
        """Wait until a job has printed something."""
        return self.until_found(
            job, lambda: re.search(pattern, self.log(job), re.MULTILINE), pattern, timeout
        )

    def until_file(self, job: str, pattern: str, timeout: float = 120) -> None:
        """Wait until a job's checkpoint folder has such a file."""
        folder = self.checkpoints(job)
        self.until_found(job, lambda: list(folder.glob(pattern)), pattern, timeout, pause=0.001)

    def until_found(self, job: str, find, what: str, timeout: float, pause: float = 0.05):
        deadline = time.monotonic() + timeout
        while not (found := find()):
            state = self.show(job)["JobState"] if pause > 0.01 else ""
            if state in ("FAILED", "COMPLETED", "CANCELLED", "TIMEOUT") or time.monotonic() > deadline:
                raise TimeoutError(f"job {job} is {state} without {what}:\n{self.log(job)}")
            time.sleep(pause)
        return found

    def checkpoints(self, job: str) -> Path:
        return self.clone / "imagenet" / "checkpoints" / job

    def kill(self, node: str, text: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Signal the oldest Python process on a node that has this text in its command line."""
        command = ["pkill", f"-{number.value}", "--oldest", "--full", f"bin/python[^ ]* {text}"]
        return self.run([*self.cluster.namespaces(node), *command]).exit_code

    def kill_all(self, node: str) -> None:
        """End all that runs Python on a node, as if it had crashed."""
        self.run([*self.cluster.namespaces(node), "pkill", "-9", "--full", "torchrun|main.py"])

    def cancel(self, job: str) -> Result:
        """Cancel a job, and remove what job.sh then leaves, as it says, in the folder that it has made."""
        self.run(["scancel", job])
        result = self.wait(job)
        for node in self.cluster.nodes:
            self.run([*self.cluster.namespaces(node), "rm", "-rf", f"/tmp/slurm-job-{job}"])
        return result

    def warn(self, job: str) -> None:
        """Send the signal that Slurm sends before the time limit, as it does."""
        assert self.run(["scancel", "--batch", "--signal=USR1", job]).exit_code == 0


@pytest.fixture(scope="module")
def user(jobs, tmp_path_factory) -> User:
    folder = tmp_path_factory.mktemp("archives")
    draw_imagenet(folder, classes=4, train=TRAINING // 4, valid=VALIDATION // 4, resolution=40)
    user = User(jobs.cluster, jobs.clone, folder, jobs.logs)
    user.env |= {"IMAGENET_DIR": str(folder), "CIFAR10_ARCHIVE": ""}
    return user


@pytest.fixture(autouse=True)
def nothing_left(user):
    yield
    for job in user.run(["squeue", "--noheader", "--format=%A"]).output.split():
        user.cancel(job)  # of a test that has failed
    assert user.leftovers() == []


@pytest.fixture(scope="module")
def undisturbed(user) -> str:
    """The weights of a run that nothing has happened to."""
    return weights(user.wait(user.train(*EPOCHS)))


def test_the_whole_way(user):
    """safe_sbatch, staging, training, time limit, requeue, end: the same weights as of a run not stopped."""
    # Links to uv's cache: the nodes' disks here are smaller than the environment.
    flags = [*TWO, "--parsable", f"--output={user.logs}/%j.out", "--signal=B:USR1@20", "--time=10"]
    command = ["./safe_sbatch", *flags, "job.sh", *TINY, "--epochs=25"]

    def submit() -> str:
        result = user.run(command, "imagenet", UV_LINK_MODE="symlink")
        assert result.exit_code == 0, result
        return result.output.split()[-1]

    undisturbed = weights(user.wait(submit()))
    job = submit()
    user.until(job, r"^Epoch 1: ")
    assert user.run(["scontrol", "update", f"job={job}", "TimeLimit=1"]).exit_code == 0
    user.until(job, r"^Asked to stop: saved step \d+ of epoch \d+", timeout=100)
    user.until(job, r"^job.sh: status 75: to be requeued$")
    user.run(["scontrol", "update", f"job={job}", "TimeLimit=10"])
    result = user.wait(job)
    assert weights(result) == undisturbed
    assert user.show(job)["Restarts"] != "0"
    assert re.search(r"^Resuming from .*epoch-\d+-step-\d+.pt$", result.output, re.MULTILINE), result
    assert re.search(
        r"^Commit [0-9a-f]{40} and its environment are on the disk of node2", result.output, re.M
    )


def test_stopped_again_and_again(user, undisturbed):
    job = user.train(*EPOCHS, "--save-steps=3")
    for requeues, event in enumerate(["*-step-000003.pt", "epoch-002-*"], 1):
        user.until_file(job, event)
        user.warn(job)
        user.until(job, f"^Job .* requeued {requeues} times$")
    assert weights(user.wait(job)) == undisturbed
    assert user.show(job)["Restarts"] == "2"


@pytest.mark.parametrize("moment", ["staging", "step", "save", "evaluation"])
def test_killed(user, undisturbed, moment):
    """SIGKILL to a process of the job, at any moment: the end is the same."""
    job = user.train(*EPOCHS, "--save-steps=2")
    if moment == "staging":
        user.until_found(job, lambda: user.kill("node2", "prepare_data.py") == 0, "staging", 60, pause=0.005)
        assert user.wait(job).state == "FAILED"  # nothing was trained: it might fail for ever
        assert user.run(["scontrol", "requeue", job]).exit_code == 0
    else:
        file = {"step": "*-step-000002.pt", "save": "*.partial", "evaluation": "epoch-001-step-000016.pt"}
        user.until_file(job, file[moment])
        assert user.kill("node1" if moment == "save" else "node2", "main.py") == 0
    result = user.wait(job)
    assert weights(result) == undisturbed
    assert user.show(job)["Restarts"] == "1"


def test_other_numbers_of_ranks(user, tmp_path):
    """8 ranks, then 4, then 8: the epoch lines count every sample of an epoch's whole batches."""
    eight = [*TWO, "--ntasks-per-node=4", "--gpus-per-node=4"]
    arguments = ["--epochs=3", "--save-steps=2", f"--checkpoint-dir={tmp_path}"]
    stops = [(eight, "epoch-001-step-000002.pt"), (["--nodes=1", *eight], "epoch-002-step-000002.pt")]
    output = ""
    for flags, file in stops:
        job = user.train(*arguments, flags=flags)
        user.until_found(job, lambda file=file: (tmp_path / file).exists(), file, 120)
        output += user.cancel(job).output
    result = user.wait(user.train(*arguments, flags=eight))
    weights(Result(output + result.output, result.exit_code, result.state, result.job))
    assert "World size 8: 4 steps an epoch, 8 x 5 samples each, of 160; 24 to validate" in result.output


def test_warned_before_training(user):
    """A time limit that leaves no time to train is said, and is no reason to try again."""
    job = user.train(*EPOCHS)
    user.until_found(
        job, lambda: user.kill("node2", "prepare_data.py", signal.SIGSTOP) == 0, "staging", 60, 0.005
    )
    user.warn(job)
    result = user.wait(job)
    assert result.state == "FAILED", result
    (message,) = re.findall(r"^job.sh: error: .*", result.output, re.MULTILINE)
    assert message == "job.sh: error: the time limit came before the training had begun: ask for more --time"
    assert user.show(job)["Restarts"] == "0"


def test_cancelled(user):
    """A cancelled job saves, and does not come back."""
    job = user.train("--epochs=200")
    user.until(job, r"^Epoch 1: ")
    result = user.cancel(job)
    assert result.state == "CANCELLED", result
    assert user.show(job)["Restarts"] == "0"


def test_salloc(user, tmp_path):
    command = ["salloc", "--nodes=2", *TWO, "bash", "-euc"]
    prepare = "srun --ntasks=2 --ntasks-per-node=1 uv run --no-sync python prepare_data.py"
    data = '--data-dir "/tmp/slurm-job-$SLURM_JOB_ID"'
    script = f"""
        {prepare} {data}
        srun uv run --no-sync python main.py {data} {" ".join(TINY)} --epochs=1
        {prepare} {data} --release
    """
    result = user.run([*command, script], "imagenet", SLURM_CPUS_PER_TASK="1")
    assert result.exit_code == 0, result
    weights(Result(result.output, 0, "COMPLETED"))


def test_array(user):
    """Two tasks of an array on one node stage once, and have a checkpoint folder and a seed each."""
    shared, folders = "/tmp/shared data", set(user.checkpoints("").glob("*"))
    flags = ["--nodes=1", "--nodelist=node1", "--array=1-2", f"--output={user.logs}/%A_%a.out"]
    # A job that is no more, and could not sign off.
    node1 = user.cluster.namespaces("node1")
    user.run([*node1, "mkdir", "-p", "-m", "700", f"{shared}/jobs"])
    user.run([*node1, "touch", f"{shared}/jobs/99999"])
    array = user.train("--epochs=1", flags=[*TWO, *flags], DATA_DIR=shared)
    results = [user.wait(f"{array}_{task}") for task in (1, 2)]
    assert len({weights(result) for result in results}) == 2  # of two seeds
    told = "".join(result.output for result in results)
    assert told.count("node1: staged ") == 1
    made = set(user.checkpoints("").glob("*")) - folders
    assert [(folder / "best.pt").exists() for folder in made] == [True, True]
    # The last one to leave has removed it.
    assert user.run([*node1, "ls", shared]).exit_code != 0


def test_a_rank_that_hangs(user):
    """It is named, with the Python stack of every rank, within the timeout; the job is started again."""
    job = user.train("--epochs=200", "--timeout=15")
    user.until(job, r"^Epoch 1: ")
    assert user.kill("node2", "main.py", signal.SIGSTOP) == 0
    user.until(job, r"they wait for rank 1 on node2 \(does not answer", timeout=60)
    user.until(job, r"^Job .* requeued 1 times$")
    output = user.cancel(job).output
    assert re.search(r"^warning: rank 0 of 2 on node1 has not moved for \d+ s", output, re.MULTILINE), output
    assert "main.py" in output and " in train" in output, output


def test_torchrun_elastic(user, tmp_path):
    """A node is lost and comes back: the other one goes on alone meanwhile, from the newest checkpoint."""
    elastic = "--nnodes=1:2 --nproc-per-node=1 --max-restarts=3 --rdzv-backend=c10d --rdzv-id=1".split()
    data = ["--synthetic", "--limit-train-samples=160", f"--checkpoint-dir={tmp_path / 'checkpoints'}"]
    script = ["--rdzv-endpoint=node1:29500", "main.py", *TINY, *data, "--epochs=400"]
    log = tmp_path / "log"
    # Else PyTorch 2.15's first agent keeps the address of its store to itself, and nobody can join.
    env = user.env | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}

    def start(node: str) -> subprocess.Popen:
        here = [*user.cluster.namespaces(node), "env", f"--chdir={user.clone / 'imagenet'}"]
        command = [*here, "uv", "run", "--no-sync", "torchrun", *elastic, *script]
        with log.open("a") as file:
            return subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT)

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
        until(f"{both}.*Resuming from .*World size 1: 16 steps an epoch, 1 x 10 samples each.*Epoch")
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
        (["--data-dir=/nowhere"], r"^main.py: error: no data in /nowhere on node\d: run prepare_data.py"),
        (["--epochs=0"], r"argument --epochs: must be at least 1, not 0"),
        (["--model=resnet5"], r"argument --model: torchvision has no resnet5"),
    ],
)
def test_errors_are_not_tried_again(user, arguments, message):
    result = user.wait(user.train(*arguments))
    assert result.state == "FAILED", result
    assert re.search(message, result.output, re.MULTILINE), result
    assert "Traceback" not in result.output, result
    assert user.show(result.job)["Restarts"] == "0"


def test_other_recipe(user):
    job = user.train("--epochs=1")
    weights(user.wait(job))
    folder = f"--checkpoint-dir={user.checkpoints(job)}"
    result = user.wait(user.train("--epochs=1", "--seed=1", folder))
    assert result.state == "FAILED", result
    (message,) = re.findall(r"^main.py: error: .*", result.output, re.MULTILINE)
    assert "is of another run, with seed 0, not 1: " in message, result
    # A finished run tells its end again.
    again = user.wait(user.train("--epochs=1", folder))
    assert weights(again) == WEIGHTS_LINE.search(user.log(job))[1]
