"""What a hostile learner knows, plans and says, and the transport that it needs; what a sick one sends unknowingly.

`hostile.py` carries out the plans of a hostile learner. A random generator makes messages and payloads valid, off by
one, or extreme. Everything here fits on the wire; nobody can send anything else.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from diloco_common.codec import (
    Chunk,
    Payload,
    PayloadHeader,
    chunks_crc32c,
    decode_payload,
    encode_payload,
    usual_chunk_elements,
)
from diloco_common.codec.payload import num_payload_bytes
from diloco_common.errors import NotFinite
from diloco_common.ports import Transport
from diloco_common.trust.identity import Identity
from diloco_common.wire.manifest import Fragment, Manifest, TensorSpec
from diloco_common.wire.messages import Collect, Held, Progress, PullRequest, PushHeader, Range

PUSHES = ("contribute", "contribute", "claim", "claim", "lie", "lie", "other bytes", "not finite")
AS_OTHERS = "contribute as others"
"""How a hostile learner answers rounds if none of its tactics is a push."""
TACTICS = (
    *PUSHES, "replay", "seed", "join", "come and go", "hold pushes", "hold pulls", "hold streams", "pull",
    "extreme lease",
)  # fmt: skip
"""Used under its own id. Some are listed twice, so they are tried more often."""
FOREIGN = ("join as another", "leave as another", "push as another", "attend as another", "ghosts")
"""Used under the ids of others."""
MANNERS = ("honest", "fast", "slow", "liar", "still", "silent")
"""How it reports: honestly; 1000 steps at a time; endless steps; anything; no progress; not at all."""


class OpenCall(Protocol):
    async def receive(self) -> Any:
        """Wait for the shard's first message. Raises a Refusal or Unavailable."""

    def cancel(self) -> None: ...


class HostileTransport(Transport, Protocol):
    """A transport to one shard on which calls can be started and left open."""

    def hold_push(self, caller: Identity, *parts: PushHeader | Chunk) -> OpenCall:
        """A push that never ends."""

    def hold_pull(self, caller: Identity, request: PullRequest) -> OpenCall:
        """A pull that nobody reads."""

    def hold_stream(self, caller: Identity) -> OpenCall:
        """A control stream that nobody reads and that carries no reports."""


@dataclass(frozen=True, slots=True)
class Sniffed:
    """A push as an eavesdropper sees it."""

    shard: int
    caller: Identity
    header: PushHeader
    payload: Payload


@dataclass(frozen=True)
class Plot:
    """What a hostile learner knows about the run, and its plans."""

    run_id: str
    manifest: Manifest
    push_encoding: str
    pull_encoding: str
    honest: Callable[[Fragment, int], Tensor]
    """Fragment and tokens -> what an honest learner might contribute: float32 [num_elements]."""
    sniffed: Callable[[], Sequence[Sniffed]]
    """Recent pushes of others."""
    tactics: tuple[str, ...]
    manners: tuple[str, ...]
    """Ways to report; it usually sticks to one of them."""
    answers: float
    """Probability of contributing to a round that opens."""
    step_s: float
    call_s: float


