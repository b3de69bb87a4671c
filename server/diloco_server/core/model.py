"""Checks that all learners of a run train the same model over the same frozen tensors.

The first learner brings both, unless the settings name the model. Only trained parameters are merged; parameters that
were trained over different frozen tensors do not belong together. Frozen tensors are not stored. After a restart of the
shard, the first learner to join declares them again.
"""

from __future__ import annotations

from collections.abc import Sequence

from diloco_common.errors import FrozenMismatch, ManifestMismatch, some
from diloco_common.wire.manifest import Manifest, TensorSpec, differences, kinds_of, model_digest
from diloco_common.wire.messages import FrozenTensor


def check_model(mine: Manifest, theirs: Sequence[TensorSpec]) -> None:
    """Compare the caller's model with the shard's. Raises ManifestMismatch with the first differences."""
    different = differences(mine.tensors, theirs)
    if not different:
        return
    table = "; ".join(different)
    if not differences(mine.exported, [t for t in theirs if t.traits.is_exported]):
        here, there = ([t for t in tensors if not t.traits.is_exported] for tensors in (mine.tensors, theirs))
        raise ManifestMismatch(
            "the models are the same, but the momentum that learners average is not: "
            f"{_what_is_averaged(here, there)}. All learners of a run give the same kind of optimizer for each "
            "parameter to join(companions=), or none; workers have the same train.average_momentum and train.optimizer "
            f"(shard <-> caller): {table}"
        )
    raise ManifestMismatch(f"the model differs from the shard's (shard <-> caller): {table}")


def _what_is_averaged(here: Sequence[TensorSpec], there: Sequence[TensorSpec]) -> str:
    if here and there:
        kinds = [" and ".join(kinds_of(tensors)) or "another optimizer" for tensors in (here, there)]
        if kinds[0] != kinds[1]:
            return (
                f"this run averages that of {kinds[0]}, but the caller has that of {kinds[1]}, which means other values"
            )
        return "this run and the caller average different tensors"
    return f"this run averages {'momentum' if here else 'none'}, and the caller {'some' if there else 'none'}"


def check_model_digest(expected: str, theirs: Sequence[TensorSpec]) -> None:
    """Compare the caller's model with `run.model`, if that is set. Raises ManifestMismatch."""
    if not expected or (found := model_digest(theirs)) == expected:
        return
    if model_digest(t for t in theirs if t.traits.is_exported) == expected:
        raise ManifestMismatch(
            f"this shard insists on the model {expected} (run.model), which the caller brings, but that is its digest "
            f"without the momentum that the caller wants averaged: start all shards with run.model={found} (printed by "
            "`diloco-worker digest` with train.average_momentum = true, given by digest_of(model, companions=...)), or "
            "leave the momentum local"
        )
    raise ManifestMismatch(
        f"this shard insists on the model {expected} (run.model), but the caller brings {found}: train the same "
        "model, average the momentum of the same kind of optimizer as the others, or none, or start all shards with "
        f"run.model={found}"
    )


class Frozen:
    """The frozen tensors that learners have declared to this shard in this epoch."""

    def __init__(self) -> None:
        self._tensors: dict[str, FrozenTensor] = {}
        self._declared_by = ""

    @property
    def declared(self) -> tuple[FrozenTensor, ...]:
        return tuple(self._tensors.values())

    def forget(self) -> None:
        """Forget them: the next learner to join declares them again."""
        self._tensors = {}

    def check(self, theirs: Sequence[FrozenTensor]) -> None:
        """Compare with a learner's declaration; an empty one always passes. Raises FrozenMismatch."""
        if not theirs or not self._tensors:
            return
        caller = {t.name: t for t in theirs}
        different = [
            f"{name}: {words}"
            for name in sorted(self._tensors.keys() | caller.keys())
            if (words := _difference(self._tensors.get(name), caller.get(name)))
        ]
        if different:
            raise FrozenMismatch(
                f"frozen tensors differ from those that {self._declared_by} brought to this run (the run's <-> the "
                f"caller's): {some(different, '; ')}. Load the same base in the same dtype; or, if it "
                'may differ, join(..., frozen="any"). If your loop changes them itself (a teacher, a target network), '
                'join(..., private=[...]) keeps them local, and shared="all" merges them too'
            )

    def adopt(self, learner_id: str, theirs: Sequence[FrozenTensor]) -> None:
        """Add to the known frozen tensors from the declaration of a learner that was admitted."""
        if theirs and not self._tensors:
            self._tensors, self._declared_by = {t.name: t for t in theirs}, learner_id
        for tensor in theirs:
            if tensor.crc32c is not None and self._tensors[tensor.name].crc32c is None:
                self._tensors[tensor.name] = tensor


def _difference(mine: FrozenTensor | None, theirs: FrozenTensor | None) -> str:
    """The difference in words; empty if there is none."""
    my_form, their_form = (t.form if t is not None else "absent" for t in (mine, theirs))
    if my_form != their_form:
        return f"{my_form} <-> {their_form}"
    assert mine is not None
    assert theirs is not None
    is_compared = mine.crc32c is not None and theirs.crc32c is not None
    return f"{my_form} with other values" if is_compared and mine.crc32c != theirs.crc32c else ""
