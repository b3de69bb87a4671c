"""Open files of a shard: as many as the system allows, and a part of them kept for what must not fail.

A connection takes a file. Where connections take all of them, versions cannot be written and nobody can ask for the
health of the process. So fewer connections are let in than there are files.
"""

from __future__ import annotations

import resource

from diloco_common.http_connections import CONNECTIONS_MAX, HEALTH_MAX
from diloco_common.settings import ShardSettings

KEPT = CONNECTIONS_MAX + HEALTH_MAX + 256
"""Files for HTTP, versions, checkpoints, logs and the inside of gRPC."""
CONNECTIONS_PER_LEARNER = 4
"""It has three; one more is that which it dials while the shard has not noticed yet that an old one broke."""
ENOUGH = 1 << 20
"""Some systems allow thousands of times more."""


def raise_limit() -> None:
    """Let this process open as many files as it may (RLIMIT_NOFILE)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def files_max() -> int:
    """Files that this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ENOUGH if soft == resource.RLIM_INFINITY else soft


def connections_wanted(settings: ShardSettings) -> int:
    """gRPC connections that the settings ask for."""
    return settings.max_connections or CONNECTIONS_PER_LEARNER * settings.max_learners


def connections_allowed(settings: ShardSettings, files: int) -> int:
    """gRPC connections that are let in, where so many `files` may be open."""
    return max(16, min(connections_wanted(settings), files - KEPT))
