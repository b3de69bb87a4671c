"""`diloco doctor` before real shards: it names what is wrong, changes nothing, and takes no more than it may."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from in_process import InProcessShard, settings_with

from certificates import Certificates
from diloco_common.observe.metrics import installed
from diloco_common.settings import Settings
from diloco_common.wire.messages import PROTOCOL
from diloco_deploy.codes import CODES
from diloco_deploy.doctor import Check, Door, Known, ReportLine, State, run_checks, shards
from diloco_deploy.doctor.command import Patient, look
from secret_files import secret_file


def found_at(*addresses: str, tls: Path | None = None, **sections: dict[str, object]) -> list[ReportLine]:
    """What the doctor finds on the way to shards."""
    if tls is not None:
        sections["security"] = {"tls": tls}
    patient = Patient(Settings.model_validate(sections), addresses)
    findings = [found.finding for found in look(patient)]
    assert [finding.code for finding in findings if finding.code not in CODES] == []
    return findings


def failures(findings: list[ReportLine]) -> list[str]:
    return [finding.code for finding in findings if finding.state is State.FAILURE]


def closed_port() -> str:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{bound.getsockname()[1]}"


def test_a_healthy_shard_fails_nothing(serve, train):
    shard = serve()
    train(shard.address, "a").step()
    findings = found_at(shard.address)
    assert failures(findings) == []
    said = " ".join(finding.what for finding in findings)
    assert "shard 0 of 1 of run local" in said
    assert "agree within a second" in said
    assert "a round trip takes" in said
    assert f"runs {installed()}, as this machine does" in said


class World:
    def __init__(self, serve: Callable[..., InProcessShard], folder: Path) -> None:
        self.serve, self.folder = serve, folder
        self.run = Certificates(folder / "certs")

    @property
    def secure(self) -> InProcessShard:
        return self.serve(settings_with(security={"tls": self.run.issue("shard/0", days=80)}))

    def frozen(self) -> list[ReportLine]:
        """The kernel takes its connections; nobody answers."""
        with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
            return found_at(f"127.0.0.1:{listener.getsockname()[1]}")

    def revoked(self) -> list[ReportLine]:
        shard, folder = self.secure, self.run.issue("learner/a", days=80)
        shard.loop.look(lambda: shard.server._access.callers.deny(frozenset({self.run.serials["learner/a"]})))
        return found_at(shard.address, tls=folder)

    def with_token(self, *, shown: bool) -> list[ReportLine]:
        token = secret_file(self.folder / "token", "a-token-of-enough-letters")
        shard = self.serve(settings_with(security={"token_file": token}))
        return found_at(shard.address, **({"security": {"token_file": token}} if shown else {}))

    def as_learner(self, authority: Certificates | None = None, **more: timedelta) -> list[ReportLine]:
        return found_at(self.secure.address, tls=(authority or self.run).issue("learner/a", **more))


@pytest.mark.parametrize(
    ("look_at", "named"),
    [
        (lambda w: found_at(closed_port()), ["PORT_CLOSED"]),
        (lambda w: found_at(w.serve().server.http_address), ["NOT_A_SHARD"]),
        (lambda w: w.frozen(), ["NO_ANSWER"]),
        (lambda w: found_at(w.secure.address), ["TLS_MISMATCH"]),
        (lambda w: found_at(w.serve().address, tls=w.run.issue("learner/a")), ["TLS_MISMATCH"]),
        (lambda w: w.as_learner(begins=timedelta(days=-3)), ["CERTIFICATE_NOT_VALID"]),
        (lambda w: w.as_learner(begins=timedelta(days=3)), ["CERTIFICATE_NOT_VALID"]),
        (lambda w: w.as_learner(Certificates(w.folder / "other")), ["FOREIGN_CERTIFICATE"]),
        (lambda w: w.revoked(), ["REVOKED"]),
        (lambda w: found_at(w.serve().address, run={"id": "other"}), ["WRONG_RUN"]),
        (lambda w: w.with_token(shown=False), ["UNAUTHENTICATED"]),
        (lambda w: w.with_token(shown=True), []),
        *(
            (lambda w, who=who: found_at(w.secure.address, tls=w.run.issue(who, days=80)), code)
            for who, code in (("observer/x", []), ("admin/x", []), ("shard/1", []))
        ),
    ],
)
def test_what_is_wrong_is_named(serve, tmp_path, look_at, named):
    assert failures(look_at(World(serve, tmp_path))) == named


def test_another_version_of_the_protocol(serve):
    door = Door(serve().address, "local")
    check = Check("run", door.address, 10.0, lambda: shards.describe(door, Known(), PROTOCOL + 1))
    (found,) = run_checks([check], time.monotonic, time.monotonic() + 10)
    assert (found.finding.state, found.finding.code) == (State.FAILURE, "PROTOCOL_MISMATCH")


def test_shards_that_were_not_named(serve, train):
    first, second, restarted = (
        serve(settings_with(sync={"fragments": 2}, shard={"count": 2, "index": i})) for i in (0, 1, 1)
    )
    train(f"{first.address},{second.address}", "a").step()
    assert failures(found_at(first.address)) == ["SHARDS_MISSING"]
    assert failures(found_at(first.address, second.address)) == []
    assert failures(found_at(first.address, restarted.address)) == [], "it waits for its first learner"


def test_the_doctor_leaves_no_trace_in_the_run(serve, train):
    shard = serve()
    train(shard.address, "a").step()
    before = shard.loop.look(lambda: shard.server.host.shard.membership.live())
    found_at(shard.address)
    after = shard.loop.look(lambda: shard.server.host.shard.membership.live())
    assert [m.learner_id for m in before] == [m.learner_id for m in after] == ["a"]
    assert shard.loop.look(lambda: len(shard.server.service._pulls._of_learners)) == 0


def test_a_run_that_waits_for_its_first_learner_fails_nothing(serve):
    found = found_at(serve().address)
    assert failures(found) == []
    assert any("waits for its first learner" in f.what for f in found)
    assert {"clock_skew_s"} <= {name for f in found for name in f.figures}, "it says what time it is"
