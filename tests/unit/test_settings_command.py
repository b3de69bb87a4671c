"""How a command ends: the exit code of every kind of error, in one line, without a traceback."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from diloco_common.command import run_command
from diloco_common.errors import CannotConnect, ConfigError, DataError, InUse, NotJoined


def failing(error: BaseException) -> Callable[[], None]:
    def command() -> None:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "exit_code", "says"),
    [
        (ConfigError("first\nsecond"), 2, "diloco: first\ndiloco: second [BAD_CONFIG]\n"),
        (DataError("no"), 3, "diloco: no [BAD_DATA]\n"),
        (InUse("no"), 4, "diloco: no [IN_USE]\n"),
        (CannotConnect("no"), 5, "diloco: no [CANNOT_CONNECT]\n"),
        (NotJoined("no"), 6, "diloco: no [NOT_JOINED]\n"),
        (KeyboardInterrupt(), 130, "diloco: interrupted\n"),
    ],
)
def test_an_error_is_one_line_for_each_problem_and_an_exit_code(
    error: BaseException, exit_code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(failing(error), name="diloco") == exit_code
    assert capsys.readouterr().err == says


@pytest.mark.parametrize(("returned", "exit_code"), [(None, 0), (0, 0), (3, 3)])
def test_a_command_may_choose_its_exit_code(returned: int | None, exit_code: int) -> None:
    assert run_command(lambda: returned, name="diloco") == exit_code


@pytest.mark.parametrize("error", [RuntimeError("a bug"), BrokenPipeError("of a socket, not of stdout")])
def test_a_bug_keeps_its_traceback(error: Exception) -> None:
    with pytest.raises(type(error)):
        run_command(failing(error), name="diloco")
