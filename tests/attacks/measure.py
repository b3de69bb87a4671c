"""The attacks of the table, one after the other: what became of each, and what it cost.

    python tests/attacks/measure.py                       # less than five minutes
    python tests/attacks/measure.py --rows 1,16 --cycles 5
    python tests/attacks/measure.py --json result.json

Each attack is first judged as the test does (test_attacks.py): nobody honest is hurt, RSS grows by at most 64 MiB, and
so on. Then come cycles of two windows each, in the same scene:

    attacked    the attack, in a process of the lowest priority (nice 19)
    control     a process of the same priority that uses the processor as much as the attack did, and touches nothing

On a real machine the attacker sits elsewhere; here it shares the cores with the honest learner. So what an attack
costs is the honest learner's step rate `attacked` over that in `control`: medians over the cycles. It must not be
below 95 %. A learner steps on while its shard does nothing, so the table also has what it keeps of its rounds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil
from attack import Attack
from scene import Scene
from table import ATTACKS

import forks

LOSS_MAX = 0.05
"""Share of its steps that an attack may cost an honest learner."""
NICE = 19


@dataclass
class Row:
    number: int
    name: str
    needs: str
    problems: list[str]
    answers: dict[str, int]
    facts: dict[str, float]
    rss_more_mib: float
    attacker_cores: float = 0.0
    """That the attacker's process used, on average."""
    attacked: list[float] = field(default_factory=list)
    """Steps per second of the honest learner, window by window."""
    control: list[float] = field(default_factory=list)
    rounds_attacked: list[float] = field(default_factory=list)
    """Versions per second that reach the honest learner."""
    rounds_control: list[float] = field(default_factory=list)

    @property
    def kept(self) -> float | None:
        """Share of the steps that the honest learner keeps; None: it took none that could be compared."""
        return _ratio(self.attacked, self.control)

    @property
    def rounds_kept(self) -> float | None:
        """The same of its rounds."""
        return _ratio(self.rounds_attacked, self.rounds_control)

    @property
    def ok(self) -> bool:
        return not self.problems and self.kept is not None and self.kept >= 1 - LOSS_MAX


def _ratio(values: list[float], reference: list[float]) -> float | None:
    if not values or not reference or not median(reference):
        return None
    return median(values) / median(reference)


def main() -> int:
    parser = argparse.ArgumentParser(description="Do the attacks to a real shard, and say what they cost.")
    parser.add_argument("--rows", default="", help="numbers, separated by commas (default: all)")
    parser.add_argument("--window", type=float, default=2.0, help="seconds of a window (default: %(default)s)")
    parser.add_argument("--cycles", type=int, default=1, help="of two windows each (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the results here, too")
    args = parser.parse_args()
    numbers = [int(number) for number in args.rows.split(",") if number] or list(ATTACKS)
    print(
        f"Honest learners beside each attack; {args.cycles} cycles of attacked and control windows of "
        f"{args.window:g} s.\nAttacker and control run at nice {NICE}. Kept: attacked / control, medians."
    )
    print(_line("row", "attack", "needs", "kept", "rounds", "RSS +", "outcome"))
    rows = []
    for number in numbers:
        with tempfile.TemporaryDirectory(prefix="attack-") as folder:
            row = measure(ATTACKS[number], Path(folder), args.window, args.cycles)
        rows.append(row)
        _print(row)
    held = sum(row.ok for row in rows)
    print(f"{held} of {len(rows)} attacks fail as they must")
    if args.json is not None:
        told = [asdict(row) | {"kept": row.kept, "rounds_kept": row.rounds_kept, "ok": row.ok} for row in rows]
        whole = {"window_s": args.window, "cycles": args.cycles, "rows": told}
        args.json.write_text(json.dumps(whole, indent=2) + "\n")
    return 0 if held == len(rows) else 1


def measure(attack: Attack, folder: Path, window_s: float, cycles: int) -> Row:
    with Scene(attack, folder) as scene:
        found = scene.suffer()
        row = Row(
            attack.number, attack.name, attack.needs.value, attack.problems(found), dict(found.seen.answers),
            found.seen.facts, found.rss_more / 2**20,
        )  # fmt: skip
        try:
            for _ in range(cycles):
                _compare(scene, row, window_s)
        except (AssertionError, psutil.Error) as error:
            row.problems.append(str(error).splitlines()[0])
    return row


def _compare(scene: Scene, row: Row, window_s: float) -> None:
    striker = scene.striker(NICE)
    steps, rounds = _rates(scene, window_s)
    row.attacked.append(steps)
    row.rounds_attacked.append(rounds)
    row.attacker_cores = max(row.attacker_cores, striker.cpu_s() / window_s)
    striker.end()
    burner = forks.context.Process(target=_burn, args=(min(1.0, row.attacker_cores),), daemon=True)
    burner.start()
    try:
        steps, rounds = _rates(scene, window_s)
        row.control.append(steps)
        row.rounds_control.append(rounds)
    finally:
        burner.kill()
        burner.join()


def _rates(scene: Scene, window_s: float) -> tuple[float, float]:
    """Steps and versions per second of the honest learner."""
    assert scene.honest is not None
    before = scene.honest.ask()
    time.sleep(window_s)
    after = scene.honest.ask()
    seconds = after.at - before.at
    return (after.steps - before.steps) / seconds, (after.versions - before.versions) / seconds


def _burn(cores: float) -> None:
    """Use that much of a core, at the attacker's priority."""
    import os

    os.nice(NICE)
    while True:
        began = time.process_time(), time.monotonic()
        while time.process_time() - began[0] < 0.02 * cores:
            pass
        time.sleep(max(0.0, 0.02 - (time.monotonic() - began[1])))


def _print(row: Row) -> None:
    kept, rounds = ("-" if one is None else f"{one:.0%}" for one in (row.kept, row.rounds_kept))
    problems = list(row.problems)
    if row.kept is not None and row.kept < 1 - LOSS_MAX:
        problems.append(f"the honest learner keeps {row.kept:.0%} of its steps")
    outcome = "ok" if row.ok else f"MISSED: {'; '.join(problem.splitlines()[0][:150] for problem in problems)}"
    rss = f"{row.rss_more_mib:.0f} MiB"
    print(_line(row.number, row.name, row.needs, kept, rounds, rss, outcome))
    print(f"{'':23} answers: {_summary(row.answers)}", flush=True)


def _line(*cells: object) -> str:
    number, name, needs, *figures, outcome = map(str, cells)
    return f"{number:>3} {name:18} {needs:7} " + " ".join(f"{one:>8}" for one in figures) + f"  {outcome}"


def _summary(answers: dict[str, int]) -> str:
    return ", ".join(f"{code} {count}" for code, count in answers.items()) or "none"


if __name__ == "__main__":
    sys.exit(main())
