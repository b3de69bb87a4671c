"""Reads another process's answers over HTTP: with one deadline, with limits, and with every field checked.

The process may belong to a stranger, or may have been taken over. So an answer has limits on size, depth and time,
however slowly it arrives; numbers have limits; and text comes out printable, on one line, since it may go to a
terminal. Every tool that asks a process uses this. Few imports: a container's health check runs it every few seconds.
"""

from __future__ import annotations

import http.client
import io
import json
import math
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, cast

from diloco_common.errors import plain

BODY_BYTES_MAX = 8 << 20
"""The largest /status, with 1,024 learners and 4,096 fragments, takes a third of this."""
HEAD_BYTES_MAX = 64 << 10
NESTS_MAX = 1 << 17
"""Maximum number of lists and objects in one body: a few for each learner and fragment."""
DEPTH_MAX, NUMBER_MAX = 8, 2**63
"""Maximum depth of an answer, and its largest number: more than any /status has."""


class Unreadable(ValueError):
    """The answer is not valid; the printable message says why."""

    def __init__(self, words: str) -> None:
        super().__init__(plain(words))


def get(
    address: str, path: str, timeout_s: float, *, tls: ssl.SSLContext | None = None,
    headers: Mapping[str, str] | None = None,
) -> tuple[int, bytes]:  # fmt: skip
    """The status code and body of one GET. Follows no redirect and uses no proxy, since headers may hold a token.

    Takes at most `timeout_s` seconds in all, except for looking up the host name. Raises OSError (including
    TimeoutError) and Unreadable.
    """
    ends_at = time.monotonic() + timeout_s
    host, _, port = address.rpartition(":")
    lines = [f"GET {path} HTTP/1.0", f"Host: {address}", *(f"{k}: {v}" for k, v in (headers or {}).items())]
    connection: socket.socket = socket.create_connection((host.strip("[]"), int(port)), _left(ends_at))
    try:
        if tls is not None:
            connection.settimeout(_left(ends_at))
            connection = tls.wrap_socket(connection, server_hostname=host.strip("[]"))
        connection.settimeout(_left(ends_at))
        connection.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
        return _split(_read(connection, ends_at))
    finally:
        connection.close()


def _left(ends_at: float) -> float:
    """Raises TimeoutError."""
    left = ends_at - time.monotonic()
    if left <= 0:
        raise TimeoutError("no answer in time")
    return left


def _read(connection: socket.socket, ends_at: float) -> bytes:
    """The whole answer: in HTTP/1.0 it ends with the connection, or where its head says."""
    data, whole = bytearray(), None
    while whole is None or len(data) < whole:
        connection.settimeout(_left(ends_at))
        piece = connection.recv(HEAD_BYTES_MAX)
        if not piece:
            break
        data += piece
        if whole is None and (end := data.find(b"\r\n\r\n", 0, HEAD_BYTES_MAX)) >= 0:
            whole = end + 4 + _length(bytes(data[:end]))
        elif whole is None and len(data) > HEAD_BYTES_MAX:
            raise Unreadable("the answer has a head of more than 64 KiB")
    return bytes(data[:whole])


