"""Encodings of fragments: values to payloads and back. docs/wire-format.md specifies the format.

`base.py` defines the interface of an encoding, `blocks.py` implements it for blocks with a scale, and `registry.py` has
the plain ones and finds one by name. `change.py` encodes versions as changes, and makes anchors of them. `payload.py`
cuts a fragment into chunks, describes them and receives them, `frames.py` puts each into the message that carries it,
and `parts.py` cuts ranges out. `native.py` runs the inner loops in C. Pure: it uses no sockets, and no files except the
compiled loops.
"""

from diloco_common.codec.base import Codec
from diloco_common.codec.frames import Checksum, Chunk, chunks_crc32c, crc32c
from diloco_common.codec.payload import (
    CHUNK_ELEMENTS_MAX,
    Payload,
    PayloadHeader,
    PayloadReceiver,
    as_tensor,
    check_chunk,
    check_header,
    decode_payload,
    encode_payload,
    num_payload_bytes,
    usual_chunk_elements,
)
from diloco_common.codec.registry import encoding_names, get_codec, offered_names

__all__ = [
    "CHUNK_ELEMENTS_MAX",
    "Checksum",
    "Chunk",
    "Codec",
    "Payload",
    "PayloadHeader",
    "PayloadReceiver",
    "as_tensor",
    "check_chunk",
    "check_header",
    "chunks_crc32c",
    "crc32c",
    "decode_payload",
    "encode_payload",
    "encoding_names",
    "get_codec",
    "num_payload_bytes",
    "offered_names",
    "usual_chunk_elements",
]
