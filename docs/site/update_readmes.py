"""Fill the generated parts of the pages with what the examples' files say now.

A generated part of a page lies between two comment lines with the same words,
`.. begin WORDS` and `.. end WORDS`. The words say what goes there; files are named from
the page's own folder:

    .. begin main.py                                the whole file
    .. begin main.py: train                         only the block that begins so
    .. begin main.py ../single_gpu/main.py          a diff: all lines of both files
    .. begin main.py ../single_gpu/main.py: train   only the block's hunks
    .. begin main.py --help                         what `python main.py --help` prints
    .. begin messages of a.rst b/*.rst              an index of these pages' messages

After the colon stands the name of a function or a class, or how a line begins, without
its indentation; or several of these with " + " between them. The block is this line and
those below it that are indented more; if several lines begin so, the block of each.
With one file, and a line that defines no Python function or class, the block goes on to
the end of the paragraph: to an empty line with a line below that is not indented.

A hunk is some changed lines with up to three unchanged ones before and after. Changed
lines belong to one hunk if at most three lines lie between them, and no paragraph
begins there. A hunk is shown if one of its changed lines is in the block. `git diff`
has fewer and larger hunks; these can be explained one by one. A line with `@@` stands
above a hunk that does not begin with its function, and between two hunks.

A message of a page is a literal in a term of a definition list. The index shows it with
the first sentence of its definition, which links to the section.

All other text stays as it is.
"""

import argparse
import difflib
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import docutils.nodes

ROOT = Path(__file__).resolve().parent.parent.parent
LITERAL = re.compile("``(.+?)``")
HEADING = re.compile(r"^(\S.*)\n([=-])\2+$", re.MULTILINE)
# A term of a definition list, and the first sentence of its definition.
ENTRY = re.compile(r"^(``.*)\n   (\S(?:.|\n   )*?)[.:](?=\s)", re.MULTILINE)
CONTEXT = 3  # unchanged lines before and after the changed ones of a hunk
MARKER = re.compile(r"\.\. (begin|end) (.*\S)\s*")
# (old file, new file) of every pair that a page explains and shows.
DIFFS = [
    ("single_gpu/job.sh", "multi_gpu/job.sh"),
    ("single_gpu/main.py", "multi_gpu/main.py"),
    ("multi_gpu/job.sh", "multi_node/job.sh"),
    ("multi_gpu/main.py", "multi_node/main.py"),
    ("multi_node/job.sh", "multi_node/job_torchrun.sh"),
    ("multi_node/job.sh", "imagenet/job.sh"),
    ("multi_node/main.py", "imagenet/main.py"),
    ("docs/your_training/before.py", "docs/your_training/main.py"),
    ("docs/your_training/main.py", "docs/your_training/several/main.py"),
]


def page_of(new: str) -> str:
    """Return the name of the page that explains the diff of this file."""
    folders = new.split("/")
    return "/".join(folders[:2]) if folders[0] == "docs" else f"{folders[0]}/README"


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Write the generated parts of the README files."
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing, only fail if one is out of date",
    )
    args = parser.parse_args()
    readmes = [
        ROOT / "README.rst",
        *sorted(ROOT.glob("*/README.rst")),
        *sorted(ROOT.glob("docs/**/*.rst")),
    ]
    rendered = {path: render(path) for path in readmes}
    outdated = [
        path for path in readmes if path.read_text(encoding="utf-8") != rendered[path]
    ]
    for path in outdated:
        print(
            f"{path.relative_to(ROOT)} is {'out of date' if args.check else 'written'}"
        )
        if not args.check:
            path.write_text(rendered[path], encoding="utf-8")
    if args.check and outdated:
        command = "uv run python docs/site/update_readmes.py"
        sys.exit(f"to bring it up to date, run: {command}")


def render(readme_path: Path) -> str:
    """Return the text of the README with its generated parts up to date."""
    lines = []
    part = None  # the words of the part that the line is in, None outside of parts
    for number, line in enumerate(
        readme_path.read_text(encoding="utf-8").split("\n"), start=1
    ):
        keyword, words = (
            marker.groups() if (marker := MARKER.fullmatch(line)) else (None, None)
        )
        if keyword is None and part is None:
            lines.append(line)
        elif keyword == "begin" and part is None:
            part, part_start = words, number
            lines += [line, "", *code_block(readme_path, words), ""]
        elif keyword == "end" and part == words:
            part = None
            lines.append(line)
        elif keyword == "end" and part is None:
            fail(readme_path, f"line {number} ends a part that no line begins: {line}")
        elif keyword is not None:
            break
    if part is not None:
        fail(
            readme_path,
            f"line {part_start} begins a part that does not end with: .. end {part}",
        )
    return "\n".join(lines)


