"""A small word task on which `honest.py` trains clusters. `hostile.py` watches its shards in the same way.

Whole runs in lockstep (`diloco_lab.lockstep`): the production cores in virtual time. Each learner has its own plan:
speed, batch, optimizer, learning rates, and events. Nothing depends on the machine's pace.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn

from diloco_common.settings import GuardSettings, LeaseSettings, RunSettings, Settings, SyncSettings
from diloco_common.wire.messages import PushAnswer, PushHeader
from diloco_demo.muon import MuonWithAdamW
from diloco_lab.arms import Conditions
from diloco_lab.lockstep import TICK, LearnerRig, LockstepRun, ShardRig
from diloco_server.core.effects import MergeRound
from diloco_server.core.ledger import Fact, LearnerLeftOut

WORDS, ROWS, LENGTH, RARE = 64, 8, 9, 8
"""Size of the vocabulary; rows of a usual batch; length of a sequence; number of words that only some learners meet."""
LONGEST = 1e9

# ------------------------------------------------------------------ the task


class Words(nn.Module):
    """Predicts the next word: an embedding, two layers, a head."""

    def __init__(self, seed: int, std: float = 0.2, *, zero_head: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.hidden, self.middle, self.head = nn.Linear(16, 24), nn.Linear(24, 16), nn.Linear(16, WORDS)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0.0, std, generator=generator)
            if zero_head:
                self.head.weight.zero_()
                self.head.bias.zero_()

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.middle(torch.tanh(self.hidden(self.embedding(words))))))
        return logits


class Chain:
    """A Markov chain over words. The last `RARE` words occur only if `rare`."""

    def __init__(self, *, rare: bool = False, sure: float = 0.0, of: int = 7) -> None:
        """`sure`: from 0, the usual odds, to 1, certainty: the likeliest word always comes next. `of`: the seed of
        the odds."""
        odds = 2.5 * torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(of))
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


CHAINS = {"usual": Chain(), "rare": Chain(rare=True), "sure": Chain(sure=0.9999), "other": Chain(of=8)}
HELD_OUT = CHAINS["usual"].draw(1024, torch.Generator().manual_seed(999))


@dataclass(frozen=True)
class Plan:
    """The plan of one learner. Times are in inner steps of a learner of speed 1."""

    speed: float = 1.0
    rows: int = ROWS
    optimizer: str = "adamw"
    lr: float = 4e-3
    warm: int = 0
    """Number of its own steps in which it raises its learning rate."""
    decays: int = 0
    """Number of its steps in which it lowers its learning rate along a cosine, to a fiftieth."""
    joins_at: float = 0.0
    phase: float = 0.0
    """Extra time of its first step."""
    dies_at: float = math.inf
    away: float = 0.0
    keeps_optimizer: bool = False
    """Whether its checkpoint holds the optimizer's state."""
    cut_off: float = 0.0
    """How long it trains without the shard, from the middle of the run."""
    stands: float = 0.0
    """How long it does nothing, from the middle of the run."""
    text: str = "usual"
    rare_from: float = math.inf
    """Steps after which it meets the rare words."""
    varies: bool = False
    """Whether batches have up to 100 times fewer tokens, at random."""
    spikes: float = 0.0
    """Share of its batches with wrong targets."""
    thaws_at: int = 0
    """Steps for which its embedding is frozen."""


@dataclass(frozen=True)
class Cluster:
    plans: tuple[Plan, ...] = (Plan(), Plan())
    steps: float = 240.0
    every: int = 12
    fragments: int = 3
    merge: str = "mean"
    std: float = 0.2
    """Standard deviation of the initial values."""
    zero_head: bool = False
    seed: int = 0


class Task:
    tokens_per_batch = ROWS * LENGTH

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def model(self) -> nn.Module:
        return Words(self._cluster.seed, self._cluster.std, zero_head=self._cluster.zero_head)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        raise NotImplementedError  # each learner has its own: `Inner`

    def stream(self, learner: int, learners: int) -> Any:
        raise NotImplementedError

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def evaluate(self, model: nn.Module, half: int, tokens: int) -> float:
        return float(self.loss(model, *HELD_OUT))


