"""A project of one's own, as docs/your_training.rst has people make it."""

import re
import shutil
from pathlib import Path

import pytest
from slurm_jobs import REPOSITORY, Jobs


def listing(page: str, first_words: str) -> str:
    """Return the literal block of a page that begins so."""
    text = (REPOSITORY / "docs" / page).read_text()
    return re.search(rf"^    {re.escape(first_words)}.*\n(    .*\n)*", text, re.M)[0]


def type_in(jobs: Jobs, folder: Path, typed: str) -> None:
    env = {"PYTORCH_ON_SLURM": str(jobs.clone)}
    result = jobs.run(["bash", "-euc", typed], folder, 600, **env)
    assert result.exit_code == 0, result


@pytest.fixture(scope="session")
def project(jobs: Jobs, tmp_path_factory) -> Path:
    """It has single_gpu's job.sh."""
    folder = tmp_path_factory.mktemp("a project")
    blocks = [listing("your_training.rst", words) for words in ("uv init", "sed ")]
    type_in(jobs, folder, "".join(blocks))
    (project,) = folder.iterdir()
    return project


@pytest.fixture(scope="session")
def several(jobs: Jobs, project: Path):
    """Return what makes a folder in it, with multi_node's job.sh and a script."""
    words = r"""sed 's|\.\./\.venv|.venv|' "$PYTORCH_ON_SLURM/multi_node"""
    typed = listing("your_training.rst", words)

    def make(script: Path) -> Path:
        folder = project / script.parent.name
        folder.mkdir()
        (folder / ".venv").symlink_to(project / ".venv")
        type_in(jobs, folder, typed)
        shutil.copy(script, folder / "main.py")
        return folder

    return make
