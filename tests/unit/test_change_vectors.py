"""Changes of versions a second time, in plain Python: code and vectors must agree with it, as docs/wire-format.md says.

`python tests/unit/test_change_vectors.py` writes tests/data/change-vectors.json anew, from
the reference here and in test_codec_vectors.py.
"""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_codec_vectors import (
    Vector,
    floats,
    in_file,
    reference_bfloat16,
    reference_chunk,
    reference_chunks_crc32c,
    reference_crc32c,
    reference_decode,
    same_bits,
    to_float32,
    write,
)

from builders import decoded
from diloco_common.codec import Payload, PayloadHeader, crc32c, encode_payload
from diloco_common.codec.change import decode_version, encode_change

CHANGES = ("int8", "int4")

ANCHOR = [0.0, 1.0, -1.0, 0.5, -3.0, 100.0, -0.369140625, 1.0]
VALUES = [1e-3, 1.01, -1.0, 0.498, -3.01, 100.4, -0.37, 1.00390625]
"""The last is half way between two numbers of bfloat16."""


def reference_change(values: list[float], anchor: list[float], encoding: str) -> tuple[bytes, list[float], bytes]:
    """One chunk: the change, what it decodes to, and the next anchor as bfloat16. Sums of float32 come out right."""
    change = reference_chunk([to_float32(v - a) for v, a in zip(values, anchor, strict=True)], encoding)
    decoded = reference_decode(change, len(values), encoding)
    after = b"".join(reference_bfloat16(to_float32(a + d)) for a, d in zip(anchor, decoded, strict=True))
    return change, decoded, after


def reference_vectors() -> list[Vector]:
    values = [to_float32(x) for x in VALUES]
    vectors = []
    for encoding in CHANGES:
        change, decoded, after = reference_change(values, ANCHOR, encoding)
        vectors.append(
            {
                "name": f"change as {encoding}",
                "encoding": encoding,
                "num_elements": len(values),
                "chunk_elements": 256,
                "crc32c": [f"{reference_crc32c(change):08x}"],
                "chunks_crc32c": f"{reference_chunks_crc32c([change]):08x}",
                "values": struct.pack("<8f", *values).hex(),
                "anchor": b"".join(map(reference_bfloat16, ANCHOR)).hex(),
                "change": change.hex(),
                "decoded": struct.pack("<8f", *decoded).hex(),
                "next_anchor": after.hex(),
            }
        )
    return vectors


VECTORS = in_file("change")


def anchor_of(digits: str) -> Payload:
    data = bytes.fromhex(digits)
    header = PayloadHeader("bfloat16", len(data) // 2, 256, len(data), reference_chunks_crc32c([data]))
    return Payload(header, (data,))


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: v["name"])
def test_a_vector_is_what_shard_and_learner_make(vector: Vector) -> None:
    anchor = anchor_of(vector["anchor"])
    change, after = encode_change(floats(vector["values"]), anchor, vector["encoding"])
    assert [chunk.hex() for chunk in change.chunks] == [vector["change"]]
    assert f"{change.header.chunks_crc32c:08x}" == vector["chunks_crc32c"]
    assert [f"{crc32c(chunk):08x}" for chunk in change.chunks] == vector["crc32c"]
    assert after == anchor_of(vector["next_anchor"])

    assert same_bits(decoded(change), floats(vector["decoded"]))
    values, _ = decode_version(change, decode_version(anchor, None)[0])
    assert same_bits(values.float(), decoded(after))


def test_the_vectors_are_those_of_the_reference() -> None:
    assert reference_vectors() == VECTORS


numbers = st.floats(min_value=-(2.0**100), max_value=2.0**100, width=32)
alike = st.floats(min_value=-2.0, max_value=2.0, width=32)


@pytest.mark.parametrize("encoding", CHANGES)
@settings(max_examples=60, deadline=None)
@given(pairs=st.one_of(*(st.lists(st.tuples(kind, kind), min_size=1, max_size=40) for kind in (numbers, alike))))
def test_the_code_equals_the_reference_bit_for_bit(encoding: str, pairs: list[tuple[float, float]]) -> None:
    values, anchors = (torch.tensor(column) for column in zip(*pairs, strict=True))
    anchor = encode_payload(anchors, "bfloat16", chunk_elements=256)
    change, after = encode_change(values, anchor, encoding)
    before = decoded(anchor).tolist()
    expected_change, _, expected_after = reference_change(values.tolist(), before, encoding)
    assert (change.chunks, after.chunks) == ((expected_change,), (expected_after,))


if __name__ == "__main__":
    write("change", reference_vectors())
