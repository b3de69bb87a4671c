"""From what shards say to what the live page shows: nobody is dropped, nothing is invented, nothing grows for ever."""

from __future__ import annotations

import json
from typing import Any

import pytest

from diloco_deploy.cluster import learners
from diloco_deploy.run.members import Watch
from diloco_deploy.web import drawn
from diloco_deploy.web.feed import PAGE, Feed
from statuses import learner, shard, traced

NOW = 1_000_000.0


class AtOnce(Feed):
    """Shards answer as soon as they are asked, unless it is said when they were asked."""

    def heard(self, name: str, status: Any, rounds: Any, now: float, asked_at: float | None = None) -> None:
        super().heard(name, status, rounds, now, now if asked_at is None else asked_at)


def feed_of(*names: str) -> Feed:
    feed = AtOnce(NOW)
    feed.expect(names or ("shard-0", "shard-1"))
    return feed


def row_of(feed: Feed, name: str, now: float = NOW) -> dict[str, Any]:
    found = feed.learners(sort="id", descending=False, find=name, page=0, now=now)["rows"]
    return next(row for row in found if row["id"] == name)


# ------------------------------------------------------------ who is here


def test_a_page_of_which_nobody_has_heard_says_so():
    state = feed_of().since(0, NOW)
    assert [state["headlines"][which]["title"] for which in ("learning", "lost")] == ["Not known", "Not known"]
    assert (state["run"]["tokens_merged"], state["run"]["silent_since"]) == (None, NOW)


def test_the_page_speaks_of_samples_where_learners_count_them():
    feed = feed_of()
    feed.heard("shard-0", shard(learners=[learner("ann", unit="samples")]), None, NOW)
    assert feed.since(0, NOW)["run"]["unit"] == "samples"
    feed = feed_of()
    feed.heard("shard-0", shard(learners=[learner("ann")]), None, NOW)
    assert feed.since(0, NOW)["run"]["unit"] == "tokens", "a shard of before says nothing"


def test_a_learner_that_no_shard_remembers_is_away_since_it_was_heard():
    feed = feed_of("shard-0")
    feed.heard("shard-0", shard(), None, NOW)
    feed.heard("shard-0", shard(epoch=8, learners=[learner("bob")]), None, NOW + 60)
    assert (row_of(feed, "ann")["state"], row_of(feed, "ann")["heard_at"]) == ("away", NOW - 0.2)
    assert row_of(feed, "ann")["tokens_per_s"] == 0


def test_a_learner_that_is_expected_and_was_never_seen_is_on_the_page():
    feed = feed_of("shard-0")
    feed.expect(["shard-0"], ["ann", "zoe"])
    feed.heard("shard-0", shard(), None, NOW)
    assert row_of(feed, "zoe")["state"] == "awaited"
    here = feed.since(0, NOW)["headlines"]["here"]
    assert here["title"].startswith("1 of 2 learners")
    assert "1 learner not here yet" in here["words"]


def test_the_versions_of_a_shard_are_those_of_the_model():
    feed = feed_of("shard-0")
    companion = {"id": 1, "version": 1, "round_open": False, "companion": True}
    feed.heard("shard-0", shard(fragments=[{"id": 0, "version": 40, "round_open": False}, companion]), None, NOW)
    row = feed.since(0, NOW)["shards"][0]
    assert (row["version_min"], row["version_max"], row["fragments"]) == (40, 40, [0, 1])


def test_a_shard_that_dies_stays_with_the_time_and_what_it_said_last():
    feed = feed_of()
    feed.heard("shard-0", shard(0), None, NOW)
    feed.heard("shard-1", shard(1), None, NOW)
    feed.silent("shard-1", "connection refused", NOW + 5)
    state = feed.since(0, NOW + 9)

    row = state["shards"][1]
    assert (row["answers"], row["heard_at"], row["why_not"], row["version_max"]) == (
        False,
        NOW,
        "connection refused",
        3,
    )
    assert [(o["shard"], o["began"], o["ended"]) for o in state["outages"]] == [("shard-1", NOW + 5, None)]
    assert state["headlines"]["here"]["level"] == "bad"
    assert "shard-1 does not answer" in state["headlines"]["here"]["words"]
    assert "What shard-1 kept is not known until it answers." in state["headlines"]["lost"]["words"]
    assert row_of(feed, "ann")["state"] == "training"  # by the shard that answers


def test_when_no_shard_answers_nothing_is_claimed():
    feed = feed_of("shard-0")
    feed.heard("shard-0", shard(), None, NOW)
    feed.sample(NOW)
    feed.silent("shard-0", "no answer in time", NOW + 3)
    feed.sample(NOW + 4)
    state = feed.since(0, NOW + 4)

    assert state["run"]["silent_since"] == NOW + 3
    assert state["headlines"]["learning"]["title"] == "Not known"
    assert row_of(feed, "ann")["state"] == "unknown"
    assert state["course"]["points"][-1][2] is None, "a loss of before is no loss of now"


