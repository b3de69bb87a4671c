"""Checksums of chunks: CRC-32C (Castagnoli), by the processor's own instruction where it has one."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import google_crc32c
import numpy as np


def crc32c(data: bytes | memoryview, start: int = 0) -> int:
    """CRC-32C of bytes, or of a view of bytes, without a copy. `start`: that of the bytes before, if there are any."""
    # google_crc32c refuses a memoryview, as its buffer can be released; a read-only array has none to release.
    if not len(data):
        return start
    view: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(data, np.uint8)
    view.flags.writeable = False
    return int(google_crc32c.extend(start, view))


class Checksum:
    """Names the chunks of a payload as a whole: CRC-32C of their checksums, each as 4 bytes, little-endian."""

    def __init__(self) -> None:
        self.value = 0

    def add(self, chunk_crc32c: int) -> None:
        """The checksum of the next chunk."""
        self.value = int(google_crc32c.extend(self.value, struct.pack("<I", chunk_crc32c)))


def chunks_crc32c(chunks: Iterable[bytes | memoryview]) -> int:
    """What `Checksum` says of all chunks."""
    checksum = Checksum()
    for chunk in chunks:
        checksum.add(crc32c(chunk))
    return checksum.value
