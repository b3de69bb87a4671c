"""The pages of the repository as pages of a site: words are explained, links lead to what the site has."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools import site_pages, site_settings

from diloco_common.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
TABLE = """
## Words

| word | meaning |
| --- | --- |
| learner | one **replica** ([islands](islands.md)) |
| quorum K, grace window | how many; how long, then |
| anchor, base | the values; as they came; kept |
"""


def test_a_row_with_as_many_meanings_as_words_gives_each_its_own() -> None:
    assert site_pages.glossary(TABLE) == {
        "learner": "one replica",
        "quorum": "how many",
        "grace window": "how long, then",
        "anchor": "the values; as they came; kept",
        "base": "the values; as they came; kept",
    }


def test_the_words_of_the_product_are_explained() -> None:
    words = site_pages.glossary((ROOT / "docs/concepts.md").read_text(encoding="utf-8"))
    assert words.keys() >= {"learner", "worker", "shard", "fragment", "round", "quorum", "version", "lease", "carry"}
    assert words.keys() >= site_pages.EVERYDAY


def test_a_word_is_marked_once_a_section_and_never_in_headings_and_links() -> None:
    word = '<abbr title="one server">shard</abbr>'
    page = f"<h1>{word}</h1><p>{word} {word} <a href='x'>{word}</a></p><h2>{word}</h2><p>{word}</p>"
    assert site_pages.once_a_section(page) == (
        f"<h1>shard</h1><p>{word} shard <a href='x'>shard</a></p><h2>shard</h2><p>{word}</p>"
    )


@pytest.mark.parametrize(
    ("page", "link", "shown"),
    [
        ("docs/a.md", "b.md#here", "b.md#here"),
        ("docs/a.md", "../examples/own_loop.py", "files/examples/own_loop.py.md"),
        ("docs/a.md", "../examples", "files/examples/index.md"),
        ("docs/a.md", "../README.md", "index.md"),
        ("docs/a.md", "../SECURITY.md", "project/SECURITY.md"),
        ("docs/a.md", "../gone.py", "../gone.py"),
        ("docs/a.md", "https://example.org/x", "https://example.org/x"),
        ("CHANGELOG.md", "docs/wan.md#bytes", "../wan.md#bytes"),
        ("CHANGELOG.md", "examples/own_loop.py", "../files/examples/own_loop.py.md"),
    ],
)
def test_links_lead_to_what_the_site_has(page: str, link: str, shown: str) -> None:
    def target(path: str) -> str | None:
        return None if path == "gone.py" else site_pages.uri_of(path, is_folder=path == "examples")

    uri = site_pages.uri_of(page, is_folder=False)
    assert site_pages.relinked(f"see [it]({link}).", page, uri, target) == f"see [it]({shown})."


@pytest.mark.parametrize(
    ("html", "asked"),
    [
        ('<script src="assets/a.js"></script><a href="https://example.org">x</a>', []),
        ('<script src="https://cdn.example/a.js"></script>', ["https://cdn.example/a.js"]),
        ('<link rel="stylesheet" href="//fonts.example/a.css">', ["//fonts.example/a.css"]),
        ('<img alt="a" src="http://example.org/a.png">', ["http://example.org/a.png"]),
    ],
)
def test_what_a_page_asks_of_other_hosts_is_seen(html: str, asked: list[str]) -> None:
    assert site_pages.asked_of_others(html) == asked


def test_every_setting_is_on_the_page_with_its_meaning() -> None:
    page = site_settings.settings_page((ROOT / "common/diloco_common/settings.py").read_text(encoding="utf-8"))
    sections = {name: field.annotation for name, field in Settings.model_fields.items()}
    names = [f"{section}.{name}" for section, kind in sections.items() for name in kind.model_fields]
    assert names == [line.split("`")[1] for line in page.splitlines() if line.startswith("### ")]


def test_a_setting_says_what_it_takes() -> None:
    page = site_settings.settings_page('''
class RunSettings(Section):
    """Of a run."""
    quorum: Annotated[int, Field(ge=1)] | Literal["all"] = 1
    """K."""
    rate: float = Field(default=0.5, gt=0, le=1)
    folder: Path | None = None
    """Of both."""

class Settings(Section):
    run: RunSettings = RunSettings()
''')
    assert page.split("\n\n") == [
        "## run",
        "Of a run.",
        "### `run.quorum` { #run.quorum }",
        "K.",
        "A whole number or `all`; default `1`.\n{: .facts }",
        "### `run.rate` { #run.rate }",
        "Of both.",
        "A number; default `0.5`, above `0`, at most `1`.\n{: .facts }",
        "### `run.folder` { #run.folder }",
        "Of both.",
        "A path; default none.\n{: .facts }\n",
    ]
