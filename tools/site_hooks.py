"""Functions that mkdocs calls while it builds the site (mkdocs.yml). site_pages.py says what is done to each page."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import site_pages  # noqa: E402
import site_settings  # noqa: E402

_log = logging.getLogger("mkdocs.hooks.site")
_CONCEPTS = ROOT / "docs/concepts.md"
_SETTINGS = ROOT / "common/diloco_common/settings.py"
_pages: dict[str, str] = {}
"""Place in the site -> path in the repository, for pages written in Markdown."""


def on_config(config: Any) -> Any:
    words = site_pages.spellings(site_pages.glossary(_CONCEPTS.read_text(encoding="utf-8")))
    config.mdx_configs["abbr"] = {"glossary": words}
    config.watch.append(str(ROOT / "tools"))
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages in the repository's root, and a page for each file that a page links to."""
    _pages.clear()
    _pages.update({file.src_uri: f"docs/{file.src_uri}" for file in files.documentation_pages()})
    for name in site_pages.ROOT_PAGES:
        _pages[f"project/{name}"] = name
        files.append(File.generated(config, f"project/{name}", content=(ROOT / name).read_text(encoding="utf-8")))
    linked = {
        path
        for page in _pages.values()
        for path in site_pages.linked_paths((ROOT / page).read_text(encoding="utf-8"), page)
        if _is_copied(path)
    }
    for folder in [path for path in linked if (ROOT / path).is_dir()]:
        linked.update(site_pages.files_of(ROOT, folder))
    for path in sorted(linked):
        uri = site_pages.uri_of(path, (ROOT / path).is_dir())
        files.append(File.generated(config, uri, content=site_pages.file_page(ROOT, path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    uri = page.file.src_uri
    if uri not in _pages:
        return markdown
    if "<!-- settings -->" in markdown:
        page_of_all = site_settings.settings_page(_SETTINGS.read_text(encoding="utf-8"))
        markdown = markdown.replace("<!-- settings -->", page_of_all)
    return site_pages.unnamed(site_pages.relinked(markdown, _pages[uri], uri, _target))


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Keep one tooltip per word and section, and make links of names like docs/quality.md in docstrings."""
    if page.file.src_uri in ("api.md", "settings.md"):
        html = re.sub(r"\bdocs/([\w-]+)\.md", r'<a href="\1.html">\1</a>', html)
    return site_pages.once_a_section(html)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Warn if a page makes the browser fetch anything from another host. This fails a strict build."""
    for address in site_pages.asked_of_others(output):
        _log.warning(f"{page.file.src_uri} makes the browser ask {address}; put a copy into docs/assets instead")
    return output


def _target(path: str) -> str | None:
    if not (ROOT / path).exists():
        return None
    return site_pages.uri_of(path, (ROOT / path).is_dir())


def _is_copied(path: str) -> bool:
    """Whether the site has a copy of this file: it exists, and is not a page itself."""
    return (
        (ROOT / path).exists()
        and not path.startswith(("docs/", ".."))
        and path not in (".", "README.md", *site_pages.ROOT_PAGES)
    )
