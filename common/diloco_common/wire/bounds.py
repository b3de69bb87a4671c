"""The limits of every number, text and list that a caller sends: one table, for clients in other languages too.

`by_name.py` holds each message to it, on both sides, before the message becomes values. Whatever is within the limits
fits what carries it further on: int64, JSON, the 12 digits in file names, and float64 without a loss. Counters that add
up such values stop at a limit of their own, below what the wire takes. What a limit cannot tell, such as whether a
learner can have trained so much, the shard's core judges.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diloco_common.errors import WORDS_MAX, BadRequest

FRAGMENTS_MAX = 4096
TENSORS_MAX = 2**16
"""Tensors of a model. An adapter for 128 experts in each of 60 layers, three times two tensors each, has 46,080."""
TENSOR_NAMES_MAX = 16 << 20
"""Characters of all their names together, once what they have in common is written out."""
TENSOR_NAME_MAX = 512
DIMENSIONS_MAX = 8
FROZEN_MAX = 8192
"""Frozen tensors that are compared; a learner with more declares several as one. A shard looks at them within 50 ms."""
FROZEN_BYTES_MAX = 64 << 10
"""Of all that a model holds fixed, for its values to be sent: constants, and no base under an adapter."""
TIES_MAX = 4096
"""Keys of a state_dict; a learner with more leaves the rest out."""
JOIN_ENTRIES_MAX = TENSORS_MAX + FROZEN_MAX + TIES_MAX + FRAGMENTS_MAX + 128
"""Of all fields of a Join together; counted before they are parsed."""
JOIN_ENTRY_BYTES_MAX = FROZEN_BYTES_MAX + (8 << 10)
"""Of each. A tensor with a name of 512 characters and 8 dimensions has less than 3 KiB."""
ELEMENTS_MAX = 2**42
"""Of a model, and of each dimension."""
TOKENS_MAX = 2**40
"""Of one contribution."""
STEPS_MAX = 2**32
"""Of one contribution."""
TOKENS_TOTAL_MAX = 2**53
"""That one learner has trained on; the last integer that float64 counts to."""
STEPS_TOTAL_MAX = 2**48
TOKENS_MERGED_MAX = 2**62
"""What the wire takes. A shard stops counting at half of it."""
TOKENS_COUNTED_MAX = TOKENS_MERGED_MAX // 2
VERSION_MAX = 2**39
"""What the wire takes; the name of a version file has 12 digits."""
VERSION_KEPT_MAX = VERSION_MAX // 2
"""Of a version file: so many versions more may follow. At a thousand a second they take eight years."""
EPOCH_MAX = 2**53
EPOCH_KEPT_MAX = 10**12 - 1
"""Of a version file; the name of an epoch file has 12 digits."""
GENERATION_MAX = 2**53
NAME_MAX = 64
"""Characters of ids, codes and names of encodings."""
NAMES_MAX = 32
"""Encodings that a Pull names."""
DECODES_MAX = 64
"""Encodings that a Join names. A codec of others has two, and counts also where no run uses it."""
DECODES_NAME_MAX = 96
"""Characters of each: `NAME@DIGEST`."""
PARTS_MAX = 4096
"""Of one contribution: processes of a learner that push."""
RANGES_MAX = 8192
"""Of one message. A rank has about one for each tensor of the fragment."""
RANGES_OF_ALL_MAX = 65536
"""Of all parts of one contribution: 64 ranks with 1024 tensors each in one fragment."""
SIZE_MAX = 2**53
"""Of the sizes of a payload. They must agree with the fragment, which is refused in words of its own (BAD_PAYLOAD)."""
LOSS_MAX = 1e30
STEP_TIME_MAX_S = 2.0**20
"""Twelve days."""
AGE_MAX_S = 2.0**32
"""A century."""
HEARTBEAT_MAX_S = 3600.0
HEARTBEAT_LEAST_S = 0.01
"""A shard that asks for more than that has its learners do nothing else."""
AWAY_MAX = 64
"""Shards that a learner reports as away; of more, it reports the first."""
ADDRESS_MAX = 260
RULES_MAX = 512
"""Of the words for a shard's rules."""


@dataclass(frozen=True, slots=True)
class FieldLimit:
    """What a field may be: a number, or the length of a text or a list."""

    most: float
    least: float = 0
    counts: str = ""
    """What a length counts: "characters", "entries" or "bytes". Empty: the field is a number."""
    is_dropped: bool = False
    """A value beyond it is taken as absent, and refuses nothing: people only look at it."""

    def holds(self, value: Any) -> bool:
        """Not for NaN."""
        return bool(self.least <= (len(value) if self.counts else value) <= self.most)


