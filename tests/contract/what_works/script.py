"""A training script in small that joins real shards beside two partners, and what must be true of every one that works.

    a version holds what the script has trained       version = anchor + mean(progress of all)
    a version is in the script's model                 what came from the partners, too
    the script's next step begins there                nothing that it keeps puts the old values back
    finish() leaves the global values                  those that an observer pulls

A partner moves every shared parameter by JUMP in a step. That is far more than a step of the script, so nobody can
overlook it, and a script that undoes it makes a step that is too long.
"""

from __future__ import annotations

import copy
import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import diloco_worker
from diloco_worker import Learner
from diloco_worker.core.shared_set import Models, SharedSet, as_module
from diloco_worker.global_model import pull_global_model
from diloco_worker.shell import island

JUMP = 0.125
"""Exact in bfloat16."""
ROUNDS = 2
SAMPLES = 8
PATIENCE_S = 10.0


@dataclass
class Script:
    """What the author of a training script has written, in parts that the harness calls in their order."""

    model: Models
    step: Callable[[], Tensor | float | None]
    """One pass of the loop: forward, backward, optimizer. Gives the loss."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of `join`."""
    joined: Callable[[Learner], None] = lambda learner: None
    """Called once it has joined."""
    between: Callable[[Learner], None] = lambda learner: None
    """Called between two steps, after each round."""
    plain: Callable[[], Models] | None = None
    """The same model for the partners; None: a deep copy of it."""
    is_whole: bool = False
    """What is pulled is all that `load_state_dict` wants."""
    exact: float = 1e-5
    """How far a value may be off: parameters in half precision round."""


@dataclass
class Ground:
    """Where a case runs: shards that are there already, and a folder."""

    start: Callable[..., str]
    """Starts two shards with these settings of `sync`; gives their addresses."""
    folder: Path

    def __post_init__(self) -> None:
        self.shards = self.start()

    def trains(self, script: Script) -> None:
        """It trains beside partners, and all that the module says is true. Raises what `join` and `step` raise."""
        make = script.plain or (lambda: copy.deepcopy(script.model))
        partners = [Partner(make(), chosen(script.options)) for _ in range(2)]
        alike = {key: script.options[key] for key in SAME if key in script.options}
        if script.options.get("island") == "alone":
            alike["island"] = "alone"
        with self.learner(script.model, "script", **script.options) as learner, ExitStack() as joined:
            script.joined(learner)
            for number, partner in enumerate(partners):
                partner.learner = joined.enter_context(self.learner(partner.model, f"partner-{number}", **alike))
            for _ in range(ROUNDS):
                self._round(script, learner, partners)
                script.between(learner)
            joined.close()
            learner.step(samples=SAMPLES, loss=script.step())
            assert learner.finish()
        final = values(script.model, script.options)
        found = self.pulled()
        assert found.keys() >= final.keys()
        for name, theta in final.items():
            assert torch.equal(theta.cpu(), found[name].to(theta.dtype)), name
        if script.is_whole:
            as_module(partners[0].model).load_state_dict(found, strict=True)

    def pulled(self) -> Mapping[str, Tensor]:
        """What the shards hold. In a thread, as the caller may run in an event loop."""
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(pull_global_model, self.shards.split(",")).result().tensors

    def _round(self, script: Script, learner: Learner, partners: list[Partner]) -> None:
        anchor = values(script.model, script.options)
        loss = script.step()
        if loss is not None:
            assert torch.isfinite(torch.as_tensor(loss).sum())
        trained = values(script.model, script.options)
        progress = {name: trained[name].float() - anchor[name].float() for name in anchor}
        moved = max(float(of.abs().max()) for of in progress.values() if of.numel())
        assert moved > 5 * script.exact, f"the script trains too little to be seen: {moved}"
        assert moved < JUMP / 2, f"a step of {moved}: the rate is too large, or the step undoes the version before"
        learner.step(samples=SAMPLES, loss=loss)
        for partner in partners:
            partner.step()
        may_be_off = script.exact
        if island.is_together(script.options.get("island")):
            learner.step(samples=0)  # an island's step counts at the next one, which makes its share a little smaller
            may_be_off = JUMP / 5
        due = {name: anchor[name].float() + (of + 2 * JUMP) / 3 for name, of in progress.items()}

        def wrong() -> dict[str, float]:
            for one in (learner, *(partner.learner for partner in partners)):
                assert one is not None
                one.poll(0.002)
            merged = values(script.model, script.options)
            far = {name: float((merged[name].float() - due[name]).abs().max()) for name in due if due[name].numel()}
            return {name: off for name, off in far.items() if not off <= may_be_off}

        deadline = time.monotonic() + PATIENCE_S
        while (off := wrong()) and time.monotonic() < deadline:
            pass
        assert not off, f"what the version must have brought is not in the model; it is off by {off}"

    def is_undone(self, script: Script) -> bool:
        """Versions come every few steps, and the script takes them back. Whether anybody notices."""
        self.shards = self.start(sync_every=12)
        partners = [Partner(copy.deepcopy(script.model), {}) for _ in range(2)]
        with self.learner(script.model, "script", **script.options) as learner, ExitStack() as joined:
            for number, partner in enumerate(partners):
                partner.learner = joined.enter_context(self.learner(partner.model, f"partner-{number}"))
            for _ in range(120):
                learner.step(samples=SAMPLES, loss=script.step())
                for partner in partners:
                    partner.step(JUMP / 4)
                for one in (learner, *(partner.learner for partner in partners)):
                    assert one is not None
                    one.poll(0.01)
            return bool(learner.status()["versions_undone"])

    @contextmanager
    def learner(self, model: Models, learner_id: str, **options: Any) -> Iterator[Learner]:
        joined = diloco_worker.join(self.shards, model, learner_id=learner_id, wait_s=20.0, log=None, **options)
        try:
            yield joined
        finally:
            joined.close()


