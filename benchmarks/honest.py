"""What the defences cost those who are healthy: nothing. At default settings, without an attacker.

    python benchmarks/honest.py             # the table; exits 1 where a cell is not exact
    python benchmarks/honest.py --loss      # and what a run loses beside all guards off, and beside the fast one alone

Whole runs in lockstep (`diloco_lab.lockstep`) with a small model of words: the production cores in virtual time. Every
merge is held against the published formulas as the simulator has them: weights tokens^2 / steps, RDA, and the mean for
embedding and head. A cell is exact where each merge has the same bits, and every contribution that was
accepted is in a version as it was sent: none was refused, left out or cut, and of each learner some are.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev
from typing import Any, Self

import torch
from torch import Tensor, nn

from diloco_common.settings import GuardSettings, LeaseSettings, RunSettings, Settings, SyncSettings, TrainSettings
from diloco_common.wire.messages import Outcome, PushAnswer, PushHeader
from diloco_lab.arms import Conditions
from diloco_lab.lockstep import TICK, LearnerRig, LockstepRun, ShardRig
from diloco_server.core.effects import MergeRound
from diloco_server.core.merge import merge
from diloco_server.core.trust.trust import Trust
from diloco_simulator.verify.published import merged as published

WORDS, ROWS, LENGTH, RARE = 64, 8, 9, 8
"""Of the vocabulary; of a batch; of a sequence; words that only one learner meets, and late."""
SEEDS = (0, 1, 2, 3, 4)
STEPS = 480.0
"""Of a learner of speed 1: 20 times H. Times are in such steps."""
HOUR = 3600.0
LONGEST = 1e9


# ------------------------------------------------------------------ the task


class Words(nn.Module):
    """Predicts the next word: an embedding, two layers, a head."""

    def __init__(self, seed: int, std: float = 0.2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.hidden, self.middle, self.head = nn.Linear(16, 24), nn.Linear(24, 16), nn.Linear(16, WORDS)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0.0, std, generator=generator)

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.middle(torch.tanh(self.hidden(self.embedding(words))))))
        return logits


class Chain:
    """A Markov chain over words, the same for everybody. The last `RARE` come up only where `rare`."""

    def __init__(self, *, rare: bool = False, sure: float = 0.0) -> None:
        """`sure`: the share of the way from the usual odds to certainty. At 1 the likeliest word always comes next."""
        odds = 2.5 * torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(7))
        if not rare:
            odds[:, -RARE:] = -math.inf
        usual = nn.functional.one_hot(odds.argmax(1), WORDS)
        self._p = torch.lerp(torch.softmax(odds, 1), usual.float(), sure)
        self._first = WORDS if rare else WORDS - RARE

    def draw(self, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        words = torch.randint(0, self._first, (rows, 1), generator=generator)
        for _ in range(LENGTH):
            words = torch.cat([words, torch.multinomial(self._p[words[:, -1]], 1, generator=generator)], 1)
        return words[:, :-1], words[:, 1:]


USUAL, WITH_RARE, SURE = Chain(), Chain(rare=True), Chain(sure=0.9999)
HELD_OUT = USUAL.draw(1024, torch.Generator().manual_seed(999))


@dataclass(frozen=True)
class Row:
    """A cell of the table: who trains, and what happens to the first learner."""

    speeds: tuple[float, ...] = (1.0, 1.0)
    batch: int = 1
    """Times as many rows as the others, in each batch of the first."""
    varies: bool = False
    """Batches have 1 to 100 times as few tokens, each learner's at random."""
    rare_from: float = math.inf
    """Steps after which the first one meets the rare words."""
    cut_off: float = 0.0
    """So long it trains on without the shard, from the middle of the run on."""
    frozen: float = 0.0
    """So long it does nothing, from there on."""
    warm: int = 0
    """Each raises its rate over so many steps of its own."""
    decays: int = 0
    """And each lowers it over so many, by a cosine to a fiftieth."""
    alone_until: float = 0.0
    """When the others join."""
    phase: float = 0.0
    """So much of its first step the last one takes longer."""
    steps: float = STEPS
    std: float = 0.2
    """Of the values that the model begins with."""
    lr: float = 4e-3
    sure: bool = False
    """The next word can nearly always be told, so the loss falls to nothing, but for a hard example now and then.
    Trained by SGD, whose steps shrink with the gradients."""


