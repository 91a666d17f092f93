#!/usr/bin/env python3
"""Print what First aid says of a job that failed, or of a message.

    python3 docs/explain.py 7                           a job's number
    python3 docs/explain.py slurm-7.out                 its log
    sbatch job.sh 2>&1 | python3 docs/explain.py        lines from a pipe

The answers stand in docs/first_aid and in no other place: this file finds them there.
It needs no package, and any Python from 3.6 on. It exits with 1 if it knows nothing.
"""

import argparse
import collections
import glob
import os
import re
import shutil
import subprocess
import sys
import textwrap

DOCS = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(DOCS)
FIRST_AID = os.path.join(DOCS, "first_aid.rst")
MOST = 3  # entries that are shown
# The page "The earliest error is the cause" greps for the same.
ERROR = r"Error|error:|Killed|Fatal|not found|No such file"
# Of a huge log, this much is read line by line. Further on, only lines with one of
# these words are looked at, and at most so many.
CLOSELY = 8 << 20
WORDS = [
    word.encode()
    for word in (
        "rror ERROR CANCELLED ailed illed denied exceeded imeout xception "
        "slurmstepd srun: lock_until"
    ).split()
] + [b"not found", b"No such", b"timed out", b"out of"]
MOST_LINES = 200000
LONGEST = 1 << 14  # characters of a line that are matched at once
BLOCK = 1 << 20

HEADING = re.compile(r"^(\S.*)\n([=~-])\2{2,}$", re.MULTILINE)
# A term of a definition list, and its definition.
ENTRY = re.compile(r"^(``.*)\n(   \S.*\n(?:   .*\n|\n)*)", re.MULTILINE)
LITERAL = re.compile(r"``(.+?)``")
# An entry that leads to another line of the log is shown behind those that do not.
LEADS_ON = re.compile(
    r"earl(y|ier|iest)\s+(error|line)|own\s+error|line\s+above|reasons\s+below"
)
# PyTorch's C++ code marks its errors with E or F: [rank3]:[E1119 13:21 …].
SAYS_ERROR = re.compile(
    "[Ee]rr(or|no)|ERROR|CANCELLED|[Ff]ailed|not found|^\\(|srun: |slurmstepd"
    "|\\[[EF][ \\d]"
)
# ANSI's colours.
COLOURS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
# What stands for others of its kind in a message. A number within a word, or that of an
# error, is no such thing.
TOKEN = re.compile(
    r"(?P<any>…)"
    r"|(?P<host>(?<!\w)(?:node|eth)\d+)"
    r"|(?P<path>(?<!\S)\.\./\S+)"
    r"|(?P<kept>(?:[Ee]rrno:? |os error |exit code |ExitCode=|err=-|World size )[\d:]+"
    r"|[A-Za-z_]\w*)"
    r"|(?P<number>\d(?:[\w.]*\w)?)"
    r"|(?P<space>\s+)"
)
ANY = {
    "any": ".{0,300}?",
    "host": r"[\w.-]{1,64}",
    "path": r"\S{0,300}/\S{0,300}",
    "number": r"\d(?:[\w.]*\w)?",
    "space": r"""["'`\u2018\u2019]*\s+["'`\u2018\u2019]*""",
}

Entry = collections.namedtuple("Entry", "messages ours body page title order")
Pattern = collections.namedtuple("Pattern", "regex part weight entry")


def main():
    args = parse_args()
    job, log, lines, state = None, None, [], None
    if args.what is None or args.what == "-":
        stream = sys.stdin.buffer
    elif re.fullmatch(r"\d+(_\d+)?", args.what) and not os.path.exists(args.what):
        job = args.what
        state, log, lines = look_up(job)
        stream = open_log(log) if log else None
    else:
        log = args.what
        found = re.search(r"slurm-(\d+(_\d+)?)\.out$", log)
        job = found.group(1) if found else None
        stream = open_log(log)
    entries = read_entries()
    patterns = [each for entry in entries for each in patterns_of(entry)]
    found = Findings(patterns)
    for line in lines:
        found.look_at(0, line)
    if stream:
        read(stream, found)
    report(found, job, log, state)
    sys.exit(0 if found.lines or state else 1)


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n    ")[0],
        epilog="The answers are those of docs/first_aid.rst.",
    )
    parser.add_argument(
        "what", nargs="?", help="a job's number, or its log; without it, a pipe"
    )
    args = parser.parse_args()
    if args.what is None and sys.stdin.isatty():
        parser.error("name a job or its log, as in: python3 explain.py slurm-7.out")
    return args


