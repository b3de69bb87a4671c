"""How shards are called, and what checks have learnt for those after them. Imports nothing slow."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from diloco_common.trust.tls import TlsFiles
    from diloco_common.wire.messages import JoinAnswer


class Door(NamedTuple):
    """How a shard is called."""

    address: str
    run_id: str
    files: TlsFiles | None = None
    token: str | None = None


class Measured(NamedTuple):
    """What a shard says of itself, and the way to it."""

    up: float | None
    """Bits per second; None: too few bytes came to tell."""
    skew_s: float
    """The shard's clock less ours, when its answer came."""
    package: str


@dataclass
class Known:
    """By address. Each key is written by one thread."""

    answers: dict[str, JoinAnswer] = field(default_factory=dict)
    measured: dict[str, Measured] = field(default_factory=dict)
    round_trip_s: dict[str, float] = field(default_factory=dict)
