"""Who belongs to a run, for whoever watches it: addresses that were given, or what `diloco up` left in a folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from diloco_common.wire.addresses import parse_address
from diloco_deploy.cluster.record import addresses_in, read_record


@dataclass(frozen=True)
class Members:
    """At one moment."""

    shards: Mapping[str, str | None]
    """Name -> host:port of HTTP; None: it has none now."""
    learners: Sequence[str] = ()
    """Ids that are expected; more may come."""
    why: Mapping[str, str] = field(default_factory=dict)
    """Name -> how its process ended last, in words."""


Watched = Callable[[], Members]
"""Called again and again; never raises."""


def given(addresses: Sequence[str]) -> Watched:
    """Shards at fixed addresses. Raises ConfigError."""
    members = Members({f"shard at {address}": str(parse_address(address)) for address in addresses})
    return lambda: members


def in_folder(folder: Path) -> Watched:
    """The cluster that `diloco up` runs there, now or later."""

    def look() -> Members:
        found = {name: http for name, http in addresses_in(folder).items() if name.startswith("shard-")}
        record = read_record(folder)
        if record is None:
            return Members(found)
        shards = {f"shard-{i}": found.get(f"shard-{i}") for i in range(record.shards)}
        why = {name: member.why for name, member in record.members.items() if member.process in ("died", "lost")}
        return Members(shards, [f"worker-{i}" for i in range(record.workers)], why)

    return look
