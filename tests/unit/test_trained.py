"""What optimizers train beside what is shared; loops inside a library (`learner.follow`) and what a step counts."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from diloco_common.errors import OptimizerDiffers
from diloco_common.observe.logs import Log
from diloco_common.wire.messages import ADAM, OTHER
from diloco_worker.core.shared_set import SharedSet
from diloco_worker.shell.optimizers import LOOK_AT_STEP, Compared, Following, differences, inner_of


class Agent(nn.Module):
    """As those of libraries: the target requires gradients, and gets none."""

    def __init__(self) -> None:
        super().__init__()
        self.q_net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        self.q_net_target = copy.deepcopy(self.q_net)


def of(*modules: nn.Module | nn.Parameter) -> torch.optim.Optimizer:
    found = [p for m in modules for p in (m.parameters() if isinstance(m, nn.Module) else [m])]
    return torch.optim.SGD([p for p in found if p.requires_grad], lr=0.1)


def plain() -> tuple[Any, list[Any]]:
    model = nn.Linear(2, 2)
    return SharedSet(model), [of(model)]


def target() -> tuple[Any, list[Any]]:
    agent = Agent()
    return SharedSet(agent), [of(agent.q_net)]


def target_is_private() -> tuple[Any, list[Any]]:
    agent = Agent()
    return SharedSet(agent, private=["q_net_target.*"]), [of(agent.q_net)]


def head_in_the_loss() -> tuple[Any, list[Any]]:
    model, loss = nn.Linear(2, 2), nn.Linear(6, 3)
    return SharedSet(model), [of(model, loss)]


def head_is_joined() -> tuple[Any, list[Any]]:
    model, loss = nn.Linear(2, 2), nn.Linear(6, 3)
    return SharedSet([model, loss]), [of(model, loss)]


def one_of_two() -> tuple[Any, list[Any]]:
    nets = {"actor": nn.Linear(2, 2), "critic": nn.Linear(2, 1)}
    return SharedSet(nets), [of(nets["actor"])]


def tied() -> tuple[Any, list[Any]]:
    model = nn.ModuleDict({"embedding": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["embedding"].weight
    return SharedSet(model), [of(model["head"])]


def unfrozen_later() -> tuple[Any, list[Any]]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    return SharedSet(model, "all"), [of(model)]


CASES = [
    (plain, ""),
    (target, "['q_net_target.*']"),
    (target_is_private, ""),
    (head_in_the_loss, "tensors of shape (3, 6), (3,)"),
    (head_is_joined, ""),
    (one_of_two, "['critic.*']"),
    (tied, ""),
    (unfrozen_later, ""),
]


@pytest.mark.parametrize(("program", "expected"), CASES)
def test_both_differences_are_found(program: Callable[[], tuple[Any, list[Any]]], expected: str) -> None:
    found = " ".join(" ".join(one) for one in differences(*program()))
    assert expected in found
    assert bool(found) is bool(expected)


def test_the_line_that_mends_it_does() -> None:
    with pytest.raises(OptimizerDiffers, match=r"join\(private=\['q_net_target.\*'\]\)"):
        Compared(*target())
    Compared(*target_is_private())
    with pytest.raises(OptimizerDiffers, match=r"shape \(3, 6\), \(3,\); join\(\[model, loss\]\)"):
        Compared(*head_in_the_loss())
    Compared(*head_is_joined())


@pytest.mark.parametrize(("program", "is_said"), [(target, True), (head_in_the_loss, True), (plain, False)])
def test_of_an_optimizer_that_is_seen_later_it_is_said_once_after_some_steps(
    program: Callable[[], tuple[Any, list[Any]]], is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    chosen, (optimizer,) = program()
    compared = Compared(chosen)
    compared.has(optimizer)
    with caplog.at_level(logging.WARNING):
        for _ in range(3 * LOOK_AT_STEP):
            compared.stepped(Log("cat"))
    assert caplog.text.count("OPTIMIZER_DIFFERS") == is_said
    assert is_said is any(line in caplog.text for line in ("join(private=['q_net_target.*'])", "join([model, loss])"))


def test_what_another_optimizer_trains_is_no_difference(caplog: pytest.LogCaptureFixture) -> None:
    """`follow` sees one of them; the others' parameters have gradients."""
    chosen, (optimizer,) = one_of_two()
    for parameter in chosen.shared.values():
        parameter.grad = torch.zeros_like(parameter)
    compared = Compared(chosen)
    compared.has(optimizer)
    for _ in range(LOOK_AT_STEP):
        compared.stepped(Log("cat"))
    assert not caplog.text