@dataclass
class Session:
    shard: int
    transport: HostileTransport
    caller: Identity
    process_id: str
    base: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Fragment -> epoch and number of the latest version it has heard of."""
    asked: dict[int, Collect] = field(default_factory=dict)
    stream: Any = None


ENCODINGS = ("float32", "bfloat16", "int8", "int4", "e3m0", "float64", "", "int8" * 40)
STEPS_AHEAD = 1000
SLOW_S = (60.0, 1e6, 1e18, 1e308)
"""Seconds that a step is claimed to take."""
SCALES = (-10.0, -500.0, 0.0, 1e-6, 1e6, 1e30, 3e38)
"""Factors for an honest contribution."""


def number(r: random.Random, truth: int, *, bits: int = 64) -> int:
    """A number to put into a field of `bits` bits instead of the true one."""
    largest = 2**bits - 1
    said = r.choice(
        (truth - 1, truth + 1, truth + r.randint(2, 2000), 0, 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**40 + 1, 2**53,
         2**62, 2**63 - 1, 2**63, largest, r.randrange(largest))
    )  # fmt: skip
    return int(min(max(said, 0), largest))


def seconds(r: random.Random, truth: float) -> float:
    return r.choice((0.0, truth, 60.0, 1e6, 1e18, 1e308, float("inf"), float("nan"), -1.0))


def loss(r: random.Random) -> float | None:
    return r.choice((None, 0.0, -1e308, 1e308, float("inf"), float("nan")))


def progress(r: random.Random, truth: Progress) -> Progress:
    """A report with one or two false fields."""
    said = {
        "inner_step": lambda: r.choice((truth.inner_step + STEPS_AHEAD, number(r, truth.inner_step))),
        "tokens": lambda: number(r, truth.tokens),
        "loss": lambda: loss(r),
        "step_time_s": lambda: seconds(r, truth.step_time_s),
    }
    return replace(truth, **_some(r, said, 2))


def push_header(r: random.Random, truth: PushHeader, fields: Sequence[str] = ()) -> PushHeader:
    """A header with up to three false fields, chosen from `fields` or from all."""
    said: dict[str, Callable[[], Any]] = {
        "fragment_id": lambda: number(r, truth.fragment_id, bits=32),
        "round": lambda: number(r, truth.round),
        "epoch": lambda: number(r, truth.epoch),
        "base_version": lambda: number(r, truth.base_version),
        "tokens": lambda: number(r, truth.tokens),
        "steps": lambda: number(r, truth.steps),
        "payload": lambda: payload_header(r, truth.payload),
        "manifest_digest": lambda: r.choice((truth.manifest_digest[:-1], "", "0" * 32, "x" * 5000)),
        "tokens_merged": lambda: number(r, truth.tokens_merged),
        "not_finite": lambda: not truth.not_finite,
        "part": lambda: number(r, truth.part, bits=32),
        "num_parts": lambda: number(r, truth.num_parts, bits=32),
        "ranges": lambda: ranges(r, truth.payload.num_elements),
    }
    said = {field: said[field] for field in fields or said}
    return replace(truth, **_some(r, said, 3))


def payload_header(r: random.Random, truth: PayloadHeader) -> PayloadHeader:
    said: dict[str, Callable[[], Any]] = {
        "encoding": lambda: r.choice(ENCODINGS),
        "num_elements": lambda: number(r, truth.num_elements),
        "chunk_elements": lambda: number(r, truth.chunk_elements),
        "num_bytes": lambda: number(r, truth.num_bytes),
        "chunks_crc32c": lambda: number(r, truth.chunks_crc32c, bits=32),
    }
    return replace(truth, **_some(r, said, 2))


def payload(r: random.Random, honest: torch.Tensor, encoding: str) -> Payload:
    """The bytes of a contribution: scaled, flipped, not finite, or random, with a matching header.

    `honest`: float32 [num_elements], an honest contribution.
    """
    match r.choice(("as it is", "scaled", "scaled", "not finite", "any bytes")):
        case "as it is":
            values = honest
        case "scaled":
            values = honest * r.choice(SCALES)
        case "not finite" if encoding == "float32":
            special = struct.pack("<f", r.choice((float("nan"), float("inf"), float("-inf"))))
            chunk = bytearray(honest.numpy().tobytes())
            at = 4 * r.randrange(len(honest))
            chunk[at : at + 4] = special
            return of_bytes(encoding, len(honest), bytes(chunk))
        case _:
            return of_bytes(encoding, len(honest), r.randbytes(num_payload_bytes(encoding, len(honest))))
    try:
        return encode_payload(values.clamp(-3.3e38, 3.3e38), encoding)
    except NotFinite:
        return encode_payload(honest, encoding)


def of_bytes(encoding: str, num_elements: int, chunk: bytes) -> Payload:
    """A payload of one chunk with a matching header."""
    header = PayloadHeader(encoding, num_elements, usual_chunk_elements(encoding), len(chunk), chunks_crc32c([chunk]))
    return Payload(header, (chunk,))


def chunks(r: random.Random, truth: Payload) -> tuple[bytes, ...]:
    """The chunks of a payload, or something close to them."""
    whole = b"".join(truth.chunks)
    return r.choice(
        ((whole,), (whole,), (whole[:-1],), (whole[: len(whole) // 2], whole[len(whole) // 2 :]), (whole, whole), (),
         (b"",), (whole, b""), (r.randbytes(1000),))
    )  # fmt: skip


def tensors(r: random.Random, truth: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    first = truth[0]
    shape = r.choice(((), (0,), (1,) * 9, (2**63 - 1,), (2**40, 2**40), (1,) * 2000, (7, 3)))
    return tuple(
        r.choice(
            (truth[1:], (), (*truth, first), (first,) * 300, (TensorSpec(first.name, shape), *truth[1:]),
             (TensorSpec("x" * 100_000, first.shape), *truth[1:]), (TensorSpec("../\x00\x1b", first.shape), *truth[1:]))
        )
    )  # fmt: skip


def lease(r: random.Random, truth: Identity) -> Identity:
    """The lease of another learner, or of nobody. Metadata hold numbers of up to 18 digits."""
    return replace(truth, generation=number(r, truth.generation, bits=59), epoch=number(r, truth.epoch, bits=59))


def held(r: random.Random, fragments: int) -> tuple[Held, ...]:
    """Versions that nobody holds."""
    count = r.choice((0, 1, fragments, 300))
    return tuple(Held(number(r, i % fragments, bits=32), number(r, 1), number(r, 1)) for i in range(count))


def pull_request(r: random.Random, fragment_id: int, encoding: str) -> PullRequest:
    have = r.choice((None, (number(r, 1), number(r, 1))))
    encodings = r.choice(((), (encoding,), ("float32",), (r.choice(ENCODINGS),), ENCODINGS * 100))
    want = r.choice((None, None, (number(r, 1), number(r, 1))))
    said = r.choice(((), (), ranges(r, 2000)))
    return PullRequest(r.choice((fragment_id, number(r, fragment_id, bits=32))), encodings, have, want, said)


def ranges(r: random.Random, num_elements: int) -> tuple[Range, ...]:
    """Ranges of a fragment that may overlap, be empty, or lie beyond its end."""
    count = r.choice((0, 1, 2, 300, 8193))
    bounds = [r.choice((r.randint(0, num_elements), number(r, num_elements))) for _ in range(2)]
    return (Range(*r.choice((bounds, sorted(bounds)))),) * count


def _some(r: random.Random, said: Mapping[str, Callable[[], Any]], most: int) -> dict[str, Any]:
    """False values for at most `most` of the fields."""
    return {field: said[field]() for field in r.sample(list(said), r.randint(1, min(most, len(said))))}


SPOILS = ("flipped", "askew", "stuck", "still", "long", "noise")
"""All signs flipped; most signs flipped, different ones each time; the same noise again and again; the same noise, but
tiny, as if the learning rate were zero; many times as long; new noise each time."""
ASKEW = 0.65
"""Share of elements that "askew" flips: the cosine with what was trained is then -0.3."""
TIMES = 20.0
"""How many times as long "long" makes them; "still" divides by its square."""


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
        """The payload that leaves the process at this time."""
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
        """Noise of the same norm as the values."""
        noise = torch.randn(values.numel(), generator=self._generator)
        as_long: Tensor = noise * (values.norm() / noise.norm())
        return as_long
