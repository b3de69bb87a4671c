"""Numbers that both ends of diloco.v1 must agree on, whichever transport carries it."""

from __future__ import annotations

PROTOCOL = 2
"""2: a checksum for each chunk, parts and ranges, chunks of up to 4 MiB. Speakers of 1 are
refused when they join (PROTOCOL_MISMATCH)."""
SLOWEST_BYTES_PER_S = 50_000
"""A slower transfer is given up and tried again. 0.4 Mbit/s."""
PROBE_MESSAGE_BYTES, PROBE_BYTES_MAX, PROBE_S = 64 << 10, 4 << 20, 2.0
"""Of a measurement of the way to a shard: bytes of a message, bytes of all, and seconds until it is answered."""
PUSHES_AT_ONCE = 4
"""Concurrent pushes of one learner to one shard. With more of them on a thin link, each becomes too slow to finish."""
