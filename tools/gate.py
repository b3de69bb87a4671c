"""Runs checks that take long or depend on the machine's speed, and writes the results to docs/gate.md: `make gate`.

    python tools/gate.py                  all steps
    python tools/gate.py attack fuzz      these steps; the rows of the others on the page stay

The output of a step goes to .cache/gate/STEP.log. A step that cannot run here (no container engine, no Ray) prints
"make: NOT RUN: why" and does not count as failed. The exit code is 1 if a step failed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE, LOGS = ROOT / "docs/gate.md", ROOT / ".cache/gate"
NOT_RUN = re.compile(r"^make: NOT RUN: (.*)", re.MULTILINE)
PYTEST = r"^=+ (.*) in [\d.]+s.* =+$"
STEPS: dict[str, tuple[str, str]] = {
    # name -> the command, and the pattern of the figures in its output
    "tests": ("make gate-tests", PYTEST),
    "mutants": ("make mutants", PYTEST),
    "simulate": ("make simulate", r"^(\d+ short schedules .*violations)"),
    "fuzz": ("make fuzz", r"^(\d+ messages .* findings)"),
    "attack": ("make attack", r"^(\d+ of \d+ attacks .*)"),
    "chaos": ("make chaos", r"^(\d+ violations|no violations)$"),
    "honest": ("make honest", r"^(\d+ clusters, .*)"),
    "zoo": ("make zoo", r"^(\d+ of \d+ programs .*)"),
    "trips": ("make round-trips", r"^(\d+ draws: .*)"),
    "slurm": ("make e2e-slurm", PYTEST),
    "ray": ("make e2e-ray", PYTEST),
    "compose": ("make e2e-compose", PYTEST),
}
HEAD = """# The gate

`make gate` runs what takes long or depends on the pace of the machine, before a release; `make test` has a short case
of each. `tools/gate.py` writes this page. `make gate GATE="attack fuzz"` runs two of them.

| step | command | result | figures | seconds | commit | date |
| --- | --- | --- | --- | ---: | --- | --- |
"""


@dataclass(frozen=True)
class Row:
    """The outcome of a step."""

    result: str  # passed, FAILED or NOT RUN
    figures: str = ""
    seconds: str = ""
    commit: str = ""
    date: str = ""

    def line(self, step: str) -> str:
        return f"| {' | '.join((step, f'`{STEPS[step][0]}`', *astuple(self)))} |\n"


def judged(code: int, output: str, figures: str) -> tuple[str, str]:
    """The result and the figures of a step that has ended."""
    if code and (why := NOT_RUN.search(output)):
        return "NOT RUN", why[1]
    found = re.findall(figures, output, re.MULTILINE)
    return "FAILED" if code else "passed", found[-1].replace("|", "/") if found else ""


def rows_of(page: str) -> dict[str, Row]:
    """Step -> row, read from a page that was written earlier."""
    cells = ([cell.strip() for cell in line.strip("|\n").split("|")] for line in page.splitlines() if "`make " in line)
    return {step: Row(*others) for step, _, *others in (row for row in cells if len(row) == 7)}


def page_of(rows: Mapping[str, Row]) -> str:
    """The page, with the steps in the order of `STEPS`. A step that has never run is NOT RUN."""
    return HEAD + "".join(rows.get(step, Row("NOT RUN")).line(step) for step in STEPS)


def run(step: str, commit: str) -> Row:
    """Run the step's command to its end. The output goes to the step's log."""
    command, figures = STEPS[step]
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "MAKEFLAGS", "MAKELEVEL")}
    began, log = time.monotonic(), LOGS / f"{step}.log"
    with log.open("w") as file:
        ended = subprocess.run(
            command.split(), stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd=ROOT, env=environment, check=False
        )
    result, said = judged(ended.returncode, log.read_text(errors="replace"), figures)
    return Row(result, said, f"{time.monotonic() - began:.0f}", commit, datetime.now(UTC).strftime("%Y-%m-%d"))


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def main(arguments: Sequence[str]) -> int:
    """Run these steps, or all steps, and write the page after each."""
    if unknown := [step for step in arguments if step not in STEPS]:
        print(f"gate: no such step: {', '.join(unknown)}. There are: {', '.join(STEPS)}", file=sys.stderr)
        return 2
    LOGS.mkdir(parents=True, exist_ok=True)
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs/gate.md")
    commit = git("rev-parse", "--short", "HEAD") + " and changes" * bool(changed)
    failed = False
    for step in arguments or STEPS:
        row = run(step, commit)
        print(f"gate: {step}: {row.result} in {row.seconds} s{': ' * bool(row.figures)}{row.figures}", flush=True)
        rows = rows_of(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else {}
        PAGE.write_text(page_of({**rows, step: row}), encoding="utf-8")
        failed |= row.result == "FAILED"
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
