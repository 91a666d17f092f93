"""docs/sharded: it trains as one process does, and goes on where the last job was.

Nodes of ranks without Slurm are simulated by its variables, a full disk by a small one.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from fork_ranks import Ranks
from slurm_jobs import REPOSITORY, Result
from torch.distributed.checkpoint import FileSystemReader

SCRIPTS = REPOSITORY / "docs" / "sharded"
MODELS = Path(__file__).parent / "tiny_models.py"
FLAGS = "--batch-size 12 --epochs 2 --learning-rate 0.003".split()
ERROR = "main.py: error: "


@pytest.fixture(scope="module")
def ranks(frameworks):
    ranks = Ranks(frameworks / "bin" / "python", MODELS)
    yield ranks
    ranks.end()


@pytest.fixture(scope="module")
def make(ranks, tmp_path_factory):
    """Return what makes a folder with a model and with samples of chats and texts."""

    def make(kind: str, *options: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        for file in (SCRIPTS / "main.py", SCRIPTS / "resume.py"):
            shutil.copy(file, folder)
        made = ranks(
            folder, "make", kind, folder / "pretrained", *options, script=MODELS
        )
        assert made[0].exit_code == 0, made
        words = "a cat sat on the mat and saw one big red dog run far away".split()
        with open(folder / "data.jsonl", "w") as lines:
            for n in range(60):
                text = " ".join(words[n % 7 : n % 7 + 1 + n % 9])
                chat = [{"role": "user", "content": text}]
                chat.append({"role": "assistant", "content": words[n % 13] * (n % 3)})
                document = {"messages": chat} if n % 2 else {"text": text}
                print(json.dumps(document), file=lines)
        flags = ["pretrained", "data.jsonl", "32"]
        packed = ranks(folder, *flags, script=SCRIPTS / "pack.py")
        assert packed[0].find("^[0-9]+ samples of 32 tokens in samples.npy$"), packed
        return folder

    return make


@pytest.fixture(scope="module")
def qwen3(make) -> Path:
    return make("qwen3")


def test_samples(ranks, qwen3, tmp_path):
    """Learned are a text's next tokens, and of a chat, the last message."""

    def ids(text: str) -> list[int]:
        return [1 if letter == "." else ord(letter) - 31 for letter in text]

    chat = [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]
    lines = [json.dumps({"text": "ab"}), json.dumps({"messages": chat})]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    flags = [qwen3 / "pretrained", "data.jsonl", "11"]
    packed = ranks(tmp_path, *flags, script=SCRIPTS / "pack.py")
    assert packed[0].exit_code == 0, packed
    samples = np.load(tmp_path / "samples.npy")
    tokens, targets, positions = samples.swapaxes(0, 1).reshape(3, -1).tolist()
    text, prompt, answer = ids("ab."), ids("user:c.assistant:"), ids("d.")
    assert tokens == text + prompt + answer
    unlearned = [-100] * len(prompt)
    assert targets == [*text[1:], *unlearned, *answer, -100]
    # The second sample begins in the chat.
    assert positions == [*range(3), *range(8), *range(11)]


def steps(result: Result) -> dict[int, tuple[float, float]]:
    """Return each step's loss and gradient norm."""
    found = result.find(r"^Step (\d+): loss (\d+\.\d{4}), gradient norm (\d+\.\d{4})$")
    return {int(step): (float(loss), float(norm)) for step, loss, norm in found}


def assert_near(found: dict, right: dict) -> None:
    assert found.keys() == right.keys(), (found, right)
    for step, numbers in found.items():
        assert numbers == pytest.approx(right[step], abs=0.0005), (step, found, right)


def written_by(folder: Path) -> dict[int, set[int]]:
    """Return, for each half of the weights, the ranks that have saved some of it.

    Ranks 0 and 2 are on one node, 1 and 3 on the other: each node has both halves.
    """
    (checkpoint,) = folder.glob("checkpoint-*")
    metadata = FileSystemReader(checkpoint).read_metadata()
    ranks = {0: set(), 1: set()}
    for index, place in metadata.storage_data.items():
        if index.offset:
            ranks[index.offset[0] > 0].add(int(place.relative_path.split("_")[2]))
    return ranks


@pytest.mark.parametrize(
    "kind, dtype, number, options",
    [
        ("llama", "bfloat16", 3, ["--micro-batch-size", "2"]),
        ("qwen3", "float32", 4, ["--copies", "2"]),
    ],
)
def test_as_one_process(ranks, make, kind, dtype, number, options):
    """Losses, norms and the saved model are those of a training without FSDP."""
    folder = make(kind, dtype)
    (folder / "pretrained").chmod(0o555)
    ended = ranks(folder, *FLAGS, *options, ranks=number)
    assert [result.exit_code for result in ended] == [0] * number, ended
    assert ended[0].find("^Saved ./model$"), ended
    if "--copies" in options:
        assert written_by(folder) == {0: {0, 1}, 1: {2, 3}}
    assert (folder / "model").stat().st_mode & 0o200
    flags = ["train", "pretrained", "model", *FLAGS[1::2]]
    (plain,) = ranks(folder, *flags, script=MODELS)
    assert plain.exit_code == 0, plain
    assert_near(steps(ended[0]), steps(plain))
    far, saved, temperature, text = json.loads(plain.output.splitlines()[-1])
    assert (saved, temperature, text) == (f"torch.{dtype}", 0.6, "user")
    assert far < (0.01 if dtype == "bfloat16" else 0.0005)


