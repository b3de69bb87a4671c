"""tools/audit.py: what pip-audit says becomes an exit code, and no network is no failure."""

from __future__ import annotations

import json

import pytest
from tools.audit import SETS, verdict
from tools.lock import FOLDER

CLEAN = {"name": "grpcio", "version": "1", "vulns": []}
BAD = {"name": "rich", "version": "1", "vulns": [{"id": "CVE-1", "fix_versions": ["2", "3"], "aliases": []}]}
UNFIXED = {"name": "torch", "version": "2", "vulns": [{"id": "CVE-2", "fix_versions": []}]}
SKIPPED = {"name": "odd", "version": "1", "skip_reason": "not on the index"}
NO_NETWORK = "Traceback ...\nrequests.exceptions.ConnectionError: HTTPSConnectionPool(...): Max retries exceeded\n"
SERVER_FAILED = "Traceback ...\npip_audit._service.interface.ServiceError\n"


@pytest.mark.parametrize(
    ("packages", "code", "words"),
    [
        ([CLEAN], 0, ["1 packages, 0 known vulnerabilities"]),
        ([CLEAN, BAD], 1, ["rich 1: CVE-1, fixed in 2, 3", "2 packages, 1 known"]),
        ([UNFIXED], 1, ["torch 2: CVE-2, fixed in no version yet"]),
        ([SKIPPED], 0, ["odd was not looked at: not on the index"]),
    ],
)
def test_a_known_vulnerability_fails(packages: list[object], code: int, words: list[str]) -> None:
    found, said = verdict("run", json.dumps({"dependencies": packages, "fixes": []}), "")
    assert found == code
    assert all(each in said for each in words)


@pytest.mark.parametrize("stderr", [NO_NETWORK, SERVER_FAILED])
def test_where_nobody_can_be_asked_it_is_not_checked_and_that_is_no_failure(stderr: str) -> None:
    code, said = verdict("run", "", stderr)
    assert (code, "NOT CHECKED" in said) == (0, True)


def test_every_file_is_audited() -> None:
    assert {part for parts in SETS for part in parts} | {"build"} == {path.stem for path in FOLDER.glob("*.txt")}
