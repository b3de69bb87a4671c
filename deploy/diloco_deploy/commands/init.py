"""`diloco init`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def init(
    folder: Annotated[Path, Parameter(metavar="FOLDER", help="a new folder; its name becomes run.id")],
    /,
) -> int:
    """Make a folder to begin with: run.toml, the settings of a run with what they mean, and train.py, a training loop
    with a model of its own that joins the run. Both run as they are.
    """
    from diloco_deploy.init import make_project

    print(make_project(folder))
    return 0