def test_counts_do_not_fall_when_a_shard_starts_again():
    feed = feed_of("shard-0")
    feed.heard("shard-0", shard(), None, NOW)
    feed.silent("shard-0", "connection refused", NOW + 1)
    feed.heard(
        "shard-0", shard(epoch=8, rounds=1, learners=[learner("ann", asked=1, merged=1, missed={})]), None, NOW + 9
    )
    state = feed.since(0, NOW + 9)

    assert (state["totals"]["rounds"], row_of(feed, "ann")["asked"], row_of(feed, "ann")["merged"]) == (4, 6, 5)
    assert state["shards"][0]["starts"] == 2
    assert "shard-0 started again" in [event["words"] for event in state["events"]]
    assert state["outages"][0]["ended"] == NOW + 9


def test_a_learner_that_has_not_come_back_to_a_new_shard_keeps_its_counts():
    feed = feed_of()
    for index in (0, 1):
        feed.heard(f"shard-{index}", shard(index), None, NOW)
    feed.heard("shard-1", shard(1, epoch=8, learners=[]), None, NOW + 5)
    assert (row_of(feed, "ann")["asked"], row_of(feed, "ann")["state"]) == (10, "partly")
    feed.heard("shard-0", shard(0, epoch=8, learners=[]), None, NOW + 6)
    assert (row_of(feed, "ann")["asked"], row_of(feed, "ann")["state"], row_of(feed, "ann")["step"]) == (10, "away", 10)


def test_what_a_dead_shard_had_under_way_is_not_drawn_as_going_on():
    feed = feed_of("shard-0")
    under_way = traced(1, 4, ago_s=3.0)
    under_way["rounds"][0] |= {"closed_s": None, "announced_s": None}
    feed.heard("shard-0", shard(), under_way, NOW)
    feed.silent("shard-0", "connection refused", NOW + 60)
    (row,) = feed.since(0, NOW + 60)["rounds"]
    assert row[-1] == 3.0, "it was there when the shard was heard last"
    assert feed.traced("shard-0") == (0, 0), "it is asked for all of its rounds again"

    feed.heard("shard-0", shard(), traced(1, 4, ago_s=70.0), NOW + 67)
    (row,) = feed.since(0, NOW + 67)["rounds"]
    assert (row[6], row[-1]) == (1.5, None), "it was only cut off, and says how the round went on"


def test_a_new_process_is_known_by_its_uptime_where_the_epoch_is_hidden():
    feed = feed_of("shard-0")
    hidden = {key: value for key, value in shard().items() if key != "epoch"}
    feed.heard("shard-0", hidden, None, NOW)
    feed.heard("shard-0", hidden | {"uptime_s": 52.0}, None, NOW + 2)
    assert feed.since(0, NOW)["shards"][0]["starts"] == 1
    feed.heard("shard-0", hidden | {"uptime_s": 1.0}, None, NOW + 20)
    assert feed.since(0, NOW)["shards"][0]["starts"] == 2


def test_a_clock_that_is_set_or_an_answer_that_takes_long_is_no_new_process():
    feed = feed_of("shard-0")
    hidden = {key: value for key, value in shard().items() if key != "epoch"}
    feed.heard("shard-0", hidden, None, NOW, asked_at=10.0)
    feed.heard("shard-0", hidden | {"uptime_s": 51.0}, None, NOW + 3600, asked_at=11.0)
    feed.heard("shard-0", hidden | {"uptime_s": 52.0}, None, NOW + 3608, asked_at=12.0)
    assert (feed.since(0, NOW)["shards"][0]["starts"], feed.since(0, NOW)["totals"]["rounds"]) == (1, 3)


def test_shards_that_learners_miss_are_missed_though_nobody_gave_their_address():
    feed = feed_of("shard-0")
    away = [{"address": "10.0.0.2:50051", "index": 1, "for_s": 12.0}]
    feed.heard("shard-0", shard(learners=[learner("ann", away=away)]), None, NOW)
    state = feed.since(0, NOW)
    assert state["run"]["unreached"] == {1: 12.0}
    assert "learners do not reach shard-1" in state["headlines"]["here"]["words"].lower()


# ------------------------------------------------------------ is anything lost


@pytest.mark.parametrize(
    ("changed", "level", "title"),
    [
        ({}, "good", "Nothing lost"),
        ({"rejected": {"NOT_FINITE": 2}}, "good", "Nothing lost"),
        ({"versions_lost": 2}, "bad", "2 versions lost"),
    ],
)
def test_late_work_is_not_lost_and_lost_versions_are(changed, level, title):
    feed = feed_of("shard-0")
    feed.heard("shard-0", shard(**changed), None, NOW)
    lost = feed.since(0, NOW)["headlines"]["lost"]
    assert (lost["level"], lost["title"]) == (level, title)


