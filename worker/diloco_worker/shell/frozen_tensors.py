"""What a learner's model holds fixed, with a checksum of each tensor: it must be the same in all learners of a run.

Learners merge what they train. A LoRA on another base, or on the same base in another dtype, is trained for another
model, and nobody would notice. So every learner declares, and the shards compare:

    frozen parameters     all that are neither shared nor private (core/shared_set.py)
    frozen buffers        the packed integers of quantised layers, and what lies beside them (core/buffers.py)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

import google_crc32c
import torch
from torch import Tensor

from diloco_common.wire.bounds import FROZEN_MAX
from diloco_common.wire.messages import FrozenTensor
from diloco_worker.core.shared_set import SharedSet

FrozenRule: TypeAlias = Literal["same", "any"]
CHUNK_BYTES = 2**24
"""A tensor is brought to the CPU, and hashed, in parts of this size."""


def declare(chosen: SharedSet) -> tuple[FrozenTensor, ...]:
    """The frozen tensors of a model by name. Reads each of their bytes once, at the speed of memory."""
    found = [_frozen(name, tensor) for name, tensor in sorted({**chosen.frozen, **chosen.buffers.frozen}.items())]
    each = max(1, -(-len(found) // FROZEN_MAX))
    return tuple(_as_one(found[start : start + each]) for start in range(0, len(found), each))


def _frozen(name: str, tensor: Tensor) -> FrozenTensor:
    form = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    is_in_parts = hasattr(tensor, "full_tensor")  # a DTensor: this process holds some of its rows
    has_bytes = tensor.layout is torch.strided and not (is_in_parts or tensor.is_meta or tensor.is_quantized)
    return FrozenTensor(name, form, checksum(tensor.detach()) if has_bytes else None)


def checksum(tensor: Tensor, crc32c: int = 0) -> int:
    """CRC-32C of its bytes, row by row, after others with this one."""
    if hasattr(tensor, "__tensor_flatten__"):  # made of other tensors, as the quantised ones of torchao
        for part in tensor.__tensor_flatten__()[0]:
            crc32c = checksum(getattr(tensor, part), crc32c)
        return crc32c
    for chunk in _chunks(tensor):
        whole = chunk.contiguous().cpu()
        flat = whole.as_strided((whole.numel(),), (1,))  # the stride of a single element may be anything, elsewhere
        data: Any = flat.view(torch.uint8).numpy()
        data.flags.writeable = False  # google_crc32c takes nothing else
        crc32c = google_crc32c.extend(crc32c, data)
    return crc32c


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    """Parts of at most CHUNK_BYTES, row by row; no more than one is ever a copy."""
    if tensor.nbytes <= CHUNK_BYTES:
        yield tensor
    elif tensor.is_contiguous():
        yield from torch.split(tensor.view(-1), CHUNK_BYTES // tensor.element_size())
    else:
        rows = max(1, CHUNK_BYTES * len(tensor) // tensor.nbytes)
        for part in torch.split(tensor, rows):
            yield from _chunks(part if part.nbytes <= CHUNK_BYTES else part[0])


def _as_one(tensors: list[FrozenTensor]) -> FrozenTensor:
    """Neighbours, where there are more than a shard takes."""
    if len(tensors) == 1:
        return tensors[0]
    crc32c = None
    if all(t.crc32c is not None for t in tensors):
        crc32c = google_crc32c.value(repr([(t.name, t.form, t.crc32c) for t in tensors]).encode())
    return FrozenTensor(f"{tensors[0].name} to {tensors[-1].name}", f"{len(tensors)} tensors", crc32c)
