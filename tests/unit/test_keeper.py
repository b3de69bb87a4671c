"""The shard's own storage threads: who waits for a disk, and what the shard says while it fails (reliability.md 7)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from diloco_common.observe.logs import Log
from diloco_common.observe.metrics.shard import ShardMetrics
from diloco_common.wire.manifest import Manifest
from diloco_server.shell import keeper as module
from diloco_server.shell.keeper import Keeper
from diloco_server.shell.server import real_world
from diloco_server.storage.store import Recovered
from diloco_server.storage.version_file import StoredVersion
from stores import MANIFEST, make_version
from waiting import until_async


class SlowStore:
    """A disk whose writes end when the test says so."""

    epoch = 1

    def __init__(self) -> None:
        self.saved: list[tuple[int, int]] = []
        self.error: OSError | None = None
        self.room = 0
        """Bytes left."""
        self.gates: dict[int, threading.Event] = {}
        """Fragment -> what its writes wait for."""

    def recover(self) -> Recovered:
        return Recovered(None)

    def save(self, version: StoredVersion, manifest: Manifest) -> int:
        record = version.record
        if gate := self.gates.get(record.fragment_id):
            assert gate.wait(20.0)
        if self.error is not None:
            raise self.error
        self.saved.append((record.fragment_id, record.version))
        return 100

    def free_bytes(self) -> int:
        return self.room


@pytest.fixture(autouse=True)
def retries_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_S", 0.005)


@pytest.fixture
def store() -> SlowStore:
    return SlowStore()


@pytest.fixture
def keeping(store: SlowStore) -> Iterator[Callable[..., Keeper]]:
    made: list[Keeper] = []

    def make() -> Keeper:
        made.append(Keeper(store, real_world(), ShardMetrics(), Log("test")))
        return made[-1]

    yield make
    for keeper in made:
        keeper.close()


def sample(keeper: Keeper, name: str) -> float | None:
    return keeper._metrics.registry.get_sample_value(f"diloco_shard_{name}")


async def test_the_write_of_one_fragment_holds_up_no_other(store: SlowStore, keeping) -> None:
    store.gates[0] = threading.Event()
    keeper = keeping()
    slow = asyncio.create_task(keeper.keep(make_version(1), MANIFEST))
    await asyncio.wait_for(keeper.keep(make_version(1, fragment_id=1), MANIFEST), 20.0)
    assert (store.saved, slow.done()) == ([(1, 1)], False)
    store.gates[0].set()
    await asyncio.wait_for(slow, 20.0)


async def test_a_disk_that_refuses_is_told_and_tried_until_it_works(store: SlowStore, keeping) -> None:
    """Nothing may be announced before `keep` returns."""
    store.error = OSError(28, "No space left on device")
    keeper = keeping()
    waiting = asyncio.create_task(keeper.keep(make_version(1), MANIFEST))
    await until_async(lambda: (sample(keeper, "save_failures_total") or 0) > 3, "failures")
    assert keeper.failing == "[Errno 28] No space left on device"
    assert not waiting.done()
    store.error = None
    await asyncio.wait_for(waiting, 20.0)
    assert (store.saved, keeper.failing) == ([(0, 1)], "")
