"""Pages of docs/: what they name exists, what they show is what tests run, and no figure was typed by hand."""

from __future__ import annotations

import ast
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import torch

from diloco_common.codec import encode_payload, encoding_names, num_payload_bytes
from diloco_common.command import main
from diloco_common.settings import SyncSettings
from pages import UNTESTED, blocks, followed

ROOT = Path(__file__).resolve().parents[2]
TESTS, DOCS = ROOT / "tests", ROOT / "docs"
sys.path.insert(0, str(ROOT / "benchmarks"))

import quality  # noqa: E402
import versus  # noqa: E402
import versus_page  # noqa: E402


def text_of(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def functions(file: Path) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in parsed(file).body if isinstance(node, ast.FunctionDef)}


PAGES = sorted(path for folder in (ROOT, DOCS) for path in folder.glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not page.parent.joinpath(link).exists()] == []


ARCHITECTURE = text_of("architecture.md")
FILES = sorted(set(re.findall(r"`((?:common|server|worker|simulator)/(?!diloco_)[\w/]+\.py)\b", ARCHITECTURE)))
NAMED = sorted(set(re.findall(r"`([\w/]+\.py): ([\w.]+)`", ARCHITECTURE)))
(PICTURE,) = re.findall(r"^```\n(LEARNER.*?)^```", ARCHITECTURE, re.M | re.S)


def source(file: str) -> Path:
    """Of a file as the page names it: server/shell/host.py."""
    part, _, path = file.partition("/")
    return ROOT / part / f"diloco_{part}" / path


def defines(body: list[ast.stmt], dotted: str) -> bool:
    """Whether a module or class has such a function, class or constant."""
    name, _, rest = dotted.partition(".")
    for node in body:
        match node:
            case ast.ClassDef(name=found) if found == name:
                return not rest or defines(node.body, rest)
            case ast.FunctionDef(name=found) | ast.AsyncFunctionDef(name=found) if found == dotted:
                return True
            case ast.Assign(targets=targets) if dotted in [getattr(target, "id", None) for target in targets]:
                return True
    return False


@pytest.mark.parametrize("file", FILES)
def test_a_file_that_the_page_names_exists(file: str) -> None:
    assert source(file).is_file()


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_name_on_the_page_is_in_its_file(file: str, name: str) -> None:
    assert defines(parsed(source(file)).body, name)


CASES = {*range(1, 15), *range(16, 21), *range(22, 26)}
PROMISES = [f"P{i}" for i in (*range(1, 8), 10, 11, 12)]
TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")
ROWS = [
    (int(case), path, test)
    for case, cell in re.findall(r"^\| (\d+) \|.*\| ([^|]+) \|$", text_of("reliability.md"), re.MULTILINE)
    for path, test in TEST.findall(cell)
]


def test_every_case_has_its_row() -> None:
    assert {case for case, _, _ in ROWS} == CASES


@pytest.mark.parametrize(("case", "path", "test"), ROWS)
def test_the_test_of_a_case_exists_and_names_it(case: int, path: str, test: str) -> None:
    found = functions(TESTS / path)
    assert test in found
    said = f"{ast.get_docstring(found[test]) or ''} {ast.get_docstring(parsed(TESTS / path)) or ''}"
    numbers = re.findall(r"(?:Faults?|reliability\.md) (\d+(?:(?:, | and )\d+)*)", said)
    assert case in {int(n) for each in numbers for n in re.findall(r"\d+", each)}


def test_every_promise_names_tests_that_exist() -> None:
    rows = re.findall(r"^\| (P\d+) \|.*\| ([^|]+) \|$", text_of("reliability.md"), re.MULTILINE)
    assert [promise for promise, _ in rows] == PROMISES
    for promise, cell in rows:
        named = TEST.findall(cell)
        assert named, promise
        assert [test for path, test in named if test not in functions(TESTS / path)] == [], promise


SOURCES = sorted(
    path
    for folder in (
        "protos",
        "common",
        "server",
        "worker",
        "simulator",
        "deploy",
        "examples",
        "tests",
        "benchmarks",
        "tools",
    )
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".proto", ".toml", ".sh", ".js", ".c", ".h") and "node_modules" not in path.parts
)
PAGE_NAMED = re.compile(r"(?<![\w./:-])((?:docs/)?[a-z][a-z0-9-]*\.md)\b")
KNOWN_PAGES = {*(path.name for path in ROOT.rglob("*.md") if ".venv" not in path.parts)}
KNOWN_PAGES |= {"results.md", "a.md", "b.md"}  # what a command writes, and what a test makes up
DECISIONS = {int(number) for number in re.findall(r"^### (\d+)\.", text_of("decisions.md"), re.MULTILINE)}


def test_what_sources_and_pages_refer_to_is_there() -> None:
    mine = Path(__file__)
    found = {
        f"{path.relative_to(ROOT)}: {what}"
        for path in (*SOURCES, *PAGES)
        if path != mine
        for what in _broken(path.read_text(encoding="utf-8", errors="replace"))
    }
    assert found == set()


def _broken(text: str) -> list[str]:
    """Pages, promises and decisions that a text names, and that there are not."""
    pages = [name for name in PAGE_NAMED.findall(text) if Path(name).name not in KNOWN_PAGES]
    promises = [promise for promise in re.findall(r"\bP(?:[1-9]|1\d)\b", text) if promise not in PROMISES]
    decisions = [named for named in re.findall(r"\b[Dd]ecision \d+", text) if int(named.split()[1]) not in DECISIONS]
    return pages + promises + decisions


