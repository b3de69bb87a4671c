"""Published figures beside the planner's, from the same inputs. `python -m diloco_planner.published` prints the tables.

Fitted in `chips.py`: two pauses to the five elastic cells of the goodput table, in whole seconds, and the restart to
the three cells up to 600,000 chips. No other number was fitted, but decoupled cells were known while the model was
chosen.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from diloco_common.formulas import BITS
from diloco_common.settings import Settings, SyncSettings
from diloco_planner.chips import PRESETS, YEAR_S, Failures, Island, island_timeline
from diloco_planner.plans import LearnerPlan, RunOutcome, ShardPlan
from diloco_planner.ways import (
    SPARES_ENOUGH,
    Sent,
    data_parallel_bits,
    decoupled,
    one_island,
    synchronous,
)
from diloco_planner.world import PlannedWorld

GOODPUT: Mapping[float, tuple[int, ...]] = {
    150e3: (72, 88, 94, 96, 98, 99),
    300e3: (57, 80, 88, 93, 96, 98),
    600e3: (38, 69, 80, 89, 94, 96),
    1.2e6: (27, 58, 70, 82, 88, 93),
    2.4e6: (18, 40, 54, 73, 80, 86),
}
"""Chips -> percent: data-parallel with restarts, elastic, then 2, 4, 8 and 16 learners (arXiv 2604.21428)."""
WAYS = ("restart", "elastic", "M=2", "M=4", "M=8", "M=16")
FITTED = {(c, "elastic") for c in GOODPUT} | {(c, "restart") for c in (150e3, 300e3, 600e3)}


@dataclass(frozen=True)
class PublishedCell:
    chips: float
    way: str
    published: float
    """In percent."""
    ours: float

    @property
    def is_fitted(self) -> bool:
        return (self.chips, self.way) in FITTED


def goodput_table(hours: float = 240.0, seed: int = 0) -> list[PublishedCell]:
    """All thirty cells, each from this many simulated hours."""
    template, cells = LearnerPlan("", Island(1)), []
    for chips, row in GOODPUT.items():
        for way, published in zip(WAYS, row, strict=True):
            if way.startswith("M="):
                ours = decoupled(chips, int(way[2:]), template, hours, seed)
            else:
                ours = one_island(chips, template, hours, seed, elastic=way == "elastic")
            cells.append(PublishedCell(chips, way, published, 100 * ours))
    return cells


# ------------------------------------------------------------------ fleets


def _available(island: Island, failures: Failures, hours: float) -> float:
    return 100 * island_timeline(island, failures, hours * 3600, random.Random(0)).goodput


def _at_wall_rate(island: Island, failures: Failures, every_s: float, hours: float = 240.0) -> float:
    """Goodput if interruptions come this often by the wall clock, however many chips compute. In the planner they come
    per computing chip, so this searches for the rate per chip that gives equally many."""
    mtbi_s = island.chips * every_s
    for _ in range(12):
        line = island_timeline(island, replace(failures, mtbi_s=mtbi_s), hours * 3600, random.Random(0))
        mtbi_s *= line.interruptions * every_s / (hours * 3600)
    return 100 * line.goodput


def _restarting(chips: float, every_s: float, restart_s: float, checkpoint_s: float = 1.0) -> float:
    island = Island(chips, slice_chips=8, elastic=False, spares=SPARES_ENOUGH)
    return _at_wall_rate(island, Failures(restart_s=restart_s, checkpoint_s=checkpoint_s), every_s, 24 * 60)


def _torchft(every_s: float, back_s: float = 300.0) -> float:
    """30 groups of 10. A group is back after five minutes: a round number, but chosen with the row of 60 s in view."""
    return _at_wall_rate(Island(300, slice_chips=10), Failures(repair_s=back_s, loss_s=0.2, join_s=0.2), every_s)


@dataclass(frozen=True)
class Figure:
    what: str
    published: str
    low: float
    """In percent, as published; with `high`, the start of a range."""
    high: float
    ours: Callable[[], float]
    inputs: str
    """Published inputs first, then assumed ones."""
    why: str = ""
    """Reason for a difference."""


_18_MIN = 18 * 60.0
FLEETS = (
    Figure(
        "Llama 3, 16,384 GPUs", "over 90", 90, 100,
        lambda: _restarting(16_384, 54 * 86_400 / 419, 600, 600),
        "419 interruptions in 54 days; assumed: 10 min to restart, a checkpoint every 10 min",
    ),
    Figure(
        "100,000 GPUs, stalls of 10 min", "44", 44, 44, lambda: _restarting(100_000, _18_MIN, 600),
        "one failure per 18 min by the wall clock, 8 min of which compute",
    ),
    Figure(
        "100,000 GPUs, stalls of 3 min", "80", 80, 80, lambda: _restarting(100_000, _18_MIN, 180),
        "the same failures, 15 min of 18 compute",
        "what the failed groups miss until they are back is not published, and not in ours",
    ),
    Figure("torchft, 300 L40S, a failure per 60 s", "82.3", 82.3, 82.3, lambda: _torchft(60),
           "assumed, with this row in sight: a group of 10 is back after 5 min, and 0.2 s per change"),
    Figure("torchft, a failure per 15 s", "30.2", 30.2, 30.2, lambda: _torchft(15),
           "seen while the failure clock was chosen", "groups that are back after 310 s would fit both rows"),
    Figure("Gemini 2.5, while a slice is out", "about 97", 97, 97, lambda: 100 * 31 / 32,
           "assumed: 32 slices; arithmetic, which checks nothing else"),
    Figure(
        "Gemini 2.5, all", "93.4", 93.4, 93.4,
        lambda: _available(Island(4 * 8960), replace(PRESETS["fleet"], loss_s=60, join_s=60), 24 * 60),
        "assumed: 4 pods of 8,960, 5.5 chip-years, a minute per change, 4 h of repair",
        "neither its failures nor its size are published; 93.4 holds all other causes of lost time too",
    ),
    Figure(
        "1,056 GPUs over a year, 5 % spares", "99.3", 99.3, 99.3,
        lambda: _available(Island(1056, slice_chips=8, elastic=False, spares=7), replace(
            PRESETS["fleet"], checkpoint_s=1.0), 24 * 365),
        "fleet preset: 5.5 GPU-years, 15 min to restart",
    ),
)  # fmt: skip


# ------------------------------------------------------------------ machines that differ


def uneven(learners: int = 8, slower: float = 1.18, noise: float = 0.10) -> list[LearnerPlan]:
    """One learner is 18 % slower, and every step takes up to 10 % more or less."""
    unfailing = Failures(mtbi_s=1e6 * YEAR_S)
    speeds = [*[1.0] * (learners - 1), slower]
    return [LearnerPlan(f"learner-{i}", Island(256), unfailing, s, noise) for i, s in enumerate(speeds)]


UNEVEN = {"K = all": 84.0, "K = 1": 100.0, "K = 1, grace": 100.0}
"""Published goodput in percent."""


ROUNDS: Mapping[str, dict[str, object]] = {"K = all": {"quorum": "all"}, "K = 1": {"grace": 0.0}, "K = 1, grace": {}}


def uneven_tokens(hours: float = 1.0, seed: int = 0) -> dict[str, RunOutcome]:
    """The outcomes with production cores, by how rounds close."""
    found = {}
    for name, rules in ROUNDS.items():
        sync = SyncSettings.model_validate(rules)
        found[name] = PlannedWorld(Settings(sync=sync), 5e9, uneven(), ShardPlan(), hours * 3600, seed, decided=4).run()
    return found


def uneven_goodput(found: Mapping[str, RunOutcome], seed: int = 0) -> dict[str, float]:
    """Goodput in percent, from the results of `uneven_tokens`. With K = all, learners wait in the published system. In
    ours they never do, so that row is the synchronous way."""
    waits = synchronous(uneven(), Sent(0, 0, 0, 24), 6 * 3600, seed)
    ours = {name: 100 * found[name].goodput for name in ("K = 1", "K = 1, grace")}
    return {"K = all": 100 * waits} | ours


SCAVENGING = {0.25: (1.07, 0.90), 0.5: (1.09, 0.83), 1.0: (1.02, 0.75), 3.0: (0.80, 0.62)}
"""Additional compute -> time to finish relative to no addition: data-parallel, decoupled."""


def scavenged(extra: float, learners: int = 8, hours: float = 1.0, seed: int = 0) -> float:
    """Time to finish if this share of learners joins after half of the tokens; the budget ends the run."""
    plans = uneven(learners, 1.0, 0.0)
    tokens = round(learners * hours * 3600 * plans[0].tokens_per_step)
    more = [
        replace(plans[0], name=f"extra-{i}", begins_s=hours * 1800) for i in range(round(extra * learners))
    ]  # fmt: skip
    world = PlannedWorld(
        Settings(), 5e9, [*plans, *more], ShardPlan(), 1.2 * hours * 3600, seed, decided=1, budget_tokens=tokens
    )
    return world.run().ended_s / 3600 / hours


def eight_sites() -> tuple[float, float, float]:
    """Gbit/s of each site, for 5 B parameters and steps of 1 s: data-parallel; int4 with H = 24; and their ratio."""
    dp, ours = data_parallel_bits(5e9, 8) / 1e9, 5e9 * BITS["int4"] / 24 / 1e9
    return dp, ours, dp / ours


def tables() -> Iterator[str]:
    cells = goodput_table()
    yield "| chips | " + " | ".join(WAYS) + " |\n| --- |" + " --- |" * len(WAYS)
    for chips in GOODPUT:
        row = [f"{c.ours:.1f} ({c.published:g}){'*' * c.is_fitted}" for c in cells if c.chips == chips]
        yield f"| {chips / 1e3:,.0f} k | " + " | ".join(row) + " |"
    held = [abs(c.ours - c.published) for c in cells if not c.is_fitted and c.way != "restart"]
    fitted = [abs(c.ours - c.published) for c in cells if c.is_fitted and c.way != "restart"]
    restarts = [abs(c.ours - c.published) for c in cells if c.way == "restart"]
    yield f"\nlargest difference: {max(fitted):.1f} fitted, {max(held):.1f} others, {max(restarts):.1f} restarts\n"
    yield "| figure | published | ours | difference | inputs | where it does not fit |\n" + "| --- " * 6 + "|"
    for figure in FLEETS:
        ours = figure.ours()
        off = ours - min(max(ours, figure.low), figure.high)
        yield f"| {figure.what} | {figure.published} | {ours:.1f} | {off:+.1f} | {figure.inputs} | {figure.why} |"
    found = uneven_tokens()
    yield "\n| | published goodput | ours |\n| --- | --- | --- |"
    for name, ours in uneven_goodput(found).items():
        yield f"| {name} | {UNEVEN[name]:g} | {ours:.1f} |"
    yield "\n| the cores | tokens merged | participants | rounds |\n| --- | --- | --- | --- |"
    for name, o in found.items():
        yield f"| {name} | {100 * o.tokens_share_merged:.1f} % | {o.participants_mean:.2f} | {o.rounds} |"
    yield "\n| more compute | data-parallel, published | decoupled, published | ours |\n| --- | --- | --- | --- |"
    for extra, (dp, published) in SCAVENGING.items():
        yield f"| +{100 * extra:.0f} % | {dp} | {published} | {scavenged(extra):.3f} |"
    dp, ours, factor = eight_sites()
    yield f"\neight sites: {dp:.0f} Gbit/s data-parallel, {ours:.2f} ours, {factor:.0f} times (published: 198 and 0.84)"


def main() -> int:
    import torch

    torch.set_num_threads(1)
    for line in tables():
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
