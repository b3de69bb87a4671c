"""Liars among honest learners, by what they do to the loss: benchmarks/results/hostile.md, in short docs/quality.md.

    python benchmarks/hostile.py                            # all; exits 1 where a promise is broken
    python benchmarks/hostile.py --trust strangers --rows "sign flip" ALIE
    python benchmarks/hostile.py --page                     # and write both

Whole runs in lockstep, as in `honest.py`: production cores in virtual time, a small model of words, default settings.
So nothing here depends on the pace of the machine. The liar trains as the others do, and then says or sends something
else. It may read what the others have sent to the round. A figure is the worst of three timings of the liar, and
beside the same run without it. A step is a second.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

import torch
from diloco_server.core.trust.conduct import OUTLIERS
from torch import Tensor

from diloco_common.codec import Payload, decode_payload, encode_payload
from diloco_common.settings import GuardSettings
from diloco_common.wire.messages import Outcome, Progress, PushAnswer, PushHeader
from diloco_lab.lockstep import TICK, ShardRig
from diloco_server.core.effects import MergeRound
from diloco_server.core.ledger import Fact, LearnerQuarantined
from honest import Learner, Row, Run, Shard

PAGE = Path(__file__).resolve().parent.parent / "docs" / "quality.md"
RECORD = Path(__file__).resolve().parent / "results" / "hostile.md"
STEPS = 160.0
CROWDS = ((1, 3), (1, 4), (1, 8), (2, 8))
"""Liars, of so many learners. Two of eight only among strangers."""
MEMBERS_MOST, STRANGERS_MOST = 1.05, 1.02
"""Loss beside the same run without the liar."""
NAMED_S = 60.0
"""A member. Of a stranger nothing has to be refused: it has no weight."""
COUNTED = 0.1
"""Tokens may be counted so far from the truth."""
PATIENCE = 1.5
"""Inner steps for which a liar waits for the contributions of the others."""
ALIE_Z = 1.5
"""Standard deviations. With one liar of eight the paper's own formula gives less than none; 1.5 is what it uses."""

Trust = Literal["members", "strangers"]
Timing = Literal["first", "last", "fast"]
TIMINGS: tuple[Timing, ...] = ("first", "last", "fast")
"""It pushes before the others; or after them, as the grace window ends; or first, and reports a quarter more steps."""
FAST = 1.25
Memory = dict[str, Tensor]
Values = Callable[[Tensor, Sequence[Tensor], Memory], Tensor]
"""(what an honest learner would send, what the others sent, what this liar remembers) -> what it sends."""


@dataclass(frozen=True)
class Lie:
    """A row."""

    values: Values = lambda own, others, memory: own
    tokens: int = 1
    """Times as many as trained, from the first report on, and in each contribution."""
    claims: Callable[[PushHeader], PushHeader] = lambda header: header
    report: Callable[[Progress], Progress] = lambda progress: progress
    is_silent: bool = False
    """It contributes nothing."""
    joins_late: bool = False
    """In the middle of the run."""
    inside: bool = False
    """A healthy member could send that, with a larger batch, a faster machine or other data: a figure, no promise."""


def flip(times: float) -> Values:
    return lambda own, others, memory: -times * own


