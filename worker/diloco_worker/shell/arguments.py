"""What a script gives to `join` and to calls of a learner: looked at before anything is done with it.

Where Python would go on with a wrong value until something else stumbles over it, the script is told here. What only
others can judge (addresses, certificates, names of parameters) is not looked at.
"""

from __future__ import annotations

import inspect
import math
import operator
import os
import re
from collections.abc import Callable, Collection, Mapping
from numbers import Real
from typing import Any, NamedTuple

from torch import Tensor

from diloco_common.errors import ConfigError, WrongCall, did_you_mean, shown
from diloco_common.wire.bounds import TOKENS_MAX
from diloco_worker.shell.credentials import addresses_of
from diloco_worker.shell.exits import say_in_one_line

_RUN = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")
_TOKEN = re.compile(r"[!-~]+\Z")
"""What goes into a header."""
GIVEN = frozenset({"shards", "model", "state"})
"""Arguments of `join` that are no options of a callback."""


def check_who(run: object, learner_id: object, tls: object, token: object) -> None:
    """Who calls. Raises WrongCall."""
    if not (isinstance(run, str) and _RUN.match(run)):
        raise WrongCall(
            f"run= is {shown(run)}: give the id of the run as its shards have it, 1 to 64 of A-Z a-z 0-9 . _ -"
        )
    if not isinstance(learner_id, str | None):
        raise WrongCall(
            f"learner_id= is {shown(learner_id)}: give a name, such as {str(learner_id)[:40]!r}, or leave it out"
        )
    check_path("tls", tls, "the folder that `diloco certs issue` made")
    if isinstance(token, os.PathLike) or token is None:
        return
    if not isinstance(token, str) or not _TOKEN.match(token):
        what = "not one word of plain ASCII" if isinstance(token, str) else shown(token)  # it is a secret
        raise WrongCall(f"token= is {what}: give the bearer token, or the Path of the file that holds it")


def check_how(wait_s: object, mean_merge: object, history: object, address_file: object, http: object) -> None:
    """What `join` waits for and writes. Raises WrongCall."""
    check_seconds("wait_s", wait_s)
    check_names("mean_merge", mean_merge)
    check_path("history", history, "a folder")
    check_path("address_file", address_file, "of a file to write")
    if not isinstance(http, str | None):
        raise WrongCall(f"http= is {shown(http)}: give an address to serve on, such as 127.0.0.1:0, or leave it out")


def check_path(argument: str, path: object, what: str) -> None:
    """Raises WrongCall."""
    if not isinstance(path, str | os.PathLike | None) or path == "":
        raise WrongCall(f"{argument}= is {shown(path)}: give a path, {what}, or leave it out")


def check_seconds(argument: str, seconds: object) -> None:
    """Raises WrongCall unless it is None, or a number from 0."""
    if seconds is None:
        return
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or math.isnan(seconds) or seconds < 0:
        raise WrongCall(f"{argument}={shown(seconds)}: give seconds, a number from 0")


def check_word(argument: str, word: object, known: Collection[str | None]) -> None:
    """Raises WrongCall."""
    if not any(word is one or (isinstance(word, str) and word == one) for one in known):
        choices = " or ".join(f'"{one}"' if one else "None" for one in known)
        raise WrongCall(f"{argument}= is {shown(word)}: it takes {choices}")


def check_either(argument: str, word: object, known: Collection[str]) -> None:
    """Raises ConfigError."""
    if word not in known:
        either = " nor ".join(f'"{one}"' for one in known)
        raise ConfigError(f"{argument}={word!r} is neither {either}")


def check_names(argument: str, given: object) -> None:
    """Raises WrongCall unless it is None, or names; of a single one, in a list."""
    is_listed = isinstance(given, Collection) and not isinstance(given, str | bytes | Mapping)
    if given is not None and not (is_listed and all(isinstance(name, str) for name in given)):  # type: ignore[attr-defined]
        raise WrongCall(f"{argument}= is {shown(given)}: give a list of names of parameters")


def check_callback(shards: str, options: Mapping[str, object], join: Callable[..., Any], instead: str) -> None:
    """What a callback is given that calls `join` later, once the Trainer has loaded everything, and gives `GIVEN`
    itself. `instead`: why it takes no island, and what to do. Raises ConfigError, and WrongCall."""
    if options.get("log", "stderr") is not None:
        say_in_one_line()  # as `join` does
    if options.get("island") is not None:
        raise ConfigError(
            f"DilocoCallback takes no island=: {instead}, or train an island in a loop of your own (docs/islands.md)"
        )
    addresses_of(shards)
    known = inspect.signature(join).parameters.keys() - GIVEN
    for name in sorted(options.keys() - known):
        why = "gives it itself" if name in GIVEN else f"has no such option{did_you_mean(name, known)}"
        raise WrongCall(f"DilocoCallback({name}=...): the callback {why}. It takes the options of join: run=, ...")


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
