"""The outer optimizers are torch's, step by step, in float32; momentum is rounded to bfloat16 between steps."""

from __future__ import annotations

import pytest
import torch
from examples.delayed_nesterov import DelayedNesterov
from examples.heloco import KEPT, corrected

from builders import make_contribution, make_settings, random_values
from diloco_common.codec.base import BFLOAT16_MAX
from diloco_common.codec.memory import SLICE_ELEMENTS
from diloco_common.wire.manifest import Piece
from diloco_server.core.merge import merge
from diloco_server.core.outer import OUR_RULES, make_outer_optimizer

RATES = {"lr": 0.7, "momentum": 0.9}


@pytest.mark.parametrize("num_elements", [1, 1000, SLICE_ELEMENTS + 7], ids=["one", "some", "over-a-slice"])
@pytest.mark.parametrize(
    ("name", "momentum", "twin"),
    [
        ("nesterov", 0.9, lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True)),
        ("sgd", 0.9, lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9)),
        ("sgd", 0.0, lambda p: torch.optim.SGD(p, lr=0.7)),
        ("adam", 0.9, lambda p: torch.optim.Adam(p, lr=0.7, betas=(0.9, 0.99), eps=1e-8)),
    ],
    ids=["nesterov", "sgd-momentum", "sgd", "adam"],
)
def test_five_outer_steps_equal_those_of_torch(name, momentum, twin, num_elements) -> None:
    optimizer = make_outer_optimizer(make_settings(outer=RATES | {"optimizer": name, "momentum": momentum}).outer)
    theta = random_values(num_elements, seed=0)
    buffers = optimizer.new_buffers(theta.numel())
    expected = theta.clone()
    reference = twin([expected])
    for outer_step in range(1, 6):
        gradient = random_values(num_elements, seed=outer_step)
        expected.grad = gradient.clone()
        reference.step()
        optimizer.step(theta, gradient, buffers, outer_step)
        torch.testing.assert_close(theta, expected, rtol=1e-6, atol=1e-6)
        if optimizer.num_buffers and optimizer.buffer_dtype == torch.bfloat16:
            kept = reference.state[expected]["momentum_buffer"]
            kept.copy_(kept.bfloat16())
            assert torch.equal(buffers[0].float(), kept)


@pytest.mark.parametrize("name", ["nesterov", "sgd"])
def test_what_rounding_takes_of_the_momentum_does_not_add_up(name: str) -> None:
    """A thousand steps along gradients that mostly agree, as those of a run do, and as many with float32 momentum."""
    optimizer = make_outer_optimizer(make_settings(outer=RATES | {"optimizer": name, "momentum": 0.7}).outer)
    size, usual = 1000, random_values(1000, seed=0)
    theta, exact = torch.zeros(size), torch.zeros(size)
    buffers, exact_buffers = optimizer.new_buffers(size), [torch.zeros(size)]
    for t in range(1, 1001):
        gradient = usual + random_values(size, seed=t)
        optimizer.step(theta, gradient.clone(), buffers, t)
        optimizer.step(exact, gradient, exact_buffers, t)
    assert buffers[0].dtype == torch.bfloat16
    moved = float(torch.linalg.vector_norm(exact))
    assert float(torch.linalg.vector_norm(theta - exact)) < 1e-3 * moved


@pytest.mark.parametrize("name", ["nesterov", "sgd"])
@pytest.mark.parametrize("mu", [0.5, 0.7, 0.71, 0.9, 0.99])
def test_momentum_follows_gradients_that_all_agree(name: str, mu: float) -> None:
    """What a step adds gets smaller and smaller beside the momentum, and bfloat16 would round it away."""
    optimizer = make_outer_optimizer(make_settings(outer=RATES | {"optimizer": name, "momentum": mu}).outer)
    gradient = 1e-4 + 1e-3 * torch.rand(1000, generator=torch.Generator().manual_seed(0))
    theta, exact, kept = torch.zeros(1000), torch.zeros(1000), torch.zeros(1000)
    buffers = optimizer.new_buffers(1000)
    for t in range(1, 1 + int(12 / (1 - mu))):
        optimizer.step(theta, gradient.clone(), buffers, t)
        kept.mul_(mu).add_(gradient)
        exact.sub_(kept if name == "sgd" else gradient + mu * kept, alpha=optimizer.settings.lr)
    off = torch.linalg.vector_norm(theta - exact) / torch.linalg.vector_norm(exact)
    assert float(off) < (3e-3 if mu <= 0.7 else 1e-5)


