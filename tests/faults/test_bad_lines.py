"""A learner behind a long and bad line, and behind a thin one: nobody is evicted, and heartbeats are not starved."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import loudly
import pytest
from networks import Namespace, NotPossible, need_namespaces
from steady import FAULT_SECONDS, PATIENT, SteadyCluster

from processes import until, versions

# Of a line like these, contract/test_thin_link_contract.py has a short case.
pytestmark = [pytest.mark.gate, pytest.mark.xdist_group("network")]
DELAY_S, JITTER_S, LOSS = 0.08, 0.02, 0.01
"""One way, by packet."""
THIN = "5mbit"
WIDTH = 400
"""160 000 parameters: a version is 320 kB, half a second on the thin line."""


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    need_namespaces("a bad line")
    with Namespace() as made:
        yield made


def train_over(line: Namespace, folder: Path, width: int) -> None:
    """For several leases and many versions. Nobody is evicted, no connection is lost, and nothing counts twice."""
    settings: dict[str, object] = {  # rounds wait for all: with a short grace window, the far one would always be late
        "shard.listen": f"{line.near}:0", "security.insecure": True, "sync.sync_every": 25, "sync.quorum": "all",
        **PATIENT,
    }  # fmt: skip
    with SteadyCluster(folder, settings, width=width) as cluster:
        cluster.add("near")
        cluster.add("far", namespace=line.name)
        (shard,), far = cluster.shards, cluster.learners["far"]
        began, goal = time.monotonic(), min(versions(shard.status()).values()) + 8
        until(lambda: min(versions(shard.status()).values()) >= goal, "versions")
        seconds = max(2 * PATIENT["lease.lease_s"], FAULT_SECONDS)
        until(lambda: time.monotonic() - began > seconds, "leases to go by", seconds + 10)
        cluster.await_merged("far")

        status, history = shard.status(), far.ask()
        print(
            f"{seconds:g} s: {status['rounds']} rounds, {status['evictions']} evictions, {history.steps} steps of far"
        )
        assert status["evictions"] == 0
        assert {learner["state"] for learner in status["learners"]} == {"alive"}
        assert history.reconnects == 0
        assert cluster.disagreements() == []


def test_delay_jitter_loss_and_reordering_evict_nobody(namespace: Namespace, tmp_path: Path) -> None:
    """Fault 12: 80 ms, jitter, 1 % of the packets lost, some overtaken."""
    try:
        link = namespace.plug_in_far_away(DELAY_S, JITTER_S, LOSS, seed=12)
    except (NotPossible, OSError) as error:
        loudly.skip("a long line", f"no TUN device: {error}")
    train_over(namespace, tmp_path, width=24)
    print(f"{link.carried} packets carried, {link.lost} lost, {link.overtaken} overtaken")
    assert min(link.lost, link.overtaken) > 0


def test_heartbeats_are_not_starved_on_a_thin_line(namespace: Namespace, tmp_path: Path) -> None:
    """Fault 12: 5 Mbit/s, with pushes and pulls that fill it."""
    namespace.plug_in()
    namespace.thin(THIN)
    train_over(namespace, tmp_path, WIDTH)
