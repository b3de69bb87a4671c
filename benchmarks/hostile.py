"""Sick and cunning learners among healthy ones, by what they do to the loss.

    python benchmarks/hostile.py                    # both tables; exits 1 where a promise is broken
    python benchmarks/hostile.py --page             # and write benchmarks/results/hostile.md and docs/quality.md

Whole runs in lockstep (`words.py`): production cores in virtual time. A member is sick for four fifths of the run and
does not know it. A stranger is cunning: it sees what the others have sent to the round. Each figure is the loss over
that of the healthy others alone, so 1.00 means that the sick one costs no more than its absence.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

import torch
from torch import Tensor

from diloco_common.codec import Payload, decode_payload, encode_payload
from diloco_common.settings import GuardSettings
from diloco_common.wire.messages import PushHeader
from diloco_lab.lockstep import TICK, ShardRig
from words import Cluster, Learner, Plan, Trained

PAGE = Path(__file__).resolve().parent.parent / "docs" / "quality.md"
RECORD = Path(__file__).resolve().parent / "results" / "hostile.md"
STEPS = 480.0
"""40 versions."""
MOST = {"muon": 1.01, "adamw": 1.015}
STRANGERS_MOST = 1.03
PATIENCE = 1.5
"""Inner steps for which a cunning one waits for the contributions of the others."""
ALIE_Z = 1.5
Trust = Literal["members", "strangers"]
Memory = dict[str, Tensor]
Values = Callable[[Tensor, Sequence[Tensor], Memory], Tensor]
"""(what a healthy learner would send, what the others sent, what this one remembers) -> what it sends."""


def times(factor: float) -> Values:
    return lambda own, others, memory: factor * own


def noise(factor: float) -> Values:
    def draw(own: Tensor, others: Sequence[Tensor], memory: Memory) -> Tensor:
        drawn: Tensor = torch.randn(own.shape, generator=torch.Generator().manual_seed(int(1e6 * float(own.norm()))))
        return drawn.mul_(factor * float(own.norm()) / float(drawn.norm()))

    return draw


def replay(own: Tensor, others: Sequence[Tensor], memory: Memory) -> Tensor:
    """The same values again and again."""
    return memory.setdefault("first", own.clone())


def just_under(own: Tensor, others: Sequence[Tensor], memory: Memory) -> Tensor:
    """Against the others' mean as far as it is not told for that, and as long as counts: the median of the others.

    Half of it lies along a direction of its own, the same in each round.
    """
    if not others:
        return -own
    mean = torch.stack([*others]).mean(0)
    own_way = memory.setdefault("way", torch.randn(own.shape, generator=torch.Generator().manual_seed(1)))
    agree = 0.5 * float(torch.stack([other / other.norm() for other in others]).mean(0).norm()) ** 2
    away: Tensor = own_way / own_way.norm() - agree * mean / mean.norm()
    usual = sorted(float(other.norm()) for other in others)[len(others) // 2]
    return away * (usual / float(away.norm()))


def alie(own: Tensor, others: Sequence[Tensor], memory: Memory) -> Tensor:
    """mean - z std of the others: inside their spread, always on the wrong side of it.

    Baruch, Baruch, Goldberg 2019, "A Little Is Enough" (arXiv 1902.06156).
    """
    if len(others) < 2:
        return -own
    stacked = torch.stack([*others])
    return stacked.mean(0) - ALIE_Z * stacked.std(0) * torch.sign(stacked.mean(0))


SICK: dict[str, Values] = {
    "nothing": times(1.0),
    "ten times as long": times(10.0),
    "a thousand times as long": times(1000.0),
    "noise, ten times as long": noise(10.0),
    "noise of the usual length": noise(1.0),
    "the same values again and again": replay,
    "sign flipped, ten times as long": times(-10.0),
    "sign flipped, usual length": times(-1.0),
}
CUNNING: dict[str, Values] = {
    "just under the limits": just_under,
    "a little is enough": alie,
    "sign flipped, x 500": times(-500.0),
    "2^40 tokens, one direction": just_under,
}
MERGES = ("mean", "agreement", "rda")


@dataclass(frozen=True)
class Case:
    trust: Trust
    optimizer: str
    merge: str
    learners: int
    sick: int = 0
    what: str = ""
    """"": all are healthy."""


class Sick(Learner):
    """Trains like the others, and sends something else from a fifth of the run on."""

    def __init__(self, run: Trained, index: int, case: Case) -> None:
        super().__init__(run, index)
        self._case, self._memories = case, dict[int, Memory]()
        self._values = (SICK | CUNNING)[case.what]

    def _arrive(self, rig: ShardRig, header: PushHeader, payload: Payload, waited: float = 0.0) -> None:
        run: Trained = self._run  # type: ignore[assignment]
        if run.clock.now < STEPS / 5:
            super()._arrive(rig, header, payload)
            return
        collecting = rig.shard.owned(header.fragment_id).round
        sick = {f"worker-{i}" for i in range(self._case.learners - self._case.sick, self._case.learners)}
        there = collecting.contributions if collecting is not None else {}
        awaited = collecting is not None and bool({*collecting.missing} - sick)
        if self._case.what in CUNNING and awaited and waited < PATIENCE:
            run.clock.after(TICK, lambda: self._arrive(rig, header, payload, waited + TICK))
            return
        others = [_values(cast(Payload, c.payload)) for i, c in there.items() if i not in sick]
        memory = self._memories.setdefault(header.fragment_id, {})
        said = encode_payload(self._values(_values(payload), others, memory), payload.header.encoding)
        tokens = 2**40 if self._case.what.startswith("2^40") else header.tokens
        super()._arrive(rig, replace(header, payload=said.header, tokens=tokens), said)


def _values(payload: Payload) -> Tensor:
    """float32 [num_elements]."""
    out = torch.empty(payload.header.num_elements)
    decode_payload(payload, out)
    return out


class Attacked(Trained):
    """The last learners are sick."""

    def __init__(self, case: Case) -> None:
        self._case = case
        lr, decay = (1e-2, int(STEPS)) if case.optimizer == "muon" else (4e-3, int(STEPS))
        plan = Plan(optimizer=case.optimizer, lr=lr, warm=24, decays=decay)
        cluster = Cluster((plan,) * case.learners, STEPS, fragments=6, merge=case.merge)
        super().__init__(cluster, GuardSettings(trust=case.trust))

    def learner(self, index: int) -> Learner:
        if index >= self._case.learners - self._case.sick:
            return Sick(self, index, self._case)
        return Learner(self, index)


@dataclass(frozen=True)
class Result:
    loss: float
    left_out_after: float
    """Steps from when it fell sick until it was left out; infinity: never."""
    wrongly: int
    """Healthy learners that were left out."""


def run(case: Case) -> Result:
    torch.set_num_threads(1)
    done = Attacked(case).train()
    sick = {f"worker-{i}" for i in range(case.learners - case.sick, case.learners)}
    after = [at - STEPS / 5 for one, at in done.found.left_out.items() if one in sick]
    return Result(done.loss, min(after, default=math.inf), len(done.found.left_out.keys() - sick))


def cases(trust: Trust) -> list[Case]:
    if trust == "strangers":
        return [Case(trust, o, "mean", 8, 2, what) for o, what in itertools.product(MOST, CUNNING)]
    rules = [("muon", "mean"), ("muon", "rda"), ("adamw", "agreement")]
    return [Case(trust, o, m, n, 1, w) for w, (o, m), n in itertools.product(SICK, rules, (3, 4, 8))]


def table(trust: Trust, results: dict[Case, Result]) -> tuple[list[str], list[str]]:
    """Markdown lines, and the promises that are broken."""
    rows: dict[str, list[str]] = {}
    broken = []
    heads = []
    for case, result in ((c, r) for c, r in results.items() if c.trust == trust and c.what):
        alone = results[replace(case, learners=case.learners - case.sick, sick=0, what="")]
        ratio = result.loss / alone.loss
        left = "" if math.isinf(result.left_out_after) else f" ({result.left_out_after:.0f})"
        rows.setdefault(case.what, []).append(f"{ratio:.3f}{left}")
        heads.append(f"{case.optimizer}, {case.merge}, {case.sick} of {case.learners}")
        most = STRANGERS_MOST if trust == "strangers" else MOST[case.optimizer]
        where = f"{trust}, {case.what}, {case.optimizer}, {case.merge}, {case.sick} of {case.learners}"
        broken += [f"{where}: x {ratio:.3f}"] * (not ratio <= most)
        broken += [f"{where}: {result.wrongly} healthy learners left out"] * (result.wrongly > 0)
    heads = list(dict.fromkeys(heads))
    lines = [f"| among {trust} | {' | '.join(heads)} |", "| --- |" + " ---: |" * len(heads)]
    return [*lines, *(f"| {what} | {' | '.join(cells)} |" for what, cells in rows.items())], broken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trust", nargs="+", choices=["members", "strangers"], default=["members", "strangers"])
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--page", action="store_true", help="write the record, and docs/quality.md")
    args = parser.parse_args()
    wanted = [case for trust in args.trust for case in cases(trust)]
    wanted += sorted({replace(c, learners=c.learners - c.sick, sick=0, what="") for c in wanted}, key=str)
    with ProcessPoolExecutor(args.jobs) as pool:
        results = dict(zip(wanted, pool.map(run, wanted), strict=True))
    tables, broken = zip(*(table(trust, results) for trust in args.trust), strict=True)
    shown = "\n\n".join("\n".join(lines) for lines in tables)
    print(shown, *itertools.chain(*broken), sep="\n")
    if args.page:
        RECORD.write_text(shown + "\n")
        filled = re.sub(r"(?s)(<!-- hostile -->\n\n).*?(\n\n<!-- end -->)", rf"\g<1>{shown}\g<2>", PAGE.read_text())
        PAGE.write_text(filled)
    return int(any(broken))


if __name__ == "__main__":
    sys.exit(main())
