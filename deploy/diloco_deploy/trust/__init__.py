"""The identities of a run: its certificate authority, certificates and deny-list.

This module keeps the authority's records of issued and revoked certificates. Files are written atomically.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from diloco_common.errors import ConfigError
from diloco_common.trust.files import REVOKED, Revocation, normal_serial, read_revocations, shown, write_revocations
from diloco_common.trust.identity import Subject, subject_of_uri


def write_file(path: Path, content: bytes, *, mode: int) -> None:
    """Write a file atomically: a reader sees the new content or the old. Raises OSError."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)
    with open(partial, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _for_owner(name: str, flags: int) -> int:
    return os.open(name, flags, PRIVATE)


PRIVATE, PUBLIC = 0o600, 0o644
ISSUED = "issued.jsonl"
SERIAL_DIGITS_MIN = 12
"""Shorter serials are treated as typing errors; a full serial is revoked even if it was not issued here."""


@dataclass(frozen=True, slots=True)
class Issued:
    who: str
    serial: str
    expires: int
    """Seconds since 1970."""

    @property
    def subject(self) -> Subject:
        return subject_of_uri(self.who)

    def state(self, now: datetime, revoked: set[str]) -> str:
        if self.serial in revoked:
            return "revoked"
        return "expired" if self.expires <= now.timestamp() else "valid"


class Registry:
    def __init__(self, folder: Path) -> None:
        self._issued = folder / ISSUED
        self.deny_list = folder / REVOKED
        """The master copy of the deny-list."""

    @property
    def files(self) -> list[Path]:
        return [self._issued, self.deny_list]

    def note(self, issued: Issued) -> Issued:
        """Raises ConfigError."""
        try:
            with open(self._issued, "a", opener=_for_owner) as file:
                file.write(json.dumps(asdict(issued)) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ConfigError(f"{self._issued}: cannot be written: {error.strerror}") from None
        return issued

    def issued(self) -> list[Issued]:
        """All certificates, oldest first. Raises ConfigError."""
        try:
            lines = self._issued.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []
        try:
            return [Issued(one["who"], one["serial"], one["expires"]) for one in map(json.loads, lines)]
        except (ValueError, TypeError, KeyError):
            raise ConfigError(
                f"{self._issued}: a line is damaged; remove it, and revoke what it named by its serial"
            ) from None

    def revoked(self) -> set[str]:
        """Serials on the deny-list. Raises ConfigError."""
        return {one.serial for one in read_revocations(self.deny_list)}

    def is_out(self, who: Subject) -> bool:
        """Whether an identity's last certificate is revoked. Raises ConfigError."""
        serials = [one.serial for one in self.issued() if one.who == who.uri]
        return bool(serials) and serials[-1] in self.revoked()

    def revoke(self, who: Subject, now: datetime) -> tuple[list[Revocation], list[Revocation]]:
        """Revoke an identity's certificates. Returns those revoked now, and those before. Raises ConfigError."""
        serials = [one.serial for one in self.issued() if one.who == who.uri]
        if not serials:
            raise ConfigError(f"{who} was issued nothing here; see `diloco certs list`")
        return self._deny([Revocation(serial, who.uri, shown(now)) for serial in serials])

    def revoke_serial(self, text: str, now: datetime) -> tuple[list[Revocation], list[Revocation]]:
        """Revoke one certificate, even if it was not issued here. Raises ConfigError."""
        try:
            serial = normal_serial(text)
        except ValueError:
            serial = ""
        if len(serial) < SERIAL_DIGITS_MIN:
            raise ConfigError(
                f"{text[:80]!a} is neither an identity (learner/a) nor a whole serial; see `diloco certs list`"
            )
        who = "somebody who did not get it here"
        with contextlib.suppress(ConfigError):  # the name is only informative; damaged records must not prevent it
            who = next((one.who for one in self.issued() if one.serial == serial), who)
        return self._deny([Revocation(serial, who, shown(now))])

    def _deny(self, wanted: list[Revocation]) -> tuple[list[Revocation], list[Revocation]]:
        """Add to the deny-list under a lock that other processes respect, so that no entry is lost."""
        try:
            with open(self.deny_list.with_name("lock"), "ab", opener=_for_owner) as held:
                fcntl.flock(held, fcntl.LOCK_EX)
                listed = {one.serial: one for one in read_revocations(self.deny_list)}
                new = [one for one in wanted if one.serial not in listed]
                if new:
                    write_revocations(self.deny_list, [*listed.values(), *new])
        except OSError as error:
            raise ConfigError(f"{self.deny_list}: cannot be written: {error.strerror}") from None
        return new, [listed[one.serial] for one in wanted if one.serial in listed]
