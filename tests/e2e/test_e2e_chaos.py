"""`python -m diloco_chaos` from the outside, for a minute: reliability.md 24 in small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diloco_chaos.result import CHECKS
from processes import run_module

pytestmark = pytest.mark.xdist_group("chaos")  # one after the other: each has a dozen processes

GAP_S = 20
"""Longest time without a step: other tests keep the machine busy."""


def test_the_command_hurts_a_small_cluster_and_finds_no_violation(tmp_path: Path) -> None:
    written = tmp_path / "chaos.json"
    said = run_module(
        "diloco_chaos", "--minutes=0.1", "--every=2s", "--shards=1", "--workers=2", "--seed=1",
        "--no-baseline", f"--folder={tmp_path / 'run'}", f"--json={written}", "--gap=100s",
        timeout_s=280.0, forks_children=True,
    )  # fmt: skip

    assert said.returncode == 0, said.stdout + said.stderr
    result = json.loads(written.read_text())
    assert result["plan"]
    assert result["versions"] > 0
    assert result["violations"] == 0


@pytest.mark.gate
@pytest.mark.timeout(800)
def test_a_cluster_that_is_hurt_loses_nothing_and_counts_nothing_twice(tmp_path: Path) -> None:
    written = tmp_path / "out" / "chaos.json"
    said = run_module(
        "diloco_chaos", "--minutes=1", "--every=5s", "--shards=2", "--workers=8", "--seed=1", "--no-baseline",
        f"--folder={tmp_path / 'run'}", f"--json={written}", f"--gap={GAP_S}s",
        timeout_s=780.0, own_interpreter=True,
    )  # fmt: skip

    assert said.returncode == 0, said.stdout + said.stderr
    assert "no violations" in said.stdout
    result = json.loads(written.read_text())
    assert {name: result[name] for name in ("violations", *CHECKS)} == dict.fromkeys(("violations", *CHECKS), 0)
    harmed = {(fault["harm"], fault["target"].partition("-")[0]) for fault in result["plan"]}
    assert harmed >= {("kill", "shard"), ("freeze", "shard"), ("kill", "worker"), ("freeze", "worker")}
    assert result["versions"] > 60, "it trained all the while"
    assert result["healed_s"] is not None
