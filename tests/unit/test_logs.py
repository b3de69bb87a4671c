"""One event per line, with identifiers and nothing raw from outside; and what each event counts in the metrics."""

from __future__ import annotations

import io
import logging
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from diloco_common.observe.logs import (
    EVENTS_MAX,
    WARNINGS_MAX,
    Kind,
    Log,
    Over,
    Repeats,
    configure,
    show,
)
from diloco_common.observe.metrics.shard import ShardMetrics
from diloco_common.observe.metrics.worker import WorkerMetrics
from diloco_common.wire.calls import SAY_EVERY_S

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
    says, over = repeats.heard(kind, SAY_EVERY_S)
    assert says
    assert over == [Over(kind, 500, SAY_EVERY_S)]
    assert repeats.heard(kind, SAY_EVERY_S + 1) == (True, []), "that is said once"


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


def values(registry: CollectorRegistry) -> dict[str, float]:
    """All series that are not those of the process, as `name{label=value}` -> value."""
    return {
        sample.name + "".join(f"{{{key}={value}}}" for key, value in sample.labels.items()): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name.startswith("diloco_")
    }


def test_the_age_of_a_version_grows_until_the_next_one():
    now = [100.0]
    m = WorkerMetrics(clock=lambda: now[0])
    age = "diloco_worker_version_age_seconds{fragment=3}"

    m.exchange.applied(3, 1, 0.001)
    now[0] = 130.0
    assert values(m.registry)[age] == 30

    m.exchange.applied(3, 2, 0.001)
    assert values(m.registry)[age] == 0


def test_tokens_merged_never_fall_and_begin_where_a_restored_shard_does():
    m = ShardMetrics()
    for merged in (5000, 4000, 6000):
        m.itself.tokens_merged.follow(merged)

    assert values(m.registry)["diloco_shard_tokens_merged_total"] == 6000


def test_a_learner_that_is_forgotten_leaves_no_series():
    m = ShardMetrics()
    m.learners.state("worker-1", "stalled")
    m.learners.contributions.follow_all({"asked": 5, "merged": 3}, "worker-1")
    for learner in ("worker-1", "worker-2"):
        m.learners.silent.labels(learner).set(0.1)

    m.learners.forget("worker-1")
    m.learners.forget("worker-1")

    left = [series for series in values(m.registry) if "learner=" in series]
    assert left == ["diloco_shard_learner_silent_seconds{learner=worker-2}"]


def test_every_code_of_a_rejected_contribution_has_a_series_before_its_first_event(repository: Path):
    page = (repository / "docs/errors.md").read_text(encoding="utf-8")
    rows = page.partition("<!-- explain: rejections -->\n\n")[2].partition("\n\n")[0].splitlines()
    codes = {code for row in rows for code in re.findall(r"`([A-Z_]+)`", row.partition(":")[0])}
    assert codes == {
        series.split("=")[1].rstrip("}")
        for series in values(ShardMetrics().registry)
        if series.startswith("diloco_shard_contributions_rejected_total")
    }
