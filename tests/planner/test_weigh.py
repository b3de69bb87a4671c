"""Which way to train, by goodput, days and money."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from diloco_common.program import main
from diloco_planner.proposed import PlannedPhase, ends

SITE = """
[[site]]
name = "{name}"
learners = {learners}
chips = {chips}
up = "{up}"
round_trip = "50ms"
memory = "80GB"
price_chip_hour = {price}
price_egress_gb = {egress}
"""
PRICES = '[prices]\ncurrency = "USD"\ndate = 2026-04-01\n'


def planned(
    folder: Path, capsys: pytest.CaptureFixture[str], *sites: dict[str, object], words: str = "", more: str = ""
) -> dict:  # type: ignore[type-arg]
    usual = {"learners": 1, "chips": 64, "up": "10Gbit", "price": 2.0, "egress": 0.1}
    text = "".join(
        SITE.format(**(usual | {"name": f"s{i}"} | site))
        + "".join(f"{key} = {json.dumps(value)}\n" for key, value in site.items() if f"{{{key}}}" not in SITE)
        for i, site in enumerate(sites)
    )
    (folder / "sites.toml").write_text(text + more + PRICES)
    main(["plan", "--params", "7e9", "--sites", str(folder / "sites.toml"), "--json", *words.split()])
    found: dict[str, Any] = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    return found


@pytest.mark.parametrize(
    ("sites", "words", "verdict"),
    [
        ([{}, {}], "", "train decoupled, on all sites"),
        ([{"up": "1000Gbit", "egress": 0}, {"up": "1000Gbit", "egress": 0}], "", "use data-parallel training instead"),
        ([{"up": "1000Gbit"}, {"up": "1000Gbit"}], "", "train decoupled, on all sites"),  # its egress is too dear
        ([{"chips": 512, "learners": 16, "price": 1.0}, {"chips": 8, "price": 40.0}], "", "one site is enough: s0"),
        ([{}, {}], "--tokens 1T --days 1", "no way is fast enough"),
        ([{"price": 1.0}, {"price": 9.0}], "--days 30", "one site is enough: s0"),
        ([{}, {"chips": 2}], "", "one site is enough: s0"),
        ([{}, {}, {"chips": 2}], "", "train decoupled, on s0 and s1"),
        ([{"chips": 2}, {"chips": 1}], "", "no machine here holds it"),
        ([{}, {"up": "10kbit", "chips": 2}, {}], "", "train decoupled, on s0 and s2"),
        ([{}, {"up": "10kbit", "price": 3.0}], "", "one site is enough: s0"),
        ([{"learners": 8, "up": "10kbit"}], "", "use data-parallel training instead"),  # inside a site no link counts
        ([{"up": "10kbit"}], "", "use data-parallel training instead"),
        ([{}, {"up": "10kbit"}], "--days 1", "no way is fast enough"),
        ([{}, {}], "--budget 100", "no way is within the budget"),
        ([{}, {"price": 40.0}], "", "train decoupled, on all sites"),
        ([{}, {"price": 40.0}], "--budget 50k", "one site is enough: s0"),
    ],
)  # fmt: skip
def test_the_verdict_follows_links_prices_and_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sites: list[dict[str, object]], words: str, verdict: str
) -> None:
    found = planned(tmp_path, capsys, *sites, words=words)
    assert found["verdict"] == verdict
    assert found["because"]
    assert found["settings"]["sync"]["sync_every"] >= 12


@pytest.mark.parametrize(
    ("sites", "works", "reason"),
    [
        (
            [{}, {}, {"up": "300Mbit", "step_time": "10s"}],
            True,
            "; s2 is left out, as the link of s2 (300 Mbit/s up, 3",
        ),
        ([{}, {}, {"chips": 2}], True, "; s2 cannot hold it: a learner there has 2 chips of 80.0 GB, and needs 3"),
        ([{"chips": 2}, {"chips": 1}], False, "s0 is nearest: a learner there has 2 chips of 80.0 GB, and needs 3"),
        ([{}, {"up": "10kbit"}], True, "; not decoupled, as the link of s1 (10.0 kbit/s up, 10.0 kbit/s down, 50 m"),
        ([{}, {}, {"up": "100Mbit"}], True, "; s2 is left out, as the link of s2 (100 Mbit/s up, 100 Mbit/s down, 50"),
    ],
)
def test_what_is_left_out_has_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sites: list[dict[str, object]], works: bool, reason: str
) -> None:
    found = planned(tmp_path, capsys, *sites)
    assert reason in found["because"]
    assert found["works"] is works
    assert not any("s2" in way["name"] and not way["name"].startswith("only") for way in found["ways"])


def test_bytes_between_clouds_cost_money(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(tmp_path, capsys, {}, {}, words="--tokens 100B")
    ours = found["ways"][0]
    assert ours["goodput"] > 0.9
    gb = 7e9 * (4.125 + 8.125) / 12 / 8e9 * ours["days"] * 86_400  # one learner, both ways
    assert ours["egress"] == pytest.approx(0.1 * gb, rel=0.01)
    assert "spread it over" in found["memory"][0]


def test_a_slow_site_takes_the_versions_of_the_fastest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(tmp_path, capsys, {}, {"step_time": "4s"}, words="--tokens 100B")
    ours = found["ways"][0]
    gb = 7e9 * (4.125 / 4 + 8.125) / 12 / 8e9 * ours["days"] * 86_400
    assert ours["egress"] == pytest.approx(0.1 * gb, rel=0.01)


@pytest.mark.parametrize(("text", "count"), [("", 8), ("count = 4\n", 4)])
def test_every_shard_costs_its_price(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, count: int) -> None:
    free = planned(tmp_path, capsys, {}, {}, more='[shards]\nmerge = "500MB"\n' + text)
    paid = planned(tmp_path, capsys, {}, {}, more='[shards]\nmerge = "500MB"\nprice_hour = 10.0\n' + text)
    assert paid["settings"]["shard"]["count"] == count
    before, after = free["ways"][0], paid["ways"][0]
    assert after["money"] - before["money"] == pytest.approx(10 * count * 24 * after["days"])


@pytest.mark.parametrize(
    ("sites", "more", "verdict", "reason"),
    [
        ([{}, {}], "[shards]\ncount = 1\n", "train decoupled, on all sites", "data-parallel training over these"),
        ([{}, {}], '[shards]\nmerge = "10kbit"\n', "one site is enough: s0", "not decoupled, as it would ask for H = "),
        ([{"elastic": False}] * 2, '[failures]\nmtbi = "30d"\n', "train decoupled, on all sites", "data-parallel"),
        ([{}, {"begins": "300d"}], "", "one site is enough: s0", "s1 comes after 300.0 days, when all is trained"),
        ([{}, {"begins": "1d"}], "", "train decoupled, on all sites", "data-parallel training over these"),
        ([{}, {"preempt_every": "1m", "preempt_for": "1y"}], "", "one site is enough: s0", "it needs 11.6 days"),
    ],
)  # fmt: skip
def test_shards_and_sites_that_do_not_help(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sites: list[dict[str, object]], more: str, verdict: str,
    reason: str,
) -> None:  # fmt: skip
    found = planned(tmp_path, capsys, *sites, more=more)
    assert found["verdict"] == verdict
    assert reason in found["because"]
    assert found["is_ours"] is verdict.startswith("train")


@pytest.mark.parametrize(
    ("phases", "seconds", "egress"),
    [
        ([PlannedPhase(0.0, 10.0, 1.0)], 10.0, 10.0),
        ([PlannedPhase(0.0, 10.0), PlannedPhase(5.0, 20.0, 2.0)], 7.5, 5.0),
        ([PlannedPhase(0.0, 10.0), PlannedPhase(50.0, 20.0, 2.0)], 10.0, 0.0),
        ([PlannedPhase(3.0, 10.0, 1.0)], 13.0, 10.0),
        ([PlannedPhase(0.0, 0.0)], math.inf, 0.0),
    ],
)
def test_who_comes_later_helps_and_costs_from_then_on(
    phases: list[PlannedPhase], seconds: float, egress: float
) -> None:
    assert ends(100, phases) == (seconds, egress)


def test_no_way_works_where_machines_are_gone_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = '[failures]\npreempt_every = "1m"\npreempt_for = "1y"\n'
    assert planned(tmp_path, capsys, {}, {}, more=gone)["verdict"] == "no way works"
