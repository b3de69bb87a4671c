"""A run's certificate authority in a folder: issues certificates and revokes them.

    ca.pem, ca.key        the authority, P-256, ten years
    issued.jsonl          the issued certificates, one line each
    revoked.json          the deny-list: the master copy
    learner-a/ ...        ca.pem, cert.pem and key.pem of one identity, to be copied to its machine

The folder and its keys are private to their owner. No other authority, and no certificate of another identity, is
overwritten.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from diloco_common.command import NOT_WRITTEN, disk_errors
from diloco_common.errors import ConfigError
from diloco_common.trust.files import (
    CA,
    CERTIFICATE,
    KEY,
    LEARNER_HOST,
    REVOKED,
    read_folder,
    read_private,
    serial_text,
    subject_of_certificate,
    write_revocations,
)
from diloco_common.trust.identity import Scope, Subject
from diloco_deploy.trust import ISSUED, PRIVATE, PUBLIC, Issued, Registry, write_file

CA_KEY = "ca.key"
_BESIDE_THE_KEY = (CA, ISSUED, REVOKED)
_ELSE = "give another --out, or remove it if nobody needs it"
CA_DAYS, CERTIFICATE_DAYS = 3650, 90
"""An authority outlives its run; a lost certificate expires within a quarter of a year."""
CLOCKS_DIFFER = timedelta(hours=1)
"""A certificate is valid from this long ago, because clocks of other machines may be behind."""
RENEW_SHARE = 1 / 3
"""A certificate is kept while at least this share of its time is left."""
SERVES = (Scope.SHARD, Scope.MIRROR, Scope.STANDBY)
"""Scopes of processes that others dial."""
HERE = ("localhost", "127.0.0.1", "::1")
"""Certificates of processes that others dial are also valid for these, for health checks on their own machine."""


class Authority:
    def __init__(
        self, folder: Path, run_id: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
    ) -> None:
        self.folder, self.run_id, self.registry = folder, run_id, Registry(folder)
        self._certificate, self._key = certificate, key

    def issue(
        self, subject: Subject, now: datetime, *, hosts: Sequence[str] = (), days: float = CERTIFICATE_DAYS,
        into: Path | None = None,
    ) -> tuple[Path, Issued]:  # fmt: skip
        """Make a key and a certificate, and write them with ca.pem into a folder. Calling it again renews.

        `hosts`: names and IP addresses of a shard, as others dial it. Raises ConfigError.
        """
        if bool(hosts) and subject.scope not in SERVES:
            raise ConfigError(f"{subject} has no use for --host: only shards, mirrors and standbys are dialed")
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(subject, key.public_key(), _alternative_names(subject, hosts), now, days)
        into = into or self.folder / str(subject).replace("/", "-")
        expires = int(certificate.not_valid_after_utc.timestamp())
        issued = Issued(subject.uri, serial_text(certificate.serial_number), expires)
        with disk_errors(ConfigError, NOT_WRITTEN):
            into.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.registry.note(issued)  # first, so every certificate is listed even after a crash
            # A process that reads in between sees a pair that does not match, and waits.
            write_file(into / CERTIFICATE, certificate.public_bytes(Encoding.PEM), mode=PUBLIC)
            write_file(into / KEY, _private_pem(key), mode=PRIVATE)
            write_file(into / CA, self._certificate.public_bytes(Encoding.PEM), mode=PUBLIC)
        return into, issued

    def check_free(self, into: Path, subject: Subject) -> None:
        """Check that a folder holds a certificate of the same subject, or none of these files. Raises ConfigError."""
        if any(os.path.lexists(into / name) for name in (CA_KEY, ISSUED)):
            raise ConfigError(f"{into} is the folder of an authority; give a certificate a folder of its own (--out)")
        if os.path.lexists(into / CERTIFICATE):
            held = _subject_in(into / CERTIFICATE)
            if held != subject:
                raise ConfigError(f"{into} holds a certificate of {held or 'somebody else'}, not of {subject}; {_ELSE}")
            return
        if os.path.lexists(into / KEY):
            raise ConfigError(f"{into} holds {KEY} without a certificate: nobody knows whose it is; {_ELSE}")
        if os.path.lexists(into / CA) and not _holds(into / CA, self._certificate.public_bytes(Encoding.PEM)):
            raise ConfigError(f"{into} holds {CA} of another authority; {_ELSE}")

    def _sign(
        self, subject: Subject, public: ec.EllipticCurvePublicKey, names: list[x509.GeneralName], now: datetime,
        days: float,
    ) -> x509.Certificate:  # fmt: skip
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if subject.scope in (*SERVES, Scope.LEARNER):
            uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
        authority = self._certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject.name)])
        return (
            _begun(name, self._certificate.subject, public, now, days, is_ca=False)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(authority), critical=False)
            .sign(self._key, hashes.SHA256())
        )


def make_authority(folder: Path, run_id: str, now: datetime) -> bool:
    """Make the authority of a run, unless the folder has it already. Returns whether it did.

    Raises ConfigError if the folder cannot be written, or holds another run's authority, or one without its key.
    """
    if (folder / CA_KEY).exists():
        if (other := open_authority(folder).run_id) != run_id:
            raise ConfigError(
                f"{folder} holds the authority of run {other!r}, not of {run_id!r}; give another --folder"
            )
        return False
    # Without the key, no other file of an authority may be there: it would be overwritten.
    if found := [name for name in _BESIDE_THE_KEY if os.path.lexists(folder / name)]:
        raise ConfigError(
            f"{folder} holds {', '.join(found)} of an authority, but not its {CA_KEY}; bring that back, give another "
            "--folder, or remove these files if the authority no longer exists"
        )
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name(
        [x509.NameAttribute(NameOID.ORGANIZATION_NAME, "diloco"), x509.NameAttribute(NameOID.COMMON_NAME, run_id)]
    )
    certificate = (
        _begun(name, name, key.public_key(), now, CA_DAYS, is_ca=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    with disk_errors(ConfigError, NOT_WRITTEN):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        write_file(folder / CA, certificate.public_bytes(Encoding.PEM), mode=PUBLIC)
        write_revocations(folder / REVOKED, [])
        write_file(folder / CA_KEY, _private_pem(key), mode=PRIVATE)  # last: it makes the authority complete
    return True


def open_authority(folder: Path) -> Authority:
    """Raises ConfigError, SecretExposed."""
    try:
        certificate = x509.load_pem_x509_certificate((folder / CA).read_bytes())
        key = load_pem_private_key(read_private(folder / CA_KEY), None)
    except OSError as error:
        raise ConfigError(f"{folder} holds no authority ({error.strerror}); `diloco certs init` makes one") from None
    except ValueError as error:
        raise ConfigError(f"{folder}: its authority cannot be read: {error}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise ConfigError(f"{folder}: {CA_KEY} is not the key of {CA}")
    (name,) = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return Authority(folder, str(name.value), certificate, key)


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _alternative_names(subject: Subject, hosts: Sequence[str]) -> list[x509.GeneralName]:
    """Raises ConfigError."""
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(subject.uri)]
    if subject.scope in SERVES:
        names += [_host_name(host) for host in dict.fromkeys((*hosts, *HERE))]
    if subject.scope is Scope.LEARNER:
        names.append(x509.DNSName(LEARNER_HOST))
    return names


def _host_name(host: str) -> x509.GeneralName:
    """Raises ConfigError."""
    with suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    if len(host) > 253 or not _HOST_NAME.fullmatch(host):
        raise ConfigError(f"--host {host[:80]!a} is neither a host name nor an IP address; leave out the port")
    return x509.DNSName(host)


_HOST_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


def _begun(
    name: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, now: datetime, days: float, *, is_ca: bool
) -> x509.CertificateBuilder:
    usage = x509.KeyUsage(
        digital_signature=not is_ca, key_cert_sign=is_ca, crl_sign=is_ca, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCKS_DIFFER)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None), critical=True)
        .add_extension(usage, critical=True)
    )


def is_good(folder: Path, subject: Subject, hosts: Sequence[str], revoked: set[str], now: datetime) -> bool:
    """Whether a folder holds a valid certificate of this subject and hosts with enough time left."""
    try:
        files = read_folder(folder, needs_pair=True)
        is_of_subject = files.subject == subject
    except ConfigError:
        return False
    certificate = files.certificate
    assert certificate is not None
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    known = {*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))}
    return (
        is_of_subject
        and serial_text(certificate.serial_number) not in revoked
        and (ends - now) > RENEW_SHARE * (ends - begins)
        and {host.strip("[]") for host in hosts} <= known | {*HERE}
    )


def _subject_in(certificate: Path) -> Subject | None:
    try:
        return subject_of_certificate(certificate.read_bytes(), certificate)
    except (OSError, ValueError, ConfigError):
        return None


def _holds(path: Path, content: bytes) -> bool:
    try:
        return path.read_bytes() == content
    except OSError:
        return False
