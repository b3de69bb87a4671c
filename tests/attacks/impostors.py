"""Attacks with names: another's, a thousand of one's own, and another model's."""

from __future__ import annotations

import time
from collections import Counter

import grpc
import torch
from attack import Evidence, Over, Seen, Target
from intruder import Intruder, Mole, refused

from builders import push_bodies
from diloco_common.codec import encode_payload
from diloco_common.wire.manifest import TensorSpec
from diloco_protos import parameter_server_pb2 as pb
from diloco_server.shell.servicer import JOINS_PER_S

GHOSTS = 1_024
AT_ONCE = 64
GUESSES = 8
"""Generations below its own that an attacker tries: they are given one after the other."""


def join_as_another(target: Target, over: Over) -> Seen:
    intruder, answers = Intruder(target, target.victim), Counter[str]()
    while True:
        answers[intruder.join(process_id=f"a second process {sum(answers.values())}").code] += 1
        if over():
            intruder.close()
            return Seen(answers)
        time.sleep(0.3)


def act_as_another(target: Target, over: Over) -> Seen:
    """Push, Attend and Leave in another's name: the epoch is everybody's, and generations are easy to guess."""
    spy, answers = Intruder(target), Counter[str]()
    spy.join()
    while True:
        for generation in range(max(1, spy.generation - GUESSES), spy.generation):
            as_other = Intruder(target, target.victim)
            as_other.generation, as_other.epoch = generation, spy.epoch
            as_other.fragments, as_other.digest = spy.fragments, spy.digest
            answers[f"Push {_push(as_other)}"] += 1
            answers[f"Attend {_attend(as_other)}"] += 1
            left = as_other.unary("Leave", pb.LeaveRequest().SerializeToString()).code
            answers[f"Leave {left}"] += 1
            as_other.close()
        if over():
            return Seen(answers)
        time.sleep(0.2)
        spy.join()


def _push(intruder: Intruder) -> str:
    fragment = intruder.fragments[0]
    payload = encode_payload(torch.zeros(fragment.num_elements), "int8")
    header = pb.PushHeader(
        fragment_id=0, round=1, epoch=intruder.epoch, tokens=1, steps=1, manifest_digest=intruder.digest,
    )  # fmt: skip
    return intruder.push_bytes(push_bodies(header, payload)).code


def _attend(intruder: Intruder) -> str:
    call = intruder.stream("Attend", _silence(), timeout_s=2.0)
    try:
        directive = pb.Directive.FromString(next(call))
        return directive.evicted.code or "OK"
    except grpc.RpcError as error:
        return refused(error).code
    except StopIteration:
        return "ended"
    finally:
        call.cancel()


def _silence() -> list[bytes]:
    return [pb.Progress(inner_step=1).SerializeToString()]


def judge_identity(found: Evidence) -> list[str]:
    """Nothing is accepted in another's name, and its lease goes on."""
    taken = [a for a in found.seen.answers if a.split()[-1] in ("OK", "ACCEPTED", "LATE", "DUPLICATE", "ended")]
    problems = [f"in another's name: {', '.join(taken)}"] if taken else []
    generations = [_generation(status) for status in (found.status_before, found.status)]
    if generations[0] != generations[1]:
        problems.append(f"the victim's generation went from {generations[0]} to {generations[1]}")
    return problems


def _generation(status: dict[str, object]) -> int:
    learners = status.get("learners") or []
    assert isinstance(learners, list)
    return next((int(learner["generation"]) for learner in learners if learner["id"] == "ann"), 0)


def first_model(target: Target, over: Over) -> Seen:
    """The first Join on a fresh shard brings a model of its own, and its seeds."""
    mole = Mole(target)
    mole.tensors = (TensorSpec("evil", (64, 64)), TensorSpec("head", (64,)))
    answers = Counter[str]()
    while True:
        answers[mole.join().code] += 1
        for fragment in mole.fragments.values():
            payload = encode_payload(torch.ones(fragment.num_elements), "float32")
            header = pb.PushHeader(
                fragment_id=fragment.fragment_id, epoch=mole.epoch, manifest_digest=mole.digest,
            )  # fmt: skip
            answers[f"seed {mole.push_bytes(push_bodies(header, payload)).code}"] += 1
        if over():
            return Seen(answers)
        time.sleep(0.5)


def judge_model(found: Evidence) -> list[str]:
    taken = [answer for answer in found.seen.answers if answer != "MANIFEST_MISMATCH"]
    return [f"another model was answered {', '.join(taken)}"] if taken else []


def ghosts(target: Target, over: Over) -> Seen:
    """1,024 ids, and its own as often: joined again and again, so that no lease runs out."""
    answers = Counter[str]()
    intruder = Intruder(target)
    intruder.look()
    body = intruder.join_request().SerializeToString()
    call = intruder.channel.unary_unary("/diloco.v1.ParameterServer/Join")
    began = time.monotonic()
    rounds = 0
    while not over():
        for first in range(0, GHOSTS, AT_ONCE):
            futures = []
            for index in range(first, first + AT_ONCE):
                intruder.learner_id = f"ghost-{index}" if index % 2 else target.credential.learner_id
                futures.append(call.future(body, metadata=intruder.metadata(lease=False), timeout=10.0))
            for future in futures:
                error = future.exception()
                answers["OK" if error is None else refused(error).code] += 1
            if over() and rounds:
                break
        rounds += 1
        if answers["OK"] < GHOSTS // 4:
            time.sleep(0.2)
    intruder.close()
    lasted_s = time.monotonic() - began
    return Seen(answers, {"rounds": rounds, "seconds": lasted_s, "joins per s": sum(answers.values()) / lasted_s})


def judge_ghosts(found: Evidence) -> list[str]:
    """Few joins are granted at once and per second, and those to its own id."""
    taken, learners = found.seen.took("OK"), found.status.get("learners") or []
    leases = [learner["id"] for learner in learners if learner["id"].startswith("ghost-")]
    most = GHOSTS // 4 + JOINS_PER_S * found.seen.facts.get("seconds", 0.0)
    problems = [f"{taken} joins of one caller were granted, {most:.0f} at most"] if taken > most else []
    return problems + ([f"{len(leases)} ids have a lease that it made up"] if leases else [])
