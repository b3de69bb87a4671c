"""What a run costs: chips, shards, and bytes that leave a site. Every price is the user's, with its date."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diloco_planner.described import Described
from diloco_planner.world import LearnerPlan, Outcome


@dataclass(frozen=True)
class Bill:
    """Of so many hours."""

    hours: float
    chips: float
    shards: float
    egress: float
    """Contributions that leave the learners' sites, and versions that leave that of the shards."""
    currency: str
    date: str

    @property
    def total(self) -> float:
        return self.chips + self.shards + self.egress

    def per_tokens(self, tokens: float) -> float:
        """Of a billion tokens that were merged."""
        return self.total / tokens * 1e9 if tokens else 0.0


def bill(described: Described, learners: Sequence[LearnerPlan], outcome: Outcome) -> Bill | None:
    """Bytes within one site cost nothing."""
    if not described.date:
        return None
    home = next((s for s in described.sites if s.name == described.shards_at), described.sites[0])
    chips = egress = 0.0
    for plan, one in zip(learners, outcome.learners, strict=True):
        site = described.site_of(plan.name)
        assert site is not None
        spares = plan.island.spares * plan.island.slice_chips
        chips += (plan.island.chips + spares) * site.price_chip_hour * plan.there_s(3600 * outcome.hours) / 3600
        if site is not home:
            egress += one["sent_gb"] * (site.price_egress_gb + home.price_ingress_gb)
            egress += one["taken_gb"] * (home.price_egress_gb + site.price_ingress_gb)
    shards = described.price_shard_hour * (described.shards.count or 1) * outcome.hours
    return Bill(outcome.hours, chips, shards, egress, described.currency, described.date)
