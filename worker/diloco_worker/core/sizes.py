"""What one process of a learner holds beyond its model, and what it moves: formulas, from the manifest alone.

The sources: what is kept of a fragment is the table at the top of `core/tensors.py`, what a rank
holds and owns of it is `core/parts.py`.

    peak  =  sum over all fragments  (anchor a h + residual r o)
           + sum over those under way (snapshot s h + contribution encoded + version as it came + difference 4 h)

    Under way are fragments whose turns follow each other (`manifest.turn`), those that are the most together.

    Fragments of companions are kept as those of the model are, but without residual (r = 0), and as many of them are
    under way at once at most.

    h   elements of the fragment that the process holds
    o   elements of these that it pushes
    a   bytes of an anchor's element: 2, or 4 where float32 is pulled
    r   bytes of a residual's element: 2, or 4 where a plugin asks for it; 0 without error feedback
    s   bytes of a snapshot's element: 2, or 4 where float32 is pushed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from diloco_common.codec import get_codec, num_payload_bytes
from diloco_common.codec.base import BLOCK_ELEMENTS
from diloco_common.codec.change import ANCHOR, VALUES
from diloco_common.wire.manifest import Fragment, Manifest, turn

FLOAT32_BYTES = 4


class Share(NamedTuple):
    """What one process has of a fragment, in elements."""

    held: int
    """Of its own tensors: it keeps them, and pulls them."""
    owned: int
    """Of these, what it pushes."""


@dataclass(frozen=True, slots=True)
class LearnerBytes:
    """Of one process. All in bytes, but for `elements`."""

    elements: int
    """Parameters that the process holds, without companions."""
    kept: int
    """Anchors and residuals: all the time."""
    under_way: int
    """Beyond that, while contributions and versions are under way."""
    pushed: int
    """On the wire, for one contribution to every fragment, those of companions included."""
    pulled: int
    """On the wire, for one version of every fragment."""

    @property
    def peak(self) -> int:
        return self.kept + self.under_way

    @property
    def per_element(self) -> float:
        """Of the peak, for each parameter that the process holds."""
        return self.peak / self.elements


def torch_chunk(rows: int, ranks: int, rank: int) -> tuple[int, int]:
    """First of the rows that a rank holds of a tensor under `Shard(0)`, and how many: as torch.chunk cuts."""
    each = -(-rows // ranks)
    first = min(rows, each * rank)
    return first, min(rows - first, each)


def shares(manifest: Manifest, ranks: int = 1, replicas: int = 1) -> list[Share]:
    """What the fullest rank, the first, has of each fragment of the model.

    Args:
        ranks: over which the rows of each tensor are spread: all under FSDP2, 1 under DDP or of a process alone.
        replicas: that hold the same elements: all ranks under DDP, 1 under FSDP2. Under HSDP the product is all ranks.
    """
    rows = {t.name: t.shape[0] if t.shape else 1 for t in manifest.tensors}
    elements = {t.name: t.num_elements for t in manifest.tensors}

    def held(fragment: Fragment) -> int:
        found = 0
        for piece in fragment.pieces:
            _, mine = torch_chunk(rows[piece.tensor], ranks, 0)
            stop = mine * (elements[piece.tensor] // rows[piece.tensor])
            found += max(0, min(stop, piece.tensor_offset + piece.num_elements) - piece.tensor_offset)
        return found

    def share(fragment: Fragment) -> Share:
        """Ranks share out whole blocks."""
        mine = held(fragment)
        return Share(mine, min(mine, -(-mine // (replicas * BLOCK_ELEMENTS)) * BLOCK_ELEMENTS))

    return [share(fragment) for fragment in manifest.model_fragments]


def learner_bytes(
    found: Sequence[Share], *, push: str = "int8", pull: str = "bfloat16", error_feedback: bool = True,
    under_way: int = 2, companions: Sequence[Share] = (),
) -> LearnerBytes:  # fmt: skip
    """What a process with these shares of the fragments holds and moves at most.

    Args:
        companions: its shares of the fragments of companions.
        push: `sync.push`, and `pull`: `sync.pull`.
        error_feedback: `sync.error_feedback`.
        under_way: fragments whose contribution or version is under way at once; their turns follow each other. Rounds
            of P fragments begin H / P steps apart, so it is about  round trip / (H / P x time of a step), rounded up,
            and at least 1.

    Raises UnknownEncoding.
    """
    anchor = FLOAT32_BYTES if pull == "float32" else 2
    feedback = get_codec(push).residual_dtype.itemsize if error_feedback else 0
    kinds = (found, feedback), (companions, 0)

    def moving(share: Share) -> int:
        held, owned = share
        snapshot, difference = get_codec(push).progress_dtype.itemsize * held, FLOAT32_BYTES * held
        anchor_made = 0 if pull in VALUES else num_payload_bytes(ANCHOR, held)  # of a change
        return snapshot + num_payload_bytes(push, owned) + num_payload_bytes(pull, held) + anchor_made + difference

    return LearnerBytes(
        elements=sum(h for h, _ in found),
        kept=sum(anchor * h + residual * o for of, residual in kinds for h, o in of),
        under_way=sum(_most_at_once([moving(share) for share in of], under_way) for of in (found, companions)),
        pushed=sum(num_payload_bytes(push, o) for _, o in [*found, *companions]),
        pulled=sum(num_payload_bytes(pull, h) for h, _ in [*found, *companions]),
    )


def _most_at_once(sizes: Sequence[int], under_way: int) -> int:
    """The largest sum over so many fragments whose turns follow each other, round and round."""
    in_turn = sorted(range(len(sizes)), key=lambda fragment_id: turn(fragment_id, len(sizes)))
    cycle = [sizes[fragment_id] for fragment_id in in_turn]
    span = min(under_way, len(cycle))
    return max((sum((cycle + cycle)[first : first + span]) for first in range(len(cycle))), default=0)
