"""The store on a disk that fails: P2, P5 and Faults 5, 7, 8. `crash_at` takes the power in the middle of a call."""

from __future__ import annotations

import copy
import errno
from dataclasses import replace
from typing import Any

import pytest

from diloco_common.errors import DataError, WrongFolder
from diloco_server.storage.store import FileStore, Recovered
from diloco_server.storage.version_file import Origin, version_name
from diloco_simulator.world.disk import Crashed, FakeDisk, FakeFile
from stores import LONG_AGO, MANIFEST, ORIGIN, assert_equal, make_version, names, open_store


@pytest.fixture
def disk() -> FakeDisk:
    return FakeDisk()


def store_with(disk: FakeDisk, *versions: int) -> FileStore:
    """A store of one fragment that these versions were saved in."""
    store = open_store(disk)
    store.recover()
    for version in versions:
        store.save(make_version(version), MANIFEST)
    return store


def files(disk: FakeDisk) -> list[str]:
    return [name for name in disk.names() if name.startswith("fragment")]


def test_what_was_saved_comes_back_with_its_model(disk: FakeDisk) -> None:
    store = open_store(disk)
    store.recover()
    saved = [make_version(3, fragment_id=1, sends_changes=True), make_version(4, fragment_id=0, epoch=2)]
    for version in saved:
        store.save(version, MANIFEST)

    recovered = open_store(disk).recover()

    assert recovered.manifest == MANIFEST
    assert names(recovered.versions) == {0: (2, 4), 1: (1, 3)}
    for found, version in zip(recovered.versions, reversed(saved), strict=True):
        assert_equal(found.stored, version)
        assert not found.is_behind


def calls_of(work: Any) -> int:
    """How many calls some work on a disk with versions 0 and 1 makes."""
    disk = FakeDisk()
    store = store_with(disk, 0, 1)
    before = disk.calls
    work(disk, store)
    return disk.calls - before


def save_two(_: FakeDisk, store: FileStore) -> None:
    store.save(make_version(2), MANIFEST)


def start_again(disk: FakeDisk, _: FileStore) -> None:
    open_store(disk).recover()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("at", range(1, calls_of(save_two) + 1))
def test_a_crash_in_any_call_of_a_save_leaves_the_old_version_or_the_new_one(at: int, seed: int) -> None:
    """reliability.md 5, P5: whole, and never an older one; what is left over is cleared, and saving goes on."""
    disk = FakeDisk(seed)
    store = store_with(disk, 0, 1)
    disk.calls, disk.crash_at = 0, at
    with pytest.raises(Crashed):
        save_two(disk, store)
    disk.crash()

    again = open_store(disk)
    recovered = again.recover()

    (found,) = recovered.versions
    assert found.stored.record.version in (1, 2)
    assert_equal(found.stored, make_version(found.stored.record.version))
    assert (found.is_behind, recovered.damage) == (False, [])
    assert not [name for name in disk.names() if name.endswith(".tmp")]
    again.save(make_version(3), MANIFEST)
    assert files(disk)[-1] == version_name(0, 3)
    assert len(files(disk)) == 2


@pytest.mark.parametrize("seed", range(6))
def test_what_was_saved_outlives_a_crash_right_afterwards(seed: int) -> None:
    """P2: `save` has returned, so the version may have been announced."""
    disk = FakeDisk(seed)
    store_with(disk, 0, 1, 2)
    disk.crash()
    assert names(open_store(disk).recover().versions) == {0: (1, 2)}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("at", range(1, calls_of(start_again) + 1))
def test_a_crash_while_starting_never_gives_an_epoch_twice(at: int, seed: int) -> None:
    """P4: leases are named by the epoch, so no two lives that served may have the same."""
    disk = FakeDisk(seed)
    served = {store_with(disk, 0, 1).epoch}
    disk.crash()
    disk.crash_at = at
    try:
        served.add(open_store(disk).epoch)
    except Crashed:
        disk.crash()
    assert open_store(disk).epoch > max(served)


def test_an_emptied_folder_begins_an_epoch_that_none_of_its_versions_had(disk: FakeDisk) -> None:
    """Else two versions would have one name, and a learner that holds the first would ignore the second."""
    emptied = FileStore(disk, ORIGIN, first_epoch=LONG_AGO).epoch
    for name in disk.names():
        disk.lose(name)

    assert FileStore(disk, ORIGIN, first_epoch=LONG_AGO + 60).epoch > emptied


def test_a_copy_of_an_earlier_day_begins_an_epoch_that_the_run_has_not_had_since(disk: FakeDisk) -> None:
    """A snapshot of the volume holds the epoch of its day. The shard has started again since."""
    FileStore(disk, ORIGIN, first_epoch=LONG_AGO)
    copied = copy.deepcopy(disk)
    since = FileStore(disk, ORIGIN, first_epoch=LONG_AGO + 60).epoch

    assert FileStore(copied, ORIGIN, first_epoch=LONG_AGO + 120).epoch > since


