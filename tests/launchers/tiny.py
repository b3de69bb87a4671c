"""A run in which a lot happens in a second, as environment variables: what starts it is somebody else's program."""

from __future__ import annotations

from collections.abc import Mapping

TINY: dict[str, object] = {
    "model.layers": 1,
    "model.heads": 2,
    "model.width": 32,
    "model.context": 32,
    "train.batch": 4,
    "worker.step_min_s": 0.05,
    "worker.threads": 1,
    "worker.device": "cpu",
    "sync.fragments": 4,
    "sync.sync_every": 8,
    "lease.lease_s": 3,
    "lease.heartbeat_s": 0.5,
}


def as_environment(settings: Mapping[str, object]) -> dict[str, str]:
    """DILOCO_SECTION__KEY for each setting."""
    return {f"DILOCO_{name.upper().replace('.', '__')}": str(value) for name, value in settings.items()}
