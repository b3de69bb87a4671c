"""Asks processes over HTTP or HTTPS: many at once with one deadline, or one shard for its rounds."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

from diloco_common.errors import ConfigError, Expired
from diloco_common.trust.files import CA, CERTIFICATE, KEY, read_folder
from diloco_common.wire.handshake import EXPIRED
from diloco_deploy import ASK_S, THREADS_MAX
from diloco_deploy.cluster import reading


class Asker:
    def __init__(self, tls: Path | None = None, bearer_token: str | None = None) -> None:
        """`tls`: folder with an observer's certificate; None: plaintext. Raises ConfigError, SecretExposed.

        `bearer_token`: sent with requests; in plaintext, other machines show generations and epochs only with it.
        """
        self._tls = None if tls is None else _context(tls)
        self._headers = {"Authorization": f"Bearer {bearer_token}"} if bearer_token else {}

    def get(self, address: str, timeout_s: float, path: str = "/status") -> tuple[int, bytes]:
        """The status code and body of a path. Raises OSError, Unreadable."""
        return reading.get(address, path, timeout_s, tls=self._tls, headers=self._headers)


IN_PLAINTEXT = Asker()


def _status(address: str, timeout_s: float, asker: Asker) -> dict[str, Any] | None:
    """Raises OSError, Unreadable."""
    code, body = asker.get(address, timeout_s)
    return _read(body) if code == HTTPStatus.OK else None


def _read(body: bytes) -> dict[str, Any]:
    """The status, with `clock_skew_s`: seconds by which its clock, if reported, is ahead of ours. Raises Unreadable."""
    status = reading.read_status(body)
    return status if (clock := status.get("clock")) is None else {**status, "clock_skew_s": clock - time.time()}


def expired(error: Exception) -> str:
    """Why a TLS connection failed, if a certificate has expired; otherwise empty."""
    if isinstance(error, ssl.SSLCertVerificationError) and error.verify_code == EXPIRED:
        return "its certificate, or the authority's, has expired"
    if isinstance(error, ssl.SSLError) and (error.reason or "").endswith("CERTIFICATE_EXPIRED"):
        return "it says that our certificate has expired"
    return ""


def fetch_all(
    addresses: Mapping[str, str], timeout_s: float, asker: Asker = IN_PLAINTEXT, over: dict[str, str] | None = None
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Ask every address (name -> host:port) at once. Returns the answers that arrived within `timeout_s`.

    `over`: filled with the reason for members whose certificate has expired.
    """
    todo = list(addresses.items())
    found: dict[str, dict[str, Any]] = {}
    lock = threading.Lock()
    deadline = time.monotonic() + timeout_s

    def work() -> None:
        while True:
            with lock:
                if not todo:
                    return
                name, address = todo.pop(0)
            left = deadline - time.monotonic()
            try:
                status = _status(address, left, asker) if left > 0 else None
            except (OSError, ValueError) as error:
                status = None
                if over is not None and (why := expired(error)):
                    over[name] = why
            if status is not None:
                with lock:
                    found[name] = status

    threads = [
        threading.Thread(target=work, name=f"diloco-ask-{i}", daemon=True) for i in range(min(THREADS_MAX, len(todo)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    with lock:
        return dict(found)


class ShardReply(NamedTuple):
    asked_at: float
    """When its status was requested, in seconds of the monotonic clock."""
    status: dict[str, Any]
    rounds: dict[str, Any] | None
    """New rounds; None: the shard does not report them."""


class NoAnswer(Exception):
    """A shard did not answer, or its answer is not that of a shard; the message says which."""

    code = ""
    """A stable code, if known: EXPIRED."""


def ask(asker: Asker, address: str, epoch: int, after: int, timeout_s: float = ASK_S) -> ShardReply:
    """A shard's status, and its rounds after number `after`. Raises NoAnswer."""
    asked_at = time.monotonic()
    try:
        status = _read(_get(asker, address, "/status", timeout_s))
    except reading.Unreadable as error:
        raise NoAnswer(f"{address}: {error}") from None
    if status["role"] != "shard":
        raise NoAnswer(f"{address} is not a shard")
    try:
        rounds = reading.read_json(_get(asker, address, f"/rounds?epoch={epoch}&after={after}", timeout_s))
    except (NoAnswer, reading.Unreadable):  # the shard requires the token
        rounds = None
    return ShardReply(asked_at, status, rounds)


def ask_record(asker: Asker, address: str, epoch: int, after: int, timeout_s: float = ASK_S) -> dict[str, Any]:
    """A shard's /record after a line of an epoch. Raises NoAnswer."""
    try:
        return reading.read_json(_get(asker, address, f"/record?epoch={epoch}&after={after}", timeout_s))
    except reading.Unreadable as error:
        raise NoAnswer(f"{address}: {error}") from None


def _get(asker: Asker, address: str, path: str, timeout_s: float) -> bytes:
    """Raises NoAnswer."""
    try:
        code, body = asker.get(address, timeout_s, path)
    except (OSError, ValueError) as error:
        over = expired(error)
        said = error.strerror.lower() if isinstance(error, OSError) and error.strerror else str(error)
        silence = NoAnswer(f"{address}: {over or ('no answer in time' if isinstance(error, TimeoutError) else said)}")
        silence.code = Expired.code if over else ""
        raise silence from None
    if code != HTTPStatus.OK:
        raise NoAnswer(f"{address} answers {code}")
    return body


class Poller:
    """Repeatedly asks all members of a cluster, on a thread."""

    def __init__(self, every_s: float = 0.5, timeout_s: float = 1.0, asker: Asker = IN_PLAINTEXT) -> None:
        self.asker = asker
        self._every_s, self._timeout_s = every_s, timeout_s
        self._lock = threading.Lock()
        self._addresses: dict[str, str] = {}
        self._answers: dict[str, dict[str, Any]] = {}  # the newest answer of each member, until `take`
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="diloco-poll", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(self._timeout_s + 1.0)

    def ask(self, addresses: Mapping[str, str]) -> None:
        """From now on, ask these addresses (name -> host:port)."""
        with self._lock:
            self._addresses = dict(addresses)

    def take(self) -> dict[str, dict[str, Any]]:
        """The answers since the last call, the newest of each member."""
        with self._lock:
            answers, self._answers = self._answers, {}
        return answers

    def _run(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                addresses = dict(self._addresses)
            answers = fetch_all(addresses, self._timeout_s, self.asker)
            with self._lock:
                # A member that is no longer asked may have ended; drop its late answer.
                self._answers.update({name: a for name, a in answers.items() if name in self._addresses})
            self._stop.wait(self._every_s)


def _context(tls: Path) -> ssl.SSLContext:
    """Raises ConfigError, SecretExposed."""
    read_folder(tls, needs_pair=True)
    try:
        context = ssl.create_default_context(cafile=str(tls / CA))
        context.load_cert_chain(tls / CERTIFICATE, tls / KEY)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{tls}: cannot be used: {error}") from None
    context.check_hostname = False  # the run's authority is enough: a worker's certificate names no host
    return context
