"""Published figures come out of stated inputs."""

import pytest

from diloco_planner import published
from diloco_planner.published import GOODPUT, SCAVENGING, PublishedCell

HOURS = 240.0


@pytest.fixture(scope="module")
def cells() -> list[PublishedCell]:
    return published.goodput_table(HOURS)


def test_elastic_and_decoupled_cells_are_within_three_points(cells: list[PublishedCell]) -> None:
    found = [c for c in cells if c.way != "restart"]
    assert len(found) == 25
    assert sum(not c.is_fitted for c in found) == 20
    assert [c for c in found if abs(c.ours - c.published) > 3.0] == []


def test_restart_cells_are_within_five_points(cells: list[PublishedCell]) -> None:
    found = [c for c in cells if c.way == "restart"]
    assert len(found) == len(GOODPUT)
    assert [c for c in found if abs(c.ours - c.published) > 5.0] == []


def test_waiting_for_all_costs_goodput_and_one_contribution_does_not() -> None:
    found = published.uneven_goodput(published.uneven_tokens(hours=0.25))
    assert abs(found["K = all"] - 84) < 3
    assert min(found["K = 1"], found["K = 1, grace"]) > 99.5


@pytest.mark.parametrize("extra", SCAVENGING)
def test_scavenged_compute_shortens_the_run_as_published(extra: float) -> None:
    assert abs(published.scavenged(extra, learners=4, hours=0.5) - SCAVENGING[extra][1]) < 0.03


def test_eight_sites_need_far_less_than_data_parallel() -> None:
    _, ours, factor = published.eight_sites()
    assert ours == pytest.approx(0.84, rel=0.05)
    assert factor > 150
