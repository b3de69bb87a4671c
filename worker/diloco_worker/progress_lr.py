"""Learning rates that follow the progress of the run, not the steps of one learner.

Progress is global: merged tokens over the budget. So a learner that joins late, or is slower than others, has the same
rate as they have, and the rate has come down when the run ends.
"""

from __future__ import annotations

import math
from typing import Any, Literal, Protocol, TypeAlias, get_args

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from diloco_common.errors import ConfigError, WrongCall, shown

Shape: TypeAlias = Literal["cosine", "linear", "wsd", "constant"]
SHAPES: tuple[Shape, ...] = get_args(Shape)
WARMUP_FLOOR = 0.1
"""The warm-up starts at this share of the rate, because progress stays at 0 until the first round is merged."""
WARMUP_STEPS = 20
"""An optimizer without moments rises to the rate over this many steps."""
DECAY = 0.2
"""The share of the run in which "wsd" comes down."""


class RunProgress(Protocol):
    """What a rate follows. A `Learner` is one."""

    @property
    def fraction(self) -> float:
        """Merged tokens over the budget, 0 to 1."""

    @property
    def tokens_budget(self) -> int:
        """0: the run has no end."""


def share(shape: Shape, fraction: float, warmup: float, final: float, decay: float = DECAY) -> float:
    """What part of the rate to use at a progress of `fraction`, 0 to 1.

    Rises up to 1 at progress `warmup`. Then "cosine" and "linear" come down to `final` at progress 1, "wsd" (warm-up,
    stable, decay) stays at 1 and comes down linearly in the last `decay` of it, and "constant" stays.
    """
    if fraction < warmup:
        return max(WARMUP_FLOOR, fraction / warmup)
    if warmup >= 1 or shape == "constant":
        return 1.0
    begins = max(warmup, 1 - decay) if shape == "wsd" else warmup
    done = min(max(0.0, (fraction - begins) / (1 - begins)), 1.0) if begins < 1 else 0.0
    down = 0.5 * (1 - math.cos(math.pi * done)) if shape == "cosine" else done
    return 1 - (1 - final) * down


class ProgressLR(LRScheduler):
    """Sets the rate by the global progress of the run, at each `step()`: once per inner step, as others of torch. What
    others in a chain have made of the rate stays, and groups that are added later follow, too.

    A run without a budget has no progress: the rate stays. Each process begins with a rise over 20 steps, for the
    optimizer has no moments yet; where it is resumed, `load_state_dict` goes on instead.
    """

    def __init__(
        self, optimizer: Optimizer, learner: RunProgress, shape: Shape = "cosine", *, warmup: float = 0.02,
        final: float = 0.1,
    ) -> None:  # fmt: skip
        """`warmup`: the share of the run, from 0 to 1, in which the rate rises. `final`: the share of the rate that is
        left at the end. The rate itself is the optimizer's. Raises ConfigError, and WrongCall."""
        if not isinstance(optimizer, Optimizer):
            raise WrongCall(f"ProgressLR: the optimizer is {shown(optimizer)}: give one of torch.optim")
        if not hasattr(learner, "fraction"):
            raise WrongCall(f"ProgressLR: the learner is {shown(learner)}: give what join returned")
        if shape not in SHAPES:
            raise ConfigError(f"ProgressLR: {shape!r} is none of {', '.join(SHAPES)}")
        if not (0 <= warmup <= 1 and 0 <= final <= 1):
            raise ConfigError(f"ProgressLR: warmup={warmup} and final={final} are shares, from 0 to 1")
        if (compared := getattr(learner, "compared", None)) is not None:
            compared.has(optimizer)
        self._learner = learner
        self._shape: Shape = shape
        self._warmup, self._final = warmup, final
        self._by_others: list[float] = []
        self._set: list[float | Any] = []
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Any]:
        """Of each group of the optimizer."""
        self._look_at_others()
        return self._rates()

    def _rates(self) -> list[float | Any]:
        rise = min(1.0, (self.last_epoch + 1) / WARMUP_STEPS)
        part = share(self._shape, self._learner.fraction, self._warmup, self._final)
        now = rise * (part if self._learner.tokens_budget else 1.0)
        self._set = [base * now * others for base, others in zip(self.base_lrs, self._by_others, strict=True)]
        return list(self._set)

    def _look_at_others(self) -> None:
        """Groups that were added since, and what others in a chain have made of the rates."""
        groups = self.optimizer.param_groups
        for group in groups[len(self.base_lrs) :]:
            self.base_lrs.append(group.setdefault("initial_lr", group["lr"]))
        self._by_others += [1.0] * (len(groups) - len(self._by_others))
        for i, group in enumerate(groups):
            rate = group["lr"]
            if isinstance(rate, Tensor):  # reading it would wait for the device
                continue
            if i >= len(self._set):  # nothing of it is ours yet
                self._by_others[i] = rate / self.base_lrs[i] if self.base_lrs[i] else 1.0
            elif self.last_epoch == 0:  # its turn in a SequentialLR begins
                self._by_others[i] = 1.0
            elif rate != self._set[i] and self._set[i]:
                self._by_others[i] *= rate / self._set[i]

    def state_dict(self) -> dict[str, Any]:
        """Without the learner, which has a state of its own."""
        return {key: value for key, value in super().state_dict().items() if key not in ("_learner", "_set")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on where the other left off: the next step has the rate of now, and not that of a first step."""
        super().load_state_dict(state_dict)
        self._last_lr = self._rates()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = rate


class Followed:
    """A schedule of the user's own that is a function of a step: it is asked for the one that is as far in `steps` as
    the run is. It begins to rise with the steps of this process: until something is merged, the run is nowhere."""

    def __init__(self, schedule: LambdaLR, learner: RunProgress, steps: int) -> None:
        self._schedule, self._learner, self._steps = schedule, learner, steps
        parts = schedule.lr_lambdas
        self.rise = next((at for at in range(steps) if all(part(at + 1) <= part(at) for part in parts)), steps)
        """Steps until the rate falls."""

    def set(self, step: int) -> None:
        """Before step number `step` of this process, from 0."""
        at, schedule = max(round(self._learner.fraction * self._steps), min(step, self.rise)), self._schedule
        rates = [base * part(at) for base, part in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
        for group, rate in zip(schedule.optimizer.param_groups, rates, strict=False):  # some may be added later
            group["lr"] = rate
        schedule._last_lr = rates  # what a Trainer logs


def followed(schedule: Any, learner: Any, steps: float) -> Followed | None:
    """`steps`: how many the schedule is made for; inf: without end. None, and a warning: it cannot follow the run."""
    log, name = learner.telemetry.log, type(schedule).__name__
    if not learner.tokens_budget or not isinstance(schedule, LambdaLR) or not 0 < steps < math.inf:
        log.warning(
            "the rate follows the steps of this Trainer, not the run", schedule=name, budget=learner.tokens_budget
        )
        return None
    made = Followed(schedule, learner, int(steps))
    log.event("the rate follows the run", schedule=name, warmup_steps=made.rise)
    return made
