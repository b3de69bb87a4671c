"""Rules for Prometheus: they parse, fire when they should and not otherwise, and each alert tells what to do."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from programs import amtool, promtool
from promql import in_dashboards

FOLDER = Path(__file__).resolve().parents[2] / "deploy/prometheus"
RULES, CASES = sorted((FOLDER / "rules").glob("*.yml")), sorted((FOLDER / "tests").glob("*.yml"))
ALERTS = {
    rule["alert"]: rule
    for path in RULES
    for group in yaml.safe_load(path.read_text())["groups"]
    for rule in group["rules"]
    if "alert" in rule
}
RUNBOOK = "docs/runbook.md"
ALERTMANAGER = FOLDER / "alertmanager.yml"


def run(*command: str | Path) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_promtool_takes_the_rules() -> None:
    run(promtool(), "check", "rules", "--lint=all", "--lint-fatal", *RULES)


@pytest.mark.parametrize("cases", CASES, ids=lambda path: path.stem)
def test_alerts_fire_and_are_silent_as_the_cases_say(cases: Path) -> None:
    run(promtool(), "test", "rules", cases)


def test_promtool_takes_every_query_of_the_dashboards(repository: Path, tmp_path: Path) -> None:
    queries = list(in_dashboards(repository / "deploy/grafana/dashboards"))
    rules = [{"record": f"query:{number}", "expr": query.text} for number, query in enumerate(queries)]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    assert len(queries) > 40
    run(promtool(), "check", "rules", file)


@pytest.mark.parametrize("fires", [True, False], ids=["firing", "silent"])
@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_has_a_case_where_it_fires_and_one_where_it_is_silent(alert: str, fires: bool) -> None:
    cases = [case for path in CASES for test in yaml.safe_load(path.read_text())["tests"]
             for case in test.get("alert_rule_test", []) if case["alertname"] == alert]  # fmt: skip
    assert any(bool(case["exp_alerts"]) is fires for case in cases)


@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_leads_to_its_section_of_the_runbook(repository: Path, alert: str) -> None:
    headings = re.findall(r"^## (\w+)$", (repository / RUNBOOK).read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert alert in headings
    assert ALERTS[alert]["annotations"]["runbook"] == f"{RUNBOOK}#{alert.lower()}"
    assert ALERTS[alert]["labels"]["severity"] in ("critical", "warning")


def test_alertmanager_takes_the_example() -> None:
    assert "SUCCESS" in run(amtool(), "check-config", ALERTMANAGER)


@pytest.mark.parametrize(("severity", "receiver"), [("critical", "on-call"), ("warning", "chat")])
def test_critical_alerts_wake_somebody_and_others_wait(severity: str, receiver: str) -> None:
    route = run(amtool(), "config", "routes", "test", f"--config.file={ALERTMANAGER}", f"severity={severity}")
    assert route.strip() == receiver
