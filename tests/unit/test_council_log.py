"""The log of an island: all ranks decide alike, whatever each of them hears, and when."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco_common.errors import IslandBroken, Superseded
from diloco_common.wire.messages import Collect, FragmentStatus, LearnerPolicy, Outcome, Pulse, PushAnswer
from diloco_worker.core import council_log as council_log
from diloco_worker.core.council_log import LEADER_BYTES, CouncilLog, Turn, read_word, write_word
from diloco_worker.core.events import Announced, Answered, Arrived, Asked, Event, Failed, Fetch, Gone, Joined, Stopped
from diloco_worker.shell.island import IslandGroup

POLICY = LearnerPolicy(5, "int8", "bfloat16")


def joined(epoch: int, fragments: int = 3) -> Joined:
    statuses = tuple(FragmentStatus(i, True, 4, 3, epoch, 0) for i in range(fragments))
    return Joined(7, epoch, 0.5, 0, 1, fragments, "digest", POLICY, statuses, Pulse(0, 0), address="ps:1")


def arrived(fragment_id: int, epoch: int, version: int, merged: int = 0) -> Arrived:
    return Arrived(fragment_id, version, epoch, torch.zeros(1), merged)


class Island:
    """Ranks whose boundaries are crossed together: what is posted at one is heard at the next."""

    def __init__(self, size: int) -> None:
        self.logs = [CouncilLog(rank, size) for rank in range(size)]
        self.posted: list[bytes] | None = None
        self.heard: list[list[Any]] = [[] for _ in range(size)]
        """By rank, without values."""

    def cross(self, tokens: int | None = 1) -> Turn:
        """One boundary. Returns what the leader decides, once it is sure that all decide so."""
        turns = [Turn(None, (), ()) if self.posted is None else log.hear(self.posted) for log in self.logs]
        self.posted = [log.frame(tokens) for log in self.logs]
        for rank, turn in enumerate(turns):
            self.heard[rank] += [bare(event) for event in turn.events]
        assert len({repr((t.tokens, [bare(e) for e in t.events], t.fetches)) for t in turns}) == 1
        return turns[0]

    def say(self, rank: int, *events: Event) -> None:
        for event in events:
            self.logs[rank].say(event)

    def settle(self, boundaries: int = 4) -> list[Any]:
        """What all ranks have decided after so many boundaries."""
        decided: list[Any] = []
        for _ in range(boundaries):
            turn = self.cross()
            decided += [*map(bare, turn.events), *turn.fetches]
        return decided


def bare(event: Event) -> Any:
    """Without what is a rank's own."""
    return replace(event, values=None, difference=None) if isinstance(event, Arrived) else repr(event)


def version(fragment_id: int, epoch: int, number: int, merged: int = 0) -> Any:
    return replace(arrived(fragment_id, epoch, number, merged), values=None)


@pytest.mark.parametrize(("sent", "agreed"), [((40, 40, 40), 40), ((40, 0, 40), 0), ((40, 40, 39), 0), ((0, 0, 0), 0)])
def test_a_version_may_hold_only_a_contribution_of_which_all_ranks_had_sent_their_part(
    sent: tuple[int, ...], agreed: int
) -> None:
    """A rank whose values are not finite has sent none."""
    island = Island(3)
    island.say(0, joined(1), Announced(0, 1, 5))
    island.settle()
    for rank, tokens in enumerate(sent):
        island.say(rank, replace(arrived(0, 1, 5), sent=tokens))

    assert island.settle() == [replace(version(0, 1, 5), sent=agreed)]


@pytest.mark.parametrize(
    "word",
    [
        joined(3),
        Asked(Collect(1, 5, 3), 4),
        Announced(1, 3, 5),
        Gone(1, 3, 5),
        Stopped(2),
        Pulse(10, 100),
        Answered(1, 5, PushAnswer(Outcome.REJECTED, "NOT_FINITE"), 40),
    ],
)
def test_words_are_read_as_they_were_written(word: Any) -> None:
    line = write_word(word)
    assert line.endswith(b"\n")
    assert read_word(line[:-1]) == word


def test_ranks_that_do_not_go_in_step_are_told() -> None:
    logs = [CouncilLog(rank, 2) for rank in range(2)]
    frames = [logs[0].frame(8), logs[1].frame(None)]
    with pytest.raises(IslandBroken, match="1 of 2 ranks have called `step`, the others `poll`"):
        logs[0].hear(frames)


