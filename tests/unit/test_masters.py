"""Copies of the weights get what the parameters get; an optimizer that takes that back is noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from test_watch import Sam
from torch import Tensor, nn

from builders import TinyText, make_settings
from diloco_common.errors import WrongCall
from diloco_common.wire.manifest import cut
from diloco_common.wire.messages import LearnerPolicy
from diloco_worker.core.copies import Masters, find_copies
from diloco_worker.core.events import Arrived
from diloco_worker.core.replica import Replica
from diloco_worker.core.shared_set import SharedSet
from diloco_worker.core.undone import IN_A_ROW, ROW, STEPS, is_undone, taken_back
from lockstep import Lockstep
from optimizers import SGD, Lookahead, OnMasters, ScheduleFree
from parts import Parts, Rig, joined


class Net(nn.Module):
    """In 16 bits; the head is tied to the table, and one layer is laid out otherwise than its copy."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.wte.weight
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.bfloat16()


def exact_masters(model: nn.Module) -> dict[str, Tensor]:
    """What bfloat16 cannot hold is in them."""
    found = {}
    for name, parameter in model.named_parameters():
        master = parameter.detach().float().clone(memory_format=torch.contiguous_format)
        found[name] = master + master.abs() * 2.0**-12
        assert torch.equal(found[name].bfloat16(), parameter)
    return found


def replica_of(model: nn.Module, masters: Masters) -> Replica:
    chosen = SharedSet(model)
    replica = Replica(chosen)
    replica.keep_copies(find_copies(masters, chosen))
    return replica


@pytest.mark.parametrize("fragments", [1, 3])
def test_a_master_gets_all_of_a_version_and_its_parameter_is_rounded_from_it(fragments: int) -> None:
    model = Net()
    masters = exact_masters(model)
    expected = {name: master.clone() for name, master in masters.items()}
    replica = replica_of(model, masters.get)
    for fragment in cut(replica.specs, fragments, 1).fragments:
        replica.add(fragment, torch.full((fragment.num_elements,), 2.0**-14))
    for name, parameter in model.named_parameters():
        assert torch.equal(masters[name], expected[name] + 2.0**-14)
        assert torch.equal(parameter, masters[name].bfloat16())


def test_progress_is_what_the_masters_have_trained() -> None:
    model = Net()
    masters = exact_masters(model)
    replica = replica_of(model, masters.get)
    (fragment,) = cut(replica.specs, 1, 1).fragments
    n = fragment.num_elements
    anchor, progress = torch.empty(n), torch.empty(n)
    replica.read(fragment, anchor)
    assert torch.equal(anchor, torch.cat([masters["conv.bias"], masters["conv.weight"].view(-1),
                                          masters["wte.weight"].view(-1)]))  # fmt: skip
    for name, parameter in model.named_parameters():  # less than bfloat16 can tell
        masters[name].add_(2.0**-15)
        parameter.data.copy_(masters[name])
    replica.progress(fragment, anchor, progress)
    torch.testing.assert_close(progress, torch.full((n,), -(2.0**-15)), rtol=0, atol=1e-7)


def test_where_a_parameter_is_not_its_copy_rounded_its_own_values_count() -> None:
    """As of schedule-free with z in float32."""
    model = nn.Linear(64, 1, bias=False).bfloat16()
    z = model.weight.detach().float() + 1.0
    before, expected = z.clone(), model.weight.detach().float()
    replica = replica_of(model, {"weight": z}.get)
    (fragment,) = cut(replica.specs, 1, 1).fragments
    found = torch.empty(64)
    replica.read(fragment, found)
    assert torch.equal(found, expected.view(-1))
    replica.add(fragment, torch.ones(64))
    assert torch.equal(z, before + 1.0)
    assert torch.equal(model.weight, (expected + 1.0).bfloat16())


def test_a_block_leaves_the_copies_as_they_were_and_restored_values_go_there() -> None:
    rig = Rig()
    masters = {str(i): torch.full((1,), 11.0 + i) for i in range(2)}
    rig.learner._boundary.replica.keep_copies(find_copies(masters.get, SharedSet(rig.model)))
    rig.steps()
    with rig.learner.global_values():
        assert rig.values == [10.0, 10.0]
    assert rig.values == [12.0, 12.0]
    assert [m.item() for m in masters.values()] == [11.0, 12.0]
    rig.arrives(0, 1, 15.0)
    rig.learner.poll()
    assert [m.item() for m in masters.values()] == [16.0, 12.0]
    rig.learner.restore({"1": torch.full((1,), 7.0)})
    assert [m.item() for m in masters.values()] == [16.0, 7.0]
    assert rig.values == [17.0, 7.0]


