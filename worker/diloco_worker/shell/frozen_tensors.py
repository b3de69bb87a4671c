"""The tensors that a model keeps frozen, with their checksums: they must be equal in all learners of a run.

Learners merge what they train. A LoRA on another base, or on the same base in another dtype, fits another model, and
nobody would notice. So every learner declares these tensors, and the shards compare them:

    frozen parameters     all that are neither shared nor private (core/shared_set.py)
    frozen buffers        packed integers of quantized layers, and the buffers beside them (core/buffers.py)
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

import google_crc32c
import torch
from torch import Tensor

from diloco_common.codec import CHUNK_ELEMENTS_MAX
from diloco_common.wire.bounds import FROZEN_BYTES_MAX, FROZEN_MAX
from diloco_common.wire.messages import FrozenTensor
from diloco_worker.core.shared_set import SharedSet

FrozenRule: TypeAlias = Literal["same", "any"]
CHUNK_BYTES = 4 * CHUNK_ELEMENTS_MAX
"""A tensor is copied to the CPU and hashed in parts of this size."""


def declare(chosen: SharedSet) -> tuple[FrozenTensor, ...]:
    """The frozen tensors of a model, by name. Reads each of their bytes once, at memory speed."""
    held: dict[str, Tensor] = {**chosen.frozen, **chosen.buffers.frozen}
    is_small = sum(tensor.nbytes for tensor in held.values()) <= FROZEN_BYTES_MAX
    found = [_frozen(name, tensor, is_small) for name, tensor in sorted(held.items())]
    each = max(1, -(-len(found) // FROZEN_MAX))
    return tuple(_as_one(found[start : start + each]) for start in range(0, len(found), each))


def _frozen(name: str, tensor: Tensor, is_small: bool) -> FrozenTensor:
    form = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    is_in_parts = hasattr(tensor, "full_tensor")  # a DTensor, of which this process holds some rows
    has_bytes = tensor.layout is torch.strided and not (is_in_parts or tensor.is_meta or tensor.is_quantized)
    is_sent = is_small and has_bytes and not hasattr(tensor, "__tensor_flatten__")
    values = b"".join(_bytes(chunk).tobytes() for chunk in _chunks(tensor.detach())) if is_sent else b""
    return FrozenTensor(name, form, checksum(tensor.detach()) if has_bytes else None, values)


def values_of(frozen: FrozenTensor) -> Tensor | None:
    """The tensor, if its values were sent and its form describes one; else None."""
    dtype, _, shape = frozen.form.partition(" ")
    try:
        flat = torch.frombuffer(bytearray(frozen.values), dtype=getattr(torch, dtype))
        return flat.view(json.loads(shape))
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None


def checksum(tensor: Tensor, crc32c: int = 0) -> int:
    """CRC-32C of its bytes, row by row, continuing from `crc32c`."""
    if hasattr(tensor, "__tensor_flatten__"):  # made of other tensors, like torchao's quantized ones
        for part in tensor.__tensor_flatten__()[0]:
            crc32c = checksum(getattr(tensor, part), crc32c)
        return crc32c
    for chunk in _chunks(tensor):
        crc32c = google_crc32c.extend(crc32c, _bytes(chunk))
    return crc32c


def _bytes(chunk: Tensor) -> Any:
    whole = chunk.contiguous().cpu()
    flat = whole.as_strided((whole.numel(),), (1,))  # a single element may have any stride
    data: Any = flat.view(torch.uint8).numpy()
    data.flags.writeable = False  # google_crc32c accepts only read-only data
    return data


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    """Parts of at most CHUNK_BYTES, row by row; at most one at a time is a copy."""
    if tensor.nbytes <= CHUNK_BYTES:
        yield tensor
    elif tensor.is_contiguous():
        yield from torch.split(tensor.view(-1), CHUNK_BYTES // tensor.element_size())
    else:
        rows = max(1, CHUNK_BYTES * len(tensor) // tensor.nbytes)
        for part in torch.split(tensor, rows):
            yield from _chunks(part if part.nbytes <= CHUNK_BYTES else part[0])


def _as_one(tensors: list[FrozenTensor]) -> FrozenTensor:
    """Combine neighbors, if there are more tensors than a shard accepts."""
    if len(tensors) == 1:
        return tensors[0]
    crc32c = None
    if all(t.crc32c is not None for t in tensors):
        crc32c = google_crc32c.value(repr([(t.name, t.form, t.crc32c) for t in tensors]).encode())
    return FrozenTensor(f"{tensors[0].name} to {tensors[-1].name}", f"{len(tensors)} tensors", crc32c)