def open_log(path):
    try:
        return open(path, "rb")
    except OSError as error:
        sys.exit(f"explain.py: error: {clean(path)}: {error.strerror}")


# What Slurm knows of a job


def look_up(job):
    """Return a job's (state, exit code), its log, and lines to explain besides."""
    shown = ask("scontrol", "show", "job", job).split("\n\n")[0]
    known = dict(re.findall(r"(?:^|\s)(JobState|ExitCode|Reason)=(\S+)", shown))
    known.update(re.findall(r"^ *(StdOut|WorkDir)=(.*)$", shown, re.MULTILINE))
    state = (known.get("JobState"), known.get("ExitCode"))
    if not state[0]:
        command = "sacct --noheader --parsable2 --allocations --duplicates"
        command += " --format=State,ExitCode,WorkDir --jobs"
        last = ask(*command.split(), job).strip().split("\n")[-1].split("|")
        if len(last) == 3:
            state, known["WorkDir"] = (last[0].split(" ")[0], last[1]), last[2]
    name = f"slurm-{job}.out"
    folders = [".", known.get("WorkDir", "."), *glob.glob(os.path.join(ROOT, "*"))]
    folders += glob.glob(os.path.join(DOCS, "*"))
    places = [known.get("StdOut", name)]
    places += [os.path.join(folder, name) for folder in folders]
    logs = [place for place in places if os.path.isfile(place)]
    if not logs and not state[0]:
        sys.exit(
            f"explain.py: error: Slurm does not know job {job}, and there is no {name} "
            "here: name the log"
        )
    # A job that waits says why; one that had no log, with what it ended.
    lines = [f"({known['Reason']})"] if state[0] == "PENDING" else []
    if not logs and state[1]:
        lines.append(f"ExitCode={state[1]}")
    return state if state[0] else None, logs[0] if logs else None, lines


def ask(*command):
    """Return what a command of Slurm prints; nothing if it fails or is not here."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace")


def row_of(state, code):
    """Return what the table of First aid says of this end of a job."""
    rows = read_table()
    for columns in (1, 2):  # scontrol's code, then that of an older sacct
        for name, codes, text in rows:
            if name == state and code in codes[:columns]:
                return text
    for name, codes, text in rows:
        if name == state and (not codes or name != "FAILED" or codes[0] == "1:0"):
            return text
    return ""


def read_table():
    """Return the table's rows: a state, its exit codes, what happened."""
    text = read_page(FIRST_AID)
    start, end = re.search(r"^=+  (=+  )=+$\nState .*\n[= ]+$", text, re.M).span()
    second, third = (m.end() for m in re.finditer(r"=  ", text[start:].split("\n")[0]))
    rows = []
    for line in text[end:].split("\n")[1:]:
        if line.startswith("==="):
            break
        if line[:1].isalpha():
            codes = LITERAL.findall(line[second:third])
            rows.append([line[:second].strip(), codes, ""])
        rows[-1][2] += line[third:] + " "
    return rows


# What the pages say


def read_page(path):
    with open(path, encoding="utf-8") as page:
        return page.read()


def read_entries():
    """Return the entries of all pages that First aid's index is made from."""
    index = re.search(r"^\.\. begin messages of (.*)$", read_page(FIRST_AID), re.M)
    entries = []
    for name in index.group(1).split():
        for page in sorted(glob.glob(os.path.join(DOCS, name))):
            entries += entries_of(page)
    return entries


def entries_of(page):
    text = read_page(page)
    for found in ENTRY.finditer(text):
        term, body = found.group(1), textwrap.dedent(found.group(2)).strip("\n")
        terms = LITERAL.findall(term)
        messages = [without_program(each) for each in terms]
        ours = {without_program(each) for each in terms if is_ours(each)}
        title = HEADING.findall(text[: found.start()])[-1][0]
        harmless = re.match("A? ?harmless", body, re.IGNORECASE)
        order = 2 if harmless else 1 if LEADS_ON.search(body) else 0
        yield Entry(messages, ours, body, page, title, order)


def without_program(message):
    return re.sub(r"^(\S+\.(py|sh): )?error: ", "", message)


def patterns_of(entry):
    for message in entry.messages:
        tokens = tokens_of(message)
        fixed = [text for kind, text in tokens if kind == "kept"]
        # What main.py or job.sh says counts more than what it quotes of others.
        weight = sum(len(text) for text in fixed)
        weight += 100 if message in entry.ours else 0
        regex = re.compile(expression(tokens))
        yield Pattern(regex, max(fixed, key=len), weight, entry)


