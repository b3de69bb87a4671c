"""The judge: do histories keep the promises? Its pure functions read what processes wrote, and name every violation.

The same judge serves real processes (`diloco_chaos`), simulated ones and contract tests. It follows versions from base
to base (`histories.py`), and compares the tokens in versions with the tokens that each process of a learner trained, by
that process's own count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec

from diloco_simulator.verify.histories import Histories, Line, Merge, Name, Process, Push, Version


@dataclass(frozen=True)
class BrokenPromise:
    check: str
    """Name of the function that found it."""
    what: str
    count: int = 1

    def __str__(self) -> str:
        return f"{self.check}: {self.what}"


Given = ParamSpec("Given")


def check(find: Callable[Given, Iterator[str | BrokenPromise]]) -> Callable[Given, Iterator[BrokenPromise]]:
    """Turn the messages of a check into broken promises under the check's name."""

    @wraps(find)
    def found(*args: Given.args, **how: Given.kwargs) -> Iterator[BrokenPromise]:
        for what in find(*args, **how):
            yield BrokenPromise(find.__name__, what) if isinstance(what, str) else what

    return found


def violations(
    histories: Histories,
    *,
    excused: Container[tuple[int, int]] = (),
    claimants: Container[str] = (),
) -> list[BrokenPromise]:
    """All violations that the histories of one run, from its beginning, show.

    `excused` as in `lost_versions`, `claimants` as in `double_counted`.
    """
    return [
        *double_counted(histories, claimants),
        *work_lost(histories, excused, claimants=claimants),
        *lost_versions(histories, excused),
        *differing_bytes(histories),
        *fencing(histories),
        *accounting(histories),
    ]


# ---------------------------------------------------------------- P1: exactly once


@check
def double_counted(histories: Histories, claimants: Container[str] = ()) -> Iterator[str]:
    """No version holds a token of a process twice, and no learner will contribute a token that a version holds already.

    This compares trained tokens, not pushes: a second push of the same work counts as a push of its own.

    `claimants`: learner ids under which somebody lies. Shards hold only claims under these ids, and promise them
    nothing. All other promises hold.
    """
    lineage = histories.lineage
    for version in lineage.versions:
        for merge in version.merges:
            if merge.learner in claimants:
                continue
            if merge.push is None:
                yield f"{_words(merge)} holds a contribution that {merge.learner} never sent"
            elif (before := merge.previous) is not None and before.push is not None:
                twice = before.push.end - merge.push.since
                if twice > 0:
                    yield f"{twice} tokens of {merge.learner} are in {_words(before)} and again in {_words(merge)}"
    for process in _believed(histories, claimants):
        for line, push in _fates(histories, process):
            if line["what"] == "carried":
                for merge in lineage.merges_of(push) if push is not None else ():
                    if merge.into.survives:
                        yield (
                            f"{process.name} counts its contribution to round {line['round']} of fragment "
                            f"{line['fragment']} as not merged, but {_words(merge)} holds it"
                        )
                if (into := _left_out(histories, push)) is not None and into.survives:
                    where = f"version {into.version} of fragment {into.fragment}"
                    yield f"{process.name} counts as not merged, and contributes again, what {where} left out"
            elif (held := _held(histories, line)) is not None and (last := held.last_of(process)) is not None:
                assert last.push is not None
                if last.push.end > line["since"]:
                    yield (
                        f"{process.name} counts {line['since']} tokens as merged in fragment {held.fragment}, "
                        f"but {_words(last)} holds its tokens up to {last.push.end}"
                    )


@check
def work_lost(
    histories: Histories,
    excused: Container[tuple[int, int]] = (),
    *,
    claimants: Container[str] = (),
) -> Iterator[str]:
    """If a learner counts work as merged, it will not send it again: the version it applies holds that work for good,
    or its shard has left out that contribution.

    While each version that a learner applies comes from the previous one, they hold its tokens without a gap. After a
    loss, or after its shard has forgotten a contribution, this holds again from the learner's count at that time.

    `excused`: as in `lost_versions`. The contributions in a lost version are lost with it.
    `claimants`: as in `double_counted`.
    """
    for process in _believed(histories, claimants):
        holds: dict[int, tuple[Version | None, int]] = {}  # fragment -> version, and the tokens counted as merged in it
        for line, push in _fates(histories, process):
            if line["what"] == "carried":
                continue
            fragment, since, held = line["fragment"], line["since"], _held(histories, line)
            before, reached = holds.get(fragment, (None, 0))
            holds[fragment] = held, since
            if held is None:
                continue
            if line["merged"] is not None:
                into = _left_out(histories, push)
                if into is not None and held.comes_from(into):
                    continue  # this work is gone; its learner applied the version as if it were merged
                merge = _merged(histories, push, line["merged"], held)
                stays = merge is not None and (merge.into.survives or (merge.into.lost_in, fragment) in excused)
                if not stays:
                    yield (
                        f"{process.name} counts its contribution to round {line['merged']} of fragment {fragment} "
                        f"as merged, but {'no version holds it' if merge is None else f'{_words(merge)} was lost'}"
                    )
                if merge is None:
                    continue
            if line["forgotten"] is None and before is not None and held.comes_from(before):
                yield from _gaps(process, before, held, reached, since)


