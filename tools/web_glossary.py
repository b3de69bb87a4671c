"""Writes the glossary of the live page: the words of docs/concepts.md, and a few of the page's own.

python tools/web_glossary.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
CONCEPTS = REPOSITORY / "docs/concepts.md"
GLOSSARY = REPOSITORY / "deploy/diloco_deploy/web/static/glossary.json"
OF_THE_PAGE = {
    "state": "Training: it has a lease everywhere. Stalled: it is there, but ends no step. Cut off: at a shard that "
    "answers it has no lease. Left out: it points away from the others, so nothing of it is merged. Away: no lease "
    "anywhere. Left: it said goodbye.",
    "fate": "What became of the contributions that shards asked it for. Those that missed their round are not lost "
    "while the learner lives: it carries their work into the next one.",
}


def words_in(page: str) -> dict[str, str]:
    """Word -> meaning, from the table under "Words", without Markdown's marks."""
    table = page.partition("## Words")[2]
    rows = re.findall(r"^\| (?!word|---)(.+?) \| (.+) \|$", table, re.MULTILINE)
    return {word: _plain(meaning) for word, meaning in rows}


def glossary() -> str:
    """The content of the glossary file."""
    words = {**words_in(CONCEPTS.read_text(encoding="utf-8")), **OF_THE_PAGE}
    return json.dumps(words, indent=1, ensure_ascii=False) + "\n"


def _plain(text: str) -> str:
    text = re.sub(r" ?\(\[[^]]+\]\([^)]+\)\)", "", text)
    text = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", text)
    text = re.sub(r"[*`]", "", text)
    return text[0].upper() + text[1:] + "."


if __name__ == "__main__":
    GLOSSARY.write_text(glossary(), encoding="utf-8")
