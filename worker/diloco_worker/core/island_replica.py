"""The user's model as one rank of an island has it: whole under DDP, rows of each tensor under FSDP2.

The tensors that hold the values are looked up once, when the island joins. Under FSDP2 they are the sharded ones. What
the modules show changes between them and gathered copies, and a forward pass without gradients leaves the copies of
the root module there: written values would not be seen. So the modules are resharded before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from diloco_common.errors import UnsupportedModel
from diloco_common.manifest import Fragment
from diloco_common.sizes import torch_chunk
from diloco_worker.core import names
from diloco_worker.core.island_parts import Holding, LocalFragment, Sharing, local_fragment
from diloco_worker.core.replica import Replica
from diloco_worker.core.shared_set import SharedSet

SUPPORTED = (
    "islands take DistributedDataParallel, and fully_shard (FSDP2) on a mesh of one dimension, or of two (HSDP), whose "
    "parameters are Replicate or Shard(0)"
)


class IslandReplica(Replica):
    """The shared parameters of one model, as far as this rank holds them."""

    def __init__(
        self, model: nn.Module | SharedSet, mean_merge: Collection[str] | None, rank: int, size: int,
        located: Callable[[Tensor], tuple[Holding, Sharing]],
    ) -> None:  # fmt: skip
        """`located`: what this rank holds of a DTensor. Raises UnsupportedModel."""
        chosen = model if isinstance(model, SharedSet) else SharedSet(model)
        super().__init__(chosen, mean_merge)
        self._rank, self._size = rank, size
        self._reshard = _resharding(chosen.model)
        self._holdings: dict[str, Holding] = {}
        sharings: dict[str, Sharing] = {}
        self._is_spread = any(map(is_dtensor, self._tensors.values()))
        for name, parameter in self._tensors.items():
            if is_dtensor(parameter):
                self._holdings[name], sharings[name] = located(parameter)
                with torch.no_grad():
                    local = parameter.detach().to_local()  # type: ignore[attr-defined]
                self._tensors[name] = local
                if not local.is_contiguous():
                    raise UnsupportedModel(f"this rank's rows of {name} are not contiguous; {SUPPORTED}")
            else:
                self._holdings[name], sharings[name] = Holding(0, parameter.numel()), Sharing(rank, size)
        self._hold(self._tensors)
        self._sharing = _the_same(sharings)
        self._holdings |= {name: Holding(0, b.tensor.numel()) for name, b in self._buffers.shared.items()}
        self.device = next((p.device for p in self._tensors.values() if p.numel()), self.device)

    def held(self, fragment: Fragment) -> LocalFragment:
        """Every rank has all of the buffers, and pushes its share of them."""
        sharing = Sharing(self._rank, self._size) if fragment.kind == "buffer" else self._sharing
        return local_fragment(fragment, self._holdings, sharing, self._rank, self._size)

    @property
    def num_local(self) -> int:
        """Elements that this rank holds."""
        return sum(p.numel() for p in self._tensors.values())

    @property
    def is_spread(self) -> bool:
        return self._is_spread

    def read(self, fragment: Fragment, out: Tensor) -> None:
        if isinstance(fragment, LocalFragment) and fragment.has_gaps:
            out.zero_()
        super().read(fragment, out)

    def progress(self, fragment: Fragment, anchor: Tensor, out: Tensor) -> None:
        if isinstance(fragment, LocalFragment) and fragment.has_gaps:
            out.zero_()
        super().progress(fragment, anchor, out)

    def write(self, fragment: Fragment, values: Tensor, *, trains_on: bool = False) -> None:
        self._reshard()
        super().write(fragment, values, trains_on=trains_on)

    def add(self, fragment: Fragment, difference: Tensor, steps: int = 0) -> None:
        self._reshard()
        super().add(fragment, difference, steps)

    def keep(self, also: Sequence[Tensor] = ()) -> Callable[[], None]:
        put_back = super().keep(also)

        def put_back_sharded() -> None:
            self._reshard()
            put_back()

        return put_back_sharded

    def blend(self, fragment: Fragment, values: Tensor, alpha: float) -> None:
        self._reshard()
        super().blend(fragment, values, alpha)


def is_dtensor(tensor: Tensor) -> bool:
    """By attribute: importing the type takes seconds."""
    return hasattr(tensor, "full_tensor")


def located(tensor: Any) -> tuple[Holding, Sharing]:
    """What this rank holds of a DTensor, and with how many others. Raises ValueError with what is not supported."""
    index, count = 0, 1
    rows, first, dim = tensor.shape[0] if tensor.dim() else 1, 0, 0
    sharded = 0
    for dim, placement in enumerate(tensor.placements):
        coordinate, ranks = tensor.device_mesh.get_local_rank(dim), tensor.device_mesh.size(dim)
        if placement.is_replicate():
            index, count = index * ranks + coordinate, count * ranks
        elif type(placement).__name__ == "Shard" and placement.dim == 0:
            sharded += 1
            first, rows = torch_chunk(rows, ranks, coordinate)
        else:
            raise ValueError(f"is {placement} on its device mesh")
    if sharded > 1:
        raise ValueError("is sharded over two dimensions of its device mesh")
    row = tensor.numel() // tensor.shape[0] if tensor.dim() and tensor.shape[0] else 1
    held = Holding(first * row, (first + rows) * row)
    if held.stop - held.start != tensor.to_local().numel():
        raise ValueError(f"has {tensor.to_local().numel()} elements here, not {held.stop - held.start}")
    return held, Sharing(index, count)


def _the_same(sharings: Mapping[str, Sharing]) -> Sharing:
    """Raises UnsupportedModel unless all parameters are spread over the ranks in one way."""
    (name, first), *others = sharings.items()
    for other, sharing in others:
        if sharing != first:
            raise UnsupportedModel(
                f"{name} and {other} are spread over the ranks in different ways ({first.count} and {sharing.count} "
                f"ranks hold the same values); {SUPPORTED}: put fully_shard around the whole model, without "
                "ignored_params"
            )
    return first


def _resharding(model: nn.Module) -> Callable[[], None]:
    """A call that leaves only the sharded tensors of FSDP2 in the modules."""
    sharded: list[Any] = [m for _, m in names.modules(model) if hasattr(m, "reshard") and hasattr(m, "unshard")]
    unique = list({id(m): m for m in sharded}.values())

    def reshard() -> None:
        for module in unique:
            module.reshard()

    return reshard
