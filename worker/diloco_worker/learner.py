"""`Learner`: what a training loop holds.

    with diloco_worker.join("ps-0:50051,ps-1:50051", model) as learner:
        for batch in loader:
            loss = model(batch).loss
            loss.backward(); optimizer.step(); optimizer.zero_grad()
            learner.step(tokens=batch.numel(), loss=loss)
            if learner.done:
                break

All of this runs in the training thread. Between two steps, `step` takes contributions and puts arrived versions under
the local progress: one addition, of what was computed ahead. It never waits for anybody. What happens there is decided
by `StepBoundary`. What it asks for is done by others: the codec thread encodes, `Background` runs the connections.

The codec thread copies the snapshots in the moments after `step` or `poll` returned. So the loop should not put other
values into the parameters there (averaged ones, to evaluate them). They would be contributed, and only the next
contribution would take them out again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from torch import Tensor

from diloco_common.messages import Progress
from diloco_common.ports import Transport, World
from diloco_worker.boundary import Start, StepBoundary
from diloco_worker.codec_thread import CodecThread
from diloco_worker.connections import Connections
from diloco_worker.context import ConnectionContext
from diloco_worker.core.acts import Act, GiveUp, PushContribution, StepEnded
from diloco_worker.core.connection import Caller
from diloco_worker.core.learner import LearnerCore
from diloco_worker.core.replica import Replica
from diloco_worker.inbox import Inbox
from diloco_worker.telemetry import LearnerTelemetry

STEP_TIME_ALPHA = 0.1
"""Weight of the newest inner step in the moving average of step times."""
AWAY_S = 0.5
"""A resumed learner waits this long, in seconds, for shards that do not answer. Then it trains on without them."""
APPLY_S = 0.003
"""`step` spends this many seconds, or `APPLY_SHARE` of a step if that is longer, on versions that have arrived. It
always applies one. The rest wait for the next step."""
APPLY_SHARE = 0.005
LOSS_EVERY_S = 0.5
"""On an accelerator the loss is read this often: reading waits for the device."""


class Background(Protocol):
    """Where the connections run: a thread of its own in production, the same virtual loop in the simulator."""

    def start(self, connections: Connections) -> None:
        """Run them from now on."""

    def post(self, acts: Sequence[Act]) -> None:
        """Have them perform these acts, after those that were posted before. Never waits."""

    def stop(self) -> None:
        """Let them leave, and end them. Repeating it is fine."""


class Learner:
    """One learner of a run. Made by `join`; a context manager that leaves the run at its end."""

    def __init__(
        self, boundary: StepBoundary, connections: Connections, background: Background, context: ConnectionContext
    ) -> None:
        self.connections = connections
        self.telemetry = context.telemetry
        self.step_time_s = 0.0
        """Moving average."""
        self._boundary = boundary
        self._background = background
        self._codec = context.codec
        self._inbox = context.inbox
        self._clock = context.world.clock
        self._began = self._step_ended = self._clock()
        self._loss: float | None = None
        self._loss_read = 0.0
        self._is_stop_requested = False

    # ------------------------------------------------------------ joining

    def start(self) -> None:
        """Begin to dial the shards. Raises what the background raises."""
        self._began = self._clock()
        self._background.start(self.connections)

    def begin(self) -> bool:
        """Whether training can begin: the model holds a version of every fragment; if resumed, of all that can be had.

        Takes in what has come, and never waits: ask again until it is true. Raises what `step` raises.
        """
        if self.state == "training":
            return True
        self.poll()
        is_ready, missing = self.telemetry.readiness
        if not is_ready:
            if not self._boundary.is_resumed or self._clock() - self._began <= AWAY_S:
                return False
            if not self._boundary.has_what_can_be_had(self.connections.shards_up):
                return False
            self.telemetry.log.event("training without a shard", why=missing)
            self._boundary.begin_without()
        self.telemetry.state = "training"
        self._step_ended = self._clock()
        return True

    # ------------------------------------------------------------ for the training loop

    def step(self, tokens: int, loss: Tensor | float | None = None) -> None:
        """Say that an inner step on `tokens` tokens has ended. Call after optimizer.step(); never waits.

        Raises:
            Superseded: another process joined with this learner id.
            Refusal: a shard refuses this learner for good.
            ManifestMismatch: a shard that was away when training began is of another run.
        """
        began = self._clock()
        step_s = began - self._step_ended
        self._step_ended = began
        self.step_time_s += (STEP_TIME_ALPHA if self.step_time_s else 1.0) * (step_s - self.step_time_s)
        self._read_loss(loss, began)
        self._boundary.stepped(tokens)
        core = self._core
        self.telemetry.stepped(core.inner_step, core.tokens)
        acts = self._cross(max(APPLY_S, APPLY_SHARE * self.step_time_s))
        progress = Progress(core.inner_step, core.tokens, self._loss, self.step_time_s)
        acts.append(StepEnded(progress, tokens, step_s, self._clock() - began))
        self._post(acts)

    def poll(self, wait_s: float = 0.0) -> None:
        """Apply versions that have arrived, and send what rounds ask for, between two steps.

        `step` does this too; call it where the next step is far away, such as during a long evaluation. Waits up to
        `wait_s` seconds for something to arrive. Raises what `step` raises.
        """
        if wait_s > 0:
            self._inbox.wait(wait_s)
        self._post(self._cross(math.inf))

    def status(self) -> dict[str, Any]:
        """JSON of this learner, as at /status. In any thread."""
        return self.telemetry.status(self.connections.pulse, self.connections.figures())

    @property
    def learner_id(self) -> str:
        return self.telemetry.caller.learner_id

    @property
    def state(self) -> str:
        """ "joining", "training", "done" or "stopped"."""
        return self.telemetry.state

    @property
    def core(self) -> LearnerCore | None:
        """The learner's decisions so far; None: the model is not cut yet."""
        return self._boundary.core

    @property
    def done(self) -> bool:
        """Whether to stop training: every shard has merged the token budget, or `stop` was called."""
        return self._is_stop_requested or self._boundary.shards.have_stopped

    @property
    def tokens_merged(self) -> int:
        """Tokens that the run has merged so far, over all learners."""
        return self.connections.pulse.tokens_merged

    @property
    def tokens_budget(self) -> int:
        """Tokens that the run is to merge; 0 if it has no end."""
        return self.connections.pulse.tokens_budget

    @property
    def fraction(self) -> float:
        """Global progress, merged tokens over the budget, from 0 to 1; 0 if there is no budget."""
        return min(1.0, self.tokens_merged / self.tokens_budget) if self.tokens_budget else 0.0

    def stop(self) -> None:
        """Make `done` true. May be called from a signal handler."""
        self._is_stop_requested = True

    def close(self) -> None:
        """Leave the run: what is being pushed gets a few seconds. Repeating it is fine."""
        if self.state != "stopped":
            self.telemetry.state = "done" if self._boundary.shards.have_stopped else "stopped"
            self.telemetry.ended()
        try:
            self._background.stop()
        finally:
            self._codec.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------ helpers

    @property
    def _core(self) -> LearnerCore:
        core = self._boundary.core
        assert core is not None, "call `begin` until it returns True"
        return core

    def _cross(self, apply_s: float) -> list[Act]:
        acts = self._boundary.cross(apply_s)
        if not self.telemetry.readiness[0]:
            self.telemetry.readiness = self._boundary.readiness()
        return acts

    def _post(self, acts: list[Act]) -> None:
        """Begin what the codec thread does; the rest goes to the connections all at once.

        Each time that the network thread is woken, it may take the processor away. Raises the error of `GiveUp`.
        """
        self.telemetry.record(acts)
        error = None
        for act in acts:
            match act:
                case PushContribution():
                    self._codec.begin(act.contribution, self._core.policy.push_encoding)
                case GiveUp():
                    error = act.error
        if acts:
            self._background.post(tuple(acts))
        if error is not None:
            self.telemetry.state = "stopped"
            raise error

    def _read_loss(self, loss: Tensor | float | None, now: float) -> None:
        if isinstance(loss, Tensor):
            if loss.device.type != "cpu" and now - self._loss_read < LOSS_EVERY_S:
                return
            self._loss_read = now
            self._loss = float(loss.detach())
        elif loss is not None:
            self._loss = float(loss)


def make_learner(
    replica: Replica, addresses: Sequence[str], caller: Caller, dial: Callable[[str], Transport], world: World,
    background: Background, telemetry: LearnerTelemetry, start: Start,
) -> Learner:  # fmt: skip
    """A learner in some world, with its parts. Nothing is dialed before `start`.

    Args:
        dial: gives the way to the shard at an address, and sends nothing yet.
        background: runs the connections.
    """
    telemetry.born(start.inner_step, start.tokens)
    inbox = Inbox()
    codec = CodecThread(replica.device, world, telemetry)
    context = ConnectionContext(caller, tuple(replica.specs), dial, world, inbox, codec, telemetry)
    connections = Connections(addresses, Progress(start.inner_step, start.tokens), context)
    boundary = StepBoundary(replica, addresses, inbox, lambda: connections.pulse.tokens_merged, world, start)
    telemetry.figures = boundary.figures
    return Learner(boundary, connections, background, context)
