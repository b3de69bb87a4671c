"""docs/architecture.md: every file and name on it exists, and the hops of its picture are those of its table."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
FILES = sorted(set(re.findall(r"`((?:common|server|worker|simulator)/(?!diloco_)[\w/]+\.py)\b", PAGE)))
NAMED = sorted(set(re.findall(r"`([\w/]+\.py): ([\w.]+)`", PAGE)))
PICTURE = re.search(r"^```\n( LEARNER.*?)^```", PAGE, re.M | re.S)
HOPS = re.findall(r"^\| (\d+) \| (.*?) \|", PAGE, re.M)


def source(file: str) -> Path:
    """Of a file as the page names it: server/shell/host.py."""
    part, _, path = file.partition("/")
    return ROOT / part / f"diloco_{part}" / path


def defines(body: list[ast.stmt], dotted: str) -> bool:
    """Whether a module or class has such a function, class or constant."""
    name, _, rest = dotted.partition(".")
    for node in body:
        match node:
            case ast.ClassDef():
                if node.name == name and (not rest or defines(node.body, rest)):
                    return True
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                if node.name == name and not rest:
                    return True
            case ast.Assign():
                if any(isinstance(target, ast.Name) and target.id == dotted for target in node.targets):
                    return True
    return False


@pytest.mark.parametrize("file", FILES)
def test_a_file_that_the_page_names_exists(file: str) -> None:
    assert source(file).is_file()


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_name_on_the_page_is_in_its_file(file: str, name: str) -> None:
    assert defines(ast.parse(source(file).read_text(encoding="utf-8")).body, name)


def test_the_picture_and_the_table_have_the_same_hops() -> None:
    assert PICTURE is not None
    drawn = [int(number) for number in re.findall(r"[│▶┤] +(\d+) +\w", PICTURE[1])]

    assert sorted(drawn) == [int(number) for number, _ in HOPS] == list(range(1, len(HOPS) + 1))
    assert all(re.search(r"\.py: ", where) for _, where in HOPS)


def test_the_picture_draws_as_many_hand_overs_as_the_page_counts() -> None:
    assert PICTURE is not None
    drawn = re.findall(r"(?<!\S)([a-z])(?!\S)", PICTURE[1])
    counted = re.search(r"There are (\d+) on this way", PAGE)

    assert counted is not None
    assert sorted(drawn) == [chr(ord("a") + i) for i in range(int(counted[1]))]


def test_nothing_is_left_to_fill() -> None:
    assert "TO FILL" not in PAGE
