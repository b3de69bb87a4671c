"""Processes that train behind a token: nobody shows it, and who has another one is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from processes import LocalCluster, http_get, until
from secret_files import secret_file

TOKEN = "a-secret-that-nobody-shows"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("http")
    token_file = secret_file(folder / "token", TOKEN + "\n")
    with LocalCluster(folder / "run", {"security.token_file": token_file}) as cluster:
        yield cluster.start(shards=1, workers=["ann"])


def test_nothing_that_is_served_or_logged_holds_the_token(cluster: LocalCluster) -> None:
    for process in (*cluster.shards, *cluster.workers.values()):
        address = process.endpoints.http
        until(lambda address=address: http_get(address, "/readyz")[0] == 200, "it to be ready")  # type: ignore[misc]
        served = [http_get(address, path)[1] for path in ("/status", "/metrics", "/readyz", "/healthz", "/nothing")]
        assert process.said()
        assert not [text for text in (*served, process.said()) if TOKEN in text]
