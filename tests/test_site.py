"""The site of CONTRIBUTING.rst: no link is broken, and its diffs are whole."""

import subprocess
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import update_readmes
from update_readmes import DIFFS

REPOSITORY = Path(__file__).parent.parent
# The group docs is not in .venv. It gets an environment of its own,
# of 28 small packages: 4 s.
COMMAND = "uv run --isolated --only-group docs --locked sphinx-build -W -c docs . site"


class Page(HTMLParser):
    def __init__(self, path: Path):
        super().__init__()
        self.path = path
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.cells: list[
            list[str]
        ] = []  # of a diff: kind, line number, text and changed words
        self.in_cell = self.changed = False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids |= {attrs["id"]} if "id" in attrs else set()
        self.links += [attrs[name] for name in ("href", "src") if name in attrs]
        if tag == "td":
            self.in_cell = True
            self.cells.append(
                [attrs.get("class", ""), attrs.get("data-line", ""), "", ""]
            )
        self.changed = tag == "span" and "changed" in attrs.get("class", "").split()

    def handle_data(self, data):
        if self.in_cell:
            self.cells[-1][2] += data
            self.cells[-1][3] += data if self.changed else ""

    def handle_endtag(self, tag):
        self.changed = False
        self.in_cell = self.in_cell and tag != "td"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> dict[str, Page]:
    """The pages of the site, by their path in it."""
    folder = tmp_path_factory.mktemp("site")
    command = [*COMMAND.split()[:-1], str(folder)]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return {
        str(path.relative_to(folder)): Page(path) for path in folder.rglob("*.html")
    }


def test_the_command_is_the_documented_one():
    assert f"\n    {COMMAND}\n" in (REPOSITORY / "CONTRIBUTING.rst").read_text()


def test_every_page_is_there(site):
    sources = [
        *REPOSITORY.glob("*.rst"),
        *REPOSITORY.glob("*/*.rst"),
        *REPOSITORY.glob("docs/*/*.rst"),
    ]
    pages = {str(path.relative_to(REPOSITORY).with_suffix(".html")) for path in sources}
    diffs = {f"diff/{new}.html" for _, new in DIFFS}
    assert site.keys() == pages | diffs | {"index.html", "search.html"}


def test_no_link_is_broken(site):
    pages = {page.path.resolve(): page for page in site.values()}
    checked = 0
    for page in site.values():
        for link in page.links:
            parts = urlsplit(link)
            if not parts.scheme and not parts.netloc:
                target = (
                    (page.path.parent / unquote(parts.path)).resolve()
                    if parts.path
                    else page.path.resolve()
                )
                assert target.is_file(), f"{page.path}: {link}"
                if parts.fragment:
                    assert unquote(parts.fragment) in pages[target].ids, (
                        f"{page.path}: {link}"
                    )
                    checked += 1
    assert checked
    assert (
        "<../README.rst#no-cluster-at-hand>"
        in (REPOSITORY / "imagenet" / "README.rst").read_text()
    )
    assert "../README.html#no-cluster-at-hand" in site["imagenet/README.html"].links


@pytest.mark.parametrize("old, new", DIFFS)
def test_diff_is_whole(site, old, new):
    texts = [(REPOSITORY / name).read_text().splitlines() for name in (old, new)]
    marked = update_readmes.diff(*texts)
    cells = site[f"diff/{new}.html"].cells
    for side, sign, column, text in zip(
        ("old", "new"), "-+", (cells[::2], cells[1::2]), texts, strict=True
    ):
        lines = [cell for cell in column if cell[0] != "none"]
        assert [line[2] for line in lines] == text
        assert [line[1] for line in lines] == [
            str(number) for number in range(1, len(text) + 1)
        ]
        kinds = [
            {" ": "same", sign: side}[line[0]]
            for line in marked
            if line[0] in f" {sign}"
        ]
        assert [line[0] for line in lines] == kinds
        # The changed words are in changed lines.
        assert {line[0] for line in lines if line[3]} == {side}
    for left, right in zip(cells[::2], cells[1::2], strict=True):
        assert (left[0] == "same") == (right[0] == "same")
        assert left[0] != "same" or left[2] == right[2]
    link = "../" + f"diff/{new}.html"
    # The menu's link, and that of the page itself.
    assert site[str(Path(new).parent / "README.html")].links.count(link) >= 2
