"""A cluster is checkpointed while it trains, by command and by itself, and goes on from that on 1 and 3 shards."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from diloco_common.command import main
from diloco_common.errors import DilocoError
from diloco_server.storage.checkpoint import read_manifest
from diloco_server.storage.filesystem import Disk
from diloco_worker.global_model import pull_global_model
from processes import LocalCluster, http_get, until, versions

FRAGMENTS = 4
pytestmark = pytest.mark.timeout(600)
NO_END = {"run.tokens": 0}


def diloco(*words: object) -> str:
    """What a command says, in this process: another would take seconds to load torch."""
    with redirect_stdout(StringIO()) as said:
        assert main([str(word) for word in words]) == 0
    return said.getvalue()


def values(folders: list[Path]) -> dict[int, dict[str, Tensor]]:
    """Fragment -> what its only file in these folders holds: theta and the state of the outer optimizer."""
    found: dict[int, dict[str, Tensor]] = {}
    for folder in folders:
        for path in folder.glob("fragment-*.safetensors"):
            assert int(path.name[9:13]) not in found, "two versions of one fragment"
            found[int(path.name[9:13])] = {k: v for k, v in load_file(path).items() if k != "checksums"}
    return found


def assert_equal(found: dict[int, dict[str, Tensor]], expected: dict[int, dict[str, Tensor]]) -> None:
    """Bit for bit, momentum too."""
    assert sorted(found) == sorted(expected) == list(range(FRAGMENTS))
    for fragment_id, tensors in expected.items():
        assert found[fragment_id].keys() == tensors.keys() >= {"theta", "outer.0"}
        for name, tensor in tensors.items():
            assert torch.equal(found[fragment_id][name].view(torch.int32), tensor.view(torch.int32))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Taken from two shards under load, several times; what it holds is checked while they train on."""
    folder = tmp_path_factory.mktemp("checkpoint") / "run"
    settings = NO_END | {"checkpoint.every": 2, "checkpoint.keep": 2}
    with LocalCluster(folder, settings, keeps=True) as cluster:
        cluster.start(shards=2, workers=["ann", "ben"])
        taken: list[Path] = []
        for round_ in range(2):
            target = min(v for shard in cluster.shards for v in versions(shard.status()).values()) + 1
            for shard in cluster.shards:
                until(lambda s=shard, t=target: min(versions(s.status()).values()) >= t, "a version")  # type: ignore[misc]
            diloco("checkpoint", folder, "--name", f"live-{round_}")
            taken.append(folder / "checkpoints" / f"live-{round_}")
            low, _ = read_manifest(Disk(taken[-1]), "live").versions
            assert low >= target
        for path in taken:
            diloco("checkpoint", "verify", path)
        out = folder / "live.safetensors"
        diloco("export", folder, "--out", out)
        pulled = pull_global_model([shard.endpoints.grpc for shard in cluster.shards])
        exported = load_file(out)
        assert {name: tensor.shape for name, tensor in exported.items()} == {
            name: tensor.shape for name, tensor in pulled.tensors.items()
        }

        def regular() -> dict[str, set[int]]:
            """The newest one: folder -> versions. It may make room for later ones while it is read."""
            found = json.loads(diloco("checkpoint", "list", folder, "--json"))
            whole = [e["paths"] for e in found if len(e["paths"]) == 2 and e["state"] == "whole"]
            paths = whole[-1] if whole else []
            try:
                return {path: {f.version for f in read_manifest(Disk(Path(path)), path).files} for path in paths}
            except (OSError, DilocoError):
                return {}

        parts = until(regular, "a regular checkpoint of both shards")
        (number,) = {int(Path(path).name.removeprefix("version-")) for path in parts}
        assert number % 2 == 0
        assert list(parts.values()) == [{number}] * 2
        assert "diloco_shard_checkpoint_version" in http_get(cluster.shards[0].endpoints.http, "/metrics")[1]
        assert all("checkpoint made" in shard.said() for shard in cluster.shards)
    return taken[-1]


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_checkpoint_is_restored_bit_for_bit_and_trained_on(checkpoint: Path, tmp_path: Path, num_shards: int) -> None:
    folder = tmp_path / "run"
    diloco("restore", checkpoint, "--shards", num_shards, "--folder", folder)
    shards = [folder / f"shard-{index}" for index in range(num_shards)]
    assert_equal(values(shards), values([checkpoint]))
    contents = read_manifest(Disk(checkpoint), "it")
    restored = {file.fragment_id: file.version for file in contents.files}
    diloco("export", checkpoint, "--out", tmp_path / "model.safetensors")
    model = load_file(tmp_path / "model.safetensors")

    with LocalCluster(folder, NO_END, keeps=True) as cluster:
        for index in range(num_shards):
            cluster._add_shard(index, num_shards, []).start()
        found = pull_global_model([shard.endpoints.grpc for shard in cluster.shards], wait_s=60.0)
        assert found.versions == restored
        assert all(torch.equal(found.tensors[name], tensor) for name, tensor in model.items())
        assert found.tokens_merged > 0

        cluster.add_worker("cem").start()
        for shard in cluster.shards:
            until(
                lambda s=shard: all(v > restored[i] for i, v in versions(s.status()).items()),  # type: ignore[misc]
                "versions after the restore",
            )
            assert shard.status()["epoch"] > 1_000_000_000, "an epoch that no life of the run has had"
            assert "fragment seeded" not in shard.said()
