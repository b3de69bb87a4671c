"""The product with one guard broken each: what the simulation must not let pass."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from diloco_common.errors import NotFinite, Refusal, Superseded
from diloco_common.trust.identity import Identity
from diloco_common.wire.messages import Progress, PushAnswer, VersionId
from diloco_server.core.admission import DUPLICATE
from diloco_server.core.due import DueFragments
from diloco_server.core.effects import MergeRound
from diloco_server.core.fragment import FragmentState, Phase
from diloco_server.core.membership import Membership
from diloco_server.core.parts import HalfContribution
from diloco_server.core.round import Round
from diloco_server.core.rounds import Rounds
from diloco_server.core.shard import Shard
from diloco_server.core.trust import cuts
from diloco_server.core.trust.trail import Most, Trail
from diloco_server.core.versions import Versions
from diloco_server.shell.host import ShardHost
from diloco_server.shell.keeper import Keeper
from diloco_server.shell.quotas import Places
from diloco_server.shell.quotas import Pushes as PushQuota
from diloco_server.shell.service import Service
from diloco_server.storage import version_file
from diloco_server.storage.store import FileStore
from diloco_server.storage.version_file import StoredVersion
from diloco_simulator.cluster import ScheduleFailed, run_schedule
from diloco_simulator.options import Options
from diloco_worker.core import events
from diloco_worker.core.connection import ConnectionState
from diloco_worker.core.council_log import LEADER, CouncilLog
from diloco_worker.core.events import Answered
from diloco_worker.core.fragment import Contribution, Fate, LearnerFragment, Pushes
from diloco_worker.core.learner import LearnerCore
from diloco_worker.core.tensors import ContributionTensors, FragmentTensors
from diloco_worker.shell.codec_thread import CodecThread
from diloco_worker.shell.council import Council, IslandCouncil


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


def fence_nobody(original: Any) -> Any:
    """What an evicted generation sent stays in its round."""

    def lose(self: Round, learner_id: str, quorum: Any) -> None:
        if learner_id in self.asked:
            self.lost.add(learner_id)
            self.awaited.pop(learner_id, None)

    return lose


def let_everybody_speak(original: Any) -> Any:
    """No look at the generation or the lease of whoever speaks."""

    def check(self: Membership, learner_id: str, generation: int) -> Any:
        member = self.get(learner_id)
        return member if member is not None else original(self, learner_id, generation)

    return check


def accept_late(original: Any) -> Any:
    """What comes after its round has closed goes into the next."""

    def admit(self: Rounds, member: Any, header: Any) -> Any:
        state = self._versions.fragments.get(header.fragment_id)
        if state is not None and state.seeded and not header.is_seed and header.epoch == self._versions.epoch:
            collecting = state.round
            if collecting is not None and header.round < collecting.round and member.learner_id in collecting.asked:
                return None
        return original(self, member, header)

    return admit


def merge_twice(original: Any) -> Any:
    """A contribution stays in the fragment and is merged into the next version as well."""
    kept: dict[int, tuple[Any, ...]] = {}

    def close(self: Rounds, state: FragmentState, collecting: Round, waits_until: float, now: float) -> None:
        original(self, state, collecting, waits_until, now)
        effects = self._outbox._effects
        for i, effect in enumerate(effects):
            if isinstance(effect, MergeRound) and effect.fragment_id == state.fragment.fragment_id:
                again = kept.get(id(state), ())
                kept[id(state)] = effect.contributions
                effects[i] = MergeRound(effect.fragment_id, effect.version, (*effect.contributions, *again))

    return close


def announce_before_computing(original: Any) -> Any:
    """Learners are told of a version as soon as its round closes."""

    def close(self: Rounds, state: FragmentState, collecting: Round, waits_until: float, now: float) -> None:
        original(self, state, collecting, waits_until, now)
        if state.closed is not None:
            self._outbox.tell_live(replace(state.announcement(), version=state.version + 1))

    return close


def take_every_seed(original: Any) -> Any:
    """Not the first writer wins, but the last."""

    def admit(self: Rounds, member: Any, header: Any) -> Any:
        answer = original(self, member, header)
        return None if header.is_seed and answer is DUPLICATE else answer

    return admit


def wait_for_all(original: Any) -> Any:
    """The grace window never ends."""
    return lambda self, quorum, waits_until, now: original(self, quorum, float("inf"), now)


def wait_for_the_dead(original: Any) -> Any:
    """A learner that lost its lease is waited for."""

    def lose(self: Round, learner_id: str, quorum: Any) -> Any:
        fenced = original(self, learner_id, quorum)
        if learner_id in self.asked:
            self.awaited[learner_id] = self.asked[learner_id]
        return fenced

    return lose


def stop_whoever_joins_again(original: Any) -> Any:
    """Any older generation is taken for that of another process."""

    def check(self: Membership, learner_id: str, generation: int) -> Any:
        member = self.get(learner_id)
        if member is not None and generation < member.generation:
            raise Superseded("another process joined")
        return original(self, learner_id, generation)

    return check


def carry_although_merged(original: Any) -> Any:
    """The learner never believes that it was merged."""
    return lambda self, version, epoch, merged_version, forgotten: original(self, version, epoch, 0, forgotten)


def ignore_merged_version(original: Any) -> Any:
    """The learner always believes that it was merged."""
    return lambda self, version, epoch, merged_version, forgotten: Fate.MERGED


def drop_what_was_not_merged(original: Any) -> Any:
    """Work that was not merged is not given back."""

    def give_back(self: LearnerFragment) -> None:
        assert self.contribution is not None
        self._base_tokens += self.contribution.tokens
        self._base_steps += self.contribution.steps
        original(self)

    return give_back


def never_give_back(original: Any) -> Any:
    """A contribution that was not merged stays under way."""
    return lambda self: None


def count_the_snapshot_twice(original: Any) -> Any:
    """A version that holds the contribution is put under all local progress, the contribution's included."""

    def carry(self: FragmentTensors, values: Any, *, merged: bool, difference: Any = None, **steps: int) -> None:
        if merged:
            assert self.contribution is not None
            self.contribution._moved = self.anchor
        original(self, values, merged=merged, difference=None, **steps)

    return carry