def tokens_of(message):
    """Return a message as pairs: what kind of thing it is, and its text."""
    tokens, start = [], 0
    for found in [*TOKEN.finditer(message), None]:
        text = message[start : found.start() if found else None]
        if found and found.lastgroup == "kept":
            continue
        if text:
            tokens.append(("kept", text))
        if found:
            tokens.append((found.lastgroup, found.group()))
            start = found.end()
    return tokens


def expression(tokens):
    """Return a regular expression for a message, which JavaScript knows, too."""
    whole = tokens[-1][0] != "any"
    tokens = tokens if whole else tokens[:-1]
    out = "".join(
        escape(text) if kind == "kept" else ANY[kind] for kind, text in tokens
    )
    first, last = tokens[0][1], tokens[-1][1]
    if whole and len(tokens) == 1 and re.fullmatch("[A-Z]([A-Z]|[a-z]+)", first):
        # A word of everybody's: by itself, in brackets, or behind what names it.
        return rf"(?:^\s*|\(|[Rr]eason[= ]|: |PD +|PENDING +){out}(?=$|[\s),])"
    before = r"(?<!\w)" if first[0].isalpha() else ""
    return before + out + (r"(?!\w)" if whole and last[-1].isalnum() else "")


def escape(text):
    return re.sub(r"([][\\^$.|?*+(){}/])", r"\\\1", text)


# Reading a log


class Findings:
    """The first line for each entry that the log matches, and its first errors."""

    def __init__(self, patterns):
        self.patterns = patterns
        self.lines = {}  # entry: (its order here, number, line)
        self.errors = []  # (number, line)
        self.last = None
        self.looked_at = 0
        self.cut = False

    def look_at(self, number, line):
        self.looked_at += 1
        for start in range(0, len(line), LONGEST):
            self.match(number, line[start : start + LONGEST])

    def match(self, number, line):
        best = None
        for each in self.patterns:
            if each.part in line:
                found = each.regex.search(line)
                key = (each.entry.order, -each.weight)
                if found and (best is None or key < best[0]):
                    best = (key, each.entry, found.start())
        if line.strip():
            self.last = (number, line)
        if len(self.errors) < MOST and re.search(ERROR, line):
            self.errors.append((number, line))
        if best and id(best[1]) not in self.lines:
            _, entry, place = best
            # NCCL INFO: what NCCL has tried, and does without.
            says = 0 if SAYS_ERROR.search(line) else 1
            order = max(entry.order, 2 if "NCCL INFO" in line else says)
            line = line[max(0, place - 200) :]
            self.lines[id(entry)] = (order, number, line, entry)


def read(stream, found):
    """Look at the lines of a log, in bounded memory."""
    number, size, rest, tail = 1, 0, b"", None
    while True:
        chunk = stream.read(BLOCK)
        block = rest + chunk
        end = max(block.rfind(b"\n"), block.rfind(b"\r")) + 1
        if not chunk or len(block) - end > BLOCK:
            end = len(block)
        block, rest = block[:end], block[end:]
        size += len(block)
        if found.looked_at > MOST_LINES:
            found.cut, tail = True, (number, block) if block else tail
        elif size <= CLOSELY or any(word in block for word in WORDS):
            look_at_block(block, number, size > CLOSELY, found)
        number += block.count(b"\n")
        if not chunk:
            break
    if tail:
        look_at_block(tail[1], tail[0], False, found)


def look_at_block(block, number, only_words, found):
    for line in block.split(b"\n"):
        for part in line.split(b"\r"):  # the states of a progress bar
            if part and (not only_words or any(word in part for word in WORDS)):
                text = part.decode("utf-8", "replace")
                found.look_at(number, COLOURS.sub("", text))
        number += 1


# Printing


def report(found, job, log, state):
    if log:
        say(f"{log}{' (its beginning and its end)' if found.cut else ''}")
    if state:
        row = row_of(*state)
        say(f"Job {job}: {state[0]}, exit code {state[1]}")
        if row:
            say(wrap(plain(row, FIRST_AID, job)))
    if log and not found.last:
        say("The log is empty.")
    lines = sorted(found.lines.values(), key=lambda each: each[:2])[:MOST]
    for _, number, line, entry in lines:
        say(f"\n{show(number, line)}")
        say(wrap(render(entry, job)))
        say(f"    [{name_of(entry.page)}: {entry.title}]")
    if not lines or (lines[0][0] and found.errors and not explains(lines, found)):
        say_unknown(found, job, bool(state))
    say(f"\nThe pages are in {ROOT}.")


