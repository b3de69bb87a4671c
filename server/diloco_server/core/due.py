"""Finds the fragments of a shard that are due for a round.

A fragment is due when at least K live learners have taken H inner steps since its last round opened. Steps are counted
per learner. An absolute clock would stop with the fastest learner; with no clock, a fast network would drive H towards
1, which ruins learning. Fragments other than the model are due after a multiple of these steps (`Traits.every`). A
fragment is also due, out of turn, when a learner leaves that has trained since it last contributed to it.

The first time since the shard started, a fragment is due after ceil((t + 1) * H / P) steps, where t is its turn
(`manifest.turn`). That spreads the fragments evenly over H and keeps the traffic flat: with P = H = 24 one is due per
step; with P = 1 the first round comes after H steps, as in DiLoCo.

All learners report constantly. So a table of fragments by learners holds the inner step from which each learner counts,
and one tensor operation compares all of them. A leaving learner takes part only in some rounds, checked one by one.

If `sync.sync_every` is "auto", H is the smallest that link, shard and step time allow with room to spare. Each shard
chooses for its own fragments, by its own clock. In H steps every fragment is asked for, pushed, merged and pulled once.
Each of these must fit in half of that time; pulls must fit in three quarters, because they mostly wait:

    push     the usual learner pushes the whole model: one link for all shards
    pull     the usual learner pulls every version of this shard, one after another
    shard    the shard merges and publishes all its fragments
    round    one round of a fragment ends, including all waits

If more than 2 % of the requested contributions are absent when rounds close, H is too small, whatever the reason. A
learner contributes to a fragment again only after it has pulled the previous version, so a queue of versions makes it
absent.

H at most doubles in one change. It falls by at most a quarter, and only after it was too large several times in a row;
that number doubles whenever a fall proves to be too far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco_common.settings import EVERY_LEAST, EVERY_MOST, SyncSettings
from diloco_common.wire.bounds import TOKENS_MERGED_MAX
from diloco_common.wire.manifest import Fragment, turn
from diloco_server.core.fragment import FragmentState, Phase, Phases
from diloco_server.core.membership import Member
from diloco_server.core.round import Quorum, needed
from diloco_server.core.versions import Versions

ROOM, PULL_ROOM = 0.5, 0.75
"""The share of H steps that one of these parts may take."""
ABSENT = 0.02
"""The share of requested contributions that may be absent."""
ASKED = round(1 / ABSENT)
"""How many requested contributions it takes to measure that share: one that is absent is then the share itself."""
STEP = 0.25
"""H changes by at least this share, and falls by at most this share."""
QUIET, QUIET_MOST = 2, 64
"""Consecutive checks that must allow a smaller H before it falls: the number at first, and at most."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a shard has measured, in seconds; 0: unknown. Each value but `step_s` must fit in H steps."""

    step_s: float
    push_s: float = 0.0
    pull_s: float = 0.0
    shard_s: float = 0.0
    round_s: float = 0.0


def carried(measured: Measured) -> int:
    half_s = max(measured.push_s, measured.shard_s, measured.round_s) / ROOM
    return max(1, math.ceil(max(half_s, measured.pull_s / PULL_ROOM) / measured.step_s))


def following(every: int, carries: int, absent: float, least: int, most: int, *, may_fall: bool) -> int:
    """The next H. `absent`: which share of requested contributions was absent. `least`, `most`: the allowed range."""
    wanted = every
    if absent > ABSENT:
        wanted = 2 * every
    elif carries > every * (1 + STEP) or (carries <= every * (1 - STEP) and may_fall):
        wanted = min(max(carries, math.ceil(every * (1 - STEP))), 2 * every)
    return min(max(wanted, least), most)


