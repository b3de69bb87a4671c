"""A learner's report about itself: its progress, the run's, its identity, and the state that outlives its process.

All properties may be read in any thread, and never wait. A training loop saves the state in its own checkpoint, beside
the model and the optimizer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from numbers import Integral
from typing import Any

from diloco_common.errors import ConfigError
from diloco_worker.core.learner import LearnerCore
from diloco_worker.shell.arguments import check_seconds
from diloco_worker.shell.boundary import StepBoundary
from diloco_worker.shell.connections import Connections
from diloco_worker.shell.process import Home
from diloco_worker.shell.telemetry import LearnerTelemetry


class LearnerView:
    """The half of `Learner` that only reports."""

    def __init__(
        self, boundary: StepBoundary, connections: Connections, telemetry: LearnerTelemetry, index: int | None
    ) -> None:
        """`index`: the learner's number in an earlier process; None: it had none yet."""
        self.connections = connections
        self.telemetry = telemetry
        self._boundary = boundary
        self._index = index
        self._home = Home()

    # ------------------------------------------------------------ this learner

    @property
    def learner_id(self) -> str:
        return self.telemetry.caller.learner_id

    @property
    def state(self) -> str:
        """ "joining", "training", "done" or "stopped"."""
        return self.telemetry.state

    @property
    def inner_step(self) -> int:
        """Inner steps taken by this learner, including those of the processes whose `state` it continues."""
        return self._boundary.figures().inner_step

    @property
    def tokens(self) -> int:
        """Tokens trained by this learner, including earlier processes as in `inner_step`."""
        return self._boundary.figures().tokens

    @property
    def index(self) -> int:
        """This learner's number: when shard 0 assigned it, the smallest from 0 that no other live learner had.

        It stays the same while the learner runs, over restarts with `state`, and if the learner comes back under its id
        before another one has taken the number. Right after a restart of shard 0, two learners may have the same number
        until both have joined. So use it to split data, and not as a proof of anything.
        """
        if self._index is None and self.state != "joining":
            self._index = self.connections.index
        return self._index or 0

    def number(self, index: int) -> None:
        self._index = index

    @property
    def seed(self) -> int:
        """31 bits from the run and learner ids alone: the same after a restart, different for every learner. Use it to
        seed the order of the data, never for values that must be equal in all learners."""
        caller = self.telemetry.caller
        return int.from_bytes(hashlib.sha256(f"{caller.run_id}/{caller.learner_id}".encode()).digest()[:4]) >> 1

    @property
    def done(self) -> bool:
        """Whether to stop training: all shards have merged the token budget, or `stop` was called."""
        return self._boundary.is_stop_asked or self._boundary.shards.have_stopped

    @property
    def core(self) -> LearnerCore | None:
        """The learner's decisions so far; None until the model is cut."""
        return self._boundary.core

    def state_dict(self) -> dict[str, Any]:
        """The counters and identity for `join(state=...)`, as plain values for any checkpoint.

        Save it with the model and the optimizer, between two steps. In an island all ranks get the same state; if a
        rank dies during the call, the others raise IslandBroken.
        """
        self._home.check(self.learner_id)
        caller = self.telemetry.caller
        merged = self.tokens_merged
        return LearnerState(caller.run_id, caller.learner_id, self.index, *self._boundary.trained(), merged).as_dict()

    def status(self) -> dict[str, Any]:
        """The JSON that /status serves. May be called in any thread."""
        return self.telemetry.status(self._boundary.pulse, self.connections.figures())

    @property
    def hung_s(self) -> float:
        """Seconds without the end of an inner step after which the learner counts as hung: with `http=`, /healthz
        answers 503. May be set; 0: never."""
        return self.telemetry.hung_s

    @hung_s.setter
    def hung_s(self, seconds: float) -> None:
        check_seconds("hung_s", seconds)
        self.telemetry.hung_s = seconds

    def stop(self) -> None:
        """Make `done` true. May be called from a signal handler."""
        self._boundary.ask_stop()

    # ------------------------------------------------------------ the run

    @property
    def tokens_merged(self) -> int:
        """Tokens that the run has merged so far, over all learners."""
        return self._boundary.pulse.tokens_merged

    @property
    def tokens_budget(self) -> int:
        """Tokens that the run should merge; 0 if it has no end."""
        return self._boundary.pulse.tokens_budget

    @property
    def learners_alive(self) -> int:
        """Learners that hold a lease, including this one, according to the shards' last message."""
        return self._boundary.pulse.learners_alive

    @property
    def fraction(self) -> float:
        """Global progress from 0 to 1: merged tokens over the budget; 0 without a budget."""
        return min(1.0, self.tokens_merged / self.tokens_budget) if self.tokens_budget else 0.0


@dataclass(frozen=True, slots=True)
class LearnerState:
    run: str
    learner_id: str
    index: int | None
    """Its number among the learners; None: it had none yet."""
    inner_step: int
    tokens: int
    tokens_merged: int
    """Tokens merged by the run, as far as known here. The highest count decides who seeds an empty shard."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for torch.save, JSON and the like."""
        return asdict(self)


def _what_is_wrong(saved: object) -> str:
    """What is wrong with a saved state, or ""."""
    if not isinstance(saved, Mapping):
        return f"it is a {type(saved).__name__}"
    if missing := sorted({f.name for f in fields(LearnerState)} - saved.keys()):
        return f"it has no {', '.join(missing)}"
    for name in ("index", "inner_step", "tokens", "tokens_merged"):
        value = saved[name]
        if not (isinstance(value, Integral) and int(value) >= 0) and not (name == "index" and value is None):
            return f"its {name} is {value!r}"
    return ""


def blank_state() -> dict[str, Any]:
    """An empty state for `torch.distributed.checkpoint.load`, which only fills in entries that exist.

    `join(state=...)` also accepts it unfilled, as the state of a new learner.
    """
    return LearnerState("", "", None, 0, 0, 0).as_dict()


def read_state(state: Mapping[str, Any] | None, run: str) -> LearnerState | None:
    """The state given to `join(state=...)`; None if there is none, or a blank one.
    Raises ConfigError if it is invalid, or of a run other than `run`."""
    if state is None or state in ({}, blank_state()):
        return None
    if wrong := _what_is_wrong(state):
        raise ConfigError(
            f"state= is not what learner.state_dict() returned: {wrong}; save it beside the model and the optimizer, "
            "and give it back as it was"
        )
    if state["run"] != run:
        raise ConfigError(f"state= is of run {state['run']!r}, and this is run {run!r}: leave it out, or give run=")
    return LearnerState(**{f.name: state[f.name] for f in fields(LearnerState)})
