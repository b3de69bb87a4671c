"""The arithmetic of docs/wan.md is that of the real encodings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from diloco_common.codec import encode_payload, encoding_names, num_payload_bytes
from diloco_common.settings import SyncSettings

PAGE = (Path(__file__).resolve().parents[2] / "docs/wan.md").read_text(encoding="utf-8")
PARAMETERS, STEP_S = 10**9, 1.0
ROUNDED = 0.005
"""The page has three digits that count."""
TABLE = [[cell.strip() for cell in line.strip("|").split("|")]
         for line in PAGE.partition("| encoding |")[2].partition("\n\n")[0].splitlines()[2:]]  # fmt: skip
EVERY = [int(h) for h in re.findall(r"H = (\d+)", PAGE.partition("| encoding |")[2].partition("\n")[0])]
ROWS = [(name, row[1:]) for row in TABLE for name in re.findall(r"[a-z]+\w*", row[0].partition("(")[0])]


def test_the_table_has_every_encoding() -> None:
    assert sorted(name for name, _ in ROWS) == sorted(encoding_names())


@pytest.mark.parametrize(("name", "cells"), ROWS, ids=[name for name, _ in ROWS])
def test_rates_follow_from_the_formula(name: str, cells: list[str]) -> None:
    bits = 8 * num_payload_bytes(name, PARAMETERS) / PARAMETERS
    assert float(cells[0]) == pytest.approx(bits, rel=ROUNDED)
    for cell, every in zip(cells[1:], EVERY, strict=True):
        rate = PARAMETERS * bits / (every * STEP_S)
        gigabytes, megabits = (float(number) for number in re.findall(r"[\d.]+", cell))
        assert gigabytes == pytest.approx(rate * 3600 / 8 / 1e9, rel=ROUNDED)
        assert megabits == pytest.approx(rate / 1e6, rel=ROUNDED)


@pytest.mark.parametrize("name", [name for name, _ in ROWS])
def test_payloads_are_as_long_as_the_arithmetic_says(name: str) -> None:
    values = torch.randn(3_000_001, generator=torch.Generator().manual_seed(0))
    payload = encode_payload(values, name)
    assert sum(len(chunk) for chunk in payload.chunks) == num_payload_bytes(name, values.numel())


def test_the_page_names_the_defaults() -> None:
    marked = {row[0].partition(" ")[0]: row[0] for row in TABLE}
    assert "default of pushes" in marked[SyncSettings().push]
    assert "default of pulls" in marked[SyncSettings().pull]
