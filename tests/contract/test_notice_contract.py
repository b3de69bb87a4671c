"""SIGTERM: whom the handler serves, and what becomes of the signal where no learner is left."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from diloco_worker.shell.exits import Notice


@pytest.fixture
def heard() -> Iterator[list[str]]:
    yield []
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_it_tells_the_learner_and_goes_with_it(heard: list[str]) -> None:
    notice = Notice(lambda: heard.append("once"))
    signal.raise_signal(signal.SIGTERM)
    assert heard == ["once"]
    notice.end(is_heeded=True)
    notice.end(is_heeded=True)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_that_is_there_stays(heard: list[str]) -> None:
    signal.signal(signal.SIGTERM, lambda *_: heard.append("mine"))
    notice = Notice(lambda: heard.append("ours"))
    signal.raise_signal(signal.SIGTERM)
    notice.end(is_heeded=False)
    signal.raise_signal(signal.SIGTERM)
    assert heard == ["mine", "mine"]


def test_the_next_learner_takes_the_place_of_one_that_is_gone(heard: list[str]) -> None:
    """Lightning puts the handler back that it found, after the learner has ended."""
    first = Notice(lambda: heard.append("first"))
    first.end(is_heeded=False)
    signal.signal(signal.SIGTERM, first)
    second = Notice(lambda: heard.append("second"))
    signal.raise_signal(signal.SIGTERM)
    second.end(is_heeded=True)
    assert heard == ["second"]


def test_in_another_thread_it_does_not_listen(heard: list[str]) -> None:
    thread = threading.Thread(target=lambda: Notice(lambda: heard.append("ours")))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_forked_child_ends_by_it(heard: list[str]) -> None:
    notice = Notice(lambda: heard.append("ours"))
    fork = multiprocessing.get_context("fork")
    is_up = fork.Event()
    child = fork.Process(target=lambda: (is_up.set(), threading.Event().wait()))
    child.start()
    assert is_up.wait(60)  # Python drops signals that come while a child begins
    child.terminate()
    child.join(60)
    notice.end(is_heeded=True)
    assert (child.exitcode, heard) == (-signal.SIGTERM, [])


LATE = "signal.raise_signal(signal.SIGTERM); notice.end(is_heeded=False)"
AGAIN = "handler = signal.getsignal(signal.SIGTERM); notice.end(is_heeded=True); signal.signal(signal.SIGTERM, handler)"


@pytest.mark.parametrize("what", [LATE, AGAIN + "; signal.raise_signal(signal.SIGTERM)"], ids=["late", "put back"])
def test_a_signal_for_no_learner_ends_the_process(what: str) -> None:
    """One that came while the learner closed, or to a handler that was put back later, as Lightning does."""
    begin = "import signal; from diloco_worker.shell.exits import Notice; notice = Notice(lambda: None)"
    code = f"{begin}; {what}; print('on')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, ""), ended.stderr
