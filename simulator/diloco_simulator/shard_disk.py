"""The disk of one shard, whatever its processes do: what goes wrong with it, and how a person repairs it.

The store on it is the product's `FileStore`. If a shard is killed during a write, the write is cut off at a random
call; if the machine loses its power, the disk decides what is left of what was not synced.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterable
from typing import Any

from diloco_common.errors import NothingIntact
from diloco_server.storage.version_file import parse_version_name, version_names
from diloco_simulator.disk import Crashed, FakeDisk
from diloco_simulator.options import Options

CALLS_OF_A_WRITE = 10
INTERRUPTED_STARTS = 0.15
"""Share of the starts in the middle of which the power goes."""


class ShardDisk:
    """The disk of one shard."""

    def __init__(self, index: int, options: Options) -> None:
        self.fake = FakeDisk(options.seed * 8 + index)
        self.random = random.Random(f"shard disk {options.seed} {index}")
        self.hurt: dict[int, str] = {}
        """Fragment -> what became of its newest file ("rot", "truncate", "lose", "wipe"), until its next version."""
        self.hurt_versions: dict[int, int] = {}
        """Fragment -> the number of the version that was in the file hurt last."""
        self.was_hurt = False
        """Ever."""
        self._refusals = 0

    def plan_interruption(self) -> None:
        """Some starts are cut off by a power failure."""
        fake, r = self.fake, self.random
        fake.crash_at = fake.calls + r.randint(1, 4) if r.random() < INTERRUPTED_STARTS else None

    def remove_named(self, error: NothingIntact) -> None:
        """What the message says that a person may do: remove the files that it names as damaged."""
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
        parsed = parse_version_name(name)
        assert parsed is not None
        self.hurt_versions[fragment_id] = parsed[-1]
        self.was_hurt = True
        return True

    def wipe(self, fragments: Iterable[int]) -> None:
        """Somebody empties the folder."""
        self.fake.wipe()
        self.hurt.update(dict.fromkeys(fragments, "wipe"))
        self.was_hurt = True

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

    def cut_off(self, writes: Iterable[Callable[[], Any]], *, power: bool) -> None:
        """A process ends in the middle of these writes, and perhaps the machine with it."""
        writes = list(writes)
        if writes:
            self.fake.crash_at = self.fake.calls + self.random.randint(1, CALLS_OF_A_WRITE)
            try:
                for write in writes:
                    write()
            except (Crashed, OSError):
                pass
            self.fake.crash_at = None
        if power:
            self.fake.crash()
