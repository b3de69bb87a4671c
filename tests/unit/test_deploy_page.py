"""docs/deploy.md: every block of commands is run by the test that follows the page, or says why not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pages import UNTESTED, blocks, followed


@pytest.fixture
def page(repository: Path) -> Path:
    return repository / "docs/deploy.md"


def test_every_block_of_the_page_is_followed(repository: Path, page: Path) -> None:
    story = (repository / "tests/e2e/test_compose.py").read_text()
    assert sorted(followed(page)) == sorted(re.findall(r'page\.follow\("(.*)"\)', story))


def test_a_block_that_is_not_run_says_why(page: Path) -> None:
    untested = blocks(page).keys() - followed(page).keys()
    assert untested
    assert all(len(name.removeprefix(UNTESTED).split()) > 2 for name in untested)


def test_getting_started_shows_commands_of_the_page(repository: Path, page: Path) -> None:
    text = (repository / "docs/getting-started.md").read_text()
    (shown,) = re.findall(r"^## In containers\n+```sh\n(.*?)^```", text, re.M | re.S)
    commands = "\n".join(followed(page).values())
    for line in shown.splitlines():
        assert line.partition("  #")[0].strip() in commands


@pytest.mark.parametrize(
    "text",
    ["```\ndocker ps\n```\n", "```sh\ndocker ps\n```\n", "  ```sh\n  docker ps\n  ```\n", "```bash up\nls\n```\n",
     "```sh up\nls\n```\n```sh up\nls\n```\n"],
    ids=["no language", "no name", "indented", "another shell", "twice"],
)  # fmt: skip
def test_a_block_that_nobody_would_run_is_found(tmp_path: Path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ValueError, match="name of its own"):
        blocks(page)


def test_a_block_that_is_no_command_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```text\nworker_1 | serving\n```\n\n```sh up\nls\n```\n")
    assert blocks(page) == {"up": "ls\n"}
