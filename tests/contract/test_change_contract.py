"""Versions that are pulled as changes, over loopback: who gets one, who gets the values, and that all end up equal."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from front import Front
from in_process import Caller, InProcessShard, contribution, refusal, settings_with
from torch import Tensor

from diloco_common.codec import Chunk, Payload, decode_payload
from diloco_common.trust.identity import Identity
from diloco_common.wire.messages import Collect, Committed, PullHeader
from diloco_protos import parameter_server_pb2 as pb
from diloco_worker.global_model import pull_global_model
from waiting import until


def made_version(shard: InProcessShard, callers: list[Caller], version: int, value: float = 0.01) -> None:
    """All callers contribute to the round of a version."""
    for caller in callers:
        stream = caller.attend()
        for inner_step in (version - 1, version):  # H counts from the first report
            stream.say(inner_step)
        while stream.hear(Collect).round != version:
            pass
        payload = contribution(value * version)
        header = caller.header(payload, round=version, base_version=version - 1)
        assert caller.push(header, payload).outcome == pb.PushResponse.ACCEPTED
        while stream.hear(Committed).version != version:
            pass
        stream.cancel()


def decoded(payload: Payload) -> Tensor:
    values = torch.empty(payload.header.num_elements)
    decode_payload(payload, values)
    return values


@pytest.fixture
def at_version_2(serve: Callable[..., InProcessShard]) -> Caller:
    """A caller whose shard has made two versions, in changes of int8."""
    shard = serve(settings_with(sync={"pull": "int8"}, lease={"lease_s": 20.0}))
    caller = shard.caller()
    caller.join()
    caller.seed()
    for version in (1, 2):
        made_version(shard, [caller], version)
    return caller


@pytest.mark.parametrize(
    ("have_version", "encodings", "came", "base_version"),
    [
        (1, ["int8", "bfloat16"], "int8", 1),
        (1, [], "int8", 1),
        (1, ["bfloat16"], "bfloat16", None),
        (1, ["float32"], "float32", None),
        (0, ["int8", "bfloat16"], "bfloat16", None),
        (None, ["int8", "bfloat16"], "bfloat16", None),
        (None, [], "bfloat16", None),
        (7, ["int8", "bfloat16"], "bfloat16", None),
    ],
)
def test_a_change_is_for_those_who_have_the_version_before(at_version_2, have_version, encodings, came, base_version):
    header, chunks = at_version_2.pull(have_version=have_version, encodings=encodings)

    assert (header.version, header.payload.encoding) == (2, came)
    assert (header.base_version if header.HasField("base_version") else None) == base_version
    assert sum(map(len, chunks)) == header.payload.num_bytes


def test_a_version_of_another_epoch_is_no_base(at_version_2):
    epoch = at_version_2.identity.epoch
    at_version_2.identity = replace(at_version_2.identity, generation=0, epoch=epoch + 1)
    header, _ = at_version_2.pull(have_version=1, encodings=["int8", "bfloat16"])
    assert (header.payload.encoding, header.HasField("base_version")) == ("bfloat16", False)


def test_who_takes_changes_only_is_told_what_else_is_needed(at_version_2):
    found = refusal(lambda: at_version_2.pull(have_version=0, encodings=["int8"]))
    assert (found.code, "bfloat16 or float32" in found.words) == ("UNKNOWN_ENCODING", True)


def test_a_learner_must_decode_the_values_too(serve):
    shard = serve(settings_with(sync={"pull": "int8"}))
    found = refusal(lambda: shard.caller().join(decodes=["int8", "float32"]))
    assert (found.code, "int8 and bfloat16" in found.words) == ("UNKNOWN_ENCODING", True)


class Watched(Front):
    """A front that notes how versions come, and can name a wrong base."""

    def __init__(self, shard: InProcessShard) -> None:
        super().__init__(shard)
        self.came: list[str] = []
        """Encodings of the payloads that went through."""
        self.lies = 0
        """Changes that will be sent as if they began at another version."""

    async def Pull(self, caller: Identity, requests: Any, context: Any) -> AsyncIterator[PullHeader | Chunk]:
        async for part in super().Pull(caller, requests, context):
            if isinstance(part, PullHeader) and part.payload is not None:
                self.came.append(part.payload.encoding)
                if self.lies and part.base_version is not None:
                    self.lies -= 1
                    part = replace(part, base_version=part.base_version + 5)
            yield part


def has_what_is_published(training: Any, shard: InProcessShard) -> bool:
    """Whether a learner has the latest version of every fragment; then its anchors must be the shard's, bit for bit."""
    training.learner.poll()
    latest = shard.loop.look(lambda: {i: (f.version, f.published.values) for i, f in shard.core.fragments.items()})
    fragments = training.learner.core.fragments
    if any(fragments[i].version != version for i, (version, _) in latest.items()):
        return False
    for i, (_, payload) in latest.items():
        assert fragments[i].tensors.anchor.float().numpy().tobytes() == decoded(payload).numpy().tobytes()
    return True


def test_a_change_since_another_version_is_not_taken_and_the_values_are_asked_for(serve, train, front):
    shard = serve(settings_with(sync={"pull": "int8"}))
    watched = front(shard, Watched)
    a = train(watched.address, "a")
    a.until(lambda: shard.version() >= 3, "versions that came as changes")

    watched.lies, said = 1, len(watched.came)
    a.until(lambda: not watched.lies and a.learner.core.fragments[0].version > shard.version() - 1, "it goes on")

    until(lambda: has_what_is_published(a, shard), "the latest version is there")
    assert "bfloat16" in watched.came[said:]


def test_an_observer_gets_the_model_in_float32_whatever_learners_pull(serve, train):
    shard = serve(settings_with(sync={"pull": "int4"}))
    a = train(shard.address, "a")
    a.until(lambda: shard.version() >= 2, "two versions")
    a.learner.close()
    until(lambda: not (shard.core.fragments[0].round or shard.core.fragments[0].computing), "rest")

    model = pull_global_model([shard.address])

    state = shard.core.fragments[0]
    flat = torch.cat([model.tensors[piece.tensor].flatten() for piece in state.fragment.pieces])
    assert torch.equal(flat, state.values.theta)
