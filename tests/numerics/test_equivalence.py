"""What the engine is equal to: plain local training, DiLoCo, Streaming DiLoCo, data-parallel training.

The cores are driven in lockstep, float32 both ways.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import pytest
import torch
from dumb_diloco import Part, dumb_diloco
from torch import Tensor

from builders import TinyText, inner_step, make_batch, make_settings, parameters_apart
from diloco_common.settings import Settings
from diloco_server.core.outer import Nesterov
from lockstep import Lockstep

TOLERANCE = 1e-6
ROUNDED = 2e-4
"""The same where the outer momentum is kept as bfloat16."""
TOKENS = 40
"""Of every batch."""

MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3)


def batch_of(learner: int, step: int) -> Tensor:
    return make_batch(1000 * learner + step)


def train_cluster(
    start: TinyText, settings: Settings, *, learners: int, steps: int, make_optimizer: MakeOptimizer = adamw,
    num_shards: int = 1, order: list[str] | None = None,
) -> tuple[Lockstep, list[TinyText]]:  # fmt: skip
    """Every learner takes `steps` inner steps on batches of its own; after each, everybody speaks."""
    cluster = Lockstep(settings, num_shards)
    models = [copy.deepcopy(start) for _ in range(learners)]
    optimizers = [make_optimizer(model.parameters()) for model in models]
    for m, model in enumerate(models):
        cluster.join(f"learner-{m}", model)
    for step in range(1, steps + 1):
        for m, model in enumerate(models):
            inner_step(model, optimizers[m], batch_of(m, step))
            cluster.stepped(f"learner-{m}", TOKENS)
        cluster.exchange(order)
    return cluster, models


def parts_of_fragments(cluster: Lockstep) -> list[list[Part]]:
    manifest = cluster.learners["learner-0"].core.manifest
    return [
        [(p.tensor, p.tensor_offset, p.tensor_offset + p.num_elements) for p in fragment.pieces]
        for fragment in manifest.fragments
    ]


@pytest.mark.parametrize("merge", ["rda", "mean"])
def test_one_learner_that_synchronises_every_step_trains_as_if_it_were_alone(merge: str) -> None:
    settings = make_settings(
        sync={"sync_every": 1, "quorum": "all", "merge": merge},
        outer={"optimizer": "sgd", "lr": 1.0, "momentum": 0.0},
    )
    alone = TinyText(seed=1)
    start = copy.deepcopy(alone)
    optimizer = adamw(alone.parameters())
    for step in range(1, 25):
        inner_step(alone, optimizer, batch_of(0, step))

    cluster, (model,) = train_cluster(start, settings, learners=1, steps=24)

    assert cluster.shards[0].shard.fragments[0].version == 24
    assert parameters_apart(start, alone) > 1e-2, "nothing was trained"
    assert parameters_apart(model, alone) < TOLERANCE


@pytest.mark.parametrize(("kept_as", "tolerance"), [(torch.float32, TOLERANCE), (torch.bfloat16, ROUNDED)])
@pytest.mark.parametrize("merge", ["rda", "mean"])
@pytest.mark.parametrize(
    ("fragments", "num_shards", "sync_every", "steps"), [(1, 1, 4, 20), (5, 1, 5, 25), (4, 2, 3, 15), (8, 1, 8, 40)]
)
def test_four_learners_that_wait_for_all_are_diloco(
    merge: str, fragments: int, num_shards: int, sync_every: int, steps: int, kept_as: torch.dtype, tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(Nesterov, "buffer_dtype", kept_as)
    settings = make_settings(
        sync={"fragments": fragments, "sync_every": sync_every, "quorum": "all", "merge": merge},
        outer={"optimizer": "nesterov", "lr": 0.7, "momentum": 0.9},
    )  # fmt: skip
    start = TinyText(seed=2)
    cluster, models = train_cluster(start, settings, learners=4, steps=steps, num_shards=num_shards)
    parts = parts_of_fragments(cluster)
    expected = dumb_diloco(
        start, parts, batch_of,
        learners=4, steps=steps, sync_every=sync_every, rule=merge, lr=0.7, momentum=0.9,
    )  # fmt: skip

    assert len(parts) == fragments
    versions = [s.version for shell in cluster.shards for s in shell.shard.fragments.values()]
    assert min(versions) >= 4
    assert max(versions) == 5
    assert parameters_apart(start, expected[0]) > 1e-2, "nothing was trained"
    for model, twin in zip(models, expected, strict=True):
        assert parameters_apart(model, twin) < tolerance


def test_rda_and_mean_are_not_the_same_on_this_task() -> None:
    """Or the comparisons above would not tell one from the other."""
    start, parts = TinyText(seed=2), [[(n, 0, p.numel()) for n, p in TinyText().named_parameters()]]
    rda, mean = (
        dumb_diloco(start, parts, batch_of, learners=4, steps=20, sync_every=4, rule=rule, lr=0.7, momentum=0.9)
        for rule in ("rda", "mean")
    )
    assert parameters_apart(rda[0], mean[0]) > 1e-3


def test_learners_that_average_after_every_sgd_step_are_one_learner_with_the_whole_batch() -> None:
    """By the plain mean."""
    settings = make_settings(
        sync={"sync_every": 1, "quorum": "all", "merge": "mean"},
        outer={"optimizer": "sgd", "lr": 1.0, "momentum": 0.0},
    )
    start = TinyText(seed=3)
    together = copy.deepcopy(start)
    optimizer = sgd(together.parameters())
    for step in range(1, 21):
        inner_step(together, optimizer, torch.cat([batch_of(m, step) for m in range(4)]))

    _, models = train_cluster(start, settings, learners=4, steps=20, make_optimizer=sgd)

    assert parameters_apart(start, together) > 1e-2, "nothing was trained"
    for model in models:
        assert parameters_apart(model, together) < TOLERANCE


def test_the_order_in_which_learners_speak_changes_no_bit() -> None:
    settings = make_settings(
        sync={"sync_every": 3, "fragments": 3, "quorum": "all", "push": "int8", "pull": "bfloat16"}
    )
    start = TinyText(seed=4)
    names = [f"learner-{m}" for m in range(4)]
    clusters = [
        train_cluster(start, settings, learners=4, steps=9, order=order)[0]
        for order in (names, names[::-1], [names[2], names[0], names[3], names[1]])
    ]
    first, *others = [
        {i: (s.version, s.values.theta) for i, s in c.shards[0].shard.fragments.items() if s.values} for c in clusters
    ]
    assert len(first) == 3
    assert all(version == 3 for version, _ in first.values())
    for other in others:
        for fragment_id, (version, theta) in first.items():
            assert other[fragment_id][0] == version
            assert torch.equal(other[fragment_id][1], theta)
