"""What `diloco explain` knows is what there is: errors, refusals, findings, alerts; and the pages say the same."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import pytest
import yaml
from tools.explained import with_parts

import diloco_common
import diloco_deploy
import diloco_server
import diloco_worker
from diloco_common.errors import DilocoError, Refusal
from diloco_common.observe.metrics.shard import rejections
from diloco_common.wire import rpc
from diloco_deploy.codes import CODES, ENTRIES, Kind, of_kind

NOT_IMPORTED = ("__main__", ".hf", ".lightning")
"""They start a program, or need a package that is not ours. They define no errors."""


def errors_of_the_project() -> dict[str, type[DilocoError]]:
    for package in (diloco_common, diloco_server, diloco_worker, diloco_deploy):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith(NOT_IMPORTED):
                importlib.import_module(module.name)
    found: dict[str, type[DilocoError]] = {}
    left: list[type[DilocoError]] = [DilocoError]
    while left:
        kind = left.pop()
        left += kind.__subclasses__()
        if kind.__module__.startswith("diloco_") and not kind.__name__.startswith("_"):
            found.setdefault(kind.code, kind)
    return found


ERRORS = errors_of_the_project()


@pytest.mark.parametrize("code", sorted(ERRORS))
def test_every_error_is_explained_with_its_exit_code_and_status(code: str) -> None:
    entry, kind = CODES[code], ERRORS[code]
    if not entry.is_logged or entry.exit_code is not None:
        assert entry.exit_code == kind.exit_code
    if issubclass(kind, Refusal) and entry.kind is Kind.CALL:
        assert entry.status == rpc.status_of(kind.__new__(kind)).name


def test_no_error_is_explained_that_there_is_not() -> None:
    kinds = (Kind.CALL, Kind.CONTRIBUTION, Kind.CONNECTING, Kind.COMMAND, Kind.DATA, Kind.CHECKPOINT)
    only_logged = {"STORAGE", "CHECKPOINT", "NO_TOKENS", "NOT_MERGED", "PUSHES_FAIL", "VERSIONS_LOST"}
    told_by_status = {
        "SHARD_AWAY", "SHARD_UNKNOWN", "WORKER_AWAY", "STALLED", "NO_PROGRESS", "CUT_OFF", "LEFT_OUT", "SHORTENED",
    }  # fmt: skip
    assert {entry.code for entry in of_kind(*kinds)} - only_logged - told_by_status == set(ERRORS)


def test_every_code_of_a_rejected_contribution_is_explained_as_one() -> None:
    rejected = {entry.code for entry in ENTRIES if "rejected contributions" in (entry.kind.value, entry.also)}
    assert rejected == set(rejections())


def test_every_alert_is_explained(repository: Path) -> None:
    rules = (repository / "deploy/prometheus/rules/alerts.yml").read_text(encoding="utf-8")
    alerts = [rule["alert"] for group in yaml.safe_load(rules)["groups"] for rule in group["rules"]]
    assert [entry.code for entry in of_kind(Kind.ALERT)] == alerts


@pytest.mark.parametrize("page", ["errors.md", "runbook.md"])
def test_the_pages_say_what_explain_says(repository: Path, page: str) -> None:
    text = (repository / "docs" / page).read_text(encoding="utf-8")
    assert "<!-- explain: " in text
    assert with_parts(text) == text, "run python tools/explained.py"