def _believed(histories: Histories, claimants: Container[str]) -> Iterator[Process]:
    """The processes of learners whose ids no hostile learner uses."""
    return (process for process in histories.learner_processes() if process.name not in claimants)


def _gaps(process: Process, before: Version, held: Version, reached: int, since: int) -> Iterator[str]:
    """Tokens missing between an earlier and a later version, though the learner counts them as merged."""
    new, merge, known = list[Merge](), held.last_of(process), before.last_of(process)
    while merge is not None and merge is not known:
        new.append(merge)
        merge = merge.previous
    where = f"fragment {held.fragment}"
    for merge in reversed(new):
        assert merge.push is not None
        if merge.push.since > reached:
            yield f"{merge.push.since - reached} tokens of {process.name} before {_words(merge)} are in no version"
        reached = max(reached, merge.push.end)
    if since > reached:
        yield (
            f"{process.name} counts {since} tokens as merged in {where}, "
            f"but version {held.version} holds its tokens up to {reached}"
        )


def _merged(histories: Histories, push: Push | None, round_number: int, version: Version) -> Merge | None:
    """The merge that brought a contribution into a version. None: the version does not hold it."""
    if push is None or push.round != round_number:
        return None
    return next((merge for merge in histories.lineage.merges_of(push) if version.comes_from(merge.into)), None)


def _left_out(histories: Histories, push: Push | None) -> Version | None:
    """The version whose round held a contribution that its shard left out."""
    version = None if push is None else histories.lineage.version(push.fragment, push.shard_epoch, push.round)
    return version if version is not None and push in version.left_out else None


def _fates(histories: Histories, process: Process) -> Iterator[tuple[Line, Push | None]]:
    """Lines where a learner carried a contribution or applied a version, each with the contribution in flight."""
    pushes = iter(histories.pushes_of[process])
    under_way: dict[int, Push] = {}
    for line in process.lines:
        what = line["what"]
        if what == "pushed":
            push = next(pushes)[1]
            under_way[push.fragment] = push
        elif what == "applied":
            decided = line["merged"] is not None or line["forgotten"] is not None
            fragment = line["fragment"]
            yield line, under_way.pop(fragment, None) if decided else under_way.get(fragment)
        elif what == "carried":
            found = under_way.get(line["fragment"])
            facts = line["shard_epoch"], line["round"], line["tokens"]
            if found is not None and (found.shard_epoch, found.round, found.tokens) == facts:
                del under_way[line["fragment"]]
                yield line, found
            else:
                yield line, None  # it was never sent


def _held(histories: Histories, line: Line) -> Version | None:
    return histories.lineage.version(line["fragment"], line["epoch"], line["version"])


def _words(merge: Merge) -> str:
    return f"version {merge.version} of fragment {merge.fragment} ({merge.shard})"


# ---------------------------------------------------------------- P2: no announced version is lost


@check
def lost_versions(histories: Histories, excused: Container[tuple[int, int]] = ()) -> Iterator[str | BrokenPromise]:
    """A shard that comes back continues from the last version it announced, and learners apply only announced versions.

    `excused`: pairs of an epoch and a fragment. In that epoch the shard may come back with an older version of the
    fragment: its disk was made to lose versions, or it has no disk, or it may announce versions before it writes them.
    """
    for shard, processes in histories.shards.items():
        latest: dict[int, Version] = {}
        for process in processes:
            yield from _going_on(histories, shard, process, latest, excused)
    for process in histories.learner_processes():
        for line in process.of("applied"):
            if _held(histories, line) is None:
                yield (
                    f"{process.name} holds version {line['version']} of fragment {line['fragment']}, "
                    f"epoch {line['epoch']}, which no shard announced"
                )


