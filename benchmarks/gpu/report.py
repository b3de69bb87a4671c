"""The results of a step: a JSON file that is rewritten after each case, the table, and docs/gpu.md.

STEP.json    {"step", "machine": {...}, "cases": {case: {"state", "seconds", "rows": [{name, goal, result, figure}]}}}
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from plan import STEPS

PASS, FAIL, MEASURED = "pass", "FAIL", "measured"
NOT_HERE, NOT_REACHED, CUT_OFF, BEGUN = "not here", "not reached", "cut off", "begun"
MARK = "<!-- results: benchmarks/gpu writes what follows -->\n"
NEVER = "**It has not run on a card yet.**\n"


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    goal: str = ""
    result: str = PASS
    figure: str = ""


def judged(name: str, goal: str, is_met: bool, figure: str) -> Row:
    return Row(name, goal, PASS if is_met else FAIL, figure)


class NotHere(Exception):
    """This machine lacks something that a case needs."""


class Record:
    """The JSON file of one step. If a process dies, the next one begins with the case after that."""

    def __init__(self, path: Path, step: str, cases: Iterable[str], machine: dict[str, Any]) -> None:
        self._path = path
        found = json.loads(path.read_text()) if path.exists() else {"cases": {}}
        self._cases: dict[str, Any] = {
            case: found["cases"].get(case, {"state": NOT_REACHED, "rows": [asdict(Row(case, result=NOT_REACHED))]})
            for case in cases
        }
        for died in (of for of in self._cases.values() if of["state"] == BEGUN):
            died["state"] = "died"
        self._all = {"step": step, "machine": machine, "cases": self._cases}
        self._write()

    def left(self) -> Iterator[str]:
        """The cases that no process has begun. Each is marked as begun first: if the process dies, the mark stays."""
        for case, found in self._cases.items():
            if found["state"] == NOT_REACHED:
                self.end(
                    case, [Row(case, result=FAIL, figure="the process ended in it: its log says how")], 0.0, "begun"
                )
                yield case

    def end(self, case: str, rows: Sequence[Row], seconds: float, state: str = "done") -> None:
        self._cases[case] = {"state": state, "seconds": round(seconds, 2), "rows": [asdict(row) for row in rows]}
        self._write()

    def _write(self) -> None:
        write(self._path, self._all)


def write(path: Path, found: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(found, indent=1) + "\n")
    os.replace(temporary, path)


def cut_off(path: Path) -> None:
    """The time of a step was over. Mark the case that was running as cut off, not as failed."""
    found = json.loads(path.read_text()) if path.exists() else {"cases": {}}
    for case, of in found["cases"].items():
        if of["state"] == BEGUN:
            of.update(state=CUT_OFF, rows=[asdict(Row(case, result=CUT_OFF))])
            write(path, found)


def results(folder: Path) -> dict[str, dict[str, Any]]:
    """Step -> content of its file, for all steps that have begun."""
    return {step: json.loads(p.read_text()) for step in STEPS if (p := folder / f"{step}.json").exists()}


def rows_of(found: dict[str, Any]) -> list[Row]:
    return [Row(**row) for case in found["cases"].values() for row in case["rows"]]


def table(folder: Path) -> str:
    """All rows as text for a terminal."""
    lines = []
    for step, found in results(folder).items():
        for row in rows_of(found):
            what = f"{row.figure}{f'  (goal: {row.goal})' * bool(row.goal)}"
            lines.append(f"{step:<17} {row.result:<12} {row.name:<58} {what}".rstrip())
    return "\n".join(lines)


def page(before: str, folder: Path) -> str:
    """docs/gpu.md: the part that people have written, then the results of a run on a card, if there are any."""
    found = results(folder)
    if not found:
        return before.partition(MARK)[0] + MARK + "\n" + NEVER
    machine = next(of["machine"] for of in found.values() if of["machine"])
    said = ", ".join(f"{key} {value}" for key, value in machine.items())
    parts = [before.partition(MARK)[0], MARK, f"\nLast run: {said}.\n"]
    # A step that repeats another one becomes a column in that one's table.
    for step in (name for name in found if "-" not in name):
        again = [name for name in found if name.startswith(f"{step}-")]
        heads = [step, "goal", "result", *(name.removeprefix(f"{step}-") for name in again), "figure"]
        parts.append(f"\n| {' | '.join(heads)} |\n|{' --- |' * len(heads)}\n")
        others = [{row.name: row.result for row in rows_of(found[name])} for name in again]
        for row in rows_of(found[step]):
            cells = [row.name, row.goal, row.result, *(other.get(row.name, "") for other in others), row.figure]
            parts.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |\n")
    return "".join(parts)
