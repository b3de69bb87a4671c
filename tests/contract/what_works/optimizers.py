"""Optimizers of torch, each in a loop as its users write it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from optimizers import Lookahead, Make, OnMasters, ScheduleFree
from what_works.script import RATE, Cases, Ground, Script, X, Y, loop, loss_of, small

CASES = Cases()

USUAL: dict[str, Make] = {
    "SGD": partial(torch.optim.SGD, lr=RATE),
    "SGD with momentum, Nesterov, weight decay": partial(
        torch.optim.SGD, lr=RATE, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "Adam, with amsgrad": partial(torch.optim.Adam, lr=RATE, amsgrad=True),
    "AdamW": partial(torch.optim.AdamW, lr=RATE),
    "AdamW(fused=True)": partial(torch.optim.AdamW, lr=RATE, fused=True),
    "AdamW(foreach=True)": partial(torch.optim.AdamW, lr=RATE, foreach=True),
    "NAdam": partial(torch.optim.NAdam, lr=RATE),
    "RAdam": partial(torch.optim.RAdam, lr=RATE),
    "Adamax": partial(torch.optim.Adamax, lr=RATE),
    "Adadelta": torch.optim.Adadelta,
    "Adagrad": partial(torch.optim.Adagrad, lr=RATE),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.003),
    "Rprop": partial(torch.optim.Rprop, lr=0.003),
    "ASGD": partial(torch.optim.ASGD, lr=RATE),
    "Adafactor": torch.optim.Adafactor,
}


def trains_with(make: Make, ground: Ground) -> None:
    model = small()
    ground.trains(Script(model, loop(model, make(model.parameters()))))


for _line, _make in USUAL.items():
    CASES(_line)(partial(trains_with, _make))


@CASES.script("Muon for matrices, AdamW for the rest")
def muon() -> Script:
    model = small()
    matrices = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=RATE)
    rest = torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=RATE)

    def step() -> Tensor:
        loss = loss_of(model)
        loss.backward()
        for optimizer in (matrices, rest):
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return Script(model, step)


@CASES.script("SparseAdam with Embedding(sparse=True)")
def sparse_adam() -> Script:
    torch.manual_seed(0)
    model = nn.Embedding(5, 2, sparse=True)
    rows = torch.tensor([0, 2, 3, 3])
    return Script(
        model, loop(model, torch.optim.SparseAdam(model.parameters(), lr=RATE), lambda: model(rows).square().mean())
    )


@CASES.script('LBFGS with line_search_fn="strong_wolfe", and others with a closure')
def lbfgs() -> Script:
    model = small()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=1, max_eval=2, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    return Script(model, lambda: optimizer.step(closure))


@CASES.script("several parameter groups, one added later")
def groups() -> Script:
    model = small()
    optimizer = torch.optim.SGD([{"params": model[0].parameters()}], lr=RATE)
    return Script(
        model, loop(model, optimizer),
        joined=lambda learner: optimizer.add_param_group({"params": model[2].parameters(), "lr": RATE / 2}),
    )  # fmt: skip


@CASES.script("an optimizer made after join")
def made_later() -> Script:
    model, optimizers = small(), list[Optimizer]()
    return Script(
        model, lambda: loop(model, optimizers[0])(),
        joined=lambda learner: optimizers.append(torch.optim.AdamW(model.parameters(), lr=RATE)),
    )  # fmt: skip


@CASES.script("load_state_dict of the optimizer, in the middle")
def state_loaded() -> Script:
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    return Script(
        model, loop(model, optimizer), between=lambda learner: optimizer.load_state_dict(optimizer.state_dict())
    )


@CASES.script("the step inside backward (a gradient hook)")
def in_backward() -> Script:
    model = small()
    each = {p: torch.optim.SGD([p], lr=RATE) for p in model.parameters()}

    def update(parameter: nn.Parameter) -> None:
        each[parameter].step()
        each[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)

    def step() -> Tensor:
        loss = loss_of(model)
        loss.backward()
        return loss

    return Script(model, step)


def by_hand(update: Callable[[Any], None]) -> Script:
    model = small()

    def step() -> Tensor:
        loss = loss_of(model)
        model.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            update(parameter)
        return loss

    return Script(model, step)


@torch.no_grad()
def in_place(parameter: Any) -> None:
    parameter -= RATE * parameter.grad


def with_new_memory(parameter: Any) -> None:
    parameter.data = parameter.data - RATE * parameter.grad


CASES.script("an update by hand: p -= lr * p.grad")(partial(by_hand, in_place))
CASES.script("an update by hand: p.data = p.data - lr * p.grad")(partial(by_hand, with_new_memory))


@CASES.script("gradient accumulation and clipping")
def accumulated() -> Script:
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)

    def step() -> Tensor:
        for half in (slice(0, 4), slice(4, 8)):
            loss = (model(X[half]) - Y[half]).square().mean() / 2
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Script(model, step)


@CASES.script("torch's schedulers")
def scheduled() -> Script:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=RATE, total_steps=10)
    return Script(model, loop(model, optimizer, after=schedule.step))


@CASES.script("ProgressLR")
def progress() -> Script:
    import diloco_worker

    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    made: list[Any] = []
    return Script(
        model, loop(model, optimizer, after=lambda: made[0].step()),
        joined=lambda learner: made.append(diloco_worker.ProgressLR(optimizer, learner, "cosine")),
    )  # fmt: skip


@CASES("companions= with AdamW, Adam, Muon or SGD")
def averaged(ground: Ground) -> None:
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    with ground.learner(model, "script", companions=optimizer) as learner:
        step = loop(model, optimizer)
        before = [p.detach().clone() for p in model.parameters()]
        learner.step(samples=8, loss=step())
        learner.poll(0.05)
        assert learner.finish()
    assert all(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


@CASES("companions= with another optimizer")
def averaged_another(ground: Ground) -> None:
    model = small()
    with ground.learner(model, "script", companions=torch.optim.Adagrad(model.parameters())):
        pass


@CASES.script("two models, two optimizers (a GAN)")
def gan() -> Script:
    torch.manual_seed(0)
    generator, judge = nn.Linear(3, 4), nn.Linear(4, 1)
    of_generator = torch.optim.Adam(generator.parameters(), lr=RATE)
    of_judge = torch.optim.Adam(judge.parameters(), lr=RATE)
    noise = torch.randn(8, 3, generator=torch.Generator().manual_seed(2))

    def step() -> Tensor:
        of_judge.zero_grad()
        false, true = judge(generator(noise).detach()), judge(X)
        loss = nn.functional.softplus(false).mean() + nn.functional.softplus(-true).mean()
        loss.backward()
        of_judge.step()
        of_generator.zero_grad()
        nn.functional.softplus(-judge(generator(noise))).mean().backward()
        of_generator.step()
        return loss

    return Script({"generator": generator, "judge": judge}, step)


MASTER: Make = partial(torch.optim.AdamW, lr=0.03)


def with_masters(model: nn.Module, optimizer: OnMasters) -> Callable[[], Tensor]:
    def step() -> Tensor:
        model.zero_grad()
        loss = loss_of(lambda x: model(x.bfloat16()))
        loss.backward()
        optimizer.step()
        return loss

    return step


@CASES.script("float32 masters beside bfloat16 weights, with masters=")
def masters() -> Script:
    model = small().bfloat16()
    optimizer = OnMasters(model.parameters(), MASTER)
    return Script(model, with_masters(model, optimizer), {"masters": optimizer}, exact=4e-3)


@CASES("float32 masters beside bfloat16 weights, without masters=")
def masters_unsaid(ground: Ground) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2)).bfloat16()  # of fewer, no tensor is watched
    assert ground.is_undone(Script(model, with_masters(model, OnMasters(model.parameters(), MASTER))))


class WithTarget(nn.Module):
    """As agents of libraries have one: it requires gradients, and gets none."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small()
        self.target = copy.deepcopy(self.net)


