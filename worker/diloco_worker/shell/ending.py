"""The end of a learner: by `finish`, `leave` or SIGTERM; what it waits for, how long, and what it logs meanwhile.

`Ending` carries it out. `FinishWait` and `LeaveWait` find what is still missing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from diloco_common.observe.logs import Log
from diloco_common.ports import Clock
from diloco_common.wire.calls import AGAIN_S, LONG_S, LONGEST_S, NOTICE_S, SAY_EVERY_S, SETTLE_S
from diloco_worker.core.events import LastRounds
from diloco_worker.shell.boundary import StepBoundary
from diloco_worker.shell.codec_thread import ConnectionContext
from diloco_worker.shell.connections import Connections
from diloco_worker.shell.council import Council
from diloco_worker.shell.crossing import Crossing
from diloco_worker.shell.process import Notice, as_exit, say_as_before
from diloco_worker.shell.telemetry import LearnerTelemetry

FINISH_S = LONG_S
"""Seconds to wait for the last versions: at most one pull of each fragment."""
LEAVE_S = NOTICE_S - SETTLE_S
"""Seconds to hand over the work since the last contributions. Clouds warn 30 seconds ahead, or more."""
LEAVE_LEAST_S = SETTLE_S
"""Minimum time in seconds, out of `LEAVE_S`, that is left for leaving if the step after the warning took long."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The fate of a learner's work. True if the run has all of it, and the model has the last versions."""

    work: Literal["all", "partly", "none"]
    """How much of it versions hold. In a run that has reached its budget, work that was too late does not count: "all"
    then means that some was merged."""
    tokens: int
    tokens_unmerged: int
    """Those of these tokens that are in no version, averaged over fragments, including work too late for the budget."""
    is_global: bool
    """Whether the model now holds the run's values; otherwise it holds the trained ones."""
    why: str
    """What is missing, as text; empty: nothing."""

    def __bool__(self) -> bool:
        return self.work == "all" and not self.why


class Awaited:
    """Finds what is still missing at the end. Owned by the training thread."""

    usual_s: float
    """Seconds to wait at most, by default."""
    waits: str
    """The log line of the wait."""

    def __init__(self, boundary: StepBoundary, connections: Connections, council: Council) -> None:
        self._boundary = boundary
        self._connections = connections
        self._council = council

    def look(self, waited_s: float, wait_s: float | None) -> tuple[bool, str]:
        """Whether to stop waiting, and what is missing, as text; empty: nothing.

        Waits at most `wait_s` seconds; None: `usual_s`, and not for shards that are gone.
        """
        missing = self.missing()
        gone = {c.address for c in self._connections if c.is_gone} if wait_s is None else set()
        is_late = waited_s >= (self.usual_s if wait_s is None else wait_s)
        is_over = is_late or not missing.keys() - gone
        said = self._council.agree(f"{is_over:d}{'; '.join(missing.values())}")
        return said[0] == "1", said[1:]

    def missing(self) -> Mapping[str, str]:
        """Address of a shard -> what has not arrived from it, or has not reached it, as text."""
        raise NotImplementedError

    def unmerged(self) -> dict[str, str]:
        """Work in no version that a shard could still merge; keys as in `missing`."""
        core, shards = self._boundary.core, self._boundary.shards
        if core is None:
            return {}  # nothing was trained
        found = Counter(f.fragment.shard_index for f in core.exported if f.tokens_since(core.tokens) > 0)
        address = {c.state.shard_index: c.address for c in self._connections}
        held = {address.get(i, f"shard {i}"): n for i, n in found.items() if not shards.has_stopped(i)}
        return {shard: f"work on {n} fragments of {shard}" for shard, n in held.items()}


