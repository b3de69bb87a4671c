"""Crosses the step boundaries of a learner, and passes their acts to the threads that carry them out.

`StepBoundary` decides what happens. The codec thread encodes, and `Background` runs the connections. Owned by the
training thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from diloco_common.errors import DilocoError, NotFinite
from diloco_common.observe.logs import Log
from diloco_common.wire.messages import Progress
from diloco_worker.core.agreement import Diverging
from diloco_worker.core.device import on_its_way
from diloco_worker.core.events import Act, Answered, Failed, PushContribution, StepEnded, VersionApplied
from diloco_worker.core.fragment import Fate
from diloco_worker.core.learner import LearnerCore
from diloco_worker.shell.boundary import StepBoundary
from diloco_worker.shell.codec_thread import ConnectionContext
from diloco_worker.shell.connections import Connections
from diloco_worker.shell.optimizers import LOOK_AT_STEP, Compared

STEP_TIME_ALPHA = 0.1
"""Weight of the newest inner step in the moving average of step times."""
APPLY_S = 0.003
"""`step` spends this many seconds, or `APPLY_SHARE` of a step if that is longer, on versions that have arrived. It
applies at least one. The rest wait for the next step."""
APPLY_SHARE = 0.005


class Background(Protocol):
    """Runs the connections: a thread in production, the virtual event loop in the simulator."""

    def start(self, connections: Connections) -> None:
        """Start running them."""

    def post(self, acts: Sequence[Act]) -> None:
        """Queue acts for the connections, in order. Never waits."""

    def stop(self, settle_s: float) -> None:
        """Make the connections leave and end them; pushes in flight get `settle_s` seconds. May be repeated."""


class Crossing:
    def __init__(
        self, boundary: StepBoundary, connections: Connections, background: Background, context: ConnectionContext,
        compared: Compared, check_model: Callable[[], None],
    ) -> None:  # fmt: skip
        """`check_model` raises ModelChanged."""
        self.step_time_s = 0.0
        """Moving average, in seconds."""
        self._boundary, self._connections, self._background = boundary, connections, background
        self._codec, self._telemetry, self._clock = context.codec, context.telemetry, context.world.clock
        self._compared, self._check_model = compared, check_model
        self._diverging = Diverging(len(list(connections)))
        self._steps_told = boundary.figures().inner_step
        self._step_ended = 0.0  # set by `begin`
        self._loss = _Loss()
        self._says_no_tokens = True  # whether every step of this process reported no tokens

    @property
    def _core(self) -> LearnerCore:
        assert self._boundary.core is not None, "call `begin` until it returns True"
        return self._boundary.core

    def begin(self) -> None:
        """The first step begins."""
        self._step_ended = self._clock()

    def step(self, amount: int, loss: Tensor | float | None, *, counts_samples: bool) -> None:
        """An inner step ended. Raises the error of `Failed`."""
        began = self._clock()
        step_s, self._step_ended = began - self._step_ended, began
        self.step_time_s += (STEP_TIME_ALPHA if self.step_time_s else 1.0) * (step_s - self.step_time_s)
        self._loss.take(loss)
        self._boundary.stepped(amount)
        self._warn_of_no_tokens(self._telemetry.log)
        self._compared.stepped(self._telemetry.log)
        acts = self._cross(max(APPLY_S, APPLY_SHARE * self.step_time_s))
        progress = Progress(
            self._core.inner_step, self._core.tokens, self._loss.value, self.step_time_s, counts_samples=counts_samples,
            inner=self._compared.inner,
        )  # fmt: skip
        acts.append(StepEnded(progress, amount, step_s, self._clock() - began))
        self.post(acts)

    def poll(self) -> None:
        """Between two steps. Raises the error of `Failed`."""
        self.post(self._cross(math.inf))

    def post(self, acts: list[Act]) -> None:
        """Start the codec thread's work, and pass all acts to the connections at once: each wakeup of the network
        thread may take the processor away. Raises the error of `Failed`."""
        self._telemetry.record(acts)
        error: DilocoError | None = None
        diverged: DilocoError | None = None
        for act in acts:
            match act:
                case PushContribution():
                    fragment = self._core.manifest.fragments[act.contribution.fragment_id]
                    self._codec.begin(act.contribution, fragment.encoding(self._core.policy.push_encoding))
                case Answered():
                    shard_index = self._core.manifest.fragments[act.fragment_id].shard_index
                    answered = self._diverging.answered(act.fragment_id, shard_index, act.round, act.answer)
                    diverged = diverged or answered
                case VersionApplied(fate=Fate.MERGED):
                    self._diverging.merged(act.fragment_id)
                case Failed():
                    error = act.error
        if acts:
            self._background.post(tuple(acts))
        if error is None and diverged is not None and not self._begin_anew():
            error = diverged
        if error is not None:
            self._telemetry.state = "stopped"
            raise error

    def _cross(self, apply_s: float) -> list[Act]:
        acts = self._boundary.cross(apply_s)
        core = self._boundary.core
        if core is not None and core.inner_step > self._steps_told:  # in an island, decisions lag one boundary behind
            self._steps_told = core.inner_step
            self._telemetry.stepped(core.inner_step, core.tokens)
        if not self._telemetry.readiness[0]:
            is_ready, missing = self._boundary.readiness()
            objections = "" if is_ready else self._connections.objections
            self._telemetry.readiness = is_ready, f"{missing} ({objections})" if objections else missing
        return acts

    def _begin_anew(self) -> bool:
        """If values became NaN or infinite: take the global ones, and clear the optimizers. Returns whether it did.

        The ranks of an island would have to do this at the same step, so an island ends instead.
        """
        if not self._boundary.is_alone or not self._diverging.begin_anew():
            return False
        self._check_model()
        self._boundary.take_global()
        optimizers = [*self._compared.optimizers.values()]
        for optimizer in optimizers:
            optimizer.state.clear()
        moments = "fresh moments" if optimizers else "moments as they are: give join(optimizer=) for fresh ones"
        self._telemetry.log.warning(
            f"values were not finite: this learner continues with the run's, and {moments}", code=NotFinite.code,
            times=self._diverging.times_anew,
        )  # fmt: skip
        return True

    def _warn_of_no_tokens(self, log: Log) -> None:
        """Warn once, after some steps, if no step had tokens: then none of this work is ever merged."""
        if not self._says_no_tokens:
            return
        steps, tokens = self._boundary.trained_here()
        self._says_no_tokens = not tokens and steps < LOOK_AT_STEP
        if not tokens and not self._says_no_tokens:
            log.warning(
                "every step so far reported no tokens, so none of this work is merged; count the tokens of the batch",
                code="NO_TOKENS", steps=steps,
            )  # fmt: skip


class _Loss:
    """The newest loss. From an accelerator it arrives a step or more later: nothing waits for the device."""

    def __init__(self) -> None:
        self.value: float | None = None
        self._coming: tuple[Tensor, Callable[[], bool]] | None = None

    def take(self, loss: Tensor | float | None) -> None:
        if not isinstance(loss, Tensor):
            self.value = self.value if loss is None else float(loss)
            return
        if self._coming is None:
            self._coming = on_its_way(loss.detach())
        value, is_there = self._coming
        if is_there():
            self.value, self._coming = float(value), None