def forget_what_encoding_lost(original: Any) -> Any:
    """No error feedback, although it is set."""

    def settle(self: FragmentTensors, values: Any, *, merged: bool) -> None:
        original(self, values, merged=merged)
        self._residual = None

    return settle


def keep_the_loss_of_what_was_not_merged(original: Any) -> Any:
    """The residual stays what encoding lost of a contribution that no version holds."""
    return lambda self: None


def keep_what_a_shard_forgot(original: Any) -> Any:
    """A contribution to a shard that has lost its memory stays pending."""

    def rejoined(self: LearnerCore, statuses: Any, epoch: int) -> None:
        for status in statuses:
            self.fragments[status.fragment_id].asked = None

    return rejoined


def add_changes_to_anything(original: Any) -> Any:
    """Whoever asks gets the change since the version before, whatever version it has."""

    def change_since(self: Shard, fragment_id: int, have: VersionId | None) -> Any:
        return None if have is None else original(self, fragment_id, self.fragments[fragment_id].before)

    return change_since


def push_to_any_epoch(original: Any) -> Any:
    """What was taken for one epoch of a shard is pushed to the next one as well."""
    return lambda self, lease: self.pushes.begin(lease)


def forget_without_a_trace(original: Any) -> Any:
    """A learner that was forgotten hears that nothing of it was merged."""

    def forget(self: FragmentState, learner_id: str) -> None:
        before = self.record.forgotten_version
        original(self, learner_id)
        self.record = replace(self.record, forgotten_version=before)

    return forget


# ------------------------------------------------------------ the disk


def announce_before_saving(original: Any) -> Any:
    """Learners are told of a version while it is being written."""

    async def keep(self: ShardHost, version: StoredVersion) -> None:
        self.start(lambda: original(self, version), "keep")

    return keep


class Careless:
    """A file system, or a file, through which a careless store speaks to the disk."""

    def __init__(self, of: Any, **instead: Callable[..., Any]) -> None:
        self._of = of
        vars(self).update(instead)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


