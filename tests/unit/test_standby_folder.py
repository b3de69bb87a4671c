"""What a folder is, who may serve from it, and in which epoch."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from diloco_common.errors import VersionDamaged, WrongFolder
from diloco_common.ports import Unavailable
from diloco_common.settings import Settings
from diloco_common.wire.manifest import TensorSpec, cut
from diloco_common.wire.messages import LINE, Held, LearnerPolicy, VersionId, check_no_way_back
from diloco_server.core.fragment import FragmentState, Phases
from diloco_server.storage.filesystem import Disk
from diloco_server.storage.standby import SUPERSEDED, StandbyFolder, promote, put_mark
from diloco_server.storage.store import FileStore
from diloco_server.storage.version_file import Origin
from parts import joined

NOW = 1_800_000_000
POLICY = LearnerPolicy(4, "int8", "int8")


def store(folder: Path, now: int = NOW) -> FileStore:
    return FileStore(Disk(folder), Origin.of(Settings()), first_epoch=now)


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).touch()


@pytest.mark.parametrize(
    ("files", "epoch"),
    [
        ([], NOW),
        ([f"epoch-{NOW + 7:012d}"], NOW + 8),
        ([f"promoted-{NOW + 9:012d}"], LINE + NOW),
        ([f"promoted-{LINE + 3:012d}"], 2 * LINE + NOW),
        ([f"promoted-{NOW:012d}", f"epoch-{LINE + NOW:012d}"], LINE + NOW + 1),
        ([f"standby-{NOW:012d}", f"promoted-{NOW:012d}"], LINE + NOW),
        ([f"standby-{NOW:012d}"], "diloco promote"),
        ([f"superseded-{LINE:012d}", f"epoch-{NOW:012d}"], "--standby-of"),
        ([f"superseded-{LINE:012d}", f"standby-{LINE:012d}"], "--standby-of"),
    ],
)
def test_a_shard_begins_an_epoch_above_the_line_that_it_stood_by_for_or_none(
    files: list[str], epoch: int | str, tmp_path: Path
) -> None:
    touch(tmp_path, *files)
    if isinstance(epoch, str):
        with pytest.raises(WrongFolder, match=epoch):
            store(tmp_path)
    else:
        assert store(tmp_path).epoch == epoch


def test_a_promoted_shard_is_later_than_every_restart_of_the_one_before(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    began = store(old).epoch
    StandbyFolder(Disk(new)).follows(began)
    promote(Disk(new))
    promoted = store(new).epoch
    assert all(store(old, NOW + day * 86_400).epoch < promoted for day in range(9))


@pytest.mark.parametrize(
    ("epoch", "began_with_nothing", "goes"),
    [
        (LINE + NOW + 1, False, True),
        (2 * LINE + NOW, False, True),
        (NOW + 10**6, False, False),  # the old shard, started again
        (NOW - 9, True, False),  # the old shard in its first life
        (NOW + 9, True, True),  # the promoted shard's folder was emptied
    ],
)
def test_whoever_has_seen_a_promoted_shard_goes_back_to_no_epoch_before(
    epoch: int, began_with_nothing: bool, goes: bool
) -> None:
    answer = joined(epoch, POLICY)
    answer = replace(answer, began_with_nothing=began_with_nothing)
    with nullcontext() if goes else pytest.raises(Unavailable, match="promoted"):
        check_no_way_back(answer, LINE + NOW)


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ([], "no standby's folder"),
        (["epoch-000000000007"], "no standby's"),
        (["superseded-000000000007"], "no standby"),
    ],
)
def test_what_is_no_standby_is_not_promoted(files: list[str], why: str, tmp_path: Path) -> None:
    touch(tmp_path, *files)
    with pytest.raises(WrongFolder, match=why):
        promote(Disk(tmp_path))


def test_a_standby_takes_no_folder_that_a_shard_serves_from(tmp_path: Path) -> None:
    store(tmp_path)
    with pytest.raises(WrongFolder, match="serves from this folder"):
        StandbyFolder(Disk(tmp_path))


def test_a_replaced_shard_begins_anew_as_a_standby(tmp_path: Path) -> None:
    store(tmp_path)
    lost = "fragment-0000-version-000000000012.safetensors"
    touch(tmp_path, lost)
    put_mark(Disk(tmp_path), SUPERSEDED, LINE + 5)
    standby = StandbyFolder(Disk(tmp_path))
    assert not (tmp_path / lost).exists()
    standby.follows(LINE + 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"standby-{LINE + 5:012d}"]
    assert not standby.look()
    promote(Disk(tmp_path))
    standby.follows(LINE + 6)
    assert standby.look(), "a standby that has not looked yet does not take it back"


def test_later_versions_are_of_a_line_that_is_lost(tmp_path: Path) -> None:
    touch(tmp_path, *(f"fragment-0000-version-{v:012d}.safetensors" for v in (11, 13)))
    touch(tmp_path, "fragment-0001-version-000000000013.safetensors")
    folder = StandbyFolder(Disk(tmp_path))
    file = folder.begin(0, 12)
    file.write(memoryview(b"no version"))
    with pytest.raises(VersionDamaged):
        folder.end(file, 0, 12)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "fragment-0000-version-000000000011.safetensors", "fragment-0001-version-000000000013.safetensors",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("epoch", "version", "beside"),
    [(NOW + 9, 0, True), (NOW + 9, 1, False), (NOW, 0, False), (NOW - 9, 0, False)],
)
def test_a_learner_that_went_on_from_less_than_was_promoted_was_in_another_line(
    epoch: int, version: int, beside: bool
) -> None:
    """What it pushed there has the number of a version here, and is in none."""
    fragment = cut([TensorSpec("w", (4,))], 1, 1).fragments[0]
    state = FragmentState.unseeded(fragment, Phases())
    assert not state.is_beside(Held(0, epoch, version)), "nothing was restored"
    state.recovered = VersionId(NOW, 1)
    assert state.is_beside(Held(0, epoch, version)) is beside
