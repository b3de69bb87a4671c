"""Rounds: when one opens, whom it asks, what becomes of a push, and when it closes.

Makes no versions: a round that closes is handed to the shell as `MergeRound`. `round.py` holds what one round has
collected, `due.py` which fragments are due, `admission.py` the rules for one push.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median_low

from diloco_common.codec import Payload
from diloco_common.errors import Busy, ContributionConflict, NotFinite, NotSeeded, Refusal
from diloco_common.settings import SyncSettings
from diloco_common.wire.messages import Outcome, Progress, PushAnswer, PushHeader
from diloco_server.core import admission
from diloco_server.core.admission import ACCEPTED, DUPLICATE, HELD
from diloco_server.core.arrivals import Call
from diloco_server.core.cadence import LONGEST_S, GraceWindow, MovingAverage, Quorum
from diloco_server.core.due import DueFragments
from diloco_server.core.effects import MergeRound, Outbox, SeedFragment
from diloco_server.core.every import Every, Measured
from diloco_server.core.fragment import Asking, FragmentState, HalfSeed
from diloco_server.core.influence import Direction, Influence
from diloco_server.core.ledger import (
    ContributionAnswered,
    ContributionDropped,
    ContributionLeftOut,
    EveryChanged,
    LearnerLeftOut,
    LearnerTakesPart,
    Merged,
    QuorumReached,
    RoundClosed,
    RoundOpened,
    ValuesReplaced,
    VersionCommitted,
)
from diloco_server.core.membership import LAST_S, Member, Membership
from diloco_server.core.merge import shares_of
from diloco_server.core.parts import HalfContribution, Part, PartedPayload, is_part, whole_of
from diloco_server.core.round import Contribution, Round, total_norm
from diloco_server.core.versions import Versions

OVERDUE = 2
"""Times H."""
SLACK = 0.1
"""Of a step."""


TIMES_USUAL, AT_LEAST_S, FIRST_S = 10.0, 10.0, 60.0
"""An open round is overdue after so many times as long as the usual one, and after these seconds; the third: while no
round has told what is usual."""
ASKS_AT_ONCE = 1 << 13
"""So many learners are asked by one tick, over all rounds that it opens: the event loop must hear others meanwhile."""


class Rounds:
    """The rounds of all fragments of one shard, and the account of what was pushed to them."""

    def __init__(
        self, sync: SyncSettings, lease_s: float, influence: Influence, membership: Membership, versions: Versions,
        outbox: Outbox,
    ) -> None:  # fmt: skip
        self.grace = GraceWindow(sync)
        self.every = Every(sync)
        self._open_s = MovingAverage()  # of rounds, until their version was announced
        self._influence = influence
        self._sync = sync
        self._due = DueFragments(sync, self.every, versions)
        self._lease_s = lease_s
        self._membership = membership
        self._versions = versions
        self._outbox = outbox

    @property
    def overdue_after_s(self) -> float:
        """How long a round may be open before people are told."""
        usual_s = self._open_s.value
        return FIRST_S if usual_s is None else max(TIMES_USUAL * usual_s, AT_LEAST_S)

    @property
    def _now(self) -> float:
        return self._outbox.now

    # ------------------------------------------------------------ pushes

    def admit(self, member: Member, header: PushHeader) -> PushAnswer | None:
        """Decide on a push by its header alone. None: its bytes are wanted."""
        try:
            answer = self._admit(member, header)
        except Busy:
            raise
        except Refusal as refusal:
            answer = self.reject(member, header, refusal)
        call = self._call(header)
        if call is not None and answer is not HELD:  # an empty part says nothing of when the others come
            member.arrivals.header(call, self._now, wanted=answer is None)
        return answer

    def contribute(
        self, member: Member, header: PushHeader, payload: Payload | PartedPayload, piece_norms: tuple[float, ...],
        now: float,
    ) -> PushAnswer:  # fmt: skip
        """Take a push whose bytes are whole and valid. State may have moved on since `admit`, so it decides again.

        A part is held until the others are there. Raises Busy: another learner is bringing version 0 in parts.
        """
        call = self._call(header)
        if call is not None:
            member.arrivals.bytes_came(call, header.payload.num_elements, now)
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
                half.add(header, Part(header.ranges, payload), piece_norms)
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
            member.takes_last(header.fragment_id)  # what an older report asks for is in this one
        self._count(member, header, ACCEPTED)
        return ACCEPTED

    def _seed(self, state: FragmentState, member: Member, tokens_merged: int) -> None:
        """Values that a learner brings, in the place of a line that knew less, if there is one."""
        if state.seeded:
            fact = ValuesReplaced(state.fragment.fragment_id, state.version, state.tokens_merged, member.learner_id)
            self._outbox.note(fact)
        for contribution in () if state.round is None else state.round.contributions.values():
            self._drop(contribution)
        state.begin_seed(member.learner_id, self._versions.budget.believed(tokens_merged), self._now)

    def _call(self, header: PushHeader) -> Call | None:
        """What a push answers, if that is what was asked for last."""
        state = self._versions.fragments.get(header.fragment_id)
        return state.call if state is not None and state.call.round == header.round else None

    def _half(self, member: Member, state: FragmentState, header: PushHeader) -> HalfContribution:
        """Where the part belongs: with those that came before, if there are any."""
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
        """Count a refused push. Its round goes on without it: one learner that diverged must not hold up all.

        A learner gives the work of a refused contribution back. So it is no refusal if another copy was taken.
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
        if answer is not None and is_known:  # another part was counted: the account has contributions, not parts
            self._decline(member, state, header, answer)  # but this round may have been opened since, and waits for it
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
        """A contribution is not taken, so its learner gives the work back. The round does not wait for another one."""
        whole = whole_of(header)
        state.decline(member.learner_id, whole, answer)
        member.lost_last(header.fragment_id)
        is_unclear = answer.code == ContributionConflict.code  # parts of two contributions: neither is a whole one
        collecting = state.round
        if (
            collecting is not None
            and collecting.round == header.round
            and collecting.refuse(member.learner_id, member.generation, None if is_unclear else whole)
        ):
            member.missed[answer.code or answer.outcome.name] += 1

    def _count(self, member: Member, header: PushHeader, answer: PushAnswer) -> None:
        if header.is_seed and answer.outcome is not Outcome.REJECTED:
            return  # no learner's work
        state = self._versions.fragments.get(header.fragment_id)
        staleness = 0 if state is None else max(0, state.version - header.base_version)
        tokens = self._tokens(header.fragment_id, header.tokens)
        self._outbox.note(ContributionAnswered(member.learner_id, header, answer, staleness, tokens))

    def _drop(self, contribution: Contribution) -> None:
        """What was accepted comes into no version."""
        tokens = self._tokens(contribution.fragment_id, contribution.tokens)
        self._outbox.note(ContributionDropped(contribution.learner_id, contribution.fragment_id, tokens))

    def _tokens(self, fragment_id: int, tokens: int) -> int:
        """What of a contribution's tokens the account counts."""
        state = self._versions.fragments.get(fragment_id)
        return tokens if state is None or state.fragment.traits.is_of_model else 0

    def _accept(self, state: FragmentState, contribution: Contribution, now: float) -> None:
        collecting = state.round
        assert collecting is not None
        had_quorum = collecting.quorum_at is not None
        collecting.accept(contribution, self.quorum(collecting), now)
        if not had_quorum and collecting.quorum_at is not None:
            after_s = now - collecting.opened_at
            self.grace.to_quorum.add(after_s)
            self._outbox.note(QuorumReached(contribution.fragment_id, collecting.round, after_s))

    # ------------------------------------------------------------ learners that go

    def lose(self, member: Member, code: str) -> None:
        """A generation is over: fence off what it contributed to open rounds, and wait for no more of it."""
        self._lose_parts(member)
        for collecting in self._asked(member):
            was_missing = member.learner_id in collecting.awaited
            fenced = collecting.lose(member.learner_id, self.quorum(collecting))
            if fenced is not None:
                member.missed["FENCED"] += 1
                member.lost_last(fenced.fragment_id)
                self._drop(fenced)
            elif was_missing:
                member.missed[code] += 1

    def leave(self, member: Member) -> None:
        """A learner said goodbye: what it contributed to open rounds counts, and nobody waits for more of it."""
        self._lose_parts(member)
        for collecting in self._asked(member):
            if member.learner_id in collecting.contributions:
                continue
            if member.learner_id in collecting.awaited:
                member.missed["LEFT"] += 1
            collecting.lose(member.learner_id, self.quorum(collecting))

    def _lose_parts(self, member: Member) -> None:
        """What its ranks have begun is over."""
        for state in self._versions.fragments.values():
            state.may_bring.pop(member.learner_id, None)
            if state.pulled.pop(member.learner_id, None) is not None:
                state.drop_unwanted()
            state.drop_half_seed(member.learner_id)

    def _asked(self, member: Member) -> list[Round]:
        """The open rounds that asked the generation that is over. Its steps are dropped: the next may count from 0."""
        rounds = []
        for state in self._versions.fragments.values():
            state.base_steps.pop(member.learner_id, None)
            state.base_tokens.pop(member.learner_id, None)
            if state.round is not None and state.round.asked.get(member.learner_id) == member.generation:
                rounds.append(state.round)
        return rounds

    # ------------------------------------------------------------ time

    def tick(self, now: float, *, may_open: bool) -> None:
        grace_s: float | None = None  # computed once, and only where a round has its quorum
        for state in self._collecting():
            assert state.round is not None
            state.round.look(self.quorum(state.round), now)
            if grace_s is None and state.round.quorum_at is not None:
                grace_s = self.grace_s()
            self._close_if_ready(state, state.round, self._waits_until(state, grace_s or 0.0, now), now)
        if may_open:
            self._open_due(now)

    def grace_s(self) -> float:
        """The grace window now, in seconds. Only learners that contribute have a say in it, once there are some."""
        members = self._setting_pace() or self._membership.live()
        scatter_s = _usual(m.reports.scatter_s for m in members if m.reports is not None and m.reports.step_time_s > 0)
        return self.grace.seconds(self._step_time_s(), self.every.steps, scatter_s)

    def _setting_pace(self) -> list[Member]:
        return [m for m in self._membership.live() if m.sets_pace and not m.is_idle]

    def _step_time_s(self) -> float:
        """Of the usual learner; 0: not known."""
        members = self._setting_pace() or self._membership.live()
        return _usual(m.reports.step_time_s for m in members if m.reports is not None and m.reports.step_time_s > 0)

    def _waits_until(self, state: FragmentState, grace_s: float, now: float) -> float:
        """Until when an open round waits for those that are missing, once it has its quorum."""
        collecting = state.round
        assert collecting is not None
        if collecting.quorum_at is None:
            return math.inf
        latest = collecting.quorum_at + grace_s
        if not collecting.last_of.isdisjoint(collecting.awaited):
            return max(latest, collecting.opened_at + LAST_S)
        if not self.grace.waits_for_expected:
            return latest
        patience_s = self.grace.patience_s(grace_s)
        until = min(max(collecting.quorum_at, collecting.usual_at) + patience_s, latest)
        for learner_id in itertools.chain([collecting.awaited_last], collecting.awaited):
            member = self._membership.get(learner_id) if learner_id in collecting.awaited else None
            if member is None or member.is_idle:
                continue
            if member.arrivals.expected_at(state.call, state.fragment.num_elements) <= until:
                collecting.awaited_last = learner_id
                return until
        return max((self._overdue_until(state, i, patience_s, now) for i in collecting.awaited), default=now)

    def _overdue_until(self, state: FragmentState, learner_id: str, patience_s: float, now: float) -> float:
        """Until when to wait for one that has not been merged here for `OVERDUE` times as many steps as it should, once
        for so many: its step is longer than rounds are patient, and may never end while one is open."""
        member, collecting = self._membership.get(learner_id), state.round
        if member is None or member.reports is None or collecting is None:
            return now
        fragment_id, reports = state.fragment.fragment_id, member.reports
        if reports.step_s <= patience_s:
            return now
        merged = reports.merged_until.get(fragment_id, reports.first).inner_step
        waits_in, waited = member.waited_for.get(fragment_id, (0, merged))
        expected_at = member.arrivals.expected_at(state.call, state.fragment.num_elements)
        slack_s = SLACK * reports.step_s
        if expected_at + slack_s > collecting.opened_at + min((1 + 2 * SLACK) * reports.step_s, LONGEST_S):
            return now
        if member.reported.inner_step - max(merged, waited) >= OVERDUE * self._due.usual_steps(state.fragment):
            waits_in = collecting.round
            member.waited_for[fragment_id] = waits_in, member.reported.inner_step
        return expected_at + slack_s if waits_in == collecting.round else now

    def ask_missing(self, state: FragmentState) -> None:
        """Ask again whoever the open round waits for: the version that it is relative to has another name now."""
        for member in self._missing(state.round):
            self._outbox.tell(member, state.request())

    def _missing(self, collecting: Round | None) -> list[Member]:
        ids = collecting.missing if collecting is not None else ()
        return [member for i in ids if (member := self._membership.get(i)) is not None]

    def committed(self, closed: Round, fragment_id: int, now: float) -> None:
        """A closed round became a version: count what is in it."""
        tokens = 0
        merged, left_out = closed.parted()
        for contribution in (*merged, *left_out):
            claimed = self._tokens(fragment_id, contribution.tokens)  # the account is of what was accepted
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
        self.grace.to_publish.add(now - closed.closed_at)
        self._open_s.add(min(now - closed.opened_at, self.overdue_after_s))  # else a standstill would be the usual
        self.every.announced_at[fragment_id] = now
        shares = [*shares_of(merged), *itertools.repeat(0.0, len(left_out))]
        whose = tuple(
            Merged(c.learner_id, c.tokens, share, c.kept) for c, share in zip((*merged, *left_out), shares, strict=True)
        )
        open_s = now - closed.opened_at
        self._outbox.note(VersionCommitted(fragment_id, closed.round, len(merged), tokens, open_s, whose))

    def hear(self, closed: Round, directions: Mapping[str, Direction]) -> None:
        """Where the contributions to a closed round of the model point."""
        known = {
            i: c
            for i, c in closed.contributions.items()
            if (m := self._membership.get(i)) is not None and c.generation >= m.first_generation
        }  # of another process under the same id this says nothing
        cosines = {i: self._influence.told(i).mean_cosine for i in known}
        back, out = self._influence.hear(known.values(), {i: directions[i] for i in directions.keys() & known.keys()})
        for learner_id in back:
            self._outbox.note(LearnerTakesPart(learner_id))
        if out is not None:
            self._outbox.note(LearnerLeftOut(out, cosines[out] or 0.0))

    def _open_due(self, now: float) -> None:
        """Learners that are left out count for nothing here: neither for when a round is due, nor for its quorum."""
        live = [m for m in self._membership.live() if m.first_step is not None]
        for learner_id in self._influence.unjudged(live):
            self._outbox.note(LearnerTakesPart(learner_id))
        for state in self._collecting():
            if state.round is not None and state.round.lacks_quorum_since(now - self._lease_s):
                self._ask_again(state, live, now)
        merging = self._influence.merging(live)
        self._open_some(self._due.among(live, merging, self._influence.quorum(merging, self._sync.quorum)), live, now)

    def _note_merged(self, member: Member, contribution: Contribution) -> None:
        """All that counted when the round asked is merged with this: its next contribution is what came since."""
        state = self._versions.fragments[contribution.fragment_id]
        steps, tokens = (base.get(member.learner_id) for base in (state.base_steps, state.base_tokens))
        is_this_process = contribution.generation >= member.first_generation
        if member.reports is not None and is_this_process and steps is not None and tokens is not None:
            member.reports.merged_until[contribution.fragment_id] = Progress(steps, tokens)

    def _collecting(self) -> list[FragmentState]:
        """In the order of the fragments."""
        return [state for _, state in sorted(self._versions.phases.collecting.items())]

    def _open_some(self, due: Sequence[int], live: Sequence[Member], now: float) -> None:
        """Open rounds, but do not ask more than `ASKS_AT_ONCE` times: the rest waits for the next tick."""
        if not due:
            return
        at_once = max(1, ASKS_AT_ONCE // len(live))
        self._due.put_off(due[at_once:])
        patience_s, fragments = self.grace.patience_s(self.grace_s()), self._versions.fragments
        steps = {m.learner_id: m.reported.inner_step for m in live}
        askings: dict[tuple[bool, ...], Asking] = {}  # by whom they ask: most fragments ask the same
        opening = due[:at_once]
        all_asked = self._due.asked(opening, live)
        for fragment_id, asked in zip(opening, all_asked, strict=True):
            key = tuple(asked)
            if key not in askings:
                askings[key] = Asking.of([*itertools.compress(live, asked)], patience_s, now)
            self._open(fragments[fragment_id], askings[key], steps, now)

    def _open(self, state: FragmentState, asking: Asking, steps: Mapping[str, int], now: float) -> None:
        """`steps`: of all live learners, whether they are asked or not."""
        opened, live = state.open_round(asking, steps, self._influence.left_out, now), asking.members
        fragment_id = state.fragment.fragment_id
        self._outbox.note(RoundOpened(fragment_id, opened.round, len(live)))
        for member in live:
            member.asked += 1
            if member.is_leaving and member.takes_last(fragment_id):
                opened.last_of.add(member.learner_id)
        self._outbox.tell_all(live, state.request())

    def _ask_again(self, state: FragmentState, live: Sequence[Member], now: float) -> None:
        there = [m for m in live if m.takes_part(state.fragment.fragment_id)]
        for silent in self._missing(state.round):
            silent.missed_round()
        asked = state.ask_again(there, self.grace.patience_s(self.grace_s()), now)
        for member in asked:
            member.asked += 1
            self._outbox.tell(member, state.request())
        assert state.round is not None
        if asked:
            state.round.usual_at = self._usual_at(state, state.round)

    def _usual_at(self, state: FragmentState, collecting: Round) -> float:
        """When the usual one of all that this round asked, earlier or now, is expected to have contributed."""
        found = {learner_id: self._membership.get(learner_id) for learner_id in collecting.asked}
        members = [m for i, m in found.items() if m is not None and m.generation == collecting.asked[i]]
        return median_low(m.arrivals.expected_at(state.call, state.fragment.num_elements) for m in members)

    def _close_if_ready(self, state: FragmentState, collecting: Round, waits_until: float, now: float) -> None:
        is_over = self._versions.done and not state.fragment.traits.is_of_model
        if collecting.is_void or is_over:
            for contribution in collecting.contributions.values() if collecting.is_void else ():
                self._drop(contribution)
            state.abandon_round(is_over=is_over)
            return
        why, _ = collecting.verdict(self.quorum(collecting), waits_until, now)
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
            before, words = self.every.steps, self.every.look(self._measured())
            if words:
                self._outbox.note(EveryChanged(before, self.every.steps, words))

    def pulled(self, member: Member, fragment_id: int, version: int, now: float) -> None:
        """A learner that had an earlier one has taken all bytes of a version. It counts if that is still the latest."""
        announced_at = self.every.announced_at.get(fragment_id)
        if announced_at is not None and version == self._versions.owned(fragment_id).version:
            member.arrivals.pulled(announced_at, now)

    def _measured(self) -> Measured:
        """What H has to carry. Kinds that are due more rarely weigh less."""
        manifest, found = self._versions.manifest, [m.arrivals for m in self._setting_pace()]
        assert manifest is not None
        own = sum(1 / s.fragment.traits.times(self._sync) for s in self._versions.fragments.values())
        elements = sum(f.num_elements / f.traits.times(self._sync) for f in manifest.fragments)
        pull_s = _usual(a.pull_s for a in found if a.pull_s is not None)
        return Measured(
            self._step_time_s(),
            push_s=elements * _usual(a.s_per_element for a in found if a.s_per_element > 0),
            pull_s=own * pull_s,
            shard_s=own * (self.grace.to_publish.value or 0.0),
            round_s=(self._open_s.value or 0.0) + pull_s,
        )

    def quorum(self, collecting: Round) -> Quorum:
        """How many contributions let this round close."""
        found = (
            self._membership.get(learner_id) for learner_id in collecting.asked if learner_id not in collecting.beside
        )
        return self._influence.quorum((m for m in found if m is not None), self._sync.quorum)


def _check_finite(header: PushHeader, piece_norms: Sequence[float]) -> None:
    """Raises NotFinite."""
    if not math.isfinite(total_norm(piece_norms)):
        raise NotFinite(
            f"fragment {header.fragment_id}: a value is NaN or infinite, or their squares overflow; check the "
            "learner's loss"
        )


def _usual(seconds: Iterable[float]) -> float:
    """Their lower median; 0: there is none."""
    return median_low(found) if (found := [*seconds]) else 0.0