@dataclass
class Partner:
    """Another learner of the run. Two of them: a contribution that is longer than the median of its round is cut."""

    model: Models
    names: dict[str, Any]
    """Which of its parameters are shared."""
    learner: Learner | None = None

    @torch.no_grad()
    def step(self, jump: float = JUMP) -> None:
        assert self.learner is not None
        for theta in SharedSet(self.model, **self.names).shared.values():
            theta.add_(jump)
        self.learner.step(samples=SAMPLES)


Case: TypeAlias = Callable[[Ground], None]
SAME = ("shared", "private", "frozen", "mean_merge")
"""Options of `join` in which all learners agree."""


class Cases(dict[str, Case]):
    """The lines of one table of the page: what their first column says -> what is run."""

    def __call__(self, line: str) -> Callable[[Case], Case]:
        def add(case: Case) -> Case:
            assert line not in self, line
            self[line] = case
            return case

        return add

    def script(self, line: str) -> Callable[[Callable[[], Script]], Callable[[], Script]]:
        """For a case that is no more than a script."""

        def add(make: Callable[[], Script]) -> Callable[[], Script]:
            self(line)(lambda ground: ground.trains(make()))
            return make

        return add

    def joins(self, line: str, make: Callable[[], Any]) -> None:
        """For a case that is no more than a model, which `join` refuses."""

        def case(ground: Ground) -> None:
            with ground.learner(make(), "script"):
                pass

        self(line)(case)


def chosen(options: dict[str, Any]) -> dict[str, Any]:
    return {key: options[key] for key in ("shared", "private") if key in options}


def values(model: Models, options: dict[str, Any]) -> dict[str, Tensor]:
    """Copies of the shared parameters, by plain name."""
    return {name: whole(theta.detach()).clone() for name, theta in SharedSet(model, **chosen(options)).shared.items()}


def whole(theta: Tensor) -> Tensor:
    return theta.full_tensor() if hasattr(theta, "full_tensor") else theta


DEVICE = torch.device(os.environ.get("WHAT_WORKS_ON", "cpu"))
"""Where scripts train; `make gpu` names a card."""
SEED = int(os.environ.get("WHAT_WORKS_SEED", "0"))
X = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(SEED + 1)).to(DEVICE)
Y = X[:, :2].sin()
RATE = 0.02


def small(seed: int = SEED) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).to(DEVICE)


def loss_of(model: Callable[..., Tensor]) -> Tensor:
    return (model(X).float() - Y).square().mean()


def loop(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, loss: Callable[[], Tensor] | None = None,
    after: Callable[[], object] = lambda: None,
) -> Callable[[], Tensor]:  # fmt: skip
    """The usual step of a loop, by SGD unless another optimizer is given. `after` is called after the optimizer."""
    given = optimizer or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], RATE)

    def step() -> Tensor:
        given.zero_grad()
        found = loss_of(model) if loss is None else loss()
        found.backward()
        given.step()
        after()
        return found

    return step


def usual(model: nn.Module, **more: Any) -> Script:
    """A script with the usual loop around this model."""
    return Script(model, loop(model), **more)


def rest() -> None:
    """Let go of models and threads of the case before. What is left need not be looked at again: 0.2 s a time."""
    gc.collect()
    gc.freeze()
