"""Run the fault tests on three generations of Slurm; write tests/fault_matrix.rst.

    uv run python tests/fault_matrix.py
        all of it: a night, and as root
    uv run python tests/fault_matrix.py --slurm 26.05 -k test_disk
        these, and add them to what is there

Each pair of a Slurm and a way to track processes is a run of
`pytest --slurm=… --proctrack=… tests/faults`. Arguments that are not named here go to
it. What earlier runs have seen of other tests stays in the table.
"""

import argparse
import datetime
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from pathlib import Path

import cluster

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests" / "fault_matrix.rst"
PAIRS = [
    (slurm, proctrack) for slurm in cluster.RELEASES for proctrack in cluster.PROCTRACK
]
HEAD = """\
================
The fault matrix
================

The seconds that the cases of ``tests/faults`` took where they passed, \
as ``tests/fault_matrix.py`` has seen.
`Evidence <../docs/evidence.rst>`_ says what they do. \
An empty cell was not run, or not with the tests as they
are now.

"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slurm", choices=cluster.RELEASES, help="this one only")
    parser.add_argument("--proctrack", choices=cluster.PROCTRACK, help="this one only")
    args, others = parser.parse_known_args()
    failed = False
    for slurm, proctrack in PAIRS:
        if args.slurm in (None, slurm) and args.proctrack in (None, proctrack):
            with tempfile.TemporaryDirectory() as folder:
                report = Path(folder) / "report.xml"
                command = [sys.executable, *"-m pytest -v tests/faults".split()]
                command += [f"--slurm={slurm}", f"--proctrack={proctrack}"]
                command += [f"--junit-xml={report}", *others]
                failed |= subprocess.run(command, cwd=ROOT).returncode != 0
                if report.exists():
                    record(slurm, proctrack, report)
    sys.exit(failed)


def record(slurm: str, proctrack: str, report: Path) -> None:
    """Add what a run of pytest has reported to the table."""
    table = read_table()
    column = PAIRS.index((slurm, proctrack))
    cases: dict[str, str] = {}
    for case in xml.parse(report).iter("testcase"):
        file = case.get("classname").removeprefix("tests.faults.")
        name = f"{file}::{case.get('name')}"
        bad = [c.tag for c in case if c.tag in ("failure", "error", "skipped")]
        seconds = f"{float(case.get('time')):.0f}"
        # An error while tearing down is a test case of its own.
        cases[name] = bad[0] if bad else cases.get(name, seconds)
    for name, outcome in cases.items():
        table.setdefault(name, [""] * len(PAIRS))[column] = outcome
    write_table(table)


def read_table() -> dict[str, list[str]]:
    if not TABLE.exists():
        return {}
    rows = re.findall(
        r"^   \* - ``(.*)``\n((?:     -.*\n)*)", TABLE.read_text(), re.MULTILINE
    )
    return {name: re.findall(r"-[ ]?(.*)\n", cells) for name, cells in rows}


def write_table(table: dict[str, list[str]]) -> None:
    lines = [".. list-table::", "   :header-rows: 1", "", "   * - Case"]
    lines += [f"     - {slurm}, {proctrack}" for slurm, proctrack in PAIRS]
    for name in sorted(table):
        lines.append(f"   * - ``{name}``")
        lines += [f"     - {cell}".rstrip() for cell in table[name]]
    cells = [cell for cells in table.values() for cell in cells if cell]
    passed = sum(map(str.isdigit, cells))
    said = f"{passed} passed, {len(cells) - passed} did not."
    lines += ["", f"{said} Last run: {datetime.date.today()}.", ""]
    TABLE.write_text(HEAD + "\n".join(lines))


if __name__ == "__main__":
    main()
