"""Real learners that train adapters on frozen bases: the same base everywhere, or a refusal that names what differs."""

from __future__ import annotations

import pytest
import torch
from in_process import TENSORS, InProcessShard, refusal, settings_with
from torch import nn

import diloco_worker
from diloco_common.errors import ConfigError, FrozenMismatch
from diloco_common.wire import protobuf, rpc
from diloco_common.wire.bounds import FROZEN_MAX
from diloco_common.wire.messages import PROTOCOL, FrozenTensor
from diloco_protos import parameter_server_pb2 as pb
from diloco_worker.learner import Learner
from waiting import until


def lora(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A base that is loaded, here from a seed, and an adapter."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 4)).requires_grad_(False).to(dtype)
    return nn.Sequential(model, nn.Linear(4, 2))


def join(shard: InProcessShard, learner_id: str, model: nn.Module, **options: object) -> Learner:
    return diloco_worker.join(shard.address, model, learner_id=learner_id, wait_s=20.0, **options)


def refused(shard: InProcessShard, model: nn.Module) -> str:
    with pytest.raises(FrozenMismatch) as refusal:
        join(shard, "other", model)
    assert refusal.value.exit_code == 6
    assert shard.member_state("other") == "unknown"
    return str(refusal.value)


def test_another_base_is_refused_by_name_and_allowed_on_demand(serve):
    shard = serve(settings_with())
    with join(shard, "a", lora()), join(shard, "b", lora()):
        words = refused(shard, lora(seed=1))
        assert "those that a has brought" in words
        assert "0.0.weight: float32 [11, 4] with other values; 0.1.bias: float32 [4] with other values" in words
        assert "0.1.weight: float32 [4, 4] <-> bfloat16 [4, 4]" in refused(shard, lora(dtype=torch.bfloat16))
        join(shard, "c", lora(dtype=torch.bfloat16), frozen="any").close()


def test_after_a_restart_the_learners_that_are_there_bring_their_base_again(serve, tmp_path):
    settings = settings_with(shard={"data_dir": str(tmp_path)})
    first = serve(settings)
    with join(first, "a", lora()) as learner:
        address = first.address
        first.stop()
        second = serve(settings_with(shard={"data_dir": str(tmp_path), "listen": address}))
        until(lambda: second.member_state("a") == "alive", "a is back")
        refused(second, lora(seed=1))
        assert learner.state == "training"


@pytest.mark.parametrize(
    ("mean_merge", "said"), [(None, '"1.weight 2.weight"'), (["1.weight"], "1.weight"), ([], "nothing")]
)
def test_a_learner_says_what_it_trains_and_what_takes_the_mean(serve, written, mean_merge, said):
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Embedding(11, 4), nn.Linear(4, 11, bias=False))
    join(serve(settings_with()), "a", model, mean_merge=mean_merge).close()
    assert f" trained=88 frozen=20 plain_mean={said}\n" in written.getvalue()


def test_a_word_that_is_no_rule_is_refused():
    with pytest.raises(ConfigError, match='frozen=\'all\' is neither "same" nor "any"'):
        diloco_worker.join("127.0.0.1:9", lora(), frozen="all")


@pytest.mark.parametrize(
    ("frozen", "words"),
    [
        ([FrozenTensor(str(i), "", 0) for i in range(FROZEN_MAX + 1)], "JoinRequest.frozen"),
        ([FrozenTensor("n" * 513, "", 0)], "FrozenTensor.name"),
        ([FrozenTensor("n", "f" * 513, 0)], "FrozenTensor.form"),
    ],
    ids=["too many", "long name", "long form"],
)
def test_a_shard_keeps_no_more_than_it_must(serve, frozen, words):
    shard = serve(settings_with())
    caller = shard.caller("a")
    request = pb.JoinRequest(
        protocol=PROTOCOL, process_id="x", tensors=protobuf.tensors_to_pb(TENSORS), decodes=rpc.DECODES,
        frozen=[protobuf.to_pb(one) for one in frozen],
    )  # fmt: skip

    async def call() -> pb.JoinResponse:
        return await caller.stub.Join(request, metadata=caller.metadata())

    found = refusal(lambda: shard.loop.run(call()))
    assert found.code == "BAD_REQUEST"
    assert words in found.words
    assert shard.core.manifest is None