class SyncInterval:
    """The current H of one shard."""

    def __init__(self, sync: SyncSettings) -> None:
        self.steps = sync.first_every
        self._sync = sync
        self.announced_at: dict[int, float] = {}
        """Fragment -> when its latest version was announced."""
        self._is_auto = sync.sync_every == "auto"
        self._rounds = self._asked = self._absent = 0  # since the last check
        self._settles = True  # rounds opened under the previous H may still close
        self._quiet, self._quiet_needed, self._fell = 0, QUIET, False

    def steps_for(self, fragment: Fragment) -> int:
        """Inner steps between two rounds of this fragment."""
        return self.steps * fragment.traits.times(self._sync)

    def closed(self, contributions: int, absent: int) -> None:
        """Count a closed round: its contributions, and the expected ones that were absent."""
        self._rounds += 1
        self._asked += contributions + absent
        self._absent += absent

    def is_time(self, fragments: int) -> bool:
        if not self._is_auto or self._rounds < fragments:
            return False
        if self._settles:
            self._settles = False
            self._rounds = self._asked = self._absent = 0
        return self._asked >= ASKED

    def look(self, measured: Measured) -> str:
        """Choose H again. Returns why it changed; empty if it did not."""
        if measured.step_s <= 0:
            return ""
        before, absent, carries = self.steps, self._absent / self._asked, carried(measured)
        self._rounds = self._asked = self._absent = 0
        self._quiet = self._quiet + 1 if carries <= before * (1 - STEP) and absent <= ABSENT / 2 else 0
        may_fall = self._quiet >= self._quiet_needed
        self.steps = following(before, carries, absent, EVERY_LEAST, EVERY_MOST, may_fall=may_fall)
        if self.steps == before:
            return ""
        self._settles, self._quiet = True, 0
        if self.steps > before and self._fell:
            self._quiet_needed = min(2 * self._quiet_needed, QUIET_MOST)
        self._fell = self.steps < before
        return f"{absent:.1%} absent" if absent > ABSENT else f"{carries} would do"


NEVER = TOKENS_MERGED_MAX
"""More steps or tokens than any learner reaches."""
ASKS_AT_ONCE = 1 << 16
"""Maximum number of requests of one tick. A restored shard may owe a million (1,024 fragments, 1,000 learners), which
would keep the event loop for longer than a lease."""
READY = 0.75
"""Share of the interval that a learner must have trained to be asked, unless it leaves or the budget ends. Learners
that are up to a third slower are in every round."""


