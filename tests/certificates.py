"""A certificate authority for tests, as `diloco certs` makes it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from diloco_common.trust.identity import subject_of
from diloco_deploy.trust.authority import make_authority, open_authority


class Certificates:
    """The certificates of one run, below a folder."""

    def __init__(self, folder: Path, run_id: str = "local") -> None:
        make_authority(folder, run_id, datetime.now(UTC))
        self.authority = open_authority(folder)
        self.deny_list = self.authority.registry.deny_list
        self.serials: dict[str, str] = {}
        """Identity -> the serial that it was given last."""

    def issue(self, who: str, *, begins: timedelta = timedelta(), days: float = 1.0, host: str = "ps-0") -> Path:
        """The folder of an identity, made or renewed. `begins`: from now; in the past or in the future."""
        subject = subject_of(self.authority.run_id, who)
        hosts = [host] if who.startswith("shard/") else []
        folder, issued = self.authority.issue(subject, datetime.now(UTC) + begins, hosts=hosts, days=days)
        self.serials[who] = issued.serial
        return folder

    def revoke(self, serial: str) -> None:
        self.authority.registry.revoke_serial(serial, datetime.now(UTC))
