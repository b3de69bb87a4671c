"""Elements of tensors in logical (row-major) order, whatever the strides.

A learner with `channels_last` weights and one without must agree on the order of elements. So a piece of a tensor that
is not contiguous is seen as a few boxes: views with the tensor's own strides, in the order of their elements. A
contiguous tensor is one flat view.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from diloco_common.errors import UnsupportedModel
from diloco_worker.core import names


def parts(tensor: Tensor, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
    """Views that cover the elements start to stop, each with the index of its first one. One view if contiguous."""
    if tensor.is_contiguous():
        yield start, tensor.view(-1)[start:stop]
    elif start < stop:
        yield from _boxes(tensor, start, stop, 0)


def flat(tensor: Tensor, start: int, stop: int) -> Tensor:
    """The elements start to stop as a flat tensor: a view if possible, else a copy."""
    if tensor.is_contiguous():
        return tensor.view(-1)[start:stop]
    return torch.cat([part.reshape(-1) for _, part in parts(tensor, start, stop)])


def put(tensor: Tensor, start: int, stop: int, values: Tensor) -> None:
    for first, part in parts(tensor, start, stop):
        part.copy_(values[first - start : first - start + part.numel()].view(part.shape))


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two of its elements share memory, as after `expand`."""
    if tensor.is_contiguous():
        return False
    dims = sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
    reach = 0
    for stride, size in dims:
        if stride <= reach:
            return True  # or they are interleaved, which nobody uses
        reach += stride * (size - 1)
    return False


def once_each(tensor: Tensor, of: Tensor) -> Tensor:
    """`tensor` without the elements that `expand` repeats in `of`: torch writes to no view with repeats."""
    if not names.has_memory(of) or 0 not in of.stride():
        return tensor
    sizes = zip(of.shape, of.stride(), strict=True)
    return tensor[tuple(slice(0, 1) if size > 1 and stride == 0 else slice(None) for size, stride in sizes)]


def refuse_overlaps(tensors: Mapping[str, Tensor], shared: Mapping[str, Tensor]) -> None:
    """Raises UnsupportedModel if a shared tensor overlaps another in memory: a version would be added twice there.

    Tensors with exactly the same elements count as one and appear once (names.py).
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
    """`at`: index of its first element in the whole tensor."""
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
    return 1 + sum(s * (n - 1) for s, n in zip(tensor.stride(), tensor.shape, strict=True))


def _span(tensor: Tensor) -> tuple[int, int]:
    """Its first byte in memory, and the one after its last."""
    start = tensor.data_ptr()
    return start, start + _extent(tensor) * tensor.element_size()


def _have_elements_in_common(one: Tensor, other: Tensor) -> bool:
    """Exact: fused weights that lie side by side in each row have none in common."""
    seen = torch.zeros(one.untyped_storage().nbytes(), dtype=torch.bool)
    _bytes(seen, one).fill_(True)
    return bool(_bytes(seen, other).any())


def _bytes(seen: Tensor, tensor: Tensor) -> Tensor:
    size = tensor.element_size()
    shape: Sequence[int] = (*tensor.shape, size)
    strides = (*(s * size for s in tensor.stride()), 1)
    return seen.as_strided(shape, strides, tensor.storage_offset() * size)
