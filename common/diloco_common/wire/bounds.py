"""The limits of every number, text and list that a caller sends, in one table that other clients can use, too.

`by_name.py` applies it to each message, on both sides, before the message becomes values. Values within the limits fit
everything that stores them later: int64, JSON, the 12 digits in file names, and float64 without loss. Counters that add
them up stop at their own limit, below that of the wire. Checks that no limit can express, such as whether a learner can
have trained so much, are the shard core's.

`has_at_most` and `size_of` look at the bytes of a message before it is parsed: a parser makes an object for every
entry, even one of two bytes, and 4 MiB of message would become 100 MiB before anybody could refuse it. The encoding:
https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diloco_common.errors import WORDS_MAX, BadRequest

FRAGMENTS_MAX = 4096
TENSORS_MAX = 2**16
"""Tensors of a model. An adapter with 128 experts in each of 60 layers, three times two tensors each, has 46,080."""
TENSOR_NAME_MAX = 512
TENSOR_NAMES_MAX = 16 << 20
"""Characters of all names together, with prefixes (`Tensor.prefix`) written out."""
DIMENSIONS_MAX = 8
FROZEN_MAX = 8192
"""Frozen tensors compared; a learner with more combines several. A shard looks at them within 50 ms."""
FROZEN_BYTES_MAX = 64 << 10
"""Bytes of all frozen tensors up to which their values are sent: enough for constants, not for a base model."""
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
"""Limit of a version file, below that of the wire by as many further versions: eight years at a thousand a second."""
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
"""A name of DNS, which has up to 253 characters, and a port."""
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
    """Values beyond it count as absent instead of being refused: only people look at them."""

    def holds(self, value: Any) -> bool:
        """False for NaN."""
        return bool(self.least <= (len(value) if self.counts else value) <= self.most)


_U32, _NAME, _VERSION = FieldLimit(2**32 - 1), FieldLimit(NAME_MAX, 0, "characters"), FieldLimit(VERSION_MAX)
_EXACT = FieldLimit(2**53)
"""Up to the last integer that float64 counts to, as JSON has them."""
_FRAGMENT_ID, _SHA256 = FieldLimit(FRAGMENTS_MAX - 1), FieldLimit(32, 0, "bytes")
_TENSORS, _FRAGMENTS = FieldLimit(TENSORS_MAX, 0, "entries"), FieldLimit(FRAGMENTS_MAX, 0, "entries")
_TOKENS_MERGED, _RANGES = FieldLimit(TOKENS_MERGED_MAX), FieldLimit(RANGES_MAX, 0, "entries")

LIMITS: Mapping[str, Mapping[str, FieldLimit]] = {
    "Tensor": {
        "name": FieldLimit(TENSOR_NAME_MAX, 1, "characters"),
        "shape": FieldLimit(DIMENSIONS_MAX, 0, "entries"),
        "shape[]": FieldLimit(ELEMENTS_MAX),
    },
    "JoinRequest": {
        "protocol": _U32,
        "process_id": _NAME,
        "tensors": _TENSORS,
        "decodes": FieldLimit(64, 0, "entries"),  # a plugin has two, even if no run uses it
        "decodes[]": FieldLimit(96, 0, "characters"),  # NAME@DIGEST
        "held": _FRAGMENTS,
        "frozen": FieldLimit(FROZEN_MAX, 0, "entries"),
        "ties": FieldLimit(TIES_MAX, 0, "entries"),
        "index": _U32,
        "age_s": FieldLimit(TIME_MAX_S),
        "tokens_seen": _TOKENS_MERGED,
        "site": _NAME,
    },
    "Tie": {"name": FieldLimit(TENSOR_NAME_MAX, 0, "characters"), "of": FieldLimit(TENSOR_NAME_MAX, 0, "characters")},
    "FrozenTensor": {
        "name": FieldLimit(TENSOR_NAME_MAX, 0, "characters"),
        "form": FieldLimit(TENSOR_NAME_MAX, 0, "characters"),
        "crc32c": _U32,
        "values": FieldLimit(FROZEN_BYTES_MAX, 0, "bytes"),
    },
    "Held": {"fragment_id": _FRAGMENT_ID, "epoch": _EXACT, "version": _VERSION},
    "JoinResponse": {
        "generation": _EXACT,
        "epoch": _EXACT,
        "heartbeat_s": FieldLimit(3600.0, 0.01),  # with more frequent ones, learners would do nothing else
        "shard_index": _FRAGMENT_ID,
        "num_shards": FieldLimit(FRAGMENTS_MAX, 1),
        "num_fragments": FieldLimit(FRAGMENTS_MAX, 1),
        "manifest_digest": _NAME,
        "fragments": _FRAGMENTS,
        "tensors": _TENSORS,
        "ties": FieldLimit(TIES_MAX, 0, "entries"),
        "index": _U32,
        "rules": FieldLimit(RULES_MAX, 0, "characters"),
        "frozen": FieldLimit(FROZEN_MAX, 0, "entries"),
    },
    "LearnerPolicy": {
        "sync_every": FieldLimit(2**31, 1),
        "push_encoding": _NAME,
        "pull_encoding": _NAME,
    },
    "FragmentStatus": {
        "fragment_id": _FRAGMENT_ID,
        "version": _VERSION,
        "merged_version": _VERSION,
        "epoch": _EXACT,
        "forgotten_version": _VERSION,
    },
    "Progress": {
        "inner_step": FieldLimit(2**48),
        "tokens": _EXACT,
        "loss": FieldLimit(1e30, -1e30, is_dropped=True),
        "step_time_s": FieldLimit(TIME_MAX_S),
        "away": FieldLimit(AWAY_MAX, 0, "entries"),
        "inner": _NAME,
        "pushes_fail_why": FieldLimit(WORDS_MAX, 0, "characters"),
        "pushes_fail_s": FieldLimit(TIME_MAX_S),
    },
    "Leaving": {"fragment_ids": _FRAGMENTS, "fragment_ids[]": _FRAGMENT_ID},
    "ShardAway": {
        "address": FieldLimit(ADDRESS_MAX, 0, "characters"),
        "index": _FRAGMENT_ID,
        "for_s": FieldLimit(TIME_MAX_S),
    },
    "Collect": {"fragment_id": _FRAGMENT_ID, "round": FieldLimit(VERSION_MAX, 1), "epoch": _EXACT},
    "Committed": {"fragment_id": _FRAGMENT_ID, "version": _VERSION, "epoch": _EXACT},
    "Near": {
        "address": FieldLimit(ADDRESS_MAX, 0, "characters"),
        "values_sha256": _SHA256,
        "change_sha256": _SHA256,
    },
    "FollowRequest": {
        "role": _NAME,
        "site": _NAME,
        "address": FieldLimit(ADDRESS_MAX, 0, "characters"),
        "epoch": _EXACT,
        "tokens_merged": _TOKENS_MERGED,
    },
    "Pulse": {"tokens_merged": _TOKENS_MERGED, "tokens_budget": _TOKENS_MERGED, "learners_alive": _U32},
    "Evicted": {"code": _NAME},
    "Range": {"start": FieldLimit(ELEMENTS_MAX - 1), "stop": FieldLimit(ELEMENTS_MAX, 1)},
    "PushHeader": {
        "fragment_id": _FRAGMENT_ID,
        "round": _VERSION,
        "epoch": _EXACT,
        "base_version": _VERSION,
        "tokens": FieldLimit(TOKENS_MAX),
        "steps": FieldLimit(STEPS_MAX),
        "manifest_digest": _NAME,
        "tokens_merged": FieldLimit(TOKENS_COUNTED_MAX),
        "part": FieldLimit(PARTS_MAX - 1),
        "num_parts": FieldLimit(PARTS_MAX),
        "ranges": _RANGES,
    },
    "Payload": {
        "encoding": _NAME,
        "num_elements": _EXACT,  # sizes must also agree with the fragment, which is checked separately (BAD_PAYLOAD)
        "chunk_elements": _EXACT,
        "num_bytes": _EXACT,
        "chunks_crc32c": _U32,
    },
    "PushResponse": {"code": _NAME},
    "PullRequest": {
        "fragment_id": _FRAGMENT_ID,
        "encodings": FieldLimit(32, 0, "entries"),
        "encodings[]": _NAME,
        "have_version": _VERSION,
        "epoch": _EXACT,
        "want_version": _VERSION,
        "want_epoch": _EXACT,
        "ranges": _RANGES,
    },
    "PullHeader": {
        "fragment_id": _FRAGMENT_ID,
        "version": _VERSION,
        "epoch": _EXACT,
        "merged_version": _VERSION,
        "tokens_merged": _TOKENS_MERGED,
        "base_version": _VERSION,
        "forgotten_version": _VERSION,
        "ranges": _RANGES,
    },
}
"""Message of diloco.v1 -> field -> its limit; `name[]` is for each entry of a list. Fields not listed are flags,
messages, enums, the bytes of a chunk, or the text of a refusal, which is cut (`errors.plain`)."""

PART_FIELDS_MAX = 16
"""Fields of a message of Push or Pull that is not one of our frames."""
HEADER_BYTES_MAX = 20 * RANGES_MAX
"""Bytes of the headers of Push and Pull; one with all its ranges has 18 for each."""
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
"""Bytes of messages of both sides, checked before parsing. A chunk has up to `payload.CHUNK_BYTES_MAX`."""


def check(message: str, field: str, value: Any) -> None:
    """Raises BadRequest, which names the field, the value and the limit."""
    limit = LIMITS[message][field]
    if not limit.holds(value):
        raise beyond(f"{message}.{field}", value, limit)


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
    """The value, and the offset of its end."""
    end = _end_of_varint(data, at)
    return sum((byte & 0x7F) << 7 * index for index, byte in enumerate(data[at : min(end, at + 10)])), end


def _end_of_varint(data: bytes, at: int) -> int:
    while data[at] >= 0x80:
        at += 1
    return at + 1
