"""The pages of the repository as pages of a site: words are explained, links lead to what the site has."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools import site_pages, site_settings

from diloco_common.settings import Settings

ROOT = Path(__file__).resolve().parents[2]


def test_the_words_of_the_product_are_explained() -> None:
    words = site_pages.glossary((ROOT / "docs/concepts.md").read_text(encoding="utf-8"))
    assert words.keys() >= {"learner", "worker", "shard", "fragment", "round", "quorum", "version", "lease", "carry"}
    assert words.keys() >= site_pages.EVERYDAY


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


def test_every_setting_is_on_the_page_with_its_meaning() -> None:
    page = site_settings.settings_page((ROOT / "common/diloco_common/settings.py").read_text(encoding="utf-8"))
    sections = {name: field.annotation for name, field in Settings.model_fields.items()}
    names = [f"{section}.{name}" for section, kind in sections.items() for name in kind.model_fields]
    assert names == [line.split("`")[1] for line in page.splitlines() if line.startswith("### ")]
