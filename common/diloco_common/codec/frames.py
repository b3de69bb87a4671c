"""Frames: the message that carries a chunk, made and read by hand, so that a chunk is never copied.

The generated classes copy a chunk two or three times on each side. A frame has exactly the bytes that they make from a
PushRequest or a PullResponse with `crc32c`, `padding` and `chunk` (docs/wire-format.md, Messages). The padding makes
the chunk begin at byte HEAD_BYTES, so it is aligned to 16 bytes like the allocator's memory; float32 views need 4.
Within a process a chunk is a view into its frame, from the encoder that writes it to the decoder that reads it.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, TypeAlias

import google_crc32c
import numpy as np
import torch


def crc32c(data: bytes | memoryview) -> int:
    """CRC-32C of bytes, or of a view of bytes, without a copy."""
    # google_crc32c refuses a memoryview, since its buffer can be released; a read-only array's cannot.
    if not len(data):
        return 0
    view: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(data, np.uint8)
    view.flags.writeable = False
    return int(google_crc32c.value(view))


class Checksum:
    """Checksum of a whole payload: CRC-32C of its chunks' checksums, each as 4 bytes, little-endian."""

    def __init__(self) -> None:
        self.value = 0

    def add(self, chunk_crc32c: int) -> None:
        self.value = int(google_crc32c.extend(self.value, struct.pack("<I", chunk_crc32c)))


def chunks_crc32c(chunks: Iterable[bytes | memoryview]) -> int:
    checksum = Checksum()
    for chunk in chunks:
        checksum.add(crc32c(chunk))
    return checksum.value


Chunk: TypeAlias = bytes | memoryview
"""The bytes of a chunk: a view into a frame, or plain bytes."""
HEAD_BYTES = 16
"""Offset of the chunk in its frame."""
CHECKSUM = struct.Struct("<I")
CHECKSUM_TAG, PADDING_TAG, CHUNK_TAG = 0x1D, 0x22, 0x2A  # number << 3 | wire type

_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
"""Makes uninitialized bytes. The caller may write to them, through a tensor, until it passes them on. Encoding into
another buffer and then copying took a third of the time it takes to publish a version."""
_new_bytes.argtypes, _new_bytes.restype = (ctypes.c_void_p, ctypes.c_ssize_t), ctypes.py_object


class NewFrame:
    def __init__(self, num_bytes: int) -> None:
        """`num_bytes`: the size of the chunk."""
        self._num_bytes = num_bytes
        self._frame: bytes = _new_bytes(None, HEAD_BYTES + num_bytes)
        self._whole = torch.frombuffer(self._frame, dtype=torch.uint8)

    @property
    def chunk(self) -> torch.Tensor:
        """The buffer for the chunk: uint8 (num_bytes,)."""
        return self._whole[HEAD_BYTES:]

    def sealed(self) -> tuple[memoryview, int]:
        """The finished chunk and its checksum. Nobody may write to the chunk from now on."""
        chunk = memoryview(self._frame)[HEAD_BYTES:]
        checksum = crc32c(chunk)
        ctypes.memmove(self._whole.data_ptr(), _head(self._num_bytes, checksum), HEAD_BYTES)
        return chunk, checksum


def framed(chunk: Chunk, checksum: int) -> memoryview:
    return memoryview(b"".join((_head(len(chunk), checksum), chunk)))[HEAD_BYTES:]


def frame_of(chunk: Chunk) -> bytes:
    """The frame to send; not copied if the chunk is in one."""
    frame = _frame_around(chunk)
    return frame if frame is not None else b"".join((_head(len(chunk), crc32c(chunk)), chunk))


def chunk_in(message: bytes) -> memoryview | None:
    """The unchecked chunk; None if these bytes are not a frame (they may be another message)."""
    num_bytes = len(message) - HEAD_BYTES
    if num_bytes < 0 or message[0] != CHECKSUM_TAG or message[5:HEAD_BYTES] != _after_checksum(num_bytes):
        return None
    return memoryview(message)[HEAD_BYTES:]


def said_crc32c(chunk: Chunk) -> int | None:
    """The checksum in the chunk's frame, if it is in one."""
    frame = _frame_around(chunk)
    return None if frame is None else int(CHECKSUM.unpack_from(frame, 1)[0])


def _frame_around(chunk: Chunk) -> bytes | None:
    if not isinstance(chunk, memoryview):
        return None
    whole = chunk.obj
    is_frame = isinstance(whole, bytes) and len(whole) == HEAD_BYTES + len(chunk) and chunk_in(whole) is not None
    return whole if is_frame else None  # type: ignore[return-value]


def _head(num_bytes: int, checksum: int) -> bytes:
    return bytes([CHECKSUM_TAG]) + CHECKSUM.pack(checksum) + _after_checksum(num_bytes)


@lru_cache(maxsize=256)
def _after_checksum(num_bytes: int) -> bytes:
    """The padding and the tag and length before a chunk of this size."""
    length = bytearray()
    rest = num_bytes
    while rest >= 0x80:
        length.append(rest & 0x7F | 0x80)
        rest >>= 7
    length.append(rest)
    padding = bytes(HEAD_BYTES - 8 - len(length))
    return bytes((PADDING_TAG, len(padding))) + padding + bytes((CHUNK_TAG,)) + bytes(length)
