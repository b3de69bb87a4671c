"""Numbers that both ends of diloco.v1 must agree on, whichever transport carries it."""

from __future__ import annotations

PROTOCOL = 1
SLOWEST_BYTES_PER_S = 50_000
"""A slower transfer is given up and tried again. 0.4 Mbit/s."""
PUSHES_AT_ONCE = 4
"""Concurrent pushes of one learner to one shard. With more of them on a thin link, each becomes too slow to finish."""
