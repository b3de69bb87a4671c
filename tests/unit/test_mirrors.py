"""A mirror that answers anything, and a learner that takes versions from it: nothing wrong may come through."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from diloco_common.codec import Payload, PayloadHeader, encode_payload
from diloco_common.codec.change import encode_change
from diloco_common.codec.parts import sha256
from diloco_common.errors import Busy, Refusal, VersionGone
from diloco_common.ports import Unavailable
from diloco_common.wire.messages import Near, PullHeader, PullRequest
from diloco_worker.shell import puller as module
from diloco_worker.shell.puller import Mirrors
from parts import Parts

EPOCH, SIZE = 7, 700
HAVE = (EPOCH, 1)


@dataclass(frozen=True)
class Version:
    values: Payload
    change: Payload
    near: Near


def version() -> Version:
    """Number 2, as its shard has it."""
    before = encode_payload(torch.randn(SIZE), "bfloat16", chunk_elements=256)
    change, values = encode_change(torch.randn(SIZE), before, "int8")
    header = PullHeader(0, 2, EPOCH, 1, 0, 90, None)
    return Version(values, change, Near("mirror:1", sha256(values), sha256(change), header))


class Liar:
    """Answers each pull as it is told, or with a lie that it draws."""

    def __init__(self, of: Version, chance: random.Random) -> None:
        self.of, self.chance = of, chance
        self.said = ""

    def draw(self) -> None:
        lies = [name.removeprefix("lie_") for name in dir(self) if name.startswith("lie_")]
        self.said = self.chance.choice(["truth", "truth_as_values", *lies])
        self.refusal = self.chance.choice([VersionGone("gone"), Refusal("no"), Unavailable("away"), ValueError("ours")])

    async def pull(self, caller: Any, request: PullRequest, timeout_s: float) -> AsyncGenerator[Any, None]:
        of = self.of
        is_change = self.said != "truth_as_values" and self.chance.random() < 0.8
        payload = of.change if is_change else of.values
        header = replace(
            of.near.header, merged_version=0, payload=payload.header, base_version=1 if is_change else None
        )
        chunks = [bytearray(chunk) for chunk in payload.chunks]
        lie = getattr(self, f"lie_{self.said}", None)
        if lie is not None:
            header, chunks = lie(header, chunks)
        yield header
        for chunk in chunks:
            if chunk is None:
                await asyncio.Event().wait()
            else:
                yield memoryview(bytes(chunk))

    def lie_other_bytes(self, header: PullHeader, chunks: list[Any]) -> Any:
        """With checksums of their own that are right."""
        assert header.payload is not None
        other = encode_payload(torch.randn(SIZE), header.payload.encoding, chunk_elements=256)
        return replace(header, payload=other.header), other.chunks

    def lie_one_bit(self, header: PullHeader, chunks: list[Any]) -> Any:
        chunk = self.chance.choice(chunks)
        chunk[self.chance.randrange(len(chunk))] ^= 1 << self.chance.randrange(8)
        return self._sealed(header, chunks)

    def lie_older_epoch(self, header: PullHeader, chunks: list[Any]) -> Any:
        other = encode_payload(torch.randn(SIZE), "bfloat16")
        return replace(header, epoch=EPOCH - 1, payload=other.header, base_version=None), other.chunks

    def lie_other_meaning(self, header: PullHeader, chunks: list[Any]) -> Any:
        """The right bytes, said to be encoded, or cut, in another way."""
        assert header.payload is not None
        other = {"encoding": self.chance.choice(["int4", "int8", "bfloat16", "float32", "no such"])}
        sizes = {"chunk_elements": self.chance.choice([256, 512, 768])}
        payload = replace(header.payload, **(other if self.chance.random() < 0.5 else sizes))
        whole = b"".join(chunks)
        return self._sealed(replace(header, payload=payload), [bytearray(whole)])

    def lie_change_as_values(self, header: PullHeader, chunks: list[Any]) -> Any:
        return replace(header, base_version=None if header.base_version else 1), chunks

    def lie_huge(self, header: PullHeader, chunks: list[Any]) -> Any:
        assert header.payload is not None
        field = self.chance.choice(["num_elements", "chunk_elements", "num_bytes"])
        return replace(header, payload=replace(header.payload, **{field: 2 ** self.chance.randrange(20, 53)})), chunks

    def lie_endless(self, header: PullHeader, chunks: list[Any]) -> Any:
        return header, chunks * 50

    def lie_short(self, header: PullHeader, chunks: list[Any]) -> Any:
        return header, chunks[:-1]

    def lie_no_payload(self, header: PullHeader, chunks: list[Any]) -> Any:
        return replace(header, payload=None), []

    def lie_no_header(self, header: PullHeader, chunks: list[Any]) -> Any:
        return chunks[0], chunks

    def lie_silence(self, header: PullHeader, chunks: list[Any]) -> Any:
        return header, [*chunks[:1], None, *chunks[1:]]

    def lie_refusal(self, header: PullHeader, chunks: list[Any]) -> Any:
        raise self.refusal

    def lie_busy(self, header: PullHeader, chunks: list[Any]) -> Any:
        raise Busy("for ever")

    def _sealed(self, header: PullHeader, chunks: list[Any]) -> Any:
        from diloco_common.codec import chunks_crc32c

        assert header.payload is not None
        return replace(header, payload=replace(header.payload, chunks_crc32c=chunks_crc32c(chunks))), chunks


async def run(answers: int, seed: int) -> Counter[str]:
    """What became of them: `WHAT: taken` or `WHAT: from the shard`. Raises AssertionError where something wrong came
    through."""
    torch.manual_seed(seed)
    of = version()
    liar = Liar(of, random.Random(seed))
    context = Parts(encodes_at_once=True).context()
    found: Counter[str] = Counter()
    for _ in range(answers):
        liar.draw()
        module.SILENT_S = 0.003 if liar.said in ("silence", "busy") else 60.0
        mirrors = Mirrors(context)
        mirrors._dialed["mirror:1"] = liar  # type: ignore[assignment]
        answer = await mirrors.pull(of.near, PullRequest(0, ("int8", "bfloat16"), have=HAVE), SIZE)
        found[f"{liar.said}: {'from the shard' if answer is None else 'taken'}"] += 1
        if answer is not None:
            header, payload = answer
            right = of.change if header.base_version is not None else of.values
            assert b"".join(payload.chunks) == b"".join(right.chunks), liar.said
            assert _meaning(payload.header) == _meaning(right.header), liar.said
            assert (header.merged_version, header.epoch, header.version) == (1, EPOCH, 2), "the shard says these"
            assert header.base_version in (None, 1)
    return found


def _meaning(header: PayloadHeader) -> tuple[object, ...]:
    is_plain = header.encoding == "bfloat16"
    return header.encoding, header.num_elements, None if is_plain else header.chunk_elements


def test_whatever_a_mirror_answers_only_what_was_announced_comes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENT_S", module.SILENT_S)  # put back: each answer has its own
    monkeypatch.setattr(module, "AGAIN_S", 0.001)
    found = asyncio.run(run(400, seed=3))
    kinds = {what.partition(":")[0] for what in found}
    assert len(kinds) == 15, "every kind was drawn"
    assert found["truth: taken"] > 0 == found["truth: from the shard"]
    assert found["truth_as_values: taken"] > 0 == found["truth_as_values: from the shard"]
    taken = {what.partition(":")[0] for what in found if what.endswith(": taken")}
    assert taken <= {"truth", "truth_as_values", "other_meaning"}, "which may happen to be the right one"
