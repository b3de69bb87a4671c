"""What a shard asks of its callers, from its settings, and how that changes while it runs.

Certificates and the deny-list are read again when they change. Nothing here knows gRPC.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet

from diloco_common.addresses import is_loopback, parse_address
from diloco_common.audit import Audit, NoAudit
from diloco_common.errors import ConfigError
from diloco_common.identity import Identity, Scope, Subject
from diloco_common.logs import Log
from diloco_common.revocations import REVOKED, DenyList
from diloco_common.security import read_bearer_token
from diloco_common.settings import SecuritySettings, Settings
from diloco_common.tls import TlsFiles, TlsFolder, shown
from diloco_common.tokens import read_token_key
from diloco_server.callers import Callers

LOOK_S = 0.25
"""How often to look whether files have changed: whoever is revoked is out within a second."""


class Access:
    """Who may call one shard. Owned by its event loop."""

    def __init__(
        self, settings: Settings, wall_clock: Callable[[], float], log: Log, audit: Audit | None = None
    ) -> None:
        """Raises ConfigError, SecretExposed."""
        security = settings.security
        check_consent(settings)
        self._log = log
        self._audit = audit or NoAudit()
        self._tls = TlsFolder(security.tls, needs_pair=True) if security.tls else None
        self._itself = Subject(settings.run.id, Scope.SHARD, str(settings.shard.index))
        self._wall_clock = wall_clock
        if self._tls is not None:
            _check_certificate(self._tls.files, self._itself, wall_clock)
        self.tls = None if self._tls is None else self._tls.files
        """To serve with, as read last; None: calls come in plaintext."""
        token_key = read_token_key(security.token_key) if security.token_key else None
        self.bearer_token = read_bearer_token(security)
        self.callers = Callers(wall_clock, needs_certificate=self._tls is not None, token_key=token_key)
        path = security.revoked or (security.tls / REVOKED if security.tls else None)
        self._deny_list = DenyList(path, is_required=security.revoked is not None)
        self.callers.deny(self._deny_list.serials)
        self._said = ""

    def say(self) -> None:
        """Say at the start what is not protected."""
        if self.tls is None and self.bearer_token is not None:
            self._log.warning(
                "a shared token is the only protection: whoever has it can be any learner, and end the run; it "
                "travels, as everything does, in plaintext (security.tls gives every caller an identity of its own)"
            )

    def refresh(
        self, leases_of: Callable[[AbstractSet[str]], list[Identity]]
    ) -> tuple[TlsFiles | None, list[Identity]]:
        """Look at the files: new certificates to serve with, if any, and the leases of those that were just revoked.

        `leases_of`: who holds a lease by these serials, whether or not one of its calls is open.
        """
        files = self._new_files()
        serials = self._deny_list.refresh()
        leases: list[Identity] = []
        if serials:
            found = [*self.callers.revoke(serials), *leases_of(serials)]
            leases = list({(lease.learner_id, lease.generation): lease for lease in found}.values())
            self._log.event("revoked", serials=sorted(serials), leases=[lease.learner_id for lease in leases])
            self._audit.note("Revoke", "OK", serials=sorted(serials), leases=[lease.learner_id for lease in leases])
        why_not = (self._tls.why_not if self._tls is not None else "") or self._deny_list.why_not
        if why_not != self._said and why_not:
            self._log.error("not used, what was read before holds on", why=why_not)
        self._said = why_not
        return files, leases

    def _new_files(self) -> TlsFiles | None:
        """What came since and is fit to serve with."""
        if self._tls is None or not self._tls.refresh():
            return None
        try:
            _check_certificate(self._tls.files, self._itself, self._wall_clock)
        except ConfigError as error:
            self._log.error("new certificate not used, the one before holds on", why=error)
            return None
        self._log.event("certificate read again", folder=self._tls.files.folder)
        self.tls = self._tls.files
        return self.tls


def check_consent(settings: Settings) -> None:
    """Raises ConfigError where settings of `security` contradict each other, or plaintext needs an explicit word."""
    security, listen = settings.security, parse_address(settings.shard.listen)
    if security.token_key and (security.tls or security.token_file):
        other = "security.tls" if security.tls else "security.token_file"
        raise ConfigError(
            f"security.token_key and {other} exclude each other at a shard: a caller is proven by one of them"
        )
    if security.tls is None and not security.insecure and not is_loopback(listen.host):
        raise ConfigError(
            f"shard.listen = {listen} is reachable from other machines, and calls would travel in plaintext"
            f"{_token_words(security)}. Make certificates (`diloco certs init`, `diloco certs issue shard/"
            f"{settings.shard.index} --host ...`) and set security.tls to their folder; or, on a private network or "
            "behind a proxy that ends TLS, set security.insecure = true"
        )


def _token_words(security: SecuritySettings) -> str:
    return ", the token with them" if security.token_file or security.token_key else " and from anybody"


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
