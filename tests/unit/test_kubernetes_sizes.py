"""docs/kubernetes-sizes.md: its tables are those of the formulas, and its figures those of `diloco plan`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tools import kubernetes_sizes as sizes

from diloco_common import units
from diloco_common.program import main

PAGE = Path(__file__).resolve().parents[2] / "docs/kubernetes-sizes.md"


def rows(table: str) -> dict[str, list[str]]:
    """Model -> its first row."""
    found: dict[str, list[str]] = {}
    for line in table.splitlines()[2:]:
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        found.setdefault(name, cells)
    return found


def test_the_page_has_the_tables_as_they_are_computed() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert sizes.page(text) == text, "run python tools/kubernetes_sizes.py"


@pytest.mark.parametrize("model", sizes.MODELS, ids=lambda model: model.name)
def test_a_shard_is_as_large_as_the_plan_says(model: sizes.Model, capsys: pytest.CaptureFixture[str]) -> None:
    link = ["--up", "100Gbit", "--down", "100Gbit", "--round-trip", "1ms"]
    cut = ["--shards", str(model.shards), "--fragments", str(model.fragments), "--step-time", f"{model.step_s}s"]
    assert main(["plan", "--params", str(int(model.params)), "--learners", "8", *link, *cut, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["settings"]["sync"]["push"], plan["settings"]["sync"]["sync_every"]) == ("int4", 12)
    by_name = {figure["name"]: figure["value"] for figure in plan["figures"]}
    shown = rows(sizes.shards())[model.name]
    assert shown[3] == units.size(by_name["memory of a shard, at most"])
    assert shown[5] == units.size(by_name["disk of a shard"])


@pytest.mark.parametrize("model", sizes.MODELS, ids=lambda model: model.name)
def test_a_gpu_holds_what_the_plan_says(model: sizes.Model, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--ranks", str(model.ranks), "--fragments", str(model.fragments), "--under-way", "2", "--json"]
    assert main(["plan", "memory", "--params", str(int(model.params)), *words]) == 0
    kept = json.loads(capsys.readouterr().out)[0]
    assert rows(sizes.workers())[model.name][2] == units.size(kept["value"])
