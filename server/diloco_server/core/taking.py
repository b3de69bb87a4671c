"""Handles pushes. Each is accepted for a round, held until its other parts arrive, answered as late, or refused.

`admission.py` has the rules for one push, and `rounds.py` opens and closes rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from diloco_common.codec import Payload
from diloco_common.errors import Busy, ContributionConflict, NotFinite, NotSeeded, Refusal
from diloco_common.settings import SyncSettings
from diloco_common.wire.messages import Outcome, PushAnswer, PushHeader
from diloco_server.core import admission
from diloco_server.core.admission import ACCEPTED, DUPLICATE, HELD
from diloco_server.core.arrivals import RoundRequest
from diloco_server.core.effects import Outbox, SeedFragment
from diloco_server.core.fragment import FragmentState, HalfSeed
from diloco_server.core.ledger import ContributionAnswered, ContributionDropped, QuorumReached, ValuesReplaced
from diloco_server.core.membership import Member
from diloco_server.core.parts import HalfContribution, PartedPayload, RankPart, is_part, whole_of
from diloco_server.core.patience import RoundPatience
from diloco_server.core.round import Contribution, total_norm
from diloco_server.core.versions import Versions


class Taking:
    """Answers and counts the pushes to the fragments of one shard."""

    def __init__(
        self, sync: SyncSettings, lease_s: float, patience: RoundPatience, versions: Versions, outbox: Outbox
    ) -> None:
        self._sync = sync
        self._lease_s = lease_s
        self._patience = patience
        self._versions = versions
        self._outbox = outbox

    @property
    def _now(self) -> float:
        return self._outbox.now

    def admit(self, member: Member, header: PushHeader, now: float) -> PushAnswer | None:
        """Decide on a push by its header alone. Returns its answer, or None if its bytes are wanted. Raises Busy."""
        self._outbox.now = now
        try:
            answer = self._admit(member, header)
        except Busy:
            raise
        except Refusal as refusal:
            answer = self.reject(member, header, refusal)
        request = self._request(header)
        if request is not None and answer is not HELD:  # an empty part says nothing about when the others arrive
            member.arrivals.header(request, now, wanted=answer is None)
        return answer

    def contribute(
        self, member: Member, header: PushHeader, payload: Payload | PartedPayload, piece_norms: tuple[float, ...],
        now: float,
    ) -> PushAnswer:  # fmt: skip
        """Take a push whose bytes are complete and valid. Decides again, since the state may have changed since
        `admit`.

        A part is held until the others arrive. Raises Busy if another learner is sending version 0 in parts.
        """
        self._outbox.now = now
        request = self._request(header)
        if request is not None:
            member.arrivals.bytes_came(request, header.payload.num_elements, now)
        try:
            answer = self._admit(member, header)
            if answer is not None:
                return answer
            state = self._versions.owned(header.fragment_id)
            _check_finite(header, piece_norms)
            tokens_merged = header.tokens_merged
            if is_part(header):
                half = self._half(member, state, header)
                assert isinstance(payload, Payload)
                half.add(header, RankPart(header.ranges, payload), piece_norms)
                if not half.is_complete:
                    return HELD
                payload, piece_norms, tokens_merged = half.payload(), half.piece_norms(), half.tokens_merged
                _check_finite(header, piece_norms)
        except Busy:
            raise
        except Refusal as refusal:
            return self.reject(member, header, refusal)
        if header.is_seed:
            self._seed(state, member, tokens_merged)
            self._outbox.add(SeedFragment(header.fragment_id, payload))
        else:
            self._accept(state, Contribution.of(member, header, payload, piece_norms), now)
            member.contributes()
            member.takes_last(header.fragment_id)  # this contribution holds what an older report asks for
        self._count(member, header, ACCEPTED)
        return ACCEPTED

    def _seed(self, state: FragmentState, member: Member, tokens_merged: int) -> None:
        """Take a learner's values as version 0, or in place of values with fewer merged tokens."""
        if state.seeded:
            fact = ValuesReplaced(state.fragment.fragment_id, state.version, state.tokens_merged, member.learner_id)
            self._outbox.note(fact)
        for contribution in () if state.round is None else state.round.contributions.values():
            self.drop(contribution)
        state.begin_seed(member.learner_id, self._versions.budget.believed(tokens_merged), self._now)

    def _request(self, header: PushHeader) -> RoundRequest | None:
        """The request that a push answers, if it is the fragment's latest."""
        state = self._versions.fragments.get(header.fragment_id)
        return state.last_request if state is not None and state.last_request.round == header.round else None

    def _half(self, member: Member, state: FragmentState, header: PushHeader) -> HalfContribution:
        """The contribution that this part belongs to; a new one for the first part."""
        if header.is_seed:
            seed = state.half_seed_of(member.learner_id, self._now - self._lease_s)
            if seed is None:
                seed = HalfSeed(member.learner_id, HalfContribution(header, state.fragment.num_elements), self._now)
            seed.grown_at, state.half_seed = self._now, seed
            return seed.parts
        assert state.round is not None
        halves = state.round.halves
        if member.learner_id not in halves:
            halves[member.learner_id] = HalfContribution(header, state.fragment.num_elements)
        return halves[member.learner_id]

    def reject(self, member: Member, header: PushHeader, refusal: Refusal) -> PushAnswer:
        """Count a refused push. Its round continues without it, so a learner that diverged does not block the others.

        The learner carries the work of a refused contribution. If another copy was accepted, the answer is DUPLICATE
        instead.
        """
        answer = PushAnswer(Outcome.REJECTED, refusal.code, str(refusal))
        state = self._versions.fragments.get(header.fragment_id)
        if state is not None and admission.is_in_line(header, state, self._versions.epoch):
            if admission.is_taken(header, state, member.learner_id):
                answer = DUPLICATE
            else:
                self._decline(member, state, header, answer)
                if header.is_seed:
                    state.drop_half_seed(member.learner_id)
        self._count(member, header, answer)
        return answer

    def _admit(self, member: Member, header: PushHeader) -> PushAnswer | None:
        if self._versions.manifest is None:
            raise NotSeeded("no learner has joined since this shard started; join again")
        admission.check_origin(header, self._versions.manifest)
        state = self._versions.owned(header.fragment_id)
        is_known = is_part(header) and state.answered(member.learner_id, whole_of(header)) is not None
        epoch, quiet_since = self._versions.epoch, self._now - self._lease_s
        answer = admission.by_header(header, state, member.learner_id, epoch, self._sync, quiet_since)
        if answer is HELD:
            return answer
        if answer is not None and is_known:  # another part was already counted: contributions are counted, not parts
            self._decline(member, state, header, answer)  # but this round may have opened since, and wait for it
            return answer
        if answer is None:
            return None
        if answer.outcome is Outcome.LATE:
            member.is_late()
        if answer.outcome is not Outcome.REJECTED:  # a repeated refusal was counted before
            self._count(member, header, answer)
        if answer.outcome is not Outcome.DUPLICATE:
            self._decline(member, state, header, answer)
        return answer

    def _decline(self, member: Member, state: FragmentState, header: PushHeader, answer: PushAnswer) -> None:
        """A contribution is not taken: its learner carries the work, and the round stops waiting for it."""
        whole = whole_of(header)
        state.decline(member.learner_id, whole, answer)
        member.lost_last(header.fragment_id)
        is_unclear = answer.code == ContributionConflict.code  # its parts belong to two contributions
        collecting = state.round
        if (
            collecting is not None
            and collecting.round == header.round
            and collecting.refuse(member.learner_id, member.generation, None if is_unclear else whole)
        ):
            member.missed[answer.code or answer.outcome.name] += 1

    def _count(self, member: Member, header: PushHeader, answer: PushAnswer) -> None:
        if header.is_seed and answer.outcome is not Outcome.REJECTED:
            return  # a seed holds no trained work
        state = self._versions.fragments.get(header.fragment_id)
        staleness = 0 if state is None else max(0, state.version - header.base_version)
        tokens = self.tokens(header.fragment_id, header.tokens)
        self._outbox.note(ContributionAnswered(member.learner_id, header, answer, staleness, tokens))

    def _accept(self, state: FragmentState, contribution: Contribution, now: float) -> None:
        collecting = state.round
        assert collecting is not None
        had_quorum = collecting.quorum_at is not None
        collecting.accept(contribution, self._patience.quorum(collecting), now)
        if not had_quorum and collecting.quorum_at is not None:
            after_s = now - collecting.opened_at
            self._outbox.note(QuorumReached(contribution.fragment_id, collecting.round, after_s))

    def drop(self, contribution: Contribution) -> None:
        tokens = self.tokens(contribution.fragment_id, contribution.tokens)
        self._outbox.note(ContributionDropped(contribution.learner_id, contribution.fragment_id, tokens))

    def tokens(self, fragment_id: int, tokens: int) -> int:
        """How many of a contribution's tokens are counted: all for the model, none for other tensors."""
        state = self._versions.fragments.get(fragment_id)
        return tokens if state is None or state.fragment.traits.is_of_model else 0


def _check_finite(header: PushHeader, piece_norms: Sequence[float]) -> None:
    """Check that all values are finite. Raises NotFinite."""
    if not math.isfinite(total_norm(piece_norms)):
        raise NotFinite(
            f"fragment {header.fragment_id}: a value is NaN or infinite, or their squares overflow; check the "
            "learner's loss"
        )
