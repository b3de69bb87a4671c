"""What a script gives to `join` and to calls of a learner: looked at before anything is done with it.

Where Python would go on with a wrong value until something else stumbles over it, the script is told here. What only
others can judge (addresses, certificates, names of parameters) is not looked at.
"""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from diloco_common.errors import ConfigError, WrongCall, did_you_mean, shown

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


def check_options(options: Mapping[str, object], join: Callable[..., Any]) -> None:
    """Of a callback that calls `join` later, and gives `GIVEN` itself. Raises WrongCall."""
    known = inspect.signature(join).parameters.keys() - GIVEN
    for name in sorted(options.keys() - known):
        why = "gives it itself" if name in GIVEN else f"has no such option{did_you_mean(name, known)}"
        raise WrongCall(f"DilocoCallback({name}=...): the callback {why}. It takes the options of join: run=, ...")
