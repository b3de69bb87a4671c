"""The deny-list: revoked certificates, by serial.

    {"revoked": [{"serial": "7a01...", "who": "diloco://run/learner/a", "at": "2026-11-22 14:00 UTC"}]}

`diloco certs revoke` writes it. Shards read it again when it changes: one shared file, or copies.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from diloco_common.errors import ConfigError
from diloco_common.trust.tls import Stamp, stamp_of
from diloco_common.wire.addresses import write_json

REVOKED = "revoked.json"


@dataclass(frozen=True, slots=True)
class Revocation:
    """One entry of the deny-list."""

    serial: str
    who: str
    """The certificate's subject as a URI. For people."""
    at: str
    """When it was revoked. For people."""


class DenyList:
    def __init__(self, path: Path | None, *, is_required: bool = False) -> None:
        """`path`: None: nothing is ever revoked. `is_required`: the file must exist. Raises ConfigError."""
        self._path = path
        self._stamp: Stamp = () if path is None else stamp_of([path])
        self.serials: frozenset[str] = frozenset()
        self.why_not = ""
        """Why a newer file is not used; empty: no problem."""
        if path is not None and (is_required or path.exists()):
            self._read(path)

    def refresh(self) -> frozenset[str]:
        """Read the file again if it changed; returns newly listed serials.

        A file that is gone, damaged or incomplete changes nothing: the previous list stays in force.
        """
        if self._path is None or stamp_of([self._path]) == self._stamp:
            return frozenset()
        before = self.serials
        try:
            self._read(self._path)
            self.why_not = ""
        except ConfigError as error:
            self.why_not = str(error)
        return self.serials - before

    def _read(self, path: Path) -> None:
        stamp = stamp_of([path])
        self.serials = frozenset(one.serial for one in read_revocations(path))
        self._stamp = stamp


def read_revocations(path: Path) -> list[Revocation]:
    """Raises ConfigError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return [Revocation(normal_serial(one["serial"]), str(one["who"]), str(one["at"])) for one in found["revoked"]]
    except OSError as error:
        raise ConfigError(f"the deny-list {path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ConfigError(f"{path} is not a deny-list; `diloco certs revoke` writes it: copy it again") from None


def write_revocations(path: Path, revocations: list[Revocation]) -> None:
    """Write the list atomically. Raises OSError."""
    write_json(path, {"revoked": [asdict(one) for one in revocations]})


def normal_serial(text: str) -> str:
    """A serial in our form, from any usual form. Raises ValueError if it is none.

    A JSON number is not accepted: it could mean decimal or hexadecimal digits.
    """
    if not isinstance(text, str):
        raise ValueError(f"a serial is text, not {text!r:.80}")
    return format(int(text.replace(":", ""), 16), "x")
