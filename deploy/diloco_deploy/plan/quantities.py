"""Rates of links as people write them: 100Mbit, 1Gbit/s, 12MB/s, 500k. Pure."""

from __future__ import annotations

from diloco_common import quantities


def bits_per_s(text: str) -> float:
    """Bits per second. A capital B is bytes; without a unit it is bits. Raises ValueError."""
    plain = text.strip().removesuffix("/s").removesuffix("ps")
    for unit, bits in (("bits", 1), ("bit", 1), ("Bytes", 8), ("B", 8), ("b", 1)):
        if plain.endswith(unit):
            return quantities.num_bytes(plain.removesuffix(unit)) * bits
    return quantities.num_bytes(plain)
