"""A learner in a network namespace of its own, whose links to shards are cut, one way or both, or refused."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from networks import Namespace, need_namespaces
from steady import CALM_S, FAULT_SECONDS, SteadyCluster

from diloco_common.wire.calls import LONGEST_S
from processes import until

pytestmark = pytest.mark.xdist_group("network")
DIALING_S = 10.0
"""For so long nobody answered: from then on, at most one connect per second."""
COUNTED_S = 5.0


@pytest.fixture(scope="module")
def namespace() -> Iterator[Namespace]:
    need_namespaces("a link that is cut")
    with Namespace() as made:
        made.plug_in()
        yield made


@pytest.fixture(scope="module")
def shared(namespace: Namespace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SteadyCluster]:
    """Two shards and `near` outside, `far` behind the link."""
    settings = {"shard.listen": f"{namespace.near}:0", "security.insecure": True}
    with SteadyCluster(
        tmp_path_factory.mktemp("cut"), settings, shards=2, longest_wait_s=LONGEST_S, step_s=CALM_S
    ) as cluster:
        cluster.add("near")
        cluster.add("far", namespace=namespace.name)
        yield cluster


@pytest.fixture
def cluster(shared: SteadyCluster) -> Iterator[SteadyCluster]:
    """Everybody is alive before; after the fault, nothing was lost or counted twice."""
    until(lambda: all(is_alive(shared, name, shard) for name in shared.learners for shard in (0, 1)), "all alive")
    yield shared
    assert shared.disagreements() == []
    assert [h.mixed for h in shared.ask()] == [[], []]
    assert "Traceback" not in shared.said()


def ports(cluster: SteadyCluster) -> list[int]:
    return [int(shard.endpoints.grpc.rpartition(":")[2]) for shard in cluster.shards]


def is_alive(cluster: SteadyCluster, name: str, shard: int) -> bool:
    return cluster.shards[shard].learner(name)["state"] == "alive"


def await_rounds(cluster: SteadyCluster, shard: int, count: int = 4) -> None:
    goal = cluster.shards[shard].status()["rounds"] + count
    until(lambda: cluster.shards[shard].status()["rounds"] >= goal, f"rounds of shard {shard}")


def await_healed(cluster: SteadyCluster, namespace: Namespace, what: str) -> None:
    """`far` is back on all shards, and all that it has trained on is merged."""
    began = time.monotonic()
    namespace.heal()
    until(lambda: all(is_alive(cluster, "far", shard) for shard in (0, 1)), "far to be back")
    print(f"{what}: back {time.monotonic() - began:.2f} s after healing")
    cluster.await_merged("far")


def test_a_learner_cut_off_from_one_shard_goes_on_with_the_other(cluster: SteadyCluster, namespace: Namespace) -> None:
    """Fault 9."""
    far = cluster.learners["far"]
    namespace.cut(ports(cluster)[:1])
    until(lambda: far.ask().connected == [False, True], "far to notice")
    until(lambda: not is_alive(cluster, "far", 0), "shard 0 to evict far")

    merged = cluster.shards[1].learner("far")["merged"]
    until(lambda: cluster.shards[1].learner("far")["merged"] > merged + 4, "contributions of far to shard 1")
    await_rounds(cluster, 0)
    until(lambda: is_alive(cluster, "far", 1), "far to be alive for shard 1")

    await_healed(cluster, namespace, "cut off from one shard")


def test_a_learner_cut_off_from_all_trains_on_and_its_work_arrives(
    cluster: SteadyCluster, namespace: Namespace
) -> None:
    """Fault 10."""
    far, before, began = cluster.learners["far"], cluster.learners["far"].ask(), time.monotonic()
    namespace.cut(ports(cluster))
    until(lambda: far.ask().connected == [False, False], "far to notice")
    until(lambda: not any(is_alive(cluster, "far", shard) for shard in (0, 1)), "both shards to evict far")
    alone = far.ask()
    until(lambda: far.ask().steps > alone.steps + 20, "steps of far alone")
    for shard in (0, 1):
        await_rounds(cluster, shard)
    until(lambda: time.monotonic() - began > FAULT_SECONDS, "the time that was asked for", FAULT_SECONDS + 10)
    assert far.ask().steps > before.steps

    await_healed(cluster, namespace, "cut off from all")


def test_contributions_whose_answers_get_lost_count_once(cluster: SteadyCluster, namespace: Namespace) -> None:
    """Fault 11: what the shards send does not arrive; what the learner sends does, for a while."""
    far = cluster.learners["far"]
    accepted = sum(shard.learner("far")["contributed"] for shard in cluster.shards)
    namespace.cut(ports(cluster), both_ways=False)
    until(lambda: far.ask().connected == [False, False], "far to notice")

    namespace.heal()

    cluster.await_merged("far")
    assert sum(shard.learner("far")["contributed"] for shard in cluster.shards) > accepted
    duplicates = [shard.status()["duplicates"] for shard in cluster.shards]
    print(f"one way cut: {duplicates} duplicates answered")


@pytest.mark.gate
def test_a_learner_that_is_refused_again_and_again_slows_down(cluster: SteadyCluster, namespace: Namespace) -> None:
    """Fault 13: after 10 s, at most one connect per second."""
    far, (port, _) = cluster.learners["far"], ports(cluster)
    namespace.refuse(port)
    until(lambda: far.ask().connected == [False, True], "far to notice")
    began = time.monotonic()
    until(lambda: time.monotonic() - began > DIALING_S, "it to dial for a while")
    looked, dialed = time.monotonic(), namespace.dials()
    until(lambda: time.monotonic() - looked > COUNTED_S, "some more attempts")
    more = namespace.dials() - dialed
    counted_s = time.monotonic() - looked
    print(f"refused: {dialed} connects in {looked - began:.1f} s, {more} in {counted_s:.1f} s afterwards")

    assert dialed > 0
    assert more <= counted_s + 1

    await_healed(cluster, namespace, "refused")