def test_late_contributions_are_those_of_the_rows():
    feed = feed_of("shard-0")
    late = [learner("ann", missed={"LATE": 3}), learner("bob", missed={"LATE": 4, "FENCED": 1})]
    feed.heard("shard-0", shard(late=9, learners=late), None, NOW)
    assert "7 late, 1 fenced off" in feed.since(0, NOW)["headlines"]["lost"]["words"]


# ------------------------------------------------------------ is it learning


@pytest.mark.parametrize(
    ("losses", "title"),
    [
        ([4.0 - 0.05 * i for i in range(50)], "Learning"),
        ([2.0 + 0.05 * i for i in range(50)], "Loss rises"),
        ([2.0 + 0.02 * (10 * i * i % 37) for i in range(50)], "Level"),
        ([2.0, 1.9], "Training"),
        ([None] * 20, "No loss yet"),
    ],
)
def test_whether_it_learns_is_told_from_more_than_scatter(losses, title):
    feed = feed_of("shard-0")
    for second, loss in enumerate(losses):
        feed.heard("shard-0", shard(learners=[learner("ann", loss=loss)]), None, NOW + second)
        feed.sample(NOW + second)
    assert feed.since(0, NOW)["headlines"]["learning"]["title"] == title


def test_the_rest_is_told_from_the_pace_that_was_seen():
    feed = feed_of("shard-0")
    for second in range(30):
        feed.heard("shard-0", shard(tokens_merged=100 * second), None, NOW + second)
        feed.sample(NOW + second)
    assert feed.since(0, NOW)["run"]["left_s"] == pytest.approx((4000 - 2900) / 100)


