"""Learning rates that follow the progress of the run, not the steps of one learner.

Progress is merged tokens over the budget, the same for all learners. So a learner that joins late or is slower has the
same rate as the others, and the rate has come down when the run ends.
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
"""Share of the rate at which the warm-up starts: progress stays at 0 until the first round is merged."""
WARMUP_STEPS = 20
"""Steps in which the rate rises in each process, since its optimizer has no moments yet."""
DECAY = 0.2
"""Share of the run in which "wsd" comes down."""


class RunProgress(Protocol):
    """The progress that a rate follows. A `Learner` is one."""

    @property
    def fraction(self) -> float:
        """Merged tokens over the budget, 0 to 1."""

    @property
    def tokens_budget(self) -> int:
        """0: the run has no end."""


def share(shape: Shape, fraction: float, warmup: float, final: float) -> float:
    """The share of the rate to use at a progress of `fraction`, 0 to 1.

    It rises to 1 at progress `warmup`. Then "cosine" and "linear" come down to `final` at progress 1, "wsd" (warm-up,
    stable, decay) stays at 1 and comes down linearly in the last `DECAY`, and "constant" stays.
    """
    if fraction < warmup:
        return max(WARMUP_FLOOR, fraction / warmup)
    if warmup >= 1 or shape == "constant":
        return 1.0
    begins = max(warmup, 1 - DECAY) if shape == "wsd" else warmup
    done = min(max(0.0, (fraction - begins) / (1 - begins)), 1.0) if begins < 1 else 0.0
    down = 0.5 * (1 - math.cos(math.pi * done)) if shape == "cosine" else done
    return 1 - (1 - final) * down


class ProgressLR(LRScheduler):
    """Sets the rate by the global progress of the run. Call `step()` once per inner step, as with torch's schedulers.

    Changes that other schedulers in a chain made to the rate are kept, and groups added later are included. Without a
    budget there is no progress, and the rate stays. In each process the rate rises over the first 20 steps, since the
    optimizer has no moments yet; `load_state_dict` continues without that rise.
    """

    def __init__(
        self, optimizer: Optimizer, learner: RunProgress, shape: Shape = "cosine", *, warmup: float = 0.02,
        final: float = 0.1,
    ) -> None:  # fmt: skip
        """`warmup`: share of the run, 0 to 1, in which the rate rises. `final`: share of the rate left at the end. The
        full rate is the optimizer's own. Raises ConfigError and WrongCall."""
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
        """The current rate of each group of the optimizer."""
        self._look_at_others()
        return self._rates()

    def _rates(self) -> list[float | Any]:
        rise = min(1.0, (self.last_epoch + 1) / WARMUP_STEPS)
        part = share(self._shape, self._learner.fraction, self._warmup, self._final)
        now = rise * (part if self._learner.tokens_budget else 1.0)
        self._set = [base * now * others for base, others in zip(self.base_lrs, self._by_others, strict=True)]
        return list(self._set)

    def _look_at_others(self) -> None:
        """Note groups that were added, and the changes that other schedulers in a chain made to the rates."""
        groups = self.optimizer.param_groups
        for group in groups[len(self.base_lrs) :]:
            self.base_lrs.append(group.setdefault("initial_lr", group["lr"]))
        self._by_others += [1.0] * (len(groups) - len(self._by_others))
        for i, group in enumerate(groups):
            rate = group["lr"]
            if isinstance(rate, Tensor):  # reading it would wait for the device
                continue
            if i >= len(self._set):  # we have not set this group yet
                self._by_others[i] = rate / self.base_lrs[i] if self.base_lrs[i] else 1.0
            elif self.last_epoch == 0:  # a SequentialLR switches to this scheduler
                self._by_others[i] = 1.0
            elif rate != self._set[i] and self._set[i]:
                self._by_others[i] *= rate / self._set[i]

    def state_dict(self) -> dict[str, Any]:
        """The state without the learner, which has its own."""
        return {key: value for key, value in super().state_dict().items() if key not in ("_learner", "_set")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where the saved schedule left off: the next step uses the current rate, not that of a first step."""
        super().load_state_dict(state_dict)
        self._last_lr = self._rates()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = rate


class Followed:
    """Makes a user's schedule, a function of the step, follow the run: it gets the step, out of `steps`, that matches
    the run's progress. The warm-up follows this process's steps, since progress is 0 until something is merged."""

    def __init__(self, schedule: LambdaLR, learner: RunProgress, steps: int) -> None:
        self._schedule, self._learner, self._steps = schedule, learner, steps
        parts = schedule.lr_lambdas
        self.rise = next((at for at in range(steps) if all(part(at + 1) <= part(at) for part in parts)), steps)
        """The first step at which the rate no longer rises."""

    def set(self, step: int) -> None:
        at, schedule = max(round(self._learner.fraction * self._steps), min(step, self.rise)), self._schedule
        rates = [base * part(at) for base, part in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
        for group, rate in zip(schedule.optimizer.param_groups, rates, strict=False):  # groups may be added later
            group["lr"] = rate
        schedule._last_lr = rates  # the rates that a Trainer logs


def followed(schedule: Any, learner: Any, steps: float) -> Followed | None:
    """`steps`: length of the schedule; inf: no end. Returns None, with a warning, if it cannot follow the run."""
    log, name = learner.telemetry.log, type(schedule).__name__
    if not learner.tokens_budget or not isinstance(schedule, LambdaLR) or not 0 < steps < math.inf:
        log.warning(
            "the rate follows the steps of this Trainer, not the run", schedule=name, budget=learner.tokens_budget
        )
        return None
    made = Followed(schedule, learner, int(steps))
    log.event("the rate follows the run", schedule=name, warmup_steps=made.rise)
    return made
