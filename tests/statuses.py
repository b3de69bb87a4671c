"""What shards and workers say at /status and /rounds, for tests of the model of a cluster and of its views."""

from __future__ import annotations

from typing import Any

from diloco_deploy.cluster.asking import IN_PLAINTEXT, Asker, fetch_all


def learner(name: str = "ann", state: str = "alive", **changed: Any) -> dict[str, Any]:
    """As a shard tells of it."""
    return {
        "id": name, "state": state, "inner_step": 10, "tokens": 1000, "loss": 2.0, "step_time_s": 0.5, "silent_s": 0.2,
        "asked": 5, "contributed": 5, "merged": 4, "missed": {"ABSENT": 1}, "left_out": False, "kept": 1.0,
        "cosine": None, "staleness": 0, "away": [],
    } | changed  # fmt: skip


def shard(index: int = 0, *learners: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """One of two shards, with one fragment; it knows ann, unless it is said whom."""
    return {
        "role": "shard", "name": f"shard-{index}", "run": "r", "index": index, "count": 2, "epoch": 7,
        "uptime_s": 50.0, "ready": True, "reason": "serving", "tokens_merged": 1000, "tokens_budget": 4000,
        "done": False, "data_dir": "/data", "learners": list(learners) or [learner()],
        "fragments": [{"id": index, "version": 3, "round_open": False}], "rounds": 3, "participants_mean": 2.0,
        "late": 1, "duplicates": 0, "rejected": {}, "evictions": 0, "versions_lost": 0, "bytes_pushed": 100,
        "bytes_pulled": 200, "events": [], "tokens": {"accepted": 1200, "merged": 1000}, "evictions_by_code": {},
    } | changed  # fmt: skip


def worker(name: str = "ann", **changed: Any) -> dict[str, Any]:
    return {
        "role": "worker", "name": name, "run": "r", "state": "training", "inner_step": 100, "tokens": 300_000,
        "loss": 2.0, "tokens_per_s": 1000.0, "sync_stall_s": 0.5, "contributions": {"merged": 4, "carried": 1},
        "tokens_carried": 10, "tokens_unmerged": 60_000,
    } | changed  # fmt: skip


def traced(seq: int, *numbers: int, ago_s: float = 2.0, told: Any = (), **changed: Any) -> dict[str, Any]:
    """What is new of the rounds of fragment 0."""
    one = {
        "fragment": 0, "ago_s": ago_s, "asked": 1, "quorum_s": 0.5, "closed_s": 1.0, "why": "all", "participants": 1,
        "announced_s": 1.5, "tokens": 100, "absent": 0, "refused": {},
    } | changed  # fmt: skip
    return {"epoch": 7, "seq": seq, "rounds": [{**one, "round": n} for n in numbers], "events": list(told)}


def fetch_status(address: str, timeout_s: float, asker: Asker = IN_PLAINTEXT) -> dict[str, Any] | None:
    """The /status of one process; None if no valid answer arrived in time."""
    return fetch_all({"it": address}, timeout_s, asker).get("it")
