"""Lines that come too often are counted: by a table of times."""

from __future__ import annotations

import io
import logging

import pytest

from diloco_common.observe.logs import (
    EVENTS_MAX,
    WARNINGS_MAX,
    WINDOW_S,
    Kind,
    Log,
    Over,
    Repeats,
    configure,
)

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
