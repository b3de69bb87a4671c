"""Encodings of fragments: values to payloads and back. docs/wire-format.md specifies the format.

`base.py` defines the interface of an encoding. `plain.py`, `int8.py`, `nibbles.py` and `topk.py` are the encodings, and
`registry.py` finds one by its name. `change.py` encodes versions as changes. `payload.py` cuts a fragment into chunks
and describes them, `receiver.py` takes them in, and `native.py` runs the inner loops in C. Pure: no sockets, and no
files but the compiled loops.
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
from diloco_common.codec.receiver import Checksum, PayloadReceiver
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
]
