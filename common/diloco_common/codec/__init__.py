"""Encodings of fragments: values to payloads and back. The format is written down in docs/wire-format.md.

`base.py` says what an encoding is, `plain.py`, `int8.py`, `nibbles.py` and `topk.py` are the encodings, `registry.py`
finds one by its name. `payload.py` cuts a fragment into chunks and describes them, `receiver.py` takes them
in. Pure: torch and arithmetic; no sockets, no files.
"""

from diloco_common.codec.base import Codec
from diloco_common.codec.payload import (
    CHUNK_ELEMENTS,
    CHUNK_ELEMENTS_MAX,
    Payload,
    PayloadHeader,
    as_tensor,
    check_chunk,
    check_header,
    decode_chunk,
    decode_payload,
    encode_payload,
    num_payload_bytes,
)
from diloco_common.codec.receiver import Checksum, PayloadReceiver, verify_checksum
from diloco_common.codec.registry import encoding_names, get_codec

__all__ = [
    "CHUNK_ELEMENTS",
    "CHUNK_ELEMENTS_MAX",
    "Checksum",
    "Codec",
    "Payload",
    "PayloadHeader",
    "PayloadReceiver",
    "as_tensor",
    "check_chunk",
    "check_header",
    "decode_chunk",
    "decode_payload",
    "encode_payload",
    "encoding_names",
    "get_codec",
    "num_payload_bytes",
    "verify_checksum",
]
