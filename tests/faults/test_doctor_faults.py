"""`diloco doctor` as a person runs it, before real faults. What else it names: contract/test_doctor_contract.py."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from networks import Namespace, need_namespaces
from steady import SteadyCluster

from processes import environment

THIN = "2mbit"
WIDTH = 400
"""160 000 parameters: a version of a fragment is 80 kB, a third of a second on the thin line."""
DEADLINE_S = 120.0
"""The doctor gives up after 16 s; a busy machine takes its time to start it."""


def examined(*arguments: str, prefix: Sequence[str]) -> dict[str, Any]:
    """What `diloco doctor ARGUMENTS` finds, as a process of its own."""
    command = [*prefix, sys.executable, "-m", "diloco_deploy", "doctor", *arguments, "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=environment(), check=False)
    found: dict[str, Any] = json.loads(ended.stdout)
    print(*(f"{f['check']}: {f['code']} {f['what']}" for f in found["findings"]), sep="\n")
    assert ended.returncode == (1 if found["counts"]["failure"] else 0), ended.stderr
    return found


def codes(found: dict[str, Any]) -> set[str]:
    return {finding["code"] for finding in found["findings"]}


@pytest.fixture(scope="module")
def namespace() -> Iterator[Namespace]:
    need_namespaces("the doctor behind a firewall and a thin line")
    with Namespace() as made:
        made.plug_in()
        yield made


@pytest.fixture(scope="module")
def shard(namespace: Namespace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a shard that has versions."""
    settings: dict[str, object] = {"shard.listen": f"{namespace.near}:0", "security.insecure": True}
    with SteadyCluster(tmp_path_factory.mktemp("doctor"), settings, width=WIDTH) as cluster:
        cluster.add("near")
        cluster.await_merged("near")
        cluster.ask("pause")  # the doctor has seconds, and a learner would want the core
        yield cluster.shards[0].endpoints.grpc


def inside(namespace: Namespace) -> list[str]:
    return ["ip", "netns", "exec", namespace.name]


def test_a_firewall_that_drops_is_named(namespace: Namespace, shard: str) -> None:
    namespace.cut([int(shard.rpartition(":")[2])])
    try:
        found = examined("--shards", shard, prefix=inside(namespace))
    finally:
        namespace.heal()
    assert "PORT_SILENT" in codes(found)


@pytest.mark.gate
def test_a_thin_link_is_named(namespace: Namespace, shard: str) -> None:
    namespace.thin(THIN)
    found = examined("--shards", shard, "--step-time", "1ms", prefix=inside(namespace))
    (link,) = [finding for finding in found["findings"] if finding["check"] == "link"]
    print(link["what"])
    assert (link["state"], link["code"]) == ("failure", "LINK_THIN")
    for way in ("up", "down"):
        assert link["figures"][f"{way}_bits_per_s"] < 8e6


def test_few_files_are_named(tmp_path: Path) -> None:
    poor = ["/bin/bash", "-c", 'ulimit -n 256; ulimit -Hn 256; exec "$@"', "poor"]
    found = examined("--shard", "--data-dir", str(tmp_path / "data"), prefix=poor)
    assert "FILES_FEW" in codes(found)