def make_optimizer(plan: Plan, model: nn.Module) -> torch.optim.Optimizer:
    parameters, lr = [*model.parameters()], plan.lr
    match plan.optimizer:
        case "sgd":
            return torch.optim.SGD(parameters, lr=lr, momentum=0.9)
        case "rmsprop":
            return torch.optim.RMSprop(parameters, lr=lr)
        case "adagrad":
            return torch.optim.Adagrad(parameters, lr=lr)
        case "muon":
            assert isinstance(model, Words)
            matrices: list[nn.Parameter] = [model.hidden.weight, model.middle.weight]  # type: ignore[list-item]
            rest = [p for p in parameters if all(p is not m for m in matrices)]
            return MuonWithAdamW(
                [(m, 1) for m in matrices], [{"params": rest, "weight_decay": 0.0}], lr=lr, momentum=0.95,
                weight_decay=0.0, betas=(0.9, 0.95),
            )  # fmt: skip
    return torch.optim.AdamW(parameters, lr=lr)


class Inner:
    """Models, optimizers and data of the learners, by index. `LockstepRun` steps them."""

    kind = ""
    """Empty, because a cluster names its merge rule."""

    def __init__(self, run: Trained) -> None:
        self._plans, self._task = run.cluster.plans, run.task
        self.models = [run.task.model() for _ in self._plans]
        self._optimizers = [make_optimizer(plan, m) for plan, m in zip(self._plans, self.models, strict=True)]
        self._taken = [0] * len(self._plans)
        self._data = [torch.Generator().manual_seed(1000 * run.cluster.seed + i) for i in range(len(self._plans))]
        self._chance = [random.Random(f"{run.cluster.seed} {i}") for i in range(len(self._plans))]

    def step(self, index: int, share_of: Callable[[int], float]) -> tuple[float, int]:
        plan, model, optimizer = self._plans[index], self.models[index], self._optimizers[index]
        self._taken[index] += 1
        inputs, targets = self._batch(index)
        loss = self._task.loss(model, inputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if self._taken[index] <= plan.thaws_at:
            model.get_submodule("embedding").weight.grad = None
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("lr_highest", group["lr"]) * self._share(index)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach()), inputs.numel()

    def _batch(self, index: int) -> tuple[Tensor, Tensor]:
        plan, chance = self._plans[index], self._chance[index]
        rows = max(1, round(plan.rows / 100 ** chance.random())) if plan.varies else plan.rows
        text = "rare" if self._taken[index] > plan.rare_from else plan.text
        inputs, targets = CHAINS[text].draw(rows, self._data[index])
        return (inputs, targets.flip(1)) if chance.random() < plan.spikes else (inputs, targets)

    def _share(self, index: int) -> float:
        plan, steps = self._plans[index], self._taken[index]
        warm = min(1.0, steps / plan.warm) if plan.warm else 1.0
        return warm * (max(0.02, 0.5 + 0.5 * math.cos(math.pi * min(1.0, steps / plan.decays))) if plan.decays else 1.0)

    def companions(self, index: int) -> Mapping[str, Any]:
        return {}

    def leave(self, index: int) -> None: ...

    def begin(self, index: int) -> None:
        if not self._plans[index].keeps_optimizer:
            self._optimizers[index] = make_optimizer(self._plans[index], self.models[index])


# ------------------------------------------------------------------ the run


@dataclass
class Found:
    answers: Counter[str] = field(default_factory=Counter)
    left_out: dict[str, float] = field(default_factory=dict)
    """Learner -> the time when it was first left out."""
    merges: int = 0
    kept: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    """Learner and fragment -> the factor on each contribution's length."""

    @property
    def refused(self) -> Counter[str]:
        """Refusals by code, except LATE: then the round was over, and the work is in the next contribution."""
        return Counter({code: n for code, n in self.answers.items() if code not in ("ACCEPTED", "LATE", "DUPLICATE")})

    @property
    def least_kept(self) -> float:
        return min((kept for of in self.kept.values() for kept in of), default=1.0)

    @property
    def longest_cut(self) -> int:
        """Maximum number of consecutive contributions of a learner to a fragment that were cut by more than half."""
        longest = 0
        for of in self.kept.values():
            streak = 0
            for kept in of:
                streak = streak + 1 if kept < 0.5 else 0
                longest = max(longest, streak)
        return longest


