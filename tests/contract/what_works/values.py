"""What scripts do to a model between two steps."""

from __future__ import annotations

import copy
import io
import pickle

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from diloco_worker import Learner
from what_works.script import RATE, Cases, Ground, Script, loop, loss_of, small, usual

CASES = Cases()


@CASES.script("an average of the weights beside the model (AveragedModel)")
def averaged() -> Script:
    model = small()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    return Script(model, loop(model, after=lambda: ema.update_parameters(model)))


@CASES.script("an average swapped in to evaluate, and back (p.data.copy_)")
def swapped() -> Script:
    model = small()
    ema = [torch.zeros_like(p) for p in model.parameters()]

    def evaluate(learner: Learner) -> None:
        kept = [p.detach().clone() for p in model.parameters()]
        for parameter, average in zip(model.parameters(), ema, strict=True):
            parameter.data.copy_(average)
        loss_of(model)
        for parameter, old in zip(model.parameters(), kept, strict=True):
            parameter.data.copy_(old)

    return usual(model, between=evaluate)


@CASES.script("an average swapped in by load_state_dict, and back")
def swapped_by_loading() -> Script:
    model = small()
    average = copy.deepcopy(model.state_dict())

    def evaluate(learner: Learner) -> None:
        kept = copy.deepcopy(model.state_dict())
        model.load_state_dict(average)
        loss_of(model)
        model.load_state_dict(kept)

    return usual(model, between=evaluate)


@CASES.script("learner.values(ema), learner.global_values() and learner.global_values(average=True)")
def other_values() -> Script:
    model = small()
    ema = AveragedModel(model)

    def evaluate(learner: Learner) -> None:
        for block in (learner.values(ema), learner.global_values(), learner.global_values(average=True)):
            with block:
                loss_of(model)

    return usual(model, between=evaluate)


@CASES("learner.restore(best)")
def restored(ground: Ground) -> None:
    model = small()
    best = copy.deepcopy(model.state_dict())
    step = loop(model)
    with ground.learner(model, "script") as learner:
        learner.step(samples=8, loss=step())
        learner.restore(best)
        assert all(torch.equal(values, best[name]) for name, values in model.state_dict().items())
        learner.step(samples=8, loss=step())
        assert learner.finish()


@CASES("load_state_dict after join")
def loaded(ground: Ground) -> None:
    model = small()
    best = copy.deepcopy(model.state_dict())
    ground.trains(usual(model, between=lambda learner: model.load_state_dict(best)))


@CASES("load_state_dict(assign=True) after join")
def assigned(ground: Ground) -> None:
    model = small()
    best = copy.deepcopy(model.state_dict())
    with ground.learner(model, "script") as learner:
        model.load_state_dict(best, assign=True)
        learner.step(samples=8)


@CASES("model.half(), model.to(another dtype) or share_memory() after join")
def converted(ground: Ground) -> None:
    model = small()
    with ground.learner(model, "script") as learner:
        model.bfloat16()
        learner.step(samples=8)


@CASES.script("parameter.data = another tensor after join")
def other_memory() -> Script:
    model = small()

    def replace(learner: Learner) -> None:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()

    return usual(model, between=replace)


@CASES("a layer tied or made anew after join")
def tied_later(ground: Ground) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))

    def tie(learner: Learner) -> None:
        model[1].weight = model[0].weight

    ground.trains(usual(model, between=tie))


@CASES.script("state_dict, torch.save, pickle, a deep copy of the model")
def saved() -> Script:
    model = small()

    def save(learner: Learner) -> None:
        torch.save(model.state_dict(), io.BytesIO())
        torch.save(model, whole := io.BytesIO())
        with torch.serialization.safe_globals([nn.Sequential, nn.Linear, nn.Tanh]):  # as without a learner
            torch.load(io.BytesIO(whole.getvalue())).load_state_dict(model.state_dict())
        pickle.loads(pickle.dumps(model)).load_state_dict(model.state_dict())
        copied = copy.deepcopy(model)
        copied.load_state_dict(model.state_dict())
        nn.init.zeros_(next(copied.parameters()))

    return usual(model, between=save)


@CASES.script("train() and eval(), no_grad, inference_mode, zero_grad")
def modes() -> Script:
    model = small()

    def evaluate(learner: Learner) -> None:
        model.eval()
        with torch.no_grad():
            loss_of(model)
        with torch.inference_mode():
            loss_of(model)
        model.train().zero_grad()

    return usual(model, between=evaluate)


@CASES.script("weights clamped or projected in place")
def clamped() -> Script:
    model = small()

    @torch.no_grad()
    def clamp() -> None:
        for parameter in model.parameters():
            parameter.clamp_(-2, 2)

    return Script(model, loop(model, after=clamp), {"after_version": clamp})


@CASES.script('layers that are frozen and unfrozen, with shared="all"')
def thawed() -> Script:
    model = small()
    model[2].requires_grad_(False)  # type: ignore[index,operator]
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    return Script(
        model, loop(model, optimizer), {"shared": "all"},
        between=lambda learner: model[2].requires_grad_(True),  # type: ignore[index,operator]
    )  # fmt: skip


@CASES("layers frozen or unfrozen after join, without shared=")
def thawed_unsaid(ground: Ground) -> None:
    model = small()
    ground.trains(usual(model, between=lambda learner: model[0].requires_grad_(False)))  # type: ignore[index,operator]


@CASES("a layer added or removed after join")
def added(ground: Ground) -> None:
    model = small()
    with ground.learner(model, "script") as learner:
        model.append(nn.Linear(2, 2))  # type: ignore[operator]
        learner.step(samples=8)


@CASES("a step inside global_values() or values()")
def inside(ground: Ground) -> None:
    with ground.learner(small(), "script") as learner, learner.global_values():
        learner.step(samples=8)


@CASES("a step after finish() or close()")
def ended(ground: Ground) -> None:
    with ground.learner(small(), "script") as learner:
        learner.finish()
        learner.step(samples=8)
