"""Rules and dashboards over a real cluster in which a worker was killed.

Every query names metrics, labels and values that the processes serve. A real Prometheus evaluates each of them, and the
alert of the killed worker begins.
"""

from __future__ import annotations

import json
import re
import subprocess
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from diloco_common.observe.metrics.shard import ReaderMetrics
from processes import LocalCluster, http_get, until
from programs import find, need
from promql import FROM_TARGETS, Query, in_dashboards, in_rules

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
QUERIES = [*in_rules(DEPLOY / "prometheus/rules"), *in_dashboards(DEPLOY / "grafana/dashboards")]
SILENT_IN_A_HEALTHY_RUN = ("rejected", "Refused", "Diloco", "Free space", "stall", "save_seconds", "A round")
"""Words of queries whose answer may be empty: what did not happen has no rate or no series."""
SERVED_ELSEWHERE = {
    "up": {"job": {"diloco-shard"}},
    "ALERTS": {"alertname": set(), "alertstate": {"firing"}},
    "diloco_certificate_expires_timestamp_seconds": {"which": {"own", "ca"}},
    **{one.name: {"role": {"mirror", "standby"}} for one in ReaderMetrics().registry.collect() if "reader" in one.name},
}
"""By Prometheus itself, where there are certificates (test_compose.py), or by mirrors and standbys."""
Series = dict[str, dict[str, set[str]]]
"""Metric -> label -> values."""
Ask = Callable[[str], list[dict[str, Any]]]

each_query = pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.where)


@contextmanager
def prometheus(program: str, folder: Path, cluster: LocalCluster) -> Iterator[Ask]:
    """Asks a Prometheus with our rules that watches the cluster."""
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
    arguments = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [program, *arguments, "--web.listen-address=127.0.0.1:0"], stdin=subprocess.DEVNULL, stdout=out, stderr=out
        )
    try:
        listening = re.compile(r'"?Listening on"? address=(\S+)')
        address = until(lambda: listening.search(log.read_text()), "Prometheus to listen")[1]

        def ask(query: str) -> list[dict[str, Any]]:
            code, text = http_get(address, f"/api/v1/query?{urllib.parse.urlencode({'query': query})}")
            assert code == 200, f"{query}: {text}"
            return list(json.loads(text)["data"]["result"])

        until(lambda: http_get(address, "/-/ready")[0] == 200, "Prometheus to be ready")
        until(lambda: ask("run:diloco_goodput:ratio5m"), "two scrapes and a recording")
        yield ask
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalCluster, Ask | None]]:
    """A shard and two workers, one of which was killed and evicted; and the Prometheus that saw it, if there is one."""
    folder = tmp_path_factory.mktemp("watched")

    def kill_bob(cluster: LocalCluster) -> None:
        cluster.workers["bob"].kill()
        shard = cluster.shards[0].endpoints.http
        until(lambda: 'learner="bob",state="evicted"} 1.0' in http_get(shard, "/metrics")[1], "the eviction of bob")

    with LocalCluster(folder / "run", {"run.tokens": 10**12}) as cluster:
        cluster.start(shards=1, workers=["ann", "bob"])
        if (program := find("prometheus")) is None:
            kill_bob(cluster)
            yield cluster, None
        else:
            with prometheus(program, folder, cluster) as ask:
                kill_bob(cluster)
                yield cluster, ask


@pytest.fixture(scope="module")
def served(watched: tuple[LocalCluster, Ask | None]) -> Series:
    """What the shard and the worker that is left serve, and what is made of it by recording."""
    cluster, _ = watched
    series: Series = {name: dict(labels) for name, labels in SERVED_ELSEWHERE.items()}
    for process in (cluster.shards[0], cluster.workers["ann"]):
        for family in text_string_to_metric_families(http_get(process.endpoints.http, "/metrics")[1]):
            for sample in family.samples:
                labels = series.setdefault(sample.name, {})
                for label, value in sample.labels.items():
                    labels.setdefault(label, set()).add(value)
    for query in QUERIES:
        if ":" in (name := query.where.split(": ")[1]):
            series[name] = {label: set() for label in query.grouped_by}
    return series


@pytest.fixture
def ask(watched: tuple[LocalCluster, Ask | None]) -> Ask:
    need("prometheus", "Debian and Ubuntu: apt install prometheus")
    _, ask = watched
    assert ask is not None
    return ask


@each_query
def test_a_query_finds_what_it_asks_for(served: Series, query: Query) -> None:
    assert query.selectors
    labels: set[str] = set(FROM_TARGETS)
    for name, asked in query.selectors:
        assert name in served
        labels |= served[name].keys()
        for label, value in asked.items():
            assert label in served[name].keys() | FROM_TARGETS
            if value and label in served[name]:
                assert value in served[name][label]
    assert query.grouped_by <= labels


def test_a_killed_worker_is_seen_and_its_alert_begins(ask: Ask) -> None:
    state = 'diloco_shard_learner_state{learner="bob", state="evicted"} == 1'
    until(lambda: ask(state), "the eviction of bob in Prometheus")
    (alert,) = until(lambda: ask('ALERTS{alertname="DilocoWorkerSilent", learner="bob"}'), "the alert")
    assert alert["metric"]["learner"] == "bob"
    assert alert["metric"]["alertstate"] in ("pending", "firing")


@each_query
def test_every_query_evaluates_and_finds_something(ask: Ask, query: Query) -> None:
    found = ask(query.text)
    if not any(word in query.where + query.text for word in SILENT_IN_A_HEALTHY_RUN):
        # A scrape has one second: on a busy machine, one that fails leaves a gap.
        assert found or until(lambda: ask(query.text), f"{query.where} to find something")
