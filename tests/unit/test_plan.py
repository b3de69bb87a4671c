"""`diloco plan`: its arithmetic is that of the encodings, of the tensors that learners hold, and of the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tools import kubernetes_sizes as sizes
from torch import Tensor

from diloco_common import formulas
from diloco_common.codec import encode_payload
from diloco_common.command import main
from diloco_common.errors import ConfigError
from diloco_common.formulas import BITS
from diloco_common.settings import SyncSettings
from diloco_common.wire.manifest import cut
from diloco_planner.choice import PlannedRun, choose
from diloco_planner.plan_command import parameters_of
from diloco_planner.plans import Link
from diloco_planner.sizes import learner_bytes
from diloco_worker.core.replica import Replica
from diloco_worker.core.tensors import FragmentTensors

MBIT = 1e6


def asked(
    params: float, mbit: float, *, step_s: float = 1.0, learners: int = 8, round_trip_s: float = 0.05
) -> PlannedRun:
    return PlannedRun(params, learners, Link(mbit * MBIT, mbit * MBIT, round_trip_s), step_s)


@pytest.mark.parametrize(
    ("params", "mbit", "every"),
    [
        (1e8, 1000, 12),  # the defaults fit: H = 12 needs 68 Mbit/s
        (1e9, 900, 19),  # 8.125 bits down: 10^9 x 8.125 / (0.5 x 9 x 10^8)
        (1e9, 100, 163),
    ],
)
def test_a_thin_link_asks_for_a_larger_h(params: float, mbit: float, every: int) -> None:
    choice = choose(asked(params, mbit))
    assert (choice.encodings.push, choice.every, choice.fits) == (SyncSettings().push, every, True)


def test_a_link_that_carries_nothing_is_said_so() -> None:
    assert not choose(asked(7e10, 10)).fits


def test_the_memory_of_a_shard_is_near_what_was_measured() -> None:
    """docs/performance.md: 100 M parameters, 4 learners, 24 fragments: a peak of 1502 MB."""
    predicted = formulas.shard_memory(1e8, 24, 4, BITS["int8"], "nesterov", "bfloat16")
    assert 1502e6 <= predicted <= 1.4 * 1502e6


def build():
    from torch import nn

    model = nn.Linear(1_000_000, 1_000)  # 4 GB, if it took memory
    model.bias.requires_grad_(False)
    return model


def test_a_model_is_counted_without_memory() -> None:
    assert parameters_of("test_plan:build") == 10**9


@pytest.mark.parametrize("name", ["test_plan", "test_plan:nothing", "no.such:thing", "test_plan:asked"])
def test_a_model_that_cannot_be_built_is_one_line(name: str) -> None:
    with pytest.raises(ConfigError, match="--model"):
        parameters_of(name)


def test_the_command_prints_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--params", "1B", "--up", "100Mbit", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["sync"]["sync_every"] == 163
    names = [figure["name"] for figure in found["figures"]]
    assert {"memory of a shard, at most", "diloco's part, at most", "disk of a shard"} <= set(names)


@pytest.mark.parametrize(("ranks", "gigabytes"), [(8, 35.0), (64, 4.375)])
def test_memory_of_a_rank(capsys: pytest.CaptureFixture[str], ranks: int, gigabytes: float) -> None:
    """70 B: anchor 2 and residual 2 bytes for each parameter that the rank holds."""
    assert main(["plan", "--params", "70B", "--ranks", str(ranks), "--up", "10Gbit", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    (kept,) = [one for one in figures if one["name"].startswith("kept by diloco")]
    assert kept["value"] == pytest.approx(gigabytes * 1e9, rel=0.001)


PAGE = Path(__file__).resolve().parents[2] / "docs/kubernetes-sizes.md"


def test_the_page_has_the_tables_as_they_are_computed() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert sizes.page(text) == text, "run python tools/kubernetes_sizes.py"


def num_bytes(*tensors: Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def payload_bytes(payload: Any) -> int:
    return int(payload.header.num_bytes)


@pytest.mark.parametrize("pull", ["bfloat16", "float32"])
def test_a_learner_holds_the_tensors_that_are_counted(pull: str) -> None:
    """One fragment: contributed, merged, and on its way once more, with the version that holds it."""
    model = torch.nn.Linear(300, 700, bias=False)
    replica = Replica(model, None)
    (fragment,) = cut(replica.specs, 1, 1).fragments
    tensors = FragmentTensors(replica.held(fragment), replica, "int8")
    dtype = torch.bfloat16 if pull == "bfloat16" else torch.float32
    values = model.weight.detach().flatten().to(dtype)
    with torch.no_grad():
        tensors.adopt(values)
        tensors.contribute(1).encode("int8")
        tensors.carry(values, merged=True)
        kept = num_bytes(values, tensors._residual)
        contribution = tensors.contribute(2)
        payload = contribution.encode("int8")
        came = encode_payload(values, pull)
        difference = values.float() - contribution.snapshot

    most = learner_bytes(fragment.num_elements, 1, pull=pull)

    assert most.kept == kept
    assert (most.pushed, most.pulled) == (payload_bytes(payload), payload_bytes(came))
    moving = num_bytes(contribution.snapshot, contribution.loss, difference) + payload_bytes(payload)
    assert most.under_way == moving + payload_bytes(came)
