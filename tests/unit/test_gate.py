"""tools/gate.py: what a step has come to, and the page of the last results."""

from __future__ import annotations

import pytest
from tools.gate import PAGE, STEPS, Row, judged, page_of, rows_of

PASSED = "===== 3 passed, 1 skipped in 4.20s =====\n"


@pytest.mark.parametrize(
    ("code", "output", "result"),
    [
        (0, f"bringing up nodes\n{PASSED}", ("passed", "3 passed, 1 skipped")),
        (2, "===== 1 failed, 2 passed in 61.00s (0:01:01) =====\n", ("FAILED", "1 failed, 2 passed")),
        (2, "make: NOT RUN: Ray is not installed\nmake: *** [e2e-ray] Error 2\n", ("NOT RUN", "Ray is not installed")),
        (1, f"SKIPPED [1] a.py: NOT RUN: peft is not installed\n{PASSED}", ("FAILED", "3 passed, 1 skipped")),
        (0, "", ("passed", "")),
    ],
    ids=["passed", "failed", "could not run", "a test was skipped", "says nothing"],
)
def test_a_step_is_judged_by_its_exit_code_and_what_it_says(code: int, output: str, result: tuple[str, str]) -> None:
    assert judged(code, output, STEPS["tests"][1]) == result


def test_rows_of_other_steps_stay_on_the_page() -> None:
    before = {"fuzz": Row("passed", "100000 messages, 0 findings", "60", "abc1234", "2026-11-25")}
    page = page_of({**rows_of(page_of(before)), "ray": Row("NOT RUN", "no Ray")})

    assert "| fuzz | `make fuzz` | passed | 100000 messages, 0 findings | 60 | abc1234 | 2026-11-25 |\n" in page
    assert "| ray | `make e2e-ray` | NOT RUN | no Ray |  |  |  |\n" in page
    assert page_of(rows_of(page)) == page


def test_the_page_has_a_row_of_every_step() -> None:
    assert list(rows_of(PAGE.read_text(encoding="utf-8"))) == list(STEPS)
