"""Between two steps the parameters are the loop's own: what a contribution holds is fixed when `step` returns."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from parts import Rig


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
