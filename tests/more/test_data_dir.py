"""Where main.py looks for the data, and what a wrong --data-dir leaves behind."""

import re

import pytest
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


def test_folder_that_was_not_there(tmp_path):
    """It is not left behind if nothing could be downloaded; one that was there is."""
    new, empty = tmp_path / "mistyped", tmp_path / "empty"
    empty.mkdir()
    for folder in (new, empty):
        line = refused(tmp_path, "single_gpu", f"--data-dir={folder}", **OFFLINE)
        assert str(folder) in line
    assert list(tmp_path.iterdir()) == [empty]


@pytest.mark.parametrize("path", ["~/data", "$HOME/data", "${HOME}/data"])
def test_names_that_the_shell_has_left(path, tmp_path):
    """As in --data-dir=~/data, or in a file of options."""
    environment = OFFLINE | {"HOME": str(tmp_path)}
    line = refused(tmp_path, "multi_node", f"--data-dir={path}", **environment)
    assert f"no whole CIFAR-10 in {tmp_path}/data on " in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("example", ["multi_gpu", "imagenet"])
def test_variable_that_is_not_set(example, tmp_path):
    line = refused(tmp_path, example, "--data-dir=$NOWHERE/data")
    assert "--data-dir" in line and "$NOWHERE/data" in line
    assert not list(tmp_path.iterdir())
