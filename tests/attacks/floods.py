"""Attacks on memory and descriptors: bytes that are begun and not ended."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter

from attack import Evidence, Over, Seen, Target, once_tried

from http2 import CALL, HalfCall

JOIN_BYTES = 19 * 10**6
CONNECTIONS = 60


def half_joins(target: Target, over: Over) -> Seen:
    """60 connections, each with a Join of 19 MB that lacks its last byte; then 60 more that have what a learner has."""
    credential = target.credential
    metadata = [("diloco-run", target.run), ("diloco-learner", credential.learner_id)]
    known = [*metadata, ("authorization", f"Bearer {credential.token}")] if credential.token else metadata
    strangers: list[HalfCall] = []
    insiders: list[HalfCall] = []
    for calls, said, tls in (
        (strangers, metadata, credential.context(shows_it=False)),
        (insiders, known, credential.context(shows_it=True)),
    ):
        for _ in range(CONNECTIONS):
            with contextlib.suppress(OSError):
                calls.append(HalfCall(target.grpc, f"{CALL}Join", said, tls))
                calls[-1].begin_message(JOIN_BYTES)
    calls = strangers + insiders
    heard = once_tried(over, lambda: any(call.frames > 0 for call in insiders))
    threads = [threading.Thread(target=_pour, args=(call, heard), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    facts = {
        "connections": len(calls),
        "MB taken": sum(call.sent for call in strangers if call.frames) / 1e6,
        "MB taken of insiders": sum(call.sent for call in insiders if call.frames) / 1e6,
        "strangers heard": sum(call.frames > 0 for call in strangers),
        "insiders heard": sum(call.frames > 0 for call in insiders),
        "ended": sum(call.is_over for call in calls),
    }
    return Seen(Counter(), facts)


def _pour(call: HalfCall, over: Over) -> None:
    """All but the last byte of the message, as fast as it is taken; then it is held open."""
    while not over() and not call.is_over:
        if not call.pour(JOIN_BYTES - 1 - call.sent):
            call.listen(wait_s=0.2)
    call.close()


def judge_unheard(found: Evidence) -> list[str]:
    """With certificates: the shard says no word of HTTP/2 to who shows none, so it takes none of their bytes."""
    facts = found.seen.facts
    problems = [] if facts["insiders heard"] else ["nobody was heard, so nothing was tried"]
    return problems + ([f"{facts['strangers heard']:.0f} without a certificate"] if facts["strangers heard"] else [])
