"""What the exit of a child means."""

from __future__ import annotations

import pytest

from diloco_deploy.run.supervisor import DEATHS_MAX, Action, Kind, verdict_on_exit


@pytest.mark.parametrize(
    ("kind", "code", "was_up", "deaths", "restart", "action", "exit_code"),
    [
        ("worker", 0, True, 1, True, Action.ENDED, 0),
        ("job", 0, False, 1, True, Action.ENDED, 0),
        # A shard never ends by itself.
        ("shard", 0, True, 1, True, Action.AGAIN, 0),
        # What was never up and says why would say the same again.
        ("shard", 4, False, 1, True, Action.FAIL, 4),
        ("worker", 2, False, 1, True, Action.FAIL, 2),
        ("worker", 1, False, 1, True, Action.FAIL, 1),
        ("worker", -9, False, 1, True, Action.AGAIN, 0),
        ("worker", -9, True, 1, True, Action.AGAIN, 0),
        ("worker", 1, True, DEATHS_MAX, True, Action.AGAIN, 0),
        ("worker", 1, True, DEATHS_MAX + 1, True, Action.FAIL, 1),
        ("worker", -9, True, DEATHS_MAX + 1, True, Action.FAIL, 1),
        ("worker", -9, True, 1, False, Action.LOST, 1),
        ("shard", -9, True, 1, False, Action.FAIL, 1),
        ("job", 3, False, 1, True, Action.FAIL, 3),
        ("job", -9, False, 1, True, Action.FAIL, 1),
    ],
)
def test_the_exit_of_a_child_is_judged(
    kind: Kind, code: int, was_up: bool, deaths: int, restart: bool, action: Action, exit_code: int
) -> None:
    verdict = verdict_on_exit(kind, code, was_up=was_up, deaths=deaths, restart=restart)
    assert (verdict.action, verdict.exit_code) == (action, exit_code)


def test_the_wait_before_a_new_start_doubles_up_to_a_bound() -> None:
    waits = [
        verdict_on_exit("worker", -9, was_up=True, deaths=deaths, restart=True).wait_s
        for deaths in range(1, DEATHS_MAX + 1)
    ]
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0]


@pytest.mark.parametrize(("code", "said"), [(-9, "died (signal 9)"), (3, "died (exit code 3)")])
def test_a_death_says_its_cause(code: int, said: str) -> None:
    assert verdict_on_exit("worker", code, was_up=True, deaths=1, restart=True).why == said


@pytest.mark.parametrize(
    ("code", "out_of_memory", "said"),
    [
        (-9, True, "died (signal 9: the machine or its container ran out of memory)"),
        (-9, False, "died (signal 9)"),
        (1, True, "died (exit code 1)"),  # somebody else was killed meanwhile
    ],
)
def test_a_death_for_lack_of_memory_says_so(code: int, out_of_memory: bool, said: str) -> None:
    """Fault 18."""
    verdict = verdict_on_exit("worker", code, was_up=True, deaths=1, restart=True, out_of_memory=out_of_memory)
    assert verdict.why == said
