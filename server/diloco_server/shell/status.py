"""The answers at /status and /rounds: JSON views of a shard's state and ledger."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict
from itertools import islice
from typing import Any

from diloco_common.settings import Settings
from diloco_common.wire.follower import Follower
from diloco_server.core.fragment import FragmentState
from diloco_server.core.influence import Influence
from diloco_server.core.ledger import Event, TracedRound, told_of
from diloco_server.core.membership import Member
from diloco_server.shell.host import ShardHost
from diloco_server.shell.readers import Standby
from diloco_server.shell.streams import Readers


def shard_status(host: ShardHost, grpc_address: str) -> dict[str, Any]:
    """The status of one shard: counts, bytes and seconds. It contains no secrets."""
    shard, settings = host.shard, host.settings
    ready, reason = host.ready()
    ledger, patience, now = shard.ledger, shard.rounds.patience, host.clock()
    return {
        "role": settings.shard.role,
        "name": host.log.name,
        "run": settings.run.id,
        "index": settings.shard.index,
        "count": settings.shard.count,
        "epoch": shard.epoch,
        "uptime_s": round(now - host.started_at, 3),
        "ready": ready,
        "reason": reason,
        "grpc": grpc_address,
        "tokens_merged": shard.tokens_merged,
        "tokens_budget": settings.run.tokens,
        "done": shard.done,
        "data_dir": str(settings.shard.data_dir) if settings.shard.data_dir else None,
        "grace_s": patience.grace_s(),
        "overdue_after_s": round(patience.overdue_after_s, 3),
        "quorum": None if settings.sync.quorum == "all" else settings.sync.quorum,
        "sync_every": shard.rounds.every.steps,
        "sync_every_auto": settings.sync.sync_every == "auto",
        "rules": host.driver.rules.sources,
        "learners": [
            _learner(m, shard.influence, ledger.staleness.get(m.learner_id), now) for m in shard.membership.all()
        ],
        "fragments": [_fragment(s, now, patience.overdue_after_s) for _, s in sorted(shard.fragments.items())],
        "rounds": ledger.rounds,
        "participants_mean": ledger.participants_mean,
        "duplicates": ledger.duplicates,
        "late": ledger.late,
        "rejected": dict(ledger.rejected),
        "evictions": sum(ledger.evictions.values()),
        "evictions_by_code": dict(ledger.evictions),
        "tokens": {
            "accepted": ledger.tokens_accepted,
            "merged": ledger.tokens_merged,
            "in_flight": ledger.tokens_in_flight,
            "fenced": ledger.tokens_fenced,
            "left_out": ledger.tokens_left_out,
            "late": ledger.tokens_late,
            "refused": dict(ledger.tokens_refused),
        },
        "events": _events([*ledger.events][-50:], now),
        "bytes_pushed": host.telemetry.bytes_pushed,
        "bytes_pulled": host.telemetry.bytes_pulled,
        "bytes_saved": host.keeper.bytes_saved,
        "disk_free_bytes": host.keeper.free_bytes,
        "memory_bytes": _resident_bytes(),
        "versions_lost": ledger.versions_lost,
        **_readers(host.readers, now),
        "following": None if host.follower is None else following(host.follower, settings),
    }


def _readers(readers: Readers, now: float) -> dict[str, Any]:
    there = [
        {"role": r.role, "name": r.name, "site": r.site, "address": r.address, "for_s": round(now - r.since, 1)}
        for r in readers
    ]
    away = [{"role": role, "name": name, "for_s": round(now - at, 1)} for (role, name), at in readers.away.items()]
    return {"readers": there, "readers_away": away}


def standby_status(standby: Standby, settings: Settings, name: str) -> dict[str, Any]:
    ready, reason = standby.ready()
    return {
        "role": "standby", "name": name, "run": settings.run.id, "index": settings.shard.index,
        "count": settings.shard.count, "ready": ready, "reason": reason, "data_dir": str(settings.shard.data_dir),
        "fragments": [{"id": i, "epoch": v[0], "version": v[1]} for i, v in sorted(standby.follower.held.items())],
        "bytes_saved": standby.bytes_saved, "memory_bytes": _resident_bytes(),
        "following": following(standby.follower, settings),
    }  # fmt: skip


def following(follower: Follower, settings: Settings) -> dict[str, Any]:
    """The connection of a mirror or a standby to its shard."""
    behind = follower.behind
    return {
        "of": settings.shard.mirror_of or settings.shard.standby_of, "site": settings.run.site,
        "connected": follower.is_up, "behind_versions": behind.versions, "behind_s": round(behind.seconds, 3),
        "skipped": follower.skipped,
    }  # fmt: skip


def rounds_since(host: ShardHost, epoch: int, seq: int) -> dict[str, Any]:
    """Rounds and events after number `seq` of an epoch. Ages are in seconds.

    For another epoch, all of them. `seq` in the answer is the `seq` for the next call.
    """
    shard, now = host.shard, host.clock()
    upto, rounds, events = shard.ledger.since(seq if epoch == shard.epoch else 0)
    return {
        "epoch": shard.epoch,
        "seq": upto,
        "rounds": [_round(traced, now) for traced in rounds],
        "events": _events(events, now),
    }


def record_since(host: ShardHost, epoch: int, seq: int) -> dict[str, Any]:
    """Contributions in versions, after number `seq` of an epoch; for another epoch, all that are remembered."""
    shard, now = host.shard, host.clock()
    lines = shard.ledger.record_since(seq if epoch == shard.epoch else 0)
    return {
        "epoch": shard.epoch,
        "seq": lines[-1].seq if lines else seq if epoch == shard.epoch else 0,
        "lines": [
            {
                "ago_s": round(now - line.at, 3),
                "fragment": line.fragment_id,
                "version": line.version,
                "learner": line.merged.learner_id,
                "tokens": line.merged.tokens,
                "share": round(line.merged.share, 6),
                "kept": round(line.merged.kept, 6),
            }
            for line in lines
        ],
    }


def _events(events: Iterable[Event], now: float) -> list[dict[str, Any]]:
    told = [(at, told_of(fact)) for _, at, fact in events]
    return [{"ago_s": round(now - at, 3), "event": of.words, **of.facts} for at, of in told if of is not None]


def _learner(member: Member, influence: Influence, staleness: int | None, now: float) -> dict[str, Any]:
    progress, told = member.progress, influence.told(member.learner_id)
    return {
        "id": member.learner_id,
        "generation": member.generation,
        "state": member.state.value,
        "inner_step": progress.inner_step,
        "tokens": progress.tokens,
        "unit": "samples" if progress.counts_samples else "tokens",
        "loss": progress.loss,
        "step_time_s": progress.step_time_s,
        "silent_s": round(now - member.last_heard, 3),
        "last_step_s": round(now - member.last_step_at, 3),
        "evicted_for": member.evicted_for,
        "asked": member.asked,
        "contributed": member.contributed,
        "merged": member.merged,
        "tokens_merged": member.tokens_merged,
        "missed": dict(member.missed),
        "staleness": staleness,
        "away": [asdict(shard) for shard in progress.away],
        "pushes_fail_s": progress.pushes_fail_s,
        "pushes_fail_why": progress.pushes_fail_why,
        "left_out": member.learner_id in influence.left_out,
        "kept": _rounded(told.mean_kept),
        "cosine": _rounded(told.mean_cosine),
    }


def _fragment(state: FragmentState, now: float, overdue_after_s: float) -> dict[str, Any]:
    open_s = now - state.round.opened_at if state.round else 0.0
    return {
        "id": state.fragment.fragment_id,
        "companion": not state.fragment.traits.is_of_model,
        "seeded": state.seeded,
        "version": state.version,
        "epoch": state.epoch,
        "elements": state.fragment.num_elements,
        "round": state.round.round if state.round else None,
        "round_open": state.round is not None,
        "open_s": round(open_s, 3),
        "contributions": len(state.round.contributions) if state.round else 0,
        "missing": [*islice(state.round.awaited, 8)] if state.round and open_s > overdue_after_s else [],
        "tokens_merged": state.tokens_merged,
    }


def _round(traced: TracedRound, now: float) -> dict[str, Any]:
    return {
        "fragment": traced.fragment_id,
        "round": traced.round,
        "ago_s": round(now - traced.opened_at, 3),
        "asked": traced.asked,
        "quorum_s": _rounded(traced.quorum_s),
        "closed_s": _rounded(traced.closed_s),
        "why": traced.why,
        "participants": traced.participants,
        "announced_s": _rounded(traced.announced_s),
        "tokens": traced.tokens,
        "absent": traced.absent,
        "refused": dict(traced.refused),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _resident_bytes() -> int | None:
    """Resident memory of this process; None if the system does not report it."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
