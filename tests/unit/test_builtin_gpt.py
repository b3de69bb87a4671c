"""The built-in model: its initial values, and what a position can see."""

from __future__ import annotations

import math

import pytest
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


def test_every_parameter_is_a_matrix_that_starts_away_from_zero_and_none_is_tied():
    model = build_gpt(TINY, seed=0)
    assert all(p.ndim == 2 and p.any() for p in model.parameters())
    assert len(list(model.named_parameters())) == len(list(model.named_parameters(remove_duplicate=False)))


def test_an_untrained_model_knows_nothing():
    text = torch.arange(2 * 16).reshape(2, 16) % BYTES
    assert build_gpt(TINY, seed=0).loss(text, text).item() == pytest.approx(math.log(BYTES), abs=0.05)


def test_a_position_sees_itself_and_the_past_but_not_the_future():
    model = build_gpt(TINY, seed=0)
    text = torch.randint(BYTES, (1, 16), generator=torch.Generator().manual_seed(0))
    changed = text.clone()
    changed[0, 9] ^= 1
    moved = (model(text) - model(changed)).abs().amax(dim=-1)[0]
    assert moved[:9].max() == 0
    assert moved[9:].min() > 0


def test_rotary_positions_make_order_matter_and_shorter_inputs_are_taken():
    model = build_gpt(TINY, seed=0)
    with torch.no_grad():
        for layer in model.layers:
            layer.qkv.weight.mul_(20)  # attention that is far from uniform
    ab, ba = torch.tensor([[1, 2, 3, 9]]), torch.tensor([[2, 1, 3, 9]])
    assert not torch.allclose(model(ab)[0, -1], model(ba)[0, -1], atol=1e-6)
