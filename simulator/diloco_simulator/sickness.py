"""A sick learner: for a while, its contributions are spoiled where they leave its process. It does not know it."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco_common.codec import Payload, decode_payload, encode_payload

SPOILS = ("flipped", "askew", "stuck", "still", "long", "noise")
"""Signs flipped; most of them flipped, others each time; the same noise again and again, or next to nothing of it, as
at a rate of zero; many times as long; noise."""
ASKEW = 0.65
"""Share of the flipped elements: the cosine with what was trained is -0.3."""
TIMES = 20.0
"""How many times as long."""


@dataclass(frozen=True)
class Sickness:
    learner: int
    """Index of the learner that has it."""
    how: str
    """One of `SPOILS`."""
    from_s: float
    until_s: float


class Spoiler:
    """Spoils the contributions of one process."""

    def __init__(self, sickness: Sickness, name: str) -> None:
        self._sickness = sickness
        self._generator = torch.Generator().manual_seed(random.Random(f"{sickness} {name}").getrandbits(62))
        self._stuck: dict[int, Tensor] = {}

    def leaving(self, fragment_id: int, payload: Payload, now: float) -> Payload:
        """What leaves the process at this time."""
        if not self._sickness.from_s <= now < self._sickness.until_s:
            return payload
        header, values = payload.header, torch.empty(payload.header.num_elements)
        decode_payload(payload, values)
        return encode_payload(self._spoil(fragment_id, values), header.encoding, chunk_elements=header.chunk_elements)

    def _spoil(self, fragment_id: int, values: Tensor) -> Tensor:
        match self._sickness.how:
            case "flipped":
                return -values
            case "askew":
                return torch.where(torch.rand(values.numel(), generator=self._generator) < ASKEW, -values, values)
            case "stuck":
                return self._stuck.setdefault(fragment_id, self._noise(values))
            case "still":
                return self._stuck.setdefault(fragment_id, self._noise(values) / TIMES**2)
            case "long":
                return TIMES * values
            case "noise":
                return self._noise(values)
        raise ValueError(self._sickness.how)

    def _noise(self, values: Tensor) -> Tensor:
        """As long as the values."""
        noise = torch.randn(values.numel(), generator=self._generator)
        as_long: Tensor = noise * (values.norm() / noise.norm())
        return as_long
