"""The token of a run is made once, and only its owner can read it."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco_common.settings import SecuritySettings
from diloco_common.trust.security import read_bearer_token
from diloco_deploy.cli import main
from diloco_deploy.trust.commands import make_bearer_token


def test_a_token_is_made_once_and_is_one_that_shards_take(tmp_path: Path) -> None:
    file = tmp_path / "token"
    assert main(["token", str(file)]) == 0
    made = read_bearer_token(SecuritySettings(token_file=file))
    assert file.stat().st_mode & 0o777 == 0o600
    assert main(["token", str(file)]) == 0
    assert read_bearer_token(SecuritySettings(token_file=file)) == made
    assert list(tmp_path.iterdir()) == [file]


def test_a_token_that_is_there_asks_for_no_right_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text("a-token-that-somebody-made")
    monkeypatch.setattr("os.open", None)
    assert not make_bearer_token(file)


def test_two_runs_have_different_tokens(tmp_path: Path) -> None:
    for name in ("a", "b"):
        main(["token", str(tmp_path / name)])
    assert (tmp_path / "a").read_text() != (tmp_path / "b").read_text()


def test_a_folder_that_cannot_be_written_to_is_said_in_one_line(tmp_path: Path, capsys) -> None:
    assert main(["token", str(tmp_path / "absent" / "token")]) == 2
    assert "cannot make a bearer token here: No such file or directory [BAD_CONFIG]" in capsys.readouterr().err