def test_momentum_saturates() -> None:
    optimizer = make_outer_optimizer(make_settings(outer=RATES | {"optimizer": "nesterov"}).outer)
    theta, buffers = torch.zeros(2), optimizer.new_buffers(2)
    optimizer.step(theta, torch.tensor([3.4e38, -3.4e38]), buffers, 1)
    assert buffers[0].tolist() == [BFLOAT16_MAX, -BFLOAT16_MAX]


def test_sgd_without_momentum_keeps_no_buffer() -> None:
    """A float32 copy of the model saved."""
    settings = make_settings(outer={"optimizer": "sgd", "momentum": 0.0}).outer
    assert make_outer_optimizer(settings).num_buffers == 0


def test_delayed_nesterov_is_the_formula_of_its_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    """arXiv 2401.09135 with c = 0, written out."""
    monkeypatch.setattr(DelayedNesterov, "every", 3)
    optimizer, theta = DelayedNesterov(make_settings(outer=RATES).outer), random_values(100, seed=0)
    buffers = optimizer.new_buffers(100)
    x, m, gathered = theta.clone(), torch.zeros(100), torch.zeros(100)
    for t in range(1, 8):
        g = random_values(100, seed=t)
        gathered = gathered + g
        if t % 3 == 0:
            m = 0.9 * m + gathered / 3
            x, gathered = x - 0.7 * (0.9 * m + g / 3), torch.zeros(100)
        else:
            x = x - 0.7 * g / 3
        optimizer.step(theta, g.clone(), buffers, t)
        torch.testing.assert_close(theta, x, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("cosine", [1.0, 0.5, 0.25, 0.1, 0.05, -0.3, -1.0])
def test_heloco_corrects_by_the_formula_of_its_paper(cosine: float) -> None:
    """arXiv 2606.00271, block by block: kept from c_ok on, shrunk against the momentum, else turned to it."""
    across = random_values(100, seed=1)
    momentum = random_values(100, seed=0)
    v = momentum / momentum.norm()
    across = across - across.dot(v) * v
    u = cosine * v + (1 - cosine**2) ** 0.5 * across / across.norm()
    gradient = 3.0 * u
    q = 3.0 / (3.0 + float(momentum.norm()))
    if cosine >= KEPT:
        expected = gradient
    elif cosine < 0:
        expected = gradient - min(-cosine * q, 1.0) * cosine * 3.0 * v
    else:
        turned = (1 - (KEPT - cosine) * q) * u + (KEPT - cosine) * q * v
        expected = 3.0 * turned / turned.norm()
    torch.testing.assert_close(corrected(gradient.clone(), momentum), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", OUR_RULES)
def test_every_rule_takes_merged_contributions_as_it_takes_a_gradient(name: str) -> None:
    """Kernels or not: `step_merged` is `step` of the sum."""
    contributions = [make_contribution(f"l{i}", random_values(300, seed=i), tokens=10 + i) for i in range(3)]
    pieces = [Piece("w", 0, 300, 0)]
    optimizer = make_outer_optimizer(make_settings(outer=RATES | {"optimizer": name}).outer)
    thetas = [random_values(300, seed=9) for _ in range(2)]
    states = [optimizer.new_buffers(300) for _ in range(2)]
    for outer_step in range(1, 6):
        for merged in merge(contributions, pieces, "mean"):
            at = merged.bounds
            optimizer.step(thetas[1][at], merged.tensor().clone(), [b[at] for b in states[1]], outer_step)
            optimizer.step_merged(thetas[0][at], merged, [b[at] for b in states[0]], outer_step)
    is_rounded = optimizer.buffer_dtype == torch.bfloat16  # sums that differ in the last bit may be rounded apart
    torch.testing.assert_close(thetas[0], thetas[1], rtol=1e-5, atol=1e-2 if is_rounded else 1e-6)
