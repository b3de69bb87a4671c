"""A fragment on the wire: its header and its chunks.

The flat float32 fragment is cut into chunks of `chunk_elements` elements (the last may have fewer). Each
chunk is encoded on its own, travels as one message, and can be decoded alone. The header says everything that
a receiver must know to refuse, or to allocate, before the first chunk comes.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Collection
from dataclasses import dataclass, replace

import google_crc32c
import torch
from torch import Tensor

from diloco_common.codec.base import BLOCK_ELEMENTS
from diloco_common.codec.registry import get_codec
from diloco_common.codec.scratch import scratch
from diloco_common.errors import BadEncoding, BadSize, NotFinite, UnknownEncoding

CHUNK_ELEMENTS = 2**20
"""Elements of a chunk unless told otherwise: 1 MiB of int8 codes."""
CHUNK_ELEMENTS_MAX = 2**22
"""A header with larger chunks is refused."""


@dataclass(frozen=True, slots=True)
class PayloadHeader:
    """Describes the bytes that follow. Nothing in it is to be trusted before `check_header`."""

    encoding: str
    num_elements: int
    chunk_elements: int
    """Elements of every chunk but the last."""
    num_bytes: int
    """Of all chunks together."""
    crc32c: int
    """CRC-32C of all bytes in order."""

    @property
    def num_chunks(self) -> int:
        return -(-self.num_elements // self.chunk_elements)

    def chunk_slice(self, index: int) -> slice:
        """The elements of chunk `index`, in the flat fragment. Raises BadSize if there is no such chunk."""
        if not 0 <= index < self.num_chunks:
            raise BadSize(f"there is no chunk {index}: the payload has {self.num_chunks}, counted from 0")
        start = index * self.chunk_elements
        return slice(start, min(start + self.chunk_elements, self.num_elements))

    def chunk_bounds(self) -> tuple[slice, ...]:
        """The elements of each chunk, in the flat fragment."""
        return tuple(self.chunk_slice(index) for index in range(self.num_chunks))

    def chunk_bytes(self, index: int) -> int:
        """Bytes of chunk `index`. Raises UnknownEncoding, and BadSize if there is no such chunk."""
        bounds = self.chunk_slice(index)
        return get_codec(self.encoding).num_bytes(bounds.stop - bounds.start)


@dataclass(frozen=True, slots=True)
class Payload:
    header: PayloadHeader
    chunks: tuple[bytes, ...]


def num_payload_bytes(encoding: str, num_elements: int, chunk_elements: int = CHUNK_ELEMENTS) -> int:
    """Bytes of all chunks of a fragment. Raises UnknownEncoding."""
    codec = get_codec(encoding)
    whole, rest = divmod(num_elements, chunk_elements)
    return whole * codec.num_bytes(chunk_elements) + (codec.num_bytes(rest) if rest else 0)


def check_header(header: PayloadHeader, num_elements_expected: int, allowed: Collection[str]) -> None:
    """Refuse a payload before its bytes come.

    Raises UnknownEncoding if the encoding is not among `allowed`; BadSize if the elements are not those of
    the fragment, or the sizes do not follow from each other.
    """
    if header.encoding not in allowed:
        raise UnknownEncoding(f"encoding {header.encoding!r} is not taken here; send {' or '.join(sorted(allowed))}")
    if header.num_elements != num_elements_expected:
        raise BadSize(
            f"the payload has {header.num_elements} elements, the fragment {num_elements_expected}; "
            "does the model differ, or how it is cut?"
        )
    check_layout(header)


def check_layout(header: PayloadHeader) -> None:
    """Look whether the sizes in a header follow from each other. Raises UnknownEncoding and BadSize."""
    codec = get_codec(header.encoding)
    if header.num_elements < 1:
        raise BadSize(f"a payload has at least 1 element, not {header.num_elements}")
    _check_chunk_elements(header.chunk_elements)
    expected = num_payload_bytes(codec.name, header.num_elements, header.chunk_elements)
    if header.num_bytes != expected:
        raise BadSize(
            f"{header.num_elements} elements as {codec.name} in chunks of {header.chunk_elements} take "
            f"{expected} bytes, the header says {header.num_bytes}"
        )


@torch.no_grad()
def encode_payload(
    values: Tensor,
    encoding: str,
    *,
    minus: Tensor | None = None,
    plus: Tensor | None = None,
    loss: Tensor | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Payload:
    """Encode x = `values - minus + plus`, a fragment: all (n,) float32, contiguous, n >= 1, on one device.

    `loss` (n,) float32 is set to what the encoding lost, `x - decoded`, where `decoded` is bit for bit what
    `decode_payload` gives: the residual that error feedback adds to the next contribution. It may be `values` itself.

    Raises UnknownEncoding, BadSize (chunk_elements), and NotFinite if an element of x is NaN or infinite; what `loss`
    holds is then of no use.
    """
    for tensor in (values, minus, plus, loss):
        if tensor is not None:
            _check_flat(tensor)
    _check_chunk_elements(chunk_elements)
    codec, chunks = get_codec(encoding), ChunkWriter(encoding, values.numel(), chunk_elements)
    for bound in chunks.bounds:
        encoded = chunks.next(values.device)
        try:
            codec.encode(
                values[bound],
                encoded,
                minus=None if minus is None else minus[bound],
                plus=None if plus is None else plus[bound],
                loss=None if loss is None else loss[bound],
            )
        except NotFinite as error:
            raise NotFinite(f"elements from {bound.start}: {error}") from None
        chunks.written(encoded)
    return chunks.payload()


class ChunkWriter:
    """A payload that is made chunk by chunk: on a CPU right in the bytes that will be sent."""

    def __init__(self, encoding: str, num_elements: int, chunk_elements: int) -> None:
        num_bytes = num_payload_bytes(encoding, num_elements, chunk_elements)
        self._header = PayloadHeader(encoding, num_elements, chunk_elements, num_bytes, crc32c=0)
        self.bounds = self._header.chunk_bounds()
        """The elements of each chunk."""
        self._chunks: list[bytes] = []
        self._crc32c = 0

    def next(self, device: torch.device) -> Tensor:
        """Where to encode the next chunk: uint8, on the device."""
        num_bytes = self._header.chunk_bytes(len(self._chunks))
        self._chunks.append(_new_bytes(None, num_bytes))
        return (
            as_tensor(self._chunks[-1]) if device.type == "cpu" else scratch("encoded", torch.uint8, num_bytes, device)
        )

    def written(self, encoded: Tensor) -> None:
        """The chunk that `next` gave the room for is there."""
        chunk = self._chunks[-1]
        if encoded.device.type != "cpu":
            as_tensor(chunk).copy_(encoded)
        self._crc32c = google_crc32c.extend(self._crc32c, chunk)

    def payload(self) -> Payload:
        """All chunks were written."""
        return Payload(replace(self._header, crc32c=self._crc32c), tuple(self._chunks))


_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
"""Bytes that hold anything yet. Who asks for them may write to them, through `as_tensor`, until somebody else has them:
encoding elsewhere and copying took a third of the time of publishing a version."""
_new_bytes.argtypes, _new_bytes.restype = (ctypes.c_void_p, ctypes.c_ssize_t), ctypes.py_object


def decode_payload(payload: Payload, out: Tensor) -> None:
    """Decode a fragment into `out` (num_elements,) float32, contiguous, on any device.

    Does not look at the checksum (`verify_checksum` does, and `PayloadReceiver` has). Raises UnknownEncoding
    and BadSize before anything is written, and BadEncoding with the index of chunk and block, when earlier
    chunks are written.
    """
    header = payload.header
    check_layout(header)
    _check_flat(out)
    if out.numel() != header.num_elements:
        raise BadSize(f"the payload has {header.num_elements} elements, `out` {out.numel()}")
    check_chunk_sizes(payload)
    for index, chunk in enumerate(payload.chunks):
        decode_chunk(header, index, chunk, out[header.chunk_slice(index)])


@torch.no_grad()
def decode_chunk(header: PayloadHeader, index: int, data: bytes, out_slice: Tensor) -> None:
    """Decode chunk `index` alone, into `out_slice` (its elements,) float32, contiguous, on any device.

    Raises BadSize, and BadEncoding with the index of the block, before anything is written.
    """
    _check_flat(out_slice)
    bounds = header.chunk_slice(index)
    if out_slice.numel() != bounds.stop - bounds.start:
        raise BadSize(f"chunk {index} has {bounds.stop - bounds.start} elements, `out_slice` {out_slice.numel()}")
    check_chunk_size(header, index, data)
    try:
        get_codec(header.encoding).decode(as_tensor(data, out_slice.device), out_slice)
    except BadEncoding as error:
        raise BadEncoding(f"chunk {index}: {error}") from None


def check_chunk(header: PayloadHeader, index: int, data: Tensor) -> None:
    """Look whether chunk `index`, as uint8, can be decoded. Raises BadSize, and BadEncoding with chunk and block."""
    bounds = header.chunk_slice(index)
    try:
        get_codec(header.encoding).check(data, bounds.stop - bounds.start)
    except BadEncoding as error:
        raise BadEncoding(f"chunk {index}: {error}") from None


def check_chunk_sizes(payload: Payload) -> None:
    """Look whether all chunks are there and have their sizes. Raises BadSize."""
    if len(payload.chunks) != payload.header.num_chunks:
        raise BadSize(f"the header announces {payload.header.num_chunks} chunks, there are {len(payload.chunks)}")
    for index, chunk in enumerate(payload.chunks):
        check_chunk_size(payload.header, index, chunk)


def check_chunk_size(header: PayloadHeader, index: int, data: bytes) -> None:
    """Look whether chunk `index` has its size. Raises BadSize."""
    if len(data) != header.chunk_bytes(index):
        raise BadSize(f"chunk {index} of {header.num_chunks} takes {header.chunk_bytes(index)} bytes, got {len(data)}")


def _check_chunk_elements(chunk_elements: int) -> None:
    if not 0 < chunk_elements <= CHUNK_ELEMENTS_MAX or chunk_elements % BLOCK_ELEMENTS:
        raise BadSize(
            f"chunk_elements must be a multiple of {BLOCK_ELEMENTS} from {BLOCK_ELEMENTS} "
            f"to {CHUNK_ELEMENTS_MAX}, not {chunk_elements}"
        )


def _check_flat(values: Tensor) -> None:
    if values.dtype != torch.float32 or values.dim() != 1 or not values.is_contiguous() or not values.numel():
        raise ValueError(
            f"need a contiguous 1-D float32 tensor with elements, got {values.dtype} {list(values.shape)} "
            f"with strides {values.stride()}; .float().reshape(-1) makes one"
        )


def as_tensor(data: bytes, device: torch.device | str = "cpu") -> Tensor:
    """View bytes as a uint8 tensor, without a copy on a CPU. Only ever read from."""
    return torch.frombuffer(data, dtype=torch.uint8).to(device)


# torch warns, once per process, that bytes are read-only; here is the once.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)
