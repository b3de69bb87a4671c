"""`diloco certs` and `diloco token issue`: what they do, and what they print."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509

from diloco_common.errors import ConfigError
from diloco_common.trust.identity import Scope, Subject, subject_of
from diloco_common.trust.tls import read_folder, serial_text, shown
from diloco_deploy.certs.authority import (
    CA_DAYS,
    HERE,
    make_authority,
    open_authority,
)
from diloco_deploy.certs.files import write_private
from diloco_deploy.certs.registry import Issued
from diloco_deploy.certs.taken import TOKEN_PUBLIC
from diloco_deploy.certs.tending import LOOK_S, Tending

KEEP_SHARE = 1 / 3
"""With --keep, a certificate is left alone while this share of its time is left."""


def init(folder: Path, run_id: str) -> int:
    """The exit code, as of the functions below. Raises ConfigError, as they do."""
    made = make_authority(folder, run_id, datetime.now(UTC))
    print(f"{folder}: the authority of run {run_id} {f'made, for {CA_DAYS} days' if made else 'exists already'}")
    return 0


def issue(
    folder: Path, identities: Sequence[str], hosts: Sequence[str], days: float, out: Path | None, *, keep: bool
) -> int:
    """`out`: None for folders in that of the authority."""
    authority, now = open_authority(folder), datetime.now(UTC)
    subjects = [subject_of(authority.run_id, text) for text in identities]
    if out is not None and len(subjects) > 1:
        raise ConfigError("--out takes one identity; name one, or leave --out out")
    for subject in subjects:
        into = out or authority.folder / str(subject).replace("/", "-")
        if keep and is_good(into, subject, hosts, authority.registry.revoked(), now):
            print(f"{into}: {subject} is good for a while yet")
            continue
        authority.check_free(into, subject)
        _, issued = authority.issue(subject, now, hosts=hosts, days=days, into=into)
        print(f"{into}: {subject}, serial {issued.serial}, until {_until(issued)}")
    return 0


def tend(
    folder: Path, run_id: str, identities: Sequence[str], hosts: Sequence[str], days: float, out: Path,
    lent: Sequence[str],
) -> int:  # fmt: skip
    """Until SIGTERM or SIGINT. SIGHUP renews everything at once. Raises ConfigError."""
    from diloco_common.observe import logs

    make_authority(folder, run_id, datetime.now(UTC))
    authority = open_authority(folder)
    subjects, lend = ([subject_of(authority.run_id, text) for text in texts] for texts in (identities, lent))
    if strange := [str(one) for one in lend if one.scope is not Scope.OBSERVER or one not in subjects]:
        raise ConfigError(f"--lend {strange[0]}: name an observer that is among the identities")
    logs.configure()
    log = logs.Log("certs")
    tending, said = Tending(authority, out, subjects, hosts, days, lend), ""
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: asked.append(number))
    while not {signal.SIGTERM, signal.SIGINT} & set(asked):
        renews = bool(asked)
        asked.clear()
        try:
            for words in tending.look(datetime.now(UTC), renews=renews):
                log.event("issued", to=words)
            why = tending.why_not
        except ConfigError as error:  # what was issued before goes on
            why = str(error)
        if why and why != said:
            log.error("not everything could be seen to", why=why)
        said = why
        time.sleep(LOOK_S)
    return 0


def is_good(folder: Path, subject: Subject, hosts: Sequence[str], revoked: set[str], now: datetime) -> bool:
    """Whether a folder holds a certificate of this subject and hosts that has enough of its time left."""
    try:
        files = read_folder(folder, needs_pair=True)
        certificate = files.certificate
        is_of_subject = files.subject == subject
    except ConfigError:
        return False
    assert certificate is not None
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    known = {*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))}
    return (
        is_of_subject
        and serial_text(certificate.serial_number) not in revoked
        and (ends - now) > KEEP_SHARE * (ends - begins)
        and {host.strip("[]") for host in hosts} <= known | {*HERE}
    )


def issue_token(folder: Path, identity: str, days: float, out: Path) -> int:
    """Write a signed token."""
    authority, now = open_authority(folder), datetime.now(UTC)
    subject = subject_of(authority.run_id, identity)
    authority.check_free_for_token(out, subject)
    token, issued = authority.issue_token(subject, now, days=days)
    try:
        write_private(out, token.encode() + b"\n")
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written: {error.strerror}") from None
    print(f"{out}: {subject}, serial {issued.serial}, until {_until(issued)}")
    print(f"shards check it with security.token_key={authority.folder / TOKEN_PUBLIC}")
    return 0


def show_issued(folder: Path) -> int:
    """Print what was issued."""
    authority, now = open_authority(folder), datetime.now(UTC)
    revoked = authority.registry.revoked()
    rows = [("IDENTITY", "KIND", "STATE", "UNTIL", "SERIAL")]
    rows += [
        (str(one.subject), one.kind, one.state(now, revoked), _until(one), one.serial)
        for one in authority.registry.issued()
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip())
    return 0


def revoke(folder: Path, what: str) -> int:
    """Put an identity, or a serial, on the deny-list."""
    authority, now = open_authority(folder), datetime.now(UTC)
    registry = authority.registry
    if "/" in what:
        new, before = registry.revoke(subject_of(authority.run_id, what), now)
    else:
        new, before = registry.revoke_serial(what, now)
    for one in before:
        print(f"{one.serial} of {one.who} was revoked at {one.at}")
    for one in new:
        print(f"{one.serial} of {one.who} is revoked")
    if new:
        print(f"shards that read {registry.deny_list} act on it at once; copy it to those that have a copy")
    return 0


def _until(issued: Issued) -> str:
    return shown(datetime.fromtimestamp(issued.expires, UTC))