def first_interval(fragment_id: int, num_fragments: int, sync_every: int) -> int:
    """Inner steps until the first round of a fragment; at least 1, at most H."""
    return -(-(turn(fragment_id, num_fragments) + 1) * sync_every // num_fragments)


def is_due(live: Iterable[Member], base_steps: Mapping[str, int], interval: int, quorum: Quorum) -> bool:
    """Whether K live learners took `interval` steps since the fragment's last round.

    `base_steps`: learner -> the inner step it had reported then. Later joiners count from their first report.
    """
    members = ready = 0
    for member in live:
        first = member.first_step
        if first is not None:
            members += 1
            base = max(first, base_steps.get(member.learner_id, first))
            ready += member.reported.inner_step - base >= interval
    return ready > 0 and ready >= needed(quorum, members)


class DueFragments:
    """Recomputes only what has changed: most ticks give the same answer as the previous one."""

    def __init__(self, every: SyncInterval, versions: Versions) -> None:
        self._every = every
        self._versions = versions
        self._found: object = None  # the inputs of the last `among`
        self._last: set[int] = set()  # due because the trained tokens fill the budget
        self._begin()

    def among(self, live: Sequence[Member], merging: Sequence[Member], quorum: Quorum) -> list[int]:
        """The fragments that are due, in order: a quorum of the `merging` learners has taken enough steps.

        Empty if nothing has changed; at most as many as `ASKS_AT_ONCE` allows, and the rest at the next call. All
        learners passed in have reported.
        """
        # Whether a fragment is due depends on these, not on the time.
        found = (
            [(m.generation, m.reported, m.is_idle, m.progress.last_rounds) for m in live],
            [m.generation for m in merging],
            self._versions.done,
            [*self._versions.closing],
            quorum,
        )
        if self._phases is not self._versions.phases:
            self._begin()
        if found == self._found and not self._phases.changed:
            return []
        self._found = found
        self._look_at_members(live)
        self._look_at_fragments(live)
        self._last.clear()
        leaving = {p for m in live for p in m.progress.last_rounds or ()}
        fragments = self._versions.fragments
        of_leavers = [p for p in leaving & self._rows.keys() if self._is_due(fragments[p], merging, quorum)]
        due = sorted([*(self._due_for_all(merging, quorum) - leaving), *of_leavers])
        at_once = max(1, ASKS_AT_ONCE // max(1, len(live)))
        if len(due) > at_once:
            self._found = None
        return due[:at_once]

    def asked(self, due: Sequence[int], live: Sequence[Member]) -> list[list[bool]]:
        """Which learners the rounds of these fragments ask: by fragment, then by learner. `live`: as given to `among`.

        A mean is only as long as its parts: 24 steps of one learner merged with 3 of another move the model less than
        the 24 alone. So a learner with few steps since its last merged contribution is skipped. It receives the version
        like the others, and contributes to a later round.
        """
        there = torch.ones(len(due), len(live), dtype=torch.bool)
        leaving = [i for i, m in enumerate(live) if m.is_leaving]
        for i in leaving:
            there[:, i] = torch.tensor([live[i].takes_part(p) for p in due])
        rows = [self._rows[p] for p in due]
        steps = _tensor(m.reported.inner_step for m in live) - self._merged[rows]
        ready = steps >= READY * self._intervals[rows, None].double()
        ready |= steps < 0  # a process that started again counts from 0
        ready[:, leaving] = True
        ready[[p in self._last for p in due]] = True
        found = there & ready
        asked: list[list[bool]] = torch.where(found.any(dim=1, keepdim=True), found, there).tolist()
        return asked

    # ------------------------------------------------------------ the table

    def _begin(self) -> None:
        self._phases: Phases = self._versions.phases
        self._ids = list(self._versions.fragments)
        self._rows = {fragment_id: row for row, fragment_id in enumerate(self._ids)}
        self._columns: dict[int, int] = {}  # generation -> its column, in the order of the live learners
        rows = len(self._ids)
        self._intervals = torch.full((rows,), NEVER)  # inner steps between rounds; NEVER: it is not RESTING
        self._left = torch.full((rows,), NEVER)  # tokens left in the budget
        self._steps = torch.empty(rows, 0, dtype=torch.int64)  # by learner: the inner step it counts from
        self._merged = torch.empty(rows, 0, dtype=torch.int64)  # by learner: the step up to which its work is merged
        self._tokens = torch.empty(rows, 0, dtype=torch.int64)  # the same in tokens, if the run has a budget
        self._phases.changed.update(self._ids)

    def _look_at_members(self, live: Sequence[Member]) -> None:
        """Drop the columns of generations that have gone, and add those of new ones."""
        if [*self._columns] == [m.generation for m in live]:
            return
        before, self._columns = self._columns, {m.generation: column for column, m in enumerate(live)}
        stay = [m.generation for m in live if m.generation in before]
        came = [m for m in live if m.generation not in before]

        def moved(table: Tensor, of: Callable[[FragmentState, Member], int]) -> Tensor:
            found = torch.empty(len(self._ids), len(live), dtype=torch.int64)
            found[:, [self._columns[g] for g in stay]] = table[:, [before[g] for g in stay]]
            for member in came:
                states = self._versions.fragments.values()
                found[:, self._columns[member.generation]] = _tensor(of(state, member) for state in states)
            return found

        self._steps, self._merged = moved(self._steps, _base_steps), moved(self._merged, _merged_steps)
        self._tokens = moved(self._tokens, _base_tokens) if self._ends else self._tokens

    def _look_at_fragments(self, live: Sequence[Member]) -> None:
        """Update the rows of changed fragments. Once the run is over, buffers rest forever.

        A new H takes effect at a fragment's next round; otherwise a smaller H would open many rounds at once.
        """
        budget, changed = self._versions.budget, self._phases.changed
        if self._versions.done:
            changed.update(self._ids)
        for fragment_id in changed:
            state, row = self._versions.fragments[fragment_id], self._rows[fragment_id]
            rests = state.phase is Phase.RESTING and not self._versions.is_final(state)
            self._intervals[row] = min(self._interval(state), NEVER - 1) if rests else NEVER
            self._left[row] = NEVER
            if rests and state.fragment.traits.is_of_model:
                self._left[row] = budget.tokens - state.tokens_merged
            if rests:
                self._steps[row] = _tensor(_base_steps(state, m) for m in live)
                self._merged[row] = _tensor(_merged_steps(state, m) for m in live)
            if rests and self._ends:
                self._tokens[row] = _tensor(_base_tokens(state, m) for m in live)
        changed.clear()

    @property
    def _ends(self) -> bool:
        return self._versions.budget.tokens > 0

    def _interval(self, state: FragmentState) -> int:
        versions, fragment = self._versions, state.fragment
        assert versions.manifest is not None
        steps = self._every.steps_for(fragment)
        if state.last_request.round:
            return steps
        number, total = versions.manifest.place(fragment)
        return first_interval(number, total, steps)

    # ------------------------------------------------------------ decisions

    def _due_for_all(self, live: Sequence[Member], quorum: Quorum) -> set[int]:
        """Fragments due for the learners that stay. Idle learners do not count as long as others contribute."""
        staying = [m for m in live if not m.is_leaving]
        members, rows = [m for m in staying if not m.is_idle] or staying, _where(self._intervals != NEVER)
        if not members or not rows:
            return set()
        columns = [self._columns[m.generation] for m in members]
        steps = _tensor(m.reported.inner_step for m in members) - self._steps[rows][:, columns]
        ready = (steps >= self._intervals[rows, None]).sum(dim=1)
        enough = max(1, needed(quorum, len(members)))
        due = {self._ids[rows[i]] for i in _where(ready >= enough)}
        if self._ends:
            tokens = _tensor(m.reported.tokens for m in members) - self._tokens[rows][:, columns]
            trained = tokens.clamp(min=0).sum(dim=1)
            near = [self._versions.fragments[self._ids[rows[i]]] for i in _where(trained >= self._left[rows])]
            self._last |= {s.fragment.fragment_id for s in near if self._versions.budget.rest_is_trained(s, members)}
        self._last |= {p for p in self._versions.closing if self._intervals[self._rows[p]] != NEVER}
        return due | self._last

    def _is_due(self, state: FragmentState, live: Sequence[Member], quorum: Quorum) -> bool:
        """Whether a fragment in which a leaving learner takes part is due. Idle learners do not count here either."""
        fragment_id = state.fragment.fragment_id
        steps = int(self._intervals[self._rows[fragment_id]])
        if steps == NEVER:
            return False
        there = [m for m in live if m.takes_part(fragment_id)]
        if any(m.wants_last(fragment_id) for m in there) or fragment_id in self._versions.closing:
            return True
        if state.fragment.traits.is_of_model and self._versions.budget.rest_is_trained(state, there):
            self._last.add(fragment_id)
            return True
        return is_due([m for m in there if not m.is_idle] or there, state.base_steps, steps, quorum)


def _tensor(values: Iterable[int]) -> Tensor:
    """int64; larger values become NEVER."""
    return torch.tensor([min(value, NEVER) for value in values], dtype=torch.int64)


def _where(mask: Tensor) -> list[int]:
    found: list[int] = mask.nonzero().flatten().tolist()
    return found


def _base_steps(state: FragmentState, member: Member) -> int:
    """The inner step from which a learner counts for this fragment."""
    first = member.first_step or 0
    return max(first, state.base_steps.get(member.learner_id, first))


def _base_tokens(state: FragmentState, member: Member) -> int:
    """The token count from which a learner's tokens count as trained; NEVER: no round has asked it yet."""
    return state.base_tokens.get(member.learner_id, NEVER)


def _merged_steps(state: FragmentState, member: Member) -> int:
    """The step up to which its work is merged into this fragment; NEVER: none of it is known to be merged."""
    since = None if member.reports is None else member.reports.merged_until.get(state.fragment.fragment_id)
    return NEVER if since is None else since.inner_step
