"""Histories by hand: one learner, ann, and one shard, with one line per call."""

from __future__ import annotations

from typing import Any

from diloco_simulator.verify.histories import Histories, gather

EPOCH, LATER = 7, 8
"""Of the shard."""

Lines = dict[str, list[dict[str, Any]]]


def push(t: float, number: int, since: int, tokens: int, epoch: int = EPOCH, generation: int = 1) -> dict[str, Any]:
    return {
        "t": t, "what": "pushed", "shard_epoch": epoch, "generation": generation, "fragment": 0, "round": number,
        "epoch": EPOCH, "base": number - 1, "tokens": tokens, "steps": 1, "since": since,
    }  # fmt: skip


def accepted(t: float, number: int, tokens: int, generation: int = 1) -> dict[str, Any]:
    return {
        "t": t, "what": "accepted", "learner": "ann", "generation": generation, "fragment": 0, "round": number,
        "epoch": EPOCH, "base": number - 1, "tokens": tokens, "steps": 1,
    }  # fmt: skip


def merging(t: float, version: int, tokens: int, generation: int = 1) -> dict[str, Any]:
    contribution = {
        "learner": "ann", "generation": generation, "round": version, "base": version - 1, "tokens": tokens, "steps": 1,
    }  # fmt: skip
    return {"t": t, "what": "merging", "fragment": 0, "version": version, "contributions": [contribution]}


def announced(t: float, version: int, epoch: int = EPOCH) -> dict[str, Any]:
    return {
        "t": t, "what": "announced", "fragment": 0, "epoch": epoch, "version": version, "checksum": f"{version:08x}",
        "state": f"{version:08x}", "tokens_merged": 100 * version,
    }  # fmt: skip


def restored(t: float, version: int, stored_epoch: int = EPOCH, epoch: int = EPOCH) -> dict[str, Any]:
    return {**announced(t, version, epoch), "what": "restored", "stored_epoch": stored_epoch}


def applied(t: float, version: int, merged: int | None, since: int, epoch: int = EPOCH) -> dict[str, Any]:
    return {
        "t": t, "what": "applied", "fragment": 0, "epoch": epoch, "version": version, "checksum": f"{version:08x}",
        "merged": merged, "forgotten": None, "since": since,
    }  # fmt: skip


def carried(t: float, number: int, tokens: int, epoch: int = EPOCH) -> dict[str, Any]:
    return {"t": t, "what": "carried", "shard_epoch": epoch, "fragment": 0, "round": number, "tokens": tokens}


def stepped(t: float, number: int) -> dict[str, Any]:
    return {"t": t, "what": "stepped", "step": number, "tokens": 100 * number}


def clean() -> Lines:
    """A step of 100 tokens before every push. Two versions, a crash of the shard before the third was announced, and
    the fourth."""
    return {
        "ann": [
            {"t": 0.0, "what": "born", "role": "learner", "step": 0, "tokens": 0},
            applied(1.0, 0, None, since=0),
            stepped(1.9, 1),
            push(2.0, 1, since=0, tokens=100),
            applied(2.5, 1, merged=1, since=100),
            stepped(2.9, 2),
            push(3.0, 2, since=100, tokens=100),
            applied(3.5, 2, merged=2, since=200),
            stepped(3.9, 3),
            push(4.0, 3, since=200, tokens=100),
            applied(6.0, 3, merged=3, since=300),
            stepped(6.9, 4),
            push(7.0, 4, since=300, tokens=100, epoch=LATER),
            applied(7.5, 4, merged=4, since=400, epoch=LATER),
        ],
        "shard-0": [
            {"t": 0.0, "what": "born", "role": "shard", "epoch": EPOCH},
            {"t": 0.1, "what": "joined", "learner": "ann", "generation": 1},
            announced(0.9, 0),
            accepted(2.1, 1, 100),
            merging(2.2, 1, 100),
            announced(2.3, 1),
            accepted(3.1, 2, 100),
            merging(3.2, 2, 100),
            announced(3.3, 2),
            accepted(4.1, 3, 100),
            merging(4.2, 3, 100),  # killed when it was durable and not announced yet
            {"t": 5.0, "what": "born", "role": "shard", "epoch": LATER},
            restored(5.5, 3),
            {"t": 5.6, "what": "joined", "learner": "ann", "generation": 1},
            accepted(7.1, 4, 100),
            merging(7.2, 4, 100),
            announced(7.3, 4, LATER),
        ],
    }


def histories(lines: Lines) -> Histories:
    return gather(lines.items())


def find(lines: list[dict[str, Any]], what: str, **facts: Any) -> dict[str, Any]:
    return next(line for line in lines if line["what"] == what and facts.items() <= line.items())


def sent(lines: Lines, number: int, since: int, tokens: int) -> None:
    """What ann contributes to a round, on both sides."""
    find(lines["ann"], "pushed", round=number).update(since=since, tokens=tokens)
    find(lines["shard-0"], "accepted", round=number).update(tokens=tokens)
    find(lines["shard-0"], "merging", version=number)["contributions"][0].update(tokens=tokens)
    recount(lines)


def recount(lines: Lines) -> None:
    """Let versions count the tokens that they merged."""
    merged = 0
    for line in lines["shard-0"]:
        if line["what"] == "merging":
            merged += sum(c["tokens"] for c in line["contributions"])
        elif line["what"] in ("announced", "restored"):
            line["tokens_merged"] = merged
