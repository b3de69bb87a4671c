"""Which learners train on the same batches: they report the same losses, to the last bit.

Every learner begins with the same values. Where all shuffle their data with the same seed, they draw the same batches
in the same order, and the run learns from one learner's data. Losses of different batches agree now and then. Those of
several steps do not.
"""

from __future__ import annotations

from diloco_common.messages import Progress

ALIKE = 3
"""Different losses that two learners must have in common."""
REPORTS_MAX = 4096
"""Reports that are remembered, of all learners together."""


class Likeness:
    """The losses that learners of one shard have reported lately."""

    def __init__(self) -> None:
        self._first: dict[tuple[int, int, float], str] = {}  # inner step, tokens and loss -> who reported it first
        self._alike: dict[tuple[str, str], set[float]] = {}  # losses that two learners have in common
        self._said: set[tuple[str, str]] = set()

    def heard(self, learner_id: str, progress: Progress) -> str | None:
        """A learner reports. Returns the learner that it is too much like, the first time that this is so."""
        if progress.loss is None or not progress.inner_step:
            return None
        report = progress.inner_step, progress.tokens, progress.loss
        other = self._first.setdefault(report, learner_id)
        if len(self._first) > REPORTS_MAX:
            del self._first[next(iter(self._first))]
        pair = other, learner_id
        if other == learner_id or pair in self._said:
            return None
        alike = self._alike.setdefault(pair, set())
        alike.add(progress.loss)
        if len(alike) < ALIKE:
            if len(self._alike) > REPORTS_MAX:
                del self._alike[next(iter(self._alike))]
            return None
        del self._alike[pair]
        if len(self._said) >= REPORTS_MAX:
            self._said.clear()
        self._said.add(pair)
        return other
