"""Weighs ways to train on the machines of a file (docs/planner.md), with reasons. Settings come from `choice.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from diloco_planner.choice import Choice, PlannedRun, choose
from diloco_planner.proposed import PlannedTask, Way, alone
from diloco_planner.reasons import late, left_out, memory_of, thin_links, too_much, what_would_hold
from diloco_planner.together import asked_of, worth_it
from diloco_planner.verdict import days_of, money_of, verdict_of


@dataclass(frozen=True)
class Weighed:
    """All ways that machines and links allow, and which to take."""

    ways: tuple[Way, ...]
    verdict: str
    because: str
    works: bool
    """Whether any way is proposed."""
    memory: tuple[str, ...]
    """What each site's machines can hold."""
    asked: PlannedRun
    choice: Choice
    """Settings of the proposed way. If it has none, those with which all sites would train decoupled."""
    is_ours: bool
    """Whether the proposed way needs them."""

    def as_json(self) -> dict[str, Any]:
        return {
            "ways": [{key: value for key, value in vars(way).items() if key != "settled"} for way in self.ways],
            "verdict": self.verdict, "because": self.because, "works": self.works, "memory": self.memory,
            "is_ours": self.is_ours,
        }  # fmt: skip


def weigh(task: PlannedTask, base: PlannedRun) -> Weighed:
    """Leaves out ways that links or memory do not allow. `base`: what the file does not say."""
    memory = tuple(memory_of(task))
    if not task.able:
        asked = asked_of(task, base, task.learners)
        return Weighed(
            (), "no machine here holds it", what_would_hold(task), False, memory, asked, choose(asked), False
        )
    able = {plan.site: site for site, plan in task.first_of_each() if task.holds(plan)}
    apart = [alone(task, site, asked_of(task, base, task.of([name]))) for name, site in able.items()]
    found, whole, thin = worth_it(task, base, list(able))
    second = whole.named("decoupled, all") if thin else found.second(task)
    verdict = verdict_of(task, found.where, found.ours, found.over, apart)
    because = [verdict.because, *left_out(task), *late(task, verdict.way)]
    if found.ours is None and found.over is not None:
        because.append(too_much(task, base, found.choice))
    if verdict.way in (found.ours, found.over):
        because += thin_links(task, base, thin)
    ways = tuple(way for way in (found.ours, second, found.over, *apart) if way is not None)
    works, settled = verdict.way is not None, None if verdict.way is None else verdict.way.settled
    asked, choice = settled or (found.asked, found.choice)
    return Weighed(ways, verdict.words, "; ".join(because), works, memory, asked, choice, settled is not None)


def lines_of(task: PlannedTask, found: Weighed) -> Iterator[str]:
    yield f"{found.verdict}: {found.because}"
    yield ""
    width = max((len(way.name) for way in found.ways), default=0)
    for way in found.ways:
        price = f", {money_of(task, way)}" if task.described.date else ""
        egress = f" ({way.egress:,.0f} of it egress)" if way.egress >= 1 else ""
        yield f"  {way.name:<{width}}  {100 * way.goodput:5.1f} %  {days_of(way.days):>12}{price}{egress}"
        yield f"  {'':<{width}}  {way.why}"
    if task.described.date:
        yield f"  prices of {task.described.date}, from the file"
    yield from (f"  {line}" for line in found.memory)
