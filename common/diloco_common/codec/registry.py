"""The encodings by name. Add new ones only here."""

from __future__ import annotations

from diloco_common.codec.base import Codec
from diloco_common.codec.int8 import Int8
from diloco_common.codec.nibbles import E3M0, Int4
from diloco_common.codec.plain import Bfloat16, Float32
from diloco_common.codec.topk import TopK
from diloco_common.errors import UnknownEncoding

_CODECS: dict[str, Codec] = {codec.name: codec for codec in (Float32(), Bfloat16(), Int8(), Int4(), E3M0(), TopK())}


def encoding_names() -> tuple[str, ...]:
    """Names of all encodings, from most to fewest bits per element."""
    return tuple(_CODECS)


def get_codec(name: str) -> Codec:
    """The codec of that name. Raises UnknownEncoding."""
    codec = _CODECS.get(name)
    if codec is None:
        raise UnknownEncoding(f"there is no encoding {name!r}; choose one of {', '.join(_CODECS)}")
    return codec
