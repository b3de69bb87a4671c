"""The memory that one process of a learner needs beyond its model, and its traffic: formulas, from the manifest alone.

Sources: the table at the top of `diloco_worker/core/tensors.py` for the tensors kept of a fragment, and `parts.py`
beside it for the part that a rank holds and pushes.

    peak  =  sum over all fragments  (anchor a h + residual r o)
           + sum over those in flight (snapshot s h + encoded contribution + what encoding lost r o
                                       + version as received + difference 4 h)

    In flight are fragments with successive turns (`manifest.turn`); the largest such group counts.

    Fragments of companions need the same, without residual (r = 0), and at most as many are in flight at once.

    h   elements of the fragment that the process holds
    o   elements of these that it pushes
    a   bytes per element of an anchor: 2, or 4 if float32 is pulled
    r   bytes per element of a residual: 2, or 4 if a plugin asks for it; 0 for companions
    s   bytes per element of a snapshot: 2, or 4 if float32 is pushed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from diloco_common.codec import get_codec, num_payload_bytes
from diloco_common.codec.base import BLOCK_ELEMENTS
from diloco_common.codec.change import ANCHOR, VALUES
from diloco_common.wire.manifest import Fragment, Manifest, turn


class Share(NamedTuple):
    """The part of a fragment in one process, in elements."""

    held: int
    """Elements that it keeps and pulls."""
    owned: int
    """Elements of these that it pushes."""


@dataclass(frozen=True, slots=True)
class LearnerBytes:
    """Memory and traffic of one process, in bytes except for `elements`."""

    elements: int
    """Parameters in the process, without companions."""
    kept: int
    """Anchors and residuals, always in memory."""
    under_way: int
    """Further memory while contributions and versions are in flight."""
    pushed: int
    """Sent for one contribution to every fragment, including companions."""
    pulled: int
    """Received for one version of every fragment."""

    @property
    def peak(self) -> int:
        return self.kept + self.under_way


def shares(manifest: Manifest, ranks: int = 1, replicas: int = 1) -> list[Share]:
    """The part of each model fragment in the rank that holds most, the first.

    Args:
        ranks: number of ranks over which rows are spread: all under FSDP2, 1 under DDP or for a process alone.
        replicas: number of ranks with the same elements: all under DDP, 1 under FSDP2. Under HSDP the product is all
            ranks.
    """
    rows = {t.name: t.shape[0] if t.shape else 1 for t in manifest.tensors}
    elements = {t.name: t.num_elements for t in manifest.tensors}

    def held(fragment: Fragment) -> int:
        found = 0
        for piece in fragment.pieces:
            mine = -(-rows[piece.tensor] // ranks)
            stop = mine * (elements[piece.tensor] // rows[piece.tensor])
            found += max(0, min(stop, piece.tensor_offset + piece.num_elements) - piece.tensor_offset)
        return found

    def share(fragment: Fragment) -> Share:
        """Ranks split whole blocks."""
        mine = held(fragment)
        return Share(mine, min(mine, -(-mine // (replicas * BLOCK_ELEMENTS)) * BLOCK_ELEMENTS))

    return [share(fragment) for fragment in manifest.model_fragments]


def learner_bytes(
    found: Sequence[Share], *, push: str = "int8", pull: str = "bfloat16",
    under_way: int = 2, companions: Sequence[Share] = (),
) -> LearnerBytes:  # fmt: skip
    """The most that a process with these shares of the fragments holds and moves.

    Args:
        companions: its shares of the companions' fragments.
        push, pull: the settings of these names in `sync`.
        under_way: fragments, of successive turns, whose contribution or version is in flight at once. Rounds of P
            fragments begin H / P steps apart, so about  round trip / (H / P x time of a step), rounded up, at least 1.

    Raises UnknownEncoding.
    """
    anchor = 4 if pull == "float32" else 2
    feedback = get_codec(push).residual_dtype.itemsize
    kinds = (found, feedback), (companions, 0)

    def moving(share: Share, residual: int) -> int:
        held, owned = share
        snapshot, difference = get_codec(push).progress_dtype.itemsize * held, 4 * held
        anchor_made = 0 if pull in VALUES else num_payload_bytes(ANCHOR, held)  # from a change
        encoded = num_payload_bytes(push, owned) + residual * owned
        return snapshot + encoded + num_payload_bytes(pull, held) + anchor_made + difference

    return LearnerBytes(
        elements=sum(h for h, _ in found),
        kept=sum(anchor * h + residual * o for of, residual in kinds for h, o in of),
        under_way=sum(_most_at_once([moving(share, r) for share in of], under_way) for of, r in kinds),
        pushed=sum(num_payload_bytes(push, o) for _, o in [*found, *companions]),
        pulled=sum(num_payload_bytes(pull, h) for h, _ in [*found, *companions]),
    )


def _most_at_once(sizes: Sequence[int], under_way: int) -> int:
    """The largest sum over `under_way` fragments of successive turns, cyclically."""
    in_turn = sorted(range(len(sizes)), key=lambda fragment_id: turn(fragment_id, len(sizes)))
    cycle = [sizes[fragment_id] for fragment_id in in_turn]
    span = min(under_way, len(cycle))
    return max((sum((cycle + cycle)[first : first + span]) for first in range(len(cycle))), default=0)
