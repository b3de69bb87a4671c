"""The damage to the loss by faulty and attacking learners among healthy ones.

    python benchmarks/hostile.py                    # both tables; exits 1 if a promise is broken
    python benchmarks/hostile.py --record           # also write benchmarks/results/hostile.md

Whole runs in the lab: production cores in virtual time, a small GPT over bytes, H = 12, 40 versions, int4 up and int8
down. All learners train equally long, and lower their learning rates to zero. A faulty member unknowingly sends wrong
values in the last four fifths of the run. An attacking stranger sees what the others have sent to the round. Each
figure is the loss divided by that of the healthy learners alone, so 1.00 means that a bad learner costs no more than
its absence. Figures are means over seeds, which differ by 0.3 %.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Literal, cast

import torch
from torch import Tensor

from diloco_common.codec import Payload, decode_payload, encode_payload
from diloco_common.settings import Settings
from diloco_common.wire.messages import PushHeader
from diloco_lab.arms import load_arm
from diloco_lab.lockstep import TICK, LearnerRig, LockstepRun, ShardRig
from diloco_lab.tasks import EVALUATION_TOKENS, BuiltIn, Stream
from words import Found, WatchedShard

HERE = Path(__file__).resolve().parent
RECORD = HERE / "results" / "hostile.md"
RATES = {"muon": "four_h12", "adamw": "adamw_h12_agreement"}
"""Arms of `benchmarks/frequency`, with tuned learning rates."""
STEPS = 480.0
"""40 versions."""
MOST = {"muon": 1.01, "adamw": 1.015}
STRANGERS_MOST = 1.03
PATIENCE = 1.5
"""Inner steps that an attacker waits for the others' contributions."""
ALIE_Z = 1.5
Trust = Literal["members", "strangers"]
TRUSTS: tuple[Trust, ...] = ("members", "strangers")
Memory = dict[str, Tensor]
Values = Callable[[Tensor, Sequence[Tensor], Memory], Tensor]
"""(a healthy learner's contribution, the others' contributions, this learner's memory) -> its contribution."""


def times(factor: float) -> Values:
    return lambda own, others, memory: factor * own


def noise(factor: float) -> Values:
    def draw(own: Tensor, others: Sequence[Tensor], memory: Memory) -> Tensor:
        drawn: Tensor = torch.randn(own.shape, generator=torch.Generator().manual_seed(int(1e6 * float(own.norm()))))
        return drawn.mul_(factor * float(own.norm()) / float(drawn.norm()))

    return draw


def replay(own: Tensor, others: Sequence[Tensor], memory: Memory) -> Tensor:
    return memory.setdefault("first", own.clone())


def just_under(own: Tensor, others: Sequence[Tensor], memory: Memory) -> Tensor:
    """Point against the others' mean, as far as chance hides it. The length is the median, the most that counts.

    Most of the contribution lies along a random direction, which all attackers share and which changes each round.
    """
    memory["round"] = memory.get("round", torch.zeros(())) + 1
    return _away(own, others, seed=int(memory["round"]), agree=0.03)


def one_way(own: Tensor, others: Sequence[Tensor], memory: Memory) -> Tensor:
    """The same as `just_under`, but along one direction in all rounds."""
    return _away(own, others, seed=1, agree=0.03)


