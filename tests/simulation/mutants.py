"""The product with one guard broken each: what the simulation must not let pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from diloco_common.errors import NotFinite, Refusal, Superseded
from diloco_common.wire.messages import PushAnswer
from diloco_server.core import patience
from diloco_server.core.admission import DUPLICATE
from diloco_server.core.due import DueFragments
from diloco_server.core.effects import MergeRound
from diloco_server.core.fragment import FragmentState
from diloco_server.core.influence import Influence
from diloco_server.core.membership import Membership
from diloco_server.core.parts import HalfContribution
from diloco_server.core.round import Round
from diloco_server.core.rounds import Rounds
from diloco_server.core.shard import Shard
from diloco_server.core.taking import Taking
from diloco_server.core.versions import Versions
from diloco_server.shell.quotas import Places
from diloco_server.shell.service import Service
from diloco_server.shell.work import VersionWork
from diloco_server.storage import version_file
from diloco_server.storage.store import FileStore
from diloco_server.storage.version_file import StoredVersion
from diloco_simulator.cluster import ScheduleFailed, run_schedule
from diloco_simulator.options import Options
from diloco_worker.core.council_log import LEADER, CouncilLog
from diloco_worker.core.fragment import Fate, LearnerFragment, PendingContribution, Pushes
from diloco_worker.core.learner import LearnerCore
from diloco_worker.core.tensors import FragmentTensors
from diloco_worker.shell.codec_thread import CodecThread
from diloco_worker.shell.council import Council, IslandCouncil

Mutant = tuple[Any, str, Callable[[Any], Any]]
"""Whose attribute of which name is replaced, and what makes the new one of the original."""
MUTANTS: dict[str, Mutant] = {}


def instead(act: Callable[..., Any]) -> Callable[[Any], Any]:
    """What lets `act` stand in for a method, a property or a function. The original comes before its own arguments."""

    def make(original: Any) -> Any:
        if isinstance(original, property):
            return property(lambda self: act(original.fget, self))
        return lambda *args, **how: act(original, *args, **how)

    return make


def breaks(owner: Any, name: str) -> Callable[[Any], Any]:
    """The decorated function stands in for `owner.name`."""

    def add(act: Any) -> Any:
        MUTANTS[act.__name__] = owner, name, instead(act)
        return act

    return add


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Within, `owner.name` is what `make` makes of the original."""
    original = owner.__dict__[name]
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def broken_by(mutant: Mutant, options: Options) -> str | None:
    """What is broken in this schedule while the mutant is in place; None: nothing."""
    try:
        with replaced(*mutant):
            run_schedule(options)
    except ScheduleFailed as failed:
        return getattr(failed.violation, "name", type(failed.violation).__name__)
    return None


BY_A_WORD: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    # The grace window never ends.
    "wait_for_all": (Round, "verdict", lambda was, self, until, now: was(self, math.inf, now)),
    # The learner never believes that it was merged.
    "carry_although_merged": (
        PendingContribution, "fate_in",
        lambda was, self, version, epoch, merged, forgotten: was(self, version, epoch, 0, forgotten),
    ),
    # The learner always believes that it was merged.
    "ignore_merged_version": (PendingContribution, "fate_in", lambda was, *args: Fate.MERGED),
    # A contribution that was not merged stays under way.
    "never_give_back": (LearnerFragment, "give_back", lambda was, self: None),
    # Whoever asks gets the change since the version before, whatever version it has.
    "add_changes_to_anything": (
        Shard, "change_since", lambda was, self, p, have: have and was(self, p, self.fragments[p].before)
    ),
    # What was taken for one epoch of a shard is pushed to the next one as well.
    "push_to_any_epoch": (PendingContribution, "begin_push", lambda was, self, lease: self.pushes.begin(lease)),
    # A folder that was emptied begins with an epoch that it had before.
    "begin_every_folder_at_epoch_1": (
        FileStore, "__init__", lambda was, self, fs, origin, *, first_epoch: was(self, fs, origin, first_epoch=1)
    ),
    # A learner that was resumed counts what its checkpoint had trained as its own work.
    "contribute_the_checkpoint_again": (
        LearnerFragment, "adopt", lambda was, self, *args: was(self, *args[:3], 0, 0)
    ),
    # A contribution weighs what its learner says that it holds.
    "weigh_as_claimed": (
        Influence, "bound_weights", lambda was, self, taken: {c.learner_id: replace(c, counted=c.tokens) for c in taken}
    ),
    # A contribution moves the model as far as it likes.
    "take_any_length": (Influence, "_limits", lambda was, self, taken, before, own: ({}, before)),
    # The steps of one stranger are enough for a round.
    "let_one_stranger_open_rounds": (
        DueFragments, "among", lambda was, self, live, merging, quorum: was(self, live, merging, 1)
    ),
    # Parts that cover half of a fragment are a contribution.
    "take_half_for_the_whole": (
        HalfContribution, "is_complete", lambda was, self: 2 * self._covered >= self._elements
    ),
    # That a rank's part was refused is heard late, and believed of the next contribution to the same round.
    "take_any_refusal_for_that_of_this_one": (
        LearnerCore, "answered", lambda was, self, p, number, answer, tokens=0: was(self, p, number, answer)
    ),
    # A checkpoint holds the last step, and the counts of the step before.
    "save_what_is_counted_so_far": (IslandCouncil, "trained", lambda was, *args: Council.trained(*args)),
}  # fmt: skip
for _name, (_owner, _attribute, _act) in BY_A_WORD.items():
    MUTANTS[_name] = _owner, _attribute, instead(_act)


