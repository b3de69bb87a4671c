"""Version files and checkpoint manifests: changed bytes, and wrong contents under right checksums.

What can be read is given to a shard, which then has to make its answers from it: a number that no message can carry
would break every Join.
"""

from __future__ import annotations

import json
import random
import struct
from functools import cache
from typing import Any

import google_crc32c
import torch
from fuzzing import FLOATS, NUMBERS, TEXTS, mutated

import stores
from builders import asking
from diloco_common.codec import encode_payload
from diloco_common.settings import Settings
from diloco_common.wire import protobuf
from diloco_server.core.arithmetic import Published
from diloco_server.core.fragment import Restored
from diloco_server.core.shard import Shard
from diloco_server.storage.checkpoint import CheckpointFile, contents_of, decode_manifest, describe, encode_manifest
from diloco_server.storage.version_file import read_version, version_name, write_version
from diloco_simulator.world.disk import FakeDisk

VERSION = 7
COUNTERS = ("epoch", "version", "tokens_merged", "forgotten_version", "seed_norm")
BRACKETS = b"[" * 100_000
"""Deeper than a parser that calls itself can go."""
NESTED = json.loads("[" * 101 + "]" * 101)


def disk_with(name: str, data: bytes) -> FakeDisk:
    disk = FakeDisk()
    disk.create(name).write(memoryview(data))
    return disk


@cache
def intact(*, sends_changes: bool) -> bytes:
    """A version file as a shard writes it."""
    disk, stored = FakeDisk(), stores.make_version(VERSION, sends_changes=sends_changes)
    write_version(disk.create("new"), stored, stores.ORIGIN, stores.MANIFEST, VERSION - 1)
    return disk.content("new")


def draw_version(chance: random.Random) -> bytes:
    data = intact(sends_changes=chance.random() < 0.5)
    if chance.random() < 0.3:
        return mutated(chance, data)
    (length,) = struct.unpack("<Q", data[:8])
    tensors, rest = json.loads(data[8 : 8 + length]), data[8 + length : -8]
    metadata = {key: json.loads(value) for key, value in tensors.pop("__metadata__").items()}
    if chance.random() < 0.3:
        record = metadata["record"]
        record[chance.choice(COUNTERS)] = chance.choice((*NUMBERS, 2**64, 2**65, -1))
    else:
        for _ in range(chance.choice((1, 1, 2, 3))):
            _spoil(chance, chance.choice((metadata, metadata, metadata, tensors)))
    whole = {"__metadata__": {k: v if chance.random() < 0.02 else json.dumps(v) for k, v in metadata.items()}} | tensors
    text = json.dumps(whole).encode()
    if chance.random() < 0.1:
        text = BRACKETS if chance.random() < 0.05 else mutated(chance, text)
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", chance.choice(NUMBERS) if chance.random() < 0.02 else len(text)) + text
    if chance.random() < 0.1:
        rest = rest[: chance.randrange(len(rest))]
    return head + rest + struct.pack("<II", google_crc32c.value(head), google_crc32c.value(rest))


def answer_version(data: bytes) -> str:
    """Read it, and let a shard go on from it. Raises DataError."""
    name = version_name(0, VERSION)
    header, stored = read_version(disk_with(name, data), name)
    settings = Settings.model_validate({"sync": {"fragments": header.origin.num_fragments}})
    shard = Shard(settings, epoch=2**31)
    published = Published(encode_payload(stored.values.theta.nan_to_num(0.0, 0.0, 0.0).clamp(-1, 1), "bfloat16"))
    shard.versions.restore(header.manifest, [Restored(stored.record, stored.values, published, is_new_line=False)])
    for learner in ("ann", "ben", "cem"):
        member = shard.join(learner, asking(header.manifest.tensors), 0.0)
        protobuf.serialize(protobuf.to_pb(shard.join_answer(learner, member.generation)))
        fragment = shard.pull_header(learner, stored.record.fragment_id)
        protobuf.serialize(protobuf.to_pb(fragment))
    shard.tick(now=1.0)
    assert torch.isfinite(stored.values.theta).all()
    return "OK"


def _spoil(chance: random.Random, tree: Any) -> None:
    """Change one value somewhere in it."""
    while isinstance(tree, dict | list) and tree:
        keys = list(tree) if isinstance(tree, dict) else range(len(tree))
        key = chance.choice(list(keys))
        if isinstance(tree[key], dict | list) and tree[key] and chance.random() < 0.9:
            tree = tree[key]
            continue
        match chance.randrange(10):
            case 0:
                del tree[key]
            case 1 if isinstance(tree, dict):
                tree[chance.choice(TEXTS)] = tree.pop(key)
            case 2 if isinstance(tree, list):
                tree.extend([tree[key]] * chance.choice((1, 3, 1000)))
            case _:
                tree[key] = _anything(chance, tree[key])
        return


def _anything(chance: random.Random, old: Any) -> Any:
    if isinstance(old, int) and chance.random() < 0.7:
        return chance.choice((*NUMBERS, 2**64, 2**65, 10**30, -1, -(2**63), old + 1, old - 1))
    if isinstance(old, str) and chance.random() < 0.5:
        return chance.choice(TEXTS)
    if isinstance(old, float) and chance.random() < 0.7:
        return chance.choice(FLOATS)
    return chance.choice((None, True, False, "", [], {}, 0, -1, 1.5, float("nan"), NESTED, "a" * 100_000))


@cache
def _listed() -> bytes:
    name = version_name(0, VERSION)
    return encode_manifest(contents_of([describe(disk_with(name, intact(sends_changes=True)), name)]))


def draw_manifest(chance: random.Random) -> bytes:
    data = _listed()
    if chance.random() < 0.3:
        return mutated(chance, data)
    if chance.random() < 0.005:
        return BRACKETS
    body = json.loads(data)["checkpoint"]
    for _ in range(chance.choice((1, 1, 2, 3))):
        _spoil(chance, body)
    checksum = f"{google_crc32c.value(_dump(body)):08x}"
    return _dump({"checkpoint": body, "crc32c": checksum})


def answer_manifest(data: bytes) -> str:
    """Raises DataError."""
    contents = decode_manifest(data, "somewhere")
    assert all(isinstance(file, CheckpointFile) and "/" not in file.name for file in contents.files)
    assert contents.missing is not None
    assert contents.num_bytes is not None
    return "OK"


def _dump(value: Any) -> bytes:
    """As the product writes it; its checksum is over this."""
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()
