"""What a step has found: a JSON file that is written anew after each case, the table, and docs/gpu.md.

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
NOT_HERE, NOT_REACHED, CUT_OFF = "not here", "not reached", "cut off"
PAGE_HEAD = """# On a GPU

`make gpu` proves and measures a learner on an accelerator, in eight minutes and in one process tree, with no network.
`benchmarks/gpu/` has the command, and writes this page. The steps come in order of value; each has its own bound, and
writes its JSON as soon as a case is done, so a run that is cut off has told what it knew.

    make gpu                                              # the card of this machine, eight minutes
    make gpu GPU="--device cpu --minutes 1 --out g"       # the rehearsal, as CI runs it
    make gpu GPU="--only cost --minutes 15"               # one step

A machine that has torch but no network and none of our packages: `benchmarks/gpu/pack.py` makes a folder of wheels for
its version of Python, and says the line that installs them there and runs everything, without touching its torch.

"""
NEVER = "**It has not run on a card yet.** What follows is what it will show.\n\n"
STEPS_ARE = """- **correct**: two shards and three learners on one card. A row is a training script that must hold what a version has
  brought; equal values are equal bytes on CPU and device. Again with another seed, and with
  `CUDA_LAUNCH_BLOCKING=1`: a race is an error that moves.
- **cost**: GPTs of 124 M and 1 B parameters in bfloat16 autocast, with and without a learner in turns of 24 steps.
- **encode**: encoding on the device or on the host, beside real steps.
- **doctor**: `diloco doctor --device`: the same work twice, bit for bit; bandwidth, pinned copies, free memory.
- **quality**: a byte GPT of 10 M parameters; data-parallel, H = 12 and H = 24 with the same tokens. Not tuned
  at this size.

"""
UNTESTED = """
## What nobody has tried

XPU, ROCm, NPU and MPS. Workers ask for no make by name (`worker/diloco_worker/core/device.py`): `torch.accelerator`
from torch 2.6 on, before that the module of the device. Not known is whether MPS and NPU have `record_stream`, and pinned
memory, which `residuals="host"` needs.

With everything in host memory, a learner should take 0.1 bytes per parameter of a device. No option does that yet: the
anchors stay there (2 bytes), and residuals may go (`residuals="host"`).

A whole step that is captured as one CUDA graph: versions are applied between replays, in place, to the storage that the
graph reads and writes, and snapshots are taken there. So it works by design, and two rows will show it. A capture in
torch's usual mode ("global") is spoilt by any thread that allocates meanwhile, such as a learner's: capture before
`join`, or with `capture_error_mode="thread_local"`.

Encoding is on the device already: torch computes the codes there, and 1 or half a byte crosses. What is not known is
whether slices of 256 Ki elements, which suit the caches of a CPU, launch too many small kernels. The step **encode** says.
"""


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
    """What a case needs, this machine has not."""


class Record:
    """The JSON file of one step. A process that goes on after another one died begins with the next case."""

    def __init__(self, path: Path, step: str, cases: Iterable[str], machine: dict[str, Any]) -> None:
        self._path = path
        found = json.loads(path.read_text()) if path.exists() else {"cases": {}}
        self._cases: dict[str, Any] = {
            case: found["cases"].get(case, {"state": NOT_REACHED, "rows": [asdict(Row(case, result=NOT_REACHED))]})
            for case in cases
        }
        self._all = {"step": step, "machine": machine, "cases": self._cases}
        self._write()

    def left(self) -> Iterator[str]:
        """The cases that nobody has begun, each marked as begun: if the process dies in it, that is what stays."""
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
    """The time of a step was over: what was under way has not failed."""
    found = json.loads(path.read_text()) if path.exists() else {"cases": {}}
    for case, of in found["cases"].items():
        if of["state"] == "begun":
            of.update(state=CUT_OFF, rows=[asdict(Row(case, result=CUT_OFF))])
            write(path, found)


def results(folder: Path) -> dict[str, dict[str, Any]]:
    """Step -> its file, of those that have begun."""
    return {step: json.loads(p.read_text()) for step in STEPS if (p := folder / f"{step}.json").exists()}


def rows_of(found: dict[str, Any]) -> list[Row]:
    return [Row(**row) for case in found["cases"].values() for row in case["rows"]]


def table(folder: Path) -> str:
    """For a terminal."""
    lines = []
    for step, found in results(folder).items():
        for row in rows_of(found):
            what = f"{row.figure}{f'  (goal: {row.goal})' * bool(row.goal)}"
            lines.append(f"{step:<17} {row.result:<12} {row.name:<58} {what}".rstrip())
    return "\n".join(lines)


def page(folder: Path | None) -> str:
    """docs/gpu.md. `folder`: the JSON of a run on a card; None: there is none."""
    found = {} if folder is None else results(folder)
    if not found:
        return PAGE_HEAD + NEVER + STEPS_ARE + UNTESTED.lstrip("\n")
    machine = next(iter(found.values()))["machine"]
    said = ", ".join(f"{key} {value}" for key, value in machine.items())
    parts = [PAGE_HEAD, f"Last run: {said}.\n\n", STEPS_ARE]
    # The step that repeats another one is a column beside it.
    for step in (name for name in found if "-" not in name):
        again = [name for name in found if name.startswith(f"{step}-")]
        heads = [step, "goal", "result", *(name.removeprefix(f"{step}-") for name in again), "figure"]
        parts.append(f"\n| {' | '.join(heads)} |\n|{' --- |' * len(heads)}\n")
        others = [{row.name: row.result for row in rows_of(found[name])} for name in again]
        for row in rows_of(found[step]):
            cells = [row.name, row.goal, row.result, *(other.get(row.name, "") for other in others), row.figure]
            parts.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |\n")
    return "".join(parts) + UNTESTED