@CASES.script('a target network that requires gradients, with private=["target.*"]')
def target() -> Script:
    model = WithTarget()
    optimizer = torch.optim.SGD(model.net.parameters(), lr=RATE)
    step = loop(model.net, optimizer, after=lambda: model.target.load_state_dict(model.net.state_dict()))
    return Script(model, step, {"private": ["target.*"], "optimizer": optimizer})


@CASES("a shared target network, with optimizer=")
def target_unsaid(ground: Ground) -> None:
    model = WithTarget()
    optimizer = torch.optim.SGD(model.net.parameters(), lr=RATE)
    ground.trains(Script(model, loop(model.net, optimizer), {"optimizer": optimizer}))


@CASES.script("a head in the loss")
def head_in_loss() -> Script:
    both = nn.ModuleList([small(), nn.Linear(2, 1)])
    optimizer = torch.optim.SGD(both.parameters(), lr=RATE)
    step = loop(both, optimizer, lambda: loss_of(lambda x: both[1](both[0](x)).expand(-1, 2)))
    return Script([both[0], both[1]], step, {"optimizer": optimizer})


@CASES("a head in the loss that is not joined, with optimizer=")
def head_unsaid(ground: Ground) -> None:
    model, loss = small(), nn.Linear(2, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=RATE)
    ground.trains(Script(model, loop(model, optimizer), {"optimizer": optimizer}))


@CASES.script("Lookahead, with masters=")
def lookahead() -> Script:
    model = small()
    optimizer = Lookahead(model.parameters(), USUAL["SGD"], k=2)
    return Script(model, loop(model, optimizer), {"masters": optimizer})


@CASES.script("schedule-free, with masters=")
def schedule_free() -> Script:
    model = small()
    optimizer = ScheduleFree(model.parameters(), RATE)
    optimizer.train()
    return Script(model, loop(model, optimizer), {"masters": optimizer})


@CASES.script("SAM: two steps, p.data = old")
def sam() -> Script:
    model = small()
    inner = torch.optim.SGD(model.parameters(), lr=RATE)

    def step() -> Tensor:
        loss = loss_of(model)
        loss.backward()
        old = [p.data for p in model.parameters()]
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.data = parameter.data + 0.05 * parameter.grad
        inner.zero_grad()
        loss_of(model).backward()
        for parameter, values in zip(model.parameters(), old, strict=True):
            parameter.data = values
        inner.step()
        inner.zero_grad()
        return loss

    return Script(model, step)
