"""The audit log: one line per event, bounded, for its owner alone."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from diloco_common.errors import ConfigError
from diloco_common.trust.identity import Identity, Proof, subject_of
from diloco_common.wire.calls import SAY_EVERY_S
from diloco_server.shell.audit import FILES_KEPT, REPEATED_MAX, AuditLog

A = Identity("r", "a", generation=3, peer="ipv4:10.0.0.7", proof=Proof(subject_of("r", "learner/a"), "ab12", 0.0))
STRANGER = Identity("r", "\x1b[31m\n" + "x" * 5000, peer="ipv4:10.0.0.8")


class Clock:
    now = 1_795_000_000.25

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(tmp_path: Path, clock: Clock) -> AuditLog:
    return AuditLog(tmp_path / "audit", "shard-0", clock, file_bytes_max=2000)


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "audit/shard-0.jsonl").read_text().splitlines()]


def test_a_line_says_who_did_what_and_how_it_ended(log: AuditLog, tmp_path: Path) -> None:
    log.note("Join", "OK", A)
    log.note("Push", "WRONG_IDENTITY", STRANGER)

    joined, refused = lines(tmp_path)

    assert joined == {
        "time": "2026-11-18T11:06:40.250Z", "what": "Join", "outcome": "OK", "who": "diloco://r/learner/a",
        "serial": "ab12", "peer": "ipv4:10.0.0.7", "generation": 3,
    }  # fmt: skip
    assert len(str(refused["who"])) == 200
    raw = (tmp_path / "audit/shard-0.jsonl").read_text()
    assert all(line.isprintable() for line in raw.splitlines())
    assert stat.S_IMODE((tmp_path / "audit/shard-0.jsonl").stat().st_mode) == 0o600


def test_a_refusal_that_repeats_is_counted(log: AuditLog, clock: Clock, tmp_path: Path) -> None:
    for _ in range(1000):
        log.note("Join", "REVOKED", A)
    clock.now += SAY_EVERY_S
    log.note("Leave", "OK", A)
    for serial in ("1", "2"):
        log.note("Revoke", "OK", serials=[serial])
    found = [(line["what"], line.get("repeated")) for line in lines(tmp_path)]
    assert found == [("Join", None), ("Join", 999), ("Leave", None), *2 * [("Revoke", None)]]


def test_a_crowd_of_refusals_hides_nobody_who_joins(tmp_path: Path, clock: Clock) -> None:
    log = AuditLog(tmp_path / "audit", "shard-0", clock)
    for i in range(REPEATED_MAX + 10):
        log.note("Join", "UNAUTHENTICATED", Identity("r", f"ghost-{i}"))
    log.note("Join", "OK", A)
    assert lines(tmp_path)[-1]["who"] == "diloco://r/learner/a"


def test_files_are_exchanged_when_full_and_old_ones_go(log: AuditLog, tmp_path: Path) -> None:
    for i in range(400):
        log.note("Seed", "OK", A, fragment=i)
    log.close()

    files = sorted(path.name for path in (tmp_path / "audit").iterdir())
    assert files == sorted(["shard-0.jsonl", *(f"shard-0.jsonl.{i}" for i in range(1, FILES_KEPT + 1))])
    assert all(path.stat().st_size <= 2000 for path in (tmp_path / "audit").iterdir())
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in (tmp_path / "audit").iterdir())


def test_a_folder_that_cannot_be_written_is_said_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "audit").write_text("a file")
    with pytest.raises(ConfigError, match=r"security\.audit"):
        AuditLog(tmp_path / "audit", "shard-0")
