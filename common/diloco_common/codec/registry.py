"""The encodings by name. New ones are added only here."""

from __future__ import annotations

from functools import cache

from diloco_common.codec.base import Codec
from diloco_common.codec.blocks import Int4, Int8
from diloco_common.codec.plain import Bfloat16, Float32
from diloco_common.errors import ConfigError, UnknownEncoding
from diloco_common.extensions import find, plugin_names

GROUP = "diloco.codec"
_CODECS: dict[str, Codec] = {codec.name: codec for codec in (Float32(), Bfloat16(), Int8(), Int4())}


def encoding_names() -> tuple[str, ...]:
    """Names of all encodings: ours from most to fewest bits per element, then installed plugins."""
    return (*_CODECS, *plugin_names(GROUP))


def offered_names() -> tuple[str, ...]:
    """The names that a learner offers when it joins: all encodings, and NAME@DIGEST of each plugin, so that a shard
    with a different source can refuse. The digest is that of `diloco_common.extensions.find`."""
    return (*encoding_names(), *(f"{name}@{source}" for name in plugin_names(GROUP) if (source := _source_of(name))))


def _source_of(name: str) -> str:
    try:
        return find(GROUP, name).source
    except ConfigError:  # broken, but perhaps not needed; if it is, its use will report why
        return ""


def get_codec(name: str) -> Codec:
    codec = _CODECS.get(name)
    return _plugin(name) if codec is None else codec


@cache
def _plugin(name: str) -> Codec:
    """An installed plugin. A name may come from others, so only entry points are loaded."""
    if name not in plugin_names(GROUP):
        raise UnknownEncoding(f"there is no encoding {name!r}; choose one of {', '.join(encoding_names())}")
    codec: Codec = find(GROUP, name).thing
    if codec.name != name:
        raise UnknownEncoding(f"the codec that is installed as {name!r} calls itself {codec.name!r}")
    return codec