class FinishWait(Awaited):
    """Ends with the last version of every fragment in the model, and nothing else.

    A shard that has reached the budget makes no more versions, so the one that it announced last is final. If training
    ends earlier, the learner hands over its work as when it leaves, and waits for the versions that were announced when
    `finish` was called: others continue, and would announce new ones forever.
    """

    usual_s = FINISH_S
    waits = "waiting for the last versions"

    def __init__(self, boundary: StepBoundary, connections: Connections, council: Council) -> None:
        super().__init__(boundary, connections, council)
        self._wanted: dict[int, tuple[int, int]] = {}  # fragment -> epoch and version, as first announced
        self._hands_over = True  # whether to wait for rounds

    def look(self, waited_s: float, wait_s: float | None) -> tuple[bool, str]:
        self._hands_over = waited_s < LEAVE_S or wait_s is not None
        return super().look(waited_s, wait_s)

    def missing(self) -> Mapping[str, str]:
        """Versions that have not arrived, and shards that do not say whether there are any."""
        core = self._boundary.core
        if core is None:
            return {"": "the model is not cut yet"}
        there = {c.state.shard_index: c for c in self._connections if c.is_up}
        away = {c.address: f"no answer from {c.address}" for c in self._connections if not c.is_up}
        late: dict[str, int] = {}
        for fragment in core.exported:
            i = fragment.fragment.fragment_id
            connection = there.get(fragment.fragment.shard_index)
            if connection is None:
                continue
            announced = connection.state.to_pull.newest(i)
            wanted = self._wanted.setdefault(i, announced) if announced is not None else None
            if wanted is not None and announced is not None and wanted[0] != announced[0]:  # the shard has restarted
                wanted = self._wanted[i] = announced
            if wanted is None or fragment.epoch != wanted[0] or fragment.version < wanted[1]:
                late[connection.address] = late.get(connection.address, 0) + 1
        versions = {shard: f"the last version of {n} fragments of {shard}" for shard, n in late.items()}
        return (self.unmerged() if self._hands_over else {}) | versions | away

    def outcome(self, missing: str, *, regardless: bool) -> Finished:
        """The result of `finish`, and whether the global values go into the model."""
        core, shards = self._boundary.core, self._boundary.shards
        assert core is not None
        steps, tokens = self._boundary.trained_here()
        unmerged = core.tokens_unmerged
        due = [f for f in core.of_model if not shards.has_stopped(f.fragment.shard_index)]
        work: Literal["all", "partly", "none"] = "all"
        if any(f.tokens_since(core.tokens) > 0 for f in due):
            work = "partly"
        if steps and unmerged >= tokens:
            work = "none"
        why = [missing or "; ".join(self.unmerged().values()), self._connections.failing_pushes]
        if steps and not tokens:
            why.insert(0, "every step said tokens=0")
        elif work == "none" and shards.have_stopped:
            why.insert(0, "no round opened before the run reached its budget")
        is_global = regardless or work == "all" or shards.have_stopped
        return Finished(work, tokens, math.ceil(unmerged), is_global, "; ".join(filter(None, why)))


class LeaveWait(Awaited):
    """Ends with all of the learner's work in a version.

    The learner tells each shard which fragments hold work that nobody else has. The shard opens an extra round for
    each, and the learner contributes as usual. A contribution in flight is waited for first.
    """

    usual_s = LEAVE_S
    waits = "waiting until this learner's work is merged"

    def missing(self) -> Mapping[str, str]:
        return self.unmerged()


class Loop(Protocol):
    """The parts of a learner that its end needs."""

    def check_end(self) -> None:
        """Raises WrongCall and ModelChanged if it cannot end now."""

    def poll(self) -> None:
        """Apply what has arrived, and send what rounds ask for."""

    def close(self) -> None:
        """Leave the run."""


