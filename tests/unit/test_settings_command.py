"""How a command ends: the exit code of every kind of error, in one line, without a traceback."""

from __future__ import annotations

from typing import Literal

import pytest

from diloco_common.command import new_app, run_app, run_command
from diloco_common.errors import CannotConnect, ConfigError, DataError, DilocoError, InUse, NotJoined


@pytest.mark.parametrize(
    ("error", "exit_code", "code"),
    [
        (ConfigError("no"), 2, "BAD_CONFIG"),
        (DataError("no"), 3, "BAD_DATA"),
        (InUse("no"), 4, "IN_USE"),
        (CannotConnect("no"), 5, "CANNOT_CONNECT"),
        (NotJoined("no"), 6, "NOT_JOINED"),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(
    error: DilocoError, exit_code: int, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> None:
        raise error

    assert run_command(command, name="diloco") == exit_code
    assert capsys.readouterr().err == f"diloco: no [{code}]\n"


def test_several_problems_are_several_lines(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        raise ConfigError("first\nsecond")

    assert run_command(command, name="diloco") == 2
    assert capsys.readouterr().err == "diloco: first\ndiloco: second [BAD_CONFIG]\n"


def test_an_interrupt_is_130(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        raise KeyboardInterrupt

    assert run_command(command, name="diloco") == 130
    assert capsys.readouterr().err == "diloco: interrupted\n"


@pytest.mark.parametrize(("returned", "exit_code"), [(None, 0), (0, 0), (3, 3)])
def test_a_command_may_choose_its_exit_code(returned: int | None, exit_code: int) -> None:
    assert run_command(lambda: returned, name="diloco") == exit_code


@pytest.mark.parametrize("error", [RuntimeError("a bug"), BrokenPipeError("of a socket, not of stdout")])
def test_a_bug_keeps_its_traceback(error: Exception) -> None:
    def command() -> None:
        raise error

    with pytest.raises(type(error)):
        run_command(command, name="diloco")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["statsu"], "there is no command statsu; did you mean status? (see diloco --help)"),
        (["--nonsense"], "there is no option --nonsense (see diloco --help)"),
        (["status", "--shard", "3"], "there is no option --shard; did you mean --shards? (see diloco status --help)"),
        (["status", "--dtype", "bfloat"], "--dtype bfloat: must be one of float32, bfloat16; did you mean bfloat16?"),
        (["status", "--shards", "x"], "--shards x: must be a whole number"),
        (["status", "--shards"], "--shards takes a value, and none is given"),
        (["status", "more"], "more: nothing is expected here"),
        (["take"], "FOLDER is missing (see diloco take --help)"),
    ],
)
def test_a_wrong_command_line_is_one_line(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    app = new_app("diloco", "")

    @app.command
    def status(*, shards: int = 2, dtype: Literal["float32", "bfloat16"] = "float32") -> None:
        raise AssertionError

    @app.command
    def take(folder: str, /) -> None:
        raise AssertionError

    assert run_app(app, argv) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"diloco: {says}")
    assert said.endswith(" [BAD_CONFIG]\n")
    assert said.count("\n") == 1
