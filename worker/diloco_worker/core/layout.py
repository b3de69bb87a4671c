"""How tensors lie in memory: runs know their elements in logical (row-major) order, whatever the strides.

A learner with `channels_last` weights and one without must agree on which element is which. So a piece of a tensor that
is not contiguous is seen as a few boxes, views with the tensor's own strides, in the order of their elements. A
contiguous tensor stays one flat view.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from diloco_common.errors import UnsupportedModel
from diloco_worker.core import names


def parts(tensor: Tensor, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
    """Views that together are the elements start to stop, each with the first of its own. One, if it is contiguous."""
    if tensor.is_contiguous():
        yield start, tensor.view(-1)[start:stop]
    elif start < stop:
        yield from _boxes(tensor, start, stop, 0)


def flat(tensor: Tensor, start: int, stop: int) -> Tensor:
    """The elements start to stop, one after the other: a view where there is one, else a copy."""
    if tensor.is_contiguous():
        return tensor.view(-1)[start:stop]
    return torch.cat([part.reshape(-1) for _, part in parts(tensor, start, stop)])


def put(tensor: Tensor, start: int, stop: int, values: Tensor) -> None:
    """The elements start to stop <- values, flat."""
    for first, part in parts(tensor, start, stop):
        part.copy_(values[first - start : first - start + part.numel()].view(part.shape))


def in_memory_order(tensor: Tensor) -> Tensor | None:
    """Its elements as they lie in memory, a flat view; None: there are gaps between them."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    if _extent(tensor) != tensor.numel() or overlaps_itself(tensor):
        return None
    return tensor.as_strided((tensor.numel(),), (1,))


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two of its elements are the same memory, as after `expand`."""
    if tensor.is_contiguous():
        return False
    dims = sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
    reach = 0
    for stride, size in dims:
        if stride <= reach:
            return True  # or nearly: strides that interleave are taken for it, and nobody has them
        reach += stride * (size - 1)
    return False


def once_each(tensor: Tensor, of: Tensor) -> Tensor:
    """What is in `tensor` in the place of the elements of `of`, without the repeats that `expand` has made in that:
    torch writes to no view with repeats."""
    if not names.has_memory(of) or 0 not in of.stride():
        return tensor
    sizes = zip(of.shape, of.stride(), strict=True)
    return tensor[tuple(slice(0, 1) if size > 1 and stride == 0 else slice(None) for size, stride in sizes)]


def refuse_overlaps(tensors: Mapping[str, Tensor], shared: Mapping[str, Tensor]) -> None:
    """Raises UnsupportedModel where a shared tensor has memory in common with another one of these.

    A version would be added twice there. Tensors that are the same elements are one, and come once (names.py).
    """
    by_storage: dict[int, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, tensor in tensors.items():
        if names.has_memory(tensor):
            by_storage[tensor.untyped_storage().data_ptr()].append((name, tensor.detach()))
    for found in by_storage.values():
        spans = sorted((_span(tensor), name, tensor) for name, tensor in found)
        for at, ((_, stop), name, tensor) in enumerate(spans):
            for (start, _), other_name, other in spans[at + 1 :]:
                if start >= stop:
                    break
                if (name in shared or other_name in shared) and _have_elements_in_common(tensor, other):
                    raise UnsupportedModel(
                        f"{name} and {other_name} share memory, but are not the same elements in the same order (a "
                        "transposed or a shifted view, for example): a version would be added there twice. Tie them as "
                        "one Parameter object, and transpose or slice it in forward()"
                    )


def refuse_several_devices(parameters: Mapping[str, Tensor]) -> None:
    """Raises UnsupportedModel."""
    of: dict[torch.device, str] = {}
    for name, parameter in parameters.items():
        if parameter.numel():
            of.setdefault(parameter.device, name)
    if len(of) > 1:
        where = ", ".join(f"{name} on {device}" for device, name in of.items())
        raise UnsupportedModel(
            f"the shared parameters are on several devices ({where}): put those that are trained on one of them, or "
            "make each of the parts a learner's model of its own"
        )


def _boxes(tensor: Tensor, start: int, stop: int, at: int) -> Iterator[tuple[int, Tensor]]:
    """`at`: the number of its first element in the whole tensor."""
    if tensor.dim() == 1:
        yield at + start, tensor[start:stop]
        return
    row = tensor.numel() // tensor.shape[0]
    first, last = -(-start // row), stop // row
    if first > last:  # inside a row
        yield from _boxes(tensor[last], start - last * row, stop - last * row, at + last * row)
        return
    if start < first * row:
        before = first - 1
        yield from _boxes(tensor[before], start - before * row, row, at + before * row)
    if first < last:
        yield at + first * row, tensor[first:last]
    if last * row < stop:
        yield from _boxes(tensor[last], 0, stop - last * row, at + last * row)


def _extent(tensor: Tensor) -> int:
    """Elements from the first to the last one in memory."""
    return 1 + sum(s * (n - 1) for s, n in zip(tensor.stride(), tensor.shape, strict=True))


def _span(tensor: Tensor) -> tuple[int, int]:
    """Its bytes in memory: from, and to."""
    start = tensor.data_ptr()
    return start, start + _extent(tensor) * tensor.element_size()


def _have_elements_in_common(one: Tensor, other: Tensor) -> bool:
    """Exactly: fused weights that lie side by side in every row have none."""
    seen = torch.zeros(one.untyped_storage().nbytes(), dtype=torch.bool)
    _bytes(seen, one).fill_(True)
    return bool(_bytes(seen, other).any())


def _bytes(seen: Tensor, tensor: Tensor) -> Tensor:
    size = tensor.element_size()
    shape: Sequence[int] = (*tensor.shape, size)
    strides = (*(s * size for s in tensor.stride()), 1)
    return seen.as_strided(shape, strides, tensor.storage_offset() * size)
