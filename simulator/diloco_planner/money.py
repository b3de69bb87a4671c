"""The cost of a run: chips, shards, and bytes that leave a site. Every price is the user's, with its date."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diloco_planner.described import Described
from diloco_planner.plans import LearnerPlan, RunOutcome


@dataclass(frozen=True)
class Bill:
    """The cost of this many hours."""

    hours: float
    chips: float
    shards: float
    egress: float
    """Cost of contributions that leave the learners' sites, and of versions that leave the shards' site."""
    currency: str
    date: str

    @property
    def total(self) -> float:
        return self.chips + self.shards + self.egress

    def per_tokens(self, tokens: float) -> float:
        """Cost per billion merged tokens."""
        return self.total / tokens * 1e9 if tokens else 0.0


def bill(described: Described, learners: Sequence[LearnerPlan], outcome: RunOutcome) -> Bill | None:
    """None if the file has no prices."""
    if not described.date:
        return None
    chips = egress = 0.0
    for plan, one in zip(learners, outcome.learners, strict=True):
        up, down = per_gb(described, plan)
        chips += chips_hour(described, plan) * plan.there_s(3600 * outcome.hours) / 3600
        egress += one["sent_gb"] * up + one["taken_gb"] * down
    shards = described.price_shard_hour * (described.shards.count or 1) * outcome.hours
    return Bill(outcome.hours, chips, shards, egress, described.currency, described.date)


def chips_hour(described: Described, plan: LearnerPlan) -> float:
    """Cost per hour of one learner's chips, with its spares."""
    site, island = described.site_of(plan.name), plan.island
    each = island.chips / island.slices
    return 0.0 if site is None else (island.chips + island.spares * each) * site.price_chip_hour


def per_gb(described: Described, plan: LearnerPlan) -> tuple[float, float]:
    """The cost per GB of a learner's contributions and versions. Traffic within the site of the shards is free.
    Versions that come to a mirror are paid for once, shared among all learners of its site."""
    site, home = described.site_of(plan.name), described.home
    if site is None or home is None or site is home:
        return 0.0, 0.0
    pulls = site.learners if site.mirror else 1
    return site.price_egress_gb + home.price_ingress_gb, (home.price_egress_gb + site.price_ingress_gb) / pulls
