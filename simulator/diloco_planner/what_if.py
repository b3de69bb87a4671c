"""`diloco replay`: what was decided again, and what a run would have come to with other settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diloco_common.errors import ConfigError
from diloco_common.options import NO_SETTINGS, settings_from
from diloco_common.settings import Settings
from diloco_common.settings_loader import Given
from diloco_planner.observed import Result, observe
from diloco_planner.replay import Replayed, read, replay

ROWS = {
    "tokens_trained": ("tokens trained", ",.0f"), "tokens_merged": ("tokens merged", ",.0f"),
    "rounds": ("rounds", ",.0f"), "participants_mean": ("participants", ".2f"), "late_share": ("late", ".1%"),
    "evictions": ("evictions", ",.0f"),
}  # fmt: skip


@dataclass(frozen=True)
class Changes:
    """What is asked for; None: as in the run."""

    h: int | None = None
    quorum: str | None = None
    grace: str | None = None
    push: str | None = None
    shards: int | None = None

    @property
    def words(self) -> str:
        """Empty: nothing."""
        return " ".join(f"--{name} {value}" for name, value in asdict(self).items() if value is not None)

    def of(self, settings: Settings) -> Settings:
        """Raises ConfigError."""
        flags = {
            "sync.sync_every": self.h, "sync.quorum": self.quorum, "sync.grace": self.grace, "sync.push": self.push
        }  # fmt: skip
        run = {f"sync.{name}": Given(value, "the record") for name, value in settings.sync.model_dump().items()}
        return settings.model_copy(update={"sync": settings_from(NO_SETTINGS, flags, {}, run).sync})


@dataclass(frozen=True)
class Answer:
    replayed: list[Replayed]
    results: dict[str, Result]
    """By the record, simulated as it was, and simulated with what is asked; empty: nothing is asked."""
    missing: str = ""
    """What the record lacks; empty: nothing."""

    def as_json(self) -> dict[str, Any]:
        return {
            "replayed": [asdict(one) for one in self.replayed],
            "results": {name: asdict(result) for name, result in self.results.items()},
            "missing": self.missing,
        }


def answer(history: Path, changes: Changes, seed: int) -> Answer:
    """Raises DataError and ConfigError."""
    replayed = replay(history)
    if not changes.words:
        return Answer(replayed, {})
    run = observe(read(history))
    if changes.quorum not in (None, "all") and int(changes.of(run.settings).sync.quorum) > len(run.learners):
        raise ConfigError(f"--quorum {changes.quorum}: there are {len(run.learners)} learners; ask for so many, or all")
    fragments = run.settings.sync.fragments
    if changes.shards is not None and changes.shards > fragments:
        raise ConfigError(f"--shards {changes.shards}: there are {fragments} fragments; ask for so many at most")
    missing = ""
    if run.recorded < run.shards:
        missing = (
            f"the record has {run.recorded} of {run.shards} shards: its rounds are of those, simulated ones of all; "
            "give the folder with all of them"
        )
    return Answer(replayed, {
        "recorded": run.result,
        "simulated": run.simulate(run.settings, run.shards, seed),
        changes.words: run.simulate(changes.of(run.settings), changes.shards or run.shards, seed),
    }, missing)  # fmt: skip


def as_text(found: Answer) -> str:
    return "\n".join(_lines(found))


def _lines(found: Answer) -> Iterator[str]:
    for one in found.replayed:
        what = one.differs or "every decision is the same"
        yield (
            f"{one.name}, epoch {one.epoch}: {one.calls:,} calls in {one.seconds:,.0f} s, {one.rounds:,} rounds, "
            f"{one.learners} learners: {what}"
        )
    if found.missing:
        yield found.missing
    if found.results:
        wide = 3 + max(map(len, (*found.results, "simulated")))
        yield ""
        yield f"{'':<16}" + "".join(f"{name:>{wide}}" for name in found.results)
        for key, (title, form) in ROWS.items():
            yield f"{title:<16}" + "".join(f"{getattr(result, key):>{wide}{form}}" for result in found.results.values())
