"""Checkpoints, exports, `diloco pull`; here, how `export` and `pull` write a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from diloco_common.errors import ConfigError, DataError
from diloco_common.options import Dtype, Flag


@Parameter(name="*")
@dataclass(frozen=True)
class Writing:
    out: Annotated[Path, Parameter(metavar="OUT", help="folder, or FILE.safetensors; replaces what is there")]
    base: Annotated[
        Path | None,
        Parameter(
            metavar="DIR",
            help="folder of the model, or of the adapter, that was trained, as its library saves it: tensors "
            "that the run does not train come from there",
        ),
    ] = None
    strip: Annotated[
        str, Parameter(metavar="PREFIX", help="write only the part with this prefix", show_default="found")
    ] = ""
    partial: Annotated[Flag, Parameter(negative=(), help="leave out tensors that have no place or differ")] = False
    dtype: Annotated[Dtype, Parameter(help="dtype of the parameters")] = "float32"

    def check(self) -> None:
        """Check the options before anything is pulled. Raises ConfigError and DataError."""
        if self.base is not None and self.out.suffix == ".safetensors":
            raise ConfigError(f"--out {self.out}: give a folder: --base adds configuration and tokenizer")
        if self.base is not None and not self.base.is_dir():
            raise DataError(f"--base {self.base}: no such folder; give the folder of the model that was trained")
