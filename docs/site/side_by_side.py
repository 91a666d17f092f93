"""Two files side by side: the lines that differ, and what is new in them."""

import difflib
import functools
import html
import re
from collections.abc import Iterator
from itertools import groupby, zip_longest
from pathlib import Path
from typing import NamedTuple

from pygments.lexers import get_lexer_for_filename
from pygments.token import STANDARD_TYPES
from update_readmes import diff

# What two lines must have in common for one to be called a new version of the other.
ALIKE = 0.4


class Line(NamedTuple):
    number: int
    text: str
    colors: list[str]  # Pygments' CSS class of each character


class Cell(NamedTuple):
    kind: str  # same, old, new, or none where the other file has no such line
    number: int | str = ""
    html: str = ""


def rows(old_path: Path, new_path: Path) -> list[tuple[Cell, Cell]]:
    """Return all lines of both files, those that belong together in one row."""
    old, new = iter(read(old_path)), iter(read(new_path))
    texts = [
        path.read_text(encoding="utf-8").splitlines() for path in (old_path, new_path)
    ]
    result = []
    for same, group in groupby(
        (line[0] for line in diff(*texts)), lambda mark: mark == " "
    ):
        marks = list(group)
        if same:
            result += [
                (cell("same", next(old)), cell("same", next(new))) for _ in marks
            ]
        else:
            removed = [next(old) for _ in range(marks.count("-"))]
            added = [next(new) for _ in range(marks.count("+"))]
            result += [changed_cells(*pair) for pair in pair_lines(removed, added)]
    return result


def read(path: Path) -> list[Line]:
    text = path.read_text(encoding="utf-8")
    tokens = get_lexer_for_filename(path.name, stripnl=False).get_tokens(text)
    colors = [STANDARD_TYPES.get(kind, "") for kind, words in tokens for _ in words]
    lines, start = [], 0
    for number, line in enumerate(text.splitlines(), start=1):
        lines.append(Line(number, line, colors[start : start + len(line)]))
        start += len(line) + 1
    return lines


def pair_lines(
    old: list[Line], new: list[Line]
) -> Iterator[tuple[Line | None, Line | None]]:
    """Pair the lines that have most in common, in order.

    The others stand beside each other as they come.
    """
    pairs = (
        (compare(a.text, b.text)[0], i, j)
        for i, a in enumerate(old)
        for j, b in enumerate(new)
    )
    most, i, j = max(pairs, key=lambda pair: pair[0], default=(0, 0, 0))
    if not most:
        yield from zip_longest(old, new)
    else:
        yield from pair_lines(old[:i], new[:j])
        yield old[i], new[j]
        yield from pair_lines(old[i + 1 :], new[j + 1 :])


@functools.cache
def compare(old: str, new: str) -> tuple[int, list[bool], list[bool]]:
    """Return how many characters are the same, and of each one whether it changed.

    The number is 0 if they are not enough.
    """
    words = [re.findall(r"\w+|\s+|.", text) for text in (old, new)]
    blocks = difflib.SequenceMatcher(None, *words, autojunk=False).get_matching_blocks()
    changed = [[True] * len(side) for side in words]
    for old_start, new_start, size in blocks:
        for side, start in zip(changed, (old_start, new_start), strict=True):
            side[start : start + size] = [False] * size
    same = sum(
        len(word.strip())
        for word, mark in zip(words[0], changed[0], strict=True)
        if not mark
    )
    enough = 2 * same > ALIKE * sum(
        len(word.strip()) for side in words for word in side
    )
    spread = (
        [m for w, m in zip(*side, strict=True) for _ in w]
        for side in zip(words, changed, strict=True)
    )
    return same if enough else 0, *spread


def changed_cells(old: Line | None, new: Line | None) -> tuple[Cell, Cell]:
    if old is None or new is None:
        return cell("old", old), cell("new", new)
    same, old_changes, new_changes = compare(old.text, new.text)
    if not same:  # all of it is new
        return cell("old", old), cell("new", new)
    return cell("old", old, old_changes), cell("new", new, new_changes)


def cell(kind: str, line: Line | None, changes: list[bool] | None = None) -> Cell:
    if line is None:
        return Cell("none")
    characters = zip(
        line.text, line.colors, changes or [False] * len(line.text), strict=True
    )
    spans = []
    for (color, changed), group in groupby(characters, lambda character: character[1:]):
        text = html.escape("".join(character for character, *_ in group))
        spans.append(
            f'<span class="{color}{" changed" if changed else ""}">{text}</span>'
        )
    return Cell(kind, line.number, "".join(spans))