def test_stopped(ranks, make, qwen3):
    """Dropout goes on as it would have; a full disk costs nothing that was saved."""
    folder = make("qwen3", "float32", "0.5")
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", disk]
    subprocess.run(mount, check=True)

    def run(number: int = 2, full: bool = False, **options) -> Result:
        filler = disk / "filler"
        if full:
            filler.write_bytes(bytes(shutil.disk_usage(disk).free - 60_000))
        ended = ranks(folder, *FLAGS, ranks=number, RUN_DIR="disk", **options)
        filler.unlink(missing_ok=True)
        assert len({result.exit_code for result in ended}) == 1, ended
        assert "Traceback" not in ended[0].output, ended
        return ended[0]

    whole = ranks(folder, *FLAGS, ranks=2, RUN_DIR=str(folder))[0]
    # Dropout is there.
    (qwen3 / "without").mkdir()
    without = ranks(qwen3, *FLAGS, "--epochs=1", ranks=2, RUN_DIR="without")[0]
    assert steps(without)[0] != steps(whole)[0], without
    stopped = run(warn_at="Step 1:")
    assert stopped.exit_code == 75 and len(steps(stopped)) < len(steps(whole)), stopped
    (saved,) = disk.glob("checkpoint-*")
    assert stopped.find("^Saved disk/(.*)$") == [saved.name], stopped
    good = {path: path.read_bytes() for path in saved.iterdir()}
    failed = run(full=True)
    last = f"checkpoint-{len(steps(whole))}"
    assert failed.exit_code == 1, failed
    assert failed.find(rf"^{ERROR}{last}: disk full\? .*(No space|unexpected pos)"), (
        failed
    )
    assert good == {path: path.read_bytes() for path in saved.iterdir()}
    assert {*os.listdir(disk)} == {"lock", saved.name}  # the rest would fill the disk
    resumed = run()
    assert resumed.exit_code == 0, resumed
    assert_near(steps(stopped) | steps(resumed), steps(whole))
    assert {*os.listdir(disk)} == {"lock", last, "model"}
    assert not (disk / "model" / "sharded").exists()  # what the ranks have written
    right = (disk / "model" / "model-00001-of-00001.safetensors").read_bytes()
    again = run()
    assert again.find(f"^{ERROR}disk/model is there already$"), again
    (folder / "past").mkdir()
    for other, told in (
        ("--epochs=1", "'epochs': 2, .*'epochs': 1"),
        ("--batch-size=6", "'batch_size': 12, .*'batch_size': 6"),
    ):
        (past,) = ranks(folder, *FLAGS, other, f"--resume=disk/{last}", RUN_DIR="past")
        assert past.exit_code == 1 and not steps(past), past
        assert past.find(rf"^{ERROR}disk/{last} is of .*{told}"), past
    (again,) = ranks(folder, *FLAGS, f"--resume=disk/{last}", RUN_DIR="past")
    assert again.find("^Saved past/model$") and not steps(again), again
    shutil.rmtree(disk / "model")
    failed = run(3, full=True)
    assert failed.exit_code == 1 and not steps(failed), failed
    assert failed.find(rf"^{ERROR}model: disk full\? "), failed
    assert run().find("^Saved disk/model$")
    assert {*os.listdir(disk)} == {"lock", last, "model"}
    saved = (disk / "model" / "model-00001-of-00001.safetensors").read_bytes()
    assert saved == right


