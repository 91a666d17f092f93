"""Fill the generated parts of the README files with what the examples' files say now.

A generated part of a README.rst lies between two comment lines with the same words,
`.. begin WORDS` and `.. end WORDS`. The words say what goes there; files are named from
the README's own folder:

    .. begin main.py                         the whole file
    .. begin main.py ../single_gpu/main.py   the whole file, as a diff on the second one
    .. begin main.py --help                  what `python main.py --help` prints

All other text stays as it is.
"""

import argparse
import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARKER = re.compile(r"\.\. (begin|end) (.*\S)\s*")


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
        *sorted(ROOT.glob("docs/*.rst")),
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
        sys.exit("to bring it up to date, run: uv run python docs/update_readmes.py")


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
    names = words.removesuffix(" --help").split()
    paths = [(readme_path.parent / name).resolve() for name in names]
    for path in paths:
        if not path.is_file():
            fail(readme_path, f"no file {path}, which a marker names: .. begin {words}")
    texts = [path.read_text(encoding="utf-8").splitlines() for path in paths]
    if words.endswith(" --help"):
        language, code = "text", read_help(paths[0])
    elif len(paths) == 1:
        language, code = "python" if paths[0].suffix == ".py" else "bash", texts[0]
    elif len(paths) == 2:
        new_name, old_name = (f"{path.parent.name}/{path.name}" for path in paths)
        language, code = (
            "diff",
            [f"diff {old_name} {new_name}", *diff(old=texts[1], new=texts[0])],
        )
    else:
        fail(readme_path, f"a marker names more than two files: .. begin {words}")
    return [
        f".. code-block:: {language}",
        "",
        *(f"   {line}".rstrip() for line in code),
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


def read_help(script: Path) -> list[str]:
    env = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1"}
    # Defaults in the help text follow these.
    env["SLURM_CPUS_PER_TASK"] = "8"  # imagenet/job.sh
    for name in ("SLURM_TMPDIR", "SLURM_JOB_ID", "SCRATCH"):
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
