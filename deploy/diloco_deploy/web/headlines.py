"""The three answers at the top of the page: does it train, is a member missing, is anything lost. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from diloco_common import units
from diloco_common.errors import some
from diloco_deploy.cluster.findings import GONE, OF_SHARDS, STANDS, Finding
from diloco_deploy.cluster.members import HERE
from diloco_deploy.web.drawn import Point


class Words(NamedTuple):
    letter: str
    """Its letter in the overview of all learners."""
    level: str
    pill: str
    title: str
    sentence: str


WORDS = {
    "away": Words("a", "bad", "away", "away", "away"),
    "awaited": Words("w", "warn", "not here yet", "not here yet", "not here yet"),
    "left_out": Words("q", "bad", "left out", "left out", "left out, as they point away"),
    "stalled": Words("s", "warn", "stalled", "stalled", "stalled"),
    "partly": Words("p", "warn", "cut off", "cut off from a shard", "cut off from a shard"),
    "unknown": Words("u", "info", "not known", "not known", "of whom nothing is known now"),
    "training": Words("t", "good", "training", "training", "here"),
    "left": Words("l", "info", "left", "left", "gone with a goodbye"),
}


def headlines(
    *, states: Counter[str], answering: int, heard: int, shards_away: Sequence[str], wrong: Sequence[Finding],
    run: Mapping[str, Any], totals: Mapping[str, Any], points: Sequence[Point],
) -> dict[str, Any]:  # fmt: skip
    """The three answers as JSON. Each has a level ("good", "info", "bad"), a title and a sentence.

    `states`: learners by state. `answering`, `heard`: shards that answer, and that ever did. `wrong`: the findings,
    listed below on the page.
    """
    if not answering:
        words = "No shard has answered yet." if not heard else "No shard answers; these figures are older."
        unknown = {"level": "bad", "title": "Not known", "words": words}
        return {"learning": unknown, "here": _here(states, answering, shards_away, wrong, run), "lost": dict(unknown)}
    return {
        "learning": _learning(states, wrong, run, points),
        "here": _here(states, answering, shards_away, wrong, run),
        "lost": _lost(totals, shards_away),
    }


def _learning(
    states: Counter[str], wrong: Sequence[Finding], run: Mapping[str, Any], points: Sequence[Point]
) -> dict[str, str]:
    if run["done"]:
        return _said("good", "Done", "The token budget is reached.")
    if stands := [one for one in wrong if one.code in STANDS]:
        return _said("bad", "Stands still", f"{stands[0].words} [{stands[0].code}]")
    if not _here_count(states):
        return _said("bad", "Nobody trains", "No learner holds a lease at a shard that answers.")
    known = [(point.at, point.loss) for point in points if point.loss is not None]
    if not known:
        return _said("info", "No loss yet", "No learner has reported a loss.")
    if points[-1].loss is None:
        return _said("info", "No loss now", "None of the learners that are here reports a loss.")
    (_, first), (now, loss), (at, lowest) = known[0], known[-1], min(known, key=itemgetter(1))
    falls = loss - lowest < first - loss
    before = "" if loss == lowest else f"; {units.clock(now - at)} ago it was {units.loss(lowest)}"
    return _said("good" if falls else "info", "Training", f"The loss is {units.loss(loss)}{before}.")


def _here(
    states: Counter[str], answering: int, shards_away: Sequence[str], wrong: Sequence[Finding], run: Mapping[str, Any]
) -> dict[str, str]:  # fmt: skip
    here, left = _here_count(states), states["left"]
    known = states.total() - left
    unasked = max(0, (run["shards_of_run"] or 0) - answering - len(shards_away))
    gone = [one for one in wrong if one.code in GONE]
    parts = [one.words for one in gone if one.code in OF_SHARDS]
    troubled = ("unknown", "away", "awaited", "left_out", "stalled", "partly")
    parts += [f"{_learners(states[state])} {WORDS[state].sentence}" for state in troubled if states[state]]
    if left:
        parts.append(f"{left} said goodbye")
    title = f"{here} of {known} learners, {answering} of {answering + len(shards_away) + unasked} shards"
    if not parts:
        return _said("good" if here else "info", title, "Everybody is here." if here else "No learner has joined yet.")
    level = "bad" if gone or states["unknown"] else "good" if here == known == states["training"] else "info"
    return _said(level, title, "; ".join(parts) + ".")


def _lost(totals: Mapping[str, Any], shards_away: Sequence[str]) -> dict[str, str]:
    lost, refused = totals["versions_lost"], sum(totals["refused"].values())
    missed = (totals["missed"].get("ABSENT", 0), refused, totals["missed"].get("FENCED", 0))
    carried = [f"{n:,} {how}" for n, how in zip(missed, ("absent", "refused", "fenced off"), strict=True) if n]
    if lost:
        words = "A shard came back without these announced versions; learners go on from what they hold."
        return _said("bad", f"{lost:,} {'version' if lost == 1 else 'versions'} lost", words)
    if shards_away:
        return _said("info", "Nothing, so far", f"What {some(shards_away)} kept is not known until it answers.")
    if not carried:
        return _said("good", "Nothing lost", "Every announced version is there.")
    words = "Every announced version is there. Contributions that missed their round: "
    return _said("good", "Nothing lost", words + ", ".join(carried) + "; live learners carry that work on.")


def _here_count(states: Counter[str]) -> int:
    return sum(states[state] for state in HERE)


def _learners(count: int) -> str:
    return f"{count} learner{'' if count == 1 else 's'}"


def _said(level: str, title: str, words: str) -> dict[str, str]:
    return {"level": level, "title": title, "words": words}
