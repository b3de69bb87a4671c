"""Receives a payload, chunk by chunk, from a sender that is not trusted."""

from __future__ import annotations

from diloco_common.codec.checksum import Checksum, crc32c
from diloco_common.codec.frames import Chunk, said_crc32c
from diloco_common.codec.payload import Payload, PayloadHeader, check_chunk_size, check_layout
from diloco_common.errors import BadChecksum, BadSize


class PayloadReceiver:
    """Holds the chunks as they come, without copies, and never more than `header.num_bytes`.

    The caller has called `check_header`. Raises UnknownEncoding, and BadSize for sizes that contradict each other.
    """

    def __init__(self, header: PayloadHeader) -> None:
        check_layout(header)
        self.header = header
        self._chunks: list[Chunk] = []
        self._checksum = Checksum()

    def add(self, chunk: Chunk) -> None:
        """Take the next chunk. Raises BadSize for a wrong size or one chunk too many, and BadChecksum where its frame
        says another one; then it does not keep the chunk."""
        index = len(self._chunks)
        check_chunk_size(self.header, index, chunk)
        checksum, said = crc32c(chunk), said_crc32c(chunk)
        if said not in (None, checksum):
            raise BadChecksum(f"chunk {index} has crc32c {checksum:08x}, it says {said:08x}: it changed on the way")
        self._checksum.add(checksum)
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
        if self._checksum.value != self.header.chunks_crc32c:
            raise BadChecksum(
                f"the checksums of the chunks have crc32c {self._checksum.value:08x}, the header says "
                f"{self.header.chunks_crc32c:08x}: they changed on the way"
            )
        return Payload(self.header, tuple(self._chunks))
