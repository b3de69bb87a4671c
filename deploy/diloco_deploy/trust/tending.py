"""Keeps the certificates of processes: of a `diloco up` cluster (`OwnCertificates`), and of all containers on one host.

A cluster has them if one of its addresses can be reached from other machines. They are in its folder `certs`, so
`diloco certs issue --folder CLUSTER/certs` makes one for a worker on another machine. `diloco certs tend` keeps:

    OUT/shards/shard-0/ ...             of every shard; OUT/shards/revoked.json is a copy of the deny-list
    OUT/observers/observer-NAME/ ...    of every observer; the group may read a key that is lent
    OUT/learners/learner-ID/ ...        any process that makes this folder gets a certificate in it; its ca.pem comes
                                        last, and is removed on revocation

Only this process sees the authority's own folder. The contents of `learners` are neither read nor followed, because
learners could put links there.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
import socket
import stat
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path

from diloco_common.errors import ConfigError
from diloco_common.settings import Settings, ShardSettings
from diloco_common.trust.files import CA, KEY, REVOKED, Stamp, stamp_of
from diloco_common.trust.identity import Scope, Subject, subject_of
from diloco_common.wire.addresses import is_loopback, parse_address
from diloco_deploy.trust import PUBLIC, Issued, write_file
from diloco_deploy.trust.authority import (
    CERTIFICATE_DAYS,
    RENEW_SHARE,
    SERVES,
    Authority,
    is_good,
    make_authority,
    open_authority,
)

RENEW_EVERY_S = 3600.0
"""How often certificates are checked. They last for months, and are renewed when a third of that is left."""
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


AGAIN = timedelta(minutes=1)
"""An identity gets no second certificate within this time, whatever happens to its folder: each is recorded."""
LEARNERS_MAX: int = ShardSettings.model_fields["max_learners"].default
"""Maximum number of learners' folders; beyond it, new ones get no certificate."""
LOOKED_AT_MAX = 4 * LEARNERS_MAX
"""Maximum number of folder entries checked for new learners."""
_LEARNER = re.compile(r"learner-([A-Za-z0-9._-]{1,64})\Z")


