"""Checks the arguments of `join` and of a learner's methods before they are used.

It covers values with which Python would go on until something fails elsewhere. Values that only others can judge
(addresses, certificates, names of parameters) are not checked here.
"""

from __future__ import annotations

import inspect
import operator
import os
import re
from collections.abc import Callable, Collection, Mapping
from numbers import Real
from typing import Any, NamedTuple

from torch import Tensor

from diloco_common.errors import ConfigError, WrongCall, did_you_mean, shown
from diloco_common.trust.credentials import addresses_of
from diloco_common.wire.bounds import TOKENS_MAX
from diloco_worker.shell.process import say_in_one_line

_RUN = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")
_TOKEN = re.compile(r"[!-~]+\Z")
"""Characters allowed in a gRPC header."""
GIVEN = frozenset({"shards", "model", "state"})
"""Arguments of `join` that a callback supplies itself."""


def check_who(run: object, learner_id: object, tls: object, token: object) -> None:
    """Check who calls. Raises WrongCall."""
    is_run = isinstance(run, str) and _RUN.match(run)
    _take(is_run, "run", run, "give the id of the run as its shards have it, 1 to 64 of A-Z a-z 0-9 . _ -")
    example = f"give a name, such as {str(learner_id)[:40]!r}, or leave it out"
    _take(isinstance(learner_id, str | None), "learner_id", learner_id, example)
    _take_path("tls", tls, "the folder that `diloco certs issue` made")
    if isinstance(token, str) and not _TOKEN.match(token):
        raise WrongCall("token= is not one word of plain ASCII: give the bearer token")  # which is a secret
    is_token = isinstance(token, str | os.PathLike | None)
    _take(is_token, "token", token, "give the bearer token, or the Path of the file that holds it")


def check_site(site: object) -> str:
    """Check and return the site. Raises WrongCall."""
    _take(isinstance(site, str) and (not site or _RUN.match(site)), "site", site, "give 1 to 64 of A-Z a-z 0-9 . _ -")
    return str(site)


def check_how(wait_s: object, mean_merge: object, history: object, address_file: object, http: object) -> None:
    """Check the arguments for waiting and for output. Raises WrongCall."""
    check_seconds("wait_s", wait_s)
    is_listed = isinstance(mean_merge, Collection) and not isinstance(mean_merge, str | bytes | Mapping)
    are_names = is_listed and all(isinstance(name, str) for name in mean_merge)  # type: ignore[attr-defined]
    _take(mean_merge is None or are_names, "mean_merge", mean_merge, "give a list of names of parameters")
    _take_path("history", history, "a folder")
    _take_path("address_file", address_file, "of a file to write")
    example = "give an address to serve on, such as 127.0.0.1:0, or leave it out"
    _take(isinstance(http, str | None), "http", http, example)


def check_seconds(argument: str, seconds: object) -> None:
    """Raises WrongCall unless it is None or a number from 0."""
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    _take(seconds is None or (is_number and seconds >= 0), argument, seconds, "give seconds, a number from 0")  # type: ignore[operator]


def check_word(argument: str, word: object, known: Collection[str | None]) -> None:
    """Raises WrongCall."""
    choices = " or ".join(f'"{one}"' if one else "None" for one in known)
    _take(isinstance(word, str | None) and word in known, argument, word, f"it takes {choices}")


def check_function(argument: str, function: object) -> None:
    """Raises WrongCall."""
    what_to_do = "give a function without arguments, such as lambda: clamp(model)"
    _take(function is None or callable(function), argument, function, what_to_do)


def check_either(argument: str, word: object, known: Collection[str]) -> None:
    """Raises ConfigError."""
    if word not in known:
        either = " nor ".join(f'"{one}"' for one in known)
        raise ConfigError(f"{argument}={word!r} is neither {either}")


def _take(fits: object, argument: str, given: object, what_to_do: str) -> None:
    if not fits:
        raise WrongCall(f"{argument}= is {shown(given)}: {what_to_do}")


def _take_path(argument: str, path: object, what: str) -> None:
    is_path = isinstance(path, str | os.PathLike | None) and path != ""
    _take(is_path, argument, path, f"give a path, {what}, or leave it out")


def check_callback(shards: str, options: Mapping[str, object], join: Callable[..., Any], instead: str) -> None:
    """Check the arguments of a callback that calls `join` later, when the Trainer has loaded everything. `instead`: why
    it takes no island, and what to do. Raises ConfigError and WrongCall."""
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
