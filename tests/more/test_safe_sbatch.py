"""What git status does not show, and a job of safe_sbatch would not have."""

import re

import pytest
import test_code_checkpointing
from slurm_jobs import call
from test_code_checkpointing import FLAGS, ONE_TASK, WITHOUT, tasks

repository = test_code_checkpointing.repository
TEST_ONLY = ["./safe_sbatch", "--test-only", *FLAGS, "job.sh"]


@pytest.mark.parametrize("mark", ["skip-worktree", "assume-unchanged"])
def test_hidden_edits(repository, mark):
    repository.must("git", "update-index", f"--{mark}", "main.py")
    repository.must(*TEST_ONLY)
    repository.write("main.py", "an edit")
    assert repository.must("git", "status", "--porcelain") == ""
    edit = " M imagenet/main.py (hidden by git update-index)"
    assert repository.refused() == f"{WITHOUT}\n{edit}\n"
    assert repository.must("git", "ls-files", "-v", "main.py")[0] in "hS"  # as before


def test_submodule(repository):
    """In the repository's other folder, with a name that git quotes."""
    library = repository.root / "my \u00fc"
    for command in ("init -q", "commit -q --allow-empty -m Now"):
        git = f"git -c user.name=tests -c user.email=tests {command}".split()
        library.mkdir(exist_ok=True)
        assert call(git, cwd=library).exit_code == 0
    repository.commit()
    assert repository.must("git", "status", "--porcelain") == ""
    assert repository.refused() == f'{WITHOUT}\nsubmodule "../my \\303\\274"\n'


def test_ignored_files(repository, tmp_path):
    """They are named, but for those that many have and no job needs.

    These may be links, too. They stay as they are.
    """
    ignored = ["settings.ignored", "\u00fc.ignored", "../lib.ignored/module.py", ".env"]
    usual = ["slurm-8.out", "model-8.pt", "__pycache__/main.pyc"]
    for name in [*ignored, *usual]:
        (repository.folder / name).parent.mkdir(exist_ok=True)
        repository.write(name, "")
    for name in ("../.venv", "data", "checkpoints"):
        (repository.folder / name).symlink_to(tmp_path)
    repository.must("git", "config", "status.showUntrackedFiles", "no")
    output = repository.must(*TEST_ONLY)
    (told,) = re.findall("^safe_sbatch: not in .* ignores it: (.*)$", output, re.M)
    assert sorted(told.split(", ")) == sorted(
        [
            "imagenet/settings.ignored",
            '"imagenet/\\303\\274.ignored"',
            "lib.ignored/",
            "imagenet/.env",
        ]
    ), output
    assert (repository.folder / "data").is_symlink()


def test_sparse_checkout(repository):
    """What is not checked out here reaches the job, too."""
    (repository.root / "others").mkdir()
    repository.write("../others/sweep.txt", "--name=sparse")
    repository.commit()
    repository.must("git", "sparse-checkout", "set", "imagenet")
    assert not (repository.root / "others").exists()
    flags = [*ONE_TASK, "--array=1", f"--output={repository.logs}/%A_%a.out"]
    job = repository.safe_sbatch(*flags, "job.sh", "@../others/sweep.txt")
    result = repository.wait(f"{job}_1")
    (task,) = tasks(result.output)
    assert (result.state, task["arguments"]) == ("COMPLETED", ["--name=sparse"]), result
