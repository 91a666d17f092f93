"""The site of CONTRIBUTING.rst: no link is broken, and its diffs are whole."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from slurm_jobs import REPOSITORY, call, copy_tracked, tracked
from update_readmes import DIFFS, page_of

# The group docs is not in .venv. It gets an environment of its own,
# of 29 small packages: 4 s.
COMMAND = "uv run --isolated --only-group docs --locked "
COMMAND += "sphinx-build -W -c docs/site . site"


class Page:
    """What Sphinx and docs/site/templates have written, with `"` around every value."""

    def __init__(self, path: Path):
        self.path = path
        text = path.read_text(encoding="utf-8")
        self.ids = {html.unescape(name) for name in re.findall(r'\sid="(.*?)"', text)}
        links = re.findall(r'\s(?:href|src)="(.*?)"', text)
        self.links = [html.unescape(link) for link in links]
        # Of a diff: kind, line number, text, and whether words of it are changed.
        cell = '<td class="(.*?)" data-line="(.*?)">(.*?)</td>'
        self.cells = [
            (
                kind,
                number,
                html.unescape(re.sub("<.*?>", "", code)),
                ' changed">' in code,
            )
            for kind, number, code in re.findall(cell, text)
        ]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> dict[str, Page]:
    """The pages of the site, by their path in it."""
    folder = tmp_path_factory.mktemp("site")
    # Pages of a user's own would be on the site of their clone, not on this one.
    pages = copy_tracked(REPOSITORY, tmp_path_factory.mktemp("pages"))
    command = [*COMMAND.split()[:-1], str(folder)]
    result = call(command, cwd=pages)
    assert result.exit_code == 0, result
    return {
        str(path.relative_to(folder)): Page(path.resolve())
        for path in folder.rglob("*.html")
    }


def test_the_command_is_the_documented_one():
    assert f"\n    {COMMAND}\n" in (REPOSITORY / "CONTRIBUTING.rst").read_text()


def test_every_page_is_there(site):
    sources = [path for path in tracked() if path.suffix == ".rst"]
    sources.remove(Path("tests/first_aid.rst"))  # what a session of its test prints
    pages = {str(path.with_suffix(".html")) for path in sources}
    diffs = {f"diff/{new}.html" for _, new in DIFFS}
    assert site.keys() == pages | diffs | {"index.html", "search.html"}


def test_no_link_is_broken(site):
    pages = {page.path: page for page in site.values()}
    checked = 0
    for page in site.values():
        for link in page.links:
            parts = urlsplit(link)
            if not parts.scheme and not parts.netloc:
                target = page.path
                if parts.path:
                    target = (page.path.parent / unquote(parts.path)).resolve()
                assert target.is_file(), f"{page.path}: {link}"
                if parts.fragment:
                    assert unquote(parts.fragment) in pages[target].ids, (
                        f"{page.path}: {link}"
                    )
                    checked += 1
    assert checked


def test_a_search_shows_what_each_page_is_about(site):
    titles = set()
    for name, page in site.items():
        text = page.path.read_text()
        description = re.search(r'<meta name="description" content="(.*?)">', text)[1]
        assert len(description.split()) >= 5, name
        titles.add(re.search("<title>(.*?)</title>", text)[1])
    # Each page has its own, but index.html leads to the first page.
    assert len(titles) == len(site) - 1
    index = site["index.html"].path.with_name("searchindex.js").read_text()
    assert '"Single GPU: train on one GPU with PyTorch"' in index


def test_first_aid_begins_with_its_contents(site):
    """Not only in the theme's column, which a narrow window does not show."""
    text = site["docs/first_aid/ranks.html"].path.read_text()
    contents = re.search(r'<nav class="contents[ "].*?</nav>', text, re.S)[0]
    page = (REPOSITORY / "docs" / "first_aid" / "ranks.rst").read_text()
    sections = re.findall(r"^(\S.*)\n[=-]+$", page, re.MULTILINE)[1:]
    assert len(re.findall("<li>", contents)) == len(sections) > 10


def test_the_box_on_first_aid_knows_what_explain_knows(site):
    """Without node, its data is checked, but its script does not run."""
    static = site["docs/first_aid.html"].path.parent.parent / "_static"
    messages = (static / "messages.js").read_text()
    entries = json.loads(re.search("^const ENTRIES = (.*);$", messages, re.M)[1])
    for entry in entries:
        path, anchor = entry["link"].split("#")
        assert anchor in site[f"docs/{path}"].ids
        assert "`__" not in entry["answer"]
    if not shutil.which("node"):
        return
    lines = (
        r"World size 8\n[c10d] The hostname of the client socket cannot be retrieved."
    )
    lines += r" err=-3\nsrun: error: n7: task 3: Out Of Memory"
    code = messages + (static / "explain.js").read_text()
    code += (
        f'; console.log(findEntries("{lines}").map((f) => f.entry.link).join("\\n"))'
    )
    output = subprocess.check_output(["node", "-e", code], text=True)
    first, second = output.split()
    assert first == "first_aid/ranks.html#message-out-of-memory"
    assert "hostname-of-the-client" in second  # harmless


@pytest.mark.parametrize("old, new", DIFFS)
def test_diff_is_whole(site, old, new):
    texts = [(REPOSITORY / name).read_text().splitlines() for name in (old, new)]
    cells = site[f"diff/{new}.html"].cells
    columns = (cells[::2], cells[1::2])
    for side, column, text in zip(("old", "new"), columns, texts, strict=True):
        lines = [cell for cell in column if cell[0] != "none"]
        expected = [(str(number), line) for number, line in enumerate(text, 1)]
        assert [cell[1:3] for cell in lines] == expected
        # The changed words are in changed lines.
        assert {cell[0] for cell in lines if cell[3]} == {side}
    for left, right in zip(*columns, strict=True):
        assert (left[0] == "same") == (right[0] == "same")
        assert left[0] != "same" or left[2] == right[2]
    link = "../" + f"diff/{new}.html"
    # The menu's link, and that of the page itself.
    assert site[f"{page_of(new)}.html"].links.count(link) >= 2
