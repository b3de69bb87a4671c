"""A fragment on the wire: its header and its chunks.

The flat float32 fragment is cut into chunks of `chunk_elements` elements (the last may have fewer). Each chunk is
encoded on its own, sent as one message, and can be decoded alone. From the header alone, a receiver can refuse the
payload, or allocate memory for it, before the first chunk arrives.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from diloco_common.codec.base import BLOCK_ELEMENTS
from diloco_common.codec.frames import Checksum, Chunk, NewFrame, crc32c, said_crc32c
from diloco_common.codec.memory import scratch
from diloco_common.codec.registry import get_codec
from diloco_common.errors import BadChecksum, BadPayload, NotFinite, UnknownEncoding
from diloco_common.wire.bounds import Exact, Name, Uint32

CHUNK_ELEMENTS_MAX = 2**22
"""Headers with larger chunks are refused."""
CHUNK_BYTES_MAX = CHUNK_ELEMENTS_MAX + 4 * CHUNK_ELEMENTS_MAX // BLOCK_ELEMENTS
"""So are headers with chunks of more bytes: 1 Mi float32 values, or 4 Mi codes of 8 bits and their scales."""


@cache
def usual_chunk_elements(encoding: str) -> int:
    """Default number of elements per chunk: the most allowed, since each message costs CPU time.
    Raises UnknownEncoding."""
    codec, size = get_codec(encoding), CHUNK_ELEMENTS_MAX
    while codec.num_bytes(size) > CHUNK_BYTES_MAX:
        size //= 2
    return size


@dataclass(frozen=True, slots=True)
class PayloadHeader:
    """Describes the bytes that follow. Do not trust it before `check_header`."""

    encoding: Name
    num_elements: Exact
    chunk_elements: Exact
    """Elements of every chunk but the last."""
    num_bytes: Exact
    """Bytes of all chunks together."""
    chunks_crc32c: Uint32
    """Checksum of the whole payload: CRC-32C over the chunks' CRC-32Cs in order, 4 bytes each, little-endian."""

    @property
    def num_chunks(self) -> int:
        return -(-self.num_elements // self.chunk_elements)

    def chunk_slice(self, index: int) -> slice:
        """The elements of chunk `index`, in the flat fragment. Raises BadPayload if there is no such chunk."""
        if not 0 <= index < self.num_chunks:
            raise BadPayload(f"there is no chunk {index}: the payload has {self.num_chunks}, counted from 0")
        start = index * self.chunk_elements
        return slice(start, min(start + self.chunk_elements, self.num_elements))

    def chunk_bounds(self) -> tuple[slice, ...]:
        return tuple(self.chunk_slice(index) for index in range(self.num_chunks))

    def chunk_bytes(self, index: int) -> int:
        """Bytes of chunk `index`. Raises UnknownEncoding, and BadPayload if there is no such chunk."""
        bounds = self.chunk_slice(index)
        return get_codec(self.encoding).num_bytes(bounds.stop - bounds.start)


@dataclass(frozen=True, slots=True)
class Payload:
    header: PayloadHeader
    chunks: tuple[Chunk, ...]


def num_payload_bytes(encoding: str, num_elements: int, chunk_elements: int | None = None) -> int:
    """Bytes of all chunks of a fragment. Raises UnknownEncoding."""
    codec = get_codec(encoding)
    if chunk_elements is None:
        chunk_elements = usual_chunk_elements(encoding)
    whole, rest = divmod(num_elements, chunk_elements)
    return whole * codec.num_bytes(chunk_elements) + (codec.num_bytes(rest) if rest else 0)


def check_header(header: PayloadHeader, num_elements_expected: int, allowed: Collection[str]) -> None:
    """Refuse a payload before its bytes arrive.

    Raises UnknownEncoding if the encoding is not among `allowed`; BadPayload if the number of elements is wrong, or the
    sizes contradict each other.
    """
    if header.encoding not in allowed:
        raise UnknownEncoding(f"encoding {header.encoding!r} is not taken here; send {' or '.join(sorted(allowed))}")
    if header.num_elements != num_elements_expected:
        raise BadPayload(
            f"the payload has {header.num_elements} elements, the fragment {num_elements_expected}; "
            "check that the sender has the same model and cuts it in the same way"
        )
    check_layout(header)


def check_layout(header: PayloadHeader) -> None:
    """Check that the sizes in a header agree with each other. Raises UnknownEncoding and BadPayload."""
    codec = get_codec(header.encoding)
    if header.num_elements < 1:
        raise BadPayload(f"a payload must have at least 1 element, not {header.num_elements}")
    _check_chunk_elements(header.encoding, header.chunk_elements)
    expected = num_payload_bytes(codec.name, header.num_elements, header.chunk_elements)
    if header.num_bytes != expected:
        raise BadPayload(
            f"{header.num_elements} elements as {codec.name} in chunks of {header.chunk_elements} take "
            f"{expected} bytes, but the header says {header.num_bytes}"
        )


@torch.no_grad()
def encode_payload(
    values: Tensor,
    encoding: str,
    *,
    plus: Tensor | None = None,
    loss: Tensor | None = None,
    chunk_elements: int | None = None,
) -> Payload:
    """Encode the fragment x = `values + plus`: both (n,) float32, contiguous, n >= 1, on one device.

    `values` may be bfloat16; so may `plus` and `loss`, if both are.

    Sets `loss` (n,) to the encoding error `x - decoded`, where `decoded` is bit for bit the result of
    `decode_payload`. Error feedback adds it to the next contribution. `loss` may be `values` or `plus` itself.

    Raises UnknownEncoding, BadPayload (chunk_elements), and NotFinite if an element of x is NaN or infinite; `loss` is
    then useless.
    """
    for tensor in (values, plus, loss):
        if tensor is not None:
            _check_flat(tensor, (torch.float32, torch.bfloat16))
    if plus is not None and loss is not None and plus.dtype != loss.dtype:
        raise ValueError(f"plus is {plus.dtype}, but loss {loss.dtype}: both are of one dtype")
    if chunk_elements is None:
        chunk_elements = usual_chunk_elements(encoding)
    _check_chunk_elements(encoding, chunk_elements)
    codec, chunks = get_codec(encoding), ChunkWriter(encoding, values.numel(), chunk_elements)
    for bound in chunks.bounds:
        encoded = chunks.next(values.device)
        try:
            codec.encode(
                values[bound],
                encoded,
                plus=None if plus is None else plus[bound],
                loss=None if loss is None else loss[bound],
            )
        except NotFinite as error:
            raise NotFinite(f"elements from {bound.start}: {error}") from None
        chunks.written(encoded)
    return chunks.payload()


class ChunkWriter:
    """Makes a payload chunk by chunk. On a CPU it encodes directly into the frames to send."""

    def __init__(self, encoding: str, num_elements: int, chunk_elements: int) -> None:
        num_bytes = num_payload_bytes(encoding, num_elements, chunk_elements)
        self._header = PayloadHeader(encoding, num_elements, chunk_elements, num_bytes, chunks_crc32c=0)
        self.bounds = self._header.chunk_bounds()
        self._frame = NewFrame(0)
        self._chunks: list[Chunk] = []
        self._checksum = Checksum()

    def next(self, device: torch.device) -> Tensor:
        """The buffer for the next encoded chunk: uint8, on the device."""
        num_bytes = self._header.chunk_bytes(len(self._chunks))
        self._frame = NewFrame(num_bytes)
        return self._frame.chunk if device.type == "cpu" else scratch("encoded", torch.uint8, num_bytes, device)

    def written(self, encoded: Tensor) -> None:
        if encoded.device.type != "cpu":
            self._frame.chunk.copy_(encoded)
        chunk, checksum = self._frame.sealed()
        self._chunks.append(chunk)
        self._checksum.add(checksum)

    def payload(self) -> Payload:
        """The payload, once all chunks are written."""
        return Payload(replace(self._header, chunks_crc32c=self._checksum.value), tuple(self._chunks))


@torch.no_grad()
def decode_payload(payload: Payload, out: Tensor) -> None:
    """Decode a fragment into `out` (num_elements,) float32, contiguous, on any device.

    Does not verify the checksum; `PayloadReceiver` does. Raises UnknownEncoding and BadPayload. It finds wrong sizes
    before it writes anything; for wrong bytes it names the chunk and the block, and earlier chunks are already written.
    """
    header = payload.header
    check_layout(header)
    _check_flat(out)
    if out.numel() != header.num_elements:
        raise BadPayload(f"the payload has {header.num_elements} elements, but `out` has {out.numel()}")
    check_chunk_sizes(payload)
    codec = get_codec(header.encoding)
    for index, chunk in enumerate(payload.chunks):
        with of_chunk(index):
            codec.decode(as_tensor(chunk, out.device), out[header.chunk_slice(index)])


def check_chunk(header: PayloadHeader, index: int, data: Tensor) -> None:
    """Check that chunk `index`, as uint8, can be decoded. Raises BadPayload that names the chunk and the block."""
    bounds = header.chunk_slice(index)
    with of_chunk(index):
        get_codec(header.encoding).check(data, bounds.stop - bounds.start)


@contextmanager
def of_chunk(index: int) -> Iterator[None]:
    """Add the index of the chunk to errors."""
    try:
        yield
    except BadPayload as error:
        raise BadPayload(f"chunk {index}: {error}") from None


def check_chunk_sizes(payload: Payload) -> None:
    """Check that all chunks are there and have the right sizes. Raises BadPayload."""
    if len(payload.chunks) != payload.header.num_chunks:
        raise BadPayload(
            f"the header announces {payload.header.num_chunks} chunks, but there are {len(payload.chunks)}"
        )
    for index, chunk in enumerate(payload.chunks):
        check_chunk_size(payload.header, index, chunk)


def check_chunk_size(header: PayloadHeader, index: int, data: Chunk) -> None:
    if len(data) != header.chunk_bytes(index):
        raise BadPayload(
            f"chunk {index} of {header.num_chunks} takes {header.chunk_bytes(index)} bytes, got {len(data)}"
        )


def _check_chunk_elements(encoding: str, chunk_elements: int) -> None:
    most = usual_chunk_elements(encoding)
    if not 0 < chunk_elements <= most or chunk_elements % BLOCK_ELEMENTS:
        raise BadPayload(
            f"chunk_elements of {encoding} must be a multiple of {BLOCK_ELEMENTS} from {BLOCK_ELEMENTS} "
            f"to {most}, not {chunk_elements}"
        )


def _check_flat(values: Tensor, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> None:
    if values.dtype not in dtypes or values.dim() != 1 or not values.is_contiguous() or not values.numel():
        meant = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"need a contiguous 1-D {meant} tensor with elements, got {values.dtype} {list(values.shape)} "
            f"with strides {values.stride()}; .float().reshape(-1) makes one"
        )


def as_tensor(data: Chunk, device: torch.device | str = "cpu") -> Tensor:
    """View bytes as a uint8 tensor that must only be read; on a CPU this makes no copy."""
    return torch.frombuffer(data, dtype=torch.uint8).to(device)


# torch warns once per process that bytes are read-only. Trigger that warning here, where it is ignored.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


class PayloadReceiver:
    """Collects arriving chunks without copies, and never more than `header.num_bytes`.

    The caller has called `check_header`. Raises UnknownEncoding, and BadPayload for sizes that contradict each other.
    """

    def __init__(self, header: PayloadHeader) -> None:
        check_layout(header)
        self.header = header
        self._chunks: list[Chunk] = []
        self._checksum = Checksum()

    def add(self, chunk: Chunk) -> None:
        """Take the next chunk. Raises BadPayload for a wrong size or one chunk too many, and BadChecksum if its frame
        has another checksum. A refused chunk is not kept."""
        index = len(self._chunks)
        check_chunk_size(self.header, index, chunk)
        checksum, said = crc32c(chunk), said_crc32c(chunk)
        if said not in (None, checksum):
            raise BadChecksum(f"chunk {index} has crc32c {checksum:08x}, it says {said:08x}: it changed on the way")
        self._checksum.add(checksum)
        self._chunks.append(chunk)

    @property
    def is_complete(self) -> bool:
        return len(self._chunks) == self.header.num_chunks

    def finish(self) -> Payload:
        """The payload, once the sender is done. Raises BadPayload if chunks are missing, and BadChecksum."""
        missing = self.header.num_chunks - len(self._chunks)
        if missing:
            raise BadPayload(f"{missing} of {self.header.num_chunks} chunks are missing; the sender stopped early")
        if self._checksum.value != self.header.chunks_crc32c:
            raise BadChecksum(
                f"the checksums of the chunks have crc32c {self._checksum.value:08x}, the header says "
                f"{self.header.chunks_crc32c:08x}: they changed on the way"
            )
        return Payload(self.header, tuple(self._chunks))