def code_block(readme_path: Path, words: str) -> list[str]:
    """Return the lines of the code block that the words of a marker ask for."""
    if words.startswith("messages of "):
        return index_of_messages(readme_path, words.split()[2:])
    files, _, start = words.partition(": ")
    names = files.removesuffix(" --help").split()
    paths = [(readme_path.parent / name).resolve() for name in names]
    for path in paths:
        if not path.is_file():
            fail(readme_path, f"no file {path}, which a marker names: .. begin {words}")
    texts = [path.read_text(encoding="utf-8").splitlines() for path in paths]
    if files.endswith(" --help"):
        language, code = "text", read_help(paths[0])
    elif len(paths) == 1:
        language, code = "python" if paths[0].suffix == ".py" else "bash", texts[0]
        if start:
            rows = [f" {line}" for line in code]
            block = find_blocks(rows, start, to_paragraph_end=True)
            code = [code[number] for number in block]
    elif len(paths) == 2:
        language, code = "diff", diff(old=texts[1], new=texts[0])
        if start:
            code = show_hunks(code, find_blocks(code, start))
        else:
            new_name, old_name = (f"{path.parent.name}/{path.name}" for path in paths)
            code.insert(0, f"diff {old_name} {new_name}")
    else:
        fail(readme_path, f"a marker names more than two files: .. begin {words}")
    if not code:
        fail(readme_path, f"nothing to show: .. begin {words}")
    return [
        f".. code-block:: {language}",
        "",
        *(f"   {line}".rstrip() for line in code),
    ]


def index_of_messages(readme_path: Path, names: list[str]) -> list[str]:
    """Return a list of the messages that the pages explain, in alphabetical order."""
    causes = {}  # by message
    folder = readme_path.parent
    for page in [page for name in names for page in sorted(folder.glob(name))]:
        text = page.read_text(encoding="utf-8")
        for entry in ENTRY.finditer(text):
            title = HEADING.findall(text[: entry.start()])[-1][0]
            link = f"{page.relative_to(folder)}#{docutils.nodes.make_id(title)}"
            term, cause = entry[1], " ".join(entry[2].replace("``", "").split())
            if len(cause) > 60 or "`" in cause:
                fail(readme_path, f"no cause of {term} for the index: {cause}")
            said_by = term.rpartition("``")[2]  # such as ", from uv"
            for message in LITERAL.findall(term):
                message = re.sub(r"^(\S+\.(py|sh): )?error: ", "", message)
                causes[f"``{message}``"] = f"{said_by}: `{cause} <{link}>`__"
    messages = sorted(causes, key=lambda each: re.sub(r"[\W_]", "", each).casefold())
    # Messages of one entry that follow each other share a line.
    return [
        f"* {', '.join(same)}{cause}"
        for cause, same in itertools.groupby(messages, key=causes.get)
    ]


def diff(old: list[str], new: list[str]) -> list[str]:
    """Return all lines of both files, those of only one of them marked with - or +."""
    lines = []
    for tag, old_start, old_end, new_start, new_end in difflib.SequenceMatcher(
        None, old, new
    ).get_opcodes():
        if tag == "equal":
            lines += [f" {line}" for line in new[new_start:new_end]]
        else:
            lines += [f"-{line}" for line in old[old_start:old_end]]
            lines += [f"+{line}" for line in new[new_start:new_end]]
    return lines


# Below, a row is a line of a diff: a mark (" ", "-" or "+"), and the line itself.


def find_blocks(
    rows: list[str], starts: str, to_paragraph_end: bool = False
) -> list[int]:
    """Return the numbers of the rows of all blocks that begin with one of `starts`."""
    blocks = set()
    for start in starts.split(" + "):
        found = find_block(rows, start, to_paragraph_end)
        if not found:
            return []
        blocks |= found
    return sorted(blocks)


