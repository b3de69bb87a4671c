"""One account of what happens on a shard: every fact is counted once, and /status, /rounds and /metrics agree.

What is told of the rounds is all that is new, once, and never without end.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from builders import make_settings
from diloco_common.observe.logs import Log
from diloco_common.observe.metrics.shard import ShardMetrics
from diloco_common.wire.messages import Outcome, PushAnswer, PushHeader
from diloco_server.core import ledger as module
from diloco_server.core.ledger import (
    ANSWER_MAX,
    BudgetReached,
    ContributionAnswered,
    ContributionDropped,
    Fact,
    LearnerForgotten,
    LearnerGone,
    LearnerJoined,
    LearnerLeftOut,
    LearnerTakesPart,
    Ledger,
    Merged,
    QuorumReached,
    RoundClosed,
    RoundOpened,
    SameLosses,
    VersionCommitted,
    VersionsLost,
)
from diloco_server.core.round import CloseReason
from diloco_server.shell.host import ShardHost
from diloco_server.shell.server import real_world
from diloco_server.shell.status import record_since, rounds_since, shard_status
from diloco_server.storage.store import MemoryStore

EPOCH = 7
NO_PAYLOAD: Any = None
JOINED = LearnerJoined("ann", 1, returned=False)


def answered(number: int, outcome: Outcome, code: str = "", *, fragment: int = 0, tokens: int = 100) -> Fact:
    header = PushHeader(fragment, number, EPOCH, number - 1, tokens, 4, NO_PAYLOAD, "digest")
    return ContributionAnswered("ann", header, PushAnswer(outcome, code), staleness=2, tokens=tokens)


class Shard:
    """A host that nobody calls; only facts are noted, at times that pass."""

    def __init__(self) -> None:
        self.now = 0.0
        settings, store = make_settings(), MemoryStore(EPOCH)
        self.metrics = ShardMetrics()
        self.host = ShardHost(
            settings, store, real_world(), metrics=self.metrics, log=Log("test"), clock=lambda: self.now
        )

    @property
    def ledger(self) -> Ledger:
        return self.host.shard.ledger

    def note(self, *facts: Fact, at: float | None = None) -> None:
        self.now = self.now if at is None else at
        self.host.shard._outbox.now = self.now
        for fact in facts:
            self.host.shard._outbox.note(fact)
        self.host.driver.carry_out_all()

    def whole_round(self, fragment_id: int, number: int, at: float) -> None:
        closed = RoundClosed(fragment_id, number, CloseReason.GRACE, participants=2, asked=3, absent=1, open_s=1.5)
        self.note(RoundOpened(fragment_id, number, asked=3), at=at)
        self.note(QuorumReached(fragment_id, number, after_s=1.0), at=at + 1)
        self.note(closed, at=at + 1.5)
        self.note(VersionCommitted(fragment_id, number, participants=2, tokens=200, round_s=2.0), at=at + 2)

    def since(self, seq: int, epoch: int = EPOCH, now: float | None = None) -> dict[str, Any]:
        self.now = self.now if now is None else now
        return rounds_since(self.host, epoch, seq)


def test_the_record_says_whose_work_is_in_each_version_and_goes_on_from_a_number(shard: Shard) -> None:
    whose = tuple(Merged(f"learner-{i}", tokens=10, share=0.5 / (i + 1), kept=0.8) for i in range(3))
    for version in range(1, ANSWER_MAX):
        shard.note(
            VersionCommitted(0, version, participants=3, tokens=30, round_s=1.0, merged=whose), at=float(version)
        )
    lines, epoch, seq = [], 0, 0
    while (said := record_since(shard.host, epoch, seq))["lines"]:
        assert len(said["lines"]) <= ANSWER_MAX
        lines, epoch, seq = lines + said["lines"], said["epoch"], said["seq"]
    assert [(one["version"], one["learner"]) for one in lines] == [
        (version, one.learner_id) for version in range(1, ANSWER_MAX) for one in whose
    ]
    assert lines[-1] | {"ago_s": 0.0} == {
        "ago_s": 0.0, "fragment": 0, "version": ANSWER_MAX - 1, "learner": "learner-2", "tokens": 10,
        "share": 0.166667, "kept": 0.8,
    }  # fmt: skip
    assert record_since(shard.host, epoch + 1, 10**9)["lines"], "after a restart of the shard everything is new"


@pytest.fixture
def shard():
    shard = Shard()
    yield shard
    shard.host.close()


def series(registry: CollectorRegistry, name: str) -> dict[str, float]:
    """Value of the one label -> total, but for zeros."""
    samples = [s for family in registry.collect() for s in family.samples if s.name == name]
    return {"".join(s.labels.values()): s.value for s in samples if s.value}


def draw(random_: random.Random) -> Fact:
    fragment, number, code = random_.randrange(3), random_.randrange(1, 6), random_.choice(["NOT_FINITE", "TOO_STALE"])
    learner, gone = random_.choice("abc"), random_.choice(["LEFT", "STALE_GENERATION", "LEASE_EXPIRED", "REVOKED"])
    outcome, tokens = random_.choice([*Outcome]), random_.randrange(100)
    return random_.choice(
        [
            answered(number, outcome, code if outcome is Outcome.REJECTED else "", fragment=fragment, tokens=tokens),
            ContributionDropped(learner, fragment, tokens),
            RoundOpened(fragment, number, asked=2),
            QuorumReached(fragment, number, after_s=1.0),
            RoundClosed(fragment, number, random_.choice([*CloseReason]), 2, 3, 1, 1.5),
            VersionCommitted(fragment, number, random_.randrange(1, 4), tokens, 2.0),
            VersionsLost(fragment, EPOCH - 1, 1, random_.randrange(2, 4), learner),
            LearnerJoined(learner, number, returned=number > 1),
            LearnerGone(learner, number, gone),
            LearnerForgotten(learner),
            LearnerLeftOut(learner, -0.2),
            LearnerTakesPart(learner),
            SameLosses(learner, "d"),
            BudgetReached(tokens),
        ]
    )


@pytest.mark.parametrize("seed", range(4))
def test_status_metrics_and_rounds_agree(shard: Shard, seed: int) -> None:
    random_ = random.Random(seed)
    for _ in range(random_.randrange(300)):
        shard.note(draw(random_), at=shard.now + 0.1)
        if random_.random() < 0.1:
            list(shard.metrics.registry.collect())  # a scrape between others changes nothing
    status, registry = shard_status(shard.host, ""), shard.metrics.registry

    assert series(registry, "diloco_shard_contributions_rejected_total") == status["rejected"]
    assert series(registry, "diloco_shard_evictions_total") == status["evictions_by_code"]
    outcomes = Counter(series(registry, "diloco_shard_contributions_total"))
    assert (outcomes["duplicate"], outcomes["late"]) == (status["duplicates"], status["late"])
    assert outcomes["accepted"] == sum(series(registry, "diloco_shard_staleness_versions_count").values())
    fates = Counter(series(registry, "diloco_shard_contributed_tokens_total"))
    tokens = status["tokens"] | {"refused": sum(status["tokens"]["refused"].values())}
    assert {fate: fates[fate] for fate in ("accepted", "merged", "late", "refused", "fenced")} == {
        fate: tokens[fate] for fate in ("accepted", "merged", "late", "refused", "fenced")
    }
    assert sum(series(registry, "diloco_shard_versions_lost_total").values()) == status["versions_lost"]
    assert sum(series(registry, "diloco_shard_round_seconds_count").values()) == status["rounds"]
    closed = series(registry, "diloco_shard_rounds_closed_total")
    assert sum(closed.values()) == sum(series(registry, "diloco_shard_round_participants_count").values())

    told = shard.since(0)
    assert told["events"][-len(status["events"]) :] == status["events"] or not status["events"]
    events = Counter(event["event"] for event in told["events"])
    assert events["evicted"] == status["evictions"]
    assert events["joined"] + events["returned"] == sum(series(registry, "diloco_shard_joins_total").values())
    assert events["left out"] == sum(series(registry, "diloco_shard_left_out_total").values())
    refused = Counter[str]()
    for traced in told["rounds"]:
        refused += Counter(traced["refused"])
    assert all(count <= status["rejected"][code] for code, count in refused.items()), "some were of no open round"


def test_a_round_is_told_from_its_opening_to_its_version(shard: Shard) -> None:
    shard.whole_round(4, 9, at=10.0)
    (traced,) = shard.since(0, now=15.0)["rounds"]
    assert traced == {
        "fragment": 4, "round": 9, "ago_s": 5.0, "asked": 3, "quorum_s": 1.0, "closed_s": 1.5, "why": "grace",
        "participants": 2, "announced_s": 2.0, "tokens": 200, "absent": 1, "refused": {},
    }  # fmt: skip


def test_what_was_told_is_told_again_only_when_it_has_changed(shard: Shard) -> None:
    shard.whole_round(0, 1, at=0.0)
    shard.note(RoundOpened(1, 1, asked=2))
    seq = shard.since(0)["seq"]
    assert shard.since(seq)["rounds"] == []

    shard.note(answered(1, Outcome.REJECTED, "NOT_FINITE"))
    assert [(r["fragment"], r["refused"]) for r in shard.since(seq)["rounds"]] == [(0, {"NOT_FINITE": 1})]


def test_whoever_knew_another_epoch_hears_everything(shard: Shard) -> None:
    shard.note(JOINED)
    shard.whole_round(0, 1, at=0.0)
    told = shard.since(1_000_000, epoch=EPOCH - 1, now=4.0)
    assert len(told["rounds"]) == 1
    assert told["events"] == [{"ago_s": 4.0, "event": "joined", "learner": "ann", "generation": 1}]


def test_the_oldest_rounds_and_events_are_forgotten(shard: Shard) -> None:
    for number in range(1, module.ROUNDS_MAX + 10):
        shard.ledger.note(RoundOpened(0, number, asked=1), float(number))
        shard.ledger.note(JOINED, float(number))

    rounds, seq = [], 0
    while more := (answer := shard.since(seq))["rounds"]:
        assert len(more) <= module.ANSWER_MAX
        rounds, seq = rounds + more, answer["seq"]
    assert [r["round"] for r in rounds] == list(range(10, module.ROUNDS_MAX + 10))
    assert len(shard.ledger.events) == module.ANSWER_MAX
