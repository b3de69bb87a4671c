"""Attacks that take places and give nothing back."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator

import grpc
import torch
from attack import Over, Seen, Target
from intruder import SERVICE, Asked, Mole, refused
from torch import Tensor

from diloco_common.codec import encode_payload
from diloco_common.wire import protobuf
from diloco_protos import parameter_server_pb2 as pb

PUSHES = 64
EXTRA = 8


def empty_pushes(target: Target, over: Over) -> Seen:
    """64 pushes without a word, and some with the header of a round that asked; what ends is opened again."""
    mole, answers = Mole(target), Counter[str]()
    headers: list[bytes] = []

    def make(asked: Asked) -> Tensor | None:
        payload = encode_payload(torch.zeros(asked.fragment.num_elements), mole.policy.push_encoding)
        asked.header.payload.CopyFrom(protobuf.to_pb(payload.header))
        headers[:] = [pb.PushRequest(header=asked.header).SerializeToString()]
        return None

    def hold(with_header: bool) -> None:
        while not over():
            if not mole.generation or (with_header and not headers):
                time.sleep(0.05)
                continue
            call = mole.channel.stream_stream(SERVICE + "Push")
            answer = _held(call, mole, headers[0] if with_header else b"", over)
            answers[answer] += 1
            time.sleep(0.05)

    threads = [threading.Thread(target=mole.work, args=(make, over), daemon=True)]
    threads += [threading.Thread(target=hold, args=(index >= PUSHES,), daemon=True) for index in range(PUSHES + EXTRA)]
    for thread in threads:
        thread.start()
    while not over():
        time.sleep(0.05)
    for thread in threads:
        thread.join(2.0)
    return Seen(answers, {"asked": float(mole.asked)})


def _held(method: object, mole: Mole, header: bytes, over: Over) -> str:
    """Open a push, send what there is to send, and wait until the shard ends it."""

    def bodies() -> Iterator[bytes]:
        if header:
            yield header
        while not over() and not done.is_set():
            time.sleep(0.1)

    done = threading.Event()
    call = method(bodies(), metadata=mole.metadata(), timeout=60.0)  # type: ignore[operator]
    stopper = threading.Thread(target=_stop, args=(call, over, done), daemon=True)
    stopper.start()
    try:
        answers = [pb.PushResponse.FromString(part) for part in call]
        return (answers[0].code or pb.PushResponse.Outcome.Name(answers[0].outcome)) if answers else "ended"
    except grpc.RpcError as error:
        return refused(error).code
    finally:
        done.set()


def _stop(call: object, over: Over, done: threading.Event) -> None:
    while not over() and not done.is_set():
        time.sleep(0.1)
    call.cancel()  # type: ignore[attr-defined]
