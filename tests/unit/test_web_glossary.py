"""The live page explains the words as docs/concepts.md does."""

from __future__ import annotations

import json
import re

from tools.web_glossary import GLOSSARY, glossary


def test_the_words_of_the_page_are_those_of_the_docs():
    assert GLOSSARY.read_text(encoding="utf-8") == glossary(), "run: python tools/web_glossary.py"


def test_every_word_that_the_page_marks_is_explained():
    marked = set(re.findall(r'data-word="([^"]+)"', (GLOSSARY.parent / "index.html").read_text(encoding="utf-8")))
    assert marked
    assert marked <= json.loads(GLOSSARY.read_text(encoding="utf-8")).keys()
