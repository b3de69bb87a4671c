"""The limits of numbers, texts and lists that a caller sends.

The values of `messages.py`, and `Tie` and `PayloadHeader`, have the limit of each field in its annotation. `by_name.py`
checks it on both sides, before the message becomes a value; `manifest.py` checks tensors. Fields without a limit are
flags, messages, enums, the bytes of a chunk, or the text of a refusal, which is cut (`errors.plain`). Values within the
limits fit everything that stores them later: int64, JSON, the 12 digits in file names, and float64 without loss.
Counters that add them up stop at their own limit, below that of the wire. The shard's core makes checks that no limit
can express, such as whether a learner can have trained so much.

`has_at_most` and `size_of` look at the bytes of a message before it is parsed: a parser makes an object for every
entry, even one of two bytes, and 4 MiB of message would become 100 MiB before anybody could refuse it. The encoding:
https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from diloco_common.errors import BadRequest

FRAGMENTS_MAX = 4096
TENSORS_MAX = 2**16
"""Tensors of a model. An adapter with 60 layers of 128 experts with three pairs of tensors each has 46,080."""
TENSOR_NAME_MAX = 512
TENSOR_NAMES_MAX = 16 << 20
"""Characters of all names together, with prefixes (`Tensor.prefix`) written out."""
DIMENSIONS_MAX = 8
FROZEN_MAX = 8192
"""Frozen tensors compared; a learner with more combines several. A shard checks them within 50 ms."""
FROZEN_BYTES_MAX = 64 << 10
"""Values of frozen tensors are sent up to this many bytes in all: enough for constants, not for a base model."""
TIES_MAX = 4096
"""Keys of a state_dict; a learner with more omits the rest."""
JOIN_ENTRIES_MAX = TENSORS_MAX + FROZEN_MAX + TIES_MAX + FRAGMENTS_MAX + 128
"""Entries of all fields of a Join together, counted before parsing."""
JOIN_ENTRY_BYTES_MAX = FROZEN_BYTES_MAX + (8 << 10)
"""Bytes of each entry. A tensor with a name of 512 characters and 8 dimensions takes less than 3 KiB."""
ELEMENTS_MAX = 2**42
"""Elements of a model, and of each dimension."""
TOKENS_MAX = 2**40
STEPS_MAX = 2**32
"""Inner steps of one contribution."""
TOKENS_MERGED_MAX = 2**62
"""Limit of the wire. A shard stops counting at half of it."""
TOKENS_COUNTED_MAX = TOKENS_MERGED_MAX // 2
VERSION_MAX = 2**39
"""Limit of the wire; the name of a version file has 12 digits."""
VERSION_KEPT_MAX = VERSION_MAX // 2
"""Limit of a version file. The wire's limit leaves room for as many versions again: eight years at 1000 a second."""
EPOCH_KEPT_MAX = 10**12 - 1
"""Limit of a version file; the name of an epoch file has 12 digits."""
NAME_MAX = 64
"""Characters of ids, codes and names of encodings."""
PARTS_MAX = 4096
RANGES_MAX = 8192
"""Ranges in one message. A rank has about one for each tensor of the fragment."""
RANGES_OF_ALL_MAX = 2**16
"""Ranges of all parts of one contribution: 64 ranks with 1024 tensors each in one fragment."""
TIME_MAX_S = 2.0**32
"""A century."""
AWAY_MAX = 64
"""Shards that a learner reports as away; it omits the rest."""
ADDRESS_MAX = 260
"""A DNS name, which has up to 253 characters, and a port."""
RULES_MAX = 512
"""Characters of the description of a shard's rules."""


@dataclass(frozen=True, slots=True)
class FieldLimit:
    """The limit of a field: of a number, or of the length of a text or a list."""

    most: float
    least: float = 0
    counts: str = ""
    """Unit of a length: "characters", "entries" or "bytes". Empty: the field is a number."""
    is_dropped: bool = False
    """Values beyond the limit count as absent instead of being refused, because only people look at them."""

    def holds(self, value: Any) -> bool:
        """False for NaN."""
        return bool(self.least <= (len(value) if self.counts else value) <= self.most)


NAME = FieldLimit(NAME_MAX, counts="characters")
TENSOR_NAME = FieldLimit(TENSOR_NAME_MAX, 1, "characters")
SHAPE, SIZE = FieldLimit(DIMENSIONS_MAX, counts="entries"), FieldLimit(ELEMENTS_MAX)
TENSORS = FieldLimit(TENSORS_MAX, counts="entries")
FRAGMENTS = FieldLimit(FRAGMENTS_MAX, counts="entries")

