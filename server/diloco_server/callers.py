"""Who calls: what certificates and signed tokens prove, and the calls that end when a proof holds no longer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from diloco_common.errors import Expired, Refusal, Revoked, Unauthenticated, WrongIdentity
from diloco_common.identity import Identity, Proof, Scope
from diloco_common.tls import proof_of
from diloco_common.tokens import verify_token

BEARER = "Bearer "


@dataclass(eq=False, slots=True)
class _OpenCall:
    caller: Identity
    serial: str
    limit: asyncio.Timeout


class Callers:
    """The callers of one shard. Owned by its event loop."""

    def __init__(
        self,
        wall_clock: Callable[[], float],
        *,
        needs_certificate: bool = False,
        token_key: Ed25519PublicKey | None = None,
    ) -> None:
        """Where neither is asked for, callers are who they say they are. `wall_clock`: seconds since 1970."""
        self._wall_clock = wall_clock
        self._needs_certificate = needs_certificate
        self._token_key = token_key
        self._revoked: frozenset[str] = frozenset()
        self._open: set[_OpenCall] = set()

    def proven(self, claimed: Identity, certificate: bytes | None, authorization: str | None) -> Identity:
        """The caller with its proof, if this shard asks for one.

        Args:
            claimed: who the call says it is of.
            certificate: of the connection, in PEM; TLS has checked its chain.
            authorization: what the call says under this name.

        Raises Unauthenticated, Expired, Revoked or WrongIdentity.
        """
        proof = self._proof(certificate, authorization)
        if proof is None:
            return claimed
        self._check(proof)
        subject = proof.subject
        if subject.run_id != claimed.run_id:
            raise WrongIdentity(
                f"{subject.uri} is of another run than this shard's {claimed.run_id!r}; issue one for it"
            )
        # Without a learner id the caller is an observer. A learner may be one: it reads the same model either way.
        if claimed.learner_id and (subject.scope is not Scope.LEARNER or subject.name != claimed.learner_id):
            raise WrongIdentity(
                f"{subject} calls as learner {claimed.learner_id}; use that one's certificate or token, or its own id"
            )
        return replace(claimed, proof=proof)

    def named(self, claimed: Identity, certificate: bytes | None, authorization: str | None) -> Identity:
        """Whom to name where a call is refused: whom its proof names, even if revoked; else whom it claims to be."""
        try:
            return replace(claimed, proof=self._proof(certificate, authorization))
        except Refusal:
            return claimed

    def connected(self, anybody: Identity, certificate: bytes | None) -> Identity:
        """The caller of a call that needs no token: proven by the certificate of its connection, if there must be one.

        Raises as `proven` does.
        """
        return self.proven(anybody, certificate, None) if self._needs_certificate else anybody

    @asynccontextmanager
    async def holding(self, caller: Identity) -> AsyncIterator[None]:
        """While a call is open. Raises Revoked or Expired, at whatever it waits for, once its proof holds no longer."""
        if (proof := caller.proof) is None:
            yield
            return
        self._check(proof)  # again: the caller may have waited since
        limit = asyncio.timeout(proof.expires - self._wall_clock())
        call = _OpenCall(caller, proof.serial, limit)
        self._open.add(call)
        try:
            async with limit:
                yield
        except TimeoutError:
            if limit.expired():
                self._check(proof, is_over=True)
            raise
        finally:
            self._open.discard(call)

    def holds(self, proof: Proof) -> bool:
        """Whether it was not revoked."""
        return proof.serial not in self._revoked

    def deny(self, serials: frozenset[str]) -> None:
        """From now on these are refused."""
        self._revoked |= serials

    def revoke(self, serials: frozenset[str]) -> list[Identity]:
        """The same, and end their open calls. Returns who held a lease in one of them."""
        self.deny(serials)
        ended = [call for call in self._open if call.serial in serials]
        for call in ended:
            if call.limit.expired():  # it is ending by itself
                continue
            call.limit.reschedule(asyncio.get_running_loop().time())
        return list({call.caller.generation: call.caller for call in ended if call.caller.generation}.values())

    def _proof(self, certificate: bytes | None, authorization: str | None) -> Proof | None:
        if self._needs_certificate:
            if certificate is None:  # TLS has asked for one: no caller gets here without
                raise Unauthenticated("this shard asks for a certificate; set security.tls (tls= of join)")
            return proof_of(certificate)
        if self._token_key is None:
            return None
        if authorization is None or not authorization.startswith(BEARER):
            raise Unauthenticated("this shard asks for a signed token; set security.token_file (token= of join)")
        return verify_token(self._token_key, authorization.removeprefix(BEARER))

    def _check(self, proof: Proof, *, is_over: bool = False) -> None:
        """Raises Revoked or Expired. `is_over`: one of them it is, whatever the clock says by now."""
        what = f"what proved {proof.subject} (serial {proof.serial})"
        if not self.holds(proof):
            raise Revoked(f"{what} was revoked; if this learner is welcome, issue another")
        if is_over or self._wall_clock() >= proof.expires:
            raise Expired(f"{what} has expired; issue another (no restart is needed: workers read the files again)")
