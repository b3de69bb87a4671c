"""Metrics as Prometheus reads them, and the page that is made of the code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from diloco_common.observe.metrics.shard import ShardMetrics
from diloco_common.observe.metrics.worker import WorkerMetrics
from programs import promtool


@pytest.mark.parametrize("metrics", [ShardMetrics, WorkerMetrics])
def test_promtool_finds_nothing_to_say(metrics):
    text = generate_latest(metrics().registry)
    found = subprocess.run([promtool(), "check", "metrics"], input=text, capture_output=True, check=False)

    assert (found.returncode, found.stdout + found.stderr) == (0, b"")


def test_the_page_of_metrics_is_what_the_code_declares(repository: Path):
    ended = subprocess.run(
        [sys.executable, repository / "tools/metrics_page.py", "--check"], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
