"""Errors of ours in one line, while there is a learner."""

from __future__ import annotations

import sys

import pytest

from diloco_worker.shell.exits import say_as_before, say_in_one_line


def test_whoever_said_errors_before_says_them_after_a_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", before := sys.__excepthook__)
    say_in_one_line()
    ours = sys.excepthook
    say_in_one_line()
    assert sys.excepthook is ours is not before, "once"
    say_as_before()
    assert sys.excepthook is before
    say_as_before()
    assert sys.excepthook is before
