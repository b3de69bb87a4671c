"""Every relative link in the pages leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path.relative_to(ROOT).as_posix() for folder in (ROOT, ROOT / "docs") for path in folder.glob("*.md"))
LINK = re.compile(r"\]\(([^)#]+)\)")


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_lead_somewhere(repository: Path, page: str) -> None:
    links = [link for link in LINK.findall((repository / page).read_text(encoding="utf-8")) if "://" not in link]
    broken = [link for link in links if not (repository / page).parent.joinpath(link).exists()]
    assert broken == []
