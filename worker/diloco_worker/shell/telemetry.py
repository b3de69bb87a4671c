"""A learner's reports about itself: metrics, log lines, history, and the figures of /status.

Nothing is decided here. Each method belongs to the thread that its section names. /status is read in any thread: every
value is replaced as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from diloco_common.observe.history import fingerprint
from diloco_common.observe.logs import Log
from diloco_common.observe.metrics import installed
from diloco_common.observe.metrics.worker import PushOutcome, SyncPhase, WorkerMetrics
from diloco_common.ports import Clock, History
from diloco_common.settings import WorkerSettings
from diloco_common.wire.manifest import TensorSpec, model_digest
from diloco_common.wire.messages import Pulse
from diloco_worker.core.connection import Caller
from diloco_worker.core.events import Act, Answered, Figures, PushContribution, StepEnded, VersionApplied, WorkCarried
from diloco_worker.core.fragment import Fate, Lease


class LearnerTelemetry:
    """Log, metrics, status and history of one process of a learner."""

    def __init__(
        self, caller: Caller, clock: Clock, metrics: WorkerMetrics, log: Log, history: History | None = None
    ) -> None:
        self.metrics = metrics
        self.log = log
        self.state = "joining"
        self.readiness = False, "the model is not cut yet"
        """Whether the learner has joined every shard and holds every fragment; and what is missing."""
        self.hung_s = WorkerSettings().hung_s
        """Seconds without the end of an inner step after which the training thread counts as hung; 0: never."""
        self.holds_all = True
        self.figures: Callable[[], Figures] = Figures
        """The learner's progress. Called in any thread except the training thread, to save its time."""
        self.bytes_pushed = 0
        self.bytes_pulled = 0
        self.bytes_near = 0
        """The part of `bytes_pulled` that came from mirrors."""
        self.caller = caller
        self._clock = clock
        self._history = history
        self._began = clock()
        self._progress_at = self._began
        self._loss: float | None = None
        self._unit = "tokens"
        self._step_time_s = 0.0
        self._stall_s = 0.0
        """Total seconds that `step` has held up the training loop."""
        self._stall_max_s = 0.0
        self._tokens_carried = 0.0
        self._connected: set[str] = set()
        metrics.training.begun(caller.learner_id)

    def status(self, pulse: Pulse, shards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """JSON of one learner: counts, bytes and seconds; no secrets. `shards`: the figures of each connection."""
        figures, step_time_s = self.figures(), self._step_time_s
        fates = figures.contributions or {}
        rejected = sum(n for fate, n in fates.items() if fate not in ("taken", *(f.value for f in Fate)))
        tokens_per_step = figures.tokens / figures.inner_step if figures.inner_step else 0.0
        return {
            "role": "worker",
            "name": self.caller.learner_id,
            "run": self.caller.run_id,
            "package": installed(),
            "learner_id": self.caller.learner_id,
            "state": self.state,
            "inner_step": figures.inner_step,
            "tokens": figures.tokens,
            "unit": self._unit,
            "loss": self._loss,
            "tokens_per_s": tokens_per_step / step_time_s if step_time_s else 0.0,
            "step_time_s": step_time_s,
            "sync_stall_s": self._stall_s,
            "sync_stall_max_s": self._stall_max_s,
            "hung": not self.health[0],
            "uptime_s": round(self._clock() - self._began, 3),
            "tokens_merged": pulse.tokens_merged,
            "tokens_budget": pulse.tokens_budget,
            "shards": shards,
            "contributions": {
                "sent": fates.get("taken", 0),
                "merged": fates.get("merged", 0),
                "carried": fates.get("carried", 0),
                "forgotten": fates.get("forgotten", 0),
                "rejected": rejected,
                "unmerged": figures.unmerged,
            },
            "tokens_carried": int(figures.tokens_carried),
            "tokens_unmerged": int(figures.tokens_unmerged),
            "versions_undone": figures.versions_undone,
            "bytes_pushed": self.bytes_pushed,
            "bytes_pulled": self.bytes_pulled,
            "bytes_near": self.bytes_near,
        }

    @property
    def health(self) -> tuple[bool, str]:
        """Whether the training thread makes progress, and a text about it. Waiting for shards is not a hang."""
        idle_s = self._clock() - self._progress_at
        if self.state != "training":
            return True, self.state
        return not 0 < self.hung_s < idle_s, f"no inner step has ended for {idle_s:.0f} s"

    @property
    def step_left_s(self) -> float:
        """Seconds left of the current step at the usual step time. May be read in any thread and in signal handlers."""
        return max(0.0, self._progress_at + self._step_time_s - self._clock())

    # ------------------------------------------------------------ in the training thread

    def trains(self) -> None:
        """The learner has joined, and its first step begins."""
        self._progress_at = self._clock()
        self.state = "training"

    def model(self, tensors: Sequence[TensorSpec], num_frozen: int) -> None:
        """Log what is synchronized, and how; `num_frozen` parameters are not."""
        trained = [t for t in tensors if t.traits.is_of_model]
        beside = {
            word: count
            for word, kind in (("companions", "momentum"), ("buffers", "buffer"))
            if (count := sum(t.kind == kind for t in tensors))
        }
        averaged = " ".join(t.name for t in trained if t.rule == "mean")
        self.log.event(
            "model", digest=model_digest(tensors), trained=sum(t.num_elements for t in trained), frozen=num_frozen,
            plain_mean=averaged or "nothing", **beside,
        )  # fmt: skip

    def born(self, inner_step: int, tokens: int) -> None:
        self._write("born", role="learner", step=inner_step, tokens=tokens)

    def stepped(self, inner_step: int, tokens: int) -> None:
        self._write("stepped", step=inner_step, tokens=tokens)

    def record(self, acts: Sequence[Act]) -> None:
        for act in acts:
            match act:
                case Answered():
                    answer = act.answer
                    self._write(
                        "answered", fragment=act.fragment_id, round=act.round, outcome=answer.outcome.value,
                        code=answer.code,
                    )  # fmt: skip
                case VersionApplied():
                    self._applied(act)
                case WorkCarried():
                    c = act.contribution
                    self._write(
                        "carried", shard_epoch=c.shard_epoch, fragment=c.fragment_id, round=c.round, tokens=c.tokens
                    )

    def ended(self) -> None:
        self._write("ended")

    # ------------------------------------------------------------ in the network thread

    def count(self, act: Act) -> None:
        match act:
            case StepEnded():
                self._progress_at = self._clock()
                self._loss, self._step_time_s = act.progress.loss, act.progress.step_time_s
                self._unit = "samples" if act.progress.counts_samples else "tokens"
                self._stall_s += act.stall_s
                self._stall_max_s = max(self._stall_max_s, act.stall_s)
                self.metrics.training.stepped(tokens=act.tokens, seconds=act.step_s, loss=act.progress.loss)
                self.metrics.training.stall_seconds.observe(act.stall_s)
                figures = self.figures()
                self.metrics.exchange.unmerged.set(figures.unmerged)
                self.metrics.exchange.tokens_carried.inc(figures.tokens_carried - self._tokens_carried)
                self._tokens_carried = figures.tokens_carried
            case PushContribution():
                self.metrics.training.computed("snapshot", act.cpu_seconds)
            case VersionApplied():
                self.metrics.exchange.applied(act.fragment_id, act.version, act.seconds)
                self.metrics.training.computed("apply", act.cpu_seconds)

    def pushing(self, act: PushContribution, lease: Lease) -> None:
        """Record that a push of this contribution begins under this lease."""
        c = act.contribution
        self._write(
            "pushed", shard_epoch=lease.epoch, generation=lease.generation, fragment=c.fragment_id, round=c.round,
            epoch=c.epoch, base=c.base_version, tokens=c.tokens, steps=c.steps, since=c.since,
        )  # fmt: skip

    def pushed(self, outcome: PushOutcome, num_bytes: int) -> None:
        """A push ended; outcome "failed" if it was not answered."""
        self.bytes_pushed += num_bytes
        self.metrics.exchange.pushed(outcome, num_bytes)

    def pulled(self, num_bytes: int, *, is_near: bool = False) -> None:
        self.bytes_pulled += num_bytes
        if is_near:
            self.bytes_near += num_bytes
            self.metrics.exchange.near_bytes.inc(num_bytes)
        self.metrics.exchange.pulled_bytes.inc(num_bytes)

    def connected(self, address: str, times: int) -> None:
        """A control stream is up, for the `times`-th time."""
        self._connected.add(address)
        self.metrics.exchange.connected_shards.set(len(self._connected))
        if times > 1:
            self.metrics.exchange.reconnects.inc()

    def disconnected(self, address: str) -> None:
        """A control stream is down. May be repeated."""
        self._connected.discard(address)
        self.metrics.exchange.connected_shards.set(len(self._connected))

    # ------------------------------------------------------------ in the codec thread

    def computed(self, phase: SyncPhase, cpu_seconds: float) -> None:
        self.metrics.training.computed(phase, cpu_seconds)

    def encoded(self, seconds: float) -> None:
        self.metrics.exchange.encode_seconds.observe(seconds)

    # ------------------------------------------------------------ helpers

    def _applied(self, act: VersionApplied) -> None:
        contribution = act.contribution
        if self._history is not None:
            number = contribution.round if contribution is not None else None
            checksum = fingerprint(act.values.float().cpu().numpy().tobytes()) if self.holds_all else None
            self._write(
                "applied", fragment=act.fragment_id, epoch=act.epoch, version=act.version, checksum=checksum,
                merged=number if act.fate is Fate.MERGED else None,
                forgotten=number if act.fate is Fate.FORGOTTEN else None, since=act.since,
            )  # fmt: skip
        if contribution is not None and act.fate is Fate.FORGOTTEN:
            self.log.warning(
                "the shard has forgotten whether a contribution was merged: it is not pushed again",
                fragment=act.fragment_id, round=contribution.round, tokens=contribution.tokens,
            )  # fmt: skip

    def _write(self, what: str, **facts: Any) -> None:
        if self._history is not None:
            self._history.write(what, **facts)