def _going_on(
    histories: Histories, shard: str, process: Process, latest: dict[int, Version], excused: Container[tuple[int, int]]
) -> Iterator[str | BrokenPromise]:
    """One epoch of a shard. `latest`: fragment -> its last version, in this epoch or an earlier one."""
    epoch, began = process.epoch, set[int]()
    for line in process.of("announced", "restored"):
        fragment, version, now = line["fragment"], line["version"], histories.lineage.at(line)
        before = latest.get(fragment)
        if fragment in began:
            assert before is not None
            if version != before.version + 1:
                yield f"{shard} announced version {version} of fragment {fragment} after {before.version}"
        elif before is not None and now.line is line and now.base is None and version > 0:
            yield f"{shard} came back with version {version} of fragment {fragment}, which it never made"
        elif before is not None and not now.comes_from(before) and (epoch, fragment) not in excused:
            yield BrokenPromise(
                "lost_versions",
                f"{shard} had announced version {before.version} of fragment {fragment}, but came back with {version}",
                max(1, before.version - version),
            )
        began.add(fragment)
        latest[fragment] = now


# ---------------------------------------------------------------- P3: same bytes for everyone


@check
def differing_bytes(histories: Histories) -> Iterator[str]:
    """All holders of a version hold the same bytes, and no two versions have the same name."""
    seen: dict[Name, dict[str, str]] = defaultdict(dict)
    for process in histories.shard_processes():
        for line in process.of("announced", "restored"):
            names = {line["epoch"]} if line["what"] == "announced" else {line["epoch"], process.epoch}
            for epoch in names:  # a restored version may later get a name in this epoch
                seen[line["fragment"], epoch, line["version"]].setdefault(line["checksum"], process.name)
    for process in histories.learner_processes():
        for line in process.of("applied"):
            if line["checksum"] is not None:
                seen[line["fragment"], line["epoch"], line["version"]].setdefault(line["checksum"], process.name)
    for (fragment, epoch, version), holders in sorted(seen.items()):
        if len(holders) > 1:
            said = ", ".join(f"{checksum} at {name}" for checksum, name in holders.items())
            yield f"version {version} of fragment {fragment}, epoch {epoch}: {said}"
    yield from _names(histories)
    yield from _restored(histories)


def _names(histories: Histories) -> Iterator[str]:
    """An epoch begins once, and gives its number to the versions made in it."""
    for shard, processes in histories.shards.items():
        epochs = set[int]()
        for process in processes:
            epoch = process.epoch
            if epoch in epochs:
                yield f"{shard} began epoch {epoch} twice"
            epochs.add(epoch)
            for line in process.of("announced", "restored"):
                allowed = (epoch, line["stored_epoch"]) if line["what"] == "restored" else (epoch,)
                if line["epoch"] not in allowed:
                    what = f"version {line['version']} of fragment {line['fragment']}"
                    yield f"{shard} gave {what} the epoch {line['epoch']}, in epoch {epoch}"


def _restored(histories: Histories) -> Iterator[str]:
    """A version restored from the disk has the same state as before, whatever its name is now."""
    for process in histories.shard_processes():
        for line in process.of("restored"):
            version = histories.lineage.at(line)
            what = f"version {line['version']} of fragment {line['fragment']} came back to {process.name}"
            for fact in ("state", "tokens_merged"):
                if line[fact] != version.line[fact]:
                    yield f"{what} with another {fact}: {line[fact]} instead of {version.line[fact]}"


# ---------------------------------------------------------------- P4: fencing


@check
def fencing(histories: Histories) -> Iterator[str]:
    """A shard accepts and merges nothing from a generation that is over. It may merge what came before a goodbye."""
    for process in histories.shard_processes():
        current: dict[str, int] = {}
        over: dict[tuple[str, int], str] = {}
        for line in process.of("joined", "gone", "accepted", "merging"):
            match line["what"]:
                case "joined":
                    current[line["learner"]] = line["generation"]
                case "gone":
                    over[line["learner"], line["generation"]] = line["code"]
                case "accepted":
                    who = line["learner"], line["generation"]
                    if who in over or current.get(line["learner"]) != line["generation"]:
                        yield f"{process.name} accepted a push of {_generation(who, over)}"
                case "merging":
                    into = f"version {line['version']} of fragment {line['fragment']}"
                    for c in line["contributions"]:
                        who = c["learner"], c["generation"]
                        if over.get(who, "LEFT") != "LEFT":
                            what = f"a contribution of {_generation(who, over)}"
                            yield f"{process.name} merged into {into} {what}"


