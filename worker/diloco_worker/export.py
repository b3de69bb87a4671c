"""The model as one file that plain torch and safetensors load, under the user's own parameter names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from diloco_common.errors import DataError
from diloco_common.manifest import Fragment


def lay_out(values: Tensor, fragment: Fragment, tensors: Mapping[str, Tensor]) -> None:
    """Lay a fragment's values [num_elements] into the tensors that its pieces are of, in their dtype."""
    for piece in fragment.pieces:
        flat = tensors[piece.tensor].view(-1)
        flat[piece.tensor_offset : piece.tensor_offset + piece.num_elements] = values[
            piece.offset : piece.offset + piece.num_elements
        ]


def write_model(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file in place of any of that name; whole or not at all. Equal tensors give equal bytes.

    Raises DataError.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, temporary, metadata={"format": "pt"})  # more keys would come in any order
        descriptor = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(path)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}") from None
