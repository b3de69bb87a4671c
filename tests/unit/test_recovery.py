"""What a shard says of a folder in which something is missing (reliability.md 8)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from builders import random_values
from diloco_common.errors import WrongFolder
from diloco_common.observe.logs import Log
from diloco_common.settings import Settings
from diloco_common.wire.manifest import Fragment, model_digest
from diloco_server.core.arithmetic import Making, Values
from diloco_server.core.outer import make_outer_optimizer
from diloco_server.shell.keeper import recover
from diloco_simulator.world.disk import FakeDisk
from stores import MANIFEST, SIZE, make_version, open_store


class Heard(Log):
    def __init__(self) -> None:
        super().__init__("test")
        self.errors: list[dict[str, Any]] = []

    def error(self, event: str, **facts: Any) -> None:
        self.errors.append(facts)


def made_by(settings: Settings) -> Callable[[Fragment], Making]:
    """How versions are made, of all fragments alike."""
    return lambda fragment: Making("mean", make_outer_optimizer(settings.outer))


@pytest.fixture
def disk() -> FakeDisk:
    return FakeDisk()


def recovered_from(disk: FakeDisk, settings: Settings, log: Log | None = None) -> Any:
    return recover(open_store(disk), settings, made_by(settings), log or Heard())


@pytest.mark.parametrize(("version", "missing"), [(0, None), (3, [1])], ids=["still being seeded", "taken away"])
def test_a_fragment_without_any_file_is_named_where_others_have_versions(disk, version: int, missing: Any) -> None:
    log = Heard()
    open_store(disk).save(make_version(version, fragment_id=0), MANIFEST)
    assert [f.fragment_id for f in MANIFEST.owned_by(0)] == [0, 1]
    _, restored = recovered_from(disk, Settings(), log)
    assert [r.record.fragment_id for r in restored] == [0]
    assert [facts.get("fragments") for facts in log.errors] == ([] if missing is None else [missing])


@pytest.mark.parametrize(("model", "is_taken"), [("", True), (model_digest(MANIFEST.tensors), True), ("0" * 32, False)])
def test_a_folder_with_another_model_than_the_shard_was_told_is_not_served(disk, model: str, is_taken: bool) -> None:
    open_store(disk).save(make_version(3), MANIFEST)
    words = rf"{model_digest(MANIFEST.tensors)}, but run.model is {model}"
    with nullcontext() if is_taken else pytest.raises(WrongFolder, match=words):
        assert recovered_from(disk, Settings.model_validate({"run": {"model": model}})) is not None


def test_a_shard_goes_on_from_a_folder_whose_momentum_is_float32(disk) -> None:
    stored, exact = make_version(3), [random_values(SIZE, 1)]
    open_store(disk).save(replace(stored, values=Values(stored.values.theta, exact)), MANIFEST)
    _, (restored,) = recovered_from(disk, Settings())
    assert torch.equal(restored.values.theta, stored.values.theta)
    assert torch.equal(restored.values.buffers[0], exact[0].bfloat16())