class Ending:
    """Ends a learner once. Owned by the training thread."""

    def __init__(
        self,
        boundary: StepBoundary,
        connections: Connections,
        crossing: Crossing,
        context: ConnectionContext,
        loop: Loop,
    ) -> None:
        self._boundary, self._crossing, self._loop = boundary, crossing, loop
        self._telemetry: LearnerTelemetry = context.telemetry
        self._clock: Clock = context.world.clock
        self._inbox = context.inbox
        self._finishing = FinishWait(boundary, connections, context.council)
        self._leaving = LeaveWait(boundary, connections, context.council)
        self._notice: Notice | None = None
        self._is_leaving = False
        self._finished: Finished | None = None
        self._has_left: bool | None = None

    def listen(self) -> None:
        """Treat SIGTERM as the notice to leave from now on, unless the process already handles it."""
        self._notice = Notice(self._boundary.ask_leave, self._patience_s)

    def over(self) -> None:
        """The learner is closed. May be repeated."""
        if self._notice is not None:
            self._notice.end(is_heeded=self._is_leaving and self._boundary.is_leave_asked)

    def finish(self, wait_s: float | None, *, regardless: bool) -> Finished:
        """See `Learner.finish`."""
        if self._finished is None:
            missing = self._wait(self._finishing, wait_s)
            self._finished = self._finishing.outcome(missing, regardless=regardless)
            if self._finished.is_global:
                self._boundary.take_global()
            self._say(self._finished)
            self._loop.close()
            say_as_before()
        elif regardless and not self._finished.is_global:
            self._boundary.take_global()
            self._finished = replace(self._finished, is_global=True)
        return self._finished

    def leave(self, wait_s: float | None = None) -> bool:
        """See `Learner.leave`."""
        if self._finished is not None:
            return bool(self._finished)
        if self._has_left is not None:
            return self._has_left
        self._loop.check_end()
        if self._notice is not None:
            self._notice.heed()
        before = self._boundary.figures().tokens_unmerged
        self._is_leaving = True
        missing = self._wait(self._leaving, wait_s)
        self._has_left = not missing
        if missing:
            self._telemetry.log.warning("some of this learner's work is in no version", why=missing)
        self._loop.close()
        if self._boundary.is_leave_asked:
            figures = self._boundary.figures()
            share = 1 - figures.tokens_unmerged / before if before else 1.0
            merged = f"{share:.0%} of the work that it still had is merged, but not {missing}"
            if not missing:
                merged = "all of it is merged"
            learner_id = self._telemetry.caller.learner_id
            raise as_exit(f"{learner_id} has left the run after {figures.inner_step} steps; {merged}")
        return not missing

    def heed(self) -> None:
        """If SIGTERM came, hand over the work and end the process."""
        if self._boundary.is_leave_asked and not self._is_leaving:
            if (asked_at := self._boundary.leave_asked_at) is not None:  # None: another rank got it
                self._leaving.usual_s = max(LEAVE_LEAST_S, LEAVE_S - (self._clock() - asked_at))
            self.leave()

    def hand_over(self, waited_s: float, wait_s: float | None, how: Awaited | None = None) -> tuple[bool, str]:
        """After a `poll`: ask for the missing rounds. Returns what `Awaited.look` returns."""
        core = self._boundary.core
        if core is not None and not self._boundary.shards.have_stopped:
            self._crossing.post([LastRounds(core.last_rounds)])
        return (how or self._leaving).look(waited_s, wait_s)

    def _wait(self, how: Awaited, wait_s: float | None) -> str:
        """Poll until nothing is missing, or the time is over. Returns what is missing, as text."""
        self._loop.check_end()
        began = self._clock()
        wait_log = WaitLog(self._telemetry.log, how.waits, began)
        while True:
            self._loop.poll()
            waited_s = self._clock() - began
            is_over, missing = self.hand_over(waited_s, wait_s, how)
            if is_over:
                wait_log.over(began + waited_s)
                return missing
            wait_log.still(missing or "a round that holds work of this learner", began + waited_s)
            self._inbox.wait(AGAIN_S)

    def _patience_s(self) -> float | None:
        """Seconds that the notice waits for the step to end: its usual time, if the rest of the warning allows it.
        None: forever, since the ranks of an island end a step together."""
        if not self._boundary.is_alone:
            return None
        left_s = self._telemetry.step_left_s
        return LEAVE_LEAST_S + (left_s if left_s < LEAVE_S - 2 * LEAVE_LEAST_S else 0.0)

    def _say(self, finished: Finished) -> None:
        log, lost = self._telemetry.log, f"{finished.tokens_unmerged} of {finished.tokens}"
        if not finished.is_global:
            log.warning(
                "some of this learner's work is not in the run: the model keeps it, and "
                "learner.finish(regardless=True) loads the global values", code="NOT_MERGED", tokens_unmerged=lost,
                why=finished.why,
            )  # fmt: skip
        elif finished.work != "all":
            log.warning(
                "the model holds the global values, which lack some of this learner's work", code="NOT_MERGED",
                tokens_unmerged=lost, why=finished.why,
            )  # fmt: skip
        elif finished.why:
            log.warning("not everything is from the last version", why=finished.why)


class WaitLog:
    """Logs one wait: soon, and then at intervals. Times are seconds of any clock."""

    def __init__(self, log: Log, what: str, began: float) -> None:
        self._log = log
        self._what = what
        self._began = began
        self._say_at = began + LONGEST_S
        self._has_said = False

    def still(self, why: str, now: float) -> None:
        if now >= self._say_at:
            self._log.event(self._what, for_s=round(now - self._began), why=why)
            self._say_at = now + SAY_EVERY_S
            self._has_said = True

    def over(self, now: float) -> None:
        """Log the end of the wait, if the wait itself was logged."""
        if self._has_said:
            self._log.event(f"{self._what}: done", for_s=round(now - self._began))
