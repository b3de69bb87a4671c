"""Two shards live through a history; then /status, /rounds, Prometheus, `diloco status`, `--json` and the page agree.

The shards are real and judge by themselves; the network is left out, and the clock of the leases is ours.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from rich.console import Console

from builders import make_settings
from diloco_common.codec import Chunk, encode_payload, encoding_names
from diloco_common.errors import Refusal
from diloco_common.observe.logs import Log
from diloco_common.observe.metrics.shard import ShardMetrics
from diloco_common.trust.identity import Identity
from diloco_common.wire.manifest import TensorSpec, cut
from diloco_common.wire.messages import PROTOCOL, JoinRequest, Outcome, Progress, PushHeader, Range
from diloco_deploy.cluster.reading import read_json, read_status
from diloco_deploy.cluster.roll_call import Roll, roll_call
from diloco_deploy.show.status import ClusterStatus, page
from diloco_deploy.web.feed import Feed
from diloco_server.shell.host import ShardHost
from diloco_server.shell.server import real_world
from diloco_server.shell.service import Service
from diloco_server.shell.status import rounds_since, shard_status
from diloco_server.storage.store import MemoryStore
from waiting import DEADLINE_S, until_async

EPOCH, SIZE, RANKS = 7, 600, 4
MODEL = tuple(TensorSpec(f"w{i}", (SIZE,)) for i in range(2))
MANIFEST = cut(MODEL, 2, 2)
JOIN = JoinRequest(PROTOCOL, "process", MODEL, encoding_names())
NOW = 1_000_000.0


class Shard:
    """A shard with one fragment, and what it says."""

    def __init__(self, index: int) -> None:
        self.now, self.name = 0.0, f"shard-{index}"
        settings = make_settings(
            sync={"sync_every": 1, "quorum": "all", "fragments": 2}, shard={"index": index, "count": 2}
        )
        self.metrics = ShardMetrics()
        self.host = ShardHost(
            settings, MemoryStore(EPOCH), real_world(), metrics=self.metrics, log=Log(self.name), clock=lambda: self.now
        )
        self.service = Service(self.host)
        (self.fragment,) = (one.fragment_id for one in MANIFEST.fragments if one.shard_index == index)

    async def join(self, name: str) -> Identity:
        answer = await self.service.join(Identity("local", name), JOIN)
        return Identity("local", name, answer.generation, answer.epoch)

    def steps(self, caller: Identity, *steps: int) -> None:
        for step in steps:
            self.host.progress(caller, Progress(step, 10 * step))

    def pass_by(self, seconds: float, *here: Identity) -> None:
        """Time goes on; only those who are here are heard."""
        for _ in range(round(seconds)):
            self.now += 1.0
            for caller in here:
                self.steps(caller, 1)
            self.host.advance()

    async def push(self, caller: Identity, number: int, **more: Any) -> Outcome:
        """A seed (round 0), or a contribution of an island's rank."""
        rank = more.get("part")
        low, high = (0, SIZE) if rank is None else (rank * SIZE // RANKS, (rank + 1) * SIZE // RANKS)
        payload = encode_payload(torch.ones(high - low), "float32", chunk_elements=256)
        tokens = number and 10
        if rank is not None:
            more |= {"num_parts": RANKS, "ranges": (Range(low, high),)}
        header = PushHeader(
            self.fragment, number, EPOCH, 0, tokens, tokens, payload.header, MANIFEST.digest, **more
        )  # fmt: skip

        async def parts() -> AsyncIterator[PushHeader | Chunk]:
            yield header
            for chunk in payload.chunks:
                yield chunk

        return (await self.service.push(caller, parts())).outcome

    def status(self) -> dict[str, Any]:
        return read_status(json.dumps(shard_status(self.host, "")).encode())

    def rounds(self) -> dict[str, Any]:
        return read_json(json.dumps(rounds_since(self.host, 0, 0)).encode())

    def series(self, name: str) -> dict[str, float]:
        """Labels, joined -> value, but for zeros. As Prometheus scrapes it."""
        self.host.telemetry.sample(self.now, is_ready=True)
        samples = [one for family in self.metrics.registry.collect() for one in family.samples if one.name == name]
        return {" ".join(one.labels.values()): one.value for one in samples if one.value}


class Run:
    """Two shards, seeded, with ann and bob at both."""

    def __init__(self) -> None:
        self.shards = (Shard(0), Shard(1))
        self.ann: list[Identity] = []
        self.bob: list[Identity] = []

    async def begin(self) -> None:
        for shard in self.shards:
            ann, bob = await shard.join("ann"), await shard.join("bob")
            self.ann.append(ann)
            self.bob.append(bob)
            assert await shard.push(ann, 0) is Outcome.ACCEPTED
            await until_async(lambda shard=shard: shard.host.shard.versions.all_seeded, "version 0")
            for caller in (ann, bob):
                shard.steps(caller, 0, 1)
            await until_async(lambda shard=shard: shard.host.shard.open_rounds == 1, "a round")


async def an_island_is_refused(run: Run) -> None:
    for rank in range(RANKS):
        await run.shards[0].push(run.ann[0], 1, part=rank, not_finite=True)


async def a_learner_is_revoked(run: Run) -> None:
    for shard, bob in zip(run.shards, run.bob, strict=True):
        shard.host.revoke(bob)
    with pytest.raises(Refusal):
        await run.shards[0].push(run.bob[0], 1)


async def one_shard_evicts_whom_the_other_keeps(run: Run) -> None:
    run.shards[0].pass_by(20.0, run.ann[0])
    run.shards[1].pass_by(20.0, run.ann[1], run.bob[1])


async def a_learner_says_goodbye_to_one_and_falls_silent_at_the_other(run: Run) -> None:
    run.shards[0].host.leave(run.bob[0])
    run.shards[0].pass_by(20.0, run.ann[0])
    run.shards[1].pass_by(20.0, run.ann[1])


async def nothing_happens(_: Run) -> None:
    pass


@pytest.mark.parametrize(
    ("history", "bob", "refused", "evicted"),
    [
        pytest.param(nothing_happens, "training", {}, {}, id="nothing"),
        pytest.param(an_island_is_refused, "training", {"NOT_FINITE": 1}, {}, id="island refused"),
        pytest.param(a_learner_is_revoked, "away", {}, {"REVOKED": 2}, id="revoked"),
        pytest.param(one_shard_evicts_whom_the_other_keeps, "partly", {}, {"LEASE_EXPIRED": 1}, id="evicted by one"),
        pytest.param(
            a_learner_says_goodbye_to_one_and_falls_silent_at_the_other, "away", {}, {"LEASE_EXPIRED": 1}, id="goodbye"
        ),
    ],
)
def test_every_view_of_a_history_says_the_same(history, bob, refused, evicted) -> None:
    async def play() -> None:
        run = Run()
        await run.begin()
        await history(run)
        await asyncio.sleep(0)
        for shard in run.shards:
            shard.host.advance()
        try:
            judge(run)
        finally:
            for shard in run.shards:
                shard.host.close()

    def judge(run: Run) -> None:
        said = {shard.name: shard.status() for shard in run.shards}
        told = {shard.name: shard.rounds() for shard in run.shards}
        roll = roll_call(dict.fromkeys(said, "host:1"), said, None, NOW)
        feed = Feed(NOW)
        feed.expect(said)
        for shard in run.shards:
            feed.heard(shard.name, said[shard.name], told[shard.name], NOW, 0.0)
        state, rows = feed.since(0, NOW), {row["id"]: row for row in learner_rows(feed)}
        printed = json.loads(ClusterStatus.of(roll).model_dump_json())  # --json
        members = {one["name"]: one["state"] for one in printed["members"]}

        found = {(one.code, one.member) for one in roll.problems}
        assert found == {(one["code"], one["member"]) for one in state["findings"]}
        assert found == {(one["code"], one["member"]) for one in printed["problems"]}
        word = {"away": "REVOKED" if "REVOKED" in evicted else "WORKER_AWAY", "partly": "CUT_OFF"}.get(bob)
        assert {code for code, member in found if member == "bob"} == ({word} if word else set())

        learners = set(rows)
        assert {"ann": "training", "bob": bob} == {name: rows[name]["state"] for name in learners}
        assert {"ann": "training", "bob": bob} == {name: members[name] for name in learners}
        for shard, row in zip(run.shards, state["shards"], strict=True):
            at_shard = {one["id"]: one["state"] for one in said[shard.name]["learners"]}
            assert {f"{name} {word}": 1 for name, word in at_shard.items()} == shard.series(
                "diloco_shard_learner_state"
            )
            held = shard.series("diloco_shard_learners").get("alive", 0)
            assert (row["learners"], f"{held:.0f} alive" in drawn(roll)) == (held, True)
            away = {name for name, word in at_shard.items() if word not in ("alive", "stalled")}
            assert away == {name for name in learners if shard.name in rows[name]["away_at"]}

        assert refused == state["totals"]["refused"] == total(run, "diloco_shard_contributions_rejected_total")
        assert refused == added(one["refused"] for shard in told.values() for one in shard["rounds"])
        assert evicted == total(run, "diloco_shard_evictions_total")
        assert evicted == added(one["evictions_by_code"] for one in said.values())
        counted = Counter(e["code"] for shard in told.values() for e in shard["events"] if e["event"] == "evicted")
        assert evicted == counted
        before = state["totals"]["rounds"]
        feed.heard("shard-0", said["shard-0"] | {"epoch": EPOCH + 1, "rounds": 1}, None, NOW + 1, 1.0)
        again = feed.since(0, NOW + 1)
        assert (again["shards"][0]["starts"], again["totals"]["rounds"]) == (2, before + 1), "it has started again"
        assert sum(evicted.values()) == state["totals"]["evictions"] == printed["totals"]["evictions"]

    asyncio.run(asyncio.wait_for(play(), DEADLINE_S))


def test_a_round_that_stays_open_is_found_by_every_view_and_the_alert() -> None:
    async def play() -> None:
        run = Run()
        await run.begin()
        shard, (ann, _), (bob, _) = run.shards[0], run.ann, run.bob
        for step in range(2, 90):  # both go on, and only ann contributes
            shard.now += 1.0
            shard.steps(ann, step)
            shard.steps(bob, step)
            if step == 2:
                assert await shard.push(ann, 1) is Outcome.ACCEPTED
            shard.host.advance()
        try:
            said = shard.status()
            (found, *_) = roll_call({"shard-0": "host:1"}, {"shard-0": said}, None, NOW).problems
            feed = Feed(NOW)
            feed.expect(["shard-0"])
            feed.heard("shard-0", said, None, NOW, 0.0)
            assert (found.code, found.member) == ("NO_PROGRESS", "shard-0")
            assert "missing: bob (has not contributed)" in found.words
            assert found.code in {one["code"] for one in feed.since(0, NOW)["findings"]}
            oldest, overdue = (
                shard.series(f"diloco_shard_{name}_seconds")[""] for name in ("oldest_round", "overdue_after")
            )
            assert oldest == found.since_s > overdue
        finally:
            for one in run.shards:
                one.host.close()

    asyncio.run(asyncio.wait_for(play(), DEADLINE_S))


def learner_rows(feed: Feed) -> list[dict[str, Any]]:
    return list(feed.learners(sort="id", descending=False, find="", page=0, now=NOW)["rows"])


def drawn(roll: Roll) -> str:
    """What a terminal shows."""
    console = Console(file=io.StringIO(), width=120)
    console.print(page(roll, 120))
    return console.file.getvalue()


def total(run: Run, name: str) -> dict[str, float]:
    return added(shard.series(name) for shard in run.shards)


def added(counts: Any) -> dict[str, float]:
    return dict(sum((Counter(one) for one in counts), Counter()))