def _away(own: Tensor, others: Sequence[Tensor], *, seed: int, agree: float) -> Tensor:
    others = [other for other in others if other.norm() > 0]
    if not others:
        return -own
    mean = torch.stack([*others]).mean(0)
    drawn = torch.randn(own.shape, generator=torch.Generator().manual_seed(seed))
    agreed = float(torch.stack([other / other.norm() for other in others]).mean(0).norm()) ** 2
    away: Tensor = drawn / drawn.norm() - agree * agreed * mean / mean.norm()
    usual = sorted(float(other.norm()) for other in others)[len(others) // 2]
    return away * (usual / float(away.norm()))


def alie(own: Tensor, others: Sequence[Tensor], memory: Memory) -> Tensor:
    """mean - z std of the others: within their spread, but always on the wrong side.

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
    "2^40 tokens, one direction": one_way,
}
Text = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Inputs and targets of a batch -> those of a learner that reads a text of its own."""
READS: dict[str, Text] = {
    "healthy, reads the same backwards": lambda inputs, targets: (targets.flip(-1), inputs.flip(-1)),
    "healthy, reads another alphabet": lambda inputs, targets: ((inputs + 128) % 256, (targets + 128) % 256),
}
TOLD = ("nothing", *READS, *list(SICK)[4:])


@dataclass(frozen=True)
class Case:
    trust: Trust
    optimizer: str
    merge: str
    learners: int
    sick: int = 0
    what: str = ""
    """Empty: all are healthy."""
    seed: int = 0

    @property
    def those_sick(self) -> set[str]:
        return {f"worker-{i}" for i in range(self.learners - self.sick, self.learners)}


class Sick(LearnerRig):
    """Trains like the others, but sends something else after a fifth of the run."""

    def __init__(self, run: Attacked, index: int) -> None:
        super().__init__(run, index)
        self._case, self._memories = run.case, dict[int, Memory]()
        self._values = (SICK | CUNNING)[run.case.what]

    def _arrive(self, rig: ShardRig, header: PushHeader, payload: Payload, waited: float = 0.0) -> None:
        clock, case = self._run.clock, self._case
        if clock.now < STEPS / 5:
            super()._arrive(rig, header, payload)
            return
        collecting = rig.shard.versions.owned(header.fragment_id).round
        there = collecting.contributions if collecting is not None else {}
        awaited = collecting is not None and bool({*collecting.missing} - case.those_sick)
        if case.what in CUNNING and awaited and waited < PATIENCE:
            clock.after(TICK, lambda: self._arrive(rig, header, payload, waited + TICK))
            return
        others = [_values(cast(Payload, c.payload)) for i, c in there.items() if i not in case.those_sick]
        memory = self._memories.setdefault(header.fragment_id, {})
        said = encode_payload(self._values(_values(payload), others, memory), payload.header.encoding)
        tokens = 2**40 if case.what.startswith("2^40") else header.tokens
        super()._arrive(rig, replace(header, payload=said.header, tokens=tokens), said)


def _values(payload: Payload) -> Tensor:
    out = torch.empty(payload.header.num_elements)
    decode_payload(payload, out)
    return out


class Reader(BuiltIn):
    """The task, with a different text for the last learner."""

    def __init__(self, settings: Settings, what: str) -> None:
        super().__init__(settings)
        self._reads = READS[what]

    def stream(self, learner: int, learners: int) -> Stream:
        usual = super().stream(learner, learners)
        return Own(usual, self._reads) if learner == learners - 1 else usual


@dataclass(frozen=True)
class Own:
    usual: Stream
    reads: Text

    def next_batch(self) -> tuple[Tensor, Tensor]:
        return self.reads(*self.usual.next_batch())


class Attacked(LockstepRun):
    """A run whose last learners are faulty."""

    def __init__(self, case: Case) -> None:
        arm = load_arm(HERE / "frequency" / f"{RATES[case.optimizer]}.toml")
        settings = arm.seeded(case.seed)
        parts = {
            "run": settings.run.model_copy(update={"tokens": 2**60}),  # the run ends by time
            "sync": settings.sync.model_copy(update={"merge": case.merge}),
            "outer": settings.outer.model_copy(update={"momentum": 0.5}),
            "guard": settings.guard.model_copy(update={"trust": case.trust}),
        }
        settings = settings.model_copy(update=parts)
        conditions = arm.conditions.model_copy(update={"learners": case.learners, "noise": 0.05, "shards": 1})
        self.case, self.found = case, Found()
        task = Reader(settings, case.what) if case.what in READS else BuiltIn(settings)
        super().__init__(settings, task, conditions)
        self.shards = [WatchedShard(self, 0, 1)]
        for index, name in enumerate(self.learners):
            if name in case.those_sick and case.what not in READS:
                self.learners[name] = Sick(self, index)

    @property
    def fraction(self) -> float:
        return min(1.0, self.clock.now / STEPS)

    def train(self) -> float:
        self.begin()
        while self.clock.now < STEPS:
            self.clock.step()
        return self.task.evaluate(self.global_model(), 1, EVALUATION_TOKENS)


@dataclass(frozen=True)
class Result:
    loss: float
    left_out_after: float
    """Steps from the first bad contribution of a faulty learner until it was left out. Infinity: never."""
    wrongly: int
    """Healthy learners that were left out."""
    cosine: float
    """Mean cosine between the last learner's final contributions and the others in their rounds."""
    others: float
    """Mean cosine among those others."""


def run(case: Case) -> Result:
    torch.set_num_threads(1)
    attacked = Attacked(case)
    loss = attacked.train()
    after = [at - STEPS / 5 for one, at in attacked.found.left_out.items() if one in case.those_sick]
    told = attacked.shards[0].shard.influence.told(f"worker-{case.learners - 1}").directions
    cosines = [fmean(of) if told else math.nan for of in ([d.cosine for d in told], [d.others for d in told])]
    wrongly = attacked.found.left_out.keys() - (set() if case.what in READS else case.those_sick)
    return Result(loss, min(after, default=math.inf), len(wrongly), *cosines)


def cases(trust: Trust) -> list[Case]:
    if trust == "strangers":
        return [Case(trust, o, "mean", 8, 2, what) for what, o in itertools.product(CUNNING, MOST)]
    rules = [("muon", "mean"), ("muon", "rda"), ("adamw", "agreement")]
    return [Case(trust, o, m, n, 1, w) for w, (o, m), n in itertools.product(SICK, rules, (3, 4, 8))]


def alone(case: Case) -> Case:
    return replace(case, learners=case.learners - case.sick, sick=0, what="")


def table(trust: Trust, seeds: Sequence[int], results: dict[Case, Result]) -> tuple[list[str], list[str]]:
    rows: dict[str, list[str]] = {}
    broken = []
    heads = []
    for case in cases(trust):
        of = [results[replace(case, seed=seed)] for seed in seeds]
        ratio = fmean(one.loss / results[alone(replace(case, seed=i))].loss for i, one in zip(seeds, of, strict=True))
        after = max(one.left_out_after for one in of)
        rows.setdefault(case.what, []).append(f"{ratio:.3f}" + ("" if math.isinf(after) else f" ({after:.0f})"))
        heads.append(f"{case.optimizer}, {case.merge}, {case.sick} of {case.learners}")
        most = STRANGERS_MOST if trust == "strangers" else MOST[case.optimizer]
        where = f"{trust}, {case.what}, {case.optimizer}, {case.merge}, {case.sick} of {case.learners}"
        broken += [f"{where}: x {ratio:.3f}"] * (not ratio <= most)
        broken += [f"{where}: healthy learners left out"] * any(one.wrongly for one in of)
    heads = list(dict.fromkeys(heads))
    lines = [f"| among {trust} | {' | '.join(heads)} |", "| --- |" + " ---: |" * len(heads)]
    return [*lines, *(f"| {what} | {' | '.join(cells)} |" for what, cells in rows.items())], broken


def directions(results: dict[Case, Result]) -> list[str]:
    """Markdown lines that show why no rule about directions detects repetition."""
    lines = ["| 1 of 4 | cosine with the others | theirs with each other | left out |", "| --- | ---: | ---: | --- |"]
    for case in told():
        r = results[case]
        left = "no" if math.isinf(r.left_out_after) else f"after {r.left_out_after:.0f} steps"
        lines.append(f"| {case.what}, {case.optimizer} | {r.cosine:+.3f} | {r.others:+.3f} | {left} |")
    return lines


def told() -> list[Case]:
    rules = [("muon", "mean"), ("adamw", "agreement")]
    return [Case("members", o, m, 4, 1, what) for (o, m), what in itertools.product(rules, TOLD)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/hostile.md")
    args = parser.parse_args()
    seeds = range(args.seeds)
    wanted = [replace(case, seed=seed) for trust in TRUSTS for case in cases(trust) for seed in seeds]
    wanted = [*dict.fromkeys([*wanted, *map(alone, wanted), *told()])]
    results = {}
    with ProcessPoolExecutor(args.jobs) as pool:
        for case, result in zip(wanted, pool.map(run, wanted), strict=True):
            results[case] = result
            print(f"{len(results)} of {len(wanted)}: {case}: {result}", file=sys.stderr)
    tables, broken = zip(*(table(trust, seeds, results) for trust in TRUSTS), strict=True)
    shown = "\n\n".join("\n".join(lines) for lines in (*tables, directions(results)))
    print(shown, *itertools.chain(*broken), sep="\n")
    if args.record:
        RECORD.write_text(shown + "\n")
    return int(any(broken))


if __name__ == "__main__":
    sys.exit(main())