@breaks(Round, "lose")
def fence_nobody(original: Any, self: Round, learner_id: str, quorum: Any) -> None:
    """What an evicted generation sent stays in its round."""
    if learner_id in self.asked:
        self.lost.add(learner_id)
        self.awaited.pop(learner_id, None)


@breaks(Membership, "check")
def let_everybody_speak(original: Any, self: Membership, learner_id: str, generation: int) -> Any:
    """No look at the generation or the lease of whoever speaks."""
    member = self.get(learner_id)
    return member if member is not None else original(self, learner_id, generation)


@breaks(Taking, "_admit")
def accept_late(original: Any, self: Taking, member: Any, header: Any) -> Any:
    """What comes after its round has closed goes into the next."""
    state = self._versions.fragments.get(header.fragment_id)
    if state is not None and state.seeded and not header.is_seed and header.epoch == self._versions.epoch:
        collecting = state.round
        if collecting is not None and header.round < collecting.round and member.learner_id in collecting.asked:
            return None
    return original(self, member, header)


@breaks(Rounds, "_close_if_ready")
def merge_twice(original: Any, self: Rounds, state: FragmentState, *how: Any) -> None:
    """A contribution stays in the fragment and is merged into the next version as well."""
    original(self, state, *how)
    effects, kept = self._outbox._effects, vars(self).setdefault("kept", {})
    for i, effect in enumerate(effects):
        if isinstance(effect, MergeRound) and effect.fragment_id == state.fragment.fragment_id:
            again = kept.get(id(state), ())
            kept[id(state)] = effect.contributions
            effects[i] = MergeRound(effect.fragment_id, effect.version, (*effect.contributions, *again))


@breaks(Rounds, "_close_if_ready")
def announce_before_computing(original: Any, self: Rounds, state: FragmentState, *how: Any) -> None:
    """Learners are told of a version as soon as its round closes."""
    original(self, state, *how)
    if state.closed is not None:
        self._outbox.tell_live(replace(state.announcement(), version=state.version + 1))


@breaks(Taking, "_admit")
def take_every_seed(original: Any, self: Taking, member: Any, header: Any) -> Any:
    """Not the first writer wins, but the last."""
    answer = original(self, member, header)
    return None if header.is_seed and answer is DUPLICATE else answer


MUTANTS["wait_for_the_overdue_in_every_round"] = patience, "OVERDUE", lambda steps: 0


@breaks(Round, "lose")
def wait_for_the_dead(original: Any, self: Round, learner_id: str, quorum: Any) -> Any:
    """A learner that lost its lease is waited for."""
    fenced = original(self, learner_id, quorum)
    if learner_id in self.asked:
        self.awaited[learner_id] = self.asked[learner_id]
    return fenced


@breaks(Membership, "check")
def stop_whoever_joins_again(original: Any, self: Membership, learner_id: str, generation: int) -> Any:
    """Any older generation is taken for that of another process."""
    member = self.get(learner_id)
    if member is not None and generation < member.generation:
        raise Superseded("another process joined")
    return original(self, learner_id, generation)


@breaks(FragmentTensors, "carry")
def count_the_snapshot_twice(original: Any, self: FragmentTensors, values: Any, *, merged: bool, **how: Any) -> None:
    """A version that holds the contribution is put under all local progress, the contribution's included."""
    if merged:
        assert self.contribution is not None
        self.contribution._moved = self.anchor
    original(self, values, merged=merged, **how | {"difference": None})


@breaks(FragmentTensors, "_settle")
def forget_what_encoding_lost(original: Any, self: FragmentTensors, values: Any, *, merged: bool) -> None:
    """No error feedback."""
    original(self, values, merged=merged)
    self._residual = None


@breaks(FragmentTensors, "give_back")
def keep_the_loss_of_what_was_not_merged(original: Any, self: FragmentTensors) -> None:
    """The residual becomes what encoding lost of a contribution that no version holds."""
    if self.contribution is not None and self.contribution.loss is not None:
        self._residual = self.contribution.loss
    original(self)


@breaks(LearnerCore, "rejoined")
def keep_what_a_shard_forgot(original: Any, self: LearnerCore, statuses: Any, epoch: int) -> None:
    """A contribution to a shard that has lost its memory stays pending."""
    for status in statuses:
        self.fragments[status.fragment_id].asked = None


@breaks(FragmentState, "forget")
def forget_without_a_trace(original: Any, self: FragmentState, learner_id: str) -> None:
    """A learner that was forgotten hears that nothing of it was merged."""
    before = self.record.forgotten_version
    original(self, learner_id)
    self.record = replace(self.record, forgotten_version=before)


# ------------------------------------------------------------ the disk