def _generation(who: tuple[str, int], over: dict[tuple[str, int], str]) -> str:
    learner, generation = who
    return f"{learner}, generation {generation}, which was over ({over.get(who, 'a newer one had joined')})"


# ---------------------------------------------------------------- the ledger


@check
def accounting(histories: Histories) -> Iterator[str]:
    """Every pushed token ends up merged, carried, refused or in flight; nothing else is merged.

    A shard merges every contribution it accepted, unless the generation was evicted or the shard left it out. A
    version counts the tokens it holds, or the number that its shard recorded for them. A learner learns the fate of one
    contribution before it sends the next, and sends only tokens it has trained.
    """
    for process in histories.shard_processes():
        yield from _ledger(process)
    for version in histories.lineage.versions:
        merged = sum(merge.counted for merge in version.merges)
        if version.base is not None:
            counted = version.line["tokens_merged"] - version.base.line["tokens_merged"]
            if counted != merged:
                where = f"version {version.version} of fragment {version.fragment}, epoch {version.epoch}"
                yield f"{where} merged {merged} tokens, but counts {counted}"
    for process in histories.learner_processes():
        yield from _one_after_the_other(histories, process)


def _ledger(process: Process) -> Iterator[str]:
    """One epoch of a shard."""
    accepted: dict[tuple[int, int], dict[tuple[str, int], int]] = defaultdict(dict)  # round -> tokens of contributions
    evicted: set[tuple[str, int]] = set()
    for line in process.of("accepted", "gone", "merging"):
        match line["what"]:
            case "accepted":
                accepted[line["fragment"], line["round"]][line["learner"], line["generation"]] = line["tokens"]
            case "gone":
                if line["code"] != "LEFT":
                    evicted.add((line["learner"], line["generation"]))
            case "merging":
                held = accepted.pop((line["fragment"], line["version"]), {})
                yield from _closed(process, line, held, evicted)


def _closed(
    process: Process, merging: Line, held: dict[tuple[str, int], int], evicted: set[tuple[str, int]]
) -> Iterator[str]:
    where = f"round {merging['version']} of fragment {merging['fragment']} ({process.name})"
    for c in merging["contributions"]:
        tokens = held.pop((c["learner"], c["generation"]), None)
        if tokens != c["tokens"]:
            yield f"{where} merged {c['tokens']} tokens of {c['learner']}, but had accepted {tokens}"
        if not 0 < c.get("counted", c["tokens"]) <= c["tokens"]:
            yield f"{where} counts {c['counted']} of {c['tokens']} tokens of {c['learner']}"
    for c in merging.get("left_out", ()):
        if held.pop((c["learner"], c["generation"]), None) != c["tokens"]:
            yield f"{where} left out {c['tokens']} tokens of {c['learner']}, which it had not accepted"
    for who, tokens in held.items():
        if who not in evicted:
            yield f"{where} forgot {tokens} accepted tokens of {who[0]}"


def _one_after_the_other(histories: Histories, process: Process) -> Iterator[str]:
    """One process of a learner."""
    pushes = iter(histories.pushes_of[process])
    under_way: dict[int, Push] = {}
    born = trained = int(process.lines[0]["tokens"])
    for line in process.of("born", "stepped", "pushed", "carried", "applied"):
        match line["what"]:
            case "born" | "stepped":
                trained = line["tokens"]
            case "carried":
                under_way.pop(line["fragment"], None)
            case "applied":
                if line["merged"] is not None or line["forgotten"] is not None:
                    under_way.pop(line["fragment"], None)
            case "pushed":
                push = next(pushes)[1]
                where = f"{process.name} contributed to round {push.round} of fragment {push.fragment}"
                if push.end > trained:
                    yield f"{where} tokens up to {push.end}, but had trained only {trained}"
                if push.since < born:
                    yield f"{where} tokens from {push.since} on, and was resumed with {born} trained before"
                before = under_way.setdefault(push.fragment, push)
                if before is not push:
                    yield f"{where} before it knew the fate of its contribution to round {before.round}"
                    under_way[push.fragment] = push


# ---------------------------------------------------------------- P6: nobody waits


@check
def stood_still(gaps: Sequence[tuple[float, str]], max_s: float) -> Iterator[str]:
    """No living worker goes without an inner step for longer than `max_s` seconds. `gaps`: seconds, and the worker."""
    for seconds, worker in gaps:
        if seconds > max_s:
            yield f"{worker} took no inner step for {seconds:.1f} s (at most {max_s:g} s)"
