"""What the learners of one shard hold fixed: declared by the first of them, and the same for all.

Only trained parameters are merged. With different frozen ones under them, what is merged does not belong together.
Nothing of this is kept on disk. After a restart of the shard, the first learner to come declares it anew.
"""

from __future__ import annotations

from collections.abc import Sequence

from diloco_common.errors import FrozenMismatch
from diloco_common.messages import FrozenTensor

SHOWN = 5
"""Differences that a refusal names."""


class Frozen:
    """The frozen tensors of one run, as far as this shard has heard of them in this epoch."""

    def __init__(self) -> None:
        self._tensors: dict[str, FrozenTensor] = {}
        self._declared_by = ""

    def forget(self) -> None:
        """The next learner to come declares them anew."""
        self._tensors = {}

    def check(self, theirs: Sequence[FrozenTensor]) -> None:
        """Compare with what a learner declares; nothing: it may differ. Raises FrozenMismatch."""
        if not theirs or not self._tensors:
            return
        caller = {t.name: t for t in theirs}
        different = [
            f"{name}: {words}"
            for name in sorted(self._tensors.keys() | caller.keys())
            if (words := _difference(self._tensors.get(name), caller.get(name)))
        ]
        if different:
            more = [f"and {len(different) - SHOWN} more"] if len(different) > SHOWN else []
            raise FrozenMismatch(
                f"frozen tensors differ from those that {self._declared_by} has brought to this run (the run's <-> the "
                f"caller's): {'; '.join([*different[:SHOWN], *more])}. Load the same base in the same dtype; or, if it "
                'may differ, join(..., frozen="any"). If your loop changes them itself (a teacher, a target network), '
                'join(..., private=[...]) keeps them local, and shared="all" merges them, too'
            )

    def adopt(self, learner_id: str, theirs: Sequence[FrozenTensor]) -> None:
        """A learner that declares these was let in: what was not known yet is known from now on."""
        if theirs and not self._tensors:
            self._tensors, self._declared_by = {t.name: t for t in theirs}, learner_id
        for tensor in theirs:
            if tensor.crc32c is not None and self._tensors[tensor.name].crc32c is None:
                self._tensors[tensor.name] = tensor


def _difference(mine: FrozenTensor | None, theirs: FrozenTensor | None) -> str:
    """In words; empty: there is none."""
    my_form, their_form = (t.form if t is not None else "absent" for t in (mine, theirs))
    if my_form != their_form:
        return f"{my_form} <-> {their_form}"
    assert mine is not None
    assert theirs is not None
    is_compared = mine.crc32c is not None and theirs.crc32c is not None
    return f"{my_form} with other values" if is_compared and mine.crc32c != theirs.crc32c else ""
