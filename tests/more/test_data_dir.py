"""Where main.py looks for the data."""

import os
import re
import sys

import pytest
from PIL import Image
from slurm_jobs import REPOSITORY, call
from test_arguments import EXAMPLES, refused, run

# Nobody listens there.
OFFLINE = dict.fromkeys(["https_proxy", "http_proxy"], "http://127.0.0.1:9")
JOB = "/local/slurm-job-7-cluster"


@pytest.mark.parametrize("example", [*EXAMPLES, "imagenet"])
@pytest.mark.parametrize(
    "variables, folder",
    [
        ({"LOCAL_JOB_DIR": JOB, "SLURM_JOB_ID": "7", "SLURM_TMPDIR": "/local"}, JOB),
        ({"LOCAL_JOB_DIR": JOB, "SLURM_JOB_ID": "8"}, "."),
        ({"LOCAL_JOB_DIR": JOB, "SLURM_TMPDIR": "/local"}, "/local"),
        ({"SLURM_TMPDIR": ""}, "."),
    ],
    ids=["of this job", "of another job", "outside of a job", "empty"],
)
def test_default(example, variables, folder, tmp_path):
    """job.sh exports LOCAL_JOB_DIR. A job submitted from a job's shell inherits it."""
    status, text = run(tmp_path, example, "--help", COLUMNS="200", **variables)
    assert status == 0, text
    (said,) = re.findall(r"--data-dir .*?\(default: (.*?)\)", " ".join(text.split()))
    assert said == f"{folder}/data"


def test_home_folder_that_the_shell_has_left(tmp_path):
    """As in --data-dir=~/data. A folder called ~ would be dangerous to remove."""
    environment = OFFLINE | {"HOME": str(tmp_path)}
    line = refused(tmp_path, "multi_node", "--data-dir=~/data", **environment)
    assert f"no whole CIFAR-10 in {tmp_path}/data on " in line
    small = "--synthetic --model=dummy --image-size=32 --epochs=1 --workers=1 "
    small += "--limit-train-samples=16 --limit-valid-samples=8 --checkpoint-dir=~/new"
    # As under salloc, where nobody has made this folder yet.
    job = {"LOCAL_JOB_DIR": "/tmp/slurm-job-7-none", "SLURM_JOB_ID": "7"}
    job["SLURM_STEP_NUM_TASKS"] = "1"
    status, text = run(tmp_path, "imagenet", *small.split(), HOME=str(tmp_path), **job)
    assert status == 0 and (tmp_path / "new" / "best.pt").exists(), text
    assert {path.name for path in tmp_path.iterdir()} == {"data", "new"}
    prepare_data = REPOSITORY / "imagenet" / "prepare_data.py"
    command = [sys.executable, prepare_data, "--source=~/none", "--data-dir=~/staged"]
    text = call(command, cwd=tmp_path, env=os.environ | {"HOME": str(tmp_path)}).output
    assert f"cannot stage {tmp_path}/none in {tmp_path}/staged on " in text


def test_another_locale(tmp_path):
    """A run goes on under another one. The log has names that it cannot write, too."""
    for number, name in enumerate(["αλεπού", "猫"] * 12):
        path = tmp_path / "tree" / name / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 40), (number, 0, 0)).save(path)
    small = "--data-dir=tree --model=dummy --image-size=32 --batch-size=4 --epochs=1 "
    small += "--workers=0 --checkpoint-dir=new"
    # A process of its own: Python asks for the locale when it starts.
    command = [sys.executable, REPOSITORY / "imagenet" / "main.py", *small.split()]
    ascii = {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    for env in (ascii | {"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C.UTF-8"}):
        result = call(command, cwd=tmp_path, env=os.environ | env)
        assert result.exit_code == 0 and "2 classes, " in result.output, result
        assert "Error" not in result.output, result
    assert "Resuming from " in result.output, result
