"""A shard that comes back at another address: learners that were given its address file find it."""

from __future__ import annotations

from pathlib import Path

import pytest
from in_process import InProcessShard, settings_with
from training import tiny_model

import diloco_worker
from diloco_common.errors import CannotConnect
from diloco_common.wire.addresses import write_address


def tell(file: Path, shard: InProcessShard) -> None:
    write_address(file, "shard", "shard-0", grpc=shard.address, http="127.0.0.1:1")


def test_a_learner_follows_a_shard_that_moves(serve, train, tmp_path):
    settings = settings_with(shard={"data_dir": tmp_path / "data"})
    file = tmp_path / "shard-0.json"
    old = serve(settings)
    tell(file, old)
    a = train(f"@{file}")
    a.until(lambda: old.version() > 0, "a version")

    old.stop()
    new = serve(settings)
    assert new.address != old.address
    tell(file, new)
    came_back_with = new.version()

    a.until(lambda: new.version() > came_back_with, "a contributes where the shard is now")


def test_a_learner_waits_for_a_shard_that_has_not_started_yet(serve, tmp_path):
    file = tmp_path / "shard-0.json"
    with pytest.raises(CannotConnect, match="no run to join"):
        diloco_worker.join(f"@{file}", tiny_model(), learner_id="a", wait_s=0.2)

    tell(file, serve())
    diloco_worker.join(f"@{file}", tiny_model(), learner_id="a", wait_s=20.0).close()
