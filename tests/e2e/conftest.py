"""Everything in this folder starts real processes."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from mistakes import EXAMPLES

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture
def as_a_script(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Runs a script in this process, where torch is there already, and ends it as Python does: by `sys.excepthook`.

    It finds the other examples. Gives what it has said on stderr.
    """
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(tmp_path)

    def run_script(script: str, *arguments: str) -> str:
        path = tmp_path / "train.py"
        path.write_text(script)
        monkeypatch.setattr(sys, "argv", [str(path), *arguments])
        try:
            runpy.run_path(str(path), run_name="__main__")
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)
        return capsys.readouterr().err

    return run_script
