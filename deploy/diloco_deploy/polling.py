"""Asks processes for their /status over HTTP, many at once, with a deadline for all of them together."""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

_THREADS_MAX = 16
_ANSWER_BYTES_MAX = 8 << 20

# Never through a proxy of the environment: these are our own processes.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def fetch_status(address: str, timeout_s: float) -> dict[str, Any] | None:
    """The /status of the process at host:port; none if nothing useful came in time."""
    try:
        with _opener.open(f"http://{address}/status", timeout=timeout_s) as answer:
            status = json.loads(answer.read(_ANSWER_BYTES_MAX))
    except (OSError, ValueError, http.client.HTTPException):
        return None
    return status if isinstance(status, dict) and status.get("role") in ("shard", "worker") else None


def fetch_all(addresses: Mapping[str, str], timeout_s: float) -> dict[str, dict[str, Any]]:
    """Ask every address (name to host:port) at once; whoever answers within `timeout_s` is in the result."""
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
            status = fetch_status(address, left) if left > 0 else None
            if status is not None:
                with lock:
                    found[name] = status

    threads = [
        threading.Thread(target=work, name=f"diloco-ask-{i}", daemon=True) for i in range(min(_THREADS_MAX, len(todo)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    with lock:
        return dict(found)


class Poller:
    """A thread that asks the members of a cluster again and again."""

    def __init__(self, every_s: float = 0.5, timeout_s: float = 1.0) -> None:
        self._every_s, self._timeout_s = every_s, timeout_s
        self._lock = threading.Lock()
        self._addresses: dict[str, str] = {}
        self._answers: dict[str, dict[str, Any]] = {}  # the newest of each member, until taken
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="diloco-poll", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(self._timeout_s + 1.0)

    def ask(self, addresses: Mapping[str, str]) -> None:
        """From now on ask these (name to host:port)."""
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
            answers = fetch_all(addresses, self._timeout_s)
            with self._lock:
                # Who is not asked any more may have ended meanwhile; its answer is history.
                self._answers.update({name: a for name, a in answers.items() if name in self._addresses})
            self._stop.wait(self._every_s)
