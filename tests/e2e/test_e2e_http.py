"""What both processes serve over HTTP while they train, behind a token: metrics, readiness, status without secrets."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from processes import LocalCluster, http_get, run_module, until
from programs import promtool
from secret_files import secret_file

TOKEN = "a-secret-that-nobody-shows"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("http")
    token_file = secret_file(folder / "token", TOKEN + "\n")
    with LocalCluster(folder / "run", {"security.token_file": token_file}) as cluster:
        yield cluster.start(shards=1, workers=["ann"])


@pytest.fixture(params=["shard-0", "ann"])
def address(request: pytest.FixtureRequest, cluster: LocalCluster) -> str:
    found = {process.name: process for process in (*cluster.shards, *cluster.workers.values())}
    return found[request.param].endpoints.http


def test_a_process_that_works_is_healthy_and_ready(address: str) -> None:
    assert http_get(address, "/healthz")[0] == 200
    until(lambda: http_get(address, "/readyz")[0] == 200, "it to be ready")


@pytest.mark.parametrize("path", ["/status", "/metrics", "/readyz", "/healthz", "/nothing-here"])
def test_nothing_that_is_served_holds_the_token(address: str, path: str) -> None:
    _, text = http_get(address, path)
    assert TOKEN not in text


def test_logs_hold_no_token(cluster: LocalCluster) -> None:
    for process in (*cluster.shards, *cluster.workers.values()):
        assert process.said()
        assert TOKEN not in process.said()


def test_prometheus_finds_nothing_to_complain_about(address: str) -> None:
    code, text = http_get(address, "/metrics")
    found = subprocess.run([promtool(), "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (code, found.returncode, found.stdout + found.stderr) == (200, 0, "")


def test_a_worker_with_another_token_is_refused(cluster: LocalCluster, tmp_path: Path) -> None:
    wrong = secret_file(tmp_path / "token", "another-secret-of-somebody\n")
    shards = cluster.shards[0].endpoints.grpc
    ended = run_module("diloco_demo", f"--shards={shards}", f"--set=security.token_file={wrong}")
    assert ended.returncode == 6
    assert "[UNAUTHENTICATED]" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert TOKEN not in ended.stderr
