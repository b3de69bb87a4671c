"""Checks who may call, by certificate, and ends open calls whose proof expires or is revoked.

The rules follow from the settings. Certificates and the deny-list are read again when their files change. This file
does not use gRPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from diloco_common.errors import ConfigError, Expired, Refusal, Revoked, Unauthenticated, WrongIdentity
from diloco_common.observe.http_listener import TlsDoor
from diloco_common.observe.logs import Log
from diloco_common.settings import SecuritySettings, Settings
from diloco_common.trust.files import REVOKED, DenyList, TlsFiles, TlsFolder, proof_of, read_bearer_token, shown
from diloco_common.trust.identity import Identity, Proof, Scope, Subject
from diloco_common.wire.addresses import is_loopback, parse_address
from diloco_common.wire.calls import AGAIN_S


@dataclass(eq=False, slots=True)
class _TimedCall:
    caller: Identity
    serial: str
    limit: asyncio.Timeout


class Callers:
    """The callers of one shard. Owned by its event loop."""

    def __init__(self, wall_clock: Callable[[], float], *, needs_certificate: bool = False) -> None:
        """`needs_certificate`: if False, trust what callers say. `wall_clock`: seconds since 1970."""
        self._wall_clock = wall_clock
        self._needs_certificate = needs_certificate
        self._revoked: frozenset[str] = frozenset()
        self._open: set[_TimedCall] = set()

    def proven(self, claimed: Identity, certificate: bytes | None) -> Identity:
        """The caller with its proof, if this shard requires one.

        Args:
            claimed: the identity that the call states.
            certificate: the connection's certificate, in PEM; TLS has checked its chain.

        Raises Unauthenticated, Expired, Revoked or WrongIdentity.
        """
        proof = self._proof(certificate)
        if proof is None:
            return claimed
        self._check(proof)
        subject = proof.subject
        if subject.run_id != claimed.run_id:
            raise WrongIdentity(
                f"{subject.uri} belongs to another run than this shard's {claimed.run_id!r}; issue one for this run"
            )
        # Without a learner id the caller is an observer. A learner may act as one: both read the same model.
        if claimed.learner_id and (subject.scope is not Scope.LEARNER or subject.name != claimed.learner_id):
            raise WrongIdentity(
                f"{subject} calls as learner {claimed.learner_id}; use that learner's certificate, or its own id"
            )
        return replace(claimed, proof=proof)

    def named(self, claimed: Identity, certificate: bytes | None) -> Identity:
        """The identity to log for a refused call: the proven one, even if revoked; otherwise the claimed one."""
        try:
            return replace(claimed, proof=self._proof(certificate))
        except Refusal:
            return claimed

    @asynccontextmanager
    async def holding(self, caller: Identity) -> AsyncIterator[None]:
        """Hold this while a call is open. When its proof ends, this raises Revoked or Expired inside the call."""
        if (proof := caller.proof) is None:
            yield
            return
        self._check(proof)  # again, since the caller may have waited
        limit = asyncio.timeout(proof.expires - self._wall_clock())
        call = _TimedCall(caller, proof.serial, limit)
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
        return proof.serial not in self._revoked

    def deny(self, serials: frozenset[str]) -> None:
        self._revoked |= serials

    def revoke(self, serials: frozenset[str]) -> None:
        self.deny(serials)
        ended = [call for call in self._open if call.serial in serials]
        for call in ended:
            if call.limit.expired():  # it is already ending
                continue
            call.limit.reschedule(asyncio.get_running_loop().time())

    def _proof(self, certificate: bytes | None) -> Proof | None:
        if not self._needs_certificate:
            return None
        if certificate is None:  # TLS requires one, so this should not happen
            raise Unauthenticated("this shard asks for a certificate; set security.tls (tls= of join)")
        return proof_of(certificate)

    def _check(self, proof: Proof, *, is_over: bool = False) -> None:
        """Raises Revoked or Expired. `is_over`: raise one of them in any case, whatever the clock says."""
        what = f"the certificate of {proof.subject} (serial {proof.serial})"
        if not self.holds(proof):
            raise Revoked(f"{what} was revoked; if this learner is welcome, issue another")
        if is_over or self._wall_clock() >= proof.expires:
            raise Expired(f"{what} has expired; issue another (no restart is needed: workers read the files again)")


class AccessFiles:
    """The access rules of one shard. Owned by its event loop."""

    def __init__(self, settings: Settings, wall_clock: Callable[[], float], log: Log) -> None:
        """Raises ConfigError, SecretExposed."""
        security = settings.security
        check_consent(settings)
        self._log = log
        self._tls = TlsFolder(security.tls, needs_pair=True) if security.tls else None
        self._itself, role = Subject(settings.run.id, Scope.SHARD, str(settings.shard.index)), settings.shard.role
        shown = None if self._tls is None else self._tls.files.subject
        if role == "mirror" or (role == "standby" and shown != self._itself):  # a standby may already hold it
            self._itself = Subject(settings.run.id, Scope(role), "" if shown is None else shown.name)
        self._wall_clock = wall_clock
        if self._tls is not None:
            _check_certificate(self._tls.files, self._itself, wall_clock)
        self.tls = None if self._tls is None else self._tls.files
        """The files to serve with, as last read; None: plaintext."""
        self.bearer_token = read_bearer_token(security)
        self.callers = Callers(wall_clock, needs_certificate=self._tls is not None)
        path = security.revoked or (security.tls / REVOKED if security.tls else None)
        self._deny_list = DenyList(path, is_required=security.revoked is not None)
        self.callers.deny(self._deny_list.serials)
        self._said: dict[str, str] = {}  # problem -> reason

    def served(self) -> TlsFiles:
        assert self.tls is not None
        return self.tls

    def door(self) -> TlsDoor | None:
        """How to serve HTTP; None: in plaintext."""
        return None if self.tls is None else TlsDoor(self.served, self.callers.holds)

    def say(self) -> None:
        if self.tls is None and self.bearer_token is not None:
            self._log.warning(
                "a shared token is the only protection: anyone who has it can act as any learner, and end the run; it "
                "travels, as everything does, in plaintext (security.tls gives every caller an identity of its own)"
            )

    async def watch(
        self,
        renewed: Callable[[TlsFiles], None] = lambda files: None,
        revoked: Callable[[AbstractSet[str]], list[str]] = lambda serials: [],
    ) -> None:
        """Apply changed files, until cancelled.

        `renewed`: serves with these files from now on. `revoked`: ends the leases of certificates with these serials,
        even if no call of theirs is open, and returns their learners.
        """
        while True:
            await asyncio.sleep(AGAIN_S)
            try:
                self._look(renewed, revoked)
            except Exception as error:  # or revoking would silently stop working
                self._log.error("looking at certificates and the deny-list failed", trace=error)

    def _look(
        self, renewed: Callable[[TlsFiles], None], revoked: Callable[[AbstractSet[str]], list[str]]
    ) -> None:  # fmt: skip
        if serials := self._deny_list.refresh():
            self.callers.revoke(serials)
            self._log.event("revoked", serials=sorted(serials), leases=revoked(serials))
        if (files := self._new_files()) is not None:
            renewed(files)
        why_not = (self._tls.why_not if self._tls is not None else "") or self._deny_list.why_not
        wrong = {"new files not used; the earlier ones stay": why_not, "nobody can call this shard": self._expired()}
        for words, why in wrong.items():
            if why and why != self._said.get(words):
                self._log.error(words, why=why)
        self._said = wrong

    def _expired(self) -> str:
        """Why the certificate in use is not valid; empty if it is."""
        try:
            if self.tls is not None:
                _check_certificate(self.tls, self._itself, self._wall_clock)
        except ConfigError as error:
            return str(error)
        return ""

    def _new_files(self) -> TlsFiles | None:
        """New files that can be served with, if any."""
        if self._tls is None or not self._tls.refresh():
            return None
        try:
            _check_certificate(self._tls.files, self._itself, self._wall_clock)
        except ConfigError as error:
            self._log.error("new certificate not used; the earlier one stays", why=error)
            return None
        self._log.event("certificate read again", folder=self._tls.files.folder)
        self.tls = self._tls.files
        return self.tls


def check_consent(settings: Settings) -> None:
    """Raises ConfigError if plaintext needs explicit consent, and the settings do not give it."""
    security, listen = settings.security, parse_address(settings.shard.listen)
    if security.tls is None and not security.insecure and not is_loopback(listen.host):
        raise ConfigError(
            f"shard.listen = {listen} is reachable from other machines, and calls would travel in plaintext"
            f"{_token_words(security)}. Make certificates (`diloco certs init`, `diloco certs issue shard/"
            f"{settings.shard.index} --host ...`) and set security.tls to their folder; or, on a private network or "
            "behind a proxy that ends TLS, set security.insecure = true"
        )


def _token_words(security: SecuritySettings) -> str:
    return ", the token with them" if security.token_file else " and from anybody"


def _check_certificate(files: TlsFiles, expected: Subject, wall_clock: Callable[[], float]) -> None:
    """Raises ConfigError."""
    certificate = files.certificate
    assert certificate is not None
    if files.subject != expected:
        raise ConfigError(
            f"security.tls: {files.folder} holds the certificate of {files.subject and files.subject.uri}, and this is "
            f"{expected.uri}; give it its own (`diloco certs issue {expected}`)"
        )
    if certificate.not_valid_after_utc.timestamp() <= wall_clock():
        raise ConfigError(
            f"security.tls: the certificate in {files.folder} expired at {shown(certificate.not_valid_after_utc)}; "
            f"renew it (`diloco certs issue {expected}`)"
        )
