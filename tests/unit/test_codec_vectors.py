"""The wire format a second time, in plain Python: codec and vectors must agree with it, as docs/wire-format.md says.

`python tests/unit/test_codec_vectors.py` writes tests/data/wire-vectors.json anew, from the reference here
and not from the codec.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from builders import decoded
from diloco_common.codec import Payload, PayloadHeader, chunks_crc32c, crc32c, encode_payload, encoding_names

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/wire-format.md"
Vector = dict[str, Any]


def in_file(kind: str) -> list[Vector]:
    path = ROOT / f"tests/data/{kind}-vectors.json"
    return json.loads(path.read_text()) if path.exists() else []


def write(kind: str, vectors: list[Vector]) -> None:
    (ROOT / f"tests/data/{kind}-vectors.json").write_text(json.dumps(vectors, indent=1) + "\n")


FLOAT32_MAX = (2 - 2.0**-23) * 2.0**127
INT8_SCALE_MAX, INT4_SCALE_MAX = float.fromhex("0x1.020406p+121"), float.fromhex("0x1.249248p+125")
SUBNORMAL = 2.0**-149


def to_float32(x: float) -> float:
    """Round to float32. Quotients and products of two float32 come out right: float64 has the bits for it."""
    return float(struct.unpack("<f", struct.pack("<f", x))[0])


def reference_bfloat16(x: float) -> bytes:
    """Nearest, ties to even, by exact comparison with the two neighbours; saturates."""
    bits = struct.unpack("<I", struct.pack("<f", abs(x)))[0]
    below = bits >> 16
    above = min(below + 1, 0x7F7F)
    value = [Fraction(struct.unpack("<f", struct.pack("<I", code << 16))[0]) for code in (below, above)]
    to_below, to_above = Fraction(abs(x)) - value[0], value[1] - Fraction(abs(x))
    code = below if to_below < to_above or (to_below == to_above and below % 2 == 0) else above
    return struct.pack("<H", code | (0x8000 if math.copysign(1.0, x) < 0 else 0))


def reference_chunk(values: list[float], encoding: str) -> bytes:
    if encoding == "float32":
        return struct.pack(f"<{len(values)}f", *values)
    if encoding == "bfloat16":
        return b"".join(map(reference_bfloat16, values))
    code_max, scale_max = {"int8": (127, INT8_SCALE_MAX), "int4": (7, INT4_SCALE_MAX)}[encoding]
    scales: list[float] = []
    codes: list[int] = []
    for start in range(0, len(values), 256):
        block = values[start : start + 256]
        scale = min(to_float32(max(map(abs, block)) / code_max), scale_max)
        scale = scale if scale >= 2.0**-126 else 1.0
        scales.append(scale)
        codes += [round(to_float32(x / scale)) for x in block]
    if encoding == "int8":
        body = struct.pack(f"<{len(codes)}b", *codes)
    else:
        nibbles = [code & 0x0F for code in codes] + [0] * (len(codes) % 2)
        body = bytes(low | high << 4 for low, high in zip(nibbles[::2], nibbles[1::2], strict=True))
    return struct.pack(f"<{len(scales)}f", *scales) + body


def reference_decode(data: bytes, num_elements: int, encoding: str) -> list[float]:
    if encoding == "float32":
        return list(struct.unpack(f"<{num_elements}f", data))
    if encoding == "bfloat16":
        halves = struct.unpack(f"<{num_elements}H", data)
        return [struct.unpack("<f", struct.pack("<I", half << 16))[0] for half in halves]
    num_blocks = -(-num_elements // 256)
    scales = struct.unpack(f"<{num_blocks}f", data[: 4 * num_blocks])
    body = data[4 * num_blocks :]
    if encoding == "int8":
        levels: list[float] = list(struct.unpack(f"<{num_elements}b", body))
    else:
        nibbles = [nibble for byte in body for nibble in (byte & 0x0F, byte >> 4)][:num_elements]
        levels = [nibble - 16 if nibble > 7 else nibble for nibble in nibbles]
    return [to_float32(level * scales[i // 256]) for i, level in enumerate(levels)]


def reference_decode_all(chunks: list[bytes], num_elements: int, size: int, encoding: str) -> list[float]:
    """Of chunks that have `size` elements each, but for the last one."""
    sizes = [min(size, num_elements - size * i) for i in range(len(chunks))]
    return [y for chunk, n in zip(chunks, sizes, strict=True) for y in reference_decode(chunk, n, encoding)]


def reference_crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def reference_chunks_crc32c(chunks: Sequence[bytes]) -> int:
    return reference_crc32c(b"".join(struct.pack("<I", reference_crc32c(chunk)) for chunk in chunks))


PLAIN = [0.0, 1.0, -1.0, 0.5, -3.0, 100.0, -0.37, 1e-3]
TWO_CHUNKS = [((7 * i) % 31 - 15) / 8 for i in range(259)]
CASES: list[tuple[str, list[float], str, tuple[str, ...]]] = [
    ("eight values", PLAIN, "", encoding_names()),
    ("odd count", [7.0, -7.0, 2.5, 3.5, -0.5], "", ("int8", "int4")),
    ("all zero", [0.0, 0.0, 0.0], "", ("int8", "int4")),
    ("too small for a scale", [3 * SUBNORMAL, -SUBNORMAL], "", ("int8", "int4")),
    ("largest float32", [FLOAT32_MAX, -FLOAT32_MAX, 2.0**126], "", encoding_names()),
    ("ties to even", [1 + 2.0**-8, 1 + 3 * 2.0**-8, -(1 + 2.0**-8)], "", ("bfloat16",)),
    ("ties to even codes", [127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5], "", ("int8",)),
    ("ties to even codes", [7.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5], "", ("int4",)),
    ("two chunks", TWO_CHUNKS, "x[i] = ((7 i) mod 31 - 15) / 8, i = 0..258", ("int8", "int4")),
]


def reference_vectors() -> list[Vector]:
    vectors = []
    for name, numbers, rule, encodings in CASES:
        values = [to_float32(x) for x in numbers]
        size = 256
        for encoding in encodings:
            chunks = [reference_chunk(values[i : i + size], encoding) for i in range(0, len(values), size)]
            decoded = reference_decode_all(chunks, len(values), size, encoding)
            vectors.append(
                {
                    "name": f"{encoding}: {name}",
                    "encoding": encoding,
                    "num_elements": len(values),
                    "chunk_elements": size,
                    "num_bytes": sum(map(len, chunks)),
                    "crc32c": [f"{reference_crc32c(chunk):08x}" for chunk in chunks],
                    "chunks_crc32c": f"{reference_chunks_crc32c(chunks):08x}",
                    "rule": rule,
                    "values": struct.pack(f"<{len(values)}f", *values).hex(),
                    "chunks": [chunk.hex() for chunk in chunks],
                    "decoded": struct.pack(f"<{len(values)}f", *decoded).hex(),
                }
            )
    return vectors


VECTORS = in_file("wire")


def floats(digits: str) -> torch.Tensor:
    return torch.tensor(struct.unpack(f"<{len(digits) // 8}f", bytes.fromhex(digits)), dtype=torch.float32)


def payload_of(vector: Vector) -> Payload:
    sizes = [vector[name] for name in ("encoding", "num_elements", "chunk_elements", "num_bytes")]
    header = PayloadHeader(*sizes, int(vector["chunks_crc32c"], 16))
    return Payload(header, tuple(bytes.fromhex(chunk) for chunk in vector["chunks"]))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: v["name"])
def test_a_vector_is_what_the_encoder_writes_and_decodes_to_its_values(vector: Vector) -> None:
    payload = payload_of(vector)
    assert (
        encode_payload(floats(vector["values"]), vector["encoding"], chunk_elements=vector["chunk_elements"]) == payload
    )
    assert [f"{crc32c(chunk):08x}" for chunk in payload.chunks] == vector["crc32c"]
    assert chunks_crc32c(payload.chunks) == payload.header.chunks_crc32c
    assert same_bits(decoded(payload), floats(vector["decoded"]))


def test_the_vectors_are_those_of_the_reference() -> None:
    assert reference_vectors() == VECTORS


def test_the_page_names_every_encoding() -> None:
    page = PAGE.read_text()
    assert all(f"### {name}\n" in page for name in encoding_names())
    assert {v["encoding"] for v in VECTORS} == set(encoding_names())


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
similar = st.floats(min_value=-2.0, max_value=2.0, width=32)
on_levels = st.integers(-127, 127).map(float)


@pytest.mark.parametrize("encoding", encoding_names())
@settings(max_examples=60, deadline=None)
@given(values=st.one_of(*(st.lists(kind, min_size=1, max_size=40) for kind in (finite, similar, on_levels))))
@example(values=[0.5] * 300 + [FLOAT32_MAX])
@example(values=[1e-6 * i for i in range(256)] + [1e6 - i for i in range(256)] + [1.0])
@example(values=[-0.0, 0.0])
def test_the_codec_equals_the_reference_bit_for_bit(encoding: str, values: list[float]) -> None:
    chunks = [reference_chunk(values[i : i + 512], encoding) for i in range(0, len(values), 512)]
    payload = encode_payload(torch.tensor(values), encoding, chunk_elements=512)
    assert list(payload.chunks) == chunks
    assert payload.header.chunks_crc32c == reference_chunks_crc32c(chunks)
    assert same_bits(decoded(payload), torch.tensor(reference_decode_all(chunks, len(values), 512, encoding)))


if __name__ == "__main__":
    write("wire", reference_vectors())
