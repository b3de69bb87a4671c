"""Attacks of the table, done to a real shard beside honest learners: they fail, and nobody honest is hurt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import floods
import pytest
from attack import Attack, Needs
from scene import Scene
from table import ATTACKS

QUICK = (1, 6, 8, 16)
"""One of a kind; `make attack`, a step of the gate, judges all in the same way."""


@pytest.mark.parametrize("attack", [ATTACKS[number] for number in QUICK], ids=lambda a: f"{a.number}-{a.name}")
def test_an_attack_fails(attack: Attack, tmp_path: Path) -> None:
    assert _suffered(attack, tmp_path) == []


def test_with_certificates_no_byte_of_a_stranger_is_taken(tmp_path: Path) -> None:
    row = replace(ATTACKS[1], needs=Needs.CERTIFICATE, judge=floods.judge_unheard)
    assert _suffered(row, tmp_path) == []


def _suffered(attack: Attack, folder: Path) -> list[str]:
    with Scene(attack, folder) as scene:
        found = scene.suffer()
    print(dict(found.seen.answers), found.seen.facts, f"RSS + {found.rss_more / 2**20:.0f} MiB")
    return attack.problems(found)
