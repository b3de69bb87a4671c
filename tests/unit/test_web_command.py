"""What `diloco web` refuses before it serves anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco_deploy.cli import main


@pytest.mark.parametrize("command", ["web", "status"])
def test_a_folder_that_does_not_exist_is_refused_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    nowhere = tmp_path / "nowhere"
    assert main([command, "--folder", str(nowhere)]) == 5
    said = capsys.readouterr().err
    assert f"no cluster is running in {nowhere}" in said
    assert said.endswith("[CANNOT_CONNECT]\n")
