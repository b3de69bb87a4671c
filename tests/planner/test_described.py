"""What a file of sites says, what is said of a wrong one, and which way to train by goodput, days and money."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from diloco_common.command import main
from diloco_common.errors import ConfigError
from diloco_planner.chips import Island
from diloco_planner.described import read
from diloco_planner.plans import LearnerPlan

GOOD = """\
[[site]]
name = "a"
learners = 2
up = "5Gbit"
down = "10Gbit"
round_trip = "30ms"
price_chip_hour = 2.0
price_egress_gb = 0.05

[[site]]
name = "b"
chips = 1000
step_time = "1.5s"
price_chip_hour = 3.0
price_egress_gb = 0.1

[failures]
preset = "fleet"
mtbi = "3.4y"

[shards]
count = 2
site = "a"
price_hour = 1.0

[prices]
currency = "USD"
date = 2026-05-01
"""


def test_a_file_gives_a_plan_for_each_learner(tmp_path: Path) -> None:
    (tmp_path / "sites.toml").write_text(GOOD)
    described = read(tmp_path / "sites.toml")
    plans = described.learners(LearnerPlan("", Island(1), described.failures()), 3000, 9)
    assert [p.name for p in plans] == ["a-0", "a-1", "b-0"]
    assert [p.island.chips for p in plans] == [1000, 1000, 1000]
    assert (plans[0].link.up, plans[0].link.down, plans[2].step_s) == (5e9, 10e9, 1.5)
    assert plans[0].to_shards.up == math.inf, "they are there"
    assert plans[0].failures.mtbi_s == pytest.approx(3.4 * 365.25 * 86_400)
    assert [described.chips_hour(plan) for plan in plans] == [2000, 2000, 3000]
    assert [described.per_gb(plan) for plan in plans] == [
        (0.0, 0.0),
        (0.0, 0.0),
        (0.1, 0.05),
    ]  # b is not where they are


ONE = '[[site]]\nname = "a"\nchips = 64\nstep_time = "2s"\n'


LINKED = ONE + 'up = "1Gbit"\nround_trip = "9ms"\ntokens_per_step = "2M"\n'
SHARDS = '[shards]\ncount = 3\ndisk = "1GB"\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (ONE + 'steptime = "2s"', "site 1: there is no key steptime; write one of"),
        (ONE + ONE, "site 2: there is a site a above; give it another name"),
        (ONE + 'up = "fast"', "site 1: up is 'fast'; write a rate"),
        (ONE + "price_chip_hour = 2", "prices: they have no date"),
        ("[shard]", "shard: there is no such section; write one of site, failures, shards, prices"),
        ("name = 1 2", "this is no TOML"),
    ],
)
def test_a_wrong_file_is_said_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "sites.toml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path / 'sites.toml'}: {said}")):
        read(tmp_path / "sites.toml")


@pytest.mark.parametrize(
    ("file", "words", "said"),
    [
        (LINKED, "--learners 2", "--learners would change nothing: {file} has learners for every site"),
        (LINKED, "--up 1Gbit", "--up would change nothing: {file} has up for every site"),
        (LINKED, "--round-trip 0s", "--round-trip would change nothing: {file} has round_trip for every site"),
        (SHARDS, "--shards 2", "--shards would change nothing: {file} has count for the shards; leave out --shards"),
        (None, "--tokens 1T", "--tokens would change nothing: without --sites FILE.toml no ways to train are weighed"),
        (ONE, "--days 0", "--days 0: must be days, above 0"),
        (ONE, "--days nan", "--days nan: must be days, above 0"),
    ],
)
def test_plan_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str | None, words: str, said: str
) -> None:
    path = tmp_path / "sites.toml"
    path.write_text(file or "")
    assert main(["plan", "--params", "1B", *words.split(), *([] if file is None else ["--sites", str(path)])]) == 2
    assert said.format(file=path) in capsys.readouterr().err


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
