"""Copies of the weights get what the parameters get, however the user says where they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco_common.errors import WrongCall
from diloco_common.wire.manifest import cut
from diloco_worker.core.copies import Masters, find_copies
from diloco_worker.core.replica import Replica
from diloco_worker.core.shared_set import SharedSet
from optimizers import Lookahead, ScheduleFree
from parts import Rig


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
