"""A shard lives through a history; then /status, Prometheus, `diloco status`, `--json` and the page agree.

The shard is real and judges by itself; the network is left out, and the clock of its leases is ours.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import torch

from builders import make_settings
from diloco_common.codec import Chunk, encode_payload, encoding_names
from diloco_common.observe.logs import Log
from diloco_common.observe.metrics.shard import ShardMetrics
from diloco_common.trust.identity import Identity
from diloco_common.wire.manifest import TensorSpec, cut
from diloco_common.wire.messages import PROTOCOL, JoinRequest, Outcome, Progress, PushHeader
from diloco_deploy.cluster.reading import read_json, read_status
from diloco_deploy.cluster.roll_call import Roll, roll_call
from diloco_deploy.status import ClusterStatus
from diloco_deploy.web.feed import Feed
from diloco_server.shell.host import ShardHost
from diloco_server.shell.server import real_world
from diloco_server.shell.service import Service
from diloco_server.shell.status import rounds_since, shard_status
from diloco_server.storage.store import MemoryStore
from waiting import DEADLINE_S, until_async

EPOCH, SIZE = 7, 600
MODEL = (TensorSpec("w", (SIZE,)),)
MANIFEST = cut(MODEL, 1, 1)
JOIN = JoinRequest(PROTOCOL, "process", MODEL, encoding_names())
NOW = 1_000_000.0


class Shard:
    """A shard with one fragment, and what is said of it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.metrics = ShardMetrics()
        self.host = ShardHost(
            make_settings(sync={"sync_every": 1, "quorum": "all"}), MemoryStore(EPOCH), real_world(),
            metrics=self.metrics, log=Log("shard-0"), clock=lambda: self.now,
        )  # fmt: skip
        self.service = Service(self.host)
        self.feed = Feed(NOW)
        self.feed.expect(["shard-0"])

    async def join(self, name: str) -> Identity:
        answer = await self.service.join(Identity("local", name), JOIN)
        return Identity("local", name, answer.generation, answer.epoch)

    async def push(self, caller: Identity, number: int) -> Outcome:
        """A seed (round 0), or a contribution."""
        payload, work = encode_payload(torch.ones(SIZE), "float32", chunk_elements=256), number and 10
        header = PushHeader(0, number, EPOCH, 0, work, work, payload.header, MANIFEST.digest)

        async def parts() -> AsyncIterator[PushHeader | Chunk]:
            yield header
            for chunk in payload.chunks:
                yield chunk

        return (await self.service.push(caller, parts())).outcome

    def pass_by(self, steps: range, *here: Identity) -> None:
        """A second for each step of those who are here."""
        for step in steps:
            self.now += 1.0
            for caller in here:
                self.host.progress(caller, Progress(step, 10 * step))
            self.host.advance()

    def seen(self) -> tuple[Roll, dict[str, Any], dict[str, Any]]:
        """By a roll call, in its JSON, and on the page."""
        said = read_status(json.dumps(shard_status(self.host, "")).encode())
        told = read_json(json.dumps(rounds_since(self.host, 0, 0)).encode())
        roll = roll_call({"shard-0": "host:1"}, {"shard-0": said}, None, NOW)
        self.feed.heard("shard-0", said, told, NOW + self.now, self.now)
        return roll, json.loads(ClusterStatus.of(roll).model_dump_json()), self.feed.since(0, NOW + self.now)

    def series(self, name: str) -> dict[str, float]:
        """Labels, joined -> value, but for zeros. As Prometheus scrapes it."""
        self.host.telemetry.sample(self.now, is_ready=True)
        samples = [one for family in self.metrics.registry.collect() for one in family.samples if one.name == name]
        return {" ".join(one.labels.values()): one.value for one in samples if one.value}


def test_every_view_finds_a_round_that_stays_open_and_a_learner_that_is_gone() -> None:
    async def play() -> None:
        shard = Shard()
        ann, bob = await shard.join("ann"), await shard.join("bob")
        assert await shard.push(ann, 0) is Outcome.ACCEPTED
        await until_async(lambda: shard.host.shard.versions.all_seeded, "version 0")
        shard.pass_by(range(2), ann, bob)
        assert await shard.push(ann, 1) is Outcome.ACCEPTED
        shard.pass_by(range(2, 90), ann, bob)  # both go on, and only ann contributes
        roll, printed, state = shard.seen()
        assert [(one.code, one.member) for one in roll.problems] == [("NO_PROGRESS", "shard-0")]
        assert "missing: bob (has not contributed)" in roll.problems[0].words
        for found in (printed["problems"], state["findings"]):
            assert [(one["code"], one["member"]) for one in found] == [("NO_PROGRESS", "shard-0")]
        oldest, overdue = (shard.series(f"diloco_shard_{n}_seconds")[""] for n in ("oldest_round", "overdue_after"))
        assert oldest == roll.problems[0].since_s > overdue, "so the alert fires"

        shard.pass_by(range(90, 110), ann)
        roll, printed, state = shard.seen()
        rows = shard.feed.learners(sort="id", descending=False, find="", page=0, now=NOW + shard.now)["rows"]
        assert {row["id"]: row["state"] for row in rows} == {"ann": "training", "bob": "away"}
        members = {one["name"]: one["state"] for one in printed["members"]}
        assert (members["ann"], members["bob"]) == ("training", "away")
        for found in (printed["problems"], state["findings"], map(vars, roll.problems)):
            assert ("WORKER_AWAY", "bob") in {(one["code"], one["member"]) for one in found}
        assert shard.series("diloco_shard_learner_state") == {"ann alive": 1, "bob evicted": 1}
        assert shard.series("diloco_shard_learners") == {"alive": 1}
        assert shard.series("diloco_shard_evictions_total") == {"LEASE_EXPIRED": 1}
        assert printed["totals"]["evictions"] == state["totals"]["evictions"] == 1
        shard.host.close()

    asyncio.run(asyncio.wait_for(play(), DEADLINE_S))
