"""`diloco doctor` as a person runs it, before ten real faults: firewalls, thin links, wrong clocks, slow disks, others.

With `-s` it says how long each took, from the first letter to the prompt.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import loudly
import pytest
from networks import Namespace, need_namespaces
from steady import SteadyCluster, quick_shard

import forks
from certificates import Certificates
from processes import environment

THIN = "2mbit"
WIDTH = 400
"""160 000 parameters: a version of a fragment is 80 kB, a third of a second on the thin line."""
DEADLINE_S = 120.0
"""The doctor gives up after 16 s; a busy machine takes its time to start it."""


def examined(*arguments: str, prefix: Sequence[str] = (), **variables: str) -> dict[str, Any]:
    """What `diloco doctor ARGUMENTS` finds, as a process of its own; forked, where nothing is before it."""
    began = time.monotonic()
    if not prefix and not variables:
        ended = forks.run("diloco_deploy", "doctor", *arguments, "--json", environment=environment())
    else:
        ended = subprocess.run(
            [*prefix, sys.executable, "-m", "diloco_deploy", "doctor", *arguments, "--json"],
            capture_output=True, text=True, timeout=DEADLINE_S, env=environment() | variables, check=False,
        )  # fmt: skip
    assert ended.returncode in (0, 1), ended.stderr
    took_s = time.monotonic() - began
    found: dict[str, Any] = json.loads(ended.stdout)
    print(f"{took_s:.1f} s, of which {found['seconds']:.1f} s for the checks", end="; ")
    print(*(f"{f['check']}: {f['code']} {f['what']}" for f in found["findings"]), sep="\n")
    assert ended.returncode == (1 if found["counts"]["failure"] else 0)
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


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("authority") / "certs")


@pytest.fixture(scope="module")
def secure(run: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a shard that speaks TLS alone."""
    settings = {"shard.listen": "127.0.0.1:0", "security.tls": run.issue("shard/0", days=80, host="127.0.0.1")}
    shard = quick_shard(0, tmp_path_factory.mktemp("secure"), settings)
    yield shard.endpoints.grpc
    shard.kill()


def inside(namespace: Namespace) -> list[str]:
    return ["ip", "netns", "exec", namespace.name]


def test_a_wrong_port_is_named(shard: str) -> None:
    found = examined("--shards", f"{shard.rpartition(':')[0]}:1")
    assert "PORT_CLOSED" in codes(found)


def test_plaintext_on_tls_is_named(secure: str) -> None:
    assert "TLS_NEEDED" in codes(examined("--shards", secure))


def test_an_expired_certificate_is_named(secure: str, run: Certificates) -> None:
    folder = run.issue("learner/old", begins=timedelta(days=-3))
    assert "CERTIFICATE_EXPIRED" in codes(examined("--shards", secure, "--tls", str(folder)))


@pytest.mark.gate
def test_another_version_is_named(shard: str, tmp_path: Path) -> None:
    """This machine has a package of another version than the shard."""
    newer = tmp_path / "decoupled_diloco-99.0.dist-info"
    newer.mkdir()
    (newer / "METADATA").write_text("Metadata-Version: 2.1\nName: decoupled-diloco\nVersion: 99.0\n")
    found = examined("--shards", shard, PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    (version,) = [finding for finding in found["findings"] if finding["check"] == "version"]
    assert version["code"] == "PACKAGES_DIFFER"
    assert "this machine 99.0" in version["what"]


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


@pytest.mark.gate
def test_a_skewed_clock_is_named(shard: str, tmp_path: Path) -> None:
    """This machine is two hours behind the shard's."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        loudly.skip("a wall clock that is wrong", "there is no C compiler (Debian package: gcc)")
    library, off = tmp_path / "wall_clock.so", tmp_path / "clock"
    source = Path(__file__).with_name("wall_clock.c")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    off.write_bytes(struct.pack("@l", -7200))
    found = examined("--shards", shard, LD_PRELOAD=str(library), WALL_CLOCK=str(off))
    (clock,) = [finding for finding in found["findings"] if finding["code"] == "CLOCK_SKEWED"]
    assert clock["figures"]["clock_skew_s"] == pytest.approx(7200, abs=60)


def test_few_files_are_named(tmp_path: Path) -> None:
    poor = ["/bin/bash", "-c", 'ulimit -n 256; ulimit -Hn 256; exec "$@"', "poor"]
    found = examined("--shard", "--data-dir", str(tmp_path / "data"), prefix=poor)
    assert "FILES_FEW" in codes(found)


@pytest.mark.gate
def test_a_slow_disk_is_named(tmp_path: Path) -> None:
    loudly.need("a slow disk", strace="strace")
    log = tmp_path / "strace"
    slow = ["strace", "-f", "-qq", "-o", str(log), "-e", "trace=fsync", "-e", "inject=fsync:delay_enter=600ms"]
    tried = subprocess.run([*slow, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        loudly.skip("a slow disk", f"strace may not trace here: {tried.stderr}")
    found = examined("--shard", "--data-dir", str(tmp_path / "data"), "--params", "100M", prefix=slow)
    (speed,) = [finding for finding in found["findings"] if finding["check"] == "disk speed"]
    assert speed["code"] == "DISK_SLOW"
    assert os.listdir(tmp_path) == ["strace"], "nothing is left behind"