class Tending:
    def __init__(
        self, authority: Authority, out: Path, subjects: Sequence[Subject], hosts: Sequence[str],
        days: float = CERTIFICATE_DAYS, lent: Collection[Subject] = (),
    ) -> None:  # fmt: skip
        """`subjects`: shards, their mirrors and observers. `hosts`: of every shard, besides the name of its own folder.

        `lent`: observers that run as another user in our group, such as Prometheus.
        """
        self._authority, self._out, self._subjects, self._hosts = authority, out, subjects, hosts
        self._days, self._lent = days, lent
        self._newest: dict[str, Issued] = {}
        self._known: dict[str, Subject] = {}
        """Name of the folder -> learner that once got a certificate."""
        self._tried: dict[str, datetime] = {}
        self._troubles: dict[str, str] = {}
        """URI, or another subject -> why it failed. Retried every minute."""
        self._revoked: set[str] = set()
        self._records: Stamp = ()
        for name in ("shards", "observers", "learners"):
            (out / name).mkdir(mode=0o700, parents=True, exist_ok=True)

    def look(self, now: datetime, *, renews: bool = False) -> list[str]:
        """Issue and renew whatever is due. Returns what was done, in words. `renews`: renew all, however new.

        A failure stops nothing else; see `why_not`. Raises ConfigError if the records cannot be read.
        """
        troubles, self._troubles = self._troubles, {}
        self._pass_on_the_deny_list()  # first: damaged records must not delay it
        self._read_records()
        wishes = [(subject, self._folder(subject)) for subject in self._subjects] + self._wishes()
        self._tried = {uri: at for uri, at in self._tried.items() if timedelta() <= now - at < AGAIN}
        self._troubles |= {subject.uri: troubles[subject.uri] for subject, _ in wishes if subject.uri in troubles}
        done = [self._see_to(*wish, now, renews) for wish in wishes]
        return [words for words in done if words]

    @property
    def why_not(self) -> str:
        """What failed, and why; empty if nothing did."""
        first = next(iter(self._troubles.values()), "")
        return f"{first} (and {len(self._troubles) - 1} more)" if len(self._troubles) > 1 else first

    def _read_records(self) -> None:
        registry = self._authority.registry
        stamp = stamp_of(registry.files)
        if stamp != self._records:
            self._newest = {one.who: one for one in registry.issued()}
            learners = [one.subject for one in self._newest.values() if one.subject.scope is Scope.LEARNER]
            self._known = {str(learner).replace("/", "-"): learner for learner in learners}
            self._revoked = registry.revoked()
            self._records = stamp

    def _pass_on_the_deny_list(self) -> None:
        """Copy the deny-list for shards: their folder holds no key of the authority."""
        copy = self._out / "shards" / REVOKED
        try:
            content = self._authority.registry.deny_list.read_bytes()
            if not copy.exists() or copy.read_bytes() != content:
                write_file(copy, content, mode=PUBLIC)
        except OSError as error:
            self._troubles["deny-list"] = f"the deny-list is not passed on: {error.filename}: {error.strerror}"

    def _folder(self, subject: Subject) -> Path:
        kind = Scope.SHARD if subject.scope in SERVES else subject.scope
        return self._out / f"{kind}s" / str(subject).replace("/", "-")

    def _wishes(self) -> list[tuple[Subject, Path]]:
        """Learners that have made a folder: known ones, then new ones while there is room."""
        learners, new = self._out / "learners", []
        known = [(learner, learners / name) for name, learner in self._known.items() if _is_folder(learners / name)]
        try:
            with os.scandir(learners) as entries:
                looked_at = list(islice(entries, LOOKED_AT_MAX))
        except OSError as error:
            self._troubles["learners"] = f"{learners}: {error.strerror}"
            return known
        for entry in looked_at:
            name = _LEARNER.match(entry.name)
            if name and entry.name not in self._known and _is_folder(Path(entry.path)):
                new.append((Subject(self._authority.run_id, Scope.LEARNER, name[1]), Path(entry.path)))
        room = max(0, LEARNERS_MAX - len(known))
        if len(new) > room or len(looked_at) == LOOKED_AT_MAX:
            self._troubles["learners"] = (
                f"{learners} holds more than {LEARNERS_MAX} folders: new learners get no certificate; remove some"
            )
        return known + new[:room]

    def _see_to(self, subject: Subject, folder: Path, now: datetime, renews: bool) -> str:
        """Issue one certificate if it is due. Returns what was done."""
        newest, uri = self._newest.get(subject.uri), subject.uri
        if newest is not None and newest.serial in self._revoked:
            self._troubles.pop(uri, None)
            if subject.scope is Scope.LEARNER:
                _take_back(folder)
            return ""  # only the operator may admit it again
        if not renews:
            left = 0.0 if newest is None else newest.expires - now.timestamp()
            is_good = left > RENEW_SHARE * self._days * 86400 and os.path.lexists(folder / CA)
            if uri in self._tried or (is_good and uri not in self._troubles):
                self._lend_or_take_back(subject, folder)
                return ""
        self._tried[uri] = now
        self._troubles.pop(uri, None)
        try:
            return self._make(subject, folder, now)
        except ConfigError as error:
            self._troubles[uri] = f"{subject}: {error}"
            return ""

    def _lend_or_take_back(self, subject: Subject, folder: Path) -> None:
        """Set the mode of an observer's existing key: readable for the group only while it is lent."""
        if subject.scope is Scope.OBSERVER:
            with suppress(OSError), _held(folder) as held:
                self._set_modes(subject, held)

    def _set_modes(self, subject: Subject, held: int) -> None:
        """Set the modes of an observer's open folder and its key. Raises OSError."""
        is_lent = subject in self._lent
        os.fchmod(held, 0o750 if is_lent else 0o700)
        Path(f"/proc/self/fd/{held}", KEY).chmod(0o640 if is_lent else 0o600)

    def _make(self, subject: Subject, folder: Path, now: datetime) -> str:
        """Issue one certificate. Returns what was done. Raises ConfigError."""
        hosts = [folder.name, *self._hosts] if subject.scope in SERVES else []
        try:
            if subject.scope is not Scope.LEARNER:
                folder.mkdir(mode=0o700, exist_ok=True)
            with _held(folder) as held:
                into = Path(f"/proc/self/fd/{held}")
                _, issued = self._authority.issue(subject, now, hosts=hosts, days=self._days, into=into)
                if subject.scope is Scope.OBSERVER:
                    self._set_modes(subject, held)
        except OSError as error:
            raise ConfigError(f"{folder}: {error.strerror}") from None
        self._newest[subject.uri] = issued
        return f"{subject}, serial {issued.serial}"


def _take_back(folder: Path) -> None:
    """Remove ca.pem: a process that starts with this folder waits for it, and so for another certificate."""
    with suppress(OSError), _held(folder) as held:
        os.unlink(CA, dir_fd=held)


@contextmanager
def _held(folder: Path) -> Iterator[int]:
    """Open this exact folder, even if its name is replaced meanwhile. Raises OSError."""
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield held
    finally:
        os.close(held)


def _is_folder(path: Path) -> bool:
    """Whether it is a folder, and not a link to one."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False
