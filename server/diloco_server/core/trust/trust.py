"""The face of this package: what one shard believes of its learners.

It hears of every contribution, and answers for rounds: may it be merged, does it count as a stranger's, which of a
closed round are left out, and how many learners a round needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from diloco_common.errors import NormTooLarge, NotFinite
from diloco_common.settings import GuardSettings
from diloco_common.wire.messages import PushHeader
from diloco_server.core.cadence import Quorum
from diloco_server.core.fragment import FragmentState
from diloco_server.core.membership import Member, Membership
from diloco_server.core.round import Contribution, total_norm
from diloco_server.core.trust.conduct import Quarantine, far_off
from diloco_server.core.trust.lengths import Lengths, Steps, Way
from diloco_server.core.trust.trail import AWAY_S, STEPS_FACTOR, check_trained

BACK_S = 60.0
"""After a start of the shard its learners are back by then. Whoever is new, and comes later, has trained nothing
before."""


class Trust:
    """Of the learners of one shard, by the setting `guard.trust`."""

    def __init__(self, guard: GuardSettings, membership: Membership) -> None:
        self.quarantine = Quarantine(guard.quarantine_s)
        self._strangers = guard.trust == "strangers"
        self._norm_factor = guard.norm_factor
        self._membership = membership
        self._lengths = Lengths(self.quarantine.holds)

    def is_strange(self, learner_id: str) -> bool:
        """Whether what this learner sends is cut to what the others of its round send."""
        return self._strangers or self.quarantine.suspects(learner_id)

    def forget(self, learner_id: str) -> None:
        """The learner has been gone for long."""
        self.quarantine.forget(learner_id)
        self._lengths.forget(learner_id)

    # ------------------------------------------------------------ one contribution

    def check_claims(self, member: Member, header: PushHeader, state: FragmentState, now: float) -> None:
        """The learner can have trained what it pushes. Raises Implausible."""
        pace, up_s = self._membership.usual_pace(now), self._membership.up_s(now)
        since_s = self._new_for(member, state, now)
        before_s = up_s + AWAY_S if since_s is None else since_s
        check_trained(header, member.learner_id, member.trail, pace, before_s, now)

    def check_values(
        self, member: Member, header: PushHeader, piece_norms: Iterable[float], state: FragmentState, every: int,
        now: float, *, is_whole: bool,
    ) -> None:  # fmt: skip
        """The values are finite, and no longer than they can be. Raises NotFinite or NormTooLarge.

        `every`: H of the fragment. `is_whole`: not only a part of a contribution.
        """
        norm, fragment = total_norm([*piece_norms]), state.fragment
        where = f"fragment {fragment.fragment_id}"
        if not math.isfinite(norm):
            raise NotFinite(f"{where}: a value is NaN or infinite, or their squares overflow; check the learner's loss")
        if header.is_seed:
            return
        typical = state.typical_norm()
        most, why = self._norm_factor * typical, f"{self._norm_factor:g} times is merged (guard.norm_factor)"
        if not self._strangers and fragment.traits.norms_tell:
            steps = self._believed_steps(member, header, state, every, now)
            way = Way(norm, steps, now, member.counted.inner_step)
            can_be = self._longest(state, member.learner_id, way, every, self._live())
            if can_be is not None:
                most, why = can_be or math.inf, f"{can_be:.3g} is merged for {way.steps} steps"
            if is_whole:
                self._lengths.saw(fragment, member.learner_id, way)
        if norm > most:
            raise NormTooLarge(
                f"{where}: norm {norm:.3g} is {norm / typical:.3g} times the usual {typical:.3g}, at most {why}; look "
                "at the learner's loss, data and memory"
            )

    def _new_for(self, member: Member, state: FragmentState, now: float) -> float | None:
        """For how many seconds the learner has reported, if it can have trained for no longer: nothing of it was ever
        merged, and it came long after the shard. None: it may have trained before, while no shard was there."""
        if member.trail is None or member.learner_id in state.record.merged_versions:
            return None
        since_s = now - member.trail.first_at
        return since_s if self._membership.up_s(now) - since_s > BACK_S else None

    def _believed_steps(
        self, member: Member, header: PushHeader, state: FragmentState, every: int, now: float
    ) -> int:  # fmt: skip
        """For a length: H, and what was reported since the last one was merged; else what the time allows."""
        fragment_id, trail = header.fragment_id, member.trail
        since = None if trail is None else trail.merged_until.get(fragment_id)
        if trail is not None and since is None and self._new_for(member, state, now) is not None:
            since = trail.first
        if trail is not None and since is not None:
            return min(header.steps, max(every, trail.counted.inner_step - since.inner_step))
        last, pace = self._lengths.last(fragment_id, member.learner_id), self._membership.usual_pace(now)
        if last is None or pace is None:
            return header.steps
        return min(header.steps, max(every, int(STEPS_FACTOR * pace.steps_per_s * (now - last.at))))

    def _longest(self, state: FragmentState, learner_id: str, way: Way, every: int, live: Steps) -> float | None:
        record = state.record
        return self._lengths.most(
            state.fragment, learner_id, way, live, every, record.seed_norm, record.highest_usual_norm
        )

    def _live(self) -> Steps:
        return {m.learner_id: m.counted.inner_step for m in self._membership.live()}

    # ------------------------------------------------------------ a round

    def quorum(self, asked: Iterable[Member], quorum: Quorum) -> Quorum:
        """How many learners make a round due, and let it close. Of strangers more than half of those that answer."""
        if not self._strangers or quorum == "all":
            return quorum
        return max(quorum, sum(m.may_answer for m in asked) // 2 + 1)

    @property
    def asks_all(self) -> bool:
        """Whether rounds ask those as well that have few steps to contribute: no stranger is alone by being fast."""
        return self._strangers

    def evidence(self, contributions: Mapping[str, Contribution], state: FragmentState, every: int) -> dict[str, str]:
        """Against each contribution to a round that closes; "" for most. When the first came there was nothing yet to
        compare with."""
        if self._strangers:
            return far_off(contributions, state.typical_norm())
        evidence, live = {}, self._live()
        for learner_id, c in contributions.items():
            last = self._lengths.last(c.fragment_id, learner_id)
            way = Way(c.norm, c.steps if last is None else last.steps)
            most = self._longest(state, learner_id, way, every, live)
            evidence[learner_id] = f"a norm of {c.norm:.3g}, by what others sent {most:.3g} at most" if most else ""
            if not most:
                self._lengths.took(c.fragment_id, learner_id)
        return evidence

    @property
    def leaves_out(self) -> bool:
        """Whether what there is evidence against is left out of its round. A stranger's stays, cut."""
        return not self._strangers
