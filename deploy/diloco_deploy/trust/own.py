"""The certificates of a cluster that `diloco up` runs: an authority of its own, and one certificate per process.

Made where one of its addresses can be reached from other machines. They are in the folder `certs` of the cluster, so a
worker on another machine joins with one that `diloco certs issue --folder CLUSTER/certs` makes.
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
from diloco_common.trust.identity import subject_of
from diloco_common.trust.revocations import REVOKED
from diloco_common.wire.addresses import is_loopback, parse_address
from diloco_deploy.trust.authority import is_good, make_authority, open_authority

RENEW_EVERY_S = 3600.0
OBSERVER = "observer/up"


class OwnCertificates:
    """Of one cluster."""

    def __init__(self, folder: Path, run_id: str, shards: int, workers: Sequence[str], hosts: Sequence[str]) -> None:
        """`folder`: of the authority, made if there is none. `hosts`: names of the shards. Raises ConfigError."""
        make_authority(folder, run_id, datetime.now(UTC))
        self._authority = open_authority(folder)
        self._hosts = hosts
        self._who = [*(f"shard/{i}" for i in range(shards)), *(f"learner/{name}" for name in workers), OBSERVER]
        self._renew_at = -math.inf
        self.deny_list = folder / REVOKED

    def include(self, who: str) -> None:
        """This identity has a certificate too, from the next `renew` on, which is due at once."""
        if who not in self._who:
            self._who.append(who)
            self._renew_at = -math.inf

    def of(self, who: str) -> Path:
        """The folder of one identity."""
        return self._authority.folder / who.replace("/", "-")

    def renew(self, now: float) -> None:
        """Make what is missing, and renew what has little of its time left. `now`: seconds, of any clock.

        Raises ConfigError.
        """
        if now < self._renew_at:
            return
        self._renew_at = now + RENEW_EVERY_S
        today, revoked = datetime.now(UTC), self._authority.registry.revoked()
        for who in self._who:
            subject, hosts = subject_of(self._authority.run_id, who), self._hosts if who.startswith("shard/") else ()
            if self._authority.registry.is_out(subject):
                continue  # somebody has revoked it, and let it in again with `diloco certs issue` if that was meant
            if not is_good(self.of(who), subject, hosts, revoked, today):
                self._authority.issue(subject, today, hosts=hosts)

    @staticmethod
    def observer_in(folder: Path) -> Path | None:
        """What `diloco up` asks its processes with, in the folder of a cluster; None: they speak plaintext."""
        made = folder / "certs" / OBSERVER.replace("/", "-")
        return made if made.exists() else None


def own_certificates(settings: Settings, folder: Path) -> OwnCertificates | None:
    """Those of a cluster that other machines may reach, made and good for a while; else None. Raises ConfigError."""
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
    """Under which others may dial a shard that listens there."""
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
