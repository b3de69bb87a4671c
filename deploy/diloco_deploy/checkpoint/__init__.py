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
            help="folder of the model, or of the adapter, that was trained, as its library saves it: what the run does "
            "not train comes from there",
        ),
    ] = None
    strip: Annotated[
        str, Parameter(metavar="PREFIX", help="write the part of what joined that is there", show_default="found")
    ] = ""
    partial: Annotated[Flag, Parameter(negative=(), help="leave out what has no place, or differs")] = False
    dtype: Annotated[Dtype, Parameter(help="of the parameters")] = "float32"

    def check(self) -> None:
        """Check the options before anything is pulled. Raises ConfigError and DataError."""
        if self.base is not None and self.out.suffix == ".safetensors":
            raise ConfigError(f"--out {self.out}: give a folder, as configuration and tokenizer come with --base")
        if self.base is not None and not self.base.is_dir():
            raise DataError(f"--base {self.base}: no such folder; give the one of the model that was trained")
