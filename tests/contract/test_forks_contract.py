"""Real forks: a child lives, and it is neither the learner nor the owner of a port."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest

from diloco_common import forks
from diloco_common.errors import WrongCall
from diloco_worker.shell import process as children

FORK = """
{first}
import os, threading
from diloco_common import forks
from diloco_common.errors import ForkUnsafe
forks.refuse(True)
try:
    pid = os.fork()
except ForkUnsafe as error:
    forks.refuse(False)
    print("refused:", error)
    pid = os.fork()
else:
    print("not refused")
finally:
    if pid == 0:
        os._exit(0)
    print("forked", os.waitpid(pid, 0)[1])
"""


@pytest.mark.parametrize(
    ("first", "variable", "said"),
    [
        ("import diloco_worker, grpc", "", "not refused"),
        ("import grpc", "0", "not refused"),
        ("import grpc", "", "refused: grpc was imported before diloco_worker"),
        ("import diloco_worker, grpc", "1", "refused: GRPC_ENABLE_FORK_SUPPORT=1 is set"),
    ],
)
def test_a_fork_that_would_die_is_refused(first: str, variable: str, said: str) -> None:
    environment = os.environ | {"GRPC_ENABLE_FORK_SUPPORT": variable}
    ended = subprocess.run(
        [sys.executable, "-c", FORK.format(first=first)],
        capture_output=True, text=True, env=environment, check=False, timeout=60,
    )  # fmt: skip
    assert ended.stdout.startswith(said), ended.stderr
    assert ended.stdout.endswith("forked 0\n"), ended.stderr


def in_a_fork(call: Callable[[], None]) -> str:
    """The code that a forked child hears; "" if the call returns."""
    pid = os.fork()
    if pid == 0:
        try:
            call()
        except WrongCall:
            os._exit(3)
        finally:
            os._exit(4)
    return {3: WrongCall.code}.get(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), "")


def test_a_forked_child_neither_calls_the_learner_nor_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "_first_join", None)
    home = children.Home()
    home.check("a")
    assert home.is_here
    assert in_a_fork(lambda: home.check("a")) == "WRONG_CALL"

    assert in_a_fork(lambda: children.check_may_join("r", "b")) == ""
    children.check_may_join("r", "a")
    children.check_may_join("r", "a")
    assert in_a_fork(lambda: children.check_may_join("r", "b")) == "WRONG_CALL"


def test_a_forked_child_does_not_keep_a_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        forks.close_in_children(listening)
        held = listening.fileno()
        assert in_a_fork(lambda: _check_is_closed(held)) == "WRONG_CALL"


def _check_is_closed(held: int) -> None:
    try:
        os.fstat(held)
    except OSError:
        raise WrongCall("closed") from None