class Task:
    """Of one run."""

    tokens_per_batch = ROWS * LENGTH

    def __init__(self, row: Row, seed: int) -> None:
        self._row, self._seed = row, seed

    def model(self) -> nn.Module:
        return Words(self._seed, self._row.std)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self._row.sure:
            return torch.optim.SGD(model.parameters(), lr=self._row.lr, momentum=0.9)
        return torch.optim.AdamW(model.parameters(), lr=self._row.lr)

    def stream(self, learner: int, learners: int) -> Batches:
        return Batches(self._row, self._seed, learner)

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def evaluate(self, model: nn.Module, half: int, tokens: int) -> float:
        return float(self.loss(model, *HELD_OUT))


class Batches:
    """The data of one learner."""

    def __init__(self, row: Row, seed: int, learner: int) -> None:
        self._row, self._is_first, self._taken = row, learner == 0, 0
        self._generator = torch.Generator().manual_seed(1000 * seed + learner)
        self._sizes = random.Random(f"{seed} {learner}")

    def next_batch(self) -> tuple[Tensor, Tensor]:
        self._taken += 1
        rows = ROWS * (self._row.batch if self._is_first else 1)
        if self._row.varies:
            rows = round(100 ** self._sizes.random())
        meets = self._is_first and self._taken > self._row.rare_from
        text = SURE if self._row.sure else WITH_RARE if meets else USUAL
        return text.draw(rows, self._generator)


# ------------------------------------------------------------------ the run


@dataclass
class Found:
    """What a run came to."""

    merges: int = 0
    exact: int = 0
    """Merges with the bits of the formula."""
    ratios: list[float] = field(default_factory=list)
    """Of the norm of a merge to that of the formula."""
    sent: dict[tuple[str, int, int], tuple[int, int]] = field(default_factory=dict)
    """Learner, fragment, round -> tokens and steps of what was accepted."""
    merged: dict[tuple[str, int, int], tuple[int, int]] = field(default_factory=dict)
    """The same, of what was merged."""
    answers: Counter[str] = field(default_factory=Counter)
    learners: set[str] = field(default_factory=set)

    @property
    def is_exact(self) -> bool:
        is_whole = not self.left_out and not self.refused and not self.never_merged
        return self.merges > 0 and self.merges == self.exact and is_whole

    @property
    def never_merged(self) -> int:
        """Learners of which nothing is in any version."""
        return len(self.learners - {learner for learner, _, _ in self.merged})

    @property
    def left_out(self) -> int:
        """Accepted, and not in its version as it was sent; but for the rounds that were open at the end."""
        last = {(fragment, number) for _, fragment, number in self.merged}
        return sum(self.merged.get(key) != what for key, what in self.sent.items() if key[1:] in last)

    @property
    def refused(self) -> Counter[str]:
        """LATE is no refusal: the round was over, and the work is in the next contribution."""
        return Counter({code: n for code, n in self.answers.items() if code not in ("ACCEPTED", "LATE")})


class Shard(ShardRig):
    """Looks at everything that is merged."""

    def merging(self, merge_round: MergeRound) -> None:
        found: Found = self._run.found  # type: ignore[attr-defined]
        state, rule = self.shard.owned(merge_round.fragment_id), self.settings.sync.merge
        merged = torch.cat([s.tensor().clone() for s in merge(merge_round.contributions, state.fragment.pieces, rule)])
        expected = published(merge_round.contributions, state.fragment.pieces, rule)
        found.merges += 1
        found.exact += torch.equal(merged, expected)
        found.ratios.append(float(merged.norm() / expected.norm()))
        found.merged |= {(c.learner_id, c.fragment_id, c.round): (c.tokens, c.steps) for c in merge_round.contributions}


class Learner(LearnerRig):
    """May be cut off or frozen for a while."""

    def step(self) -> None:
        run: Run = self._run  # type: ignore[assignment]
        row, now = run.row, run.clock.now
        begins = row.steps / 2
        if self.index == 0 and row.frozen and not run.has_slept and now >= begins:
            run.has_slept = True
            self.after(row.frozen, super().step)
        elif self.index == 0 and begins <= now < begins + row.cut_off:
            _, tokens = run.inner.step(0, run.share_of)
            self.core.stepped(tokens)
            self.after(self._step_time(), self.step)
        else:
            super().step()

    def _hand_in(self, rig: ShardRig, header: PushHeader, payload: Any) -> PushAnswer:
        answer = super()._hand_in(rig, header, payload)
        if not header.is_seed:
            found: Found = self._run.found  # type: ignore[attr-defined]
            found.answers[answer.code or answer.outcome.name] += 1
            if answer.outcome is Outcome.ACCEPTED:
                found.sent[self.learner_id, header.fragment_id, header.round] = header.tokens, header.steps
        return answer


