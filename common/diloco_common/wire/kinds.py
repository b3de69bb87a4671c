"""The kinds of fragments, and all that sets them apart: one table. Everybody else asks a fragment for its traits.

parameter   what is trained
momentum    what the optimizers of learners keep for parameters (`join(companions=)`)
buffer      what a checkpoint of the model holds beside its parameters, such as the statistics of BatchNorm
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from diloco_common.settings import SyncSettings

Kind = Literal["parameter", "momentum", "buffer"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Traits:
    """What is peculiar to the tensors of one kind, and to their fragments."""

    is_of_model: bool = False
    """What the run trains: it takes the outer steps of the settings, its tokens and versions are the progress of the
    run, and the end of the budget is its end. The others take what learners have, merged, as long as these go on."""
    norms_tell: bool = False
    """A contribution of an unusual norm is that of a sick learner. Momentum begins at zero, and grows by any factor."""
    feeds_back: bool = False
    """What an encoding lost is in the next contribution. An inner step forgets a part of the momentum, so that the next
    contribution holds it already."""
    is_exported: bool = True
    """A file of the model holds it."""
    every: str | None = None
    """The setting in `sync`: H of these fragments, in those of the model."""
    encoding: str | None = None
    """Of values on the wire, whatever the run's; None: the run's. Neither counters nor variances bear rounding in
    blocks."""
    is_whole: bool = False
    """Learners contribute what they have, as the difference to nothing, and it counts until they contribute again. A
    version is written over it, as nobody knows what of it is progress."""

    def times(self, sync: SyncSettings) -> int:
        """H of these fragments, in those of the model."""
        return 1 if self.every is None else int(getattr(sync, self.every))


TRAITS: dict[Kind, Traits] = {
    "parameter": Traits(is_of_model=True, norms_tell=True, feeds_back=True),
    "momentum": Traits(is_exported=False, every="companions_every"),
    "buffer": Traits(every="buffers_every", encoding="float32", is_whole=True),
}
