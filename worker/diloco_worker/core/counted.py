"""What a learner counts its steps in: tokens, or samples where there are none (images, episodes, graphs)."""

from __future__ import annotations

import operator
from numbers import Real
from typing import NamedTuple

from torch import Tensor

from diloco_common.errors import ConfigError, WrongCall, shown
from diloco_common.wire.bounds import TOKENS_MAX


class Counted(NamedTuple):
    """The work of one inner step. Rounds, budgets and weights take either for tokens."""

    amount: int
    is_samples: bool


def counted(tokens: object, samples: object) -> Counted:
    """Of `step(tokens=..., samples=...)`. Raises ConfigError unless exactly one of them is there and can be."""
    if (tokens is None) is (samples is None):
        has = "both tokens and" if tokens is not None else "neither tokens nor"
        raise ConfigError(f"step() has {has} samples: give one, and the same in all learners of a run")
    name, given = ("tokens", tokens) if samples is None else ("samples", samples)
    amount = given if type(given) is int else _whole(name, given)
    if not 0 <= amount <= TOKENS_MAX:
        raise ConfigError(f"step({name}={amount}): a step has 0 to 2^40 {name}; give those of this batch")
    return Counted(amount, samples is not None)


def check_loss(loss: object) -> None:
    """Of `step(loss=...)`. Reads no tensor, which would wait for its device. Raises WrongCall."""
    if isinstance(loss, Tensor):
        if loss.numel() == 1 and not loss.is_complex():
            return
        what = f"a tensor of shape {tuple(loss.shape)}, {str(loss.dtype).removeprefix('torch.')}"
    elif loss is None or isinstance(loss, Real):
        return
    else:
        what = shown(loss)
    raise WrongCall(f"step(loss=...) has {what}: give one number, such as loss.mean() of this batch, or leave it out")


def _whole(name: str, given: object) -> int:
    """Of numpy's integers and the like; a tensor's would wait for its device. Raises ConfigError."""
    if not isinstance(given, Tensor | bool):
        try:
            return operator.index(given)  # type: ignore[arg-type]
        except TypeError:
            pass
    hint = "a count from shapes, such as batch.numel() or len(batch)"
    raise ConfigError(f"step({name}=...) has a {type(given).__name__}, and takes a whole number: {hint}")