def _length(head: bytes) -> int:
    """Length of the body, from the head. Raises Unreadable."""
    said = [line.partition(b":")[2] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    if not said:
        return BODY_BYTES_MAX
    text = said[0].strip()
    if not text.isdigit() or len(text) > 9 or int(text) > BODY_BYTES_MAX:
        raise Unreadable(f"the answer has {text[:20].decode('latin-1')} bytes; at most {BODY_BYTES_MAX} are taken")
    return int(text)


def _split(data: bytes) -> tuple[int, bytes]:
    class Sock:
        def makefile(self, *_: Any) -> io.BytesIO:
            return io.BytesIO(data)

    try:
        answer = http.client.HTTPResponse(cast(socket.socket, Sock()))
        answer.begin()
        return answer.status, answer.read()
    except http.client.HTTPException as error:
        raise Unreadable(f"it does not speak HTTP: {error!r}") from None


# ------------------------------------------------------------------ JSON


def read_json(body: bytes) -> dict[str, Any]:
    """Parse the JSON object of a body, with printable texts and limited, finite numbers. Raises Unreadable."""
    if body.count(b"[") + body.count(b"{") > NESTS_MAX:
        raise Unreadable(f"the answer has more than {NESTS_MAX} lists and objects")
    try:
        found = json.loads(body, parse_int=_int, parse_float=_float, parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"the answer is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise Unreadable("the answer is not an object")
    return cast(dict[str, Any], _clean(found, DEPTH_MAX))


def _int(text: str) -> int:
    if len(text) > 20 or abs(number := int(text)) > NUMBER_MAX:
        raise Unreadable(f"a number has {len(text)} digits")
    return number


def _float(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _constant(text)


def _constant(text: str) -> NoReturn:
    raise Unreadable(f"{text[:32]} is not a number")


def _clean(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return plain(value)
    if not isinstance(value, dict | list):
        return value
    if depth == 0:
        raise Unreadable(f"the answer is more than {DEPTH_MAX} deep")
    if isinstance(value, list):
        return [_clean(item, depth - 1) for item in value]
    return {plain(key): _clean(item, depth - 1) for key, item in value.items()}


# ------------------------------------------------------------------ /status

TEXT, FLAG, COUNT, AMOUNT, LOSS, COUNTS, NAMES = "text", "flag", "count", "amount", "loss", "counts", "names"
_IS: dict[str, Callable[[Any], bool]] = {
    TEXT: lambda v: isinstance(v, str),
    FLAG: lambda v: isinstance(v, bool),
    COUNT: lambda v: type(v) is int and v >= 0,
    AMOUNT: lambda v: type(v) in (int, float) and 0 <= v <= NUMBER_MAX,
    LOSS: lambda v: type(v) in (int, float) and abs(v) <= 1e30,
    COUNTS: lambda v: isinstance(v, dict) and all(type(n) is int and n >= 0 for n in v.values()),
    NAMES: lambda v: isinstance(v, list) and all(isinstance(one, str) for one in v),
}

_Fields = Mapping[str, Any]
"""Field -> its kind; a list holds the fields of each entry, a tuple those of an object. None counts as absent. Fields
not listed here are from a newer release, and ignored."""
_COMMON: _Fields = {
    "role": TEXT, "name": TEXT, "run": TEXT, "uptime_s": AMOUNT, "tokens_merged": COUNT, "tokens_budget": COUNT,
    "bytes_pushed": COUNT, "bytes_pulled": COUNT,
}  # fmt: skip
_AWAY: _Fields = {"address": TEXT, "index": COUNT, "for_s": AMOUNT}
_LEARNER: _Fields = {
    "id": TEXT, "generation": COUNT, "state": TEXT, "inner_step": COUNT, "tokens": COUNT, "unit": TEXT, "loss": LOSS,
    "step_time_s": AMOUNT, "silent_s": AMOUNT, "last_step_s": AMOUNT, "evicted_for": TEXT,
    "asked": COUNT, "contributed": COUNT, "merged": COUNT,
    "tokens_merged": COUNT, "missed": COUNTS, "staleness": COUNT, "left_out": FLAG, "kept": AMOUNT, "cosine": LOSS,
    "away": [_AWAY], "pushes_fail_s": AMOUNT, "pushes_fail_why": TEXT,
}  # fmt: skip
_FRAGMENT: _Fields = {
    "id": COUNT, "companion": FLAG, "seeded": FLAG, "version": COUNT, "epoch": COUNT, "elements": COUNT,
    "round": COUNT, "round_open": FLAG, "open_s": AMOUNT, "contributions": COUNT, "missing": NAMES,
    "tokens_merged": AMOUNT,
}  # fmt: skip
_READER: _Fields = {"role": TEXT, "name": TEXT, "site": TEXT, "address": TEXT, "for_s": AMOUNT}
_SHARD: _Fields = {
    **_COMMON, "index": COUNT, "count": COUNT, "epoch": COUNT, "ready": FLAG, "reason": TEXT, "grpc": TEXT,
    "done": FLAG, "data_dir": TEXT, "grace_s": AMOUNT, "learners": [_LEARNER], "fragments": [_FRAGMENT],
    "rounds": COUNT, "participants_mean": AMOUNT, "duplicates": COUNT, "late": COUNT, "rejected": COUNTS,
    "evictions": COUNT, "evictions_by_code": COUNTS, "bytes_saved": COUNT, "disk_free_bytes": COUNT,
    "memory_bytes": COUNT, "overdue_after_s": AMOUNT, "quorum": COUNT, "package": TEXT, "certificate_s": LOSS,
    "clock": AMOUNT, "versions_lost": COUNT, "sync_every": COUNT, "sync_every_auto": FLAG,
    "readers": [_READER], "readers_away": [_READER],
}  # fmt: skip
_WORKER: _Fields = {
    **_COMMON, "learner_id": TEXT, "state": TEXT, "inner_step": COUNT, "tokens": COUNT, "unit": TEXT, "loss": LOSS,
    "tokens_per_s": AMOUNT, "step_time_s": AMOUNT, "sync_stall_s": AMOUNT, "sync_stall_max_s": AMOUNT, "hung": FLAG,
    "contributions": COUNTS, "tokens_carried": COUNT, "tokens_unmerged": COUNT,
    "versions_undone": COUNT,
    "shards": [{"address": TEXT, "index": COUNT, "connected": FLAG, "generation": COUNT, "epoch": COUNT, "code": TEXT,
                "why": TEXT, "reconnects": COUNT}],
}  # fmt: skip
_NEEDED = {"id": (_LEARNER, _FRAGMENT), "state": (_LEARNER,), "version": (_FRAGMENT,), "index": (_SHARD,)}


def read_status(body: bytes) -> dict[str, Any]:
    """The /status of a shard or a worker. Raises Unreadable."""
    status = read_json(body)
    fields = {"shard": _SHARD, "worker": _WORKER}.get(str(status.get("role")))
    if fields is None:
        raise Unreadable("it is neither a shard nor a worker")
    _check("", status, fields)
    return status


def _check(where: str, found: Any, fields: _Fields) -> None:
    if not isinstance(found, dict):
        raise Unreadable(f"{where or 'the status'} is not an object")
    for name, kind in fields.items():
        value, place = found.get(name), f"{where}{name}"
        if value is None:
            if any(fields is some for some in _NEEDED.get(name, ())):
                raise Unreadable(f"{place} is missing")
        elif isinstance(kind, str):
            if not _IS[kind](value):
                raise Unreadable(f"{place} is {json.dumps(value)[:40]}, and no {kind}")
        elif isinstance(kind, tuple):
            _check(f"{place}.", value, kind[0])
        else:
            if not isinstance(value, list):
                raise Unreadable(f"{place} is not a list")
            for entry in value:
                _check(f"{place}.", entry, kind[0])
