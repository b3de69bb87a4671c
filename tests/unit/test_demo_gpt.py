"""The demo's model: its initial values, what a position can see, and its loss over fixed windows of held-out text."""

from __future__ import annotations

import torch

from diloco_common.settings import ModelSettings
from diloco_demo.gpt import BYTES, build_gpt

TINY = ModelSettings(layers=2, heads=2, width=16, context=16)


def test_initial_values_are_a_function_of_the_seed_and_leave_torchs_random_state_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = build_gpt(TINY, seed=7)
    assert torch.equal(torch.get_rng_state(), before)

    torch.manual_seed(2)
    same, other = build_gpt(TINY, seed=7), build_gpt(TINY, seed=8)
    for name, value in one.state_dict().items():
        assert torch.equal(value, same.state_dict()[name]), name
        assert not torch.equal(value, other.state_dict()[name]), name


def test_a_position_sees_itself_and_the_past_but_not_the_future():
    model = build_gpt(TINY, seed=0)
    text = torch.randint(BYTES, (1, 16), generator=torch.Generator().manual_seed(0))
    changed = text.clone()
    changed[0, 9] ^= 1
    moved = (model(text) - model(changed)).abs().amax(dim=-1)[0]
    assert moved[:9].max() == 0
    assert moved[9:].min() > 0
