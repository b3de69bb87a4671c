"""The usual norm: one vote per learner, whatever it pushes and however often, and no growth by leaps."""

from __future__ import annotations

import pytest

from diloco_server.core.trust.norms import GROWTH, NORMS_MIN, Norms

WINDOW = 64


class Fragment:
    """Adds versions, and remembers who was merged when."""

    def __init__(self, norms: Norms | None = None, window: int = WINDOW) -> None:
        self.norms = norms or Norms()
        self.version, self.window = 0, window
        self.merged: dict[str, int] = {}

    def add(self, **norms: float) -> float:
        self.version += 1
        self.merged |= dict.fromkeys(norms, self.version)
        self.norms = self.norms.add([*norms.items()], self.merged, self.version, self.window, 0.0)
        return self.norms.usual


@pytest.fixture
def fragment() -> Fragment:
    return Fragment()


def test_a_learner_that_pushes_often_has_one_vote(fragment: Fragment) -> None:
    for i in range(200):
        usual = fragment.add(**({"honest": 1.0, "other": 1.2} if i % 20 == 0 else {}), liar=12.0**i)
    assert usual == 1.2


def test_of_two_learners_neither_can_raise_it(fragment: Fragment) -> None:
    for i in range(200):
        usual = fragment.add(honest=1.0, liar=12.0**i)
    assert usual == 1.0


def test_where_a_learner_is_alone_it_grows_tenfold_per_window_at_most(fragment: Fragment) -> None:
    """Attack: each contribution twelve times the last one."""
    for _ in range(NORMS_MIN):
        fragment.add(liar=1.0)
    for i in range(2 * WINDOW):
        usual = fragment.add(liar=12.0 ** (i + 1))
    assert usual == pytest.approx(GROWTH**2, rel=0.2)


def test_what_grows_steadily_is_followed_and_what_shrinks_at_once(fragment: Fragment) -> None:
    for i in range(100):
        usual = fragment.add(a=1.02**i, b=1.02**i, c=1.02**i)
    assert usual == pytest.approx(1.02**96, rel=0.02)
    for _ in range(8):
        usual = fragment.add(a=0.01, b=0.01, c=0.01)
    assert usual == 0.01


def test_empty_contributions_tell_nothing(fragment: Fragment) -> None:
    """Found by the simulation: half of two learners' contributions were empty, and no other one was let in again."""
    for full, empty in [(50.0, 0.0), (60.0, 6e-6), (55.0, 0.0)]:
        fragment.add(a=full, b=full, c=full, d=full)
        usual = fragment.add(a=empty, b=empty, c=full, d=empty)
    assert usual == 55.0


def test_a_flood_of_one_learner_does_not_wash_the_others_out() -> None:
    fragment = Fragment(window=8)
    fragment.add(**{f"honest-{i}": 1.0 for i in range(7)}, liar=100.0)
    for _ in range(7):
        fragment.add(liar=100.0)
    assert len(fragment.norms.norms) == 8
    assert fragment.norms.learners.count("liar") == 1
    assert fragment.norms.usual == 1.0


def test_learners_that_are_long_gone_have_no_vote(fragment: Fragment) -> None:
    for _ in range(NORMS_MIN):
        fragment.add(gone=1.0, away=1.0, here=3.0)
    for _ in range(WINDOW + 1):
        fragment.add(here=3.0)
    assert set(fragment.norms.learners) == {"here"}
    for _ in range(WINDOW // 2):
        fragment.add(here=3.0)
    assert fragment.norms.usual == 3.0, "once it had time to grow"


def test_norms_of_an_earlier_release_have_no_names_and_count_as_one_learner() -> None:
    fragment = Fragment(Norms.of([2.0] * 60, (), 0.0))
    assert fragment.norms.usual == 2.0
    fragment.add(a=1.0, b=1.0)
    assert fragment.norms.usual == 1.0
