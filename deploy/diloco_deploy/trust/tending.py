"""`diloco certs tend`: maintains the certificates of all containers on one host.

    OUT/shards/shard-0/ ...             of every shard; OUT/shards/revoked.json is a copy of the deny-list
    OUT/observers/observer-NAME/ ...    of every observer; the group may read a key that is lent
    OUT/learners/learner-ID/ ...        any process that makes this folder gets a certificate in it; its ca.pem comes
                                        last, and is removed on revocation

Only this process sees the authority's own folder. The contents of `learners` are neither read nor followed, because
learners could put links there.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path

from diloco_common.errors import ConfigError
from diloco_common.trust.files import CA, KEY, REVOKED, Stamp, stamp_of
from diloco_common.trust.identity import Scope, Subject
from diloco_deploy.trust.authority import CERTIFICATE_DAYS, SERVES, Authority
from diloco_deploy.trust.registry import PUBLIC, Issued, write_file

LOOK_S = 0.25
"""How often to check for changes. Shards check as often, so a revoked caller is cut off within a second."""
RENEW_SHARE = 1 / 3
"""A certificate is renewed when this share of its time is left."""
AGAIN = timedelta(minutes=1)
"""An identity gets no second certificate within this time, whatever becomes of the folder: each is recorded."""
LEARNERS_MAX = 1024
"""Most learners' folders; beyond it, new ones get no certificate."""
LOOKED_AT_MAX = 4 * LEARNERS_MAX
"""Most folder entries checked for new learners."""
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
        """Empty if nothing failed."""
        first = next(iter(self._troubles.values()), "")
        return f"{first} (and {len(self._troubles) - 1} more)" if len(self._troubles) > 1 else first

    def _read_records(self) -> None:
        registry = self._authority.registry
        stamp = stamp_of(registry.files)
        if stamp != self._records:
            self._newest = {one.who: one for one in registry.issued() if one.kind == "certificate"}
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
