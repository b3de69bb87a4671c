"""The deny-list: certificates that hold no longer, by serial.

    {"revoked": [{"serial": "7a01...", "who": "diloco://run/learner/a", "at": "2026-11-22 14:00 UTC"}]}

`diloco certs revoke` writes it. Shards read it, and again when it changes: one file that they share, or copies.
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
    """One line of the deny-list."""

    serial: str
    who: str
    """Whom the serial named, as URI. For people."""
    at: str
    """When it was revoked. For people."""


class DenyList:
    """The deny-list of a running shard."""

    def __init__(self, path: Path | None, *, is_required: bool = False) -> None:
        """None: nothing is ever revoked. `is_required`: the file must be there. Raises ConfigError."""
        self._path = path
        self._stamp: Stamp = () if path is None else stamp_of([path])
        self.serials: frozenset[str] = frozenset()
        self.why_not = ""
        """Why what came since is not used; empty: nothing is wrong with it."""
        if path is not None and (is_required or path.exists()):
            self._read(path)

    def refresh(self) -> frozenset[str]:
        """Read the file again if it changed; the serials that are new on it.

        One that is gone or damaged, or was copied by half, revokes and pardons nobody: what was read before holds on.
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
    """A reader sees the whole list, old or new. Raises OSError."""
    write_json(path, {"revoked": [asdict(one) for one in revocations]})


def normal_serial(text: str) -> str:
    """A serial as we write it, from any usual way to write one. Raises ValueError if it is none.

    A number of JSON is none: nobody knows whether its digits were meant as decimal or hexadecimal ones.
    """
    if not isinstance(text, str):
        raise ValueError(f"a serial is text, not {text!r:.80}")
    return format(int(text.replace(":", ""), 16), "x")