MODEL = nn.Linear(8, 8)


def made(name: str, *bases: str, parameters: Any = (MODEL.weight, MODEL.bias)) -> Any:
    """An optimizer of some other maker, as far as its names tell."""
    above: tuple[type, ...] = (torch.optim.Optimizer,)
    for base in bases:
        above = (type(base, above, {}),)
    return type(name, above, {})(list(parameters), {"lr": 0.1})


class Wrapped:
    """As accelerate and Lightning wrap it."""

    def __init__(self, name: str, optimizer: Any) -> None:
        setattr(self, name, optimizer)
        self.param_groups = optimizer.param_groups


def adamw() -> Any:
    return torch.optim.AdamW(MODEL.parameters(), fused=True)


@pytest.mark.parametrize(
    ("optimizers", "inner"),
    [
        ([], ""),
        ([adamw()], ADAM),
        ([torch.optim.NAdam(MODEL.parameters())], ADAM),
        ([torch.optim.SGD(MODEL.parameters(), momentum=0.9)], OTHER),
        ([torch.optim.Adagrad(MODEL.parameters())], OTHER),
        ([made("AdamW8bit", "Optimizer8bit", "Optimizer2State")], ADAM),
        ([made("FusedAdam")], ADAM),
        ([made("AdamWScheduleFree")], ADAM),
        ([made("MyOwn", "AdamW")], ADAM),
        ([made("Lion")], OTHER),
        ([made("Muon")], OTHER),
        ([made("SingleDeviceMuonWithAuxAdam")], OTHER),
        ([Wrapped("optimizer", adamw())], ADAM),
        ([Wrapped("_optimizer", Wrapped("optimizer", adamw()))], ADAM),
        ([Wrapped("optimizer", made("Lion"))], OTHER),
        ([made("Muon", parameters=[MODEL.weight]), made("AdamW", parameters=[MODEL.bias])], OTHER),
        ([made("SGD", parameters=[MODEL.bias]), made("AdamW", parameters=[MODEL.weight])], ADAM),
    ],
)
def test_what_steps_most_of_the_model_is_known_by_its_name(optimizers: list[Any], inner: str) -> None:
    assert inner_of(optimizers) == inner


LOG = Log("cat")


class Counting:
    def __init__(self, budget: int = 100) -> None:
        self.told: list[tuple[int | None, int | None]] = []
        self.budget = budget

    @property
    def done(self) -> bool:
        return len(self.told) >= self.budget

    def step(self, tokens: int | None = None, *, samples: int | None = None) -> None:
        self.told.append((tokens, samples))


def optimizer(kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> torch.optim.Optimizer:
    return kind([nn.Parameter(torch.ones(3))])


@pytest.mark.parametrize(
    ("amounts", "told"),
    [((None, 64), (None, 64)), ((32, None), (32, None)), ((None, lambda: 5), (None, 5))],
)
def test_each_step_of_the_optimizer_is_a_step(amounts: Any, told: Any) -> None:
    learner, followed = Counting(), optimizer()
    following = Following(learner, followed, *amounts, LOG)
    followed.step()
    followed.step()
    assert learner.told == [told, told]
    following.remove()
    followed.step()
    assert len(learner.told) == 2


def test_the_end_of_the_run_is_said_once(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    learner, followed = Counting(budget=2), optimizer()
    Following(learner, followed, None, 1, LOG)
    with caplog.at_level("WARNING", "diloco"):
        for _ in range(2):
            followed.step()
        assert not caplog.records, "the loop may end now"
        for _ in range(2):
            followed.step()
    assert len(learner.told) == 4, "the loop is not ours to end"
    assert [record.getMessage().count("in no version") for record in caplog.records] == [1]
