"""Mirrors of real shards: the same bytes, served on, to learners and to other mirrors."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from in_process import InProcessShard, LoopThread, settings_with
from torch import nn

import diloco_worker
from diloco_common.errors import BadRequest
from diloco_worker import pull_global_model
from waiting import DEADLINE_S, until

SITE = "zurich"
VERSIONS = 12


def mirror_of(shard: InProcessShard, **more: Any) -> Any:
    return settings_with(run={"site": SITE}, shard={"mirror_of": shard.address, **more})


def is_level(mirror: InProcessShard, shard: InProcessShard) -> bool:
    """Whether the mirror has what the shard has announced."""

    def names(of: InProcessShard) -> dict[int, Any]:
        return {i: s.version_id for i, s in of.core.fragments.items() if s.seeded}

    return mirror.loop.look(lambda: names(mirror) == names(shard) != {})


def train(shard: InProcessShard, *others: InProcessShard, is_near: bool = False, **how: Any) -> Any:
    """One learner that trains for some versions, and leaves; `is_near`: until some came from a mirror."""
    torch.manual_seed(0)
    model = nn.Linear(40, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learner = diloco_worker.join(
        [shard.address, *(one.address for one in others)], model, learner_id="a", wait_s=20.0, log=None, **how
    )
    try:
        ends = time.monotonic() + DEADLINE_S
        while min(shard.loop.look(lambda: [f.version for f in shard.core.fragments.values()] or [0])) < VERSIONS or (
            is_near and not learner.telemetry.bytes_near
        ):
            assert time.monotonic() < ends, "no more versions come"
            optimizer.zero_grad()
            model(torch.randn(8, 40)).square().mean().backward()
            optimizer.step()
            learner.step(tokens=8)
            learner.poll(0.005)
        return learner.telemetry.bytes_near, learner.telemetry.bytes_pulled
    finally:
        learner.close()


@pytest.mark.parametrize("pull", ["int8", "bfloat16", "float32"])
def test_a_learner_takes_versions_from_the_mirror_of_its_site(serve: Callable[..., InProcessShard], pull: str) -> None:
    shard = serve(settings_with(sync={"pull": pull}))
    mirror = serve(mirror_of(shard))
    near, pulled = train(shard, site=SITE, is_near=True)
    assert 0 < near <= pulled
    until(lambda: is_level(mirror, shard), "the mirror has all")
    mine = shard.loop.look(lambda: shard.core.fragments[0].published.values)
    theirs = mirror.loop.look(lambda: mirror.core.fragments[0].published.values)
    assert b"".join(theirs.chunks) == b"".join(mine.chunks)
    assert theirs.header == mine.header


def test_a_learner_elsewhere_takes_nothing_from_it(serve: Callable[..., InProcessShard]) -> None:
    shard = serve()
    serve(mirror_of(shard))
    assert train(shard, site="geneva")[0] == 0


def test_a_mirror_of_a_mirror_serves_what_learners_hold(serve: Callable[..., InProcessShard]) -> None:
    shard = serve()
    first = serve(mirror_of(shard))
    second = serve(mirror_of(first))
    train(shard)
    until(lambda: is_level(second, shard), "the second mirror has all")
    found, shards = pull_global_model([second.address]), pull_global_model([shard.address])
    assert found.versions == shards.versions
    assert all(torch.equal(v, shards.tensors[n].bfloat16().float()) for n, v in found.tensors.items())


def test_a_mirror_is_of_whichever_shard_it_follows(serve: Callable[..., InProcessShard]) -> None:
    sync = {"fragments": 2}
    first, second = (serve(settings_with(shard={"index": i, "count": 2}, sync=sync)) for i in range(2))
    mirror = serve(mirror_of(second))
    train(second, first, is_near=True, site=SITE)
    until(lambda: is_level(mirror, second), "the mirror has all")


def test_a_mirror_takes_no_work(serve: Callable[..., InProcessShard], loop: LoopThread) -> None:
    shard = serve()
    mirror = serve(mirror_of(shard))
    with pytest.raises(BadRequest, match=f"mirror of {shard.address}"):
        diloco_worker.join(mirror.address, nn.Linear(3, 2), wait_s=20.0, log=None)
