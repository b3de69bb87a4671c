"""Beside the model: momentum that is averaged along with it, and the average of its versions."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from builders import make_contribution, make_settings, random_values
from diloco_common.errors import ManifestMismatch, ModelChanged
from diloco_common.observe.logs import Log
from diloco_common.settings import Settings
from diloco_common.wire.manifest import TensorSpec, cut
from diloco_common.wire.messages import Collect, LearnerPolicy
from diloco_server.core.arithmetic import VersionRules, seed, step
from diloco_server.core.fragment import FragmentState
from diloco_server.core.outer import make_outer_optimizer
from diloco_server.shell.keeper import recover
from diloco_server.storage.version_file import version_name
from diloco_simulator.world.disk import FakeDisk
from diloco_worker.core.learner import LearnerCore
from diloco_worker.core.momentum import Companion, Companions, MomentumUse, most_of
from diloco_worker.core.replica import Replica
from diloco_worker.core.shared_set import SharedSet
from lockstep import Lockstep
from stores import MANIFEST, SIZE, make_version, open_store

SYNC = {"sync_every": 1, "quorum": "all", "merge": "rda"}
OUTER = {"optimizer": "nesterov", "lr": 0.7, "momentum": 0.9}


def linear(value: float = 0.0) -> nn.Linear:
    model = nn.Linear(4, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def momentum() -> dict[str, Companion]:
    return {"weight": Companion("SGD", torch.zeros(1, 4))}


def cluster_of(*learners: str, **sections: dict[str, Any]) -> Lockstep:
    """With these learners, each of which averages its momentum."""
    cluster = Lockstep(make_settings(**{"outer": OUTER, **sections, "sync": SYNC | sections.get("sync", {})}))
    for name in learners:
        cluster.join(name, linear(), momentum())
    return cluster


def states(cluster: Lockstep) -> tuple[FragmentState, FragmentState]:
    model, companion = cluster.shards[0].shard.fragments.values()
    assert (model.fragment.kind, companion.fragment.kind) == ("parameter", "momentum")
    return model, companion


def round_of(cluster: Lockstep, change: Callable[[], object]) -> None:
    change()
    for learner_id in cluster.learners:
        cluster.stepped(learner_id, tokens=8)
    cluster.exchange()


def test_a_companion_becomes_the_exact_mean_while_the_model_takes_an_outer_step() -> None:
    cluster, models, held = cluster_of(), [linear(), linear()], [momentum(), momentum()]
    for learner_id, model, companions in zip("ab", models, held, strict=True):
        cluster.join(learner_id, model, companions)

    def change() -> None:
        for model, companions, sign in zip(models, held, (1.0, -1.0), strict=True):
            with torch.no_grad():
                model.weight.add_(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
                companions["weight"].values.add_(torch.tensor([[1.0, 2.0, 4.0, 8.0 * sign]]))  # of equal length

    for version, mean in ((1, [1.0, 2.0, 4.0, 0.0]), (2, [2.0, 4.0, 8.0, 0.0]), (3, [3.0, 6.0, 12.0, 0.0])):
        round_of(cluster, change)
        model, companion = states(cluster)
        assert (model.version, companion.version) == (version, version)
        assert companion.values is not None
        assert companion.values.theta.tolist() == mean, "no rate, no momentum, and no radius of rda"
        assert companion.values.buffers == []
        assert [companions["weight"].values.tolist() for companions in held] == [[mean], [mean]]
    assert model.values is not None
    assert len(model.values.buffers) == 1
    assert models[0].weight.tolist() != [[3.0, 6.0, 9.0, 12.0]], "the model itself takes the outer step"


def test_the_run_ends_by_the_model_alone_and_companions_end_with_it() -> None:
    cluster = cluster_of("a", run={"tokens": 32}, sync={"companions_every": 3})
    shard = cluster.shards[0].shard
    for merged in (8, 16, 24, 32):
        assert not shard.done
        round_of(cluster, lambda: None)
        assert shard.tokens_merged == merged
        assert cluster.learners["a"].core.tokens_unmerged == 0, "companions are not waited for"
    model, companion = states(cluster)
    assert shard.done
    assert (model.version, companion.version) == (4, 1)
    ledger = shard.ledger
    assert (ledger.tokens_accepted, ledger.tokens_merged, ledger.tokens_in_flight) == (32, 32, 0)
    assert ledger.participants == 5
    assert shard.membership.get("a").tokens_merged == 32  # type: ignore[union-attr]
    for _ in range(4):
        round_of(cluster, lambda: None)
    assert companion.version == 1, "nothing is averaged for a run that is over"


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ({}, momentum(), "this run averages none, and the caller some"),
        (momentum(), {}, "this run averages momentum, and the caller none"),
    ],
)
def test_learners_that_do_not_average_the_same_momentum_hear_what_to_do(
    first: dict[str, Companion], second: dict[str, Companion], words: str
) -> None:
    cluster = cluster_of()
    cluster.join("a", linear(), first)
    with pytest.raises(ManifestMismatch, match=rf"the models are the same.*{words}.*train\.average_momentum"):
        cluster.join("b", linear(), second)
    with pytest.raises(ManifestMismatch, match=r"^the model differs from the shard's"):
        cluster.join("b", nn.Linear(4, 1), second)  # it has a bias


def test_a_mean_that_comes_late_counts_for_what_is_left_of_the_momentum_that_it_replaces() -> None:
    """d steps after its snapshot a learner holds keeps^d of that, and it gets as much of the mean."""
    keeps, steps = 0.5, 3
    cluster = cluster_of()
    held = [{"weight": Companion("SGD", torch.zeros(1, 4), pace=partial(MomentumUse, keeps))} for _ in range(2)]
    learners = [cluster.join(i, linear(), of) for i, of in zip("ab", held, strict=True)]
    held[0]["weight"].values.fill_(4.0)
    held[1]["weight"].values.fill_(-4.0)
    learners[1].held = True
    for learner_id in "ab":
        cluster.stepped(learner_id, tokens=8)
    cluster.exchange()
    for of in held:
        of["weight"].values.mul_(keeps**steps).add_(1.0)  # the gradients of these steps
    for learner_id in "ab":
        for _ in range(steps):
            learners["ab".index(learner_id)].core.stepped(8)
    learners[1].held = False
    cluster.exchange()
    assert states(cluster)[1].version == 1
    assert [of["weight"].values.tolist() for of in held] == [[[1.0] * 4]] * 2, "nothing is left of either's own"


def test_a_version_of_an_earlier_round_moves_the_reference_by_what_was_left_of_it_at_the_snapshot() -> None:
    """After the next version, the learner holds what is left of that, and nothing of its own."""
    keeps = 0.5
    held = Companion("SGD", torch.zeros(1, 4), pace=partial(MomentumUse, keeps))
    replica = Replica(linear(), companions={"weight": held})
    core = LearnerCore(replica, cut(replica.specs, 1, 1), LearnerPolicy(4, "float32", "float32"))

    def train(steps: int) -> None:
        for _ in range(steps):
            core.stepped(1)
            held.values.mul_(keeps)

    def arrives(version: int, value: float, merged: int) -> None:
        with torch.no_grad():
            core.arrived(1, version, 1, torch.full((4,), value), merged)

    arrives(0, 0.0, 0)
    train(4)
    held.values.fill_(8.0)
    core.collect(Collect(1, 2, 1), 1)
    (contribution,) = core.contribute()
    train(2)
    arrives(1, 16.0, 0)
    assert contribution.tensors.reference == (contribution.tensors.reference.values, None)
    assert contribution.tensors.reference.values.tolist() == [8.0 + 16.0 * keeps**4] * 4
    train(1)
    arrives(2, 20.0, 2)
    assert held.values.tolist() == [[20.0 * keeps**3] * 4]


def test_momentum_of_others_is_cut_to_what_the_own_second_moment_allows() -> None:
    second = torch.tensor([[0.0, 1.0, 4.0, 100.0]])
    held = {"weight": Companion("SGD", torch.zeros(1, 4), second, partial(MomentumUse, most=2.0))}
    replica = Replica(linear(), companions=held)
    assert replica.specs[1] == TensorSpec("momentum of weight (SGD)", (1, 4), rule="mean", kind="momentum")
    cluster = cluster_of()
    others = momentum()
    cluster.join("a", linear(), others)
    round_of(cluster, lambda: others["weight"].values.copy_(torch.tensor([[5.0, -5.0, 5.0, -5.0]])))
    cluster.join("b", linear(), held)
    assert held["weight"].values.tolist() == [[0.0, -2.0, 4.0, -5.0]]
    assert second.tolist() == [[0.0, 1.0, 4.0, 100.0]]


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.3)])
def test_no_gradients_of_ones_own_are_cut(betas: tuple[float, float]) -> None:
    """The bound is that of Cauchy and Schwarz: gradients that grow as (beta2 / beta1)^t come as near as can be."""
    beta1, beta2 = betas
    most, first, second, nearest = most_of(beta1, beta2), 0.0, 0.0, 0.0
    for t in range(400):
        gradient = (beta1 / beta2) ** -t
        first, second = beta1 * first + (1 - beta1) * gradient, beta2 * second + (1 - beta2) * gradient**2
        nearest = max(nearest, first / second**0.5)
    assert nearest <= most * (1 + 1e-9)
    assert nearest == pytest.approx(most, rel=1e-3)


@pytest.mark.parametrize(("lie", "left"), [(2.0, 2.0), (1e15, 3.0), (-1e15, -3.0), (1e30, 0.0), (math.inf, 0.0)])
@pytest.mark.parametrize("way", ["write", "add"])
def test_momentum_without_a_second_moment_grows_only_so_far_by_one_version(way: str, lie: float, left: float) -> None:
    """What is too long for float32 to say how long it is counts for nothing."""
    held = Companion("SGD", torch.ones(1, 4))
    replica = Replica(linear(), companions={"weight": held})
    fragment = cut(replica.specs, 1, 1).fragments[1]
    values = torch.full((4,), lie)
    with torch.no_grad():
        if way == "write":
            replica.write(fragment, values)
        else:
            replica.add(fragment, values - 1.0)
    assert held.values.tolist() == [[pytest.approx(left)] * 4]


OPTIMIZERS: list[Callable[[nn.Module], torch.optim.Optimizer]] = [
    lambda m: torch.optim.AdamW(m.parameters(), lr=0.1),
    lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, fused=True, amsgrad=True),
    lambda m: torch.optim.Adam(m.parameters(), lr=0.1, foreach=True),
    lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, fused=True),
]
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS.append(lambda m: torch.optim.Muon(m.parameters(), lr=0.1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(8, 4, generator=generator)
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return next(model.parameters()).detach().clone()


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_state_that_was_made_before_the_first_step_is_that_which_the_optimizer_would_have_made(
    make: Callable[[nn.Module], torch.optim.Optimizer],
) -> None:
    alone, prepared = linear(), linear()
    optimizer = make(prepared)
    companions = Companions(optimizer, SharedSet(prepared))
    plain = make(alone)
    assert torch.equal(train(alone, plain, 3), train(prepared, optimizer, 3))
    companions.check()  # the optimizer has changed the very tensors
    (state,), (own,) = plain.state.values(), optimizer.state.values()
    assert state.keys() == own.keys()
    first = "exp_avg" if "exp_avg" in own else "momentum_buffer"
    assert own[first] is companions.by_name["weight"].values
    assert own[first].any()
    assert {k: (v.dtype, v.device, v.shape) for k, v in state.items()} == {
        k: (v.dtype, v.device, v.shape) for k, v in own.items()
    }


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize(
    "change",
    [
        lambda optimizer, saved: optimizer.load_state_dict(saved),
        lambda optimizer, saved: optimizer.state.clear(),
        lambda optimizer, saved: next(iter(optimizer.state.values())).clear(),
    ],
    ids=["loaded", "gone", "empty"],
)
def test_state_that_is_replaced_later_is_noticed(
    make: Callable[[nn.Module], torch.optim.Optimizer], change: Callable[[Any, Any], None]
) -> None:
    model = linear()
    optimizer = make(model)
    train(model, optimizer, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(copy.deepcopy(saved))  # before: this is what a resumed learner does
    companions = Companions(optimizer, SharedSet(model))
    train(model, optimizer, 2)
    companions.check()
    change(optimizer, saved)
    with pytest.raises(ModelChanged, match=r"of weight was replaced .*load_state_dict"):
        companions.check()


FRAGMENT = MANIFEST.fragments[0]


def settings(average: float) -> Settings:
    return Settings.model_validate({"outer": {"average": average}})


class Run:
    """Versions of one fragment, each made durable on a fake disk."""

    def __init__(self, average: float, *, one_way: bool = False) -> None:
        self.disk, self.one_way, self.version = FakeDisk(), one_way, 0
        self.thetas: list[Tensor] = []
        self.restart(average)
        payload = make_contribution("ann", random_values(SIZE, 1), pieces=FRAGMENT.pieces).payload
        self.values = seed(payload, self.rules.optimizer)
        self.save()

    def restart(self, average: float) -> None:
        """Go on from the disk, with these settings."""
        self.settings = settings(average)
        self.rules = VersionRules("mean", make_outer_optimizer(self.settings.outer), self.settings.outer.average)
        self.store = open_store(self.disk)
        if (found := recover(self.store, self.settings, lambda fragment: self.rules, Log("test"))) is not None:
            self.values = found[1][0].values

    def save(self) -> None:
        self.store.save(replace(make_version(self.version), values=self.values), MANIFEST)

    def make(self, versions: int) -> Run:
        for _ in range(versions):
            self.version += 1
            gradient = 0.01 * random_values(SIZE, 1000 if self.one_way else 1000 + self.version)
            merged = make_contribution("ann", gradient, pieces=FRAGMENT.pieces)
            step(self.values, FRAGMENT, [merged], outer_step=self.version, rules=self.rules)
            self.thetas.append(self.values.theta.double())
            self.save()
        return self

    def header(self) -> dict[str, dict[str, str]]:
        content = self.disk.content(version_name(0, self.version))
        return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])  # type: ignore[no-any-return]


@pytest.mark.parametrize("one_way", [False, True])
@pytest.mark.parametrize(("average", "error"), [(0.9, 0.006), (0.999, 0.05)])
def test_it_is_the_formula_and_a_restart_changes_no_bit(average: float, error: float, one_way: bool) -> None:
    """One way, what each version adds is less than half of the last bit of what is kept."""
    whole, restarted = Run(average, one_way=one_way).make(150), Run(average, one_way=one_way).make(60)
    restarted.restart(average)
    restarted.make(90)
    assert whole.values.average is not None
    assert restarted.values.average is not None
    assert torch.equal(whole.values.average, restarted.values.average)

    expected = torch.zeros(SIZE, dtype=torch.float64)
    for t, theta in enumerate(whole.thetas, 1):
        expected += (1 - average) / (1 - average**t) * (theta - expected)
    off = (whole.values.averaged().double() - expected).norm() / (expected - whole.thetas[-1]).norm()
    assert off < error


def test_off_it_takes_no_byte_and_it_may_come_and_go_with_a_restart() -> None:
    run = Run(0.0).make(3)
    assert run.values.average is None
    assert (run.header().keys() >= {"average"}, run.header()["__metadata__"]["format"]) == (False, '"diloco-version-3"')

    run.restart(0.9)
    assert torch.equal(run.values.averaged(), run.values.theta), "it begins with the version that is there"
    began, kept = run.values.theta.double(), 1 - 0.1 / (1 - 0.9**4)
    run.make(1)
    theta = run.values.theta.double()
    torch.testing.assert_close(run.values.averaged().double() - theta, kept * (began - theta), rtol=0.01, atol=1e-7)
    assert (run.header()["average"]["dtype"], run.header()["__metadata__"]["format"]) == ("BF16", '"diloco-version-4"')

    run.restart(0.0)
    assert "average" not in run.make(1).header()