class WatchedShard(ShardRig):
    def note(self, event: Fact) -> None:
        if isinstance(event, LearnerLeftOut):
            self._run.found.left_out.setdefault(event.learner_id, self._run.clock.now)  # type: ignore[attr-defined]

    def merging(self, merge: MergeRound) -> None:
        found: Found = self._run.found  # type: ignore[attr-defined]
        found.merges += 1
        for c in merge.contributions:
            found.kept.setdefault((c.learner_id, c.fragment_id), []).append(c.kept)


class Learner(LearnerRig):
    @property
    def plan(self) -> Plan:
        return self._run.cluster.plans[self.index]  # type: ignore[attr-defined, no-any-return]

    has_stood = has_died = False

    def step(self) -> None:
        run: Trained = self._run  # type: ignore[assignment]
        plan, now, middle = self.plan, run.clock.now, run.cluster.steps / 2
        if plan.stands and not self.has_stood and now >= middle:
            self.has_stood = True
            self.after(plan.stands, super().step)
        elif middle <= now < middle + plan.cut_off:
            _, tokens = run.inner.step(self.index, run.share_of)
            self.core.stepped(tokens)
            self.after(self._step_time(), self.step)
        elif now >= plan.dies_at and not self.has_died:
            self.has_died = True
            self.die()
            run.clock.after(plan.away, self.come_back)
        else:
            super().step()

    def _hand_in(self, rig: ShardRig, header: PushHeader, payload: Any) -> PushAnswer:
        answer = super()._hand_in(rig, header, payload)
        if not header.is_seed:
            found: Found = self._run.found  # type: ignore[attr-defined]
            found.answers[answer.code or answer.outcome.name] += 1
        return answer


class Trained(LockstepRun):
    """The training of a cluster. Runs end at a given time, so that all arms train equally long."""

    def __init__(self, cluster: Cluster, guard: GuardSettings | None = None) -> None:
        self.cluster, self.found = cluster, Found()
        sync = SyncSettings(fragments=cluster.fragments, sync_every=cluster.every, merge=cluster.merge)
        settings = Settings(
            run=RunSettings(seed=cluster.seed), sync=sync, guard=guard or GuardSettings(),
            lease=LeaseSettings(lease_s=LONGEST),
        )  # fmt: skip
        speeds = tuple(plan.speed for plan in cluster.plans)
        conditions = Conditions(learners=len(speeds), speeds=speeds, shards=1, noise=0.05)
        super().__init__(settings, Task(cluster), conditions)
        self.shards = [WatchedShard(self, 0, 1)]
        self.learners = {rig.learner_id: rig for rig in (Learner(self, i) for i in range(len(speeds)))}

    def make_inner(self) -> Any:
        return Inner(self)

    def train(self) -> Self:
        for i, learner in enumerate(self.learners.values()):
            plan = self.cluster.plans[i]
            self._begin(learner, plan.joins_at, 1 + i / len(self.learners) + plan.phase / plan.speed)
        self.clock.after(TICK, self._tick)
        end = self.cluster.steps + max(plan.cut_off + plan.stands for plan in self.cluster.plans)
        while self.clock.now < end:
            self.clock.step()
        return self

    def _begin(self, learner: LearnerRig, at: float, starts_s: float) -> None:
        def begin() -> None:
            learner.join(self.shards)
            learner.after(starts_s, learner.step)

        if at:
            self.clock.after(at, begin)
        else:
            begin()

    def share_of(self, index: int) -> float:
        return 1.0

    def _tick(self) -> None:
        self.shards[0].advance()
        self.clock.after(TICK, self._tick)

    @property
    def fraction(self) -> float:
        return 0.0

    @property
    def loss(self) -> float:
        """Held-out loss of the global model."""
        return self.task.evaluate(self.global_model(), 1, 0)
