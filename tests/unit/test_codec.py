"""What the encodings promise: bounds, refusals, residuals, results that depend on the values alone, and memory."""

from __future__ import annotations

import struct
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from builders import decoded, random_values
from diloco_common.codec import (
    CHUNK_ELEMENTS_MAX,
    Payload,
    PayloadHeader,
    PayloadReceiver,
    as_tensor,
    check_header,
    decode_payload,
    encode_payload,
    encoding_names,
    get_codec,
    memory,
)
from diloco_common.codec.memory import SLICE_ELEMENTS
from diloco_common.errors import BadPayload, NotFinite, UnknownEncoding
from diloco_worker.core import device

each_encoding = pytest.mark.parametrize("encoding", encoding_names())
each_block_encoding = pytest.mark.parametrize("encoding", ["int8", "int4"])

FLOAT32_MAX = torch.finfo(torch.float32).max


def round_trip(values: Tensor, encoding: str) -> Tensor:
    return decoded(encode_payload(values, encoding))


def error_bound(values: Tensor, encoding: str) -> Tensor:
    """The bound of the docstrings, per element, in float64; of one block."""
    x = values.double().abs()
    absmax = x.max()
    match encoding:
        case "float32":
            return torch.zeros_like(x)
        case "bfloat16":
            return torch.clamp(x * 2.0**-8, min=2.0**-134)
        case "int8" | "int4":
            levels = 127 if encoding == "int8" else 7
            return torch.full_like(x, max(0.5001 * float(absmax) / levels, levels * 2.0**-126))
        case _:
            return torch.full_like(x, float(absmax))


@each_encoding
@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=256))
def test_any_finite_block_comes_back_finite_and_within_the_bound(encoding: str, values: list[float]) -> None:
    x = torch.tensor(values)
    y = round_trip(x, encoding)
    assert y.isfinite().all()
    assert ((x.double() - y.double()).abs() <= error_bound(x, encoding)).all()


@each_encoding
def test_results_depend_on_neither_slicing_nor_chunks_nor_earlier_calls(encoding: str) -> None:
    x = random_values(SLICE_ELEMENTS + 1000, 0)
    first = encode_payload(x, encoding)
    encode_payload(random_values(777, 5), encoding)
    assert encode_payload(x, encoding) == first
    chunked = encode_payload(x, encoding, chunk_elements=4096)  # whole blocks of every encoding
    assert chunked.header.num_chunks == len(chunked.chunks) == 65
    assert torch.equal(decoded(chunked), decoded(first))
    beginning = encode_payload(x[:8192], encoding)
    assert torch.equal(decoded(beginning), decoded(first)[:8192])


@each_encoding
def test_a_chunk_or_a_range_of_it_is_decoded_alone(encoding: str) -> None:
    x = random_values(5000, 0)
    payload = encode_payload(x, encoding, chunk_elements=2048)
    whole = decoded(payload)
    for index, bounds in enumerate(payload.header.chunk_bounds()):
        assert payload.header.chunk_bytes(index) == len(payload.chunks[index])
        out = torch.empty(bounds.stop - bounds.start)
        get_codec(encoding).decode(as_tensor(payload.chunks[index]), out)
        assert torch.equal(out, whole[bounds])
    data = torch.tensor(list(payload.chunks[1]), dtype=torch.uint8)
    for start, stop in [(0, 256), (256, 1000), (1792, 2048)]:
        out = torch.empty(stop - start)
        get_codec(encoding).decode_range(data, 2048, start, out)
        assert torch.equal(out, whole[2048 + start : 2048 + stop])


@each_encoding
@settings(max_examples=25, deadline=None)
@given(values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=600))
def test_the_loss_is_what_the_receiver_does_not_get(encoding: str, values: list[float]) -> None:
    x = torch.tensor(values)
    loss = x.clone()
    payload = encode_payload(loss, encoding, chunk_elements=256, loss=loss)
    assert torch.equal(loss, x - decoded(payload))


@each_encoding
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_an_encoder_refuses_values_that_are_not_finite_and_leaves_them(encoding: str, value: float) -> None:
    x = random_values(1000, 0)
    x[700] = value
    before = x.clone()
    with pytest.raises(NotFinite, match=r"elements from 512: element 188 of 256 is -?(nan|inf)"):
        encode_payload(x, encoding, chunk_elements=256)
    assert torch.equal(x.view(torch.int32), before.view(torch.int32))


@each_block_encoding
@pytest.mark.parametrize("scale", [0.0, -1.0, torch.nan, torch.inf, 2.0**-127, FLOAT32_MAX / 6])
def test_a_decoder_refuses_a_scale_that_no_encoder_writes(encoding: str, scale: float) -> None:
    payload = encode_payload(random_values(2000, 0), encoding, chunk_elements=1024)
    chunk = bytearray(payload.chunks[1])
    chunk[8:12] = struct.pack("<f", scale)
    out = torch.zeros(2000)
    with pytest.raises(BadPayload, match=f"chunk 1: {encoding}: block 2 has scale"):
        decode_payload(replace(payload, chunks=(payload.chunks[0], bytes(chunk))), out)
    assert not out[1024:].any()


