"""docs/your_training: Lightning, Trainer and Accelerate, stopped in mid-epoch."""

import re
import shutil
import signal
import subprocess
import textwrap
from pathlib import Path

import pytest
from slurm_jobs import REPOSITORY, Jobs, every_case, listing

SCRIPTS = REPOSITORY / "docs" / "your_training"
FLAGS = "--nodes=2 --ntasks-per-node=1 --gpus-per-node=1 --cpus-per-task=1 --mem=4G"
# An epoch and its loss, in the words of the script or the library.
LINES = {
    "accelerate": r"^Epoch (\d+: loss \d\.\d{4})$",
    "lightning": r"^Epoch (\d+: loss \d\.\d{4})$",
    "trainer": r"^\{('eval_loss': '\S*'), .*( 'epoch': '\d+')\}$",
}


@pytest.fixture(scope="module")
def environment(frameworks) -> Path:
    """Its modules are compiled once, and not by each rank at the same time."""
    imports = "import lightning; from transformers import Trainer"
    subprocess.run([frameworks / "bin" / "python", "-c", imports], check=True)
    return frameworks


def submit(jobs: Jobs, folder: Path, name: str, epochs: int, environment: Path) -> str:
    """Submit a framework's script in a folder of its own; return the job's number."""
    folder.mkdir()
    shutil.copy(SCRIPTS / "job.sh", folder)
    text = (SCRIPTS / name / "main.py").read_text()
    if epochs > 5:  # of five steps each
        text = text.replace("16384", "640").replace("(first, 5)", f"(first, {epochs})")
        text = text.replace("epochs=5", f"epochs={epochs}")
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
@pytest.mark.parametrize("epochs", [5, 60])
@pytest.mark.parametrize("name", every_case(*LINES))
def test_goes_on_in_the_middle_of_an_epoch(jobs, environment, tmp_path, name, epochs):
    """Warned of the time limit, then of a preemption: the losses are the same."""
    line = LINES[name]
    job = submit(jobs, tmp_path / "stopped twice", name, epochs, environment)
    interrupt(jobs, job, line, signal.SIGUSR1)
    interrupt(jobs, job, line, signal.SIGTERM)
    undisturbed = submit(jobs, tmp_path / "undisturbed", name, epochs, environment)
    result, expected = jobs.wait(job), jobs.wait(undisturbed)
    assert (result.state, expected.state) == ("COMPLETED", "COMPLETED"), result
    assert result.restarts == 2, result
    assert len(losses(expected.output, line)) == epochs, expected
    assert losses(result.output, line) == losses(expected.output, line), result


@pytest.mark.parametrize("name", ["accelerate", "trainer"])
def test_the_page_has_the_lines_of_the_scripts(name):
    shown = textwrap.dedent(listing("your_training.rst", 'os.environ["RANK"]'))
    assert shown.strip() in (SCRIPTS / name / "main.py").read_text()
