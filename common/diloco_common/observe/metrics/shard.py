"""All metrics of a shard, in groups, and those of a mirror or a standby.

Totals follow the shard's own counts (`diloco_server/core/ledger.py`) at each scrape; other metrics are set as events
happen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Literal, get_args

from diloco_common.errors import CONTRIBUTIONS, all_kinds
from diloco_common.observe.metrics import COUNTS, SECONDS, Certificates, Declare, MetricsRegistry

ComputePhase = Literal["inspect", "seed", "merge", "encode"]
"""The work of the compute thread: norms of contributions; version 0; merging, up to the encoded version; encoding for
an observer."""
LearnerState = Literal["alive", "stalled", "evicted", "left"]
"""As in the core. Evicted: the lease ran out. Left: the learner said goodbye."""
LEARNER_STATES: tuple[LearnerState, ...] = get_args(LearnerState)


def rejections() -> list[str]:
    """Codes of rejected contributions, as in docs/errors.md."""
    return [kind.code for kind in all_kinds() if CONTRIBUTIONS in (kind.met, kind.also)]


class Itself:
    def __init__(self, declare: Declare) -> None:
        self.ready = declare.gauge("diloco_shard_ready", "1 while ready.")
        self.epoch = declare.gauge("diloco_shard_epoch", "Its epoch.")
        self._settings = declare.gauge("diloco_shard_settings", "Settings that alerts use.", "setting")
        self._refused_calls = declare.counter("diloco_shard_refused_calls_total", "Calls refused, by code.", "code")
        self.tokens_merged = declare.totals(
            "diloco_shard_tokens_merged_total", "Tokens merged in this run, averaged over fragments of the model."
        )
        self.tokens_budget = declare.gauge(
            "diloco_shard_tokens_budget", "Merged tokens at which the run ends; 0: never."
        )

    def call_refused(self, code: str) -> None:
        self._refused_calls.labels(code).inc()

    def settings(self, settings: Mapping[str, float]) -> None:
        """The values by the setting's name, such as sync.quorum."""
        for name, value in settings.items():
            self._settings.labels(name).set(value)


class Learners:
    def __init__(self, declare: Declare) -> None:
        self._learners = declare.gauge(
            "diloco_shard_learners",
            'Learners with a lease. "alive" counts all, "stalled" those that end no step.',
            "state",
        )
        self.joins = declare.totals("diloco_shard_joins_total", "Leases given.").begin()
        self.evictions = declare.totals(
            "diloco_shard_evictions_total", "Leases ended by the shard, by code.", "code"
        ).begin("LEASE_EXPIRED")
        self.inner_step = declare.gauge("diloco_shard_learner_inner_step", "Inner steps.", "learner")
        self.tokens = declare.gauge("diloco_shard_learner_tokens", "Tokens trained on.", "learner")
        self.step_seconds = declare.gauge(
            "diloco_shard_learner_step_seconds", "Seconds per inner step, moving average.", "learner"
        )
        self.loss = declare.gauge("diloco_shard_learner_loss", "Training loss of the last step.", "learner")
        self.silent = declare.gauge("diloco_shard_learner_silent_seconds", "Time since the last message.", "learner")
        self.left_out = declare.gauge("diloco_shard_learner_left_out", "1 while it is left out.", "learner")
        self.left_outs = declare.totals("diloco_shard_left_out_total", "Times that a learner was left out.").begin()
        self.kept = declare.gauge(
            "diloco_shard_learner_kept", "Part of its contributions' length that counted, mean over two H.", "learner"
        )
        self.cosine = declare.gauge(
            "diloco_shard_learner_cosine", "Cosine of its contributions with the others', mean over two H.", "learner"
        )
        self._state = declare.gauge(
            "diloco_shard_learner_state", "1 for its state, 0 for the others.", "learner", "state"
        )
        self._states: dict[str, LearnerState] = {}
        self.contributions = declare.totals(
            "diloco_shard_learner_contributions_total",
            "Contributions asked for, contributed, merged.",
            "learner",
            "fate",
        )
        self.live(alive=0, stalled=0)

    def live(self, *, alive: int, stalled: int) -> None:
        """`alive` includes the stalled learners."""
        self._learners.labels("alive").set(alive)
        self._learners.labels("stalled").set(stalled)

    def state(self, learner: str, state: LearnerState) -> None:
        if self._states.get(learner) != state:
            self._states[learner] = state
            for one in LEARNER_STATES:
                self._state.labels(learner, one).set(one == state)

    def forget(self, learner: str) -> None:
        """Drop the series of a learner that has been gone for long. May be repeated."""
        for gauge in (
            self.left_out, self.kept, self.cosine, self.inner_step, self.tokens, self.step_seconds, self.loss,
            self.silent,
        ):  # fmt: skip
            with contextlib.suppress(KeyError):
                gauge.remove(learner)
        if self._states.pop(learner, None):
            for state in LEARNER_STATES:
                self._state.remove(learner, state)
        self.contributions.forget(learner)


class Contributions:
    """Contributions and versions on the wire."""

    def __init__(self, declare: Declare) -> None:
        self.outcomes = declare.totals(
            "diloco_shard_contributions_total", "Valid contributions, by outcome.", "outcome"
        ).begin("accepted", "duplicate", "late")
        self.rejected = declare.totals(
            "diloco_shard_contributions_rejected_total", "Refused contributions, by code.", "code"
        ).begin(*rejections())
        self.tokens = declare.totals(
            "diloco_shard_contributed_tokens_total",
            "Tokens of contributions, once per fragment. Accepted tokens end as merged, or as fenced if their learner "
            "lost its lease first. A live learner carries late, refused and fenced tokens.",
            "fate",
        )
        self.staleness = declare.histogram(
            "diloco_shard_staleness_versions", "Latest version minus base version of accepted contributions.", COUNTS
        )
        self.received = declare.totals(
            "diloco_shard_received_bytes_total", "Payload bytes of contributions and seeds."
        ).begin()
        self.sent = declare.totals("diloco_shard_sent_bytes_total", "Payload bytes of versions.").begin()


