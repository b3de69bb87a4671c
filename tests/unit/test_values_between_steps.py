"""Between two steps the parameters are the loop's own: what a contribution holds is fixed when `step` returns."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from diloco_common.wire.manifest import cut
from diloco_common.wire.messages import Collect, FragmentStatus, LearnerPolicy
from diloco_worker.core.acts import PushContribution
from diloco_worker.core.events import Arrived, Asked, Joined
from diloco_worker.core.replica import Replica
from parts import Parts, joined

EPOCH = 5
POLICY = LearnerPolicy(1, "float32", "float32", "carry", 0.5, False)


class Rig:
    """A learner of two fragments of one element each, which holds version 0, all 10. Its codec thread is stalled."""

    def __init__(self, snapshots: str = "step") -> None:
        self.parts = Parts()
        self.model = nn.ParameterList(nn.Parameter(torch.full((1,), 10.0)) for _ in range(2))
        self.learner = self.parts.learner(self.model, reads_later=snapshots == "background")
        digest = cut(Replica(self.model).specs, 2, 1).digest
        statuses = tuple(FragmentStatus(i, True, 0, 0, EPOCH) for i in range(2))
        self.hears(joined(EPOCH, POLICY, num_fragments=2, fragments=statuses, digest=digest))
        for i in range(2):
            self.arrives(i, 0, 10.0)
        assert self.learner.begin()

    def hears(self, event: Joined | Arrived | Asked) -> None:
        self.learner._inbox.put(event)

    def arrives(self, fragment_id: int, version: int, value: float) -> None:
        self.hears(Arrived(fragment_id, version, EPOCH, torch.full((1,), value), 0))

    def steps(self, by: float = 2.0) -> None:
        with torch.no_grad():
            for parameter in self.model:
                parameter.add_(by)
        self.learner.step(tokens=8)

    def asks(self) -> None:
        for i in range(2):
            self.hears(Asked(Collect(i, 1, EPOCH), EPOCH))

    @property
    def values(self) -> list[float]:
        return [parameter.item() for parameter in self.model]

    def codec_goes_on_when_somebody_waits(self) -> None:
        codec = self.learner._codec
        wait, codec.wait = codec.wait, lambda: (self.parts.jobs.run(), wait())

    def contributed(self) -> list[float]:
        """The codec thread goes on: what it encodes."""
        self.parts.jobs.run()
        acts = [act for acts in self.parts.posted.acts for act in acts if isinstance(act, PushContribution)]
        return [float(act.contribution.tensors.take_snapshot()) for act in acts]


class Ema:
    """As everybody writes it: the averaged values in, evaluate, the trained ones back."""

    def __init__(self, model: nn.Module, decay: float = 0.5) -> None:
        self.model, self.decay = model, decay
        self.shadow = {name: p.data.clone() for name, p in model.named_parameters()}
        self.backup: dict[str, Tensor] = {}

    def update(self) -> None:
        for name, p in self.model.named_parameters():
            self.shadow[name].lerp_(p.data, 1 - self.decay)

    def apply_shadow(self) -> None:
        for name, p in self.model.named_parameters():
            self.backup[name] = p.data.clone()
            p.data.copy_(self.shadow[name])

    def restore(self) -> None:
        for name, p in self.model.named_parameters():
            p.data.copy_(self.backup[name])


@pytest.mark.parametrize("boundary", ["step", "poll"])
def test_an_evaluation_with_averaged_values_changes_nothing_that_is_contributed(boundary: str) -> None:
    rig = Rig()
    ema = Ema(rig.model)
    if boundary == "step":
        rig.asks()
    rig.steps()
    ema.update()
    if boundary == "poll":
        rig.asks()
        rig.learner.poll()
    ema.apply_shadow()
    assert rig.values == [11.0, 11.0]
    assert rig.contributed() == [-2.0, -2.0]
    ema.restore()
    assert rig.values == [12.0, 12.0]


def test_a_copy_in_the_background_is_asked_for_by_name() -> None:
    """Then the values must stay until it is taken, and versions wait for it."""
    rig = Rig("background")
    rig.asks()
    rig.steps()
    rig.arrives(0, 1, 20.0)
    rig.learner.poll()
    assert rig.model[0].item() == 12.0
    Ema(rig.model).apply_shadow()
    rig.model[0].data.zero_()
    assert rig.contributed() == [10.0, -2.0]
