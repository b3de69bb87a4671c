"""Rounds: when one opens, whom it asks, what becomes of a push, and when it closes.

Makes no versions: a round that closes is handed to the shell as `MergeRound`. `round.py` holds what one round has
collected, `admission.py` and `guards.py` the rules for one push.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low

from diloco_common.codec import Payload
from diloco_common.errors import NotSeeded, Refusal
from diloco_common.messages import Outcome, PushAnswer, PushHeader
from diloco_common.settings import Settings
from diloco_server.core import admission, guards
from diloco_server.core.admission import ACCEPTED, DUPLICATE, LATE
from diloco_server.core.cadence import first_interval, is_due
from diloco_server.core.effects import (
    MergeRound,
    Outbox,
    QuorumReached,
    RoundClosed,
    RoundOpened,
    SeedFragment,
    VersionCommitted,
)
from diloco_server.core.fragment import FragmentState, Phase
from diloco_server.core.grace import GraceWindow
from diloco_server.core.ledger import Ledger
from diloco_server.core.membership import Member, Membership
from diloco_server.core.round import Contribution, Round, total_norm
from diloco_server.core.versions import Versions


class Rounds:
    """The rounds of all fragments of one shard, and the account of what was pushed to them."""

    def __init__(self, settings: Settings, membership: Membership, versions: Versions, outbox: Outbox) -> None:
        self.grace = GraceWindow(settings.sync)
        self.ledger = Ledger()
        self._sync = settings.sync
        self._norm_factor = settings.guard.norm_factor
        self._membership = membership
        self._versions = versions
        self._outbox = outbox

    # ------------------------------------------------------------ pushes

    def admit(self, member: Member, header: PushHeader) -> PushAnswer | None:
        """Decide on a push by its header alone. None: its bytes are wanted."""
        try:
            return self._admit(member, header)
        except Refusal as refusal:
            return self.reject(member, header, refusal)

    def contribute(
        self, member: Member, header: PushHeader, payload: Payload, piece_norms: tuple[float, ...], now: float
    ) -> PushAnswer:
        """Take a push whose bytes are whole and valid. State may have moved on since `admit`, so it decides again."""
        try:
            answer = self._admit(member, header)
            if answer is not None:
                return answer
            state = self._versions.owned(header.fragment_id)
            guards.check_norm(piece_norms, state, float("inf") if header.is_seed else self._norm_factor)
        except Refusal as refusal:
            return self.reject(member, header, refusal)
        if header.is_seed:
            state.begin_seed(total_norm(piece_norms), header.tokens_merged)
            self._outbox.add(SeedFragment(header.fragment_id, payload))
        else:
            self._accept(state, Contribution.of(member, header, payload, piece_norms), now)
            member.contributed += 1
        self.ledger.answered(header, ACCEPTED)
        return ACCEPTED

    def reject(self, member: Member, header: PushHeader, refusal: Refusal) -> PushAnswer:
        """Count a refused push. Its round goes on without it: one learner that diverged must not hold up all.

        A learner gives the work of a refused contribution back. So it is no refusal if another copy was taken.
        """
        answer = PushAnswer(Outcome.REJECTED, refusal.code, str(refusal))
        state = self._versions.fragments.get(header.fragment_id)
        if state is not None and guards.is_in_line(header, state, self._versions.epoch):
            if admission.is_taken(header, state, member.learner_id):
                answer = DUPLICATE
            else:
                self._decline(member, state, header, answer)
        self.ledger.answered(header, answer)
        return answer

    def _admit(self, member: Member, header: PushHeader) -> PushAnswer | None:
        if self._versions.manifest is None:
            raise NotSeeded("no learner has joined since this shard started; join again")
        guards.check_origin(header, self._versions.manifest)
        state = self._versions.owned(header.fragment_id)
        answer = admission.by_header(header, state, member.learner_id, self._versions.epoch, self._sync)
        if answer is None:
            return None
        if answer.outcome is not Outcome.REJECTED:  # a repeated refusal was counted before
            self.ledger.answered(header, answer)
        if answer.outcome is not Outcome.DUPLICATE:
            self._decline(member, state, header, answer)
        return answer

    def _decline(self, member: Member, state: FragmentState, header: PushHeader, answer: PushAnswer) -> None:
        """A contribution is not taken, so its learner gives the work back. The round does not wait for another one."""
        state.decline(member.learner_id, header, answer)
        collecting = state.round
        if (
            collecting is not None
            and collecting.round == header.round
            and collecting.refuse(member.learner_id, member.generation)
        ):
            member.missed[answer.code or answer.outcome.name] += 1

    def _accept(self, state: FragmentState, contribution: Contribution, now: float) -> None:
        collecting = state.round
        assert collecting is not None
        had_quorum = collecting.quorum_at is not None
        collecting.accept(contribution, self._sync.quorum, now)
        if not had_quorum and collecting.quorum_at is not None:
            after_s = now - collecting.opened_at
            self.grace.to_quorum.add(after_s)
            self._outbox.add(QuorumReached(contribution.fragment_id, collecting.round, after_s))

    # ------------------------------------------------------------ learners that go

    def lose(self, member: Member, code: str) -> None:
        """A generation is over: fence off what it contributed to open rounds, and wait for no more of it."""
        for collecting in self._asked(member):
            was_missing = member.learner_id in collecting.missing
            fenced = collecting.lose(member.learner_id)
            if fenced is not None:
                member.missed["FENCED"] += 1
                self.ledger.tokens_fenced += fenced.tokens
            elif was_missing:
                member.missed[code] += 1

    def leave(self, member: Member) -> None:
        """A learner said goodbye: what it contributed to open rounds counts, and nobody waits for more of it."""
        for collecting in self._asked(member):
            if member.learner_id in collecting.contributions:
                continue
            if member.learner_id in collecting.missing:
                member.missed["LEFT"] += 1
            collecting.lose(member.learner_id)

    def _asked(self, member: Member) -> list[Round]:
        """The open rounds that asked the generation that is over. Its steps are dropped: the next may count from 0."""
        rounds = []
        for state in self._versions.fragments.values():
            state.base_steps.pop(member.learner_id, None)
            if state.round is not None and state.round.asked.get(member.learner_id) == member.generation:
                rounds.append(state.round)
        return rounds

    # ------------------------------------------------------------ time

    def tick(self, now: float, *, may_open: bool) -> None:
        """Open and close what is due."""
        live = [m for m in self._membership.live() if m.first_step is not None]
        grace_s: float | None = None  # computed once, and only where a round has its quorum
        for state in self._versions.fragments.values():
            if state.round is not None:
                if grace_s is None and state.round.quorum_at is not None:
                    grace_s = self.grace_s()
                self._close_if_ready(state, state.round, grace_s or 0.0, now)
            if may_open and self._is_due(state, live):
                self._open(state, live, now)

    def grace_s(self) -> float:
        """The grace window now, in seconds."""
        times = [m.progress.step_time_s for m in self._membership.live() if m.progress.step_time_s > 0]
        return self.grace.seconds(median_low(times) if times else 0.0)

    def ask_missing(self, state: FragmentState) -> None:
        """Ask again whoever the open round waits for: the version that it is relative to has another name now."""
        for learner_id in state.round.missing if state.round else ():
            member = self._membership.get(learner_id)
            if member is not None:
                self._outbox.tell(member, state.request())

    def committed(self, closed: Round, fragment_id: int, now: float) -> None:
        """A closed round became a version: count what is in it."""
        tokens = 0
        for contribution in closed.contributions.values():
            tokens += contribution.tokens
            member = self._membership.get(contribution.learner_id)
            if member is not None:
                member.merged += 1
                member.tokens_merged += contribution.tokens
        participants = len(closed.contributions)
        self.ledger.rounds += 1
        self.ledger.participants += participants
        self.ledger.tokens_merged += tokens
        self.grace.to_publish.add(now - closed.closed_at)
        self._outbox.add(VersionCommitted(fragment_id, closed.round, participants, tokens, now - closed.opened_at))

    def _is_due(self, state: FragmentState, live: Sequence[Member]) -> bool:
        versions = self._versions
        if state.phase is not Phase.RESTING or versions.budget.is_reached(state):
            return False
        total = len(versions.manifest.fragments) if versions.manifest else 1
        every = self._sync.sync_every
        never = state.rounds_opened == 0 and state.version == 0
        interval = first_interval(state.fragment.fragment_id, total, every) if never else every
        return versions.budget.rest_is_trained(state, live) or is_due(
            live, state.base_steps, interval, self._sync.quorum
        )

    def _open(self, state: FragmentState, live: Sequence[Member], now: float) -> None:
        opened = state.open_round(live, now)
        self._outbox.add(RoundOpened(state.fragment.fragment_id, opened.round, len(live)))
        for member in live:
            member.asked += 1
            self._outbox.tell(member, state.request())

    def _close_if_ready(self, state: FragmentState, collecting: Round, grace_s: float, now: float) -> None:
        if collecting.is_void:
            state.abandon_round()
            return
        why, _ = collecting.verdict(self._sync.quorum, grace_s, now)
        if why is None:
            return
        for learner_id in collecting.missing:
            member = self._membership.get(learner_id)
            if member is not None:
                member.missed[LATE.outcome.name] += 1
        closed, fragment_id = state.close_round(now), state.fragment.fragment_id
        contributions = tuple(closed.contributions[i] for i in sorted(closed.contributions))
        open_s = now - closed.opened_at
        self._outbox.add(RoundClosed(fragment_id, closed.round, why, len(contributions), len(closed.asked), open_s))
        self._outbox.add(MergeRound(fragment_id, closed.round, contributions))
