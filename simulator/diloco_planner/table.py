"""The numbers of a plan, each with its formula and its source. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from diloco_common import formulas, units
from diloco_common.formulas import BITS
from diloco_common.settings import OVERLAP_STEPS
from diloco_planner.choice import TRAINING_BYTES, Choice, PlannedRun, calls_of, written_of


class PlanFigure(NamedTuple):
    name: str
    value: float
    unit: str
    """"bytes", "bytes/s", "bit/s", "s", "" for a number."""
    formula: str
    source: str

    @property
    def shown(self) -> str:
        match self.unit:
            case "bytes":
                return units.size(self.value)
            case "bytes/s":
                return f"{units.size(self.value)}/s"
            case "bit/s":
                return units.bit_rate(self.value)
            case "s":
                return f"{self.value:.3g} s"
        return units.count(self.value)


def figures(asked: PlannedRun, choice: Choice) -> list[PlanFigure]:
    """What crosses the links, and what a shard holds in memory, writes and keeps on disk."""
    return [*_link(asked, choice), *_shard(asked, choice)]


def _link(asked: PlannedRun, choice: Choice) -> Iterator[PlanFigure]:
    push, pull = BITS[choice.encodings.push], BITS[choice.encodings.pull]
    n, every, link = asked.params_moved, choice.every, asked.link
    wan, moves = "docs/wan.md", f"N{_more(asked)}"
    yield PlanFigure(
        "a learner sends", formulas.rate(n, push, every, asked.step_s), "bit/s", f"{moves} x {push:g} bits / (H t)", wan
    )
    yield PlanFigure(
        "a learner receives", formulas.rate(n, pull, every, asked.step_s), "bit/s",
        f"{moves} x {pull:g} bits / (H t)", wan,
    )  # fmt: skip
    yield PlanFigure(
        "a fragment, there and back", _fragment_s(asked, choice), "s",
        "N/P x push / up + N/P x pull / down + 2 round trips", wan,
    )  # fmt: skip
    whole, words = (2 * asked.params, "2 N") if asked.companions_every else (asked.params, "N")
    yield PlanFigure("a start: the whole model", whole * 16 / link.down, "s", f"{words} x 16 bits / down", wan)
    moved = formulas.bytes_rate(n, push, pull, asked.learners, every, asked.step_s) / choice.shards
    yield PlanFigure(
        "a shard's link, both ways together", 8 * moved, "bit/s", f"L {moves} (push + pull) bits / (H t S)", wan
    )


def _fragment_s(asked: PlannedRun, choice: Choice) -> float:
    """Seconds from the snapshot of a fragment to its new version: N/P parameters up, N/P down, two round trips."""
    push, pull, link = BITS[choice.encodings.push], BITS[choice.encodings.pull], asked.link
    each = asked.params / choice.fragments
    return each * push / link.up + each * pull / link.down + 2 * link.round_trip_s


def _shard(asked: PlannedRun, choice: Choice) -> Iterator[PlanFigure]:
    page = "docs/performance.md"
    owned, held = asked.params / choice.shards, -(-choice.fragments // choice.shards)
    memory = formulas.shard_memory(
        owned, held, asked.learners, BITS[choice.encodings.push], asked.outer, choice.encodings.pull,
        companions=asked.companions_every is not None,
    )  # fmt: skip
    kept = formulas.version_bytes(asked.outer, choice.encodings.pull)
    if asked.companions_every:
        kept += formulas.companion_bytes(choice.encodings.pull)
    written = written_of(asked, choice.encodings.pull)
    yield PlanFigure(
        "memory of a shard, at most", memory, "bytes",
        "260 MB + 8 MB + n x (10; 16 with Adam; 2 more for changes or float32) + 8.5 n/P' + 0.62 MB L + L n push / 8"
        + (" + companions: n x (8; 2 more for changes) + L n push / 8" if asked.companions_every else ""), page,
    )  # fmt: skip
    yield PlanFigure(
        "disk of a shard", formulas.shard_disk(owned, owned / held, kept, 0), "bytes",
        f"{kept} n x 2 versions + 2 files being written", page,
    )  # fmt: skip
    yield PlanFigure(
        "each regular checkpoint", kept * owned, "bytes", f"{kept} n (checkpoint.keep of them)", "docs/checkpoints.md"
    )
    yield PlanFigure(
        "a shard's disk writes", formulas.disk_rate(owned, written, choice.every, asked.step_s), "bytes/s",
        f"{written:g} n / (H t)", page,
    )  # fmt: skip
    per_s = calls_of(asked, choice.fragments, choice.every) / choice.shards
    calls = f"L P{_more(asked)} / (H t S); a core serves {formulas.CALLS_PER_S:g}"
    yield PlanFigure("contributions to a shard, each second", per_s, "", calls, page)


def _more(asked: PlannedRun) -> str:
    """The text for the factor by which companions increase the model's traffic."""
    return f" (1 + 1/{asked.companions_every})" if asked.companions_every else ""


