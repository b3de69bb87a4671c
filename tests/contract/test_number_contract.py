"""A learner's number before it has a model: real shards, by `diloco_worker.take_number`."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from in_process import settings_with
from training import tiny_model

import diloco_worker
from diloco_common.errors import CannotConnect, ConfigError, WrongRun
from diloco_common.trust.credentials import DRAWN
from diloco_worker import number


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(number, "_taken", {})


def test_scripts_that_ask_at_once_get_different_numbers_and_join_with_them(serve):
    parts = [{"shard": {"index": i, "count": 2}, "sync": {"fragments": 2}} for i in range(2)]
    shards = [serve(settings_with(**part)) for part in parts]
    addresses = [shard.address for shard in reversed(shards)]
    names = [f"l{i}" for i in range(6)]

    def take(name: str) -> int:
        return diloco_worker.take_number(addresses, learner_id=name, wait_s=20)

    with ThreadPoolExecutor(len(names)) as threads:
        numbers = dict(zip(names, threads.map(take, names), strict=True))

    assert sorted(numbers.values()) == [*range(6)]
    assert shards[0].core.manifest is None
    assert shards[0].core.membership.live() == ()
    for name in reversed(names):
        with diloco_worker.join(addresses, tiny_model(), learner_id=name, wait_s=20) as learner:
            assert learner.index == learner.connections.index == numbers[name]


def test_the_default_learner_id_is_the_same_for_both(serve):
    address = serve(settings_with()).address
    diloco_worker.take_number(address, learner_id="another", wait_s=20)
    assert diloco_worker.take_number(address, wait_s=20) == 1
    with diloco_worker.join(address, tiny_model(), wait_s=20) as learner:
        assert (learner.index, learner.learner_id) == (1, f"{socket.gethostname()[:40]}-{os.getpid()}-{DRAWN}")


def test_a_number_is_asked_for_until_shard_0_answers(serve):
    with socket.create_server(("127.0.0.1", 0)) as gone:
        free = f"127.0.0.1:{gone.getsockname()[1]}"
    other = serve(settings_with(shard={"index": 1, "count": 2})).address
    with pytest.raises(CannotConnect, match=f"no number after 0 s: {free}"):
        diloco_worker.take_number([free, other], wait_s=0)
    with pytest.raises(ConfigError, match="shard 0 is not among"):
        diloco_worker.take_number(other)
    with pytest.raises(WrongRun):
        diloco_worker.take_number(other, run="another")