def test_the_rest_is_the_same_as_on_the_terminal():
    feed, watch = feed_of("shard-0"), Watch(NOW)
    watch.expect("shard-0", "shard")
    for second in range(0, 100, 5):
        said = shard(tokens_merged=second * second // 10)
        feed.heard("shard-0", said, None, NOW + second)
        watch.heard("shard-0", said, NOW + second)
        assert feed.since(0, NOW)["run"]["left_s"] == watch.snapshot(NOW + second).eta_s
    assert watch.snapshot(NOW).eta_s is not None


# ------------------------------------------------------------ what is sent, and how much


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


def test_a_round_that_changes_keeps_its_place():
    feed = feed_of("shard-0")
    feed.heard("shard-0", shard(), traced(1, 1, ago_s=1.0), NOW)
    feed.heard("shard-0", shard(), traced(2, 1, ago_s=2.03), NOW + 1)
    (row,) = feed.since(0, NOW)["rounds"]
    assert row[3] == NOW - 1.0


def test_two_hundred_learners_that_join_at_once_are_one_event():
    feed = feed_of()
    told = [{"event": "joined", "learner": f"l-{i:03}", "ago_s": 1.0} for i in range(200)]
    for index in (0, 1):
        feed.heard(f"shard-{index}", shard(index), traced(200, told=told), NOW)
    (event,) = feed.since(0, NOW)["events"]
    assert event["words"] == "l-000, l-001, l-002 and 197 more joined"
    assert event["shards"] == ["shard-0", "shard-1"]


def test_what_a_shard_tells_again_after_a_cut_is_one_event():
    feed = feed_of("shard-0")
    lost = {"event": "versions lost", "fragment": 0, "seen": 2, "recovered": 1, "learner": "ann"}
    joined = {"event": "joined", "learner": "ann"}
    feed.heard("shard-0", shard(), traced(2, told=[{**lost, "ago_s": 1.0}, {**joined, "ago_s": 1.0}]), NOW)
    feed.silent("shard-0", "no answer in time", NOW + 3)
    feed.heard("shard-0", shard(), traced(2, told=[{**lost, "ago_s": 9.1}, {**joined, "ago_s": 9.1}]), NOW + 8)
    kinds = [event["kind"] for event in feed.since(0, NOW + 8)["events"]]
    assert sorted(kinds) == ["joined", "shard answers", "shard away", "versions lost"]


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


def test_a_viewer_whose_points_were_thinned_out_gets_the_whole_course():
    feed = feed_of("shard-0")
    seen = 0
    for second in range(drawn.POINTS_MAX + 2):
        feed.heard("shard-0", shard(), None, NOW + second)
        feed.sample(NOW + second)
        seen = seen or feed.since(0, NOW)["seq"]
    assert feed.since(seen, NOW)["course"]["whole"]


def test_thousands_of_learners_come_a_page_at_a_time_and_the_troubled_first():
    feed = feed_of("shard-0")
    many = [learner(f"l-{i:04}", "evicted" if i == 4321 else "alive") for i in range(5000)]
    feed.heard("shard-0", shard(learners=many), None, NOW)
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


@pytest.mark.parametrize(
    "odd",
    [
        {"learners": [{"id": "x"}]},
        {"learners": [learner("x", loss="high")]},
        {"learners": [learner("x", missed={"LATE": "often"})]},
        {"learners": [learner("x", inner_step=float("inf"))]},
        {"fragments": [{"id": 0}]},
        {"rejected": {"LATE": "often"}},
        {"uptime_s": "long"},
    ],
)
def test_an_odd_answer_of_one_shard_changes_nothing(odd):
    feed = feed_of()
    feed.heard("shard-0", shard(), None, NOW)
    before = feed.since(0, NOW)
    with pytest.raises((KeyError, TypeError, ValueError, OverflowError)):
        feed.heard("shard-1", shard(1, **odd), None, NOW)
    assert feed.since(0, NOW) == before
    feed.heard("shard-1", shard(1), None, NOW)
    assert feed.since(0, NOW)["shards"][1]["answers"]


def test_a_round_without_its_facts_is_no_answer():
    feed = feed_of("shard-0")
    with pytest.raises(KeyError):
        feed.heard("shard-0", shard(), {"epoch": 7, "seq": 1, "events": [], "rounds": [{
            "fragment": 0, "round": 1, "ago_s": 1.0, "announced_s": None}]}, NOW)  # fmt: skip
    assert feed.since(0, NOW)["rounds"] == []


def test_the_course_goes_back_with_a_run_that_is_restored():
    feed = feed_of("shard-0")
    for second, tokens in enumerate((1000, 10**15, 1200)):
        feed.heard("shard-0", shard(tokens_merged=tokens), None, NOW + second)
        feed.sample(NOW + second)
    assert [point[1] for point in feed.since(0, NOW + 3)["course"]["points"]] == [1000, 10**15, 1200]


def test_a_loss_that_is_no_number_is_none():
    feed = feed_of("shard-0")
    for second in range(30):
        feed.heard("shard-0", shard(learners=[learner("ann", loss=float("inf"))]), None, NOW + second)
        feed.sample(NOW + second)
    assert row_of(feed, "ann")["loss"] is None


# ------------------------------------------------------------ events


def revoked(name: str, ago_s: float) -> dict[str, Any]:
    return {"event": "evicted", "learner": name, "code": "REVOKED", "ago_s": ago_s}


def test_what_is_told_late_pushes_out_nothing_that_happened_since():
    feed = feed_of()
    newest = [revoked(f"new-{i}", 10.0 * i) for i in range(drawn.EVENTS_MAX)]
    feed.heard("shard-0", shard(), traced(1, told=newest), NOW)
    before = {event["words"] for event in feed.since(0, NOW)["events"]}
    assert len(before) == drawn.EVENTS_MAX

    late = [revoked(f"old-{i}", 1e5 + 10.0 * i) for i in range(100)]
    feed.heard("shard-1", shard(1), traced(1, told=late), NOW)
    assert {event["words"] for event in feed.since(0, NOW)["events"]} == before

    feed.heard("shard-0", shard(), traced(2, told=[revoked("newer", 0.0)]), NOW + 60)
    told = [event["words"] for event in feed.since(0, NOW + 60)["events"]]
    assert (len(told), told[-1]) == (drawn.EVENTS_MAX, "newer was revoked")
    assert before - set(told) == {f"new-{drawn.EVENTS_MAX - 1} was revoked"}, "the oldest went"


def test_events_of_one_moment_are_told_apart():
    feed = feed_of()
    lost = {"event": "versions lost", "seen": 2, "recovered": 1, "learner": "ann", "ago_s": 1.0}
    told = [{**lost, "fragment": fragment} for fragment in range(3)]
    feed.heard("shard-0", shard(), traced(1, told=told), NOW)
    assert len({event["id"] for event in feed.since(0, NOW)["events"]}) == 3


def test_a_learner_that_left_one_shard_and_was_evicted_by_another_stays_away_when_both_forget_it():
    feed = feed_of()
    feed.heard("shard-0", shard(0, learner("ann", "left"), learner("bob")), None, NOW)
    feed.heard("shard-1", shard(1, learner("ann", "evicted"), learner("bob")), None, NOW)
    assert row_of(feed, "ann")["state"] == "away"
    for index in (1, 0):
        feed.heard(f"shard-{index}", shard(index, learner("bob"), epoch=8), None, NOW + 5)
    assert row_of(feed, "ann")["state"] == "away"