class WithGroups:
    """As apex keeps its masters: groups beside those of the parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.param_groups = [{"params": list(model.parameters())}]
        self.param_groups_master = [{"params": [p.detach().float().clone() for p in model.parameters()]}]
        self.state: dict[Tensor, Any] = {}


def stepped(model: nn.Module, optimizer: Any) -> Any:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def given_by(kind: str, model: nn.Module) -> tuple[Masters, dict[str, list[Tensor]]]:
    """What `join` is given, and what it must find."""
    if kind == "schedule-free":
        optimizer = stepped(model, ScheduleFree(model.parameters()))
        return optimizer, {n: [optimizer.state[p][k] for k in "zx"] for n, p in model.named_parameters()}
    if kind == "lookahead":
        lookahead = stepped(model, Lookahead(model.parameters()))
        return [lookahead], {n: [lookahead.slow[p]] for n, p in model.named_parameters()}
    if kind == "groups":
        apex = WithGroups(model)
        masters = zip(model.named_parameters(), apex.param_groups_master[0]["params"], strict=True)
        return apex, {name: [master] for (name, _), master in masters}
    copies = {name: p.detach().clone() for name, p in model.named_parameters()}
    found = {name: [copy] for name, copy in copies.items()}
    if kind == "other name":
        copies["head.weight"] = copies.pop("wte.weight")
    return copies.get, found


@pytest.mark.parametrize("kind", ["schedule-free", "lookahead", "groups", "function", "other name"])
def test_copies_are_found_in_every_way_in_which_they_are_given(kind: str) -> None:
    model = Net()
    masters, expected = given_by(kind, model)
    expected["head.weight"] = expected.pop("wte.weight", None) or expected["head.weight"]
    find = find_copies(masters, SharedSet(model))
    for name, copies in expected.items():
        assert [c.data_ptr() for c in find(name)] == [c.data_ptr() for c in copies]


def test_copies_that_are_made_at_the_first_step_are_found_then_and_again_after_others_were_loaded() -> None:
    model = Net()
    optimizer = ScheduleFree(model.parameters())
    find = find_copies(optimizer, SharedSet(model))
    assert not find("conv.bias")
    stepped(model, optimizer)
    assert [c.data_ptr() for c in find("conv.bias")] == [optimizer.state[model.conv.bias][k].data_ptr() for k in "zx"]
    optimizer.load_state_dict(optimizer.state_dict())
    assert find("conv.bias")[0].data_ptr() == optimizer.state[model.conv.bias]["z"].data_ptr()


LAYER = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("masters", "words"),
    [
        (3, "masters= is 3: give the optimizer"),
        ([], r"masters= is \[\]: give the optimizer"),
        ({"weight": torch.zeros(2, 2)}, "masters= is of type dict: give the optimizer"),
        ({"weight": torch.zeros(4)}.get, r"the copy of weight is \(4,\) on cpu, and the parameter \(2, 2\) on cpu"),
        ({"weight": torch.zeros(2, 2, dtype=torch.int8)}.get, "the copy of weight is .* no tensor of floats"),
        ({"weight": LAYER.weight}.get, "weight is the parameter itself"),
    ],
)
def test_what_are_no_copies_is_refused_in_one_line(masters: Masters, words: str) -> None:
    with pytest.raises(WrongCall, match=words) as caught:
        find_copies(masters, SharedSet(LAYER))
    assert "\n" not in str(caught.value)


class TwoSteps(Sam):
    def zero_grad(self) -> None:
        self.base.zero_grad()


def batches(seed: int) -> Iterator[Tensor]:
    """Every third token after the one before, with some noise."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        start = torch.randint(0, TinyText.VOCABULARY, (8, 1), generator=generator)
        noise = torch.randint(0, 2, (8, 12), generator=generator).cumsum(1)
        yield (start + 3 * torch.arange(12) + noise) % TinyText.VOCABULARY


def trained(
    make: Callable[[Iterable[nn.Parameter]], object], *, masters: Callable[[object], Masters] | None = None,
    steps: int = 120, sync_every: int = 8, dtype: torch.dtype = torch.float32, num_learners: int = 2,
) -> tuple[int, float]:  # fmt: skip
    """Train some learners together. Returns at which step it was found of one (0: of none), and the last loss."""
    cluster = Lockstep(make_settings(sync={"sync_every": sync_every, "push": "int8", "pull": "bfloat16"}))
    learners = []
    for i in range(num_learners):
        model = TinyText().to(dtype)
        optimizer = make(model.parameters())
        copies = None if masters is None else find_copies(masters(optimizer), SharedSet(model))
        learners.append((cluster.join(f"learner-{i}", model, copies=copies), model, optimizer, batches(i)))
    loss = torch.zeros(())
    for step in range(1, steps + 1):
        cluster.shards[0].advance(1.0)
        for learner, model, optimizer, data in learners:
            batch = next(data)
            for _ in range(2 if isinstance(optimizer, TwoSteps) else 1):
                optimizer.zero_grad()
                loss = model.loss(batch)
                loss.backward()
                if isinstance(optimizer, TwoSteps):
                    (optimizer.second_step if optimizer.old else optimizer.first_step)()
                else:
                    optimizer.step()
            if isinstance(optimizer, TwoSteps):
                optimizer.old.clear()
            if learner.replica.laid.check():
                return step, loss.item()
            cluster.stepped(learner.learner_id, batch.numel())
        cluster.exchange()
    assert cluster.shards[0].shard.fragments[0].version >= 4
    return 0, loss.item()


