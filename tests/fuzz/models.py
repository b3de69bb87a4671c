"""Lists of tensors that a learner brings: names twice, dimensions without end, shapes whose product overflows."""

from __future__ import annotations

import random

from fuzzing import NUMBERS, TEXTS

from diloco_common.errors import Refusal
from diloco_common.settings import Settings
from diloco_common.wire import protobuf
from diloco_common.wire.messages import PROTOCOL
from diloco_protos import parameter_server_pb2 as pb
from diloco_server.core.shard import Shard

DIMS = (0, 1, 1, 2, 2, 3, 8, 9, 300)
TENSORS = (0, 1, 2, 3, 10, 200)


def draw(chance: random.Random) -> list[pb.JoinRequest]:
    """What two learners bring to a shard, one after the other."""
    first = _request(chance)
    return [first, first if chance.random() < 0.3 else _request(chance)]


def _request(chance: random.Random) -> pb.JoinRequest:
    tensors = []
    for index in range(chance.choice(TENSORS)):
        name = chance.choice(TEXTS) if chance.random() < 0.3 else f"w{index}"
        least, largest = chance.choice((0, 1, 1)), chance.choice((3, 3, 3, 2**20, 2**62))
        shape = [max(least, min(chance.choice(NUMBERS), largest)) for _ in range(chance.choice(DIMS))]
        if shape and chance.random() < 0.1:
            shape[0] = -shape[0]
        tensors.append(pb.Tensor(name=name, shape=shape, mean_merge=chance.random() < 0.3))
    held = [
        pb.Held(
            fragment_id=chance.choice((0, 1, 5, 2**32 - 1)), epoch=min(chance.choice(NUMBERS), 2**64 - 1),
            version=chance.choice(NUMBERS),
        )
        for _ in range(chance.choice((0, 0, 1, 3, 50)))
    ]  # fmt: skip
    return pb.JoinRequest(protocol=PROTOCOL, process_id="p", tensors=tensors, held=held)


def answer(case: list[pb.JoinRequest]) -> str:
    """Join a shard that nobody has joined with the first, and with the second after it. Raises a Refusal."""
    shard = Shard(Settings.model_validate({"sync": {"fragments": 4}}), epoch=1)
    last = ""
    for name, message in zip(("ann", "ben"), case, strict=True):
        try:
            request = protobuf.join_request_from_pb(protobuf.parse(pb.JoinRequest, message.SerializeToString()))
            member = shard.join(name, request.process_id, request.tensors, 0.0, request.held)
            protobuf.serialize(protobuf.join_answer_to_pb(shard.join_answer(name, member.generation)))
            shard.tick(1.0)
            last = "OK"
        except Refusal as refusal:
            last = refusal.code
    return last