def explains(lines, found):
    """Say whether what is shown has the log's first error."""
    return found.errors[0][0] in [number for _, number, _, _ in lines]


def say_unknown(found, job, with_state):
    if found.errors:
        say("\nFirst aid does not know this. The first lines with an error:")
        for error in found.errors:
            say(show(*error))
    elif found.last:
        say("\nFirst aid knows no line of it, and none has an error. The last line:")
        say(show(*found.last))
    if found.errors and is_ours(found.errors[0][1]):
        say("This line says what to do. It is of these scripts, not of your cluster.")
    elif found.errors or not with_state:
        text = read_page(FIRST_AID)
        advice = text.split("\nWhat to send to support\n")[1].split("\n\n", 1)[1]
        say(wrap(plain(advice.strip(), FIRST_AID, job)))


def is_ours(line):
    """Say whether main.py, job.sh or another script of these has written the line."""
    return re.match(r"(main|prepare_data)\.py: error: |job\.sh: error: ", line)


def show(number, line):
    place = f"line {number}: " if number else ""
    line = " ".join(line.split())
    return place + (line if len(line) <= 400 else line[:400] + " …")


def render(entry, job):
    """Return an entry as text: its paragraphs joined, its listings as they are."""
    parts, margin = [], None  # a listing is indented more than the text above it
    for part in re.split(r"\n\n+", entry.body):
        indent = len(part) - len(part.lstrip(" "))
        if margin is not None and indent > margin:
            parts.append(re.sub("^", "  ", with_job(part, job), flags=re.MULTILINE))
            continue
        # A list's points stand below each other.
        points = re.split(r"\n(?= *(?:\d+\.|\*|-) )", part)
        for point in points:
            parts.append(plain(re.sub("::$", ":", point), entry.page, job))
        text = re.match(r" *(?:(?:\d+\.|\*|-) +)?", points[-1]).end()
        margin = text if part.endswith("::") else None
    return "\n".join(parts)


def plain(text, page, job):
    """Return text without markup, with the pages that its links lead to."""

    def repl(found):
        code, words, target, name, emphasis = found.groups()
        if code:  # no line ends within it
            return f"`{with_job(code, job)}`".replace(" ", "\xa0")
        if emphasis:
            return emphasis
        if name:
            words = name
            given = re.search(
                rf"^\.\. _{re.escape(name)}: (\S+)$", read_page(page), re.MULTILINE
            )
            target = given.group(1) if given else "#" + make_id(name)
        return f"{words} ({place_of(target, words, page)})"

    markup = r"``(.+?)``|`([^`<]+?)\s+<([^`>]+)>`__?|`([^`]+)`__?|\*(\S[^*]*?)\*"
    text = re.sub(markup, repl, " ".join(text.split()))
    return text.replace("† (", "(not run: ").replace("†", "(not run)")


def place_of(target, words, page):
    """Return the page of a link, and the section if its words do not name it."""
    if re.match("https?:", target):
        return target
    path, _, anchor = target.partition("#")
    path = os.path.normpath(os.path.join(os.path.dirname(page), path)) if path else page
    if not anchor or not path.endswith(".rst") or not os.path.exists(path):
        return name_of(path)
    titles = [title for title, _ in HEADING.findall(read_page(path))]
    title = next((title for title in titles if make_id(title) == anchor), "")
    same = not title or title.lower() == words.lower()
    return name_of(path) + ("" if same else f": {title}")


def name_of(path):
    return os.path.relpath(path, ROOT)


def make_id(title):
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def with_job(code, job):
    """Return a command with the number of this job in place of the pages' 7."""
    before = (
        r"\b(show job |jobs=|slurm-|scancel |release |requeue |requeuehold |JobId=)"
    )
    return re.sub(rf"{before}7\b", rf"\g<1>{job}", code) if job else code


def wrap(text):
    width = max(60, min(100, shutil.get_terminal_size().columns)) - 2
    lines = []
    for line in text.split("\n"):
        indent = "    " + " " * (len(line) - len(line.lstrip(" ")))
        if len(line) < width or line.startswith("     "):
            lines.append("    " + line)
            continue
        lines += textwrap.wrap(
            line.strip(" "),
            width,
            initial_indent=indent,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines).replace("\xa0", " ")


def clean(text):
    """Return text that a terminal only shows: a log may have what moves its cursor."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def say(text):
    encoding = sys.stdout.encoding or "ascii"
    text = clean(text.replace("\t", " "))
    print(text.encode(encoding, "replace").decode(encoding))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # as with: explain.py slurm-7.out | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)