_U32, _NAME, _VERSION, _EPOCH = (
    FieldLimit(2**32 - 1),
    FieldLimit(NAME_MAX, 0, "characters"),
    FieldLimit(VERSION_MAX),
    FieldLimit(EPOCH_MAX),
)
_FRAGMENT_ID, _SHA256 = FieldLimit(FRAGMENTS_MAX - 1), FieldLimit(32, 0, "bytes")
_TENSORS, _NAMES, _FRAGMENTS = (FieldLimit(most, 0, "entries") for most in (TENSORS_MAX, NAMES_MAX, FRAGMENTS_MAX))
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
        "decodes": FieldLimit(DECODES_MAX, 0, "entries"),
        "decodes[]": FieldLimit(DECODES_NAME_MAX, 0, "characters"),
        "held": _FRAGMENTS,
        "frozen": FieldLimit(FROZEN_MAX, 0, "entries"),
        "ties": FieldLimit(TIES_MAX, 0, "entries"),
        "index": _U32,
        "age_s": FieldLimit(AGE_MAX_S),
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
    "Held": {"fragment_id": _FRAGMENT_ID, "epoch": _EPOCH, "version": _VERSION},
    "JoinResponse": {
        "generation": FieldLimit(GENERATION_MAX),
        "epoch": _EPOCH,
        "heartbeat_s": FieldLimit(HEARTBEAT_MAX_S, HEARTBEAT_LEAST_S),
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
        "on_commit": _NAME,
        "blend_alpha": FieldLimit(1.0),
    },
    "FragmentStatus": {
        "fragment_id": _FRAGMENT_ID,
        "version": _VERSION,
        "merged_version": _VERSION,
        "epoch": _EPOCH,
        "forgotten_version": _VERSION,
    },
    "Progress": {
        "inner_step": FieldLimit(STEPS_TOTAL_MAX),
        "tokens": FieldLimit(TOKENS_TOTAL_MAX),
        "loss": FieldLimit(LOSS_MAX, -LOSS_MAX, is_dropped=True),
        "step_time_s": FieldLimit(STEP_TIME_MAX_S),
        "away": FieldLimit(AWAY_MAX, 0, "entries"),
        "inner": _NAME,
        "pushes_fail_why": FieldLimit(WORDS_MAX, 0, "characters"),
        "pushes_fail_s": FieldLimit(STEP_TIME_MAX_S),
    },
    "Leaving": {"fragment_ids": _FRAGMENTS, "fragment_ids[]": _FRAGMENT_ID},
    "ShardAway": {
        "address": FieldLimit(ADDRESS_MAX, 0, "characters"),
        "index": _FRAGMENT_ID,
        "for_s": FieldLimit(STEP_TIME_MAX_S),
    },
    "Collect": {"fragment_id": _FRAGMENT_ID, "round": FieldLimit(VERSION_MAX, 1), "epoch": _EPOCH},
    "Committed": {"fragment_id": _FRAGMENT_ID, "version": _VERSION, "epoch": _EPOCH},
    "Near": {
        "address": FieldLimit(ADDRESS_MAX, 0, "characters"),
        "values_sha256": _SHA256,
        "change_sha256": _SHA256,
    },
    "FollowRequest": {
        "role": _NAME,
        "site": _NAME,
        "address": FieldLimit(ADDRESS_MAX, 0, "characters"),
        "epoch": _EPOCH,
        "tokens_merged": _TOKENS_MERGED,
    },
    "Pulse": {"tokens_merged": _TOKENS_MERGED, "tokens_budget": _TOKENS_MERGED, "learners_alive": _U32},
    "Evicted": {"code": _NAME},
    "Range": {"start": FieldLimit(ELEMENTS_MAX - 1), "stop": FieldLimit(ELEMENTS_MAX, 1)},
    "PushHeader": {
        "fragment_id": _FRAGMENT_ID,
        "round": _VERSION,
        "epoch": _EPOCH,
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
        "num_elements": FieldLimit(SIZE_MAX),
        "chunk_elements": FieldLimit(SIZE_MAX),
        "num_bytes": FieldLimit(SIZE_MAX),
        "chunks_crc32c": _U32,
    },
    "PushResponse": {"code": _NAME},
    "PullRequest": {
        "fragment_id": _FRAGMENT_ID,
        "encodings": _NAMES,
        "encodings[]": _NAME,
        "have_version": _VERSION,
        "epoch": _EPOCH,
        "want_version": _VERSION,
        "want_epoch": _EPOCH,
        "ranges": _RANGES,
    },
    "PullHeader": {
        "fragment_id": _FRAGMENT_ID,
        "version": _VERSION,
        "epoch": _EPOCH,
        "merged_version": _VERSION,
        "tokens_merged": _TOKENS_MERGED,
        "base_version": _VERSION,
        "forgotten_version": _VERSION,
        "ranges": _RANGES,
    },
}
"""Message of diloco.v1 -> field -> its limit; `name[]`: of each entry of a list. What is not here is a flag, a message,
an enum, the bytes of a chunk, or the words of a refusal, which are cut (`errors.plain`)."""

PART_FIELDS_MAX = 16
"""Of a message of Push or Pull that is not a frame as we make it."""
HEADER_BYTES_MAX = 160 << 10
"""Of the headers of Push and Pull; with RANGES_MAX ranges they have 147 KB."""
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
"""Of the messages of both sides, before they are parsed. A chunk has up to `payload.CHUNK_BYTES_MAX`."""


def check(message: str, field: str, value: Any) -> None:
    """Raises BadRequest, which names the field, the value and the limit."""
    limit = LIMITS[message][field]
    if not limit.holds(value):
        raise beyond(f"{message}.{field}", value, limit)


def beyond(what: str, value: Any, limit: FieldLimit) -> BadRequest:
    """What a caller hears of a value that its limit does not hold."""
    takes = f"at most {number(limit.most)}"
    if limit.least:
        takes = f"{number(limit.least)} to {number(limit.most)}"
    has = f"has {len(value)} {limit.counts}" if limit.counts else f"is {value}"
    return BadRequest(f"{what} {has}; {takes} {'are' if limit.counts else 'is'} taken")


def number(value: float) -> str:
    """A limit as people write it: 2^40, and 4096."""
    if value >= 2**15 and value == int(value) and int(value).bit_count() == 1:
        return f"2^{int(value).bit_length() - 1}"
    if value > 2**16 and value == int(value) and (int(value) + 1).bit_count() == 1:
        return f"2^{int(value).bit_length()} - 1"
    return f"{value:.12g}"
