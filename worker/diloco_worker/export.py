"""Writes the model as one file, with the user's own parameter names. Plain torch and safetensors can load it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from diloco_common.errors import DataError
from diloco_common.wire.manifest import Fragment, Manifest


def empty_tensors(manifest: Manifest, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Empty tensors for all values in a file of the model: parameters as `dtype`, buffers in the model's dtype."""
    return {
        spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype) if spec.kind == "buffer" else dtype)
        for spec in manifest.exported
    }


def lay_out(values: Tensor, fragment: Fragment, tensors: Mapping[str, Tensor]) -> None:
    """Copy a fragment's values [num_elements] into the tensors of its pieces, in the dtype of the tensors."""
    for piece in fragment.pieces:
        target, some = tensors[piece.tensor].view(-1), values[piece.bounds]
        target[piece.tensor_bounds] = some if target.is_floating_point() else some.round().to(target.dtype)


def write_model(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file atomically, replacing an existing one. Equal tensors give equal bytes.
    Raises DataError."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        temporary.touch()
        mode = temporary.stat().st_mode & 0o777  # as the umask says: others may read an exported model
        save_file(tensors, temporary, metadata={"format": "pt"})  # the order of several keys would vary
        temporary.chmod(mode)  # safetensors (0.8) writes a file that only its owner can read
        descriptor = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(path)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}") from None