def test_errors(ranks, make):
    """One line says what is wrong."""
    folder = make("llama")
    for name in ("qwen3", "wide", "shallow", "talks", "fp8"):
        shutil.copytree(folder / "pretrained", folder / name)
    shutil.copy(make("qwen3") / "pretrained" / "config.json", folder / "qwen3")
    config = folder / "wide" / "config.json"
    config.write_text(config.read_text().replace('_size": 48', '_size": 64'))
    config = json.loads((folder / "pretrained" / "config.json").read_text())
    shallow = config | {"num_hidden_layers": config["num_hidden_layers"] - 1}
    (folder / "shallow" / "config.json").write_text(json.dumps(shallow))
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "fp8" / "config.json").write_text(json.dumps(config))
    shutil.copytree(make("opt") / "pretrained", folder / "opt")
    wrong = {
        "--model=none": "no model in none",
        "--batch-size=5": "no batch of 5 on 2 ranks, . samples at a time",
        "--epochs=0": "batches, --copies and --epochs are at least 1",
        "--resume=none": "no checkpoint in none",
        "--model=shallow": r"shallow: not in its model: model.layers.\d.*",
        "--batch-size=1000": r"\d+ samples, and a step takes 1000",
        "--copies=4": "no 4 copies on 2 ranks",
        "--model=qwen3": "qwen3: Missing key in checkpoint state_dict: .*_norm.*",
        "--model=wide": r"wide: .*[sS]ize.* torch.Size\(\[.*",
        "--model=fp8": "fp8 is quantized: take the model in bfloat16",
        "--model=opt": "in this model, documents of a sample are mixed",
        "--learning-rate=1e30": "NaN in the gradients of step 1",
    }
    for argument, error in wrong.items():
        for result in (ended := ranks(folder, *FLAGS, argument, ranks=2)):
            assert result.exit_code and "Traceback" not in result.output, ended
        assert re.fullmatch(ERROR + error, ended[0].output.splitlines()[-1]), ended
    (folder / "lock").unlink()
    (folder / "lock").mkdir()
    (ended,) = ranks(folder, *FLAGS)
    assert ended.output == f"{ERROR}cannot lock the folder: Is a directory\n"
    (folder / "lock").rmdir()
    (ended,) = ranks(folder, SLURM_NTASKS="4")
    assert ended.output == f"{ERROR}this is no task of the job: start it with srun\n"
    template = folder / "talks" / "chat_template.jinja"
    template.write_text("{{ messages | length }}" + template.read_text())
    flags = ["talks", "data.jsonl", "32"]
    (ended,) = ranks(folder, *flags, script=SCRIPTS / "pack.py")
    assert ended.output == "pack.py: error: line 2: no prompt at its beginning\n"
    flags = ["pretrained", "data.jsonl", "1000000"]
    (ended,) = ranks(folder, *flags, script=SCRIPTS / "pack.py")
    assert ended.find(r"^pack.py: error: \d+ tokens are no sample of 1000000$"), ended
    (folder / "data.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xe9"}')
    (ended,) = ranks(folder, *flags, script=SCRIPTS / "pack.py")
    assert ended.find("^pack.py: error: line 2: UnicodeDecodeError"), ended
    samples = np.load(folder / "samples.npy")
    samples[:, 0] = 1000000
    np.save(folder / "samples.npy", samples)
    (ended,) = ranks(folder, *FLAGS)
    assert ended.find(f"^{ERROR}a token is not in the model's vocabulary$"), ended


@pytest.mark.usefixtures("nothing_left")
def test_job(jobs, ranks, make, frameworks):
    """By job.sh: warned, it comes back and goes on; so do fewer and more ranks."""
    folder = make("qwen3")
    (folder / ".venv").symlink_to(frameworks)
    shutil.copy(REPOSITORY / "docs" / "your_training" / "job.sh", folder)
    flags = [*FLAGS, "--epochs=6", "--learning-rate=0.0003"]

    def submit(shape: str, *more: str) -> str:
        nodes, tasks = shape.split(" x ")
        each = f"--ntasks-per-node={tasks} --gpus-per-node={tasks}"
        options = f"--nodes={nodes} {each} --cpus-per-task=1 --mem=4G".split()
        return jobs.submit(folder, *options, "job.sh", *flags, *more)

    job = submit("2 x 1")
    jobs.until(job, "^Step 2:")
    jobs.run(["scancel", "--batch", "--signal=USR1", job])
    name = jobs.until(job, rf"^Saved runs/{job}/(checkpoint-\d+)$")[1]
    shutil.copytree(folder / "runs" / job / name, folder / "kept" / name)
    result = jobs.wait(job)
    (folder / "alone").mkdir()
    right = steps(ranks(folder, *flags, ranks=2, RUN_DIR="alone")[0])
    assert (result.state, result.restarts) == ("COMPLETED", 1), result
    assert len(result.find("^Step ")) == len(right), result
    assert_near(steps(result), right)
    first = int(name.split("-")[1])
    np.save(folder / "other.npy", np.load(folder / "samples.npy")[::-1])
    shutil.copy(folder / "samples.npy", folder / "kept" / "samples.npy")
    os.replace(folder / "other.npy", folder / "samples.npy")
    (folder / "changed").mkdir()
    resumed = ["--resume", f"kept/{name}"]
    ended, _ = ranks(folder, *flags, *resumed, ranks=2, RUN_DIR="changed")
    assert ended.exit_code == 1 and ended.find(f"^{ERROR}kept/{name} is of "), ended
    os.replace(folder / "kept" / "samples.npy", folder / "samples.npy")
    for job in [
        submit(shape, "--resume", f"kept/{name}/") for shape in ("1 x 1", "2 x 2")
    ]:
        result = jobs.wait(job)
        assert result.state == "COMPLETED", result
        assert_near(steps(result), {n: right[n] for n in right if n >= first})
