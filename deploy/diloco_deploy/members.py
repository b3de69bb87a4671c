"""Who is in a cluster of `diloco up`, and how their processes are: for its own display, and for others.

`watch.py` counts for the display, and the record in the folder tells `diloco status` and `diloco scale`. Here both hear
of every change.
"""

from __future__ import annotations

import time
from pathlib import Path

from diloco_common.settings import Settings
from diloco_common.wire.addresses import Role
from diloco_deploy.cluster.record import ClusterRecord, MemberRecord
from diloco_deploy.show.watch import Watch


class Members:
    """Once made, `diloco status` says that the cluster is starting. Owned by one thread. Methods raise OSError."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.watch = Watch(time.monotonic())
        self._record, self._folder = ClusterRecord.of(settings), folder
        self._write()

    @property
    def are_training(self) -> bool:
        """Workers may come and go."""
        return self._record.training

    def train(self, training: bool) -> None:
        self._record.training = training
        self._write()

    def want_workers(self, count: int) -> None:
        """There ought to be so many from now on."""
        self._record.workers = count
        self._write()

    def expect(self, name: str, role: Role) -> None:
        """A member has a process from now on, perhaps another one."""
        self.watch.expect(name, role)
        old = self._record.members.get(name)
        self._record.members[name] = MemberRecord(
            role=role, process="starting", since=time.time(), why=old.why if old else "",
            restarts=old.restarts + 1 if old else 0,
        )  # fmt: skip
        self._write()

    def process_is(self, name: str, state: str, why: str = "") -> None:
        """The state of a member's process has changed."""
        self.watch.process(name, state)
        one = self._record.members[name]
        one.process, one.since, one.why = state, time.time(), why or one.why
        self._write()

    def left(self, name: str) -> None:
        """A member that was told to go is gone, and is not missed."""
        self.watch.process(name, "left")
        self._record.members.pop(name, None)
        self._write()

    def _write(self) -> None:
        self._record.write(self._folder)