class Run(LockstepRun):
    """Ends after a time, so that arms have the same wall-clock."""

    fragments = 3

    def __init__(self, row: Row, seed: int, guard: GuardSettings) -> None:
        settings = Settings(
            run=RunSettings(seed=seed), sync=SyncSettings(fragments=self.fragments), guard=guard,
            lease=LeaseSettings(lease_s=LONGEST, stalled_s=LONGEST), train=TrainSettings(clip=1.0),
        )  # fmt: skip
        self.row, self.found, self.has_slept = row, Found(), False
        conditions = Conditions(learners=len(row.speeds), speeds=row.speeds, shards=1, noise=0.05)
        super().__init__(settings, Task(row, seed), conditions)
        self.shards = [Shard(self, 0, 1)]
        self.learners = {rig.learner_id: rig for rig in (Learner(self, i) for i in range(len(row.speeds)))}
        self.found.learners |= self.learners.keys()

    def train(self) -> Self:
        for i, learner in enumerate(self.learners.values()):
            starts_s = 1 + i / len(self.learners)
            if i == len(self.learners) - 1:
                starts_s += self.row.phase / self.row.speeds[-1]
            self._begin(learner, self.joins_at(i), starts_s)
        self.clock.after(TICK, self._tick)
        end = self.row.steps + self.row.cut_off + self.row.frozen
        while self.clock.now < end:
            self.clock.step()
        return self

    def joins_at(self, index: int) -> float:
        """When a learner does."""
        return self.row.alone_until if index else 0.0

    def _begin(self, learner: LearnerRig, at: float, starts_s: float) -> None:
        def begin() -> None:
            learner.join(self.shards)
            learner.after(starts_s, learner.step)

        if at:
            self.clock.after(at, begin)
        else:
            begin()

    def share_of(self, index: int) -> float:
        steps = self.learners[f"worker-{index}"].core.inner_step + 1
        if self.row.decays:
            return max(0.02, 0.5 + 0.5 * math.cos(math.pi * min(1.0, steps / self.row.decays)))
        return min(1.0, steps / self.row.warm) if self.row.warm else super().share_of(index)

    def _tick(self) -> None:
        self.shards[0].advance()
        self.clock.after(TICK, self._tick)

    @property
    def fraction(self) -> float:
        return 0.0

    @property
    def loss(self) -> float:
        return self.task.evaluate(self.global_model(), 1, 0)


# ------------------------------------------------------------------ the table

ROWS_OF_TABLE: dict[str, Row] = {
    "two, 1:1": Row(),
    "two, 1:2": Row((1.0, 1 / 2)),
    "two, 1:3": Row((1.0, 1 / 3)),
    "two, 1:5": Row((1.0, 1 / 5)),
    "two, 1:8": Row((1.0, 1 / 8)),
    "1, 1, 5, 5": Row((1.0, 1.0, 1 / 5, 1 / 5)),
    "1, 1, 1, 5": Row((1.0, 1.0, 1.0, 1 / 5)),
    "eight, speeds drawn": Row(tuple(map(random.Random(3).uniform, [0.2] * 8, [1.0] * 8))),
    "back after an hour of its own": Row((1.0, 1.0, 1.0), cut_off=HOUR),
    "back after an hour, of two": Row(cut_off=HOUR),
    "after a freeze": Row((1.0, 1.0, 1.0), frozen=600.0),
    "rare rows, met first": Row((1.0, 1.0, 1.0), rare_from=STEPS / 2),
    "rare rows, of two": Row(rare_from=STEPS / 2),
    "one with an 8 x batch": Row((1.0, 1.0, 1.0), batch=8),
    "an 8 x batch, of two": Row(batch=8),
    "tokens vary 100 x": Row((1.0, 1.0, 1.0), varies=True),
    "8, 1, 1, each warms up by itself": Row((1.0, 1 / 8, 1 / 8), warm=100),
    "5, 1, 1, each warms up by itself": Row((1.0, 1 / 5, 1 / 5), warm=300),
    "1, 1, 3, each decays by itself": Row((1.0, 1.0, 1 / 3), decays=480, steps=1.5 * STEPS),
    "one, then three, each warms up": Row((1.0, 1.0, 1.0), warm=500, alone_until=STEPS / 4),
    "four, small values, a high rate": Row((1.0,) * 4, warm=48, std=0.02, lr=1.2e-2),
    "8, 1, 1, small values, a high rate": Row((1.0, 1 / 8, 1 / 8), warm=48, std=0.02, lr=1.2e-2),
    "two, small values, a high rate": Row((1.0, 1.0), warm=48, std=0.02, lr=1.2e-2),
    "two, 1:8, half a step later": Row((1.0, 1 / 8), phase=0.5, steps=2 * STEPS),
    "two that have converged, a hard example": Row(sure=True, lr=0.3, steps=10 * STEPS),
    "four that have converged, a hard example": Row((1.0,) * 4, sure=True, lr=1.0, std=0.4, steps=10 * STEPS),
}


