"""`diloco chaos` from the outside, for a quarter of a minute: faults.md 24 in small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from processes import run_module

from diloco_deploy.chaos.result import CHECKS

SEED = 14
"""Its plan kills a shard, kills a worker and freezes a worker."""


@pytest.mark.timeout(300)
def test_a_cluster_that_is_hurt_loses_nothing_and_counts_nothing_twice(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written, picture = tmp_path / "out" / "chaos.json", tmp_path / "out" / "chaos.png"
    said = run_module(
        "diloco_deploy", "chaos", "--minutes=0.25", "--every=3s", "--shards=2", "--workers=3", f"--seed={SEED}",
        f"--folder={tmp_path / 'run'}", f"--json={written}", f"--timeline={picture}", "--gap=20s",
        timeout_s=280.0,
    )  # fmt: skip

    assert said.returncode == 0, said.stdout + said.stderr
    assert "no violations" in said.stdout
    result = json.loads(written.read_text())
    assert {name: result[name] for name in ("violations", *CHECKS)} == dict.fromkeys(("violations", *CHECKS), 0)
    harmed = {(fault["harm"], fault["target"].partition("-")[0]) for fault in result["plan"]}
    assert harmed >= {("kill", "shard"), ("kill", "worker"), ("freeze", "worker")}
    assert result["versions"] > 20, "it trained all the while"
    assert 0.0 < result["goodput_absolute"] < result["goodput_per_alive"]
    assert result["healed_s"] is not None
    assert picture.read_bytes().startswith(b"\x89PNG")
