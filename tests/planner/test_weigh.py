"""Which way to train, by goodput, days and money."""

import json
from pathlib import Path
from typing import Any

import pytest

from diloco_common.command import main

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
        ([{"chips": 512, "learners": 64, "price": 1.0}, {"chips": 8, "price": 40.0}], "", "one site is enough: s0"),
        ([{}, {}], "--tokens 1T --days 1", "no way is fast enough"),
        ([{"price": 1.0}, {"price": 9.0}], "--days 30", "one site is enough: s0"),
        ([{}, {"chips": 2}], "", "one site is enough: s0"),
        ([{}, {}, {"chips": 2}], "", "train decoupled, on s0 and s1"),
        ([{"chips": 2}, {"chips": 1}], "", "no machine here holds it"),
        ([{}, {"up": "10kbit", "chips": 2}, {}], "", "train decoupled, on s0 and s2"),
        ([{}, {}, {"up": "1Gbit", "learners": 16}], "", "train decoupled, on all sites"),  # s2 does most
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


def test_no_way_works_where_machines_are_gone_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = '[failures]\npreempt_every = "1m"\npreempt_for = "1y"\n'
    assert planned(tmp_path, capsys, {}, {}, more=gone)["verdict"] == "no way works"