def find_block(rows: list[str], start: str, to_paragraph_end: bool) -> set[int]:
    texts = [row[1:].strip() for row in rows]
    for beginning in (f"def {start}(", f"class {start}", start):
        firsts = [i for i, text in enumerate(texts) if text.startswith(beginning)]
        if firsts:
            break
    block = set()
    for first in firsts:
        last = first + 1
        if to_paragraph_end and beginning == start:
            while last < len(rows) and not begins_paragraph(rows, last):
                last += 1
        else:
            while last < len(rows) and goes_on(rows[last], indent(rows[first])):
                last += 1
        while not texts[last - 1]:
            last -= 1
        while first > 0 and texts[first - 1].startswith("@"):  # its decorators
            first -= 1
        block |= set(range(first, last))
    return block


def goes_on(row: str, block_indent: int) -> bool:
    """Say whether the row is still in a block that began with this indentation."""
    text = row[1:].strip()
    closes = re.match(r"[)}\]]|(else|elif|except|finally|fi|done|esac)\b", text)
    deeper = indent(row) > block_indent
    return not text or deeper or (closes is not None and indent(row) == block_indent)


def indent(row: str) -> int:
    return len(row[1:]) - len(row[1:].lstrip())


def show_hunks(rows: list[str], block: list[int]) -> list[str]:
    """Return the rows of all hunks that change something in the block."""
    lines = []
    shown = -1  # the last row so far
    for hunk in find_hunks(rows):
        if not set(hunk).isdisjoint(block):
            first, last = add_context(rows, hunk)
            if first > shown + 1:
                lines += hunk_title(rows, first) or (["@@"] if lines else [])
            lines += rows[max(first, shown + 1) : last]
            shown = last - 1
    return lines


def find_hunks(rows: list[str]) -> list[list[int]]:
    """Return the numbers of the changed rows, those of one hunk together.

    Empty lines do not count: where they are new, something else is, too.
    """
    hunks = []
    gap = []  # the rows since the last changed one
    for number in range(len(rows)):
        gap.append(number)
        if is_changed(rows, number):
            near = hunks and len(gap) - 1 <= CONTEXT
            if near and not any(begins_paragraph(rows, row) for row in gap):
                hunks[-1].append(number)
            else:
                hunks.append([number])
            gap = []
    return hunks


def add_context(rows: list[str], hunk: list[int]) -> tuple[int, int]:
    """Return the hunk's first row and the one after its last, with unchanged ones."""
    first, last = hunk[0], hunk[-1] + 1
    for _ in range(CONTEXT):
        if first == 0 or begins_paragraph(rows, first) or is_changed(rows, first - 1):
            break
        first -= 1
    for _ in range(CONTEXT):
        if last == len(rows) or begins_paragraph(rows, last) or is_changed(rows, last):
            break
        last += 1
    while not rows[first][1:].strip():
        first += 1
    while not rows[last - 1][1:].strip():
        last -= 1
    return first, last


def is_changed(rows: list[str], number: int) -> bool:
    return rows[number][0] != " " and rows[number][1:].strip() != ""


def begins_paragraph(rows: list[str], number: int) -> bool:
    """Say whether a row follows an empty line and is not indented."""
    follows = number == 0 or not rows[number - 1][1:].strip()
    return follows and re.match(r"[^\s)}]", rows[number][1:]) is not None


def hunk_title(rows: list[str], number: int) -> list[str]:
    """Return the line above a hunk: `@@` and its function, as in `git diff`."""
    for row in range(number, -1, -1):
        if re.match("def |class ", rows[row][1:]):
            return [f"@@ {rows[row][1:]}"] if row < number else []
        if begins_paragraph(rows, row):
            break
    return []


def read_help(script: Path) -> list[str]:
    env = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1"}
    # Defaults in the help text follow these.
    env["SLURM_CPUS_PER_TASK"] = "8"  # imagenet/job.sh
    for name in ("LOCAL_JOB_DIR", "SLURM_TMPDIR", "SLURM_JOB_ID", "SCRATCH"):
        env.pop(name, None)
    command = [sys.executable, script.name, "--help"]
    result = subprocess.run(
        command, cwd=script.parent, env=env, stdout=subprocess.PIPE, text=True
    )
    if result.returncode != 0:
        sys.exit(
            f"update_readmes.py: error: {script} --help failed, with the message above"
        )
    return result.stdout.splitlines()


def fail(readme_path: Path, message: str) -> None:
    name = f"{readme_path.parent.name}/{readme_path.name}"
    sys.exit(f"update_readmes.py: error: {name}: {message}")


if __name__ == "__main__":
    main()
