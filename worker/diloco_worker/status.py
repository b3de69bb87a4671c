"""What a worker tells about itself at /status, and in the file that it leaves at its end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco_worker.learner import Learner


def learner_status(learner: Learner) -> dict[str, Any]:
    """JSON of one learner: counts, bytes, and seconds. Holds no secret."""
    core = learner.core
    fates = core.contributions if core is not None else {}
    rejected = sum(n for fate, n in fates.items() if fate not in ("taken", "merged", "carried", "forgotten"))
    tokens = core.tokens if core is not None else 0
    step_time_s = learner.step_time_s
    tokens_per_step = tokens / core.inner_step if core is not None and core.inner_step else 0.0
    return {
        "role": "worker",
        "name": learner.learner_id,
        "run": learner.run,
        "learner_id": learner.learner_id,
        "state": learner.state,
        "inner_step": core.inner_step if core is not None else 0,
        "tokens": tokens,
        "loss": learner.loss,
        "tokens_per_s": tokens_per_step / step_time_s if step_time_s else 0.0,
        "step_time_s": step_time_s,
        "sync_stall_s": learner.sync_stall_s,
        "sync_stall_max_s": learner.sync_stall_max_s,
        "uptime_s": round(time.monotonic() - learner.started_at, 3),
        "tokens_merged": learner.tokens_merged,
        "tokens_budget": learner.tokens_budget,
        "shards": [
            {
                "address": link.address,
                "index": link.session.shard_index,
                "connected": link.connected,
                "generation": link.session.generation,
                "epoch": link.session.epoch,
                "reconnects": max(0, link.connections - 1),
            }
            for link in learner.network.links
        ],
        "contributions": {
            "sent": fates.get("taken", 0),
            "merged": fates.get("merged", 0),
            "carried": fates.get("carried", 0),
            "forgotten": fates.get("forgotten", 0),
            "late": max(0, fates.get("carried", 0) - rejected),
            "rejected": rejected,
            "unmerged": core.unmerged if core is not None else 0,
        },
        "tokens_carried": core.tokens_carried // len(core.fragments) if core is not None else 0,
        "bytes_pushed": learner.transfer.bytes_pushed,
        "bytes_pulled": learner.transfer.bytes_pulled,
    }