def on(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The store gets what `make` makes of its disk."""

    def mutate(original: Any) -> Any:
        def open_folder(self: FileStore, fs: Any, origin: Any, *, first_epoch: int) -> None:
            original(self, make(fs), origin, first_epoch=first_epoch)

        return open_folder

    mutate.__name__, mutate.__doc__ = make.__name__, make.__doc__
    return mutate


@on
def skip_the_sync_of_files(disk: Any) -> Any:
    """What was written may be lost although its name is not."""
    return Careless(disk, create=lambda name: Careless(disk.create(name), sync=lambda: None))


@on
def skip_the_sync_of_names(disk: Any) -> Any:
    """What was renamed may have its old name again."""
    return Careless(disk, sync_names=lambda: None)


@on
def rename_before_sync(disk: Any) -> Any:
    """A file gets its name before it is durable."""
    files: dict[str, Any] = {}

    def create(name: str) -> Any:
        files[name] = disk.create(name)
        return Careless(files[name], sync=lambda: None)

    def rename(old: str, new: str) -> None:
        disk.rename(old, new)
        if old in files:  # and not one of an earlier process, that is damaged and put aside
            files.pop(old).sync()

    return Careless(disk, create=create, rename=rename)


def reuse_an_epoch(original: Any) -> Any:
    """A shard that restarts goes on in the epoch that it had before."""

    def begin_epoch(self: FileStore, before: Any) -> None:
        if before:
            self.epoch = before[-1]
        else:
            original(self, before)

    return begin_epoch


def forget_what_was_merged(original: Any) -> Any:
    """A shard that restarts does not look at the merged contributions in its files."""

    def restore(self: Versions, manifest: Any, fragments: Any) -> None:
        forgetful = [replace(f, record=replace(f.record, merged_versions={}, merged_by={})) for f in fragments]
        original(self, manifest, forgetful)

    return restore


def accept_damaged_files(original: Any) -> Any:
    """No checksum of a version file is ever wrong."""

    class NoChecksums:
        value = staticmethod(lambda content: 0)
        extend = staticmethod(lambda checksum, content: 0)

    return NoChecksums


def keep_the_old_name(original: Any) -> Any:
    """A version that came back in place of a later one is announced under the name that it had."""

    def recover_fragment(self: FileStore, *args: Any) -> Any:
        header, found = original(self, *args)
        return header, replace(found, is_behind=False)

    return recover_fragment


def forget_what_is_held(original: Any) -> Any:
    """A learner that joins does not say which versions it holds."""
    return lambda self, fragment_ids: ()


def begin_every_folder_at_epoch_1(original: Any) -> Any:
    """A folder that was emptied begins with an epoch that it had before."""

    def open_folder(self: FileStore, fs: Any, origin: Any, *, first_epoch: int) -> None:
        original(self, fs, origin, first_epoch=1)

    return open_folder


def announce_what_the_disk_refused(original: Any) -> Any:
    """A disk that refuses a version is believed to have it."""

    async def write(self: Keeper, version: StoredVersion, manifest: Any) -> bool:
        await original(self, version, manifest)
        return True

    return write


# ------------------------------------------------------------ what only the product's own shells can get wrong


def apply_while_a_snapshot_is_read(original: Any) -> Any:
    """A version does not wait for the codec thread, which is copying the fragment."""
    return property(lambda self: False)


def count_open_pushes_for_ever(original: Any) -> Any:
    """A push that was answered still takes a place: the shard is busy for ever."""

    return lambda self, account, push: None


def take_seeds_of_two_learners(original: Any) -> Any:
    """A fragment that has versions is seeded again by whoever comes late."""

    def admit(self: Rounds, member: Any, header: Any) -> Any:
        answer = original(self, member, header)
        state = self._versions.fragments.get(header.fragment_id)
        if header.is_seed and answer is DUPLICATE and state is not None and state.phase is Phase.RESTING:
            state.phase = Phase.UNSEEDED
            return None
        return answer

    return admit


def answer_refusals_as_if_taken(original: Any) -> Any:
    """A push that the shard has no place for is answered as if it had been taken: nobody sends it again."""

    async def push(self: Service, caller: Identity, parts: AsyncIterator[Any]) -> PushAnswer:
        try:
            return await original(self, caller, parts)  # type: ignore[no-any-return]
        except Refusal:
            return DUPLICATE

    return push


def keep_quiet_about_values_that_are_not_finite(original: Any) -> Any:
    """A learner that cannot contribute does not say so, and the round waits for it."""

    async def payload(self: CodecThread, contribution: Contribution) -> Any:
        try:
            return await original(self, contribution)
        except NotFinite:
            return None

    return payload


def forget_values_that_were_never_sent(original: Any) -> Any:
    """A shard that knows nothing of a learner may have had what it never got."""

    def begin(self: Pushes, lease: Any) -> bool:
        self.may_have_arrived = True
        return bool(original(self, lease))

    return begin


def take_any_epoch_for_the_same(original: Any) -> Any:
    """A learner that joins a restarted shard does not forget what the shard had announced before."""

    def take_lease(self: ConnectionState, joined: Any) -> bool:
        announced = dict(self.to_pull.now)
        original(self, joined)
        self.to_pull.now |= announced
        return False

    return take_lease


def compute_the_record_again(original: Any) -> Any:
    """The record in memory is not the one on the disk: learners have come and gone in between."""

    def committed(self: Versions, record: Any, published: Any) -> None:
        state = self.fragments[record.fragment_id]
        before = dict(state.record.merged_versions)
        original(self, record, published)
        state.record.merged_versions.clear()
        state.record.merged_versions.update(before)

    return committed


def contribute_the_checkpoint_again(original: Any) -> Any:
    """A learner that was resumed counts what its checkpoint had trained as its own work."""

    def adopt(self: LearnerFragment, values: Any, version: int, epoch: int, tokens: int, steps: int) -> None:
        original(self, values, version, epoch, 0, 0)

    return adopt


def decode_onto_any_base(original: Any) -> Any:
    """A change is added to whatever version the learner holds by then."""

    def base(self: CodecThread, fragment_id: int) -> Any:
        held = self._held.get(fragment_id)
        return None if held is None else (held.epoch, held.version - 1)

    return base


# ------------------------------------------------------------ hostile learners


def weigh_as_claimed(original: Any) -> Any:
    """A contribution weighs what its learner says that it holds."""
    return lambda weights, most: [*weights]


def take_any_length(original: Any) -> Any:
    """A contribution moves the model as far as it likes."""
    return lambda lengths, most: [1.0] * len(lengths)


def count_every_step(original: Any) -> Any:
    """Steps make rounds due as they are reported, and those of one stranger are enough."""

    def among(self: DueFragments, live: Any, quorum: Any) -> Any:
        for member in live:
            member.trail.counted = replace(member.trail.counted, inner_step=member.progress.inner_step)
        return original(self, live, 1)

    return among


def believe_step_times(original: Any) -> Any:
    """A step takes as long as its learner says."""

    def go_on(self: Trail, progress: Progress, most: Most, now: float) -> None:
        original(self, progress, most, now)
        self.counted = replace(self.counted, step_time_s=progress.step_time_s)

    return go_on


def let_one_learner_take_all_places(original: Any) -> Any:
    """Whoever opens many pushes keeps all of them open."""

    def take(self: Places[Any], account: str, holder: Any) -> None:
        self._holders.setdefault(account, {})[holder] = None
        self._count += 1

    return take


# ------------------------------------------------------------ islands


def take_half_for_the_whole(original: Any) -> Any:
    """Parts that cover half of a fragment are a contribution."""
    return property(lambda self: 2 * self._covered >= self._elements)


def keep_parts_of_who_is_gone(original: Any) -> Any:
    """Half a contribution stays in its round when the generation ends that has pushed it."""

    def lose(self: Round, learner_id: str, quorum: Any) -> Any:
        half = self.halves.get(learner_id)
        fenced = original(self, learner_id, quorum)
        if half is not None:
            self.halves[learner_id] = half
        return fenced

    return lose


def take_any_refusal_for_that_of_this_one(original: Any) -> Any:
    """That a rank's part was refused is heard late, and believed of the next contribution to the same round."""
    return lambda self, fragment_id, round_number, answer, tokens=0: original(self, fragment_id, round_number, answer)


def keep_one_answer_per_fragment(original: Any) -> Any:
    """While a refusal waits to be read, a late answer to an earlier contribution takes its place."""
    return lambda event: event.fragment_id if isinstance(event, Answered) else original(event)


def give_the_latest_whatever_is_wanted(original: Any) -> Any:
    """A rank that asks for a version by name gets the one after it."""

    def named(self: Shard, fragment_id: int, want: Any, learner_id: str) -> Any:
        original(self, fragment_id, want, learner_id)
        state = self.owned(fragment_id)
        return state.record, state.published

    return named


def act_on_own_words(original: Any) -> Any:
    """A rank applies a version as soon as it has it, whatever the others have."""

    def is_ready(self: CouncilLog, rank: int, word: Any) -> None:
        original(self, rank, word)
        p, fetching = word.fragment_id, self._fetching.get(word.fragment_id)
        if fetching is not None and rank == self.rank and p not in self._complete:
            fetching.ready.setdefault(LEADER, word)
            self._complete.append(p)

    return is_ready


def know_only_of_own_parts(original: Any) -> Any:
    """Whether a contribution may have arrived is what each rank knows of its own push."""

    def applies(self: IslandCouncil, event: Any, contribution: Any) -> None:
        is_sent = contribution is not None and contribution.pushes.may_have_arrived
        original(self, replace(event, sent=contribution.tokens if is_sent else 0), contribution)

    return applies


def save_what_is_counted_so_far(original: Any) -> Any:
    """A checkpoint holds the last step, and the counts of the step before."""
    return Council.trained


Mutant = tuple[Any, str, Callable[[Any], Any]]
MUTANTS: dict[str, Mutant] = {
    make.__name__: (owner, name, make)
    for owner, name, make in (
        (Round, "lose", fence_nobody),
        (Membership, "check", let_everybody_speak),
        (Rounds, "_admit", accept_late),
        (Rounds, "_close_if_ready", merge_twice),
        (Rounds, "_close_if_ready", announce_before_computing),
        (Rounds, "_admit", take_every_seed),
        (Round, "verdict", wait_for_all),
        (Round, "lose", wait_for_the_dead),
        (Membership, "check", stop_whoever_joins_again),
        (Contribution, "fate_in", carry_although_merged),
        (Contribution, "fate_in", ignore_merged_version),
        (LearnerFragment, "give_back", drop_what_was_not_merged),
        (LearnerFragment, "give_back", never_give_back),
        (FragmentTensors, "carry", count_the_snapshot_twice),
        (FragmentTensors, "_settle", forget_what_encoding_lost),
        (ContributionTensors, "_take_back", keep_the_loss_of_what_was_not_merged),
        (LearnerCore, "rejoined", keep_what_a_shard_forgot),
        (Shard, "change_since", add_changes_to_anything),
        (Contribution, "begin_push", push_to_any_epoch),
        (FragmentState, "forget", forget_without_a_trace),
        (ShardHost, "keep", announce_before_saving),
        (FileStore, "__init__", skip_the_sync_of_files),
        (FileStore, "__init__", skip_the_sync_of_names),
        (FileStore, "__init__", rename_before_sync),
        (FileStore, "_begin_epoch", reuse_an_epoch),
        (Versions, "restore", forget_what_was_merged),
        (version_file, "google_crc32c", accept_damaged_files),
        (FileStore, "_recover_fragment", keep_the_old_name),
        (CodecThread, "held", forget_what_is_held),
        (FileStore, "__init__", begin_every_folder_at_epoch_1),
        (Keeper, "_write", announce_what_the_disk_refused),
        (FragmentTensors, "is_being_read", apply_while_a_snapshot_is_read),
        (PushQuota, "closed", count_open_pushes_for_ever),
        (Rounds, "_admit", take_seeds_of_two_learners),
        (Service, "push", answer_refusals_as_if_taken),
        (CodecThread, "payload", keep_quiet_about_values_that_are_not_finite),
        (Pushes, "begin", forget_values_that_were_never_sent),
        (ConnectionState, "take_lease", take_any_epoch_for_the_same),
        (Versions, "committed", compute_the_record_again),
        (LearnerFragment, "adopt", contribute_the_checkpoint_again),
        (CodecThread, "base", decode_onto_any_base),
        (cuts, "capped", weigh_as_claimed),
        (cuts, "clipping", take_any_length),
        (DueFragments, "among", count_every_step),
        (Trail, "go_on", believe_step_times),
        (Places, "take", let_one_learner_take_all_places),
        (HalfContribution, "is_complete", take_half_for_the_whole),
        (Round, "lose", keep_parts_of_who_is_gone),
        (LearnerCore, "answered", take_any_refusal_for_that_of_this_one),
        (events, "_subject", keep_one_answer_per_fragment),
        (Shard, "named", give_the_latest_whatever_is_wanted),
        (CouncilLog, "_is_ready", act_on_own_words),
        (IslandCouncil, "applies", know_only_of_own_parts),
        (IslandCouncil, "trained", save_what_is_counted_so_far),
    )
}
