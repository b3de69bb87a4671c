"""Turns pages of the repository into pages of a site: pure functions from text to text (site_hooks.py calls them).

Pages are written once, for readers of the repository. The site changes three things: links to files outside docs/ lead
to a copy of the file in the site, names of command blocks (```sh NAME, for tests) are left out, and words of the
glossary (docs/concepts.md) are explained where they appear.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

ROOT_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
"""Pages in the repository's root, where everybody looks for them. In the site they are under project/."""
EVERYDAY = frozenset({"connection", "expected", "part", "process", "scope"})
"""Words of the glossary that pages also use in their everyday meaning, so a tooltip would often be wrong."""
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#|<)([^)#\s]+)(#[^)\s]*)?(?=\))")
_FENCED = re.compile(r"^( *)(`{3,})([^\n]*)\n(.*?)^\1\2$", re.M | re.S)
_BARE = re.compile(r"<(h[1-6]|a)\b.*?</\1>", re.S)
"""Elements that must not contain tooltips."""
_SECTION = re.compile(r"(?=<h[23]\b)")
_ABBR = re.compile(r'<abbr title="([^"]*)">(.*?)</abbr>', re.S)
_FETCHED = re.compile(r"<(?:script|img|iframe|source|video|link)\b[^>]*?\b(?:src|href)=\"?((?:https?:)?//[^\">\s]+)")
_LANGUAGES = {
    ".py": "python", ".sh": "sh", ".toml": "toml", ".proto": "protobuf", ".json": "json", ".c": "c", ".service": "ini",
    ".yml": "yaml", ".yaml": "yaml", ".sbatch": "sh",
}  # fmt: skip


# ------------------------------------------------------------------ the glossary


def glossary(concepts: str) -> dict[str, str]:
    """Word -> meaning, from the table under `## Words`. Raises ValueError if there is no table.

    A row may hold several words and as many meanings, separated by semicolons. Otherwise its text is for each word.
    """
    table = concepts.partition("\n## Words\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (?!word |-)(.+?) \| (.+) \|$", table, re.M)
    if not rows:
        raise ValueError("docs/concepts.md has no table of words under `## Words`")
    found: dict[str, str] = {}
    for words, text in rows:
        names = [re.sub(r"(?<=\w) [A-Z]$", "", name) for name in words.split(", ")]
        meanings = plain(text).split("; ")
        found.update(zip(names, meanings if len(meanings) == len(names) else [plain(text)] * len(names), strict=True))
    return found


def plain(markdown: str) -> str:
    """The text without marks and links, as a tooltip is plain text."""
    text = re.sub(r" \(\[[^\]]*\]\([^)]*\)\)", "", markdown)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"[*`]", "", text)


def spellings(words: dict[str, str]) -> dict[str, str]:
    """The glossary with plurals and capitals, as pages write them. Everyday words are left out."""
    found = {}
    for word, meaning in words.items():
        if word in EVERYDAY:
            continue
        forms = (
            [word]
            if len(word) == 1
            else [word, word + "s", word[0].upper() + word[1:], word[0].upper() + word[1:] + "s"]
        )
        found.update(dict.fromkeys(forms, meaning))
    return found


def once_a_section(html: str) -> str:
    """Keep only the first tooltip for each word in each section, and none in headings and links."""
    html = _BARE.sub(lambda bare: _ABBR.sub(r"\2", bare[0]), html)

    def thinned(section: str) -> str:
        seen: set[str] = set()

        def first(match: re.Match[str]) -> str:
            if match[1] in seen:
                return match[2]
            seen.add(match[1])
            return match[0]

        return _ABBR.sub(first, section)

    return "".join(map(thinned, _SECTION.split(html)))


# ------------------------------------------------------------------ links and blocks


def asked_of_others(html: str) -> list[str]:
    """What a browser would fetch from other hosts to show this page. Links for readers to follow do not count."""
    return _FETCHED.findall(html)


def unnamed(markdown: str) -> str:
    """The page without the names of command blocks, which only tests use."""
    return re.sub(r"^( *```sh) .*$", r"\1", markdown, flags=re.M)


def uri_of(path: str, is_folder: bool) -> str:
    """The place in the site of a file or folder of the repository. `path` is relative to the root."""
    if path == "README.md":
        return "index.md"
    if path in ROOT_PAGES:
        return f"project/{path}"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"files/{path}/index.md" if is_folder else f"files/{path}.md"


def relinked(markdown: str, path: str, uri: str, target: Callable[[str], str | None]) -> str:
    """The page `path` of the repository, with its links changed for the place `uri` in the site.

    `target` returns the place in the site for a path relative to the root. None: the link stays, and mkdocs reports it.
    """

    def one(link: re.Match[str]) -> str:
        found = target(posixpath.normpath(posixpath.join(posixpath.dirname(path), link[1])))
        return link[0] if found is None else posixpath.relpath(found, posixpath.dirname(uri)) + (link[2] or "")

    pieces, end = [], 0
    for block in _FENCED.finditer(markdown):  # leave code as it is
        pieces += [_LINK.sub(one, markdown[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*pieces, _LINK.sub(one, markdown[end:])])


def linked_paths(markdown: str, path: str) -> set[str]:
    """The files and folders of the repository that the page `path` links to, relative to its root."""
    found: set[str] = set()
    relinked(markdown, path, path, lambda target: found.add(target))
    return found


# ------------------------------------------------------------------ files that are not pages


def file_page(root: Path, path: str) -> str:
    """A page that shows a text file of the repository, or lists a folder."""
    head = f"---\nsearch: {{exclude: true}}\n---\n# {path}\n\n"
    if (root / path).is_dir():
        return head + "".join(f"- [{name}]({posixpath.relpath(name, path)}.md)\n" for name in files_of(root, path))
    text = (root / path).read_text(encoding="utf-8")
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    language = _LANGUAGES.get(Path(path).suffix, "docker" if path.endswith("Dockerfile") else "text")
    return f"{head}{fence} {language}\n{text.rstrip()}\n{fence}\n"


def files_of(root: Path, path: str) -> list[str]:
    """The text files below a folder of the repository, relative to its root."""
    found = sorted(file for file in (root / path).rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    return [file.relative_to(root).as_posix() for file in found if file.suffix not in (".whl", ".so", ".png")]
