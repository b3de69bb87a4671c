"""Identities over TLS: who is let in, as whom, for which calls, and for how long."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import grpc
import pytest
from in_process import InProcessShard, contribution, refusal, settings_with
from test_thin_link_contract import ThinLink

from certificates import Certificates
from diloco_common.codec import usual_chunk_elements
from diloco_common.errors import ConfigError, Revoked
from diloco_common.trust.identity import MAY
from diloco_common.wire import rpc
from diloco_common.wire.manifest import TensorSpec, cut
from diloco_protos import parameter_server_pb2 as pb
from diloco_server.shell.server import stand_by
from diloco_worker.global_model import pull_global_model
from waiting import DEADLINE_S, until, until_async

STATUS = grpc.StatusCode
OUT_S = 1.0
"""Whoever is revoked is out within this time."""


@pytest.fixture
def serving(serve: Callable[..., InProcessShard], run: Certificates) -> Callable[..., InProcessShard]:
    """Starts a shard that asks for certificates, and watches the master copy of the deny-list."""

    def start(**sections: Any) -> InProcessShard:
        security = {"tls": run.issue("shard/0"), "revoked": run.deny_list}
        return serve(settings_with(security=security, **sections))

    return start


@pytest.fixture
def shard(serving: Callable[..., InProcessShard]) -> InProcessShard:
    return serving()


def joined(shard: InProcessShard, run: Certificates, learner_id: str = "a") -> Any:
    """A caller with a lease."""
    caller = shard.caller(learner_id, tls=run.issue(f"learner/{learner_id}"))
    caller.join()
    return caller


def calls_of(caller: Any) -> dict[str, Callable[[], Any]]:
    payload = contribution()
    return {
        "Join": caller.join,
        "Observe": lambda: caller.join((), observe=True),
        "Attend": lambda: caller.attend().ends(),
        "Push": lambda: caller.push(caller.header(payload), payload),
        "Pull": caller.pull,
        "Leave": caller.leave,
    }


def seeded(shard: InProcessShard, run: Certificates, learner_id: str = "b") -> Any:
    """An honest learner that has joined, and brought the model."""
    caller = joined(shard, run, learner_id)
    caller.seed()
    return caller


def test_what_proves_one_learner_is_no_good_for_another(shard, run):
    honest = shard.caller("b", tls=run.issue("learner/b"))
    honest.join()
    honest.seed()
    thief = shard.caller("b", tls=run.issue("learner/a"))
    thief.identity = honest.identity
    before = shard.state()

    found = {name: refusal(call) for name, call in calls_of(thief).items()}

    assert {how.code for how in found.values()} == {"WRONG_IDENTITY"}
    assert {how.status for how in found.values()} == {STATUS.PERMISSION_DENIED}
    assert all("learner/a calls as learner b" in how.words for how in found.values())
    assert shard.state() == before
    assert shard.member_state("b") == "alive"
    assert shard.metric("refused_calls_total", code="WRONG_IDENTITY") >= len(found)  # a push is repeated: ANSWER_LOST


@pytest.mark.parametrize("who", ["learner/a", "observer/x", "admin/x", "shard/1"])
def test_a_scope_makes_the_calls_of_its_row_and_no_others(shard, run, who):
    seeded(shard, run)
    scope, _, name = who.partition("/")
    caller = shard.caller(name if scope == "learner" else "", tls=run.issue(who))
    if scope == "learner":
        caller.join()

    calls = calls_of(caller)
    if scope == "learner":
        del calls["Attend"]  # it would last
    refused = {call for call, make in calls.items() if _code_of(make) == "WRONG_IDENTITY"}

    assert refused == {"Join", "Observe", "Attend", "Push", "Pull", "Leave"} - MAY[scope]


def test_a_certificate_of_another_run_is_refused(shard, run, tmp_path):
    """The same authority may have signed it."""
    run.authority.run_id = "other"
    foreign = shard.caller("a", tls=run.issue("learner/a"))

    found = refusal(foreign.join)

    assert found.code == "WRONG_IDENTITY"
    assert "diloco://other/learner/a" in found.words


def test_a_caller_without_a_certificate_does_not_get_to_a_call(shard, run, tmp_path):
    ca_alone = tmp_path / "bare"
    ca_alone.mkdir()
    (ca_alone / "ca.pem").write_bytes((run.authority.folder / "ca.pem").read_bytes())

    assert refusal(shard.caller("a", tls=ca_alone).join).status is STATUS.UNAVAILABLE
    assert refusal(shard.caller("a").join).status is STATUS.UNAVAILABLE
    assert shard.metric("refused_calls_total", code="UNAUTHENTICATED") == 0


@pytest.mark.parametrize(
    ("who", "kept_for", "words"),
    [
        ("shard/1", {}, "diloco://local/shard/1, and this is diloco://local/shard/0"),
        ("learner/a", {}, "diloco certs issue shard/0"),
        ("shard/0", {"begins": timedelta(days=-2)}, "expired at"),
    ],
)
def test_a_shard_does_not_start_with_a_certificate_that_nobody_would_take(loop, run, who, kept_for, words):
    with pytest.raises(ConfigError, match=words):
        InProcessShard(loop, settings_with(security={"tls": run.issue(who, **kept_for)}))


def test_whoever_is_revoked_is_out_at_once_and_nobody_else(shard, run):
    honest, bad = (shard.caller(name, tls=run.issue(f"learner/{name}")) for name in "ba")
    honest.join()
    honest.seed()
    bad.join()
    control, honest_control = bad.attend(), honest.attend()
    control.hear(object)
    honest_control.hear(object)

    began = time.monotonic()
    run.revoke(run.serials["learner/a"])
    found = refusal(control.ends)

    assert found.code == Revoked.code
    assert shard.member_state("a") == "evicted"
    assert time.monotonic() - began < 60 * OUT_S, "a deadline against hanging; 1 s is the rule"
    assert {refusal(call).code for call in calls_of(bad).values()} == {Revoked.code}
    honest_control.hear(object)
    assert shard.member_state("b") == "alive"


def test_a_lease_ends_at_once_although_no_call_is_open(serving, run):
    shard = serving(lease={"lease_s": 600.0})
    seeded(shard, run, "b")
    joined(shard, run)
    assert not shard.loop.look(lambda: shard.server._access.callers._open)

    run.revoke(run.serials["learner/a"])

    until(lambda: shard.member_state("a") == "evicted", "its lease ends")
    assert shard.member_state("b") == "alive"


def test_a_lease_is_of_the_certificate_that_attends_last(serving, run):
    shard = serving(lease={"lease_s": 600.0})
    before = joined(shard, run)
    old = run.serials["learner/a"]
    renewed = shard.caller("a", tls=run.issue("learner/a"))
    renewed.identity = before.identity
    renewed.attend().hear(object)

    run.revoke(old)
    until(lambda: _code_of(before.pull) == Revoked.code, "the old one is revoked")

    assert shard.member_state("a") == "alive"
    run.revoke(run.serials["learner/a"])
    until(lambda: shard.member_state("a") == "evicted", "so is the new one")


NUMBER = '{"revoked": [{"serial": 123, "who": "somebody", "at": "today"}]}'
DEEP = "[" * 100_000


@pytest.mark.parametrize("damaged", ['{"revoked": [', NUMBER, DEEP], ids=["half", "number", "deep"])
def test_a_damaged_deny_list_pardons_nobody(shard, run, written, damaged):
    bad = seeded(shard, run, "a")
    run.revoke(run.serials["learner/a"])
    until(lambda: _code_of(bad.pull) == Revoked.code, "the deny-list is read")

    whole = run.deny_list.read_text()
    run.deny_list.write_text(damaged)
    until(lambda: "copy it again" in written.getvalue(), "the damage is said")

    assert refusal(bad.pull).code == Revoked.code
    later = joined(shard, run, "c")
    run.deny_list.write_text(whole)
    run.revoke(run.serials["learner/c"])
    until(lambda: _code_of(later.pull) == Revoked.code, "the list is read once it is whole")


def _code_of(call: Callable[[], Any]) -> str:
    """With which it is refused; "" if it is not."""
    try:
        return refusal(call).code
    except AssertionError:
        return ""


def test_a_shard_serves_with_its_renewed_certificate_and_connections_go_on(shard, run, written):
    caller = seeded(shard, run, "a")
    control = caller.attend()
    control.hear(object)

    run.issue("shard/0", days=2.0)
    until(lambda: "certificate read again" in written.getvalue(), "the shard has seen it")

    joined(shard, run, "c")
    control.hear(object)
    assert shard.member_state("a") == "alive"
    assert shown_serial(shard.address) == run.serials["shard/0"]


async def test_a_standby_serves_with_its_renewed_certificate(run, written, tmp_path):
    shard = {"standby_of": "127.0.0.1:1", "data_dir": tmp_path / "copies"}  # where no shard is
    settings = settings_with(shard=shard, security={"tls": run.issue("shard/0")})
    standing = asyncio.create_task(stand_by(settings))
    await until_async(lambda: "standing by" in written.getvalue(), "its start")
    run.issue("shard/0", days=2.0)
    await until_async(lambda: "certificate read again" in written.getvalue(), "the standby has seen it")
    standing.cancel()
    await asyncio.gather(standing, return_exceptions=True)


def shown_serial(address: str) -> str:
    from diloco_common.wire.handshake import certificate_at

    certificate = certificate_at(address)
    assert certificate is not None
    return format(certificate.serial_number, "x")


def test_a_learner_goes_on_with_its_renewed_certificate(shard, run, train):
    folder = run.issue("learner/a")
    training = train(shard.address, "", tls=folder)
    assert training.learner.learner_id == "a", "the certificate says who it is"
    old = run.serials["learner/a"]
    run.issue("learner/a")
    shard.break_streams()
    training.until(lambda: training.connection.times_up == 2, "it dialed again")

    run.revoke(old)
    until(lambda: old in shard.server._access._deny_list.serials, "the old one is revoked")

    tokens = shard.core.tokens_merged
    training.until(lambda: shard.core.tokens_merged > tokens, "it contributes")
    assert training.connection.times_up == 2
    assert shard.metric("refused_calls_total", code="REVOKED") == 0


def test_learners_train_and_observers_read_over_tls(shard, run, train):
    training = train(shard.address, "a", tls=run.issue("learner/a"))
    training.until(lambda: shard.version() >= 2, "versions are made")

    for who in ("observer/x", "learner/a"):
        model = pull_global_model([shard.address], tls=run.issue(who))
        assert model.versions[0] >= 2


def test_a_learner_with_the_certificate_of_another_does_not_dial(shard, run, train):
    with pytest.raises(ConfigError, match="diloco://local/learner/a, and this is learner b of run local"):
        train(shard.address, "b", tls=run.issue("learner/a"))


def test_names_are_proven_through_a_proxy_that_passes_tls_on(shard, run, train, loop):
    proxy = ThinLink(int(shard.server.grpc_address.rpartition(":")[2]))
    try:
        training = train(loop.run(proxy.start()), "a", tls=run.issue("learner/a"))
        training.until(lambda: shard.core.tokens_merged > 0, "it contributes")
    finally:
        loop.run(proxy.stop())


def test_the_log_tells_who_came_went_was_refused_and_revoked(shard, run, written):
    learner = seeded(shard, run, "a")
    refusal(shard.caller("a", tls=run.issue("learner/b")).join)
    learner.leave()
    joined(shard, run, "c")
    run.revoke(run.serials["learner/c"])
    said = until(lambda: _lines(written, "revoked"), "the revocation is said")

    a, b, c = (
        f"peer=ipv4:127.0.0.1 certificate=learner/{name} serial={run.serials[f'learner/{name}']}" for name in "abc"
    )
    assert _lines(written, "joined") == [f"learner=a generation=1 {a}", f"learner=c generation=2 {c}"]
    assert _lines(written, "left") == [f"learner=a generation=1 {a}"]
    assert said == [f"serials={run.serials['learner/c']} leases=c"]
    assert _lines(written, "evicted") == ["learner=c generation=2 code=REVOKED"]
    (refused,) = _lines(written, "WARNING call refused")
    assert refused.startswith('learner=a code=WRONG_IDENTITY why="learner/b calls as learner a')
    assert refused.endswith(b), "the culprit's, not the victim's"


def test_the_log_names_whoever_was_revoked_under_any_name(serving, run, written):
    thief_files = run.issue("learner/b")
    run.revoke(run.serials["learner/b"])
    refusal(serving().caller("a", tls=thief_files).join)

    (line,) = _lines(written, "WARNING call refused")

    assert "code=REVOKED" in line
    assert line.endswith(f"certificate=learner/b serial={run.serials['learner/b']}")


def _lines(written: io.StringIO, event: str) -> list[str]:
    """The fields of all lines of an event."""
    lines = (line.partition(f"shard-0 {event} ")[2] for line in written.getvalue().splitlines())
    return [line for line in lines if line]


def test_a_pull_that_nobody_reads_ends_when_its_learner_is_revoked(shard, run, written):
    """Revoked in the middle of a chunk, which the network does not take."""
    wide = (TensorSpec("weight", (3, usual_chunk_elements("bfloat16"))),)
    bad = shard.caller("a", tls=run.issue("learner/a"))
    bad.manifest = cut(wide, 1, 1)
    bad.join(wide)
    bad.seed()
    open_calls = shard.server._access.callers._open

    async def pull_and_do_not_read() -> Any:
        request = pb.PullRequest(epoch=bad.identity.epoch)
        return bad.stub.Pull(request, metadata=bad.metadata(), timeout=DEADLINE_S)

    call = bad.loop.run(pull_and_do_not_read())
    until(lambda: open_calls, "the pull is open")
    run.revoke(run.serials["learner/a"])
    until(lambda: not open_calls, "it has ended")

    async def read_all() -> None:
        while await call.read() is not rpc.EOF:
            pass

    assert refusal(lambda: bad.loop.run(read_all())).code == Revoked.code
    assert "Traceback" not in written.getvalue()
