"""The READMEs say what the files say, and render; the diffs stay small."""

import re
import subprocess
import sys
from pathlib import Path

import docutils.core
import docutils.nodes
import draw_batch
import draw_curves
import draw_examples
import draw_imagenet
import draw_ranks
import pytest
import update_readmes

REPOSITORY = Path(__file__).parent.parent
README_FILES = sorted([REPOSITORY / "README.rst", *REPOSITORY.glob("*/README.rst")])


def changed_lines(old: str, new: str) -> tuple[int, int]:
    """Return how many lines were added and removed."""
    texts = ((REPOSITORY / name).read_text().splitlines() for name in (old, new))
    marks = [line[0] for line in update_readmes.diff(*texts)]
    return marks.count("+"), marks.count("-")


@pytest.mark.parametrize(
    "old, new, most_added, most_removed",
    [
        ("single_gpu/main.py", "multi_gpu/main.py", 100, 20),
        ("multi_gpu/main.py", "multi_node/main.py", 20, 10),
        ("single_gpu/job.sh", "multi_gpu/job.sh", 15, 15),
        ("multi_gpu/job.sh", "multi_node/job.sh", 15, 15),
        ("multi_node/job.sh", "multi_node/job_torchrun.sh", 15, 15),
        ("multi_node/main.py", "imagenet/main.py", 270, 190),
        ("multi_node/job.sh", "imagenet/job.sh", 95, 30),
    ],
)
def test_diffs_stay_small(old, new, most_added, most_removed):
    added, removed = changed_lines(old, new)
    assert 0 < added <= most_added and 0 < removed <= most_removed


def test_main_py_stays_readable():
    """What is no part of the training story stands in a module beside it."""
    assert len((REPOSITORY / "imagenet" / "main.py").read_text().splitlines()) <= 600


def test_the_ladder_counts_the_lines():
    text = (REPOSITORY / "README.rst").read_text()
    lines = len((REPOSITORY / "single_gpu" / "main.py").read_text().splitlines())
    rows = dict(re.findall(r"^`(\w+) <\w+/README.rst>`_ .*  (\S.*)$", text, re.M))
    expected = {"single_gpu": f"all {lines}"}
    for old, new in (
        ("single_gpu", "multi_gpu"),
        ("multi_gpu", "multi_node"),
        ("multi_node", "imagenet"),
    ):
        added, removed = changed_lines(f"{old}/main.py", f"{new}/main.py")
        expected[new] = f"{added} added, {removed} removed"
    assert rows == expected


def test_readme_files_are_up_to_date():
    command = [sys.executable, REPOSITORY / "docs" / "update_readmes.py", "--check"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    parts = [
        re.findall("^.. begin (.*)", path.read_text(), re.MULTILINE)
        for path in README_FILES
    ]
    assert parts == [
        [],
        [
            "main.py --help",
            "job.sh ../multi_node/job.sh",
            "safe_sbatch",
            "code_checkpointing.sh",
            "main.py ../multi_node/main.py",
        ],
        ["job.sh ../single_gpu/job.sh", "main.py ../single_gpu/main.py"],
        [
            "job.sh ../multi_gpu/job.sh",
            "main.py ../multi_gpu/main.py",
            "job_torchrun.sh job.sh",
        ],
        ["main.py --help", "job.sh", "main.py"],
    ]


PAGES = [
    *README_FILES,
    REPOSITORY / "CONTRIBUTING.rst",
    *sorted((REPOSITORY / "docs").glob("*.rst")),
]


@pytest.mark.parametrize(
    "path", PAGES, ids=lambda path: str(path.relative_to(REPOSITORY))
)
def test_pages_render_without_a_warning(path, tmp_path):
    command = [
        sys.executable,
        "-m",
        "docutils",
        "--strict",
        path,
        tmp_path / "out.html",
    ]
    result = subprocess.run(command, capture_output=True, text=True, cwd=path.parent)
    assert result.returncode == 0 and not result.stderr, result.stderr
    for target in re.findall(
        r"<(?!http)([^<>#]+)(?:#[^<>]*)?>`_|image:: (\S+)", path.read_text()
    ):
        assert (path.parent / "".join(target)).exists(), target


# In the fault matrix, an empty cell says that a case was not run.
@pytest.mark.parametrize(
    "path",
    [page for page in PAGES if page.stem != "fault_matrix"],
    ids=lambda p: str(p.relative_to(REPOSITORY)),
)
def test_no_row_of_a_table_is_torn(path):
    """In a simple table, more text in the first column begins another row."""
    page = docutils.core.publish_doctree(
        path.read_text(), settings_overrides={"report_level": 5}
    )
    rows = [row for body in page.findall(docutils.nodes.tbody) for row in body]
    assert not [row.astext() for row in rows if not all(cell.astext() for cell in row)]


def test_pictures_are_up_to_date():
    scripts = (draw_batch, draw_curves, draw_examples, draw_imagenet)
    pictures = {"ranks.svg": draw_ranks.draw} | {
        k: draw for script in scripts for k, draw in script.PICTURES.items()
    }
    for name, draw in pictures.items():
        assert (REPOSITORY / "docs" / name).read_text() == draw(), name
    shown = {
        Path(name).name
        for page in PAGES
        for name in re.findall(r"image:: (\S+)", page.read_text())
    }
    assert (
        shown
        == pictures.keys()
        == {path.name for path in (REPOSITORY / "docs").glob("*.svg")}
    )


def test_the_test_command_is_the_one_that_ci_runs():
    def words(text: str) -> str:
        return " ".join(text.replace("\\\n", " ").split())

    block = re.search(
        r"^    apt-get update .*?uv run pytest$",
        (REPOSITORY / "README.rst").read_text(),
        re.M | re.S,
    )
    assert words(block[0]) in words((REPOSITORY / ".ci" / "run").read_text())


@pytest.mark.parametrize("command", [["format", "--check"], ["check"]])
def test_ruff(command):
    result = subprocess.run(
        ["ruff", *command, REPOSITORY], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout


def test_shellcheck():
    scripts = [
        *REPOSITORY.glob("*/job*.sh"),
        REPOSITORY / "imagenet" / "safe_sbatch",
        REPOSITORY / "imagenet" / "code_checkpointing.sh",
    ]
    assert len(scripts) == 7
    result = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