@pytest.mark.parametrize("call", ["create", "write", "sync", "rename", "sync_names"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=errno.errorcode.get)
def test_a_save_that_the_disk_refuses_leaves_the_old_version_and_works_later(disk, call, number) -> None:
    """reliability.md 7: `save` raises, so nothing is announced, and it can be repeated."""
    store = store_with(disk, 0, 1)
    disk.refuse = lambda name: number if name == call else 0
    for _ in range(3):
        with pytest.raises(OSError, match=r"\[Errno"):
            store.save(make_version(2), MANIFEST)
    disk.refuse = lambda name: 0
    assert_equal(open_store(disk).recover().versions[-1].stored, make_version(1 if call != "sync_names" else 2))

    store.save(make_version(2), MANIFEST)

    assert names(open_store(disk).recover().versions) == {0: (1, 2)}
    assert files(disk) == [version_name(0, 1), version_name(0, 2)]


def test_a_save_that_does_not_fit_gives_back_the_space_that_it_took(disk: FakeDisk) -> None:
    """reliability.md 7, ENOSPC: what is left of a version that did not fit must not keep the disk full."""
    store = store_with(disk, 0)
    disk.space = 4000
    with pytest.raises(OSError, match="No space left"):
        store.save(make_version(1), MANIFEST)
    assert disk.space == 4000


def test_a_rotten_version_is_named_and_the_one_before_used(disk: FakeDisk) -> None:
    """reliability.md 8. It is behind what was announced, so that it gets a new name."""
    store_with(disk, 6, 7)
    disk.rot(version_name(0, 7), 2000)

    again = open_store(disk)
    recovered = again.recover()

    assert names(recovered.versions) == {0: (1, 6)}
    assert recovered.versions[0].is_behind
    (words,) = recovered.damage
    assert words.startswith(f"{version_name(0, 7)} is damaged: ")
    again.save(make_version(7, epoch=2), MANIFEST)
    last = open_store(disk).recover()
    assert (names(last.versions), last.versions[0].is_behind, last.damage) == ({0: (2, 7)}, False, [])
    assert files(disk) == [version_name(0, 6), version_name(0, 7)]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ESTALE], ids=errno.errorcode.get)
def test_a_version_that_cannot_be_read_now_is_not_passed_over(disk: FakeDisk, number: int) -> None:
    """P2: it may be intact, and the next save would take it away."""
    store_with(disk, 6, 7)

    class Refusing(FakeDisk):
        names = disk.names

        def open(self, name: str) -> FakeFile:
            raise OSError(number, "refused", name)

    with pytest.raises(OSError, match="refused"):
        open_store(Refusing()).recover()


def recover_past(disk: FakeDisk, rotten: str) -> Recovered:
    """A start of the shard that cannot read one file. The next one can."""
    good = disk.open

    def open_or_fail(name: str) -> FakeFile:
        if name == rotten:
            raise OSError(errno.EIO, "rotten", name)
        return good(name)

    disk.open = open_or_fail  # type: ignore[method-assign]
    recovered = open_store(disk).recover()
    disk.open = good  # type: ignore[method-assign]
    return recovered


def test_what_was_passed_over_once_does_not_come_back(disk: FakeDisk) -> None:
    """P4: an epoch went on from version 6. Version 7 of the old line must not be served after it, readable or not."""
    store_with(disk, 6, 7)
    assert names(recover_past(disk, version_name(0, 7)).versions) == {0: (1, 6)}

    again = open_store(disk)
    recovered = again.recover()

    assert (names(recovered.versions), recovered.damage) == ({0: (1, 6)}, [])
    assert recovered.versions[0].is_behind, "the version may have been served under another name, and not be on disk"
    again.save(make_version(7, epoch=2), MANIFEST)
    last = open_store(disk).recover()
    assert (names(last.versions), last.versions[0].is_behind) == ({0: (2, 7)}, False)
    assert files(disk) == [version_name(0, 6), version_name(0, 7)]


@pytest.mark.parametrize("seed", range(5))
def test_a_shard_serves_nobody_before_what_it_passed_over_is_aside(seed: int) -> None:
    """Whatever of it a crash undoes, the version is served by nobody, or by nobody else than before."""
    disk = FakeDisk(seed)
    store_with(disk, 6, 7)
    recover_past(disk, version_name(0, 7))
    disk.crash()
    assert names(open_store(disk).recover().versions) == {0: (1, 6)}


@pytest.mark.parametrize(("lost", "newest", "before"), [(8, 7, 6), (7, 8, 7)], ids=["the newest", "an older one"])
def test_a_missing_newest_version_is_noticed(disk: FakeDisk, lost: int, newest: int, before: int) -> None:
    """Fault 8: version 6 was taken away only because version 8 was there, so version 7 is not the newest. A missing
    older one does no harm, and is told as well."""
    store_with(disk, 6, 7, 8)
    disk.lose(version_name(0, lost))
    recovered = open_store(disk).recover()
    assert (names(recovered.versions), recovered.versions[0].is_behind) == ({0: (1, newest)}, True)
    missing = f"version {before}, written before {version_name(0, newest)}, is missing; later ones may be, too"
    assert recovered.damage == [missing]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"run": "other"}, "run: run <-> other"),
        ({"shard_index": 1}, "shard_index: 0 <-> 1"),
        ({"optimizer": "adam"}, "optimizer: nesterov <-> adam"),
    ],
)
def test_a_folder_of_another_run_is_refused_with_the_differences(disk, changes, words) -> None:
    """Bad input (people): data folder of another run."""
    store_with(disk, 0)
    other: Origin = replace(ORIGIN, **changes)
    with pytest.raises(WrongFolder, match=words) as raised:
        open_store(disk, other).recover()
    assert raised.value.exit_code == 3
    assert isinstance(raised.value, DataError)


@pytest.mark.parametrize("before", [(6, 7), (0,)])
def test_versions_put_into_an_empty_folder_begin_a_later_epoch(before: tuple[int, ...]) -> None:
    """A restore: the epochs that the run had since are not known, so a number is taken that none can have had."""
    source, target = FakeDisk(), FakeDisk()
    store_with(source, *before)
    name = version_name(0, before[-1])
    target.create(name).write(memoryview(source.content(name)))

    store = open_store(target)
    recovered = store.recover()

    assert store.epoch == LONG_AGO
    assert (recovered.versions[0].is_behind, recovered.damage) == (True, [])
    assert open_store(target).epoch == LONG_AGO + 1