def learner_figures(asked: PlannedRun, choice: Choice) -> list[PlanFigure]:
    """What a learner's process, or one rank of an island (FSDP2), holds, from `sizes.py`. Imports torch."""
    encodings = choice.encodings
    waits_s = _fragment_s(asked, choice) + OVERLAP_STEPS * asked.step_s
    apart_s = choice.every * asked.step_s / choice.fragments  # between the rounds of two fragments
    under_way = min(choice.fragments, max(1, math.ceil(waits_s / apart_s)))

    from diloco_common.codec import get_codec
    from diloco_planner.sizes import learner_bytes

    each = max(1, round(asked.params / choice.fragments / asked.ranks))
    companions = asked.companions_every is not None
    found = learner_bytes(
        each, choice.fragments, push=encodings.push, pull=encodings.pull, under_way=under_way,
        companions=choice.fragments * companions,
    )  # fmt: skip
    snapshot = get_codec(encodings.push).progress_dtype.itemsize
    sizes, held = "diloco_planner/sizes.py", "n" if asked.ranks == 1 else f"n = N / {asked.ranks}"
    return [
        PlanFigure(
            "kept by diloco: anchors, residuals", found.kept, "bytes",
            f"{found.kept / found.elements:.3g} bytes per parameter held ({held})", sizes,
        ),
        PlanFigure(
            f"for {under_way} fragment{'s' * (under_way > 1)}{' and as many companions' * companions} under way",
            found.under_way, "bytes",
            f"snapshot {snapshot} + encoded + version + difference 4, of each", sizes,
        ),
        PlanFigure("diloco's part, at most", found.peak, "bytes", "the sum", sizes),
        PlanFigure(
            "the training itself", TRAINING_BYTES * found.elements, "bytes",
            f"{TRAINING_BYTES} bytes per parameter (weights, gradients, AdamW), without activations", "torch",
        ),
        PlanFigure("pushed for each version", found.pushed, "bytes", "what it owns, encoded", sizes),
        PlanFigure("pulled for each version", found.pulled, "bytes", "what it holds, encoded", sizes),
    ]  # fmt: skip


def settings_of(asked: PlannedRun, choice: Choice) -> dict[str, dict[str, str | int]]:
    """Section -> key -> value: what a run.toml holds."""
    rarely = {"companions_every": asked.companions_every} if asked.companions_every else {}
    averaged: dict[str, dict[str, str | int]] = {"train": {"average_momentum": True}} if rarely else {}
    return {
        **averaged,
        "sync": {
            **rarely,
            "fragments": choice.fragments,
            "sync_every": choice.every,
            "push": choice.encodings.push,
            "pull": choice.encodings.pull,
        },
        "shard": {"count": choice.shards},
        "outer": {"optimizer": asked.outer},
    }


def toml(settings: dict[str, dict[str, str | int]]) -> str:
    """The settings as text of a file for --config."""
    lines: list[str] = []
    for section, values in settings.items():
        lines += [
            f"[{section}]",
            *(f"{k} = {str(v).lower() if isinstance(v, int) else f'{chr(34)}{v}{chr(34)}'}" for k, v in values.items()),
        ]
        lines.append("")
    return "\n".join(lines)


def lines_of(rows: Sequence[PlanFigure]) -> Iterator[str]:
    """The rows as aligned lines, with formula and source."""
    name = max(len(row.name) for row in rows)
    value = max(len(row.shown) for row in rows)
    for row in rows:
        yield f"  {row.name:<{name}}  {row.shown:>{value}}   {row.formula}  [{row.source}]"
