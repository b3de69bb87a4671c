"""One shard in virtual time, and learners that are names: they join, report steps, and push what a test says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from builders import asking, decoded, make_settings
from diloco_common.codec import Payload, encode_payload
from diloco_common.wire.manifest import TensorSpec
from diloco_common.wire.messages import Progress, PushAnswer, PushHeader
from diloco_server.core.fragment import FragmentState
from diloco_server.core.membership import Member
from lockstep import ShardShell

SIZE = 8
MODEL = [TensorSpec("w", (SIZE,))]
H = 4
TOKENS = 10
"""Of every inner step."""
EPOCH = 7


class Rig(ShardShell):
    """Of one fragment with 8 elements, unless a test says another model."""

    def __init__(self, model: Sequence[TensorSpec] = MODEL, epoch: int = EPOCH, **sections: dict[str, Any]) -> None:
        sync = {"sync_every": H, "quorum": "all", "merge": "mean"} | sections.pop("sync", {})
        outer = {"optimizer": "sgd", "lr": 1.0, "momentum": 0.0} | sections.pop("outer", {})
        super().__init__(make_settings(sync=sync, outer=outer, **sections), epoch)
        self.model = model
        self.members: dict[str, Member] = {}
        self.steps: dict[str, int] = {}

    def join(self, *learner_ids: str, process_id: str = "process", **more: Any) -> Member:
        """Each of them, with its first report."""
        for learner_id in learner_ids:
            self.members[learner_id] = self.shard.join(learner_id, asking(self.model, process_id, **more), self.now)
            self.steps.setdefault(learner_id, 0)
            self.report(learner_id)
        return self.members[learner_ids[-1]]

    def report(self, learner_id: str, **more: Any) -> None:
        steps = self.steps[learner_id]
        self.shard.progress(self.members[learner_id], Progress(steps, steps * TOKENS, **more), self.now)
        self.advance()

    def step(self, *learner_ids: str, steps: int = 1) -> None:
        for learner_id in learner_ids:
            self.steps[learner_id] += steps
            self.report(learner_id)

    def header(self, round_number: int, payload: Payload, **changes: Any) -> PushHeader:
        """Of what H steps have brought, relative to the version before; of a seed nothing."""
        assert self.shard.manifest is not None
        steps = H if round_number else 0
        header = PushHeader(
            fragment_id=0, round=round_number, epoch=self.shard.epoch, base_version=max(0, round_number - 1),
            tokens=steps * TOKENS, steps=steps, payload=payload.header, manifest_digest=self.shard.manifest.digest,
        )  # fmt: skip
        return replace(header, **changes)

    def bring(self, learner_id: str, round_number: int, values: Tensor, **changes: Any) -> PushAnswer:
        """Push these values: version 0, or a contribution."""
        encoding = self.settings.sync.push if round_number else "float32"
        payload = encode_payload(values.clone(), encoding)
        return self.push(self.members[learner_id], self.header(round_number, payload, **changes), payload)

    def seed(self, learner_id: str, value: float = 0.0, **changes: Any) -> PushAnswer:
        return self.bring(learner_id, 0, torch.full((SIZE,), value), **changes)

    def contribute(
        self, learner_id: str, round_number: int, values: Tensor | float = 1.0, **changes: Any
    ) -> PushAnswer:
        flat = torch.full((SIZE,), values) if isinstance(values, float) else values
        return self.bring(learner_id, round_number, flat, **changes)

    def started(self, *learner_ids: str) -> Rig:
        """Everybody has joined, version 0 is zeros, and round 1 has been opened by four steps of each."""
        self.join(*learner_ids)
        self.seed(learner_ids[0])
        self.step(*learner_ids, steps=H)
        assert self.state.round is not None
        return self

    def joined(self, *learner_ids: str) -> Rig:
        """There is no version yet."""
        self.join(*learner_ids)
        return self

    def silence(self, learner_id: str, *others: str) -> None:
        """The learner is silent until its lease is over; the others are not."""
        for _ in range(7):
            self.now += 1.0
            for other in others:
                self.report(other)
        self.advance()
        assert not self.members[learner_id].live

    @property
    def state(self) -> FragmentState:
        return self.shard.fragments[0]

    @property
    def theta(self) -> list[float]:
        """The different values of the version that is announced."""
        _, payload = self.shard.published(0)
        return sorted(set(decoded(payload).tolist()))

    def told_of(self, learner_id: str, kind: type) -> list[Any]:
        return [d for d in self.take_told(learner_id) if isinstance(d, kind)]

    def noted(self, kind: type) -> list[Any]:
        return [e for e in self.events if isinstance(e, kind)]

    def snapshot(self) -> tuple[Any, ...]:
        """All that a refused push may not change."""
        s, ledger = self.state, self.shard.ledger
        collected = None if s.round is None else (s.round.round, dict(s.round.contributions), dict(s.round.asked))
        values = None if s.values is None else s.values.theta.tolist()
        return s.record.copy(), s.phase, values, collected, ledger.tokens_accepted, ledger.tokens_merged

    def assert_accounts_balance(self) -> None:
        """Every accepted token is merged, fenced, left out, or in an open or closing round."""
        held = self.state.collected.contributions.values() if self.state.collected else ()
        ledger = self.shard.ledger
        assert ledger.tokens_in_flight == sum(c.tokens for c in held)
        settled = ledger.tokens_merged + ledger.tokens_fenced + ledger.tokens_left_out
        assert ledger.tokens_accepted == settled + ledger.tokens_in_flight
