"""Numbers that both ends of diloco.v1 must agree on, whichever transport carries it."""

from __future__ import annotations

PROTOCOL = 1
SLOWEST_BYTES_PER_S = 50_000
"""A transfer that is slower than this is given up and tried again; 0.4 Mbit/s."""
PUSHES_AT_ONCE = 4
"""Of one learner to one shard. More would share a thin link so finely that none of them moves."""
