"""One event per line, with its identifiers, and nothing raw from outside."""

from __future__ import annotations

import io
import logging
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_common.observe.logs import (
    EVENTS_MAX,
    WARNINGS_MAX,
    WINDOW_S,
    Kind,
    Log,
    Over,
    Repeats,
    configure,
    show,
)

ANSI = "\x1b[31mred\x1b[0m"


@pytest.fixture
def written() -> io.StringIO:
    stream = io.StringIO()
    configure(stream=stream)
    return stream


def test_an_event_is_one_line_with_its_identifiers(written):
    Log("shard-0").event("round closed", fragment=3, version=7, participants=2)

    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d shard-0 round closed fragment=3 version=7 participants=2\n", written.getvalue()
    )


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (3, "3"),
        (0.123456, "0.1235"),
        (True, "yes"),
        (None, "-"),
        ("worker-1", "worker-1"),
        ("every live learner contributed", '"every live learner contributed"'),
        ("a=b", '"a=b"'),
        ('say "hi"', '"say \\"hi\\""'),
        (("a", "b"), "a,b"),
        ((), "-"),
        ("a\nb", "a\\nb"),
        (ANSI, "\\x1b[31mred\\x1b[0m"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("back\\slash", "back\\\\slash"),
        (["a b", "c\n"], '"a b",c\\n'),
    ],
)
def test_values_are_shown_escaped(value, shown):
    assert show(value) == shown


@given(st.text(), st.text())
def test_no_text_breaks_the_line_or_reaches_the_terminal_raw(what, value):
    stream = io.StringIO()
    configure(stream=stream)

    Log("shard-0").event(what, learner=value)

    line = stream.getvalue()
    assert line.endswith("\n")
    assert line[:-1].isprintable()


def test_a_traceback_follows_its_event_indented_and_escaped(written):
    try:
        raise ValueError(ANSI)
    except ValueError as error:
        Log("shard-0").error("unexpected", trace=error)

    first, *rest = written.getvalue().splitlines()
    assert first.endswith("shard-0 ERROR unexpected")
    assert all(line.startswith("    ") and line.isprintable() for line in rest)
    assert rest[-1] == "    ValueError: \\x1b[31mred\\x1b[0m"


def test_other_libraries_are_heard_only_when_they_warn_and_never_raw(written):
    library = logging.getLogger("some.library")
    library.info("chatter")
    library.warning("odd: %s", ANSI + "\nsecond line")

    assert written.getvalue().endswith("some.library WARNING odd: \\x1b[31mred\\x1b[0m\\nsecond line\n")
    assert "chatter" not in written.getvalue()


REFUSED: Kind = ("diloco.shard-0", logging.WARNING, "call refused", "BUSY")
JOINED: Kind = ("diloco.shard-0", logging.INFO, "joined", "")


@pytest.mark.parametrize(("kind", "most"), [(REFUSED, WARNINGS_MAX), (JOINED, EVENTS_MAX)])
def test_the_first_lines_of_a_kind_are_written_and_the_others_counted(kind: Kind, most: int) -> None:
    repeats = Repeats()
    written = [repeats.heard(kind, 0.001 * i)[0] for i in range(most + 500)]
    assert written == [True] * most + [False] * 500
    says, over = repeats.heard(kind, WINDOW_S)
    assert says
    assert over == [Over(kind, 500, WINDOW_S)]
    assert repeats.heard(kind, WINDOW_S + 1) == (True, []), "that is said once"


def test_the_log_says_how_many_lines_it_left_out() -> None:
    stream = io.StringIO()
    configure(stream=stream)
    log = Log("shard-0")
    for number in range(12_345 + WARNINGS_MAX):
        log.warning("call refused", learner=f"l{number}", code="BUSY")
    logging.getLogger().handlers[0].close()
    lines = stream.getvalue().splitlines()
    assert len(lines) <= 2 * WARNINGS_MAX + 2, "one window, or two if a slow machine takes that long"
    assert "times more in 10 s: call refused code=BUSY" in lines[-1]
    assert lines[0].endswith("shard-0 WARNING call refused learner=l0 code=BUSY")
