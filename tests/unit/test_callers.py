"""Who calls, as a certificate proves it, and how long that holds."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from certificates import Certificates
from diloco_common.errors import Expired, Revoked, WrongIdentity
from diloco_common.trust.files import proof_of
from diloco_common.trust.identity import MAY, Identity, Scope
from diloco_server.shell.access import Callers


@pytest.fixture
def run(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path / "certs")


def pem(run: Certificates, who: str) -> bytes:
    return (run.issue(who) / "cert.pem").read_bytes()


def test_where_nothing_is_asked_for_callers_are_who_they_say(run: Certificates) -> None:
    caller = Callers(lambda: 0.0).proven(Identity("local", "b"), pem(run, "learner/a"))
    assert caller == Identity("local", "b")
    caller.check_may("Join")


@pytest.mark.parametrize("scope", list(Scope))
def test_a_scope_may_what_the_table_says(run: Certificates, scope: Scope) -> None:
    proof = proof_of(pem(run, f"{scope.value}/1"))
    caller = Identity("local", proof=proof)
    for call in ("Join", "Observe", "Attend", "Push", "Pull", "Leave", "Drain", "Checkpoint"):
        if call in MAY[scope]:
            caller.check_may(call)
        else:
            with pytest.raises(WrongIdentity):
                caller.check_may(call)


@pytest.mark.parametrize(
    ("who", "claimed"), [("learner/a", "b"), ("observer/a", "a"), ("admin/a", "a"), ("shard/0", "0")]
)
def test_a_call_is_of_whom_the_certificate_names(run: Certificates, who: str, claimed: str) -> None:
    callers = Callers(lambda: 0.0, needs_certificate=True)
    with pytest.raises(WrongIdentity):
        callers.proven(Identity("local", claimed), pem(run, who))


def test_what_has_expired_proves_nothing(run: Certificates) -> None:
    certificate = pem(run, "learner/a")
    expires = proof_of(certificate).expires
    clock = [expires - 1]
    callers = Callers(lambda: clock[0], needs_certificate=True)
    callers.proven(Identity("local", "a"), certificate)

    clock[0] = expires
    with pytest.raises(Expired, match="issue another"):
        callers.proven(Identity("local", "a"), certificate)


def test_an_open_call_ends_when_its_proof_expires(run: Certificates) -> None:
    proof = proof_of(pem(run, "learner/a"))
    callers = Callers(lambda: proof.expires - 0.01, needs_certificate=True)

    async def call(*, revokes: bool) -> None:
        async with callers.holding(Identity("local", "a", 7, proof=proof)):
            try:
                await asyncio.Event().wait()
            finally:  # its time is up, and it has not ended yet
                if revokes:
                    callers.revoke(frozenset({proof.serial}))

    for revokes, ends in ((False, Expired), (True, Revoked)):
        with pytest.raises(ends):
            asyncio.run(asyncio.wait_for(call(revokes=revokes), 20))


def test_open_calls_of_the_revoked_end_and_no_others(run: Certificates) -> None:
    proofs = {name: proof_of(pem(run, f"learner/{name}")) for name in "ab"}
    callers = Callers(lambda: 0.0, needs_certificate=True)

    async def call(name: str, generation: int) -> None:
        async with callers.holding(Identity("local", name, generation, proof=proofs[name])):
            await asyncio.Event().wait()

    async def scene() -> None:
        *revoked, other = [asyncio.create_task(call(*of)) for of in (("a", 7), ("a", 7), ("b", 8))]
        await asyncio.sleep(0)
        callers.revoke(frozenset({proofs["a"].serial}))
        ended = await asyncio.wait_for(asyncio.gather(*revoked, return_exceptions=True), 120)
        assert [type(error) for error in ended] == [Revoked] * 2
        assert not other.done()
        other.cancel()

    asyncio.run(scene())
