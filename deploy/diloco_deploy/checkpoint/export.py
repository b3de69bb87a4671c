"""Writes the model of a checkpoint, or of data folders, under the user's own parameter names."""

from __future__ import annotations

from pathlib import Path

import torch

from diloco_deploy.checkpoint.sources import Whole
from diloco_worker.export import empty_tensors, lay_out, write_model


def export_model(whole: Whole, out: Path, dtype: str) -> None:
    """Write every parameter in its own shape as `dtype`, and every buffer as it is. Replaces any file `out`.

    Raises VersionDamaged, DataError if `out` cannot be written, and OSError.
    """
    manifest = whole.contents.manifest
    tensors = empty_tensors(manifest, getattr(torch, dtype))
    fragments = {fragment.fragment_id: fragment for fragment in manifest.exported_fragments}
    for _, stored in whole.read():
        if stored.record.fragment_id in fragments:
            lay_out(stored.values.theta, fragments[stored.record.fragment_id], tensors)
    write_model(out, tensors)
