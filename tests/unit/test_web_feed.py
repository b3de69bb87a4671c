"""From what shards say to what the live page shows, and who may look: nobody is dropped, nothing is invented."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from tools.web_glossary import GLOSSARY, glossary

from diloco_deploy.cluster import members as learners
from diloco_deploy.web import drawn
from diloco_deploy.web.app import Access
from diloco_deploy.web.feed import COLUMNS, PAGE, Feed
from statuses import learner, shard, traced

NOW = 1_000_000.0


class AtOnce(Feed):
    """Shards answer as soon as they are asked, and tell no rounds, unless it is said otherwise."""

    def heard(
        self, name: str, status: Any, rounds: Any = None, now: float = NOW, asked_at: float | None = None
    ) -> None:
        super().heard(name, status, rounds, now, now if asked_at is None else asked_at)


def feed_of(*names: str) -> Feed:
    feed = AtOnce(NOW)
    feed.expect(names or ("shard-0", "shard-1"))
    return feed


def after(*said: Any) -> Feed:
    """Of a run of the shards that have said this."""
    feed = feed_of(*(status["name"] for status in said))
    for status in said:
        feed.heard(status["name"], status)
    return feed


def row_of(feed: Feed, name: str, now: float = NOW) -> dict[str, Any]:
    found = feed.learners(sort="id", descending=False, find=name, page=0, now=now)["rows"]
    return next(row for row in found if row["id"] == name)


def test_a_learner_that_is_expected_and_was_never_seen_is_on_the_page():
    feed = feed_of("shard-0")
    feed.expect(["shard-0"], ["ann", "zoe"])
    feed.heard("shard-0", shard())
    assert row_of(feed, "zoe")["state"] == "awaited"
    here = feed.since(0, NOW)["headlines"]["here"]
    assert here["title"].startswith("1 of 2 learners")
    assert "1 learner not here yet" in here["words"]


def test_a_shard_that_dies_stays_with_the_time_and_what_it_said_last():
    feed = after(shard(0), shard(1))
    feed.silent("shard-1", "connection refused", NOW + 5)
    state = feed.since(0, NOW + 9)

    row = state["shards"][1]
    assert (row["answers"], row["heard_at"], row["version_max"]) == (False, NOW, 3)
    assert row["why_not"] == "connection refused"
    assert [(o["shard"], o["began"], o["ended"]) for o in state["outages"]] == [("shard-1", NOW + 5, None)]
    assert state["headlines"]["here"]["level"] == "bad"
    assert "shard-1 is away for 0:09 (connection refused)" in state["headlines"]["here"]["words"]
    assert "What shard-1 kept is not known until it answers." in state["headlines"]["lost"]["words"]
    assert row_of(feed, "ann")["state"] == "training"  # by the shard that answers


def test_when_no_shard_answers_nothing_is_claimed():
    feed = after(shard())
    feed.sample(NOW)
    feed.silent("shard-0", "no answer in time", NOW + 3)
    feed.sample(NOW + 4)
    state = feed.since(0, NOW + 4)

    assert state["run"]["silent_since"] == NOW + 3
    assert state["headlines"]["learning"]["title"] == "Not known"
    assert row_of(feed, "ann")["state"] == "unknown"
    assert state["course"]["points"][-1][2] is None, "a loss of before is no loss of now"


def test_counts_do_not_fall_when_a_shard_starts_again():
    feed = after(shard())
    feed.silent("shard-0", "connection refused", NOW + 1)
    feed.heard("shard-0", shard(0, learner(asked=1, merged=1, missed={}), epoch=8, rounds=1), now=NOW + 9)
    state = feed.since(0, NOW + 9)

    assert (state["totals"]["rounds"], row_of(feed, "ann")["asked"], row_of(feed, "ann")["merged"]) == (4, 6, 5)
    assert state["shards"][0]["starts"] == 2
    assert "shard-0 started again" in [event["words"] for event in state["events"]]
    assert state["outages"][0]["ended"] == NOW + 9


COMPANION = {"id": 1, "version": 1, "round_open": False, "companion": True}
MISSES = [{"address": "10.0.0.2:50051", "index": 1, "for_s": 12.0}]
LATE = [learner("ann", missed={"ABSENT": 3}), learner("bob", missed={"ABSENT": 4, "FENCED": 1})]


@pytest.mark.parametrize(
    ("changed", "path", "shown"),
    [
        # A shard of before says nothing of the unit.
        ({"learners": [learner(unit="samples")]}, "run.unit", "samples"),
        ({}, "run.unit", "tokens"),
        # The versions of a shard are those of the model.
        ({"fragments": [{"id": 0, "version": 40}, COMPANION]}, "shards.0.version_min", 40),
        ({"fragments": [{"id": 0, "version": 40}, COMPANION]}, "shards.0.fragments", [0, 1]),
        # Shards that learners miss are missed though nobody gave their address.
        ({"learners": [learner(away=MISSES)]}, "headlines.here.words", "learners do not reach shard-1"),
        # Late work is not lost, and lost versions are. Late contributions are those of the rows.
        ({}, "headlines.lost.title", "Nothing lost"),
        ({"rejected": {"NOT_FINITE": 2}}, "headlines.lost.level", "good"),
        ({"versions_lost": 2}, "headlines.lost.title", "2 versions lost"),
        ({"versions_lost": 2}, "headlines.lost.level", "bad"),
        ({"late": 9, "learners": LATE}, "headlines.lost.words", "7 absent, 1 fenced off"),
    ],
)
def test_what_one_answer_shows(changed, path, shown):
    found: Any = after(shard(**changed)).since(0, NOW)
    for step in path.split("."):
        found = found[int(step) if step.isdigit() else step]
    assert shown in found.lower() if path.endswith("words") else shown == found


@pytest.mark.parametrize(
    ("losses", "level", "title", "words"),
    [
        ([4.0, 3.9, 2.5], "good", "Training", "The loss is 2.500."),
        ([4.0, 2.5, 2.6], "good", "Training", "The loss is 2.600; 0:01 ago it was 2.500."),
        ([10.0, 2.0, 5.0, 9.5], "info", "Training", "The loss is 9.500; 0:02 ago it was 2.000."),
        ([2.0], "info", "Training", "The loss is 2.000."),
        ([2.0, None], "info", "No loss now", "None of the learners that are here reports a loss."),
        ([None] * 20, "info", "No loss yet", "No learner has reported a loss."),
    ],
)
def test_how_the_loss_goes_is_told_in_figures(losses, level, title, words):
    feed = feed_of("shard-0")
    for second, loss in enumerate(losses):
        feed.heard("shard-0", shard(learners=[learner("ann", loss=loss)]), now=NOW + second)
        feed.sample(NOW + second)
    said = feed.since(0, NOW)["headlines"]["learning"]
    assert (said["level"], said["title"], said["words"]) == (level, title, words)


def test_only_what_is_new_is_sent_again():
    feed = feed_of("shard-0")
    feed.heard("shard-0", shard(), traced(2, 1, 2, told=[{"event": "joined", "learner": "ann", "ago_s": 1.0}]), NOW)
    feed.sample(NOW)
    first = feed.since(0, NOW)
    assert ([row[2] for row in first["rounds"]], len(first["events"]), len(first["course"]["points"])) == ([1, 2], 1, 1)
    assert feed.traced("shard-0") == (7, 2)

    feed.heard("shard-0", shard(), traced(3, 3), NOW + 1)
    second = feed.since(first["seq"], NOW + 1)
    assert ([row[2] for row in second["rounds"]], second["events"], second["whole"]) == ([3], [], False)
    assert feed.since(10**9, NOW)["whole"], "a number of another life"


def test_everything_that_is_kept_has_a_bound(monkeypatch):
    monkeypatch.setattr(learners, "LEARNERS_MAX", 300)
    feed = feed_of("shard-0")
    for second in range(2000):
        names = [learner(f"l-{second}-{i}") for i in range(3)]
        told = [{"event": "versions lost", "fragment": 0, "seen": 1, "recovered": 0, "learner": "a", "ago_s": 0.0}]
        heard = traced(second, *range(3 * second, 3 * second + 3), told=told)
        feed.heard("shard-0", shard(learners=names), heard, NOW + second)
        feed.sample(NOW + second)
    state = feed.since(0, NOW + 2000)

    assert len(state["rounds"]) <= drawn.ROUNDS_MAX
    assert min(row[3] for row in state["rounds"]) > NOW + 2000 - drawn.KEPT_S - 5
    assert len(state["events"]) <= drawn.EVENTS_MAX
    assert len(state["course"]["points"]) <= drawn.POINTS_MAX
    assert state["course"]["points"][0][0] == NOW, "the whole course, in fewer points"
    assert len(state["glance"]) <= 300
    assert state["totals"]["forgotten"] > 0


def test_thousands_of_learners_come_a_page_at_a_time_and_the_troubled_first():
    feed = feed_of("shard-0")
    many = [learner(f"l-{i:04}", "evicted" if i == 4321 else "alive") for i in range(5000)]
    feed.heard("shard-0", shard(learners=many))
    page = feed.learners(sort="attention", descending=False, find="", page=0, now=NOW)
    assert (page["rows"][0]["id"], len(page["rows"]), page["pages"]) == ("l-4321", PAGE, 100)
    assert len(json.dumps(feed.since(0, NOW))) < 20_000, "what every viewer gets every second holds no rows"
    with pytest.raises(ValueError, match="sort: one of"):
        feed.learners(sort="nonsense", descending=False, find="", page=0, now=NOW)


@pytest.mark.parametrize("secret", ["generation", "epoch"])
def test_the_page_is_told_nothing_that_lets_one_speak_as_a_learner(secret):
    feed = feed_of("shard-0")
    feed.heard("shard-0", shard(learners=[learner("ann", generation=99)]), traced(1, 1), NOW)
    shown = json.dumps([feed.since(0, NOW), feed.learners(sort="id", descending=False, find="", page=0, now=NOW)])
    assert secret not in shown


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
