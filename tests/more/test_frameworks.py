"""docs/your_training: Lightning, Trainer and Accelerate, stopped in mid-epoch."""

import os
import re
import shutil
import signal
import subprocess
import textwrap
from pathlib import Path

import pytest
from slurm_jobs import REPOSITORY, Jobs, call, every_case, listing

SCRIPTS = REPOSITORY / "docs" / "your_training"
FLAGS = "--nodes=2 --ntasks-per-node=1 --gpus-per-node=1 --cpus-per-task=1 --mem=4G"
# An epoch and its loss, in the words of the script or the library.
LINES = {
    "accelerate": r"^Epoch (\d+: loss \d\.\d{4}.*)$",
    "lightning": r"^Epoch (\d+: loss \d\.\d{4}.*)$",
    "trainer": r"^\{('eval_loss': '\S*'), .*( 'epoch': '\d+')\}$",
}


CASES = ["plain", "epochs of five steps", "crops and workers", "its own state"]
# A loader with these has workers, and samples that are not the same in each epoch.
CROPS = """
import random

import numpy as np


class Crops(list):
    def __getitem__(self, index):
        sample = super().__getitem__(index)
        if index == 0:
            os.write(1, b"drawn in epoch %d\\n" % train_set.epoch)
        x, y = sample.values() if isinstance(sample, dict) else sample
        x = x + 0.4 * torch.rand(2) * random.random() * np.random.rand()
        return {"inputs": x, "labels": y} if isinstance(sample, dict) else (x, y)


def collate(rows):
    batch = torch.utils.data.default_collate(rows)
    inputs = batch["inputs"] if isinstance(batch, dict) else batch[0]
    inputs += 0.1 * torch.rand(len(inputs), 1)
    return batch


your_data = Crops([dataset[i] for i in range(len(dataset))])
train_set = Seeded()
"""
# What it changes in each script; the page's lines come above the last of them.
WORKERS = "DataLoader(train_set, 64, num_workers=2, collate_fn=collate,"
WITH_CROPS = {
    "accelerate": {
        "DataLoader(dataset, 64,": WORKERS,
        "    loader.set_epoch": "    loader.dataset.epoch =",
    },
    "lightning": {
        "DataLoader(dataset, 64,": WORKERS,
        "DataLoader(dataset, 4096)": "DataLoader(Seeded(), 4096, num_workers=1)",
        "Sampler(dataset": "Sampler(train_set",
        "    def __iter__": "    def set_epoch",
    },
    "trainer": {
        "train_dataset=dataset": "data_collator=collate, train_dataset=train_set",
        "eval_dataset=dataset": "eval_dataset=Seeded()",
        "    disable_tqdm": "    dataloader_num_workers=2,\n    disable_tqdm",
        "\n    def on_step_end": "    # Trainer",
    },
}


# What a library keeps from epoch to epoch: a schedule's steps, who has been patient.
SCHEDULE = "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5 * len(loader))"
EARLY = "L.pytorch.callbacks.EarlyStopping('loss', min_delta=10.0, patience=3)"
WITH_STATE = {
    "accelerate": {
        "run_dir = ": f"scheduler = accelerator.prepare({SCHEDULE})\nrun_dir = ",
        "        done += ": "        scheduler.step()\n        done += ",
        '{loss:.4f}"': '{loss:.4f} rate {scheduler.get_last_lr()[0]:.6f}"',
    },
    "lightning": {"[SaveAndStop()]": f"[SaveAndStop(), {EARLY}]"},
    "trainer": {
        "import Trainer,": "import EarlyStoppingCallback, Trainer,",
        "[SaveAndStop()]": "[EarlyStoppingCallback(3, 10.0), SaveAndStop()]",
        "    disable_tqdm": "    save_strategy='epoch',\n    disable_tqdm",
        "    ddp_find": """    load_best_model_at_end=True,
    metric_for_best_model="loss",
    train_sampling_strategy="group_by_length",
    length_column_name="length",
    ddp_find""",
        "args = Training": """from datasets import Dataset
lengths = (points[:, 0] * 7).int().tolist()
dataset = {"inputs": points, "labels": targets, "length": lengths}
dataset = Dataset.from_dict(dataset).with_format("torch")
args = Training""",
        "inputs, labels)": "inputs, labels, length=None)",
    },
}


