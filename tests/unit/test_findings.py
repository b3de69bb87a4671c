"""What is wrong in a cluster: one list, over recorded statuses, and every view shows it with the same code."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from rich.console import Console

from diloco_deploy.cluster.roll_call import Roll, roll_call
from diloco_deploy.codes import CODES
from diloco_deploy.doctor.command import of_roll
from diloco_deploy.run.members import HOLD_S, Watch
from diloco_deploy.status import EXIT_DEGRADED, ClusterStatus, page
from diloco_deploy.web.feed import Feed
from statuses import learner, shard, worker

NOW = 1000.0
FULL = "storage: /data/0/3.version: [Errno 28] No space left on device"


@dataclass(frozen=True)
class Recorded:
    """What was done to a cluster of two shards with ann, bob and cy, and what must be found."""

    code: str
    member: str
    words: tuple[str, ...]
    learners: tuple[dict[str, Any], ...] = ()
    """That say something else than that all is well, at both shards."""
    shards: dict[str, Any] = field(default_factory=dict)
    """Of shard-0."""
    other: dict[str, Any] = field(default_factory=dict)
    """Of shard-1."""
    worker: dict[str, Any] | None = None
    """Of ann, who is asked herself."""

    def statuses(self) -> dict[str, dict[str, Any]]:
        others = {name: learner(name) for name in ("ann", "bob", "cy")} | {one["id"]: one for one in self.learners}
        said = [shard(0, *others.values(), **self.shards), shard(1, *others.values(), **self.other)]
        return {one["name"]: one for one in [*said, *([self.worker] if self.worker else [])]}


def overdue(open_s: float, *missing: str) -> dict[str, Any]:
    rounds = [
        {"id": i, "version": 3, "round": 4, "round_open": True, "open_s": open_s, "contributions": 1,
         "missing": list(missing)} for i in range(12)
    ]  # fmt: skip
    return {"fragments": rounds, "overdue_after_s": 20.0, "quorum": 3}


STALLED = learner("bob", "stalled", last_step_s=700.0)
LEFT_OUT = learner("cy", left_out=True, cosine=-0.62, kept=0.9)
REVOKED = learner("bob", "evicted", evicted_for="REVOKED", silent_s=95.0)
RECORDED = {
    "the disk is full": Recorded(
        "STORAGE", "shard-0", ("No space left", "free space"), shards={"ready": False, "reason": FULL}
    ),
    "a round stays open": Recorded(
        "NO_PROGRESS", "shard-0",
        ("12 rounds are overdue", "for 18:00", "bob (stalled), cy (left out)", "needs 3 (sync.quorum)"),
        learners=(STALLED, LEFT_OUT), shards=overdue(1080.0, "bob"),
    ),
    "a round stays open, and all seem well": Recorded(
        "NO_PROGRESS", "shard-0", ("missing: ann (has not contributed)",), shards=overdue(30.0, "ann")
    ),
    "too few for a round": Recorded(
        "NO_PROGRESS", "shard-0", ("2 learners can contribute", "missing: bob (away)"),
        learners=(learner("bob", "evicted", silent_s=95.0),), shards={"overdue_after_s": 20.0, "quorum": 3},
    ),
    "a learner stalls": Recorded("STALLED", "bob", ("for 11:40", "data, a lock"), learners=(STALLED,)),
    "a learner points away": Recorded("LEFT_OUT", "cy", ("cosine -0.62", "its labels"), learners=(LEFT_OUT,)),
    "a learner is too long": Recorded("SHORTENED", "cy", ("31% of",), learners=(learner("cy", kept=0.31),)),
    "a learner is gone": Recorded(
        "WORKER_AWAY", "bob", ("bob is away for 1:35", "restart it"),
        learners=(learner("bob", "evicted", silent_s=95.0),),
    ),
    "a learner is revoked": Recorded("REVOKED", "bob", ("give it a new identity, or remove it",), learners=(REVOKED,)),
    "a learner counts no tokens": Recorded(
        "NO_TOKENS", "ann", ("tokens=0",), learners=(learner("ann", inner_step=40, tokens=0),)
    ),
    "a certificate ends soon": Recorded(
        "CERTIFICATE_ENDS_SOON", "shard-0", ("expires in 2 d 1 h",), shards={"certificate_s": 2 * 86400 + 3700.0}
    ),
    "a certificate has expired": Recorded(
        "EXPIRED", "shard-0", ("expired 1:00 ago",), shards={"certificate_s": -60.0}
    ),
    "versions differ": Recorded(
        "PACKAGES_DIFFER", "", ("shard-0 1.0, shard-1 1.1",), shards={"package": "1.0"}, other={"package": "1.1"}
    ),
    "a clock is wrong": Recorded(
        "CLOCK_SKEWED", "shard-0", ("3,600 s behind ours", "NTP"), shards={"clock_skew_s": -3600.0}
    ),
    "a disk fills up": Recorded(
        "DISK_SMALL", "shard-0", ("5.00 MB of its disk",),
        shards={"disk_free_bytes": 5_000_000, "fragments": [{"id": 0, "version": 3, "elements": 1_000_000}]},
    ),
    "a proxy refuses pushes": Recorded(
        "PUSHES_FAIL", "ann", ("to shard-0, shard-1 have failed for 0:19 (status: 413)", "client_max_body_size"),
        learners=(learner("ann", pushes_fail_s=19.0, pushes_fail_why="status: 413"),),
    ),
    "a shard refuses a learner": Recorded(
        "WRONG_IDENTITY", "ann", ("ps-0:1: not you",),
        worker=worker("ann", shards=[{"address": "ps-0:1", "connected": False, "code": "WRONG_IDENTITY",
                                      "why": "not you"}]),
    ),
    "steps take versions back": Recorded(
        "VERSION_UNDONE", "ann", ("took back 3",), worker=worker("ann", versions_undone=3)
    ),
}  # fmt: skip


def called(recorded: Recorded) -> Roll:
    said = recorded.statuses()
    return roll_call(dict.fromkeys(said, "host:1"), said, None, NOW)


def terminal(roll: Roll) -> str:
    console = Console(file=io.StringIO(), width=1000)
    console.print(page(roll, 1000))
    return console.file.getvalue()


@pytest.mark.parametrize("recorded", RECORDED.values(), ids=RECORDED)
def test_every_view_finds_it_with_the_same_code(recorded: Recorded) -> None:
    roll = called(recorded)
    found = next(one for one in roll.problems if (one.code, one.member) == (recorded.code, recorded.member))
    assert all(words in str(found) for words in recorded.words), found
    assert recorded.code in CODES, "`diloco explain` knows it"

    status = ClusterStatus.of(roll)
    assert json.loads(status.model_dump_json())["problems"][roll.problems.index(found)] == vars(found)
    assert (status.exit_code(strict=True), status.exit_code(strict=False)) == (EXIT_DEGRADED, 0)
    assert f"! {found}" in terminal(roll)
    assert (found.code, found.words, found.do) in {(one.code, one.what, one.do) for one in of_roll(roll)}

    feed, watch = Feed(NOW), Watch(NOW)
    statuses = recorded.statuses()
    for name, said in statuses.items():
        watch.expect(name, "shard" if said["role"] == "shard" else "worker")
        watch.process(name, "up")
        watch.heard(name, said, NOW)
        if said["role"] == "shard":
            feed.expect([name])
            feed.heard(name, said, None, NOW, NOW)
    if not recorded.worker:  # the page asks shards alone
        assert (recorded.code, recorded.member) in {(f["code"], f["member"]) for f in feed.since(0, NOW)["findings"]}
    assert watch.wrong(NOW) == [], "what is over at once is not told"
    for name, said in statuses.items():
        watch.heard(name, said, NOW + HOLD_S)
    assert f"! {found}" in watch.wrong(NOW + HOLD_S)


@pytest.mark.parametrize("asked", ["shard-0", "ps-0:8080"])
def test_who_cannot_be_asked_for_an_expired_certificate_is_not_just_away(asked: str) -> None:
    said = Recorded("", "", ()).statuses()
    del said["shard-0"]
    roll = roll_call({"shard-1": "b:1", asked: "ps-0:8080"}, said, None, NOW, {asked: "its certificate has expired"})
    (found,) = roll.problems
    assert (found.code, found.member) == ("EXPIRED", "shard-0")
    assert "diloco certs issue" in found.do

    feed = Feed(NOW)
    feed.expect(["shard-0"])
    feed.silent("shard-0", "its certificate has expired", NOW, "EXPIRED")
    assert [one["code"] for one in feed.since(0, NOW)["findings"]] == ["EXPIRED"]


def test_who_falls_silent_as_its_certificate_ends_is_not_just_away() -> None:
    watch = Watch(NOW)
    watch.expect("shard-0", "shard")
    watch.process("shard-0", "up")
    watch.heard("shard-0", shard(0, count=1, certificate_s=5.0), NOW)
    told = [line for second in range(20) for line in watch.wrong(NOW + second) if line.startswith("!")]
    assert [line.rpartition(" ")[2] for line in told] == ["[CERTIFICATE_ENDS_SOON]", "[EXPIRED]"]


def test_nothing_is_found_where_all_is_well() -> None:
    assert called(Recorded("", "", ())).problems == ()


def test_a_finding_is_told_once_and_when_it_is_over() -> None:
    watch = Watch(NOW)
    watch.expect("shard-0", "shard")
    watch.process("shard-0", "up")
    told = []
    for second in range(30):
        full = {"ready": False, "reason": FULL} if 5 <= second < 20 else {}
        watch.heard("shard-0", shard(0, count=1, **full), NOW + second)
        told += [(second, words.split(";")[0]) for words in watch.wrong(NOW + second)]
    assert [second for second, _ in told] == [8, 20]
    assert told[1][1] == "shard-0: STORAGE is over"
