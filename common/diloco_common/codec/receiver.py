"""Receives a payload, chunk by chunk, from a sender that is not trusted; and checksums."""

from __future__ import annotations

import google_crc32c

from diloco_common.codec.payload import Payload, PayloadHeader, check_chunk_size, check_layout
from diloco_common.errors import BadChecksum, BadSize


class Checksum:
    """CRC-32C (Castagnoli) of bytes that arrive in parts."""

    def __init__(self) -> None:
        self.value = 0

    def update(self, data: bytes) -> None:
        self.value = google_crc32c.extend(self.value, data)

    def verify(self, expected: int) -> None:
        """Raises BadChecksum."""
        if self.value != expected:
            raise BadChecksum(
                f"the bytes have crc32c {self.value:08x}, the header says {expected:08x}: they changed on the way"
            )


class PayloadReceiver:
    """Holds the chunks as they come, without copies, and never more than `header.num_bytes`.

    The caller has called `check_header`. Raises UnknownEncoding, and BadSize for sizes that contradict each other.
    """

    def __init__(self, header: PayloadHeader) -> None:
        check_layout(header)
        self.header = header
        self._chunks: list[bytes] = []
        self._checksum = Checksum()

    def add(self, chunk: bytes) -> None:
        """Take the next chunk. Raises BadSize for a wrong size or one chunk too many, and does not keep the chunk."""
        check_chunk_size(self.header, len(self._chunks), chunk)
        self._checksum.update(chunk)
        self._chunks.append(chunk)

    @property
    def is_complete(self) -> bool:
        """Whether every chunk is there."""
        return len(self._chunks) == self.header.num_chunks

    def finish(self) -> Payload:
        """The payload, once the sender is done. Raises BadSize if chunks are missing, and BadChecksum."""
        missing = self.header.num_chunks - len(self._chunks)
        if missing:
            raise BadSize(f"{missing} of {self.header.num_chunks} chunks are missing; the sender stopped early")
        self._checksum.verify(self.header.crc32c)
        return Payload(self.header, tuple(self._chunks))
