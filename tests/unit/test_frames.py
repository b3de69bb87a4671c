"""Messages that carry a chunk: made and read by hand, they are what the generated classes make and read."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from diloco_common.codec import Chunk, PayloadReceiver, crc32c, encode_payload
from diloco_common.codec.frames import NewFrame, frame_of, framed, said_crc32c
from diloco_common.errors import BadChecksum, BadRequest
from diloco_common.wire import bounds, protobuf
from diloco_common.wire.bounds import has_at_most, size_of
from diloco_common.wire.messages import PullHeader, PushHeader
from diloco_protos import parameter_server_pb2 as pb

SIZES = [0, 1, 5, 127, 128, 129, 2**14 - 1, 2**14, 2**21 - 1, 2**21, 2**22]
"""Around the sizes where a length takes one byte more, and the largest chunk."""
READERS: list[tuple[Any, Callable[[bytes], Any]]] = [
    (pb.PushRequest, protobuf.push_part),
    (pb.PullResponse, protobuf.pull_part),
]
"""The messages that carry chunks, and who reads them."""
each_reader = pytest.mark.parametrize(("kind", "read"), READERS, ids=["push", "pull"])


def padded(kind: Any, chunk: bytes, checksum: int) -> Any:
    """A message with the padding that docs/wire-format.md tells."""
    n = len(chunk)
    zeros = 7 if n < 2**7 else 6 if n < 2**14 else 5 if n < 2**21 else 4
    return kind(chunk=chunk, crc32c=checksum, padding=bytes(zeros))


def written(chunk: bytes) -> memoryview:
    """A chunk as an encoder writes it."""
    frame = NewFrame(len(chunk))
    if chunk:
        frame.chunk.copy_(torch.frombuffer(bytearray(chunk), dtype=torch.uint8))
    view, checksum = frame.sealed()
    assert checksum == crc32c(chunk)
    return view


@each_reader
def test_a_frame_is_what_the_generated_class_makes(kind: Any, read: Callable[[bytes], Any]) -> None:
    r = random.Random(1)
    for size in [*SIZES, *(r.randrange(40_000) for _ in range(60))]:
        chunk = r.randbytes(size)
        expected = padded(kind, chunk, crc32c(chunk)).SerializeToString()
        assert frame_of(chunk) == frame_of(written(chunk)) == frame_of(framed(chunk, crc32c(chunk))) == expected


def test_what_an_encoder_writes_is_sent_without_a_copy() -> None:
    chunk = written(b"some bytes")
    assert frame_of(chunk) is frame_of(chunk) is chunk.obj
    payload = encode_payload(torch.randn(3000), "int8", chunk_elements=256)
    assert all(frame_of(piece) is piece.obj for piece in payload.chunks if isinstance(piece, memoryview))
    assert {type(piece) for piece in payload.chunks} == {memoryview}


@pytest.mark.parametrize(
    "view",
    [memoryview(b"x" * 30)[16:], memoryview(bytearray(30))[16:], memoryview(b"x" * 9), written(b"some bytes")[:4]],
)
def test_a_view_of_other_bytes_or_of_a_part_is_not_taken_for_a_frame(view: memoryview) -> None:
    assert said_crc32c(view) is None
    assert pb.PushRequest.FromString(frame_of(view)).chunk == bytes(view)


def unusual(r: random.Random, kind: Any) -> bytes:
    """A message as others may make it: without padding, fields in any order, twice, unknown, or cut off."""
    said = [kind(chunk=r.randbytes(r.choice((0, 1, 20, 127, 128, 300)))) for _ in range(r.choice((0, 1, 1, 1, 2)))]
    said += [kind(crc32c=r.randrange(2**32)) for _ in range(r.choice((0, 1, 1, 1, 2)))]
    said += [kind(padding=r.randbytes(r.choice((0, 1, 7, 200)))) for _ in range(r.choice((0, 0, 1, 2)))]
    said += [kind(header=PUSH_HEADER if kind is pb.PushRequest else PULL_HEADER)] * (r.random() < 0.2)
    fields = [message.SerializeToString() for message in said]
    if r.random() < 0.3:  # fields that a later version may have: a number, and bytes
        fields.append(r.choice((b"\x98\x06\x07", b"\x9a\x06\x03abc", b"\x9d\x06abcd", b"\x99\x06abcdefgh")))
    if r.random() < 0.1:  # a length in more bytes than it needs
        fields.append(b"\x2a\x83\x80\x00abc")
    if r.random() < 0.5:
        r.shuffle(fields)
    message = b"".join(fields)
    if r.random() < 0.2:
        message = message[: r.randrange(len(message) + 1)]
    if message and r.random() < 0.2:
        at = r.randrange(len(message))
        message = message[:at] + r.randbytes(1) + message[at + 1 :]
    return message


PUSH_HEADER = pb.PushHeader(fragment_id=3, num_parts=2, part=1, ranges=[pb.Range(start=1, stop=9)])
PULL_HEADER = pb.PullHeader(fragment_id=3, version=5, ranges=[pb.Range(start=1, stop=9)])


def by_the_generated_class(kind: Any, message: bytes) -> Any:
    """What a message says, or that it is none."""
    try:
        parsed = kind.FromString(message)
    except Exception:
        return BadRequest
    if parsed.HasField("header"):
        return PushHeader if kind is pb.PushRequest else PullHeader
    return (parsed.chunk, parsed.crc32c) if parsed.HasField("crc32c") else BadRequest


def by_hand(read: Callable[[bytes], PushHeader | PullHeader | Chunk], message: bytes) -> Any:
    try:
        part = read(message)
    except BadRequest:
        return BadRequest
    return type(part) if isinstance(part, PushHeader | PullHeader) else (bytes(part), said_crc32c(part))


def read_alike(kind: Any, read: Callable[[bytes], Any], message: bytes) -> type:
    """What both take a message for; `tuple`: a chunk."""
    expected, found = by_the_generated_class(kind, message), by_hand(read, message)
    if expected in (PushHeader, PullHeader):
        assert found in (expected, BadRequest)  # its numbers may be beyond their limits
        return expected
    assert found == expected, message.hex()
    return tuple if isinstance(expected, tuple) else expected


@each_reader
def test_messages_of_others_are_read_as_the_generated_class_reads_them(kind: Any, read: Callable[[bytes], Any]) -> None:
    r = random.Random(7)
    assert len({read_alike(kind, read, unusual(r, kind)) for _ in range(2000)}) == 3


def test_a_chunk_that_changed_on_the_way_is_refused_when_it_comes() -> None:
    payload = encode_payload(torch.randn(600), "int8", chunk_elements=256)
    receiver = PayloadReceiver(payload.header)
    receiver.add(protobuf.push_part(frame_of(payload.chunks[0])))
    message = bytearray(frame_of(payload.chunks[1]))
    message[-1] ^= 1
    with pytest.raises(BadChecksum, match=r"chunk 1 has crc32c .* it changed on the way"):
        receiver.add(protobuf.push_part(bytes(message)))
    receiver.add(protobuf.push_part(frame_of(payload.chunks[1])))
    receiver.add(protobuf.push_part(frame_of(payload.chunks[2])))
    assert receiver.finish() == payload


GROUP = b"\xa3\x06\xa4\x06"


@each_reader
@pytest.mark.parametrize(
    "message",
    [
        pb.PushRequest(header=pb.PushHeader(ranges=[pb.Range()] * bounds.HEADER_BYTES_MAX)).SerializeToString(),
        pb.PushRequest(header=pb.PushHeader(manifest_digest="x" * 90_000)).SerializeToString() * 2,
        b"\x98\x06\x07" * 17,
        GROUP + pb.PushRequest(header=pb.PushHeader(manifest_digest="x" * 200_000)).SerializeToString(),
    ],
    ids=["a large header", "two headers", "many fields", "behind a group"],
)
def test_a_header_is_not_parsed_before_its_size_is_known(
    kind: Any, read: Callable[[bytes], Any], message: bytes
) -> None:
    with pytest.raises(BadRequest, match="has a header of more than 163840 bytes, or more than 16 fields"):
        read(message)


def test_the_longest_header_fits() -> None:
    largest = bounds.ELEMENTS_MAX
    ranges = [pb.Range(start=largest - 2 * i - 2, stop=largest - 2 * i - 1) for i in range(bounds.RANGES_MAX)][::-1]
    header = protobuf.push_part(pb.PushRequest(header=pb.PushHeader(ranges=ranges)).SerializeToString())
    assert isinstance(header, PushHeader)
    assert len(header.ranges) == bounds.RANGES_MAX
    request = protobuf.parse(pb.PullRequest, pb.PullRequest(ranges=ranges).SerializeToString())
    assert protobuf.pull_request_from_pb(request).ranges == header.ranges


def test_a_group_hides_nothing_behind_it() -> None:
    """A parser skips groups, which no message of ours has."""
    tensors = pb.JoinRequest(tensors=[pb.Tensor()] * 100).SerializeToString()
    assert pb.JoinRequest.FromString(GROUP + tensors).tensors
    assert not has_at_most(GROUP + tensors, 50, 1000)
    assert size_of(GROUP + tensors, 3, 1000) is None
