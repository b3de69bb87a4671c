"""A shard's disk over all its lives, and what keeps versions on it: server/diloco_server/keeper.py in virtual time.

The store is the one that runs in production, `FileStore`, on a `FakeDisk`. Its calls happen at one moment, when a write
ends; a shard that crashes during a write has done some of them, and if the machine lost its power, the disk decides
what is left of those.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from typing import Any

from diloco_common.manifest import Manifest
from diloco_common.settings import Settings
from diloco_server.storage.store import FileStore, NothingIntact, Recovered
from diloco_server.storage.version import Origin, StoredVersion
from diloco_server.storage.version_file import version_names
from diloco_simulator import invariants
from diloco_simulator.disk import Crashed, FakeDisk
from diloco_simulator.options import Options
from diloco_simulator.timeline import Process

RETRY_S = 0.3
CALLS_OF_A_WRITE = 10
INTERRUPTED_STARTS = 0.15
"""Share of the starts in the middle of which the power goes."""


class ShardDisk:
    """The disk of one shard."""

    def __init__(self, index: int, options: Options) -> None:
        self.fake = FakeDisk(options.seed * 8 + index)
        self.random = random.Random(f"shard disk {options.seed} {index}")
        self.hurt: dict[int, str] = {}
        """Fragment -> what became of its newest file since the last start: "rot", "truncate" or "lose"."""
        self._refusals = 0
        self._was_hurt = False

    def start(self, settings: Settings) -> tuple[FileStore, Recovered]:
        """Begin a life. Raises Crashed, and OSError where the disk refuses."""
        fake, r = self.fake, self.random
        fake.crash_at = fake.calls + r.randint(1, 4) if r.random() < INTERRUPTED_STARTS else None
        try:
            store = FileStore(fake, Origin.of(settings), epoch_unknown=1000)
            return store, self._recover(store)
        except Crashed:
            fake.crash()
            raise
        except (ValueError, TypeError, LookupError, EOFError, MemoryError) as error:
            raise invariants.Violation("damage_is_recognised", repr(error)) from error
        finally:
            fake.crash_at = None

    def _recover(self, store: FileStore) -> Recovered:
        """What the store finds. Where it finds nothing intact, a person does what the message says."""
        while True:
            try:
                recovered = store.recover()
                invariants.damage_has_a_cause("; ".join(recovered.damage), was_hurt=self._was_hurt)
                return recovered
            except NothingIntact as error:
                invariants.damage_has_a_cause(str(error), was_hurt=bool(self.hurt))
                names = self.fake.names()
                for fragment_id in self.hurt:
                    for name in version_names(fragment_id, names):
                        if name in str(error):
                            self.fake.remove(name)
                self.fake.sync_names()

    def hurt_newest(self, fragment_id: int) -> bool:
        """A fragment's newest file rots, loses its end, or is lost. False: there is none."""
        r, fake = self.random, self.fake
        names = version_names(fragment_id, fake.names())
        if not names:
            return False
        name, how = names[0], r.choice(("rot", "rot", "truncate", "lose"))
        size = len(fake.content(name))
        match how:
            case "rot":
                fake.rot(name, r.randrange(size), r.randint(1, 255))
            case "truncate":
                fake.truncate(name, r.randrange(size))
            case "lose":
                fake.lose(name)
        self.hurt[fragment_id] = how
        self._was_hurt = True
        return True

    def refuse(self) -> None:
        """Until `accept`, it is full, or fails to sync."""
        self._refusals += 1
        calls, number = self.random.choice(
            ((("write",), errno.ENOSPC), (("create",), errno.ENOSPC), (("sync", "sync_names"), errno.EIO))
        )
        self.fake.refuse = lambda call: number if call in calls else 0

    def heal(self) -> None:
        """It takes everything from now on."""
        self._refusals = 0
        self.accept()

    def accept(self) -> None:
        self._refusals -= 1
        if self._refusals <= 0:
            self.fake.refuse = lambda call: 0


class SimulatedKeeper:
    """Saves the versions of one life of a shard."""

    def __init__(
        self, process: Process, store: FileStore, disk: ShardDisk, options: Options, saved: Callable[..., None]
    ) -> None:
        self._process = process
        self._store = store
        self._disk = disk
        self._save_s = options.save_s
        self._interval_s = options.interval_s
        self._saved = saved
        self._saving: dict[int, tuple[StoredVersion, Manifest]] = {}
        self._due: dict[int, tuple[StoredVersion, Manifest]] = {}
        self._written: set[int] = set()

    def recovered(self, fragment_id: int) -> None:
        """This fragment's version is on disk already."""
        self._written.add(fragment_id)

    def keep(self, version: StoredVersion, manifest: Manifest, then: Callable[..., None], *args: Any) -> None:
        """Call `then` when the version may be announced."""
        fragment_id = version.record.fragment_id
        if not self._interval_s or fragment_id not in self._written:
            self._saving[fragment_id] = (version, manifest)
            self._process.later(self._takes_s(), self._save, version, manifest, then, args)
            return
        if fragment_id not in self._due:
            self._process.later(self._interval_s, self._write_later, fragment_id)
        self._due[fragment_id] = (version, manifest)
        then(*args)

    def crash(self, *, power: bool) -> None:
        """The process ends in the middle of whatever it writes, and perhaps the machine with it."""
        r, fake = self._disk.random, self._disk.fake
        under_way = [*self._saving.values(), *(due for due in self._due.values() if r.random() < 0.5)]
        if under_way:
            fake.crash_at = fake.calls + r.randint(1, CALLS_OF_A_WRITE)
            try:
                for version in under_way:
                    self._store.save(*version)
            except (Crashed, OSError):
                pass
            fake.crash_at = None
        if power:
            fake.crash()

    # ------------------------------------------------------------ helpers

    def _save(
        self, version: StoredVersion, manifest: Manifest, then: Callable[..., None], args: tuple[Any, ...]
    ) -> None:
        if self._write(version, manifest):
            self._saving.pop(version.record.fragment_id, None)
            then(*args)
        else:
            self._process.later(RETRY_S, self._save, version, manifest, then, args)

    def _write_later(self, fragment_id: int) -> None:
        if self._write(*self._due[fragment_id]):
            del self._due[fragment_id]
        else:
            self._process.later(RETRY_S, self._write_later, fragment_id)

    def _write(self, version: StoredVersion, manifest: Manifest) -> bool:
        try:
            self._store.save(version, manifest)
        except OSError as error:
            self._saved(version.record, error.errno)
            return False
        self._written.add(version.record.fragment_id)
        self._saved(version.record, 0)
        return True

    def _takes_s(self) -> float:
        return self._save_s * 2 * self._disk.random.random()