JOINED, AGAIN = joined(1), joined(2)
FIVE = Announced(0, 1, 5)
HAVE_FIVE = arrived(0, 1, 5)
NEW = Asked(Collect(0, 5, 2), 2)
LATE = Answered(0, 1, PushAnswer(Outcome.LATE), 8)
Story = list[tuple[dict[int, list[Event]], list[Any] | None]]
"""What ranks say, and what all decide in the next boundaries; None: whatever."""
STORIES: dict[str, Story] = {
    "a version is applied when all ranks have it and not before": [
        ({0: [JOINED, FIVE]}, [repr(JOINED), Fetch(0, 1, 5)]),
        ({0: [arrived(0, 1, 5, merged=5)]}, []),
        ({1: [arrived(0, 1, 5, merged=5)]}, [version(0, 1, 5, merged=5)]),
    ],
    "of one fragment only one version is pulled at a time and then the newest": [
        ({0: [FIVE]}, None),
        ({0: [Announced(0, 1, 6)]}, None),
        ({0: [Announced(0, 1, 7)]}, []),
        ({0: [HAVE_FIVE], 1: [HAVE_FIVE]}, [version(0, 1, 5), Fetch(0, 1, 7)]),
    ],
    "a version that one rank cannot have nobody applies": [
        ({0: [FIVE], 2: []}, None),
        ({0: [HAVE_FIVE, Announced(0, 1, 7)], 1: [HAVE_FIVE], 2: [Gone(0, 1, 5)]}, [Fetch(0, 1, 7)]),
        ({rank: [HAVE_FIVE, arrived(0, 1, 7)] for rank in range(3)}, [version(0, 1, 7)]),  # 5 was still on its way
    ],
    "what an earlier epoch has announced is dropped with it": [
        ({0: [JOINED, FIVE]}, None),
        ({0: [HAVE_FIVE, AGAIN, Announced(0, 2, 3)]}, [repr(AGAIN), Fetch(0, 2, 3)]),
        ({1: [HAVE_FIVE]}, []),
    ],
    "the fate of a contribution is what the leader has heard": [
        ({0: [FIVE]}, None),
        ({0: [arrived(0, 1, 5, merged=4)], 1: [arrived(0, 1, 5, merged=5)]}, [version(0, 1, 5, merged=4)]),
    ],
    # A shard restarts with what it had. Words of the time before may be heard after that.
    "a version that was dropped and is wanted again need not come again": [
        ({0: [JOINED, FIVE]}, None),
        ({1: [HAVE_FIVE], 0: [AGAIN, FIVE]}, [repr(AGAIN), Fetch(0, 1, 5)]),
        ({0: [HAVE_FIVE]}, [version(0, 1, 5)]),
    ],
    "that a part was taken means nothing and that it was refused all hear": [
        ({1: [Answered(0, 1, PushAnswer(Outcome.ACCEPTED), 8)]}, []),
        ({1: [LATE]}, [repr(LATE)]),
    ],
    # And what it had announced under the lease before is no longer said: it may be of an epoch that is over.
    "a shard that joins again is heard before what it announces": [
        (
            {0: [
                JOINED, *(Gone(p, 9, 9) for p in range(3)), FIVE, Asked(Collect(1, 6, 1), 1), Announced(2, 1, 5),
                AGAIN, Announced(0, 2, 4), NEW,
            ]},
            [repr(AGAIN), repr(NEW), Fetch(0, 2, 4)],
        ),
    ],
}  # fmt: skip


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_all_ranks_decide_from_what_all_have_said(story: Story) -> None:
    island = Island(max(2, *(rank + 1 for said, _ in story for rank in said)))
    for said, decided in story:
        for rank, events in said.items():
            island.say(rank, *events)
        found = island.settle()
        assert decided is None or found == decided


def test_what_ends_one_rank_ends_all_at_the_same_boundary() -> None:
    island = Island(2)
    island.say(1, Failed(Superseded("another process")))
    turn = [island.cross(), island.cross()][1]
    (failed,) = turn.events
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, Superseded)
    assert str(failed.error) == "rank 1: another process"


@pytest.mark.parametrize(
    ("ask", "is_asked"), [(CouncilLog.ask_stop, "is_stop_asked"), (CouncilLog.ask_leave, "is_leave_asked")]
)
def test_all_ranks_hear_at_the_same_boundary_what_one_of_them_asks(
    ask: Callable[[CouncilLog], None], is_asked: str
) -> None:
    island = Island(2)
    ask(island.logs[1])
    island.cross()
    assert not any(getattr(log, is_asked) for log in island.logs)
    island.cross()
    assert all(getattr(log, is_asked) for log in island.logs)


def test_what_does_not_fit_into_a_frame_comes_with_the_next() -> None:
    island = Island(2)
    large = joined(1, fragments=400)
    assert len(write_word(large)) > 3 * LEADER_BYTES
    island.say(0, large)
    island.say(1, *(Gone(i, 1, 1) for i in range(100)))
    assert max(len(frame) for frame in [log.frame(1) for log in island.logs]) <= LEADER_BYTES
    island = Island(2)
    island.say(0, large, Stopped(0))
    assert island.settle(16) == [repr(large), repr(Stopped(0))]


