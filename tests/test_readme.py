"""The READMEs say what the files say, and render; the diffs stay small."""

import os
import re
import sys
from collections import Counter
from pathlib import Path

import docutils.core
import docutils.nodes
import draw_batch
import draw_curves
import draw_examples
import draw_imagenet
import draw_jobs
import draw_ranks
import pytest
import update_readmes
from slurm_jobs import REPOSITORY, call, listings, tracked
from update_readmes import DIFFS, page_of

TRACKED = [REPOSITORY / name for name in tracked()]  # not a user's own pages


def diff(old: str, new: str) -> list[str]:
    texts = ((REPOSITORY / name).read_text().splitlines() for name in (old, new))
    return update_readmes.diff(*texts)


def changed_lines(old: str, new: str) -> tuple[int, int]:
    """Return how many lines were added and removed, as git counts them."""
    command = ["git", "diff", "--no-index", "--numstat", old, new]
    added, removed, _ = call(command, cwd=REPOSITORY).output.split(maxsplit=2)
    return int(added), int(removed)


@pytest.mark.parametrize(
    "old, new, most_added, most_removed",
    [
        ("single_gpu/main.py", "multi_gpu/main.py", 78, 16),
        ("multi_gpu/main.py", "multi_node/main.py", 29, 6),
        ("single_gpu/job.sh", "multi_gpu/job.sh", 18, 10),
        ("multi_gpu/job.sh", "multi_node/job.sh", 20, 10),
        ("multi_node/job.sh", "multi_node/job_torchrun.sh", 20, 11),
        ("multi_node/main.py", "imagenet/main.py", 193, 196),
        ("multi_node/job.sh", "imagenet/job.sh", 189, 30),
        # What is shared with multi_node's changes there, too.
        ("docs/your_training/before.py", "docs/your_training/main.py", 8, 6),
        ("docs/your_training/main.py", "docs/your_training/several/main.py", 45, 6),
    ],
)
def test_diffs_stay_small(old, new, most_added, most_removed):
    added, removed = changed_lines(old, new)
    assert 0 < added <= most_added and 0 < removed <= most_removed


def test_the_ladder_counts_the_lines():
    text = (REPOSITORY / "README.rst").read_text()
    lines = len((REPOSITORY / "single_gpu" / "main.py").read_text().splitlines())
    rows = dict(re.findall(r"^`(\w+) <[\w/]+.rst>`_ .*  (\S.*)$", text, re.M))
    added, removed = changed_lines(
        "docs/your_training/before.py", "docs/your_training/several/main.py"
    )
    expected = {
        "your_training": f"{added} added, {removed} removed",
        "single_gpu": f"all {lines}",
    }
    for old, new in (
        ("single_gpu", "multi_gpu"),
        ("multi_gpu", "multi_node"),
        ("multi_node", "imagenet"),
    ):
        added, removed = changed_lines(f"{old}/main.py", f"{new}/main.py")
        expected[new] = f"{added} added, {removed} removed"
    assert rows == expected


SCRIPTS = [path for path in TRACKED if re.fullmatch(r"job.*\.sh", path.name)]
SCRIPTS += ["imagenet/safe_sbatch"]
SCRIPTS += ["imagenet/code_checkpointing.sh"]
SCRIPTS += ["docs/runs/each_line", "docs/runs/gpu_report"]


PYTHON = [path for path in TRACKED if path.suffix == ".py"]


@pytest.mark.parametrize(
    "command",
    [
        [sys.executable, "docs/site/update_readmes.py", "--check"],
        ["ruff", "format", "--check", *PYTHON],
        ["ruff", "check", *PYTHON],
        ["shellcheck", *SCRIPTS],
    ],
    ids=["pages are up to date", "ruff format", "ruff check", "shellcheck"],
)
def test_check(command):
    assert len(SCRIPTS) == 10
    result = call(command, cwd=REPOSITORY)
    assert result.exit_code == 0, result


@pytest.mark.parametrize("old, new", DIFFS)
def test_the_page_shows_every_hunk_once(old, new):
    """But for imagenet's, which shows some."""
    page = REPOSITORY / f"{page_of(new)}.rst"
    names = " ".join(
        os.path.relpath(REPOSITORY / name, page.parent) for name in (new, old)
    )
    parts = re.findall(
        rf"^\.\. begin {names}(?:: [^\n]+)?\n(.*?)^\.\. end {names}",
        page.read_text(),
        re.M | re.S,
    )
    shown = [line[3:] for part in parts for line in part.splitlines()]
    shown, changed = (
        Counter(row for row in rows if row[:1] in ("+", "-") and row[1:].strip())
        for rows in (shown, diff(old, new))
    )
    assert shown
    assert not shown - changed, "shown more than once, or not in the diff"
    if page.parent.name != "imagenet":
        assert not changed - shown, "not shown"


def test_the_page_shows_the_first_job_script():
    """All that `main` calls; the page links to what guards."""
    page = (REPOSITORY / "single_gpu" / "README.rst").read_text()
    parts = re.findall(
        r"^\.\. begin job.sh: [^\n]+\n\n.. code-block:: bash\n(.*?)^\.\. end job.sh",
        page,
        re.M | re.S,
    )
    shown = [line[3:] for part in parts for line in part.splitlines() if line]
    script = (REPOSITORY / "single_gpu" / "job.sh").read_text()
    story, guards = script.split("\n# Checks before the training.\n")
    assert shown == [line for line in story.splitlines() if line]
    assert guards.endswith('\nset -euo pipefail\nmain "$@"\n')


PAGES = [path for path in TRACKED if path.suffix == ".rst"]


@pytest.mark.parametrize(
    "path", PAGES, ids=lambda path: str(path.relative_to(REPOSITORY))
)
def test_pages_render_without_a_warning(path):
    text = path.read_text()
    strict = {"report_level": 1, "halt_level": 1}
    page = docutils.core.publish_doctree(text, str(path), settings_overrides=strict)
    for target in re.findall(r"<(?!http)([^<>#]+)(?:#[^<>]*)?>`_|image:: (\S+)", text):
        assert (path.parent / "".join(target)).exists(), target
    # In a simple table, more text in the first column begins another row.
    rows = [row for body in page.findall(docutils.nodes.tbody) for row in body]
    torn = [row.astext() for row in rows if not all(cell.astext() for cell in row)]
    assert not torn


def test_pictures_are_up_to_date():
    scripts = (draw_batch, draw_curves, draw_examples, draw_imagenet, draw_jobs)
    pictures = {"ranks.svg": draw_ranks.draw} | {
        k: draw for script in scripts for k, draw in script.PICTURES.items()
    }
    for name, draw in pictures.items():
        assert (REPOSITORY / "docs" / "pictures" / name).read_text() == draw(), name
    shown = {
        Path(name).name
        for page in PAGES
        for name in re.findall(r"image:: (\S+)", page.read_text())
    }
    assert (
        shown
        == pictures.keys()
        == {path.name for path in (REPOSITORY / "docs" / "pictures").glob("*.svg")}
    )


def test_the_test_command_is_the_one_that_ci_runs():
    def words(text: str) -> str:
        return " ".join(text.replace("\\\n", " ").split())

    page = (REPOSITORY / "README.rst").read_text()
    (command,) = listings(page, "Tests")
    script = words((REPOSITORY / ".ci" / "run").read_text())
    assert words(command) in script
    # Slurm is installed in the same words where there is no cluster.
    install = words(listings(page, r"No cluster at hand\?")[0].split("\nuv ")[0])
    assert install.partition("install")[2] in words(command)
    first, _ = listings(page, "Try it here")
    assert f"({first})" in script
