"""What a file of sites says, and what is said of a wrong one."""

from __future__ import annotations

import math
import re
from pathlib import Path

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
