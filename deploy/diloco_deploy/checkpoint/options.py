"""How `diloco export` and `diloco pull` write a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from diloco_common.options import Dtype, Flag


@Parameter(name="*")
@dataclass(frozen=True)
class Writing:
    """The options."""

    out: Annotated[Path, Parameter(metavar="OUT", help="folder, or FILE.safetensors; what is there is replaced")]
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
    partial: Annotated[Flag, Parameter(negative=(), help="leave out what has no place, or is not there")] = False
    dtype: Annotated[Dtype, Parameter(help="of the parameters")] = "float32"
