"""A caller of diloco.v1 that says what it likes: raw bytes, any identity, any number.

`Intruder` calls. `Mole` behaves like a learner as far as it serves it: it joins, attends, is asked for contributions,
and sends what its attack makes of them.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
from attack import Over, Seen, Target, once_tried
from torch import Tensor

from builders import TinyText, push_bodies
from diloco_common.codec import encode_payload
from diloco_common.wire import protobuf, rpc
from diloco_common.wire.manifest import Fragment, TensorSpec, cut
from diloco_common.wire.messages import PROTOCOL
from diloco_protos import parameter_server_pb2 as pb
from diloco_worker.core.replica import Replica

SERVICE = "/diloco.v1.ParameterServer/"
CALL_S = 10.0
_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
]


@dataclass(frozen=True)
class Answer:
    code: str
    """The stable code; "OK", or the outcome of a push; "status X" where there is no stable code."""
    message: bytes = b""
    details: str = ""


class Intruder:
    """One connection, and the identity that it claims."""

    def __init__(self, target: Target, learner_id: str = "mallory", *, with_token: bool = True) -> None:
        self.target, self.learner_id = target, learner_id
        self.generation = self.epoch = 0
        self.tensors: tuple[TensorSpec, ...] = ()
        self.fragments: dict[int, Fragment] = {}
        self.policy = pb.LearnerPolicy()
        self.digest = ""
        self.channel = target.credential.channel(target.grpc, _OPTIONS)
        self._token = target.credential.token if with_token else None

    def metadata(self, *, lease: bool = True) -> list[tuple[str, str]]:
        pairs = [("diloco-run", self.target.run)]
        if self.learner_id:
            pairs.append(("diloco-learner", self.learner_id))
        if lease and self.generation:
            pairs += [("diloco-generation", str(self.generation)), ("diloco-epoch", str(self.epoch))]
        if self._token is not None:
            pairs.append(("authorization", f"Bearer {self._token}"))
        return pairs

    def unary(self, method: str, body: bytes, *, lease: bool = True, timeout_s: float = CALL_S) -> Answer:
        call = self.channel.unary_unary(SERVICE + method)
        return _answer(lambda: call(body, metadata=self.metadata(lease=lease), timeout=timeout_s))

    def push_bytes(self, bodies: Iterable[bytes], *, timeout_s: float = CALL_S) -> Answer:
        """The code is the outcome where a push was taken, late or a duplicate, and the stable code of a refusal."""
        call = self.channel.stream_unary(SERVICE + "Push")
        answer = _answer(lambda: call(iter(bodies), metadata=self.metadata(), timeout=timeout_s))
        if answer.code != "OK":
            return answer
        said = pb.PushResponse.FromString(answer.message)
        outcome = pb.PushResponse.Outcome.Name(said.outcome)
        return Answer(said.code or outcome, answer.message, said.message)

    def stream(self, method: str, bodies: Iterable[bytes], *, timeout_s: float | None = None) -> Any:
        return self.channel.stream_stream(SERVICE + method)(iter(bodies), metadata=self.metadata(), timeout=timeout_s)

    def look(self) -> None:
        """Learn the model from the shard, as an observer may; else take the one that everybody of the run has."""
        mine, self.learner_id = self.learner_id, ""
        request = pb.JoinRequest(protocol=PROTOCOL, process_id="o", decodes=rpc.DECODES, observe=True)
        answer = self.unary("Join", request.SerializeToString(), lease=False)
        self.learner_id = mine
        if answer.code == "OK":
            self.tensors = tuple(protobuf.tensors_from_pb(pb.JoinResponse.FromString(answer.message).tensors))
        else:
            self.tensors = tuple(Replica(TinyText()).specs)

    def join_request(self, process_id: str = "") -> pb.JoinRequest:
        return pb.JoinRequest(
            protocol=PROTOCOL, process_id=process_id or f"process of {self.learner_id}", decodes=rpc.DECODES,
            tensors=protobuf.tensors_to_pb(self.tensors),
        )  # fmt: skip

    def join(self, process_id: str = "") -> Answer:
        if not self.tensors:
            self.look()
        answer = self.unary("Join", self.join_request(process_id).SerializeToString(), lease=False)
        if answer.code == "OK":
            said = pb.JoinResponse.FromString(answer.message)
            self.generation, self.epoch, self.policy = said.generation, said.epoch, said.policy
            manifest = cut(self.tensors, said.num_fragments, said.num_shards)
            self.digest = manifest.digest
            self.fragments = {f.fragment_id: f for f in manifest.owned_by(said.shard_index)}
        return answer

    def close(self) -> None:
        self.channel.close()


def _answer(call: Callable[[], bytes]) -> Answer:
    try:
        return Answer("OK", call())
    except grpc.RpcError as error:
        return refused(error)


def refused(error: grpc.RpcError) -> Answer:
    trailing = {key: str(value) for key, value in error.trailing_metadata() or ()}
    return Answer(trailing.get(rpc.CODE_KEY, f"status {error.code().name}"), b"", error.details() or "")


@dataclass
class Asked:
    """A request for a contribution, and the header that an honest learner would send."""

    fragment: Fragment
    header: pb.PushHeader


Make = Callable[[Asked], Tensor | None]
"""Changes the header as it likes and gives the values: float32 [num_elements]; None: sends nothing."""


class Mole(Intruder):
    """Joins, reports, is asked, and contributes what its attack says."""

    def __init__(self, target: Target, learner_id: str = "mallory") -> None:
        super().__init__(target, learner_id)
        self.report_every_s = 0.05
        self.steps_per_report = 2
        self.tokens_per_report = 64
        self.step_time_s = 0.02
        self.inner_step = self.tokens = 0
        self.answers: Counter[str] = Counter()
        self.asked = 0
        self._pushed: dict[int, tuple[int, int]] = {}  # fragment -> steps and tokens at its last contribution

    def work(self, make: Make | None, over: Over) -> Seen:
        """Until it is over; joins again whenever the lease ends. Without `make` it contributes nothing."""
        if make is not None:
            over = once_tried(over, lambda: self.asked > 0)
        while not over():
            answer = self.join()
            self.answers[answer.code] += 1
            if answer.code == "OK":
                self._attend(make, over)
            time.sleep(0.1)
        return Seen(self.answers, {"asked": float(self.asked)})

    def _attend(self, make: Make | None, over: Over) -> None:
        call = self.stream("Attend", self._reports(over))
        threading.Thread(target=_cancel_after, args=(call, over), daemon=True).start()
        try:
            for raw in call:
                directive = pb.Directive.FromString(raw)
                match directive.WhichOneof("kind"):
                    case "collect":
                        self._contribute(directive.collect, make)
                    case "evicted":
                        self.answers[directive.evicted.code] += 1
                        return
        except grpc.RpcError as error:
            if not over():
                self.answers[refused(error).code] += 1

    def _reports(self, over: Over) -> Iterator[bytes]:
        while not over():
            self.inner_step += self.steps_per_report
            self.tokens += self.tokens_per_report
            yield pb.Progress(
                inner_step=self.inner_step, tokens=self.tokens, loss=2.0, step_time_s=self.step_time_s
            ).SerializeToString()
            time.sleep(self.report_every_s)

    def _contribute(self, collect: pb.Collect, make: Make | None) -> None:
        self.asked += 1
        fragment = self.fragments.get(collect.fragment_id)
        if make is None or fragment is None:
            return
        steps, tokens = self._pushed.get(fragment.fragment_id, (0, 0))
        header = pb.PushHeader(
            fragment_id=fragment.fragment_id, round=collect.round, epoch=collect.epoch, base_version=collect.round - 1,
            tokens=max(1, self.tokens - tokens), steps=max(1, self.inner_step - steps), manifest_digest=self.digest,
        )  # fmt: skip
        self._pushed[fragment.fragment_id] = (self.inner_step, self.tokens)
        values = make(Asked(fragment, header))
        if values is None:
            return
        payload = encode_payload(values, self.policy.push_encoding)
        answer = self.push_bytes(push_bodies(header, payload)).code
        self.answers[answer] += 1


def _cancel_after(call: Any, over: Over) -> None:
    while not over():
        time.sleep(0.05)
    time.sleep(0.5)
    call.cancel()
