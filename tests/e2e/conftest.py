"""What tests of real processes share."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mistakes import as_examples_run


@pytest.fixture
def as_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., str]]:
    """Runs a script in this process, where torch is there already, and ends it as Python does: by `sys.excepthook`.

    Gives what it has said on stderr.
    """

    def run_script(script: str, *arguments: str) -> str:
        path = tmp_path / "train.py"
        path.write_text(script)
        patch.setattr(sys, "argv", [str(path), *arguments])
        try:
            runpy.run_path(str(path), run_name="__main__")
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)
        return capsys.readouterr().err

    with as_examples_run() as patch:
        patch.chdir(tmp_path)
        yield run_script
