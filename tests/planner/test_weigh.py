"""Which way to train, by goodput, days and money."""

import json
from pathlib import Path

import pytest

from diloco_deploy.cli import main

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


def planned(folder: Path, capsys: pytest.CaptureFixture[str], *sites: dict[str, object], words: str = "") -> dict:  # type: ignore[type-arg]
    usual = {"learners": 1, "chips": 64, "up": "10Gbit", "price": 2.0, "egress": 0.1}
    text = "".join(SITE.format(**(usual | {"name": f"s{i}"} | site)) for i, site in enumerate(sites))
    (folder / "sites.toml").write_text(text + PRICES)
    main(["plan", "--params", "7e9", "--sites", str(folder / "sites.toml"), "--json", *words.split()])
    found: dict = json.loads(capsys.readouterr().out)  # type: ignore[type-arg]
    return found


@pytest.mark.parametrize(
    ("sites", "words", "verdict"),
    [
        ([{}, {}], "", "train decoupled, on all sites"),
        ([{"up": "1000Gbit"}, {"up": "1000Gbit"}], "", "use data-parallel training instead"),
        ([{"chips": 512, "learners": 16, "price": 1.0}, {"chips": 8, "price": 40.0}], "", "one site is enough: s0"),
        ([{}, {}], "--tokens 1T --days 1", "no way is fast enough"),
        ([{"price": 1.0}, {"price": 9.0}], "--days 30", "one site is enough: s0"),
    ],
)  # fmt: skip
def test_the_verdict_follows_links_prices_and_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sites: list[dict[str, object]], words: str, verdict: str
) -> None:
    found = planned(tmp_path, capsys, *sites, words=words)
    assert found["verdict"] == verdict
    assert found["because"]
    assert found["settings"]["sync"]["sync_every"] >= 24


def test_bytes_between_clouds_cost_money_and_memory_is_weighed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned(tmp_path, capsys, {}, {"chips": 2}, words="--tokens 100B")
    ours = found["ways"][0]
    assert ours["goodput"] > 0.9
    gb = 7e9 * (8.125 + 16) / 24 / 8e9 * ours["days"] * 86_400  # one learner, both ways
    assert ours["egress"] == pytest.approx(0.1 * gb, rel=0.01)
    assert "too little" in found["memory"][1]
    assert "spread it over" in found["memory"][0]