def test_who_might_do_harm_is_tested() -> None:
    """Each row of the table names files of tests, in its last column."""
    table = text_of("security.md").split("## Who might do harm, and what holds")[1].split("\n\n")[1]
    rows = table.splitlines()[2:]
    assert len(rows) == 10
    for row in rows:
        named = re.findall(r"`([\w/]+\.py)`", row.split(" | ")[-1])
        assert named, row
        assert all((TESTS / path).is_file() for path in named), row


SIMULATION = re.search(r"### Promises(.*?)### Invariants(.*?)### What a loss", text_of("simulation.md"), re.S)


def test_what_the_page_says_is_checked_is_checked() -> None:
    assert SIMULATION is not None
    rows = " ".join(re.findall(r"^\| (`.*?) \|", SIMULATION[1], re.M))
    promises, invariants = set(re.findall(r"`(\w+)`", rows)), set(re.findall(r"`(\w+_\w+)`", SIMULATION[2]))
    judge = functions(ROOT / "simulator/diloco_simulator/verify/judge.py")["violations"]
    assert promises == {node.func.id for node in ast.walk(judge) if isinstance(node, ast.Call)}  # type: ignore[attr-defined]
    of_the_cluster = {"well_again_after_faults"}
    assert invariants - of_the_cluster <= functions(ROOT / "simulator/diloco_simulator/verify/invariants.py").keys()
    cluster = (ROOT / "simulator/diloco_simulator/cluster.py").read_text(encoding="utf-8")
    assert all(f'"{name}"' in cluster for name in of_the_cluster)


def test_the_page_for_home_has_the_figure_of_its_plan(capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = [text for text in blocks(DOCS / "home.md").values() if text.startswith("diloco plan")]
    assert main(shlex.split(command)[1:]) == 0
    (link,) = re.findall(r"a shard's link.*?  ([0-9.]+ Mbit/s)", capsys.readouterr().out)
    assert f"here {link}" in text_of("home.md")


def test_every_block_is_followed_or_says_why_not() -> None:
    story = (TESTS / "e2e/test_compose.py").read_text()
    page = DOCS / "deploy.md"
    assert sorted(followed(page)) == sorted(re.findall(r'page\.follow\("(.*)"\)', story))
    untested = blocks(page).keys() - followed(page).keys()
    assert untested
    assert all(len(name.removeprefix(UNTESTED).split()) > 2 for name in untested)
    assert list(followed(DOCS / "launchers.md")) == ["ray"]
    assert 'blocks(ROOT / "docs/launchers.md")["ray"]' in (TESTS / "launchers/test_ray.py").read_text()
    assert 'blocks(ROOT / "docs/operations.md")["slurm"]' in (TESTS / "launchers/test_slurm.py").read_text()


def test_a_figure_that_was_typed_is_replaced_by_the_result() -> None:
    text = quality.PAGE.read_text()
    typed = text.replace("| 1.6945 |", "| 1.0000 |")
    assert typed != text
    assert quality.rebuilt(typed) == text


def test_the_page_has_what_is_on_record() -> None:
    results = versus.read(versus.RESULTS)
    page = versus_page.PAGE.read_text()
    for text in (versus_page.table(results), versus_page.many(results), versus_page.age(results)):
        assert text in page


_, _, WAN = text_of("wan.md").partition("| encoding |")
HEADING, _, *LINES = WAN.partition("\n\n")[0].splitlines()
PARAMETERS, STEP_S = 10**9, 1.0
ROUNDED = 0.005
"""The page has three digits that count."""
TABLE = [[cell.strip() for cell in line.strip("|").split("|")] for line in LINES]
EVERY = [int(h) for h in re.findall(r"H = (\d+)", HEADING)]
ENCODINGS = [(name, row[1:]) for row in TABLE for name in re.findall(r"[a-z]+\w*", row[0].partition("(")[0])]


def test_the_table_has_every_encoding_and_names_the_defaults() -> None:
    assert sorted(name for name, _ in ENCODINGS) == sorted(encoding_names())
    marked = {row[0].partition(" ")[0]: row[0] for row in TABLE}
    assert "default of pushes" in marked[SyncSettings().push]
    assert "default of pulls" in marked[SyncSettings().pull]


@pytest.mark.parametrize(("name", "cells"), ENCODINGS, ids=[name for name, _ in ENCODINGS])
def test_rates_follow_from_the_formula_and_payloads_are_so_long(name: str, cells: list[str]) -> None:
    bits = 8 * num_payload_bytes(name, PARAMETERS) / PARAMETERS
    assert float(cells[0]) == pytest.approx(bits, rel=ROUNDED)
    for cell, every in zip(cells[1:], EVERY, strict=True):
        rate = PARAMETERS * bits / (every * STEP_S)
        gigabytes, megabits = (float(number) for number in re.findall(r"[\d.]+", cell))
        assert gigabytes == pytest.approx(rate * 3600 / 8 / 1e9, rel=ROUNDED)
        assert megabits == pytest.approx(rate / 1e6, rel=ROUNDED)
    values = torch.randn(3_000_001, generator=torch.Generator().manual_seed(0))
    payload = encode_payload(values, name)
    assert sum(len(chunk) for chunk in payload.chunks) == num_payload_bytes(name, values.numel())


EXAMPLE = Path(__file__).resolve().parents[2] / "examples/one_round.py"


def test_both_learners_are_in_the_version(capsys) -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 160
    runpy.run_path(str(EXAMPLE))["main"]()
    said = capsys.readouterr().out
    assert "participants=2" in said
    assert all(f"{name}    pulls version 1" in said for name in ("paris", "tokyo"))