HONEST: dict[str, Callable[[Iterable[nn.Parameter]], object]] = {
    "sgd": SGD,
    "adamw-fast": partial(torch.optim.AdamW, lr=0.1),
    "decay": partial(torch.optim.SGD, lr=0.3, momentum=0.9, weight_decay=0.05),
    "rounded away": partial(torch.optim.SGD, lr=0.05),
    "sam": lambda parameters: TwoSteps(p := list(parameters), torch.optim.SGD(p, lr=0.3), rho=0.05),
}


@pytest.mark.parametrize("name", HONEST)
def test_of_an_optimizer_that_steps_on_the_parameters_nothing_is_found(name: str) -> None:
    dtype = torch.bfloat16 if name == "rounded away" else torch.float32
    refused, _ = trained(HONEST[name], sync_every=4, steps=60, dtype=dtype)
    assert not refused


OVERWRITE = {
    "masters": (OnMasters, torch.bfloat16, lambda o: o),
    "lookahead": (Lookahead, torch.float32, lambda o: o),
    "schedule-free": (ScheduleFree, torch.float32, lambda o: o),
}  # fmt: skip


@pytest.mark.parametrize("kind", OVERWRITE)
def test_an_optimizer_that_writes_a_copy_over_the_parameters_is_found(kind: str) -> None:
    make, dtype, _ = OVERWRITE[kind]
    refused, _ = trained(make, dtype=dtype)
    assert 0 < refused < 60


@pytest.mark.parametrize("kind", OVERWRITE)
def test_and_is_not_where_its_copies_get_versions(kind: str) -> None:
    make, dtype, masters = OVERWRITE[kind]
    refused, loss = trained(make, dtype=dtype, masters=masters)
    assert not refused
    assert loss < 2.6


def seen(rows: int, *, at: int, share: float, step: float = 0.1, laid: float = 1.0, steps: int = STEPS) -> Tensor:
    """Rows of a version of that size, of which step `at` takes back a share; the others train by steps of that size."""
    generator = torch.Generator().manual_seed(0)
    d = torch.randn(rows, ROW, generator=generator) * laid
    before = torch.randn(rows, ROW, generator=generator)
    found = [before, before + d]
    for number in range(steps):
        moved = torch.randn(rows, ROW, generator=generator) * step
        found.append(found[-1] + moved - (share * d if number == at else 0.0))
    return torch.stack(found)


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        (seen(4, at=0, share=1.0), True),
        (seen(4, at=4, share=0.5), True),
        (seen(4, at=0, share=0.0), False),
        (seen(4, at=0, share=0.2), False),  # a schedule that averages slowly
        (seen(4, at=0, share=0.0, step=10.0), False),
        (seen(4, at=0, share=1.0, step=1.0), False),  # in steps as long as the version nobody can tell
        (torch.cat([seen(2, at=0, share=1.0), seen(1, at=0, share=0.0)], 1), True),
        (torch.cat([seen(1, at=0, share=1.0), seen(4, at=0, share=0.0)], 1), False),
        (torch.cat([seen(1, at=0, share=1.0), seen(2, at=0, share=0.0, laid=0.0)], 1), True),  # these say nothing
        (seen(4, at=0, share=1.0, laid=0.0), False),
    ],
)  # fmt: skip
def test_a_version_is_undone_where_one_step_is_its_inverse(samples: Tensor, expected: bool) -> None:
    assert is_undone(*taken_back(samples.flatten(1)).tolist()) is expected


def test_a_step_of_a_learner_says_it_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    parts, model = Parts(), nn.ParameterList([nn.Parameter(torch.zeros(ROW))])
    learner = parts.learner(model)
    digest, policy = cut(Replica(model).specs, 1, 1).digest, LearnerPolicy(1, "float32", "float32")
    learner._inbox.put(joined(5, policy, digest=digest))
    learner._inbox.put(Arrived(0, 0, 5, torch.zeros(ROW), 0))
    assert learner.begin()
    master = model[0].detach().clone()

    def train_on_the_master() -> None:
        for version in range(1, IN_A_ROW + 1):
            learner._inbox.put(Arrived(0, version, 5, torch.full((ROW,), float(version)), 0))
            for _ in range(STEPS):
                with torch.no_grad():
                    model[0].copy_(master.add_(0.01))
                learner.step(tokens=1)
        learner.poll()
        learner.step(tokens=1)

    train_on_the_master()
    assert caplog.text.count("inner steps undo one version") == 1
    assert "join(masters=optimizer)" in caplog.text
    assert "join(after_version=f)" in caplog.text
    assert "code=VERSION_UNDONE" in caplog.text
    assert learner.status()["versions_undone"] == IN_A_ROW
