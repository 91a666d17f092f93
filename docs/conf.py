"""The site that Sphinx makes of the pages on GitHub, and of the examples' diffs."""

import re
import sys
from pathlib import Path

from docutils import nodes

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))

import side_by_side  # noqa: E402

project = html_title = "PyTorch on Slurm"
root_doc = "README"
EXAMPLES = ["single_gpu", "multi_gpu", "multi_node", "imagenet"]
OTHERS = [
    "your_training",
    "clusters",
    "troubleshooting",
    "interactive",
    "reliability",
    "fault_matrix",
    "scaling",
]
PAGES = [
    *(f"{name}/README" for name in EXAMPLES),
    *(f"docs/{name}" for name in OTHERS),
    "CONTRIBUTING",
]
TOCTREE = "\n.. toctree::\n   :hidden:\n\n" + "".join(f"   {page}\n" for page in PAGES)
# (old file, new file) of every diff in the README files, in the order of the ladder.
DIFFS = [
    names
    for example in EXAMPLES
    for names in re.findall(
        r"^   diff (\S+) (\S+)$", (ROOT / example / "README.rst").read_text(), re.M
    )
]

include_patterns = ["*.rst", "*/README.rst", "docs/*.rst"]
# Not to look for pages in there takes time.
exclude_patterns = [
    ".*",
    "data",
    "*/data",
    "site",
]
highlight_language = "none"  # of blocks that say none, as on GitHub
smartquotes = False

html_theme = "furo"
pygments_style, pygments_dark_style = "default", "github-dark"
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "diffs.html",
        "sidebar/scroll-end.html",
    ]
}
html_context = {"diffs": DIFFS}
html_additional_pages = {"index": "index.html"}
templates_path = ["templates"]
html_static_path = ["static"]
html_copy_source = html_show_copyright = html_use_index = False


def setup(app) -> None:
    app.connect("source-read", adapt_source)
    app.connect("doctree-resolved", adapt)
    app.connect("html-collect-pages", diff_pages)


def adapt_source(app, page: str, content: list[str]) -> None:
    """Leave a page's contents to the theme, and name all pages on the first one.

    GitHub knows no toctree.
    """
    content[0] = re.sub(r"^\.\. contents::.*\n(   .*\n)*", "", content[0], flags=re.M)
    if page == root_doc:
        content[0] += TOCTREE


def adapt(app, doctree: nodes.document, page: str) -> None:
    """Have links to .rst files lead to pages, and link diffs to their own pages."""
    for link in doctree.findall(nodes.reference):
        if ":" not in link.get("refuri", ":"):
            link["refuri"] = re.sub(r"\.rst(?=#|$)", ".html", link["refuri"])
    for block in list(doctree.findall(nodes.literal_block)):
        found = re.match(r"diff (\S+) (\S+)\n", block.astext())
        if found and found.groups() in DIFFS:
            target = app.builder.get_relative_uri(page, f"diff/{found[2]}")
            link = nodes.reference("", "Side by side", refuri=target, internal=True)
            block.parent.insert(
                block.parent.index(block), nodes.paragraph("", "", link)
            )


def diff_pages(app):
    for old, new in DIFFS:
        rows = side_by_side.rows(ROOT / old, ROOT / new)
        yield (
            f"diff/{new}",
            {"title": f"{old} and {new}", "old": old, "new": new, "rows": rows},
            "diff.html",
        )
