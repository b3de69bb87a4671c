"""Contributions in parts: all of them are one contribution, and fewer are nothing."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from builders import decoded, random_values
from diloco_common.codec import Payload, encode_payload
from diloco_common.codec.parts import Range, cut_chunks, cut_header, num_elements, spans
from diloco_common.errors import Busy, Refusal, VersionGone
from diloco_common.wire.manifest import TensorSpec
from diloco_common.wire.messages import Outcome, PushAnswer, VersionId
from diloco_server.core import parts as parts_module
from diloco_server.core.fragment import KEPT_MAX
from diloco_server.core.merge import PieceNorms
from diloco_server.core.parts import places_of
from rig import TOKENS, H, Rig

MODEL = [TensorSpec("a", (30, 20)), TensorSpec("b", (500,)), TensorSpec("c", (7, 11))]
SIZE = 1177


def cut_in(*bounds: int) -> list[tuple[Range, ...]]:
    """One range for each part, from bound to bound."""
    return [(Range(a, b),) for a, b in zip((0, *bounds), (*bounds, SIZE), strict=True)]


def of_rows(seed: int, parts: int) -> list[tuple[Range, ...]]:
    """Every element in one part, in runs of random lengths; some parts may be empty."""
    r = random.Random(seed)
    bounds = sorted({0, SIZE, *(r.randrange(SIZE) for _ in range(r.randrange(1, 40)))})
    ranges: list[list[Range]] = [[] for _ in range(parts)]
    for a, b in itertools.pairwise(bounds):
        ranges[r.randrange(parts)].append(Range(a, b))
    return [tuple(mine) for mine in ranges]


def laid_out(values: Tensor, ranges: Sequence[Range]) -> Tensor:
    """As a rank lays out what it holds: float32 [num_elements(ranges)]."""
    out = torch.zeros(num_elements(ranges))
    for start, stop, shift in spans(ranges):
        out[start + shift : stop + shift] = values[start:stop]
    return out


class Islands(Rig):
    """Learners that are islands, and some that are not."""

    def __init__(self, **sync: Any) -> None:
        super().__init__(MODEL, sync={"merge": "rda", "push": "int8"} | sync)

    def push_part(
        self, learner_id: str, values: Tensor, ranges: Sequence[tuple[Range, ...]], part: int, number: int = 1,
        **changes: Any,
    ) -> PushAnswer:  # fmt: skip
        """As the service does: by the header first, then with the bytes."""
        mine = ranges[part]
        encoding = self.settings.sync.push if number else "float32"
        flat = laid_out(values, mine) if mine else torch.zeros(1)
        payload = encode_payload(flat, encoding, chunk_elements=256)
        header = self.header(number, payload, part=part, num_parts=len(ranges), ranges=mine, **changes)
        member = self.members[learner_id]
        answer = self.shard.taking.admit(member, header, self.now)
        if answer is None:
            norms = PieceNorms(payload.header, 3, places_of(mine, self.shard.fragments[0].fragment.pieces))
            for chunk in payload.chunks:
                norms.add(chunk)
            answer = self.shard.taking.contribute(member, header, payload, norms.finish(), self.now)
        self.advance()
        return answer

    def push_whole(self, learner_id: str, values: Tensor) -> PushAnswer:
        payload = encode_payload(values.clone(), self.settings.sync.push, chunk_elements=256)
        return self.push(self.members[learner_id], self.header(1, payload), payload)

    def seed(self, learner_id: str, value: float = 0.0, **changes: Any) -> PushAnswer:
        values = torch.full((SIZE,), value)
        return [self.push_part(learner_id, values, cut_in(600), part, 0, **changes) for part in range(2)][-1]

    def started(self, *learner_ids: str) -> Islands:
        super().started(*learner_ids)
        return self

    @property
    def round(self) -> Any:
        return self.shard.fragments[0].round

    @property
    def version(self) -> int:
        return self.shard.fragments[0].version

    @property
    def values(self) -> Tensor:
        return self.state.values.theta


HELD = PushAnswer(Outcome.ACCEPTED, "PART")


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000), parts=st.integers(2, 7), merge=st.sampled_from(["rda", "mean"]))
def test_parts_in_any_order_are_merged_as_the_whole_is(seed: int, parts: int, merge: str) -> None:
    island, other = random_values(SIZE, seed), random_values(SIZE, seed + 1)
    ranges = of_rows(seed, parts)
    rigs = [Islands(merge=merge, push="float32").started("island", "other") for _ in range(2)]
    order = [part for part in range(parts) if ranges[part]]
    random.Random(seed).shuffle(order)

    answers = [rigs[0].push_part("island", island, ranges, part) for part in order]
    assert answers == [HELD] * (len(order) - 1) + [PushAnswer(Outcome.ACCEPTED)]
    rigs[1].push_whole("island", island)
    for rig in rigs:
        rig.push_whole("other", other)
        assert rig.version == 1

    torch.testing.assert_close(rigs[0].values, rigs[1].values)


def test_fewer_parts_are_nothing() -> None:
    rig = Islands(quorum=1, grace=0.0).started("island", "other")
    ranges = cut_in(300, 900)
    rig.push_part("island", torch.ones(SIZE), ranges, 0)
    rig.push_part("island", torch.ones(SIZE), ranges, 2)
    assert not rig.round.contributions
    assert rig.round.halves["island"].num_bytes < SIZE
    rig.push_whole("other", torch.zeros(SIZE))

    assert rig.version == 1
    assert rig.values.abs().max() == 0.0
    late = rig.push_part("island", torch.ones(SIZE), ranges, 1)
    assert late.outcome is Outcome.LATE
    ledger = rig.shard.ledger
    assert (ledger.participants, ledger.late, ledger.tokens_accepted) == (1, 1, H * TOKENS)


def test_one_part_that_is_not_finite_voids_all() -> None:
    rig = Islands(quorum=1).started("island", "other")
    ranges = cut_in(300, 900)
    rig.push_part("island", torch.ones(SIZE), ranges, 0)
    bad = rig.push_part("island", torch.ones(SIZE), ranges, 1, not_finite=True)
    after = rig.push_part("island", torch.ones(SIZE), ranges, 2)

    assert (bad.outcome, bad.code) == (Outcome.REJECTED, "NOT_FINITE")
    assert after == bad
    assert not rig.round.halves
    assert rig.shard.ledger.rejected == {"NOT_FINITE": 1}
    assert rig.round.missing == ["other"]


def test_of_what_is_refused_all_parts_go_and_those_of_the_next_one_stay() -> None:
    rig = Islands(quorum=1).started("island", "other")
    ranges = cut_in(600)
    first, second, third = ({"tokens": tokens} for tokens in (40, 39, 38))
    rig.push_part("island", torch.ones(SIZE), ranges, 1, not_finite=True, **first)
    rig.push_part("island", torch.ones(SIZE), ranges, 0, **second)
    rig.push_part("island", torch.ones(SIZE), ranges, 0, **first)  # a late copy
    assert rig.round.halves
    rig.push_part("island", torch.ones(SIZE), ranges, 1, not_finite=True, **second)
    assert not rig.round.halves
    for part in (0, 1):
        answer = rig.push_part("island", torch.ones(SIZE), ranges, part, **third)
    assert answer == PushAnswer(Outcome.ACCEPTED)


@pytest.mark.parametrize(
    ("what", "changes", "ranges"),
    [
        ("another contribution", {"tokens": 39}, cut_in(600)),
        ("elements that another part has", {}, [(Range(0, 600),), (Range(599, SIZE),)]),
    ],
)
def test_parts_that_do_not_belong_together_void_the_contribution(what: str, changes: Any, ranges: Any) -> None:
    rig = Islands(quorum=1).started("island", "other")
    rig.push_part("island", torch.ones(SIZE), cut_in(600), 0)
    answer = rig.push_part("island", torch.ones(SIZE), ranges, 1, **changes)
    assert answer.code == "CONTRIBUTION_CONFLICT", what
    assert not rig.round.halves


def test_ranges_lie_in_the_fragment() -> None:
    rig = Islands(quorum=1).started("island", "other")
    payload = encode_payload(torch.ones(10), "int8")
    header = rig.header(1, payload, num_parts=2, ranges=(Range(SIZE - 5, SIZE + 5),))
    answer = rig.shard.taking.admit(rig.members["island"], header, rig.now)
    assert answer.code == "BAD_PAYLOAD"


def test_an_empty_part_is_legal_and_is_nothing() -> None:
    rig = Islands().started("island")
    ranges = [(Range(0, SIZE),), ()]
    assert rig.push_part("island", torch.ones(SIZE), ranges, 1) == HELD
    assert rig.push_part("island", torch.ones(SIZE), ranges, 0) == PushAnswer(Outcome.ACCEPTED)


@pytest.mark.parametrize(("limit", "most"), [("RANGES_OF_ALL_MAX", 3), ("PADDING_MAX", 0)])
def test_half_a_contribution_is_bounded(monkeypatch: pytest.MonkeyPatch, limit: str, most: int) -> None:
    """Each part has two ranges of one element, with about 200 of padding before them."""
    monkeypatch.setattr(parts_module, limit, most)
    rig = Islands(quorum=1).started("island", "other")
    ranges = [tuple(Range(at, at + 1) for at in (first, first + 2)) for first in range(180, 250, 4)]
    answers = [rig.push_part("island", torch.ones(SIZE), ranges, part) for part in range(len(ranges))]
    assert answers[0] == HELD
    assert answers[-1].code == "BAD_PAYLOAD"
    assert not rig.round.halves


@given(seed=st.integers(0, 10_000))
def test_norms_of_chunks_are_those_of_the_pieces_wherever_ranges_and_chunks_end(seed: int) -> None:
    rig, values = Islands(push="float32"), random_values(SIZE, seed)
    rig.join("island")
    pieces = rig.shard.fragments[0].fragment.pieces
    for ranges in filter(None, of_rows(seed, 3)):
        payload = encode_payload(laid_out(values, ranges), "float32", chunk_elements=256)
        norms = PieceNorms(payload.header, len(pieces), places_of(ranges, pieces))
        for chunk in payload.chunks:
            norms.add(chunk)
        mine = torch.zeros(SIZE)
        for start, stop in ranges:
            mine[start:stop] = values[start:stop]
        expected = [mine[p.bounds].norm().item() for p in pieces]
        assert norms.finish() == pytest.approx(expected, rel=1e-5)


def test_while_one_island_brings_version_0_in_parts_others_do_not() -> None:
    rig = Islands().joined("island", "other")
    rig.push_part("island", torch.ones(SIZE), cut_in(600), 0, 0)
    with pytest.raises(Busy):
        rig.push_part("other", torch.ones(SIZE), cut_in(600), 0, 0)
    rig.shard.leave(rig.members["island"])
    rig.seed("other", 2.0)
    assert rig.values.unique().tolist() == [2.0]


def test_half_of_version_0_gives_way_once_no_part_has_come_for_a_lease() -> None:
    rig = Islands().joined("island", "other")
    rig.push_part("island", torch.ones(SIZE), cut_in(300, 600), 0, 0)
    lease_s = rig.settings.lease.lease_s
    for _ in range(3):  # reports keep both leases
        rig.now += lease_s / 4
        with pytest.raises(Busy):
            rig.push_part("other", torch.ones(SIZE), cut_in(600), 0, 0)
        rig.report("island")
        rig.report("other")
    rig.now += lease_s / 4
    rig.seed("other", 2.0)
    assert rig.values.unique().tolist() == [2.0]


def test_a_version_is_held_while_an_island_pulls_it_and_says_what_it_said() -> None:
    rig = Islands(quorum=1).started("island", "other")
    rig.shard.named(0, VersionId(7, 0), "island")
    rig.push_whole("island", torch.ones(SIZE))
    assert rig.version == 1
    assert rig.shard.named(0, VersionId(7, 1), "")[0].version == 1  # an observer's wishes hold nothing
    record, published = rig.shard.named(0, VersionId(7, 0), "island")
    assert record.version == 0
    assert "island" not in record.merged_versions
    assert decoded(published.values).abs().max() == 0.0
    rig.shard.leave(rig.members["island"])
    with pytest.raises(VersionGone, match="version 0 of epoch 7 is not held here, but 1 of 7"):
        rig.shard.named(0, VersionId(7, 0), "other")


def test_an_island_holds_one_version_and_all_of_them_a_few() -> None:
    names = [f"island-{i}" for i in range(KEPT_MAX + 2)]
    rig = Islands(quorum=1).started(*names)
    for number, name in enumerate(names):
        rig.shard.named(0, VersionId(7, number), name)
        rig.shard.named(0, VersionId(7, number), "island-0")
        payload = encode_payload(torch.ones(SIZE), "int8", chunk_elements=256)
        header = rig.header(number + 1, payload)
        rig.push(rig.members[name], header, payload)
        assert rig.version == number + 1
        rig.step(*names, steps=H)
    assert [version for _, version in rig.shard.fragments[0].kept] == list(range(2, KEPT_MAX + 2))
    with pytest.raises(VersionGone):
        rig.shard.named(0, VersionId(7, 1), "island-1")


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000))
def test_ranges_are_cut_out_of_a_version(seed: int) -> None:
    values = random_values(SIZE, seed).bfloat16().float()
    whole = encode_payload(values.clone(), "bfloat16", chunk_elements=256)
    for ranges in filter(None, of_rows(seed, 3)):
        cut = Payload(cut_header(whole, ranges), tuple(cut_chunks(whole, ranges)))
        assert torch.equal(decoded(cut), laid_out(values, ranges))
        assert cut.header == encode_payload(laid_out(values, ranges), "bfloat16", chunk_elements=256).header
    few = encode_payload(values.clone(), "bfloat16", chunk_elements=1024)
    for ranges in ((Range(0, SIZE),), *filter(None, of_rows(seed, 3))):
        cut = Payload(cut_header(few, ranges, 256), tuple(cut_chunks(few, ranges, 256)))
        assert cut.header == encode_payload(laid_out(values, ranges), "bfloat16", chunk_elements=256).header


@given(seed=st.integers(0, 100_000))
def test_whatever_happens_nothing_torn_is_merged_and_no_token_counts_twice(seed: int) -> None:
    """Ranks push in any order, repeat, die and come back with another number of ranks; rounds close meanwhile."""
    r = random.Random(seed)
    rig = Islands(quorum=1, grace=0.0, push="float32", merge="mean").started("island", "other")
    generation = 0
    for round_number in range(1, 6):
        merged_before = rig.shard.ledger.tokens_merged
        ranges = of_rows(r.randrange(1000), r.randrange(2, 5))
        value = float(r.randrange(1, 5))
        for _ in range(r.randrange(12)):
            if rig.version >= round_number:
                break
            what = r.random()
            if what < 0.1:
                generation += 1
                rig.join("island", f"process {generation}")
                value, ranges = value + 10, of_rows(r.randrange(1000), r.randrange(2, 5))
            elif what < 0.15:
                rig.push_part("island", torch.ones(SIZE), ranges, 0, round_number, not_finite=True)
            else:
                part = r.randrange(len(ranges))
                try:
                    rig.push_part("island", torch.full((SIZE,), value), ranges, part, round_number)
                except Refusal as refusal:
                    raise AssertionError(refusal) from refusal
            half = rig.round and rig.round.halves.get("island")
            assert not half or half.num_bytes <= 4 * (SIZE + 255 * 40)
        before = rig.values.clone() if rig.version < round_number else None
        if before is not None:
            payload = encode_payload(torch.zeros(SIZE), "float32", chunk_elements=256)
            rig.push(rig.members["other"], rig.header(round_number, payload), payload)
        assert rig.version == round_number
        assert len(rig.values.unique()) == 1, "a torn contribution was merged"
        assert rig.shard.ledger.tokens_merged - merged_before in (H * TOKENS, 2 * H * TOKENS)
        rig.step("island", "other", steps=H)


@pytest.mark.parametrize("ending", ["joins again", "leaves", "is silent"])
def test_half_a_contribution_ends_with_the_lease(ending: str) -> None:
    rig = Islands().started("island", "other")
    ranges = cut_in(600)
    rig.push_part("island", torch.ones(SIZE), ranges, 0)
    if ending == "joins again":
        rig.join("island", "another process")
    elif ending == "leaves":
        rig.shard.leave(rig.members["island"])
    else:
        for _ in range(7):
            rig.now += 1.0
            rig.report("other")
    assert rig.round is None or not rig.round.halves
    if ending == "joins again":  # the other half, of the new process, is no half of the old one's
        rig.push_part("island", torch.ones(SIZE), ranges, 1)
        assert not (rig.round and rig.round.contributions)
