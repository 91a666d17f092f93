"""The site that Sphinx makes of the pages on GitHub, and of the examples' diffs."""

import html
import json
import os
import re
import shutil
import sys
from itertools import groupby
from pathlib import Path
from typing import ClassVar

from docutils import nodes
from pygments.lexer import RegexLexer
from pygments.token import Name, Text

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "docs" / "site"), str(ROOT / "docs")]

import explain  # noqa: E402
import side_by_side  # noqa: E402
from update_readmes import DIFFS, page_of  # noqa: E402

project = html_title = "PyTorch on Slurm"
root_doc = "README"
# The column of pages, by their captions.
PAGES = {
    "": ["Start <self>"],
    "Examples": [
        *(f"{name}/README" for name in ("single_gpu", "multi_gpu", "multi_node")),
        "imagenet/README",
    ],
    "imagenet in depth": [
        *(
            f"docs/imagenet/{name}"
            for name in ("staging", "checkpoints", "hangs", "exceptions")
        )
    ],
    "Your own work": [
        *(f"docs/{name}" for name in "your_training your_data runs sharded".split())
    ],
    "Your cluster": [
        *(f"docs/{name}" for name in "clusters resources containers preflight".split())
    ],
    "Your jobs": ["docs/while_it_runs", "docs/after_a_job"],
    "When it fails": [
        "docs/first_aid",
        *(
            f"docs/first_aid/{name}"
            for name in ("queue", "environment", "ranks", "slow")
        ),
    ],
    "Evidence": ["docs/evidence", "CONTRIBUTING", "tests/README"],
}
TOCTREE = "".join(
    "\n.. toctree::\n   :hidden:\n"
    + (f"   :caption: {caption}\n\n" if caption else "\n")
    + "".join(f"   {page}\n" for page in pages)
    for caption, pages in PAGES.items()
)
# What a page's title leaves open where it stands alone: in a tab, in the results of a
# search.
TITLES = {
    "single_gpu/README": "train on one GPU with PyTorch",
    "multi_gpu/README": "train on all GPUs of a node",
    "multi_node/README": "train on the GPUs of several nodes",
    "imagenet/README": "large data, checkpoints and requeues",
    "docs/imagenet/staging": "imagenet's data on the node's disk",
    "docs/imagenet/checkpoints": "how imagenet saves and resumes",
    "docs/imagenet/hangs": "how imagenet finds the rank that stops",
    "docs/imagenet/exceptions": "what to do when its job has failed",
    "docs/your_training": "a script of your own on several GPUs",
    "docs/clusters": "the head of job.sh for some clusters",
    "docs/runs": "sweeps and searches",
    "docs/containers": "Python in Apptainer or Pyxis",
    "docs/while_it_runs": "look into a running job",
    "docs/after_a_job": "what it used, and what to clean up",
    "docs/first_aid": "why a job failed, or hangs",
    "docs/first_aid/queue": "errors of sbatch and squeue",
    "docs/first_aid/environment": "errors and what to do",
    "docs/first_aid/ranks": "errors and what to do",
    "docs/first_aid/slow": "what to measure, and what helps",
    "docs/evidence": "what was measured and tested",
    "tests/README": "what they prove",
}
DESCRIPTION = "Job scripts and training scripts to run PyTorch on a Slurm cluster"
# With this class, furo leaves a page's own contents where they are; local: without the
# page's title, as on GitHub.
KEPT = ":local:\n   :class: this-will-duplicate-information-and-it-is-still-useful-here"

include_patterns = ["*.rst", "*/README.rst", "docs/*.rst", "docs/*/*.rst"]
# Not to look for pages in there takes time.
exclude_patterns = [
    ".*",
    "data",
    "*/data",
    "site",
]
extensions = ["sphinx_copybutton"]
copybutton_prompt_text = "$ "
copybutton_selector = "div:not(.highlight-diff) > div.highlight > pre"
highlight_language = "text"  # of blocks that say none: commands and what they print
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
html_favicon = "static/favicon.svg"
html_css_files = ["pages.css"]
html_copy_source = html_show_copyright = html_use_index = False


class Words(RegexLexer):
    """No colors, as on GitHub, but pages.css keeps the options whole."""

    tokens: ClassVar = {
        "root": [(r"--\w[\w-]*", Name.Attribute), (r"-*[^-]+|-+", Text)]
    }


def setup(app) -> None:
    app.add_lexer("text", Words)
    app.connect("source-read", adapt_source)
    app.connect("doctree-read", extend_title, priority=400)  # before Sphinx reads it
    app.connect("doctree-read", name_entries)
    app.connect("doctree-resolved", adapt)
    app.connect("html-page-context", describe)
    app.connect("html-collect-pages", diff_pages)
    app.connect("build-finished", write_messages)


def adapt_source(app, page: str, content: list[str]) -> None:
    """Keep a page's contents beside the theme's, and name all pages on the first one.

    In a narrow window, the theme hides its own. GitHub knows no toctree.
    """
    content[0] = re.sub(
        r"^\.\. contents::.*\n", rf"\g<0>   {KEPT}\n", content[0], flags=re.M
    )
    if page == root_doc:
        content[0] += TOCTREE


