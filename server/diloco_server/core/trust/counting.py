"""How many tokens of a contribution count as merged: all, but not more than others make plausible.

What counts ends a run with a budget. The bound is `STEPS_FACTOR` times what the usual learner brings to a round and
trains since this learner was merged last. So an honest learner counts in full, however late or fast it is, and nobody
ends the run of all by what it says. Usual is the lower median of the learners: of two neither can raise it. One of
two can lower it, so the run may end later, never earlier.

A stranger's tokens count for no more than the lower median of its round: it weighs no more either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median_low

from diloco_server.core.membership import Member, Membership
from diloco_server.core.record import Record
from diloco_server.core.round import Contribution, Round
from diloco_server.core.trust.trail import STEPS_FACTOR

ROUNDS_UNKNOWN = 8
"""After a restart the usual contribution is not known. Until another learner is merged, and for the first contribution
of whoever was merged before, it is what a round of this fragment has added on average, so many times: learners have
trained while no shard was there."""
SHARE_ALONE, ALONE_S = 0.125, 600.0
"""Of the budget: one learner fills no more of it while others are here that have brought nothing, for so many seconds
after the first of them came. Nobody knows yet how fast a learner can be."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one learner brings to a fragment: its vote on what is usual."""

    tokens_per_step: float
    steps: int
    """Of its last contribution, and at least half of what it was before: after an outage all bring much, but not all
    to the same round."""
    merged_until: float
    """When the round opened that merged it last."""
    tokens_per_s: float | None = None
    """As it trained then, or does now; None: not known. It stays where the learner is away."""


def count(
    closed: Round, shares: Mapping[str, Share], before: Record, membership: Membership, sync_every: int, budget: int,
    now: float,
) -> tuple[dict[str, Contribution], dict[str, Share]]:  # fmt: skip
    """What counts of each contribution to a closed round, and the shares after it.

    `before`: the record of the version that the round goes on from. `budget`: tokens of the run; 0: it has no end.
    """
    after = {i: share for i, share in shares.items() if membership.get(i) is not None}
    after |= {i: _share(c, shares.get(i), closed.opened_at - closed.asleep_s) for i, c in closed.contributions.items()}
    paces = {m.learner_id: m.trail.pace for m in membership.live() if m.trail is not None and m.sets_pace}
    here = {i: pace.tokens_per_s for i, pace in paces.items() if pace is not None}
    known = {i: share.tokens_per_s for i, share in after.items() if share.tokens_per_s is not None} | here
    after = {i: replace(share, tokens_per_s=known.get(i)) for i, share in after.items()}
    counted, usual_tokens = {}, median_low(c.tokens for c in closed.contributions.values())
    for i, contribution in closed.contributions.items():
        since_s = _since(membership.get(i), shares.get(i), now)
        is_back = i not in shares and i in before.merged_versions
        rates = here if here.keys() - {i} else known  # who is away has a say only where nobody else is there
        most = _most(i, after, before, rates, sync_every, since_s, is_back=is_back)
        if most is None and budget and membership.up_s(now) < ALONE_S and len(membership.live()) > 1:
            most = max(1, int(SHARE_ALONE * budget) - before.tokens_merged)
        tokens = contribution.tokens if most is None else min(contribution.tokens, most)
        if contribution.is_strange:
            tokens = min(tokens, usual_tokens)
        counted[i] = replace(contribution, counted=tokens)
    return counted, after


def _share(contribution: Contribution, share: Share | None, opened_at: float) -> Share:
    steps = max(contribution.steps, 0 if share is None else share.steps // 2)
    tokens_per_s = None if share is None else share.tokens_per_s
    return Share(contribution.tokens / contribution.steps, steps, opened_at, tokens_per_s)


def _since(member: Member | None, share: Share | None, now: float) -> float:
    """Seconds in which the learner can have trained what it brings, as far as this shard knows."""
    if share is not None:
        return now - share.merged_until
    return 0.0 if member is None or member.trail is None else now - member.trail.first_at + member.trail.asleep_s


def _most(
    learner_id: str, shares: Mapping[str, Share], before: Record, rates: Mapping[str, float], sync_every: int,
    since_s: float, *, is_back: bool,
) -> int | None:  # fmt: skip
    """None: nobody else has ever contributed, so there is nothing to compare with.

    `is_back`: it was merged before the shard restarted, and not since. It may bring what it trained meanwhile.
    """
    unknown = STEPS_FACTOR * ROUNDS_UNKNOWN * max(1, before.tokens_merged // max(1, before.version))
    if not shares.keys() - {learner_id}:
        if not before.merged_versions.keys() - {learner_id} or not before.tokens_merged:
            return None
        return unknown
    steps = max(sync_every, median_low(share.steps for share in shares.values()))
    usual = steps * max(1.0, median_low(share.tokens_per_step for share in shares.values()))
    if rates.keys() - {learner_id}:
        usual += max(0.0, since_s) * median_low(rates.values())
    most = int(STEPS_FACTOR * usual)
    return max(most, unknown) if is_back else most
