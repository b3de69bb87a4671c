"""A worker is killed and comes back, as Prometheus sees it: the picture of docs/operations.md.

    python benchmarks/operations.py                 # five minutes: a real Prometheus scrapes a real `diloco up`
    python benchmarks/operations.py --draw          # the picture alone, from results/operations.json
    python benchmarks/operations.py --of RUN.json   # RUN.png, from a run that a Prometheus has already scraped

Two shards, three workers, our own rules. After WORKED_S seconds, worker-1 gets SIGKILL. AWAY_S seconds later it is
started again under its name. Then the query API returns the series of the whole time. Needs `prometheus` on PATH
(Debian: apt install prometheus). The machine need not be quiet, because steps of the small model mostly sleep.

tests/e2e/test_compose.py writes RUN.json for its containers: {"api": URL of the query API, "began", "killed", "back",
"ended": seconds since 1970, "victim": the killed worker, "quorum": K, "names": {id of a learner: name}}.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from diloco_common.endpoints import Endpoints, read_address
from operations_plot import draw

HERE = Path(__file__).resolve().parent
RESULTS, PICTURE = HERE / "results/operations.json", HERE.parent / "docs/operations.png"
RULES = HERE.parent / "deploy/prometheus/rules"

WORKED_S, AWAY_S, BACK_S = 90, 120, 75
VICTIM = "worker-1"
SHARDS, WORKERS = ["shard-0", "shard-1"], ["worker-0", VICTIM, "worker-2"]
STEP_S = 2
SETTINGS = {
    "cluster.restart": "false", "worker.step_delay_s": 0.15, "worker.threads": 1, "model.layers": 2, "model.width": 48,
    "sync.sync_every": 24, "sync.fragments": 12, "sync.quorum": 2, "lease.lease_s": 6,
}  # fmt: skip

QUERIES = {
    "trained": "max by (learner) (rate(diloco_shard_learner_tokens[20s]))",
    "merged": "avg(rate(diloco_shard_tokens_merged_total[20s]))",
    "silent": "max by (learner) (diloco_shard_learner_silent_seconds)",
    "evicted": 'max by (learner) (diloco_shard_learner_state{state="evicted"})',
    "participants": "sum(rate(diloco_shard_round_participants_sum[20s])) / "
    "sum(rate(diloco_shard_round_participants_count[20s]))",
    "alive": 'min(diloco_shard_learners{state="alive"})',
    "alerts": 'ALERTS{alertname=~"Diloco.*"}',
}
T = TypeVar("T")
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="draw what was measured before")
    parser.add_argument("--of", type=Path, metavar="RUN.json", help="draw that run instead")
    args = parser.parse_args()
    if args.of:
        run = json.loads(args.of.read_text())
        draw(seen(**run), args.of.with_suffix(".png"))
        return
    if not args.draw:
        with tempfile.TemporaryDirectory() as folder:
            found = measure(Path(folder))
        RESULTS.write_text(json.dumps(found) + "\n")
    draw(json.loads(RESULTS.read_text()), PICTURE)


def measure(folder: Path) -> dict[str, Any]:
    """Run a cluster, kill a worker and start it again. Returns the series of Prometheus, as `seen` does."""
    flags = [f"--set={name}={value}" for name, value in SETTINGS.items()]
    up = [sys.executable, "-m", "diloco_deploy", "up", "--shards=2", "--workers=3", f"--folder={folder}", *flags]
    with running(up, folder / "up.log"):
        at = {name: until(lambda name=name: address(folder, name)) for name in (*SHARDS, *WORKERS)}  # type: ignore[misc]
        port = free_port()
        scraped = folder / "prometheus"
        scraped.mkdir()
        (scraped / "prometheus.yml").write_text(config(at))
        prometheus = [
            "prometheus", f"--config.file={scraped}/prometheus.yml", f"--storage.tsdb.path={scraped}/data",
            f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
        ]  # fmt: skip
        with running(prometheus, folder / "prometheus.log"):
            api = f"http://127.0.0.1:{port}/api/v1/"
            until(lambda: ask(api, "query", query="diloco_shard_learners"))
            began = time.time()
            time.sleep(WORKED_S)
            os.kill(at[VICTIM].pid, signal.SIGKILL)
            killed = time.time()
            time.sleep(AWAY_S)
            again = [
                sys.executable, "-m", "diloco_worker", f"--settings={folder}/settings.json", f"--learner-id={VICTIM}",
                f"--shards={','.join(at[name].grpc for name in SHARDS)}", f"--http={at[VICTIM].http}",
            ]  # fmt: skip
            with running(again, folder / "again.log"):
                back = time.time()
                time.sleep(BACK_S)
                return seen(
                    api=api, began=began, killed=killed, back=back, ended=time.time(), victim=VICTIM,
                    quorum=SETTINGS["sync.quorum"], names={name: name for name in WORKERS},
                )  # fmt: skip


def seen(
    *, api: str, began: float, killed: float, back: float, ended: float, victim: str, quorum: int, names: dict[str, str]
) -> dict[str, Any]:
    """The series of a run from Prometheus, with times from its beginning and with the names of the learners."""
    found = {name: series(api, text, began, ended) for name, text in QUERIES.items()}
    for labels in (one["labels"] for several in found.values() for one in several):
        if "learner" in labels:
            labels["learner"] = names[labels["learner"]]
    return {
        "killed": killed - began, "back": back - began, "ended": ended - began, "victim": victim, "quorum": quorum,
        "series": found,
    }  # fmt: skip


def config(at: dict[str, Endpoints]) -> str:
    jobs = {"diloco-shard": SHARDS, "diloco-worker": WORKERS}
    scrape = [
        {"job_name": job, "static_configs": [{"targets": [at[name].http for name in names]}]}
        for job, names in jobs.items()
    ]
    intervals = {"scrape_interval": "2s", "evaluation_interval": "2s"}
    return json.dumps({"global": intervals, "rule_files": [f"{RULES}/*.yml"], "scrape_configs": scrape})


def series(api: str, text: str, began: float, ended: float) -> list[dict[str, Any]]:
    found = ask(api, "query_range", query=text, start=began, end=ended, step=STEP_S)
    return [
        {"labels": one["metric"], "at": [round(t - began, 1) for t, _ in one["values"]],
         "values": [float(value) for _, value in one["values"]]}
        for one in found
    ]  # fmt: skip


def ask(api: str, path: str, **parameters: object) -> list[dict[str, Any]]:
    """The result of a query; empty while Prometheus does not answer."""
    try:
        with _opener.open(f"{api}{path}?{urllib.parse.urlencode(parameters)}", timeout=10) as answer:
            return list(json.load(answer)["data"]["result"])
    except OSError:
        return []


def address(folder: Path, name: str) -> Endpoints | None:
    return read_address(folder / "run" / f"{name}.json")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def until(look: Callable[[], T | None], seconds: float = 60.0) -> T:
    deadline = time.monotonic() + seconds
    while not (found := look()):
        if time.monotonic() > deadline:
            raise SystemExit("waited a minute in vain")
        time.sleep(0.2)
    return found


@contextmanager
def running(command: list[str], log: Path) -> Iterator[None]:
    """A process that ends with the block."""
    with log.open("ab") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        try:
            yield
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


if __name__ == "__main__":
    main()