def test_a_leader_that_hears_more_than_a_frame_per_step_falls_behind_by_no_more_than_a_few_boundaries() -> None:
    """Newer words replace older ones: what waits does not grow, and no fragment is passed over."""
    island, fragments = Island(2), 24
    asked: dict[int, int] = {}

    def cross(boundaries: int) -> None:
        for _ in range(boundaries):
            rounds = [event.directive for event in island.cross().events if isinstance(event, Asked)]
            asked.update((r.fragment_id, r.round) for r in rounds)

    for version in range(1, 61):
        for p in range(fragments):
            island.say(0, Announced(p, 1, version), Asked(Collect(p, version + 1, 1), 1))
        cross(1)
    assert min(asked.values()) > 50, "while there is news all the time"
    cross(6)
    assert asked == dict.fromkeys(range(fragments), 61)
    assert island.settle(2) == []


@pytest.mark.parametrize(("tokens", "applied"), [(1, [[0], [1], [2]]), (None, [[0, 1, 2]])])
def test_a_step_applies_versions_up_to_a_size_and_a_poll_all_of_them(tokens: int | None, applied: Any) -> None:
    island = Island(2)
    island.say(0, *(Announced(i, 1, 1) for i in range(3)))
    island.settle()
    for log in island.logs:
        log.elements = dict.fromkeys(range(3), council_log.APPLY_ELEMENTS)
        for i in range(3):
            log.say(arrived(i, 1, 1))
    island.cross(tokens)
    found = [[e.fragment_id for e in island.cross(tokens).events if isinstance(e, Arrived)] for _ in applied]
    assert found == applied


@settings(max_examples=100)
@given(seed=st.integers(0, 1_000_000), size=st.integers(1, 4))
def test_whatever_ranks_hear_and_when_they_do_the_same(seed: int, size: int) -> None:
    """Pulls end at any time or cannot be had, shards restart, refusals come; in the end all have the newest."""
    r = random.Random(seed)
    island, epoch = Island(size), 1
    newest = dict.fromkeys(range(3), 0)
    pulling: list[dict[int, Fetch]] = [{} for _ in range(size)]
    island.say(0, joined(epoch))

    def boundary(*, is_calm: bool) -> None:
        turn = island.cross(r.choice([1, 1, None]))
        for fetch in turn.fetches:
            for mine in pulling:
                mine[fetch.fragment_id] = fetch
        for rank, mine in enumerate(pulling):
            for fetch in list(mine.values()):
                if is_calm or r.random() < 0.3:
                    del mine[fetch.fragment_id]
                    is_gone = fetch.version < newest[fetch.fragment_id] - 1 or (not is_calm and r.random() < 0.05)
                    name = fetch.fragment_id, fetch.epoch, fetch.version
                    island.say(rank, Gone(*name) if is_gone else arrived(*name))

    for _ in range(r.randrange(5, 60)):
        for fragment_id in newest:
            if r.random() < 0.2:
                newest[fragment_id] += 1
                island.say(0, Announced(fragment_id, epoch, newest[fragment_id]))
        if r.random() < 0.05:
            epoch += r.choice([0, 1])
            island.say(0, joined(epoch))
            for fragment_id, number in newest.items():  # as a control stream begins
                island.say(0, Announced(fragment_id, epoch, number))
        if r.random() < 0.2:
            island.say(r.randrange(size), Answered(0, r.randrange(9), PushAnswer(Outcome.LATE), r.randrange(9)))
        boundary(is_calm=False)
    for fragment_id in newest:
        newest[fragment_id] += 1
        island.say(0, Announced(fragment_id, epoch, newest[fragment_id]))
    for _ in range(20):
        boundary(is_calm=True)

    applied = [e for e in island.heard[0] if isinstance(e, Arrived)]
    for fragment_id, number in newest.items():
        mine = [(e.epoch, e.version) for e in applied if e.fragment_id == fragment_id]
        assert mine == sorted(set(mine)), "an older version, or the same again"
        assert mine[-1] == (epoch, number)


@pytest.mark.parametrize(
    ("text", "same"), [("Größe", "Größe"), ("é" * 200, "é" * 128), ("a" + "é" * 200, "a" + "é" * 127)]
)
def test_ranks_hear_the_beginning_of_any_text(text: str, same: str) -> None:
    def allgather(everyone: list[list[Tensor]], mine: list[Tensor]) -> Mock:
        for one in everyone[0]:
            one.copy_(mine[0])
        return Mock()

    group = object.__new__(IslandGroup)
    group.size, group._group = 2, Mock(allgather=allgather)
    assert group.agree(text) == same
    assert group.all_of(text) == [same, same]