@pytest.mark.parametrize(
    ("encoding", "num_elements", "byte", "value", "says"),
    [
        ("int8", 600, 300, 0x80, "block 1 has the code -128"),
        ("int4", 600, 299, 0x08, "block 2 has the nibble 1000"),
        ("int4", 600, 100, 0x80, "block 0 has the nibble 1000"),
        ("int4", 599, 299, 0x10, "block 2 has an unused last nibble"),
    ],
)
def test_a_decoder_refuses_a_code_that_no_encoder_writes(
    encoding: str, num_elements: int, byte: int, value: int, says: str
) -> None:
    payload = encode_payload(random_values(num_elements, 0), encoding)
    chunk = bytearray(payload.chunks[0])
    chunk[4 * 3 + byte] = value
    with pytest.raises(BadPayload, match=says):
        decoded(replace(payload, chunks=(bytes(chunk),)))


@each_encoding
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_arbitrary_bytes_are_refused_or_decode(encoding: str, data: st.DataObject) -> None:
    num_elements = data.draw(st.integers(1, 300))
    size = get_codec(encoding).num_bytes(num_elements)
    chunk = data.draw(st.binary(min_size=size, max_size=size))
    header = PayloadHeader(encoding, num_elements, 512, size, 0)
    try:
        y = decoded(Payload(header, (chunk,)))
    except BadPayload:
        assert encoding not in ("float32", "bfloat16")
    else:
        assert encoding in ("float32", "bfloat16") or y.isfinite().all()


GOOD = encode_payload(random_values(1000, 0), "int8", chunk_elements=512).header


@pytest.mark.parametrize(
    ("header", "error", "says"),
    [
        (replace(GOOD, encoding="int4"), UnknownEncoding, "'int4' is not taken here; send float32 or int8"),
        (replace(GOOD, num_elements=999), BadPayload, "999 elements, the fragment 1000"),
        (replace(GOOD, chunk_elements=0), BadPayload, "multiple of 256"),
        (replace(GOOD, chunk_elements=300), BadPayload, "multiple of 256"),
        (replace(GOOD, chunk_elements=2 * CHUNK_ELEMENTS_MAX), BadPayload, "of int8 .* to 4194304"),
        (replace(GOOD, encoding="float32", chunk_elements=CHUNK_ELEMENTS_MAX), BadPayload, "of float32 .* to 1048576"),
        (replace(GOOD, num_bytes=1015), BadPayload, "take 1016 bytes, but the header says 1015"),
    ],
)
def test_a_header_is_refused_before_its_bytes_come(header: PayloadHeader, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        check_header(header, 1000, ("int8", "float32"))


def test_a_receiver_refuses_wrong_sizes_at_once_and_stays_usable() -> None:
    payload = encode_payload(random_values(1000, 0), "int8", chunk_elements=512)
    first, last = map(bytes, payload.chunks)
    receiver = PayloadReceiver(payload.header)
    for wrong in (b"", first[:-1], first + b"\0", last):
        with pytest.raises(BadPayload, match="chunk 0 of 2 takes 520 bytes"):
            receiver.add(wrong)
    receiver.add(first)
    with pytest.raises(BadPayload, match="1 of 2 chunks are missing"):
        receiver.finish()
    receiver.add(last)
    with pytest.raises(BadPayload, match="there is no chunk 2"):
        receiver.add(last)
    assert receiver.finish() == payload


SIZE = memory.LEAST // 4 + 1000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_that_is_gone_leaves_its_memory_to_the_next(dtype: torch.dtype) -> None:
    first = memory.empty(SIZE * 2, dtype)
    assert (first.shape, first.dtype) == ((SIZE * 2,), dtype)
    address = first.data_ptr()
    del first
    assert memory.empty(SIZE * 2, dtype).data_ptr() == address


def test_memory_that_a_view_still_shows_is_not_used_again() -> None:
    tensor = memory.empty(SIZE).fill_(7.0)
    part, address = tensor[100:200].view(10, 10), tensor.data_ptr()
    del tensor
    other = memory.empty(SIZE).fill_(0.0)
    assert other.data_ptr() != address
    assert part.eq(7.0).all()
    del part
    assert memory.empty(SIZE).data_ptr() == address


def test_a_block_that_nobody_needed_for_long_goes() -> None:
    """After a burst, a pool keeps what is needed at once since, and not what was needed then."""
    pool = memory.Pool()
    burst = [pool.take(memory.LEAST) for _ in range(5)]
    del burst
    assert len(pool) == 5
    for _ in range(memory.WINDOW):
        [pool.take(memory.LEAST), pool.take(memory.LEAST)]
    assert len(pool) == 2


def test_blocks_that_are_free_can_be_given_back_and_those_in_use_stay() -> None:
    pool = memory.Pool()
    used, free, returned = (pool.take(memory.LEAST) for _ in range(3))
    del free
    used[:3] = b"abc"
    pool.take(memory.LEAST)
    del returned
    pool.drop()
    assert len(pool) == 0
    again = pool.take(memory.LEAST)
    again[:3] = b"xyz"
    assert bytes(used[:3]) == b"abc"


class Stream:
    """One of an accelerator that this machine has not."""

    def __init__(self) -> None:
        self.was_waited_for = False

    def synchronize(self) -> None:
        self.was_waited_for = True


@pytest.mark.parametrize("module", ["accelerator", "xpu"], ids=["torch 2.6 and later", "earlier"])
def test_a_device_of_any_make_is_waited_for(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream()
    if module != "accelerator":
        monkeypatch.delattr(torch, "accelerator", raising=False)
    monkeypatch.setattr(torch, module, SimpleNamespace(current_stream=lambda of: stream), raising=False)

    device.wait_for_device(torch.device("xpu"))
    assert stream.was_waited_for
