"""Opens and closes rounds, chooses the learners to ask, and updates rounds when a learner goes.

Makes no versions: a closed round goes to the shell as `MergeRound`. `round.py` holds the state of one round, `due.py`
finds the fragments that are due, `taking.py` handles pushes, and `patience.py` says how long a round waits.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from diloco_common.settings import Settings
from diloco_common.wire.messages import Progress
from diloco_server.core.due import DueFragments, SyncInterval
from diloco_server.core.effects import MergeRound, Outbox
from diloco_server.core.fragment import FragmentState
from diloco_server.core.influence import Direction, Influence
from diloco_server.core.ledger import (
    ContributionLeftOut,
    EveryChanged,
    LearnerLeftOut,
    LearnerTakesPart,
    Merged,
    RoundClosed,
    RoundOpened,
    VersionCommitted,
)
from diloco_server.core.membership import Member, Membership
from diloco_server.core.merge import shares_of
from diloco_server.core.patience import RoundPatience
from diloco_server.core.round import Contribution, Round
from diloco_server.core.taking import Taking
from diloco_server.core.versions import Versions


class Rounds:
    def __init__(
        self, settings: Settings, influence: Influence, membership: Membership, versions: Versions, outbox: Outbox
    ) -> None:
        self.every = SyncInterval(settings.sync)
        self._due = DueFragments(self.every, versions)
        self.patience = RoundPatience(settings.sync, self.every, influence, membership, versions)
        self.taking = Taking(settings.sync, settings.lease.lease_s, self.patience, versions, outbox)
        self._influence = influence
        self._quorum = settings.sync.quorum
        self._lease_s = settings.lease.lease_s
        self._membership = membership
        self._versions = versions
        self._outbox = outbox

    # ------------------------------------------------------------ learners that go

    def lose(self, member: Member, code: str) -> None:
        """End a generation: drop its contributions to open rounds, and stop waiting for it."""
        self._lose_parts(member)
        for fragment_id, collecting in self._asked(member).items():
            was_missing = member.learner_id in collecting.awaited
            fenced = collecting.lose(member.learner_id, self.patience.quorum(collecting))
            if fenced is not None:
                member.missed["FENCED"] += 1
                self.taking.drop(fenced)
            elif was_missing:
                member.missed[code] += 1
            else:
                continue
            member.lost_last(fragment_id)  # a leaving learner that joins again needs another round for this work

    def leave(self, member: Member) -> None:
        """A learner left: its contributions to open rounds count, and no round waits for it."""
        self._lose_parts(member)
        for collecting in self._asked(member).values():
            if member.learner_id in collecting.contributions:
                continue
            if member.learner_id in collecting.awaited:
                member.missed["LEFT"] += 1
            collecting.lose(member.learner_id, self.patience.quorum(collecting))

    def _lose_parts(self, member: Member) -> None:
        """Drop the learner's incomplete uploads and the pulls of its ranks."""
        for state in self._versions.fragments.values():
            state.may_bring.pop(member.learner_id, None)
            if state.pulled.pop(member.learner_id, None) is not None:
                state.drop_unwanted()
            state.drop_half_seed(member.learner_id)

    def _asked(self, member: Member) -> dict[int, Round]:
        """Fragment -> its open round, if that asked this generation. Drops step counts: the next may count from 0."""
        rounds = {}
        for fragment_id, state in self._versions.fragments.items():
            state.base_steps.pop(member.learner_id, None)
            state.base_tokens.pop(member.learner_id, None)
            if state.round is not None and state.round.asked.get(member.learner_id) == member.generation:
                rounds[fragment_id] = state.round
        return rounds

    # ------------------------------------------------------------ time

    def tick(self, now: float, *, may_open: bool) -> None:
        grace_s: float | None = None  # computed once, and only if a round has its quorum
        for state in self._collecting():
            assert state.round is not None
            state.round.look(self.patience.quorum(state.round), now)
            if grace_s is None and state.round.quorum_at is not None:
                grace_s = self.patience.grace_s()
            self._close_if_ready(state, state.round, self.patience.waits_until(state, grace_s or 0.0, now), now)
        if may_open:
            self._open_due(now)

    def ask_missing(self, state: FragmentState) -> None:
        """Repeat the request to learners that the open round awaits, because the base version was renamed."""
        for member in self._missing(state.round):
            self._outbox.tell(member, state.request())

    def _missing(self, collecting: Round | None) -> list[Member]:
        ids = collecting.missing if collecting is not None else ()
        return [member for i in ids if (member := self._membership.get(i)) is not None]

    def committed(self, closed: Round, fragment_id: int, now: float) -> None:
        tokens = 0
        merged, left_out = closed.parted()
        for contribution in (*merged, *left_out):
            claimed = self.taking.tokens(fragment_id, contribution.tokens)  # the totals count accepted tokens
            member = self._membership.get(contribution.learner_id)
            if member is not None:
                self._note_merged(member, contribution)
                if not member.is_leaving:
                    member.trains_on(fragment_id)
            if contribution.learner_id in closed.beside:
                self._outbox.note(ContributionLeftOut(contribution.learner_id, fragment_id, claimed))
                continue
            tokens += claimed
            if member is not None:
                member.merged += 1
                member.tokens_merged += claimed
        self.patience.announced(closed, now)
        self.every.announced_at[fragment_id] = now
        shares = [*shares_of(merged), *itertools.repeat(0.0, len(left_out))]
        whose = tuple(
            Merged(c.learner_id, c.tokens, share, c.kept) for c, share in zip((*merged, *left_out), shares, strict=True)
        )
        open_s = now - closed.opened_at
        self._outbox.note(VersionCommitted(fragment_id, closed.round, len(merged), tokens, open_s, whose))

    def hear(self, closed: Round, directions: Mapping[str, Direction]) -> None:
        """Take the directions of the contributions to a closed round of the model."""
        known = {
            i: c
            for i, c in closed.contributions.items()
            if (m := self._membership.get(i)) is not None and c.generation >= m.first_generation
        }  # skip contributions of an earlier process under the same id
        cosines = {i: self._influence.told(i).mean_cosine for i in known}
        back, out = self._influence.hear(known.values(), {i: directions[i] for i in directions.keys() & known.keys()})
        for learner_id in back:
            self._outbox.note(LearnerTakesPart(learner_id))
        if out is not None:
            self._outbox.note(LearnerLeftOut(out, cosines[out] or 0.0))

    def _open_due(self, now: float) -> None:
        """Open due rounds. Learners that are left out count neither for when they are due nor for their quorum."""
        live = [m for m in self._membership.live() if m.first_step is not None]
        for learner_id in self._influence.unjudged(live):
            self._outbox.note(LearnerTakesPart(learner_id))
        for state in self._collecting():
            if state.round is not None and state.round.lacks_quorum_since(now - self._lease_s):
                self._ask_again(state, live, now)
        merging = self._influence.merging(live)
        due = self._due.among(live, merging, self._influence.quorum(merging, self._quorum))
        self._open_all(due, live, now)

    def _note_merged(self, member: Member, contribution: Contribution) -> None:
        """Record how far a learner's work is merged: its next contribution holds only later work."""
        state = self._versions.fragments[contribution.fragment_id]
        steps, tokens = (base.get(member.learner_id) for base in (state.base_steps, state.base_tokens))
        is_this_process = contribution.generation >= member.first_generation
        if member.reports is not None and is_this_process and steps is not None and tokens is not None:
            member.reports.merged_until[contribution.fragment_id] = Progress(steps, tokens)

    def _collecting(self) -> list[FragmentState]:
        return [state for _, state in sorted(self._versions.phases.collecting.items())]

    def _open_all(self, due: Sequence[int], live: Sequence[Member], now: float) -> None:
        if not due:
            return
        patience_s = self.patience.patience_s()
        steps = {m.learner_id: m.reported.inner_step for m in live}
        for fragment_id, asked in zip(due, self._due.asked(due, live), strict=True):
            state, members = self._versions.fragments[fragment_id], [*itertools.compress(live, asked)]
            opened = state.open_round(members, steps, self._influence.left_out, patience_s, now)
            opened.usual_at = self.patience.usual_at(state, opened)
            self._outbox.note(RoundOpened(fragment_id, opened.round, len(members)))
            for member in members:
                member.asked += 1
                if member.is_leaving and member.takes_last(fragment_id):
                    opened.last_of.add(member.learner_id)
            self._outbox.tell_all(members, state.request())

    def _ask_again(self, state: FragmentState, live: Sequence[Member], now: float) -> None:
        there = [m for m in live if m.takes_part(state.fragment.fragment_id)]
        for silent in self._missing(state.round):
            silent.missed_round()
        patience_s = self.patience.patience_s()
        asked = state.ask_again(there, self._influence.left_out, patience_s, now)
        for member in asked:
            member.asked += 1
            self._outbox.tell(member, state.request())
        assert state.round is not None
        if asked:
            state.round.usual_at = self.patience.usual_at(state, state.round)

    def _close_if_ready(self, state: FragmentState, collecting: Round, waits_until: float, now: float) -> None:
        is_over = self._versions.done and not state.fragment.traits.is_of_model
        if collecting.is_void or is_over:
            for contribution in collecting.contributions.values() if collecting.is_void else ():
                self.taking.drop(contribution)
            state.abandon_round()
            return
        why = collecting.verdict(waits_until, now)
        if why is None:
            return
        absent = self._missing(collecting)
        self.every.closed(len(collecting.contributions), sum(m.sets_pace for m in absent))
        for member in absent:
            member.missed["ABSENT"] += 1
        for learner_id in collecting.asked.keys() - collecting.contributions.keys():
            if (known := self._membership.get(learner_id)) is not None:
                known.missed_round()
        closed = state.close_round(self._influence, now)
        fragment_id = state.fragment.fragment_id
        contributions, left_out = closed.parted()
        beside: list[Contribution] = []
        if state.fragment.traits.is_whole:
            live = {m.learner_id for m in self._membership.live()} - closed.beside
            contributions, beside = state.latest.take(contributions, live)
        open_s, asked = now - closed.opened_at, len(closed.asked)
        self._outbox.note(RoundClosed(fragment_id, closed.round, why, len(contributions), asked, len(absent), open_s))
        self._outbox.add(MergeRound(fragment_id, closed.round, tuple(contributions), tuple(beside), tuple(left_out)))
        if self.every.is_time(len(self._versions.fragments)):
            before, words = self.every.steps, self.every.look(self.patience.measured())
            if words:
                self._outbox.note(EveryChanged(before, self.every.steps, words))

    def pulled(self, member: Member, fragment_id: int, version: int, now: float) -> None:
        """A learner that had an earlier version has pulled this one completely. The time counts if this is still the
        latest."""
        announced_at = self.every.announced_at.get(fragment_id)
        if announced_at is not None and version == self._versions.owned(fragment_id).version:
            member.arrivals.pulled(announced_at, now)
