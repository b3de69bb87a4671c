"""Checks the arguments of `join` and of a learner's methods before they are used.

It covers values that Python would accept until something fails elsewhere. Values that other code checks (addresses,
certificates, names of parameters), and those that Python refuses by itself, are not checked here.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Collection, Mapping
from numbers import Real
from typing import NamedTuple

from torch import Tensor

from diloco_common.errors import ConfigError, WrongCall, did_you_mean, shown
from diloco_common.trust.credentials import addresses_of
from diloco_common.wire.bounds import TOKENS_MAX
from diloco_worker.shell.process import say_in_one_line

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")


def check_name(argument: str, name: str) -> None:
    """Raises WrongCall unless it can be a name of a run or a site."""
    if not _NAME.match(name):
        raise WrongCall(f"{argument}= is {shown(name)}: give 1 to 64 of A-Z a-z 0-9 . _ -, as the shards have it")


def check_seconds(argument: str, seconds: object) -> None:
    """Raises WrongCall unless it is None or a number from 0."""
    if seconds is not None and not (isinstance(seconds, int | float) and seconds >= 0):
        raise WrongCall(f"{argument}= is {shown(seconds)}: give seconds, a number from 0")


def check_word(argument: str, word: object, known: Collection[str | None]) -> None:
    """Raises WrongCall."""
    if word not in known:
        choices = " or ".join(f'"{one}"' if one else "None" for one in known)
        raise WrongCall(f"{argument}= is {shown(word)}: it takes {choices}")


def check_callback(shards: str, options: Mapping[str, object], join: Callable[..., object], instead: str) -> None:
    """Check the arguments of a callback that calls `join` later, when the Trainer has loaded everything. `instead`: why
    it takes no island, and what to do. Raises ConfigError and WrongCall."""
    known = inspect.signature(join).parameters.keys() - {"shards", "model", "state"}  # the callback gives these
    if unknown := sorted(options.keys() - known):
        hint = did_you_mean(unknown[0], known)
        raise WrongCall(f"DilocoCallback({unknown[0]}=...): join has no such option{hint}")
    if options.get("log", "stderr") is not None:
        say_in_one_line()  # as `join` does
    if options.get("island") is not None:
        raise ConfigError(
            f"DilocoCallback takes no island=: {instead}, or train an island in a loop of your own (docs/islands.md)"
        )
    addresses_of(shards)


class Counted(NamedTuple):
    """The work of one inner step. Rounds, budgets and weights count samples as they count tokens."""

    amount: int
    is_samples: bool


def counted(tokens: object, samples: object) -> Counted:
    """Check the work in `step(tokens=..., samples=...)`. Raises ConfigError unless exactly one is given and valid."""
    if (tokens is None) is (samples is None):
        has = "both tokens and" if tokens is not None else "neither tokens nor"
        raise ConfigError(f"step() has {has} samples: give one, and the same in all learners of a run")
    name, given = ("tokens", tokens) if samples is None else ("samples", samples)
    amount = given if type(given) is int else _whole(name, given)
    if not 0 <= amount <= TOKENS_MAX:
        raise ConfigError(f"step({name}={amount}): a step has 0 to 2^40 {name}; give those of this batch")
    return Counted(amount, samples is not None)


def check_loss(loss: object) -> None:
    """Check the loss in `step(loss=...)`. Reads no tensor, which would wait for its device. Raises WrongCall."""
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
    """An integer of numpy or the like; a tensor's value would wait for its device. Raises ConfigError."""
    if not isinstance(given, Tensor | bool):
        try:
            return operator.index(given)  # type: ignore[arg-type]
        except TypeError:
            pass
    hint = "a count from shapes, such as batch.numel() or len(batch)"
    raise ConfigError(f"step({name}=...) has a {type(given).__name__}, and takes a whole number: {hint}")
