"""The promises of faults.md, as pure functions of what the processes recorded. Each names every case it finds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from diloco_deploy.chaos.histories import Histories, Life, Line, Merge


@dataclass(frozen=True)
class Violation:
    """A promise that was not kept."""

    check: str
    """Name of the check: a key of the counts in the result."""
    what: str
    count: int = 1

    def __str__(self) -> str:
        return f"{self.check}: {self.what}"


def violations(histories: Histories) -> list[Violation]:
    """Everything that the histories show to be wrong."""
    return [
        violation
        for check in (double_counted, work_lost, lost_versions, differing_bytes, fencing, accounting)
        for violation in check(histories)
    ]


# ---------------------------------------------------------------- P1: exactly once


def double_counted(histories: Histories) -> Iterator[Violation]:
    """No work is in the model twice: what one learner trained, by its own count of tokens, is merged once per fragment.

    Compares what was trained, not what was sent: a second push of the same work is another push.
    """
    pushes = histories.pushes()
    taken: dict[tuple[str, int, int], list[tuple[int, int, Merge]]] = defaultdict(list)
    for merge in histories.merges():
        found = pushes.get(merge.push)
        if found is None:
            yield Violation(
                "double_counted", f"{_words(merge)} holds a contribution of {merge.learner} that it never sent"
            )
            continue
        taken[merge.learner, found.life.number, merge.fragment].append((found.since, found.since + merge.tokens, merge))
    for (learner, _, _), parts in sorted(taken.items()):
        parts.sort(key=lambda part: part[:2])
        for (_, end, first), (since, _, second) in pairwise(parts):
            if since < end:
                yield Violation(
                    "double_counted",
                    f"{end - since} tokens of {learner} are in {_words(first)} and again in {_words(second)}",
                )


def work_lost(histories: Histories) -> Iterator[Violation]:
    """What a learner takes to be merged, and will not send again, is merged."""
    merged = {(m.learner, m.fragment, m.version): m for m in histories.merges()}
    for life in histories.worker_lives():
        for line in life.of("applied"):
            if line["merged"] is not None and (life.name, line["fragment"], line["merged"]) not in merged:
                yield Violation(
                    "work_lost",
                    f"{life.name} takes its contribution to round {line['merged']} of fragment {line['fragment']} "
                    "to be merged, and no version holds it",
                )  # fmt: skip


def _words(merge: Merge) -> str:
    return f"version {merge.version} of fragment {merge.fragment} ({merge.shard})"


# ---------------------------------------------------------------- P2: no announced version is lost; P3: same bytes


def lost_versions(histories: Histories) -> Iterator[Violation]:
    """A later life of a shard goes on from the last version that an earlier one announced; nobody applies another."""
    announced: set[tuple[int, int, int]] = set()
    for shard, lives in histories.shards.items():
        highest: dict[int, int] = {}
        for life in lives:
            first: set[int] = set()
            for line in life.of("announced", "restored"):
                fragment, version = line["fragment"], line["version"]
                announced.add((fragment, line["epoch"], version))
                before = highest.get(fragment, -1)
                if fragment not in first and version < before:
                    yield Violation(
                        "lost_versions",
                        f"{shard} had announced version {before} of fragment {fragment}, and came back with {version}",
                        before - version,
                    )
                elif fragment in first and version != before + 1:
                    yield Violation(
                        "lost_versions", f"{shard} announced version {version} of fragment {fragment} after {before}"
                    )
                first.add(fragment)
                highest[fragment] = version
    for life in histories.worker_lives():
        for line in life.of("applied"):
            if (line["fragment"], line["epoch"], line["version"]) not in announced:
                yield Violation(
                    "lost_versions",
                    f"{life.name} holds version {line['version']} of fragment {line['fragment']}, "
                    f"epoch {line['epoch']}, which no shard announced",
                )  # fmt: skip


def differing_bytes(histories: Histories) -> Iterator[Violation]:
    """Everybody who holds a version holds the same bytes."""
    seen: dict[tuple[int, int, int], dict[str, str]] = defaultdict(dict)
    for life in (*histories.shard_lives(), *histories.worker_lives()):
        for line in life.of("announced", "restored", "applied"):
            name = line["fragment"], line["epoch"], line["version"]
            seen[name].setdefault(line["checksum"], life.name)
    for (fragment, epoch, version), holders in sorted(seen.items()):
        if len(holders) > 1:
            said = ", ".join(f"{checksum} at {name}" for checksum, name in holders.items())
            yield Violation("differing_bytes", f"version {version} of fragment {fragment}, epoch {epoch}: {said}")


# ---------------------------------------------------------------- P4: fencing


def fencing(histories: Histories) -> Iterator[Violation]:
    """Nothing of a generation that is over is accepted or merged. Who says goodbye keeps what it has contributed."""
    for life in histories.shard_lives():
        current: dict[str, int] = {}
        over: dict[tuple[str, int], str] = {}
        for line in life.of("joined", "gone", "accepted", "merging"):
            match line["what"]:
                case "joined":
                    current[line["learner"]] = line["generation"]
                case "gone":
                    over[line["learner"], line["generation"]] = line["code"]
                case "accepted":
                    who = line["learner"], line["generation"]
                    if who in over or current.get(line["learner"]) != line["generation"]:
                        yield Violation("fencing", f"{life.name} accepted a push of {_generation(who, over)}")
                case "merging":
                    for c in line["contributions"]:
                        who = c["learner"], c["generation"]
                        if over.get(who, "LEFT") != "LEFT":
                            yield Violation(
                                "fencing",
                                f"{life.name} merged into version {line['version']} of fragment {line['fragment']} "
                                f"a contribution of {_generation(who, over)}",
                            )


def _generation(who: tuple[str, int], over: dict[tuple[str, int], str]) -> str:
    learner, generation = who
    return f"{learner}, generation {generation}, which was over ({over.get(who, 'a newer one had joined')})"


# ---------------------------------------------------------------- the ledger


def accounting(histories: Histories) -> Iterator[Violation]:
    """Each accepted contribution is merged in its round, or its generation is over; nothing else is merged."""
    for life in histories.shard_lives():
        accepted: dict[tuple[str, int, int, int], int] = {}  # not merged yet -> tokens
        over: set[tuple[str, int]] = set()
        for line in life.of("accepted", "gone", "merging"):
            match line["what"]:
                case "accepted":
                    accepted[line["learner"], line["generation"], line["fragment"], line["round"]] = line["tokens"]
                case "gone":
                    over.add((line["learner"], line["generation"]))
                case "merging":
                    yield from _closed(life, line, accepted, over)


def _closed(
    life: Life, merging: Line, accepted: dict[tuple[str, int, int, int], int], over: set[tuple[str, int]]
) -> Iterator[Violation]:
    where = f"round {merging['version']} of fragment {merging['fragment']} ({life.name})"
    for c in merging["contributions"]:
        tokens = accepted.pop((c["learner"], c["generation"], merging["fragment"], merging["version"]), None)
        if tokens != c["tokens"]:
            yield Violation(
                "accounting", f"{where} merged {c['tokens']} tokens of {c['learner']}, accepted were {tokens}"
            )
    for learner, generation, fragment, number in list(accepted):
        if (fragment, number) == (merging["fragment"], merging["version"]):
            tokens = accepted.pop((learner, generation, fragment, number))
            if (learner, generation) not in over:
                yield Violation("accounting", f"{where} forgot {tokens} accepted tokens of {learner}")


# ---------------------------------------------------------------- P6: nobody waits


def stood_still(gaps: Sequence[tuple[float, str]], max_s: float) -> Iterator[Violation]:
    """No living worker goes without an inner step for longer than `max_s` seconds. Gaps as of goodput.py."""
    for seconds, worker in gaps:
        if seconds > max_s:
            yield Violation("stood_still", f"{worker} took no inner step for {seconds:.1f} s (at most {max_s:g} s)")
