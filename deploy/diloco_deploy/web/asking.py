"""Asks one shard for its status and for what is new of its rounds."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from diloco_deploy import reading
from diloco_deploy.polling import OK, Asker

TIMEOUT_S = 3.0


class Answered(NamedTuple):
    """What a shard has said."""

    asked_at: float
    """Just before its status was asked for, in seconds of the monotonic clock."""
    status: dict[str, Any]
    rounds: dict[str, Any] | None
    """What is new of them; None: it does not tell them."""


class NoAnswer(Exception):
    """A shard did not answer, or not as a shard does; the words say how."""


def ask(asker: Asker, address: str, epoch: int, after: int, timeout_s: float = TIMEOUT_S) -> Answered:
    """The status of a shard and its rounds after a number. Raises NoAnswer."""
    asked_at = time.monotonic()
    try:
        status = reading.read_status(_get(asker, address, "/status", timeout_s))
    except reading.Unreadable as error:
        raise NoAnswer(f"{address}: {error}") from None
    if status["role"] != "shard":
        raise NoAnswer(f"{address} is no shard")
    try:
        rounds = reading.read_json(_get(asker, address, f"/rounds?epoch={epoch}&after={after}", timeout_s))
    except (NoAnswer, reading.Unreadable):  # an older shard, or one that tells them only to whoever shows the token
        rounds = None
    return Answered(asked_at, status, rounds)


def _get(asker: Asker, address: str, path: str, timeout_s: float) -> bytes:
    """Raises NoAnswer."""
    try:
        code, body = asker.get(address, timeout_s, path)
    except (OSError, ValueError) as error:
        raise NoAnswer(f"{address}: {_words_of(error)}") from None
    if code != OK:
        raise NoAnswer(f"{address} answers {code}")
    return body


def _words_of(error: object) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error)
