"""Shards that keep their versions in a data folder are killed and come back with them: Faults 5, 6, 8 and 20."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from diloco_server.storage.filesystem import Disk
from diloco_server.storage.version_file import StoredVersion, read_version, version_names
from diloco_worker.global_model import pull_global_model
from processes import LocalCluster, Status, run_module, sets, until, versions

ENDLESS = {"run.tokens": 0}


def newest(folder: Path, fragments: int = 4) -> dict[int, StoredVersion]:
    """What a shard's folder holds, by fragment."""
    disk = Disk(folder)
    found = {i: version_names(i, disk.names()) for i in range(fragments)}
    return {i: read_version(disk, names[0])[1] for i, names in found.items() if names}


def identities(status: Status) -> dict[int, tuple[int, int]]:
    return {f["id"]: (f["epoch"], f["version"]) for f in status["fragments"]}


@pytest.mark.gate
def test_a_killed_shard_comes_back_with_every_announced_version_bit_for_bit(tmp_path: Path) -> None:
    """reliability.md 5: three times at random moments; nobody stops, nothing is seeded again."""
    chance = random.Random(5)
    with LocalCluster(tmp_path / "run", ENDLESS, keeps=True) as cluster:
        cluster.start(shards=1, workers=["ann", "ben"])
        (shard,), workers = cluster.shards, list(cluster.workers.values())
        for _ in range(3):
            epoch = shard.status()["epoch"]
            target = max(versions(shard.status()).values()) + chance.randint(1, 3)
            until(lambda target=target: max(versions(shard.status()).values()) >= target, "versions")  # type: ignore[misc]
            announced = identities(shard.status())
            shard.kill()
            kept = newest(cluster.data(0))
            for fragment_id, identity in announced.items():
                record = kept[fragment_id].record
                assert (record.epoch, record.version) >= identity, "an announced version is lost"

            steps = [worker.status()["inner_step"] for worker in workers]
            shard.start()
            until(lambda: shard.status()["ready"], "the shard to serve")
            back = shard.status()

            assert back["epoch"] > epoch
            for fragment_id, stored in kept.items():
                assert identities(back)[fragment_id] >= (stored.record.epoch, stored.record.version)
            least = min(version for _, version in announced.values())
            until(lambda least=least: min(versions(shard.status()).values()) > least, "rounds")  # type: ignore[misc]
            assert all(w.status()["inner_step"] > s for w, s in zip(workers, steps, strict=True))
            assert [w.alive for w in workers] == [True, True]
        assert shard.said().count("fragment seeded") == 4, "only its first life was seeded"
        assert "versions lost" not in shard.said()


def test_what_a_shard_serves_after_a_crash_is_what_its_files_say(tmp_path: Path) -> None:
    """reliability.md 6: everything is killed; the shard alone is started again and asked for its model."""
    with LocalCluster(tmp_path / "run", ENDLESS, keeps=True) as cluster:
        cluster.start(shards=1, workers=["ann"])
        (shard,) = cluster.shards
        for process in (shard, *cluster.workers.values()):
            process.kill()
        kept = newest(cluster.data(0))
        shard.start()
        until(lambda: shard.status()["ready"], "the shard to serve")

        found = pull_global_model([shard.endpoints.grpc], run="local", bearer_token=None)

        theta = torch.cat([stored.values.theta for _, stored in sorted(kept.items())])
        served = torch.cat([tensor.flatten() for tensor in found.tensors.values()])
        assert torch.equal(theta.sort().values, served.sort().values)
        assert found.versions == {i: stored.record.version for i, stored in kept.items()}
        assert found.tokens_merged == sum(s.record.tokens_merged for s in kept.values()) // len(kept)


def test_two_processes_cannot_have_one_folder(tmp_path: Path) -> None:
    """reliability.md 20: the second is refused with the owner's pid, exit code 4."""
    with LocalCluster(tmp_path / "run", ENDLESS, keeps=True) as cluster:
        cluster.start(shards=1, workers=["ann"])
        (shard,) = cluster.shards
        second = run_module("diloco_server", *sets({"shard.data_dir": cluster.data(0)}))
        assert second.returncode == 4
        assert f"pid {shard.pid}" in second.stderr
        assert "shard.data_dir" in second.stderr
        assert shard.status()["ready"]


def test_folders_that_cannot_be_used_are_refused_in_words(tmp_path: Path) -> None:
    """reliability.md 8: exit code 3, one line without a traceback."""
    with LocalCluster(tmp_path / "run", ENDLESS, keeps=True) as cluster:
        cluster.start(shards=1, workers=["ann"])
        for process in (*cluster.shards, *cluster.workers.values()):
            process.kill()
        folder = cluster.data(0)

        other_run = run_module(
            "diloco_server", *sets({"shard.data_dir": folder, "run.id": "other", "sync.fragments": 4})
        )
        assert (other_run.returncode, "Traceback" in other_run.stderr) == (3, False)
        assert "run: local <-> other" in other_run.stderr

        for path in folder.glob("fragment-0002-*"):
            path.write_bytes(path.read_bytes()[:-100])
        damaged = run_module("diloco_server", *sets({"shard.data_dir": folder, "sync.fragments": 4}))
        assert (damaged.returncode, "Traceback" in damaged.stderr) == (3, False)
        assert "fragment 2 has no intact version" in damaged.stderr


def test_a_damaged_newest_version_gives_way_to_the_one_before(tmp_path: Path) -> None:
    """reliability.md 8: named in the log; learners that hold what was lost go on from it under a new name."""
    with LocalCluster(tmp_path / "run", ENDLESS, keeps=True) as cluster:
        cluster.start(shards=1, workers=["ann", "ben"])
        (shard,) = cluster.shards
        until(lambda: versions(shard.status())[1] >= 2, "two versions")
        epoch = shard.status()["epoch"]
        shard.kill()
        disk = Disk(cluster.data(0))
        name, before = version_names(1, disk.names())[:2]
        content = bytearray((cluster.data(0) / name).read_bytes())
        content[len(content) // 2] ^= 1
        (cluster.data(0) / name).write_bytes(content)
        lost = newest_version(name)

        shard.start()

        until(lambda: versions(shard.status()).get(1, 0) > lost, "later versions than the lost one")
        assert f"{name} is damaged" in shard.said()
        assert "code=VERSION_DAMAGED" in shard.said()
        assert identities(shard.status())[1][0] > epoch
        assert newest_version(before) == lost - 1
        until(lambda: all(cluster.has_merged(w) for w in cluster.workers), "contributions of both")


def newest_version(name: str) -> int:
    return int(name.split("-")[3].removesuffix(".safetensors"))