def flips(own: Tensor, others: Sequence[Tensor], memory: Memory) -> Tensor:
    """Ten times, then five hundred times."""
    memory["sent"] = memory.get("sent", torch.zeros(())) + 1
    return own * -(10.0, 500.0)[int(memory["sent"]) // 8 % 2]


def ratchet(own: Tensor, others: Sequence[Tensor], memory: Memory) -> Tensor:
    """Each is twelve times the one before."""
    memory["last"] = memory.get("last", own) * 12.0
    return memory["last"].clamp(-1e30, 1e30)


def noise(own: Tensor, others: Sequence[Tensor], memory: Memory) -> Tensor:
    """Of ordinary length."""
    drawn = torch.randn(own.shape, generator=torch.Generator().manual_seed(int(1e6 * float(own.norm()))))
    return drawn.mul_(own.norm() / drawn.norm())


def one_way(own: Tensor, others: Sequence[Tensor], memory: Memory) -> Tensor:
    """The same direction for ever, of ordinary length."""
    drawn = torch.randn(own.shape, generator=torch.Generator().manual_seed(1))
    return drawn.mul_(own.norm() / drawn.norm())


def alie(own: Tensor, others: Sequence[Tensor], memory: Memory) -> Tensor:
    """mean - z std of the others: inside their spread, always on the wrong side of it.

    Baruch, Baruch, Goldberg 2019, "A Little Is Enough" (arXiv 1902.06156).
    """
    if len(others) < 2:
        return -own
    mu, sigma = torch.stack([*others]).mean(0), torch.stack([*others]).std(0)
    return mu - ALIE_Z * sigma * torch.sign(mu)


def inner_product(own: Tensor, others: Sequence[Tensor], memory: Memory) -> Tensor:
    """The opposite of the others' mean, ten times as long.

    Xie, Koyejo, Gupta 2019, "Fall of Empires" (arXiv 1903.03936).
    """
    return -10.0 * (torch.stack([*others]).mean(0) if others else own)


def replay(own: Tensor, others: Sequence[Tensor], memory: Memory) -> Tensor:
    """The first contribution, again and again."""
    return memory.setdefault("first", own.clone())


ROWS: dict[str, Lie] = {
    "sign flip": Lie(flip(1.0), inside=True),
    "sign flip x10, x500": Lie(flips),
    "norm x12 each time": Lie(ratchet),
    "steps x1.25, 512 per push, sign flip x300": Lie(
        flip(300.0), claims=lambda header: replace(header, steps=512),
        report=lambda progress: replace(progress, inner_step=int(FAST * progress.inner_step)),
    ),
    "joins late, 40,000 steps per push, sign flip x3,000": Lie(
        flip(3000.0), joins_late=True,
        claims=lambda header: replace(header, steps=40_000, tokens=40_000 * header.tokens // header.steps),
    ),
    "noise": Lie(noise, inside=True),
    "replay": Lie(replay, inside=True),
    "ALIE": Lie(alie, inside=True),
    "inner product x10": Lie(inner_product),
    "2^62 tokens": Lie(claims=lambda header: replace(header, tokens=2**62)),
    "tokens x16": Lie(tokens=16, inside=True),
    "tokens x16, sign flip": Lie(flip(1.0), tokens=16, inside=True),
    "tokens x60, one direction": Lie(one_way, tokens=60, inside=True),
    "1,000 steps more per report, zeros": Lie(
        lambda own, others, memory: torch.zeros_like(own),
        report=lambda progress: replace(progress, inner_step=1001 * progress.inner_step), inside=True,
    ),
    "steps of 10^6 s, contributes nothing": Lie(
        report=lambda progress: replace(progress, step_time_s=1e6), is_silent=True, inside=True
    ),
}  # fmt: skip


# ------------------------------------------------------------------ a run


class Watched(Shard):
    """Notes when a learner is named."""

    def note(self, event: Fact) -> None:
        if isinstance(event, LearnerQuarantined):
            self._run.named.setdefault(event.learner_id, self._run.clock.now)  # type: ignore[attr-defined]

    def merging(self, merge_round: MergeRound) -> None:
        run: Attacked = self._run  # type: ignore[assignment]
        for c in merge_round.contributions:
            run.counted += c.counted
            true = run.truth[c.learner_id, c.fragment_id, c.round]
            run.trained += min(true, c.counted) if c.learner_id in run.liars else true


class Honest(Learner):
    def _hand_in(self, rig: ShardRig, header: PushHeader, payload: Payload) -> PushAnswer:
        run: Attacked = self._run  # type: ignore[assignment]
        run.truth.setdefault((self.learner_id, header.fragment_id, header.round), header.tokens)
        return super()._hand_in(rig, header, payload)


class Liar(Honest):
    """Trains like the others, and then says or sends something else."""

    def __init__(self, run: Attacked, index: int) -> None:
        super().__init__(run, index)
        self._lie, self._timing = run.lie, run.timing
        self._memories: dict[int, Memory] = {}
        self._refused = 0

    def _report(self, loss: float, took: float) -> Progress:
        true = super()._report(loss, took)
        steps = int(FAST * true.inner_step) if self._timing == "fast" else true.inner_step
        return self._lie.report(replace(true, inner_step=steps, tokens=self._lie.tokens * true.tokens))

    def _arrive(self, rig: ShardRig, header: PushHeader, payload: Payload, waited: float = 0.0) -> None:
        run: Attacked = self._run  # type: ignore[assignment]
        collecting = rig.shard.owned(header.fragment_id).round
        there = collecting.contributions if collecting is not None else {}
        awaited = collecting is not None and any(i not in run.liars for i in collecting.missing)
        if self._lie.is_silent:
            return
        if self._timing == "last" and awaited and waited < PATIENCE:
            run.clock.after(TICK, lambda: self._arrive(rig, header, payload, waited + TICK))
            return
        run.truth[self.learner_id, header.fragment_id, header.round] = header.tokens
        memory = self._memories.setdefault(header.fragment_id, {})
        others = [_values(cast(Payload, c.payload)) for i, c in there.items() if i not in run.liars]
        said = encode_payload(self._lie.values(_values(payload), others, memory), payload.header.encoding)
        header = replace(header, payload=said.header, tokens=self._lie.tokens * header.tokens)
        super()._arrive(rig, self._lie.claims(header), said)

    def _hand_in(self, rig: ShardRig, header: PushHeader, payload: Payload) -> PushAnswer:
        answer = super()._hand_in(rig, header, payload)
        self._refused += answer.outcome is Outcome.REJECTED
        if self._refused == OUTLIERS:
            self._run.named.setdefault(self.learner_id, self._run.clock.now)  # type: ignore[attr-defined]
        return answer


def _values(payload: Payload) -> Tensor:
    """float32 [num_elements]."""
    out = torch.empty(payload.header.num_elements)
    decode_payload(payload, out)
    return out


@dataclass(frozen=True)
class Case:
    """One run."""

    trust: Trust
    learners: int
    row: str = ""
    """"": nobody lies."""
    liars: int = 0
    timing: Timing = "first"


@dataclass(frozen=True)
class Result:
    loss: float
    named_s: float
    """So long after it joined the last liar was; infinity: never."""
    counted: float
    """Tokens, over those that were really trained for what is merged. A liar's may count for less."""
    wrongly_named: int
    """Honest learners."""


class Attacked(Run):
    """The last learners lie."""

    fragments = 6

    def __init__(self, case: Case) -> None:
        guard = GuardSettings(trust=case.trust)
        super().__init__(Row((1.0,) * case.learners, steps=STEPS), 0, guard)
        self.lie, self.timing = ROWS.get(case.row, Lie()), case.timing
        self.named: dict[str, float] = {}
        self.truth: dict[tuple[str, int, int], int] = {}
        self.counted = self.trained = 0
        self.shards = [Watched(self, 0, 1)]
        honest = case.learners - case.liars
        made = [(Honest if i < honest else Liar)(self, i) for i in range(case.learners)]
        self.learners = {one.learner_id: one for one in made}
        self.liars = {one.learner_id for one in made[honest:]}

    def joins_at(self, index: int) -> float:
        return self.row.steps / 2 if f"worker-{index}" in self.liars and self.lie.joins_late else 0.0


def run(case: Case) -> Result:
    torch.set_num_threads(1)
    done = Attacked(case).train()
    here = {one: done.joins_at(i) for i, one in enumerate(done.learners)}
    named_s = max((done.named.get(one, math.inf) - here[one] for one in done.liars), default=0.0)
    return Result(done.loss, named_s, done.counted / done.trained, len(done.named.keys() - done.liars))


# ------------------------------------------------------------------ the tables


def cases(trust: Trust, rows: Iterable[str]) -> list[Case]:
    crowds = CROWDS if trust == "strangers" else CROWDS[:-1]
    return [
        Case(trust, learners, row, liars, timing)
        for row, (liars, learners), timing in itertools.product(rows, crowds, TIMINGS)
    ]


def table(trust: Trust, rows: Iterable[str], results: Mapping[Case, Result]) -> tuple[list[str], list[str]]:
    """Markdown lines, and the promises that are broken."""
    crowds = sorted({(c.liars, c.learners) for c in results if c.trust == trust and c.row})
    lines = [
        f"| among {trust} | " + " | ".join(f"{liars} of {of}" for liars, of in crowds) + " | named after | counted |",
        "| --- |" + " ---: |" * (len(crowds) + 2),
    ]
    broken = []
    for row in rows:
        of_row = {c: r for c, r in results.items() if (c.trust, c.row) == (trust, row)}
        ratios = {c: r.loss / results[Case(trust, c.learners - c.liars)].loss for c, r in of_row.items()}
        worst = [max(ratios[c] for c in of_row if (c.liars, c.learners) == crowd) for crowd in crowds]
        named_s = max(r.named_s for r in of_row.values())
        counted = sorted(r.counted for r in of_row.values())
        ends = "–".join(dict.fromkeys((f"{counted[0]:.2f}", f"{counted[-1]:.2f}")))  # noqa: RUF001
        cells = [*(f"{one:.3f}" for one in worst), "never" if math.isinf(named_s) else f"{named_s:.0f} s", ends]
        lines.append(f"| {row} | {' | '.join(cells)} |")
        promised = trust == "strangers" or not ROWS[row].inside
        most = STRANGERS_MOST if trust == "strangers" else MEMBERS_MOST
        wrong = [f"loss x {max(worst):.3f}"] * (promised and not max(worst) <= most)
        wrong += [f"named after {cells[-2]}"] * (trust == "members" and promised and named_s > NAMED_S)
        wrong += [f"counts {ends} of the tokens"] * (promised and max(1 - counted[0], counted[-1] - 1) > COUNTED)
        wrong += ["an honest learner is named"] * any(r.wrongly_named for r in of_row.values())
        broken += [f"{trust}, {row}: {', '.join(wrong)}"] * bool(wrong)
    return lines, broken


def in_short(members: Sequence[str], strangers: Sequence[str]) -> list[str]:
    """Both tables as one: the worst of strangers, and two crowds of members."""
    lines = [
        "| what the liar does | members: 1 of 3 | 1 of 8 | named after | counted | strangers: worst | named after |",
        "| --- |" + " ---: |" * 6,
    ]
    for one, other in zip(members[2:], strangers[2:], strict=True):
        row, of_3, _, of_8, named, counted = _cells(one)
        _, *losses, its_named, _ = _cells(other)
        lines.append(f"| {' | '.join([row, of_3, of_8, named, counted, max(losses, key=float), its_named])} |")
    return lines


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=[*ROWS], default=[*ROWS], help="only these")
    parser.add_argument("--trust", nargs="+", choices=["members", "strangers"], default=["members", "strangers"])
    parser.add_argument("--page", action="store_true", help="write the record, and docs/quality.md")
    args = parser.parse_args()
    if args.page and (args.rows != [*ROWS] or len(args.trust) != 2):
        parser.error("--page takes all rows")
    wanted = [case for trust in args.trust for case in cases(trust, args.rows)]
    wanted += sorted({Case(c.trust, c.learners - c.liars) for c in wanted}, key=str)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        results = dict(zip(wanted, pool.map(run, wanted), strict=True))
    tables, broken = [], []
    for trust in args.trust:
        lines, wrong = table(trust, args.rows, results)
        tables.append(lines)
        broken += wrong
    shown = "\n\n".join("\n".join(lines) for lines in tables)
    print(shown, *broken, sep="\n")
    if args.page:
        RECORD.write_text(shown + "\n")
        short = "\n".join(in_short(*tables))
        filled = re.sub(r"(?s)(<!-- hostile -->\n\n).*?(\n\n<!-- end -->)", rf"\g<1>{short}\g<2>", PAGE.read_text())
        PAGE.write_text(filled)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