def extend_title(app, doctree: nodes.document) -> None:
    if words := TITLES.get(app.env.current_document.docname):
        title = next(doctree.findall(nodes.title)).astext()
        doctree["title"] = f"{title}: {words}"


def describe(app, page: str, template: str, context: dict, doctree) -> None:
    """Give the page a description, for search engines: its first sentence."""
    words = DESCRIPTION
    if doctree:
        paragraphs = doctree.findall(nodes.paragraph)
        first = next(p for p in paragraphs if isinstance(p.parent, nodes.section))
        words = re.split(r"(?<=\.)\s", first.astext())[0].replace("\n", " ").rstrip(":")
    context["metatags"] = (
        context.get("metatags", "")
        + f'<meta name="description" content="{html.escape(words)}">'
    )


# Pages of First aid's entries, by the entries' messages.
ENTRIES = {
    message: (Path(entry.page).relative_to(ROOT).with_suffix(""), entry)
    for entry in explain.read_entries()
    for message in entry.messages
}
BOX = """<div id="explain" hidden>
<p>Paste a line of your log, or all of it. It stays in your browser.</p>
<textarea aria-label="Lines of a log" spellcheck="false"></textarea>
<output></output>
<script src="../_static/messages.js"></script>
<script src="../_static/explain.js"></script>
</div>"""


def id_of(message: str) -> str:
    return f"message-{nodes.make_id(message)}"


def messages_in(node: nodes.Node) -> list[str]:
    literals = [
        explain.without_program(literal.astext())
        for literal in node.findall(nodes.literal)
    ]
    return [message for message in literals if message in ENTRIES]


def name_entries(app, doctree: nodes.document) -> None:
    """Give each entry of First aid an anchor for each of its messages."""
    page = Path(app.env.current_document.docname)
    for term in doctree.findall(nodes.term):
        messages = [m for m in messages_in(term) if ENTRIES[m][0] == page]
        term["ids"] = list(dict.fromkeys(map(id_of, messages)))


def write_messages(app, error: Exception | None) -> None:
    """Write what the box on First aid looks up, from the entries of the pages."""
    if error:
        return
    entries = []
    for entry in explain.read_entries():
        page = Path(entry.page).relative_to(ROOT / "docs").with_suffix(".html")
        entries.append(
            {
                "patterns": [
                    [each.regex.pattern, each.part, each.weight]
                    for each in explain.patterns_of(entry)
                ],
                "order": entry.order,
                "answer": explain.render(entry, None)
                .split("\n")[0]
                .replace("\xa0", " "),
                "link": f"{page}#{id_of(entry.messages[0])}",
            }
        )
    values = {
        "ENTRIES": entries,
        "SAYS_ERROR": explain.SAYS_ERROR.pattern,
        "MOST": explain.MOST,
    }
    script = "".join(f"const {k} = {json.dumps(v)};\n" for k, v in values.items())
    (Path(app.outdir) / "_static" / "messages.js").write_text(script)


def adapt(app, doctree: nodes.document, page: str) -> None:
    """Have links lead to pages of the site, those to examples' files to their diffs."""
    if page == "docs/first_aid":
        (section,) = (
            node
            for node in doctree.findall(nodes.section)
            if "a-message" in node["ids"]
        )
        section.insert(1, nodes.raw("", BOX, format="html"))
        for item in section.findall(nodes.list_item):
            for link in item.findall(nodes.reference):
                path = link["refuri"].partition("#")[0]
                link["refuri"] = f"{path}#{id_of(messages_in(item)[0])}"
    for image in list(doctree.findall(nodes.image)):
        image.replace_self(nodes.container("", image.deepcopy(), classes=["picture"]))
    for literal in doctree.findall(nodes.literal):
        if any(len(word) > 36 for word in literal.astext().split()):
            literal["classes"].append("long")
    for cell in doctree.findall(nodes.entry):
        if len(cell.astext()) > 40:
            cell["classes"].append("long")
    for link in doctree.findall(nodes.reference):
        if ":" in link.get("refuri", ":"):
            continue
        if link["refuri"].endswith("#the-site") and link.astext() == "site":
            link["refuri"] = "main.py"  # its diff; GitHub's readers make the site first
        target = os.path.normpath(Path(page).parent / link["refuri"])
        if target in {new for _, new in DIFFS}:
            link["refuri"] = app.builder.get_relative_uri(page, f"diff/{target}")
        elif (ROOT / target).is_file() and not target.endswith(".rst"):
            copy_file(app, target)
        else:
            link["refuri"] = re.sub(r"\.rst(?=#|$)", ".html", link["refuri"])


def copy_file(app, name: str) -> None:
    copy = Path(app.outdir) / name
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / name, copy)


def diff_pages(app):
    for old, new in DIFFS:
        copy_file(app, old)
        copy_file(app, new)
        rows = side_by_side.rows(ROOT / old, ROOT / new)
        yield (
            f"diff/{new}",
            {
                "title": f"{old} and {new}, side by side",
                "old": old,
                "new": new,
                "explained_in": page_of(new),
                "explained_in_title": app.env.titles[page_of(new)].astext(),
                "parts": [
                    list(part)
                    for _, part in groupby(rows, lambda row: row[0].kind == "same")
                ],
            },
            "diff.html",
        )
