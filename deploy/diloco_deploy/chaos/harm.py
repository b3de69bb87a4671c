"""What hostile processes got out of a run, as the shards recorded it. Nobody reads what they would say themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from diloco_common.observe.histories import Histories, Line


def harm_of(histories: Histories, name: str) -> dict[str, Any]:
    """One hostile process, for the result."""
    declined = Counter(line["code"] or line["outcome"] for line in lines_of(histories, name, "declined"))
    merged = [m for m in histories.merges() if m.learner == name and m.fragment not in histories.companions]
    versions = sum(v.survives for v in histories.lineage.versions if v.fragment not in histories.companions)
    return {
        "name": name,
        "joined": sum(1 for _ in lines_of(histories, name, "joined")),
        "accepted": sum(1 for _ in lines_of(histories, name, "accepted")),
        "declined": dict(declined.most_common()),
        "merged": len(merged),
        "tokens_claimed": sum(merge.tokens for merge in merged),
        "versions_share": round(len(merged) / versions, 4) if versions else 0.0,
    }


def lines_of(histories: Histories, name: str, what: str) -> Iterator[Line]:
    """What shards wrote about a learner."""
    return (line for process in histories.shard_processes() for line in process.of(what) if line["learner"] == name)


def words_of(harm: Sequence[dict[str, Any]]) -> list[str]:
    """The same for people."""
    return [
        f"{one['name']}: joined {one['joined']} times; {one['accepted']} contributions accepted, "
        f"{one['merged']} merged ({one['versions_share']:.1%} of the versions); declined {_listed(one['declined'])}"
        for one in harm
    ]


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} x {code}" for code, count in counts.items()) or "none"
