"""Asks one shard for its status and for what is new of its rounds."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
from typing import Any, NamedTuple

from diloco_deploy.polling import ANSWER_BYTES_MAX, Asker

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
    status = _get(asker, address, "/status", timeout_s)
    if status.get("role") != "shard":
        raise NoAnswer(f"{address} is no shard")
    try:
        rounds = _get(asker, address, f"/rounds?epoch={epoch}&after={after}", timeout_s)
    except NoAnswer:  # an older shard, or one that tells them only to whoever shows the token
        rounds = None
    return Answered(asked_at, status, rounds)


def _get(asker: Asker, address: str, path: str, timeout_s: float) -> dict[str, Any]:
    """Raises NoAnswer."""
    try:
        with asker.open(address, timeout_s, path) as answer:
            found = json.loads(_read(answer, time.monotonic() + timeout_s))
    except urllib.error.HTTPError as error:
        raise NoAnswer(f"{address} answers {error.code}") from None
    except urllib.error.URLError as error:
        raise NoAnswer(f"{address}: {_words_of(error.reason)}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise NoAnswer(f"{address}: {_words_of(error)}") from None
    if not isinstance(found, dict):
        raise NoAnswer(f"{address} answers something else")
    return found


def _read(answer: Any, ends_at: float) -> bytes:
    """All of an answer. Raises TimeoutError, however small the pieces are in which it drips."""
    body = bytearray()
    while len(body) < ANSWER_BYTES_MAX and (piece := answer.read1(ANSWER_BYTES_MAX - len(body))):
        body += piece
        if time.monotonic() > ends_at:
            raise TimeoutError
    return bytes(body)


def _words_of(error: object) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error)
