"""Attacks with messages that are none, and with messages that are right and enormous."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable

import grpc
from attack import Evidence, Over, Seen, Target
from intruder import SERVICE, Answer, Intruder, refused

from diloco_protos import parameter_server_pb2 as pb

BODIES = 240
CALLS = ("Join", "Attend", "Push", "Pull", "Leave")


def random_bodies(target: Target, over: Over) -> Seen:
    """240 bodies of random bytes, to all five calls: half of them with the token, with which they get further."""
    chance, answers = random.Random(4), Counter[str]()
    callers = [Intruder(target), Intruder(target, with_token=False)]
    callers[0].join()
    for index in range(BODIES):
        body = b"\xff" + chance.randbytes(chance.choice((1, 20, 300, 5000)))  # no message begins so
        answers[_any_call(callers[index % 2], CALLS[index % len(CALLS)], body).code] += 1
    while not over():
        time.sleep(0.05)
    return Seen(answers)


def _any_call(intruder: Intruder, method: str, body: bytes) -> Answer:
    """One body, and then the end of what the caller says."""
    call = intruder.channel.stream_stream(SERVICE + method)(iter([body]), metadata=intruder.metadata(), timeout=60.0)
    try:
        for _ in call:
            pass
        return Answer("OK")
    except grpc.RpcError as error:
        return refused(error)


def judge_garbage(found: Evidence) -> list[str]:
    """Every body is refused as a bad request, or its caller as unknown."""
    answered = found.seen.took("BAD_REQUEST", "UNAUTHENTICATED")
    return [] if answered >= BODIES else [f"{BODIES - answered} bodies were answered in another way"]


HELD = 200_000
TENSORS = 1_000_000
DIMS = 20_000
REPEATED = 100_000


def _held(mine: pb.JoinRequest) -> bytes:
    """200,000 versions that the learner says it holds."""
    mine.held.extend(pb.Held(fragment_id=1, epoch=1, version=1) for _ in range(HELD))
    return mine.SerializeToString()


def _tensors(mine: pb.JoinRequest) -> bytes:
    """A million tensors."""
    mine.ClearField("tensors")
    one = b"\x1a\x0c" + b"\x0a\x07%s" + b"\x12\x01\x01"
    return mine.SerializeToString() + b"".join(one % b"%07x" % index for index in range(TENSORS))


def _dims(mine: pb.JoinRequest) -> bytes:
    """A tensor of 20,000 dimensions."""
    mine.tensors.add(name="deep", shape=[2] * DIMS)
    return mine.SerializeToString()


def _twice(mine: pb.JoinRequest) -> bytes:
    """100,000 tensors of two names."""
    mine.ClearField("tensors")
    mine.tensors.extend(pb.Tensor(name=f"w{index % (REPEATED // 2)}", shape=[1]) for index in range(REPEATED))
    return mine.SerializeToString()


ENORMOUS: dict[str, Callable[[pb.JoinRequest], bytes]] = {
    "held": _held, "tensors": _tensors, "dims": _dims, "twice": _twice,
}  # fmt: skip


def enormous_joins(target: Target, over: Over) -> Seen:
    """Each of the four, in turn; the longest answer of each in seconds is a fact."""
    answers, facts = Counter[str](), dict.fromkeys(ENORMOUS, 0.0)
    intruder = Intruder(target)
    intruder.look()
    bodies = {name: make(intruder.join_request()) for name, make in ENORMOUS.items()}
    while True:
        for name, body in bodies.items():
            began = time.monotonic()
            answers[f"{name} {intruder.unary('Join', body, lease=False).code}"] += 1
            facts[name] = max(facts[name], time.monotonic() - began)
            if over() and all(facts.values()):
                break
        if over():
            intruder.close()
            return Seen(answers, facts)


def judge_enormous(found: Evidence) -> list[str]:
    # gRPC itself refuses what is larger than any message may be, and does not read it.
    refused = ("BAD_REQUEST", "BUSY", "RESOURCE_EXHAUSTED")
    taken = [answer for answer in found.seen.answers if not answer.endswith(refused)]
    return [f"answered otherwise than BAD_REQUEST: {', '.join(taken)}"] if taken else []
