"""Formulas for the memory that one process of a learner needs beyond its model, and for its traffic.

They assume that all fragments are equally large.

Sources: the table at the top of `diloco_worker/core/tensors.py` for the tensors kept of a fragment, and `parts.py`
beside it for the part that a rank holds and pushes.

    peak  =  all fragments        x (anchor a h + residual r h)
           + those in flight      x (snapshot s h + encoded contribution + what encoding lost r h
                                     + version as received + difference 4 h)

    Fragments of companions need the same without a residual (r = 0). At most as many of them are in flight at once.

    h   elements of a fragment that the process holds, and pushes
    a   bytes per element of an anchor: 2, or 4 if float32 is pulled
    r   bytes per element of a residual: 2, or 4 if a plugin asks for it; 0 for companions
    s   bytes per element of a snapshot: 2, or 4 if float32 is pushed
"""

from __future__ import annotations

from dataclasses import dataclass

from diloco_common.codec import get_codec, num_payload_bytes
from diloco_common.codec.change import ANCHOR, VALUES


@dataclass(frozen=True, slots=True)
class LearnerBytes:
    """Memory and traffic of one process, in bytes except for `elements`."""

    elements: int
    """Number of parameters in the process, without companions."""
    kept: int
    """Anchors and residuals, always in memory."""
    under_way: int
    """Further memory while contributions and versions are in flight."""
    pushed: int
    """Bytes sent for one contribution to every fragment, including companions."""
    pulled: int
    """Bytes received for one version of every fragment, including companions."""

    @property
    def peak(self) -> int:
        return self.kept + self.under_way


def learner_bytes(
    held: int, fragments: int, *, push: str = "int8", pull: str = "bfloat16", under_way: int = 2, companions: int = 0,
) -> LearnerBytes:  # fmt: skip
    """The maximum that a process holds and moves.

    Args:
        held: elements of each fragment in this process.
        companions: number of fragments of companions, which are as large.
        push, pull: the settings `sync.push` and `sync.pull`.
        under_way: fragments whose contribution or version is in flight at once. Rounds of P fragments begin H / P
            steps apart, so this is about  round trip / (H / P x time of a step), rounded up, at least 1.

    Raises UnknownEncoding.
    """
    codec, came = get_codec(push), num_payload_bytes(pull, held)
    anchor, residual = (4 if pull == "float32" else 2) * held, codec.residual_dtype.itemsize * held
    anchor_made = 0 if pull in VALUES else num_payload_bytes(ANCHOR, held)  # from a change
    encoded, snapshot = num_payload_bytes(push, held), codec.progress_dtype.itemsize * held
    moving = snapshot + encoded + came + anchor_made + 4 * held
    return LearnerBytes(
        elements=fragments * held,
        kept=fragments * (anchor + residual) + companions * anchor,
        under_way=min(under_way, fragments) * (moving + residual) + min(under_way, companions) * moving,
        pushed=(fragments + companions) * encoded,
        pulled=(fragments + companions) * came,
    )