def change(text: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def add_crops(name: str, text: str) -> str:
    """Return a framework's script with random crops and workers, as the page says."""
    data_set = re.search(r"^dataset = .*\n", text, re.M)[0]
    seeded = textwrap.dedent(listing("your_training.rst", "class Seeded"))
    head, made = CROPS.split("your_data = ")
    text = text.replace(data_set, f"{data_set}{head}{seeded}\n\nyour_data = {made}")
    *changes, (place, page_lines) = WITH_CROPS[name].items()
    lines = listing("your_training.rst", page_lines.strip())
    return change(text, dict([*changes, (place, lines + place)]))


@pytest.fixture(scope="module")
def environment(frameworks) -> Path:
    """Its modules are compiled once, and not by each rank at the same time."""
    imports = "import lightning; from transformers import Trainer"
    subprocess.run([frameworks / "bin" / "python", "-c", imports], check=True)
    return frameworks


def submit(jobs: Jobs, folder: Path, name: str, case: str, environment: Path) -> str:
    """Submit a framework's script in a folder of its own; return the job's number."""
    folder.mkdir()
    for file in (SCRIPTS / "job.sh", REPOSITORY / "imagenet" / "resume.py"):
        shutil.copy(file, folder)
    text = (SCRIPTS / name / "main.py").read_text()
    if case == "epochs of five steps":
        text = text.replace("16384", "640").replace("(first, 5)", "(first, 60)")
        text = text.replace("epochs=5", "epochs=60")
    if case == "crops and workers":
        text = add_crops(name, text)
    if case == "its own state":
        text = change(text, WITH_STATE[name])
    (folder / "main.py").write_text(text)
    (folder / ".venv").symlink_to(environment)
    return jobs.submit(folder, *FLAGS.split(), "job.sh", OMP_NUM_THREADS="1")


def losses(log: str, line: str) -> list[str]:
    """Return the losses in a log. Trainer prints each on every node."""
    return list(dict.fromkeys(re.findall(line, log, re.MULTILINE)))


def interrupt(jobs: Jobs, job: str, line: str, number: signal.Signals):
    """Signal a job's ranks after one more epoch; return when it is back."""
    before = len(losses(jobs.log(job), line))

    def trained() -> bool:
        return len(losses(jobs.log(job), line)) > before

    jobs.until_found(job, trained, "another epoch", 300, pause=0.01)
    jobs.interrupt(job, "^Job", number)
    starts = len(re.findall("^Job .* on ", jobs.log(job), re.MULTILINE))
    jobs.until(job, rf"(?s)(^Job .*){{{starts + 1}}}")


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", every_case(*LINES))
def test_goes_on_in_the_middle_of_an_epoch(jobs, environment, tmp_path, name, case):
    """Warned of the time limit, then of a preemption: the losses are the same."""
    line = LINES[name]
    job = submit(jobs, tmp_path / "stopped twice", name, case, environment)
    interrupt(jobs, job, line, signal.SIGUSR1)
    interrupt(jobs, job, line, signal.SIGTERM)
    undisturbed = submit(jobs, tmp_path / "undisturbed", name, case, environment)
    result, expected = jobs.wait(job), jobs.wait(undisturbed)
    assert (result.state, expected.state) == ("COMPLETED", "COMPLETED"), result
    assert result.restarts == 2, result
    epochs = 60 if case == "epochs of five steps" else 5
    if case == "its own state" and name != "accelerate":
        epochs = 4  # the first, and three without progress
    assert len(losses(expected.output, line)) == epochs, expected
    assert losses(result.output, line) == losses(expected.output, line), result
    if case == "crops and workers":  # Trainer may draw the sample a second time
        drawn = dict.fromkeys(expected.find("^drawn in epoch (.)"))
        assert list(drawn) == list("01234"), expected
    if case == "its own state" and name == "accelerate":
        assert losses(expected.output, line)[-1].endswith("rate 0.000000"), expected


def test_fewer_samples_than_a_batch(environment, tmp_path):
    """Accelerate would save a model that has not been trained, with status 0."""
    text = (SCRIPTS / "accelerate" / "main.py").read_text().replace("16384", "60")
    (tmp_path / "main.py").write_text(text)
    shutil.copy(REPOSITORY / "imagenet" / "resume.py", tmp_path)
    alone = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    alone |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    command = [environment / "bin" / "python", "main.py"]
    result = call(command, cwd=tmp_path, env=os.environ | alone)
    assert result.exit_code == 1, result
    assert result.output.endswith("main.py: error: 60 samples are too few\n"), result
    assert not list(tmp_path.glob("checkpoint-*")), result