class RoundMetrics:
    """Rounds, from opening to version."""

    def __init__(self, declare: Declare) -> None:
        self.open = declare.gauge("diloco_shard_open_rounds", "Open rounds.")
        self.oldest = declare.gauge("diloco_shard_oldest_round_seconds", "Age of the oldest open round; 0: none.")
        self.overdue_after = declare.gauge(
            "diloco_shard_overdue_after_seconds",
            "Age at which an open round is overdue: ten times the usual, at least 10 s; at first 60 s.",
        )
        self.grace = declare.gauge("diloco_shard_grace_seconds", "Grace window of the newest round.")
        self.quorum_seconds = declare.histogram(
            "diloco_shard_quorum_seconds", "From opening a round to its quorum.", SECONDS
        )
        self.closed = declare.totals(
            "diloco_shard_rounds_closed_total",
            "Rounds closed, because nobody was missing, the grace window ended, or the missing lost their leases.",
            "why",
        ).begin("all", "grace", "lease")
        self.participants = declare.histogram(
            "diloco_shard_round_participants", "Contributions merged per round.", COUNTS
        )
        self.merge_seconds = declare.histogram("diloco_shard_merge_seconds", "Merging, and the outer step.", SECONDS)
        self._compute_seconds = declare.counter(
            "diloco_shard_compute_seconds_total", "CPU time of the compute thread, by phase.", "phase"
        )
        self.round_seconds = declare.histogram(
            "diloco_shard_round_seconds", "From opening a round to announcing its version.", SECONDS
        )
        self._version = declare.gauge("diloco_shard_version", "Latest version, by fragment.", "fragment")
        for phase in get_args(ComputePhase):
            self.computed(phase, 0.0)

    def computed(self, phase: ComputePhase, cpu_seconds: float) -> None:
        self._compute_seconds.labels(phase).inc(cpu_seconds)

    def version(self, fragment: int, version: int) -> None:
        self._version.labels(str(fragment)).set(version)


class Storage:
    """Versions on their way to disk, and lost versions."""

    def __init__(self, declare: Declare) -> None:
        self.save_seconds = declare.histogram("diloco_shard_save_seconds", "Time to make a version durable.", SECONDS)
        self.saved_bytes = declare.totals("diloco_shard_saved_bytes_total", "Bytes of versions made durable.").begin()
        self.standby_wait_seconds = declare.histogram(
            "diloco_shard_standby_wait_seconds",
            "How long a version waited for the standby to hold the one before.",
            SECONDS,
        )
        self.save_failures = declare.counter(
            "diloco_shard_save_failures_total",
            "Attempts to save a version that the disk refused.",
        )
        self.not_durable = declare.gauge("diloco_shard_versions_not_durable", "Versions that are not on disk yet.")
        self.versions_lost = declare.totals(
            "diloco_shard_versions_lost_total",
            "Announced versions that this shard came back without, as learners report.",
        ).begin()
        self.disk_free = declare.gauge(
            "diloco_shard_disk_free_bytes", "Free space for versions; NaN if they are in memory only."
        )
        self.disk_free.set(float("nan"))  # unknown is not zero
        self.checkpoint_version = declare.gauge(
            "diloco_shard_checkpoint_version", "The newest regular checkpoint since the shard started."
        )
        self.checkpoint_failures = declare.counter(
            "diloco_shard_checkpoint_failures_total",
            "Failed attempts to add to a regular checkpoint.",
        )


class ShardMetrics:
    """All metrics of a shard. Any thread may set everything except totals."""

    def __init__(self) -> None:
        self.registry = MetricsRegistry()
        declare = Declare(self.registry)
        self.itself = Itself(declare)
        self.certificates = Certificates(declare)
        self.learners = Learners(declare)
        self.contributions = Contributions(declare)
        self.rounds = RoundMetrics(declare)
        self.storage = Storage(declare)


class FollowingMetrics:
    """How a reader follows its shard. Values computed at each scrape belong to the reader's process."""

    def __init__(self, declare: Declare) -> None:
        self.up = declare.gauge("diloco_reader_up", "1 while its shard sends.", "role")
        self.ready = declare.gauge("diloco_reader_ready", "1 while it holds a version of every fragment.", "role")
        self.behind_versions = declare.gauge(
            "diloco_reader_behind_versions", "Announced versions of one fragment that it has not taken yet.", "role"
        )
        self.behind_seconds = declare.gauge(
            "diloco_reader_behind_seconds",
            "Since it first lacked one of these; if its shard is silent, since its last message.",
            "role",
        )
        self.skipped = declare.totals(
            "diloco_reader_skipped_versions_total", "Versions that it skipped for newer ones."
        ).begin()


class ReaderMetrics:
    def __init__(self) -> None:
        self.registry = MetricsRegistry()
        self.following = FollowingMetrics(Declare(self.registry))

    def follow(self, role: str, look: Callable[[], tuple[bool, bool, int, float, int]]) -> None:
        """`look` returns whether it is up and ready, the versions and seconds it is behind, and versions skipped."""

        def sample() -> None:
            up, ready, versions, seconds, skipped = look()
            self.following.up.labels(role).set(up)
            self.following.ready.labels(role).set(ready)
            self.following.behind_versions.labels(role).set(versions)
            self.following.behind_seconds.labels(role).set(seconds)
            self.following.skipped.follow(skipped)

        self.registry.before_scrape = sample