def no_guards(change: Callable[[], float]) -> float:
    """Call with every guard of the values off."""
    kept = Trust.check_values, Trust.check_claims, Trust.evidence
    Trust.check_values = lambda *args, **kwargs: None  # type: ignore[method-assign]
    Trust.check_claims = lambda *args, **kwargs: None  # type: ignore[method-assign]
    Trust.evidence = lambda self, contributions, *args: dict.fromkeys(contributions, "")  # type: ignore[method-assign]
    try:
        return change()
    finally:
        Trust.check_values, Trust.check_claims, Trust.evidence = kept  # type: ignore[method-assign]


def beside_no_guards(row: Row, seed: int, guard: GuardSettings) -> float:
    """How much higher the loss is than without any, in percent."""
    short = replace(row, cut_off=min(row.cut_off, 400.0))
    return 100 * (Run(short, seed, guard).train().loss / no_guards(lambda: Run(short, seed, guard).train().loss) - 1)


def beside_alone(speed: float, steps: float, guard: GuardSettings) -> str:
    """How much higher the loss is with a second learner of that speed than without it, at equal wall-clock."""
    alone = [Run(Row((1.0,), steps=steps), seed, guard).train().loss for seed in SEEDS]
    both = [Run(Row((1.0, speed), steps=steps), seed, guard).train().loss for seed in SEEDS]
    return interval([100 * (with_it / without - 1) for with_it, without in zip(both, alone, strict=True)])


def interval(differences: Sequence[float]) -> str:
    """Mean and 95 % interval of 5 pairs, in percent (t = 2.776)."""
    half = 2.776 * stdev(differences) / math.sqrt(len(differences))
    return f"{fmean(differences):+.2f} % ({fmean(differences) - half:+.2f} to {fmean(differences) + half:+.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loss", action="store_true", help="five seeds in pairs, which takes longer")
    parser.add_argument("--rows", nargs="*", default=[*ROWS_OF_TABLE], choices=[*ROWS_OF_TABLE], help="only these")
    parser.add_argument("--strangers", action="store_true", help="what the same costs among strangers")
    args = parser.parse_args()
    torch.set_num_threads(1)
    guard = GuardSettings(trust="strangers" if args.strangers else "members")
    exact = 0
    print("| who | merges | exact | merged to published | refused, left out | to all guards off |", flush=True)
    print("| --- | ---: | ---: | ---: | --- | ---: |")
    for name in args.rows:
        row = ROWS_OF_TABLE[name]
        run = Run(row, 0, guard).train()
        found, beside = run.found, ""
        if args.loss:
            beside = interval([beside_no_guards(row, seed, guard) for seed in SEEDS])
        ratios = f"{min(found.ratios):.3f} to {max(found.ratios):.3f}"
        others = Counter(left_out=found.left_out, never_merged=found.never_merged)
        refused = ", ".join(f"{code} {n}" for code, n in (found.refused + others).items())
        print(f"| {name} | {found.merges} | {found.exact} | {ratios} | {refused or 'none'} | {beside} |", flush=True)
        exact += found.is_exact
    if args.loss:
        print("\n| beside the fast one alone | 20 versions | 80 versions |\n| --- | ---: | ---: |")
        for times in (2, 3, 5, 8):
            cells = [beside_alone(1 / times, steps, guard) for steps in (STEPS, 4 * STEPS)]
            print(f"| 1:{times} | {' | '.join(cells)} |", flush=True)
    print(f"\n{exact} of {len(args.rows)} kinds of clusters: nothing was refused, cut or left out")
    sys.exit(exact < len(args.rows) and not args.strangers)


if __name__ == "__main__":
    main()
