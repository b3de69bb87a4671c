"""The certificates of a `diloco up` cluster: its own authority, and one certificate per process.

Made if one of its addresses can be reached from other machines. They are in the cluster's folder `certs`, so `diloco
certs issue --folder CLUSTER/certs` makes one for a worker on another machine.
"""

from __future__ import annotations

import ipaddress
import math
import socket
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from diloco_common.errors import ConfigError
from diloco_common.settings import Settings
from diloco_common.trust.files import REVOKED
from diloco_common.trust.identity import subject_of
from diloco_common.wire.addresses import is_loopback, parse_address
from diloco_deploy.trust.authority import is_good, make_authority, open_authority

RENEW_EVERY_S = 3600.0
OBSERVER = "observer/up"


class OwnCertificates:
    def __init__(self, folder: Path, run_id: str, shards: int, workers: Sequence[str], hosts: Sequence[str]) -> None:
        """`folder`: of the authority, which is made if missing. `hosts`: names of the shards. Raises ConfigError."""
        make_authority(folder, run_id, datetime.now(UTC))
        self._authority = open_authority(folder)
        self._hosts = hosts
        self._who = [*(f"shard/{i}" for i in range(shards)), *(f"learner/{name}" for name in workers), OBSERVER]
        self._renew_at = -math.inf
        self.deny_list = folder / REVOKED

    def include(self, who: str) -> None:
        """Add an identity; the next `renew`, due at once, makes its certificate."""
        if who not in self._who:
            self._who.append(who)
            self._renew_at = -math.inf

    def of(self, who: str) -> Path:
        return self._authority.folder / who.replace("/", "-")

    def renew(self, now: float) -> None:
        """Make missing certificates, and renew those that expire soon. `now`: seconds. Raises ConfigError."""
        if now < self._renew_at:
            return
        self._renew_at = now + RENEW_EVERY_S
        today, revoked = datetime.now(UTC), self._authority.registry.revoked()
        for who in self._who:
            subject, hosts = subject_of(self._authority.run_id, who), self._hosts if who.startswith("shard/") else ()
            if self._authority.registry.is_out(subject):
                continue  # revoked on purpose; only `diloco certs issue` makes another
            if not is_good(self.of(who), subject, hosts, revoked, today):
                self._authority.issue(subject, today, hosts=hosts)

    @staticmethod
    def observer_in(folder: Path) -> Path | None:
        """The observer certificate in a cluster's folder, for asking its processes; None: they use plaintext."""
        made = folder / "certs" / OBSERVER.replace("/", "-")
        return made if made.exists() else None


def own_certificates(settings: Settings, folder: Path) -> OwnCertificates | None:
    """The certificates of a cluster that other machines may reach, renewed; otherwise None. Raises ConfigError."""
    security, addresses = settings.security, (settings.shard.listen, settings.shard.http, settings.worker.http)
    if security.tls is not None:
        raise ConfigError(
            "security.tls names one certificate, and each process of `diloco up` needs its own; leave it out: they are "
            "made where an address is not on loopback (in the folder `certs` of the cluster)"
        )
    if security.insecure or all(is_loopback(parse_address(address).host) for address in addresses):
        return None
    workers = [f"worker-{i}" for i in range(settings.cluster.workers)]
    hosts = _names_of_this_machine(settings.shard.listen)
    found = OwnCertificates(folder, settings.run.id, settings.cluster.shards, workers, hosts)
    found.renew(time.monotonic())
    return found


def _names_of_this_machine(listen: str) -> list[str]:
    """The names under which others may dial a shard that listens at this address."""
    host = parse_address(listen).host
    try:
        is_any = ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        is_any = False
    if not is_any:
        return [host]
    name = socket.gethostname()
    try:
        found = {str(info[4][0]).partition("%")[0] for info in socket.getaddrinfo(name, None)}
    except OSError:
        found = set()
    return sorted({name, socket.getfqdn(), *found})
