"""Writes the model as one file, with the user's own parameter names. Plain torch and safetensors can load it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from diloco_common.errors import DataError
from diloco_common.manifest import Fragment


def lay_out(values: Tensor, fragment: Fragment, tensors: Mapping[str, Tensor]) -> None:
    """Copy a fragment's values [num_elements] into the tensors of its pieces, in the dtype of the tensors."""
    for piece in fragment.pieces:
        tensors[piece.tensor].view(-1)[piece.tensor_bounds] = values[piece.bounds]


def write_model(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file, whole or not at all. Replaces any file of that name. Equal tensors give equal bytes.

    Raises DataError.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        temporary.touch()
        mode = temporary.stat().st_mode & 0o777  # as the umask says: a model that is exported is for others, too
        save_file(tensors, temporary, metadata={"format": "pt"})  # with more keys, their order would vary
        temporary.chmod(mode)  # safetensors (0.8) makes a file that only its owner can read
        descriptor = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(path)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}") from None
