"""What one account may hold of a shard, and how often it may come: by tables, without a clock."""

from __future__ import annotations

import pytest

from builders import make_settings
from diloco_common.errors import Busy
from diloco_server.shell.quotas import (
    KEPT,
    SHOWN_BYTES,
    OpenPushes,
    Places,
    Rate,
    Takers,
    connections_allowed,
    connections_wanted,
)


def granted(rate: Rate, account: str, times: list[float]) -> list[bool]:
    """Whether each of these events was let through."""

    def is_granted(now: float) -> bool:
        try:
            rate.take(account, now)
        except Busy:
            return False
        return True

    return [is_granted(now) for now in times]


@pytest.mark.parametrize(
    ("times", "let_through"),
    [
        ([0.0, 0.0, 0.0], [True, True, True]),
        ([0.0, 0.0, 0.0, 0.0, 0.4], [True, True, True, False, False]),
        ([0.0, 0.0, 0.0, 0.5, 0.5, 1.0], [True, True, True, True, False, True]),
        ([0.0, 0.0, 0.0, 100.0, 100.0, 100.0, 100.0], [True] * 6 + [False]),
    ],
    ids=["a burst", "and no more", "2 per second after it", "a rest earns one burst"],
)
def test_an_account_may_come_in_a_burst_and_then_at_a_rate(times: list[float], let_through: list[bool]) -> None:
    assert granted(Rate("joins", burst=3, per_s=2), "ann", times) == let_through


def test_accounts_without_number_cost_no_memory_and_forget_the_oldest() -> None:
    rate = Rate("joins", burst=1, per_s=1, accounts_max=10)
    for account in range(1000):
        assert granted(rate, str(account), [0.0]) == [True]
    assert granted(rate, "999", [0.0]) == [False], "it was heard last"
    assert granted(rate, "1", [0.0]) == [True], "forgotten"


def test_an_account_that_comes_too_often_loses_its_oldest_place() -> None:
    places = Places[str](each=2)
    assert [places.take("ann", name) for name in ("1", "2", "3", "4")] == [None, None, "1", "2"]
    assert places.take("ben", "5") is None, "that is its own account"
    assert (len(places), places.of("ann"), places.of("ben")) == (3, 2, 1)


def pushes(each: int = 4, together: int = 64, bytes_most: int = 100) -> OpenPushes[str]:
    return OpenPushes(each, together, bytes_most)


def begin(all_of_them: OpenPushes[str], account: str, push: str, fragment_id: int, num_bytes: int = 1) -> list[str]:
    """Open and announce a push. Answers which ones must end for it."""
    ended = [all_of_them.opened(account, push), all_of_them.announced(account, push, fragment_id, num_bytes)]
    return [push for push in ended if push is not None]


def test_a_later_push_of_a_fragment_ends_the_earlier_one() -> None:
    now_open = pushes()
    assert begin(now_open, "ann", "old", 7, num_bytes=60) == []
    assert begin(now_open, "ann", "new", 7, num_bytes=60) == ["old"], "its bytes count once"
    now_open.closed("ann", "old")  # which ends a moment later
    assert (len(now_open), now_open.bytes_held) == (1, 60)
    assert begin(now_open, "ann", "newer", 7) == ["new"]


def test_learners_on_thin_links_leave_places_to_the_others() -> None:
    """16 with four uploads each, which may all take minutes: whoever has none yet finds a place."""
    now_open = pushes(bytes_most=1 << 40)
    refused = 0
    for learner in range(16):
        for fragment in range(4):
            push = f"thin {learner} {fragment}"
            try:
                begin(now_open, f"thin {learner}", push, fragment)
            except Busy:
                refused += 1
                now_open.closed(f"thin {learner}", push)
    assert (len(now_open), refused) == (48 + 4, 12), "each of the last ones has its first place"
    for learner in range(12):
        begin(now_open, f"fast {learner}", f"push {learner}", 0)
    assert len(now_open) == 64


def test_announced_bytes_are_bounded_and_come_back() -> None:
    now_open = pushes(bytes_most=100)
    begin(now_open, "ann", "a", 1, num_bytes=70)
    now_open.opened("ben", "b")
    with pytest.raises(Busy, match="open pushes announced"):
        now_open.announced("ben", "b", 1, 31)
    now_open.closed("ann", "a")
    assert now_open.announced("ben", "b", 1, 31) is None
    now_open.closed("ben", "b")
    assert (now_open.bytes_held, len(now_open)) == (0, 0)


def test_one_push_always_fits_if_there_is_no_other() -> None:
    now_open = pushes(bytes_most=100)
    assert begin(now_open, "ann", "larger than all that is allowed", 1, num_bytes=1000) == []


def pulled(takers: Takers, account: str, num_bytes: int) -> bool:
    """A pull that is taken whole. Whether it had large chunks."""
    with takers.pulling(account) as pull:
        pull.num_bytes = num_bytes
    return pull.is_trusted


def test_large_chunks_are_for_who_has_shown_that_it_reads() -> None:
    takers = Takers()
    assert not pulled(takers, "ann", SHOWN_BYTES)
    assert not pulled(takers, "ann", SHOWN_BYTES + 1), "a transport takes so many for who reads nothing"
    assert pulled(takers, "ann", 1)
    assert pulled(takers, "ann", 1)
    assert not pulled(takers, "ben", 1)


@pytest.mark.parametrize(
    ("shard", "files", "wanted", "allowed"),
    [
        ({}, 1 << 20, 4096, 4096),
        ({}, 4544, 4096, 4096),
        ({}, 1024, 4096, 1024 - KEPT),
        ({}, 256, 4096, 16),
        ({"max_learners": 10}, 1024, 40, 40),
        ({"max_learners": 25_000}, 20_000, 100_000, 20_000 - KEPT),
    ],
    ids=["as a rule", "just enough", "few", "hardly any", "few learners", "more than there are"],
)
def test_connections_leave_files_for_the_shard(shard: dict[str, int], files: int, wanted: int, allowed: int) -> None:
    settings = make_settings(shard=shard).shard
    assert (connections_wanted(settings), connections_allowed(settings, files)) == (wanted, allowed)
