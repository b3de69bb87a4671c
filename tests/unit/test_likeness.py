"""Learners that draw the same batches are noticed by their losses; those that do not, are not."""

from __future__ import annotations

from diloco_common.wire.messages import Progress
from diloco_server.core.membership import ALIKE, Likeness


def heard(likeness: Likeness, learner_id: str, losses: list[float], first_step: int = 1) -> list[str | None]:
    steps = enumerate(losses, first_step)
    return [likeness.heard(learner_id, Progress(step, 10 * step, loss)) for step, loss in steps]


def test_the_same_losses_at_the_same_steps_are_said_once() -> None:
    likeness = Likeness()
    losses = [3.0 - 0.1 * i for i in range(2 * ALIKE)]
    assert not any(heard(likeness, "a", losses))
    assert heard(likeness, "b", losses) == [None] * (ALIKE - 1) + ["a"] + [None] * ALIKE


def test_learners_with_batches_of_their_own_are_not_alike() -> None:
    likeness = Likeness()
    heard(likeness, "a", [3.0, 2.9, 2.8, 2.7])
    assert not any(heard(likeness, "b", [3.0, 2.91, 2.81, 2.71]))


def test_a_loss_that_does_not_change_tells_nothing() -> None:
    likeness = Likeness()
    heard(likeness, "a", [0.0] * 10)
    assert not any(heard(likeness, "b", [0.0] * 10))


def test_a_learner_is_not_like_itself_and_not_like_others_at_other_steps() -> None:
    likeness = Likeness()
    losses = [3.0, 2.9, 2.8, 2.7]
    heard(likeness, "a", losses)
    assert not any(heard(likeness, "a", losses))
    assert not any(heard(likeness, "b", losses, first_step=2))


def test_reports_without_a_loss_and_before_the_first_step_do_not_count() -> None:
    likeness = Likeness()
    for learner_id in "ab":
        assert not any(likeness.heard(learner_id, Progress(0, 0, 0.1 * i)) for i in range(10))
        assert not any(likeness.heard(learner_id, Progress(i, i)) for i in range(10))
