"""Dashboards of Grafana: whole, readable without asking, and of one data source."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

GRAFANA = Path(__file__).resolve().parents[2] / "deploy/grafana"
BOARDS = {path.stem: json.loads(path.read_text()) for path in sorted((GRAFANA / "dashboards").glob("*.json"))}


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


@pytest.mark.parametrize("name", BOARDS)
def test_every_panel_says_what_it_shows_and_in_which_unit(name: str) -> None:
    for panel in panels(BOARDS[name]):
        assert panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        if panel["type"] in ("timeseries", "stat"):
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]


@pytest.mark.parametrize("name", BOARDS)
def test_every_query_asks_the_data_source_that_is_chosen_above(name: str) -> None:
    variables = BOARDS[name]["templating"]["list"]
    (chosen,) = [variable for variable in variables if variable["type"] == "datasource"]
    assert variables[0] is chosen, "the others are asked of it"
    asks = [
        *variables[1:], *BOARDS[name]["annotations"]["list"],
        *(each for panel in panels(BOARDS[name]) for each in [panel, *panel["targets"]]),
    ]  # fmt: skip
    assert {each["datasource"]["uid"] for each in asks} == {f"${{{chosen['name']}}}"}
    assert {each["datasource"]["type"] for each in asks} == {chosen["query"]}


@pytest.mark.parametrize("name", BOARDS)
def test_runs_that_are_shown_together_are_told_apart(name: str) -> None:
    for panel in panels(BOARDS[name]):
        for target in panel["targets"]:
            assert 'run=~"$run"' in target["expr"], panel["title"]
            by_run = re.search(r"\bby \(run\b", target["expr"]) or "{{instance}}" in target["legendFormat"]
            if by_run and panel["type"] in ("timeseries", "state-timeline"):
                assert "{{run}}" in target["legendFormat"], panel["title"]
            for labels in re.findall(r"\bby \(([^)]*)\)", target["expr"]):
                assert "instance" not in labels or "run" in labels, "instances of two runs may have the same name"