@breaks(VersionWork, "keep")
async def announce_before_saving(original: Any, self: VersionWork, version: StoredVersion) -> None:
    """Learners are told of a version while it is being written."""
    self.start(lambda: original(self, version), "keep")


class Careless:
    """A file system, or a file, through which a careless store speaks to the disk."""

    def __init__(self, of: Any, **instead: Callable[..., Any]) -> None:
        self._of = of
        vars(self).update(instead)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


def on(make: Callable[[Any], Any]) -> Any:
    """The store gets what `make` makes of its disk."""

    def open_folder(original: Any, self: FileStore, fs: Any, *args: Any, **how: Any) -> None:
        original(self, make(fs), *args, **how)

    open_folder.__name__ = make.__name__
    return breaks(FileStore, "__init__")(open_folder)


@on
def skip_the_sync_of_files(disk: Any) -> Any:
    """What was written may be lost although its name is not."""
    return Careless(disk, create=lambda name: Careless(disk.create(name), sync=lambda: None))


@on
def skip_the_sync_of_names(disk: Any) -> Any:
    """What was renamed may have its old name again."""
    return Careless(disk, sync_names=lambda: None)


@breaks(Versions, "restore")
def forget_what_was_merged(original: Any, self: Versions, manifest: Any, fragments: Any) -> None:
    """A shard that restarts does not look at the merged contributions in its files."""
    forgetful = [replace(f, record=replace(f.record, merged_versions={}, merged_by={})) for f in fragments]
    original(self, manifest, forgetful)


NO_CHECKSUMS = SimpleNamespace(value=lambda content: 0, extend=lambda checksum, content: 0)
MUTANTS["accept_damaged_files"] = version_file, "google_crc32c", lambda original: NO_CHECKSUMS
"""No checksum of a version file is ever wrong."""


@breaks(FileStore, "_recover_fragment")
def keep_the_old_name(original: Any, self: FileStore, *args: Any) -> Any:
    """A version that came back in place of a later one is announced under the name that it had."""
    header, found = original(self, *args)
    return header, replace(found, is_behind=False)


# ------------------------------------------------------------ what only the product's own shells can get wrong


@breaks(Service, "push")
async def answer_refusals_as_if_taken(original: Any, *args: Any) -> PushAnswer:
    """A push that the shard has no place for is answered as if it had been taken: nobody sends it again."""
    try:
        return await original(*args)
    except Refusal:
        return DUPLICATE


@breaks(CodecThread, "payload")
async def keep_quiet_about_values_that_are_not_finite(original: Any, *args: Any) -> Any:
    """A learner that cannot contribute does not say so, and the round waits for it."""
    try:
        return await original(*args)
    except NotFinite:
        return None


@breaks(Pushes, "begin")
def forget_values_that_were_never_sent(original: Any, self: Pushes, lease: Any) -> bool:
    """A shard that knows nothing of a learner may have had what it never got."""
    self.may_have_arrived = True
    return bool(original(self, lease))


@breaks(Versions, "committed")
def compute_the_record_again(original: Any, self: Versions, record: Any, published: Any) -> None:
    """The record in memory is not the one on the disk: learners have come and gone in between."""
    state = self.fragments[record.fragment_id]
    before = dict(state.record.merged_versions)
    original(self, record, published)
    state.record.merged_versions.clear()
    state.record.merged_versions.update(before)


# ------------------------------------------------------------ hostile learners


# ------------------------------------------------------------ members


@breaks(Influence, "_limits")
def cut_all_to_the_shortest(original: Any, self: Influence, taken: Any, before: Any, own: Any) -> Any:
    """What is longer than the shortest of its round is cut."""
    _, after = original(self, taken, before, own)
    return {c.learner_id: min(other.norm for other in taken) for c in taken}, after


@breaks(Round, "parted")
def merge_half_of_a_round(original: Any, self: Round) -> Any:
    """Healthy learners are left out."""
    part, beside = original(self)
    return part[: len(part) // 2 + 1], [*beside, *part[len(part) // 2 + 1 :]]


@breaks(Places, "take")
def let_one_learner_take_all_places(original: Any, self: Places[Any], account: str, holder: Any) -> None:
    """Whoever opens many pushes keeps all of them open."""
    self._holders.setdefault(account, {})[holder] = None
    self._count += 1


# ------------------------------------------------------------ islands


@breaks(Round, "lose")
def keep_parts_of_who_is_gone(original: Any, self: Round, learner_id: str, quorum: Any) -> Any:
    """Half a contribution stays in its round when the generation ends that has pushed it."""
    half = self.halves.get(learner_id)
    fenced = original(self, learner_id, quorum)
    if half is not None:
        self.halves[learner_id] = half
    return fenced


@breaks(CouncilLog, "_is_ready")
def act_on_own_words(original: Any, self: CouncilLog, rank: int, word: Any) -> None:
    """A rank applies a version as soon as it has it, whatever the others have."""
    original(self, rank, word)
    p, fetching = word.fragment_id, self._fetching.get(word.fragment_id)
    if fetching is not None and rank == self.rank and p not in self._complete:
        fetching.ready.setdefault(LEADER, word)
        self._complete.append(p)
