"""Who may look at the live page, and that the page explains words as the docs do."""

from __future__ import annotations

import json
import re

import pytest
from tools.web_glossary import GLOSSARY, glossary

from diloco_deploy.web.app import Access
from diloco_deploy.web.feed import COLUMNS

KEY, TOKEN = "made-at-the-start", "the-shared-secret-of-the-run"


@pytest.mark.parametrize(
    ("authorization", "cookie", "may"),
    [
        ("", "", False),
        ("Bearer wrong", "", False),
        (f"Bearer {KEY}", "", True),
        (f"bearer {TOKEN}", "", True),
        (f"Basic {KEY}", "", False),
        ("", KEY, False),
        ("", Access(KEY).session, True),
        ("", Access("another key").session, False),
    ],
)
def test_a_key_is_shown_as_a_token_or_by_the_cookie_that_it_was_given(authorization, cookie, may):
    assert Access(KEY, TOKEN).may_look(None, authorization, cookie) is may


def test_a_certificate_of_an_observer_does_as_well():
    access = Access(KEY, admits=lambda certificate: certificate == b"observer")
    assert access.may_look(b"observer", "", "")
    assert not access.may_look(b"learner", "", "")


@pytest.mark.parametrize(
    ("host", "answers"),
    [
        ("localhost:7171", True), ("127.0.0.1:7171", True), ("[::1]:7171", True), ("10.1.2.3", True),
        ("evil.example:7171", False), ("127.0.0.1.evil.example:7171", False), ("", False),
    ],
)  # fmt: skip
def test_without_a_key_nobody_may_lead_a_name_of_theirs_here(host, answers):
    assert Access(None).answers_to(host) is answers
    assert Access(KEY).answers_to(host), "with a key, a name of theirs has no cookie"


def test_the_words_of_the_page_are_those_of_the_docs():
    assert GLOSSARY.read_text(encoding="utf-8") == glossary(), "run: python tools/web_glossary.py"


def test_every_word_that_the_page_marks_is_explained():
    page = (GLOSSARY.parent / "index.html").read_text(encoding="utf-8")
    marked = {*re.findall(r'data-word="([^"]+)"', page), *(column.word for column in COLUMNS if column.word)}
    assert marked >= {"shard", "learner"}
    assert marked <= json.loads(GLOSSARY.read_text(encoding="utf-8")).keys()
