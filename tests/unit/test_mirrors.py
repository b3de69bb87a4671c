"""A mirror that answers anything lets nothing wrong through; a standby's folder may serve once it is promoted."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco_common.codec import Payload, PayloadHeader, encode_payload
from diloco_common.codec.change import encode_change
from diloco_common.codec.parts import sha256
from diloco_common.errors import Busy, Refusal, VersionDamaged, VersionGone, WrongFolder
from diloco_common.ports import Unavailable
from diloco_common.settings import Settings
from diloco_common.wire.manifest import TensorSpec, cut
from diloco_common.wire.messages import (
    LINE,
    Held,
    LearnerPolicy,
    Near,
    PullHeader,
    PullRequest,
    VersionId,
    check_no_way_back,
)
from diloco_server.core.fragment import FragmentState, Phases
from diloco_server.storage.filesystem import Disk
from diloco_server.storage.standby import SUPERSEDED, StandbyFolder, promote, put_mark
from diloco_server.storage.store import FileStore
from diloco_server.storage.version_file import Origin
from diloco_worker.shell import puller as module
from diloco_worker.shell.puller import Mirrors
from parts import Parts, joined

EPOCH, SIZE = 7, 700
HAVE = (EPOCH, 1)


@dataclass(frozen=True)
class Version:
    values: Payload
    change: Payload
    near: Near


def version() -> Version:
    """Number 2, as its shard has it."""
    before = encode_payload(torch.randn(SIZE), "bfloat16", chunk_elements=256)
    change, values = encode_change(torch.randn(SIZE), before, "int8")
    header = PullHeader(0, 2, EPOCH, 1, 0, 90, None)
    return Version(values, change, Near("mirror:1", sha256(values), sha256(change), header))


class Liar:
    """Answers each pull as it is told, or with a lie that it draws."""

    def __init__(self, of: Version, chance: random.Random) -> None:
        self.of, self.chance = of, chance
        self.said = ""

    def draw(self) -> None:
        lies = [name.removeprefix("lie_") for name in dir(self) if name.startswith("lie_")]
        self.said = self.chance.choice(["truth", "truth_as_values", *lies])
        self.refusal = self.chance.choice([VersionGone("gone"), Refusal("no"), Unavailable("away"), ValueError("ours")])

    async def pull(self, caller: Any, request: PullRequest, timeout_s: float) -> AsyncGenerator[Any, None]:
        of = self.of
        is_change = self.said != "truth_as_values" and self.chance.random() < 0.8
        payload = of.change if is_change else of.values
        header = replace(
            of.near.header, merged_version=0, payload=payload.header, base_version=1 if is_change else None
        )
        chunks = [bytearray(chunk) for chunk in payload.chunks]
        lie = getattr(self, f"lie_{self.said}", None)
        if lie is not None:
            header, chunks = lie(header, chunks)
        yield header
        for chunk in chunks:
            if chunk is None:
                await asyncio.Event().wait()
            else:
                yield memoryview(bytes(chunk))

    def lie_other_bytes(self, header: PullHeader, chunks: list[Any]) -> Any:
        """With checksums of their own that are right."""
        assert header.payload is not None
        other = encode_payload(torch.randn(SIZE), header.payload.encoding, chunk_elements=256)
        return replace(header, payload=other.header), other.chunks

    def lie_one_bit(self, header: PullHeader, chunks: list[Any]) -> Any:
        chunk = self.chance.choice(chunks)
        chunk[self.chance.randrange(len(chunk))] ^= 1 << self.chance.randrange(8)
        return self._sealed(header, chunks)

    def lie_older_epoch(self, header: PullHeader, chunks: list[Any]) -> Any:
        other = encode_payload(torch.randn(SIZE), "bfloat16")
        return replace(header, epoch=EPOCH - 1, payload=other.header, base_version=None), other.chunks

    def lie_other_meaning(self, header: PullHeader, chunks: list[Any]) -> Any:
        """The right bytes, said to be encoded, or cut, in another way."""
        assert header.payload is not None
        other = {"encoding": self.chance.choice(["int4", "int8", "bfloat16", "float32", "no such"])}
        sizes = {"chunk_elements": self.chance.choice([256, 512, 768])}
        payload = replace(header.payload, **(other if self.chance.random() < 0.5 else sizes))
        whole = b"".join(chunks)
        return self._sealed(replace(header, payload=payload), [bytearray(whole)])

    def lie_change_as_values(self, header: PullHeader, chunks: list[Any]) -> Any:
        return replace(header, base_version=None if header.base_version else 1), chunks

    def lie_huge(self, header: PullHeader, chunks: list[Any]) -> Any:
        assert header.payload is not None
        field = self.chance.choice(["num_elements", "chunk_elements", "num_bytes"])
        return replace(header, payload=replace(header.payload, **{field: 2 ** self.chance.randrange(20, 53)})), chunks

    def lie_endless(self, header: PullHeader, chunks: list[Any]) -> Any:
        return header, chunks * 50

    def lie_short(self, header: PullHeader, chunks: list[Any]) -> Any:
        return header, chunks[:-1]

    def lie_no_payload(self, header: PullHeader, chunks: list[Any]) -> Any:
        return replace(header, payload=None), []

    def lie_no_header(self, header: PullHeader, chunks: list[Any]) -> Any:
        return chunks[0], chunks

    def lie_silence(self, header: PullHeader, chunks: list[Any]) -> Any:
        return header, [*chunks[:1], None, *chunks[1:]]

    def lie_refusal(self, header: PullHeader, chunks: list[Any]) -> Any:
        raise self.refusal

    def lie_busy(self, header: PullHeader, chunks: list[Any]) -> Any:
        raise Busy("for ever")

    def _sealed(self, header: PullHeader, chunks: list[Any]) -> Any:
        from diloco_common.codec import chunks_crc32c

        assert header.payload is not None
        return replace(header, payload=replace(header.payload, chunks_crc32c=chunks_crc32c(chunks))), chunks


async def run(answers: int, seed: int) -> Counter[str]:
    """What became of them: `WHAT: taken` or `WHAT: from the shard`. Raises AssertionError where something wrong came
    through."""
    torch.manual_seed(seed)
    of = version()
    liar = Liar(of, random.Random(seed))
    context = Parts(encodes_at_once=True).context()
    found: Counter[str] = Counter()
    for _ in range(answers):
        liar.draw()
        module.SILENT_S = 0.003 if liar.said in ("silence", "busy") else 60.0
        mirrors = Mirrors(context)
        mirrors._dialed["mirror:1"] = liar  # type: ignore[assignment]
        answer = await mirrors.pull(of.near, PullRequest(0, ("int8", "bfloat16"), have=HAVE), SIZE)
        found[f"{liar.said}: {'from the shard' if answer is None else 'taken'}"] += 1
        if answer is not None:
            header, payload = answer
            right = of.change if header.base_version is not None else of.values
            assert b"".join(payload.chunks) == b"".join(right.chunks), liar.said
            assert _meaning(payload.header) == _meaning(right.header), liar.said
            assert (header.merged_version, header.epoch, header.version) == (1, EPOCH, 2), "the shard says these"
            assert header.base_version in (None, 1)
    return found


def _meaning(header: PayloadHeader) -> tuple[object, ...]:
    is_plain = header.encoding == "bfloat16"
    return header.encoding, header.num_elements, None if is_plain else header.chunk_elements


def test_whatever_a_mirror_answers_only_what_was_announced_comes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENT_S", module.SILENT_S)  # put back: each answer has its own
    monkeypatch.setattr(module, "AGAIN_S", 0.001)
    found = asyncio.run(run(400, seed=3))
    kinds = {what.partition(":")[0] for what in found}
    assert len(kinds) == 15, "every kind was drawn"
    assert found["truth: taken"] > 0 == found["truth: from the shard"]
    assert found["truth_as_values: taken"] > 0 == found["truth_as_values: from the shard"]
    taken = {what.partition(":")[0] for what in found if what.endswith(": taken")}
    assert taken <= {"truth", "truth_as_values", "other_meaning"}, "which may happen to be the right one"


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