FragmentId: TypeAlias = Annotated[int, FieldLimit(FRAGMENTS_MAX - 1)]
Version: TypeAlias = Annotated[int, FieldLimit(VERSION_MAX)]
TokensMerged: TypeAlias = Annotated[int, FieldLimit(TOKENS_MERGED_MAX)]
Exact: TypeAlias = Annotated[int, FieldLimit(2**53)]
"""Integers that float64, and so JSON, holds exactly: epochs, generations and sizes."""
Uint32: TypeAlias = Annotated[int, FieldLimit(2**32 - 1)]
Seconds: TypeAlias = Annotated[float, FieldLimit(TIME_MAX_S)]
Name: TypeAlias = Annotated[str, NAME]
TensorName: TypeAlias = Annotated[str, FieldLimit(TENSOR_NAME_MAX, counts="characters")]
Address: TypeAlias = Annotated[str, FieldLimit(ADDRESS_MAX, counts="characters")]
Sha256: TypeAlias = Annotated[bytes, FieldLimit(32, counts="bytes")]

PART_FIELDS_MAX = 16
"""Fields of a message of Push or Pull that is not one of our frames."""
HEADER_BYTES_MAX = 20 * RANGES_MAX
"""Bytes of the headers of Push and Pull; a range takes at most 18."""
MESSAGE_BYTES_MAX: Mapping[str, int] = {
    "JoinRequest": 4 << 20,
    "Progress": 32 << 10,
    "PushRequest": (4 << 20) + (128 << 10),
    "PullRequest": HEADER_BYTES_MAX,
    "LeaveRequest": 1 << 10,
    "FollowRequest": 1 << 10,
    "JoinResponse": (4 << 20) + (256 << 10),
    "Directive": 8 << 10,
    "PushResponse": 8 << 10,
    "PullResponse": (4 << 20) + (128 << 10),
}
"""Maximum bytes of messages of both sides, checked before parsing. A chunk has up to `payload.CHUNK_BYTES_MAX`."""


def check(what: str, value: Any, limit: FieldLimit) -> None:
    """Raises a BadRequest that names the field (`what`), the value and the limit."""
    if not limit.holds(value):
        raise beyond(what, value, limit)


def beyond(what: str, value: Any, limit: FieldLimit) -> BadRequest:
    takes = f"at most {number(limit.most)}"
    if limit.least:
        takes = f"{number(limit.least)} to {number(limit.most)}"
    has = f"has {len(value)} {limit.counts}" if limit.counts else f"is {value}"
    return BadRequest(f"{what} {has}; {takes} {'are' if limit.counts else 'is'} taken")


def number(value: float) -> str:
    """A limit as people write it: 2^40, or 4096."""
    if value >= 2**15 and value == int(value) and int(value).bit_count() == 1:
        return f"2^{int(value).bit_length() - 1}"
    if value > 2**16 and value == int(value) and (int(value) + 1).bit_count() == 1:
        return f"2^{int(value).bit_length()} - 1"
    return f"{value:.12g}"


def has_at_most(data: bytes, entries: int, each_bytes: int) -> bool:
    """Whether a message has at most `entries` fields, none longer than `each_bytes`. Stops counting at damage."""
    at = 0
    end = len(data)
    try:
        for _ in range(entries):
            if at >= end:
                return True
            tag, size, at = data[at], data[at + 1], at + 2
            if tag & 0x87 == 2 and size < 0x80:  # bytes, texts and messages, as most are
                at += size
                continue
            if tag >= 0x80:
                at = _end_of_varint(data, at - 1)
                size, at = data[at], at + 1
            match tag & 7:
                case 2:
                    if size >= 0x80:
                        size, at = _varint(data, at - 1)
                    at += size
                    if size > each_bytes:
                        return False
                case 0:
                    at = _end_of_varint(data, at - 1)
                case 1:
                    at += 7
                case 5:
                    at += 3
                case 3:
                    return False  # a group: no message of ours has one, and the parser would skip it and go on
                case _:
                    return True  # not a wire type: the parser refuses it here
    except IndexError:
        return True
    return at >= end


def size_of(data: bytes, number: int, entries: int) -> int | None:
    """Total bytes of all fields with this number; None if there are more than `entries` fields, or a group.

    Stops counting at damage.
    """
    at = total = 0
    end = len(data)
    try:
        for _ in range(entries):
            if at >= end:
                return total
            tag, at = _varint(data, at)
            match tag & 7:
                case 2:
                    size, at = _varint(data, at)
                    at += size
                    total += size if tag >> 3 == number else 0
                case 0:
                    at = _end_of_varint(data, at)
                case 1:
                    at += 8
                case 5:
                    at += 4
                case 3:
                    return None
                case _:
                    return total
    except IndexError:
        return total
    return total if at >= end else None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The value, and the offset where it ends."""
    end = _end_of_varint(data, at)
    return sum((byte & 0x7F) << 7 * index for index, byte in enumerate(data[at : min(end, at + 10)])), end


def _end_of_varint(data: bytes, at: int) -> int:
    while data[at] >= 0x80:
        at += 1
    return at + 1
