"""A real Prometheus with our rules over a real cluster: a killed worker raises its alert, and every query evaluates."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import LocalCluster, http_get, until

from programs import need
from promql import Query, in_dashboards, in_rules

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
QUERIES = [*in_rules(DEPLOY / "prometheus/rules"), *in_dashboards(DEPLOY / "grafana/dashboards")]
SILENT_IN_A_HEALTHY_RUN = ("rejected", "Refused", "Diloco", "Free space", "stall", "save_seconds", "A round")
"""Words of queries whose answer may be empty: what did not happen has no rate or no series."""
Ask = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Asks a Prometheus that watches a shard and two workers, one of which was killed."""
    program, folder = (
        need("prometheus", "Debian and Ubuntu: apt install prometheus"),
        tmp_path_factory.mktemp("scraped"),
    )
    with LocalCluster(folder / "run", {"run.tokens": 10**12}) as cluster:
        cluster.start(shards=1, workers=["ann", "bob"])
        jobs = {"diloco-shard": cluster.shards, "diloco-worker": list(cluster.workers.values())}
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [f"{DEPLOY}/prometheus/rules/*.yml"],
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": [one.endpoints.http for one in processes]}]}
                for job, processes in jobs.items()
            ],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))
        log = folder / "log"
        arguments = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
                     "--web.listen-address=127.0.0.1:0"]  # fmt: skip
        with log.open("wb") as out:
            prometheus = subprocess.Popen([program, *arguments], stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        try:
            listening = re.compile(r'"?Listening on"? address=(\S+)')
            address = until(lambda: listening.search(log.read_text()), "Prometheus to listen")[1]

            def asked(query: str) -> list[dict[str, Any]]:
                code, text = http_get(address, f"/api/v1/query?{urllib.parse.urlencode({'query': query})}")
                assert code == 200, f"{query}: {text}"
                return list(json.loads(text)["data"]["result"])

            until(lambda: http_get(address, "/-/ready")[0] == 200, "Prometheus to be ready")
            until(lambda: asked("run:diloco_goodput:ratio5m"), "two scrapes and a recording")
            cluster.workers["bob"].kill()
            yield asked
        finally:
            prometheus.kill()
            prometheus.wait()


def test_a_killed_worker_is_seen_and_its_alert_begins(ask: Ask) -> None:
    state = 'diloco_shard_learner_state{learner="bob", state="evicted"} == 1'
    until(lambda: ask(state), "the eviction of bob in Prometheus")
    (alert,) = until(lambda: ask('ALERTS{alertname="DilocoWorkerSilent"}'), "the alert")
    assert alert["metric"]["learner"] == "bob"
    assert alert["metric"]["alertstate"] == "pending"


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.where)
def test_every_query_evaluates_and_finds_something(ask: Ask, query: Query) -> None:
    found = ask(query.text)
    assert found or any(word in query.where + query.text for word in SILENT_IN_A_HEALTHY_RUN)
