"""What README.rst has a newcomer type does what it shows there."""

import os
import re
import sys
import textwrap
from pathlib import Path

import pytest
from slurm_jobs import REPOSITORY, call, listings

PAGE = (REPOSITORY / "README.rst").read_text()
# Times, and what a network learns, which differs a little from processor to processor.
MEASURED = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d|\d+\.\d{3}\b|\d+\.\d\d%|\d+(?= images/s)"
)


def test_try_it_here(clone, tmp_path):
    """Without uv at first."""
    *_, install = listings(PAGE, "Get it")
    train, shown = listings(PAGE, "Try it here")
    env = os.environ | {"HOME": str(tmp_path)}
    # uv's and pip's caches and settings stay those of this user.
    for name, folder in (("CACHE", ".cache"), ("CONFIG", ".config")):
        env.setdefault(f"XDG_{name}_HOME", str(Path.home() / folder))
    # An environment of uv, as this one may be, has no pip.
    env.pop("VIRTUAL_ENV", None)
    path = env["PATH"].split(os.pathsep)
    here = str(Path(sys.executable).parent)
    env["PATH"] = os.pathsep.join(folder for folder in path if folder != here)
    result = call(["bash", "-ec", f"{install}\n{train}"], cwd=clone, env=env)
    output = re.sub(r"[^\n]*\r", "", result.output)  # without progress bars
    assert result.exit_code == 0, output
    assert (tmp_path / ".uv" / "bin" / "uv").exists(), output
    assert "Successfully installed uv" in output
    output = output.replace(str(clone), "/home/you/pytorch_on_slurm")
    lines = [MEASURED.sub("…", line) for line in output.splitlines()]
    expected = [MEASURED.sub("…", line) for line in shown.splitlines()]
    assert lines[-len(expected) :] == expected
    (accuracy,) = re.findall(r"^Test loss .* accuracy (.*)%$", output, re.M)
    assert float(accuracy) >= 90, output
    # What the page of single_gpu has people do with the weights.
    page = (clone / "single_gpu" / "README.rst").read_text()
    script = re.search(r"\n   import torch\n.*?(?=\n\S)", page, re.S)[0]
    script = textwrap.dedent(script).replace("model-8.pt", "model-none.pt")
    paint = "import main, torch; from torchvision.io import encode_png, write_file; "
    paint += "images, labels, *_ = main.draw_synthetic(); "
    paint += "write_file('image.png', encode_png(images[0].permute(2, 0, 1))); "
    paint += "print(labels[0].item())"
    python = [clone / ".venv" / "bin" / "python", "-c"]
    shown, told = (
        call([*python, x], cwd=clone / "single_gpu") for x in (paint, script)
    )
    assert shown.output == told.output and shown.exit_code == 0, (shown, told)
    for name in ("model-none.pt", "image.png"):
        (clone / "single_gpu" / name).unlink()


def test_a_clone_on_windows(clone, tmp_path):
    """Git may be set to write Windows' line ends: bash would not run such a script."""
    command = ["git", "-c", "core.autocrlf=true", "clone", "--quiet", clone, tmp_path]
    assert call(command, cwd=tmp_path).exit_code == 0
    scripts = [tmp_path / "single_gpu/job.sh", tmp_path / "imagenet/safe_sbatch"]
    assert not any(b"\r" in script.read_bytes() for script in scripts)


@pytest.mark.usefixtures("nothing_left")
def test_your_first_job(jobs):
    """squeue shows a job that runs, and one that waits for its node, as on the page."""
    submit, shown, follow, *_ = listings(PAGE, "Your first job")
    # The fixture has made the environment.
    folder, environment, sbatch = submit.splitlines()
    assert [folder, environment] == [
        "cd single_gpu",
        "uv sync --locked --compile-bytecode",
    ]
    sbatch = sbatch.split()[1:]
    command, header, *rows = (line.split() for line in shown.splitlines())
    flags = ["--nodelist=node1", "--exclusive"]
    running = jobs.submit("single_gpu", *flags, *sbatch)
    jobs.until(running, "^Job ")
    waiting = jobs.submit("single_gpu", *flags, *sbatch)

    def columns(table: list[list[str]]) -> list[list[str]]:
        own = [header.index("USER"), header.index("TIME")]
        return [[c for i, c in enumerate(row) if i not in own] for row in table]

    expected = [header, [waiting, *rows[0][1:]], [running, *rows[1][1:]]]

    def as_expected() -> bool:
        table = jobs.run(command[1:]).output.splitlines()
        return columns([line.split() for line in table]) == columns(expected)

    # Slurm takes a moment to say what a job waits for.
    jobs.until_found(waiting, as_expected, "the page's table", 60)
    assert follow.startswith(f"tail -F slurm-{rows[0][0]}.out ")
    assert f"``scancel {rows[0][0]}`` stops a job" in PAGE
    for job in (waiting, running):
        assert jobs.cancel(job).state == "CANCELLED"
