"""docs/what-works.md: every line has a case of its name, every case a line, and each is what the line says.

The cases are in what_works/, a file for each table. A line that works trains, as script.py says what that is; one that
is refused raises its code.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from in_process import settings_with
from what_works.script import Ground, rest
from what_works.tables import TABLES

from diloco_common.errors import DilocoError

PAGE = Path(__file__).resolve().parents[2] / "docs/what-works.md"
BULLET = re.compile(r"- (?P<name>.+?)(: \*.+\*)?")
REFUSED = re.compile(r"- (?P<name>.+?): `(?P<code>[A-Z_]+)`\..*")


@dataclass(frozen=True)
class Line:
    """Of a table of the page."""

    table: str
    name: str
    code: str
    """With which it is refused; "" if it works."""

    def __str__(self) -> str:
        return self.name


def lines() -> list[Line]:
    """Of the sections: a bullet works, or it has the code with which it is refused."""
    found, table = [], ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            table = line.removeprefix("## ")
        elif match := (REFUSED.fullmatch(line) or BULLET.fullmatch(line)) if table else None:
            found.append(Line(table, match["name"].replace("`", ""), match.groupdict().get("code", "")))
    return found


LINES = lines()


def test_every_line_has_a_case_and_every_case_a_line() -> None:
    assert {table: sorted(line.name for line in LINES if line.table == table) for table in TABLES} == {
        table: sorted(cases) for table, cases in TABLES.items()
    }
    assert {line.table for line in LINES} == set(TABLES)


@pytest.fixture
def ground(serve, tmp_path) -> Ground:
    def start(**sync: int) -> str:
        exact = {"push": "float32", "pull": "float32", "fragments": 2, **sync}
        outer = {"average": 0.9}  # nobody who does not ask for it sees it
        shards = [serve(settings_with(sync=exact, outer=outer, shard={"index": i, "count": 2})) for i in range(2)]
        return ",".join(shard.address for shard in shards)

    yield Ground(start, tmp_path)
    rest()


@pytest.mark.parametrize("line", [line for line in LINES if not line.code], ids=str)
def test_it_works(line: Line, ground: Ground) -> None:
    TABLES[line.table][line.name](ground)


@pytest.mark.parametrize("line", [line for line in LINES if line.code], ids=str)
def test_it_is_refused(line: Line, ground: Ground) -> None:
    with pytest.raises(DilocoError) as refused:
        TABLES[line.table][line.name](ground)
    assert refused.value.code == line.code
    assert len(str(refused.value).splitlines()) <= 3
