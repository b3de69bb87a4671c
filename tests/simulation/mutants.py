"""Cores with one guard broken each: what the simulation must not let pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from diloco_common.errors import Superseded
from diloco_server.core.admission import DUPLICATE
from diloco_server.core.effects import MergeRound
from diloco_server.core.fragment import FragmentState
from diloco_server.core.membership import Membership
from diloco_server.core.rounds import Round
from diloco_server.core.shard import Shard
from diloco_server.storage import version_file
from diloco_server.storage.store import FileStore
from diloco_server.storage.version import StoredVersion
from diloco_simulator import number_file
from diloco_simulator.disk import FakeDisk, FakeFile
from diloco_simulator.link import ShardLink
from diloco_simulator.shard import SimulatedShard
from diloco_worker.core.fragment import LearnerFragment, Pending
from diloco_worker.core.learner import LearnerCore


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Within, `owner.name` is what `make` makes of the original."""
    original = owner.__dict__[name]
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def fence_nobody(original: Any) -> Any:
    """What an evicted generation sent stays in its round."""

    def lose(self: Round, learner_id: str) -> None:
        if learner_id in self.asked:
            self.lost.add(learner_id)

    return lose


def let_everybody_speak(original: Any) -> Any:
    """No look at the generation or the lease of whoever speaks."""

    def check(self: Membership, learner_id: str, generation: int) -> Any:
        member = self.get(learner_id)
        return member if member is not None else original(self, learner_id, generation)

    return check


def accept_late(original: Any) -> Any:
    """What comes after its round has closed goes into the next."""

    def admit(self: Shard, member: Any, header: Any) -> Any:
        state = self.fragments.get(header.fragment_id)
        if state is not None and state.seeded and not header.is_seed and header.epoch == self.epoch:
            collecting = state.round
            if collecting is not None and header.round < collecting.round and member.learner_id in collecting.asked:
                return None
        return original(self, member, header)

    return admit


def merge_twice(original: Any) -> Any:
    """A contribution stays in the fragment and is merged into the next version as well."""
    kept: dict[int, tuple[Any, ...]] = {}

    def close(self: Shard, state: FragmentState, grace_s: float, now: float) -> None:
        original(self, state, grace_s, now)
        for i, effect in enumerate(self._effects):
            if isinstance(effect, MergeRound) and effect.fragment_id == state.fragment.fragment_id:
                again = kept.get(id(state), ())
                kept[id(state)] = effect.contributions
                self._effects[i] = MergeRound(effect.fragment_id, effect.version, (*effect.contributions, *again))

    return close


def announce_before_computing(original: Any) -> Any:
    """Learners are told of a version as soon as its round closes."""

    def close(self: Shard, state: FragmentState, grace_s: float, now: float) -> None:
        original(self, state, grace_s, now)
        if state.closed is not None:
            state.version += 1
            self._announce(state)
            state.version -= 1

    return close


def take_every_seed(original: Any) -> Any:
    """Not the first writer wins, but the last."""

    def admit(self: Shard, member: Any, header: Any) -> Any:
        answer = original(self, member, header)
        return None if header.is_seed and answer is DUPLICATE else answer

    return admit


def wait_for_all(original: Any) -> Any:
    """The grace window never ends."""
    return lambda self, quorum, grace_s, now: original(self, quorum, float("inf"), now)


def wait_for_the_dead(original: Any) -> Any:
    """A learner that lost its lease is waited for."""
    return property(lambda self: sorted(self.asked.keys() - self.contributions.keys()))


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

    def resolve(
        self: LearnerCore, fragment: LearnerFragment, version: int, merged_version: int, *forgotten: int
    ) -> bool:
        return bool(original(self, fragment, version, 0, *forgotten))

    return resolve


def ignore_merged_version(original: Any) -> Any:
    """The learner always believes that it was merged."""

    def resolve(
        self: LearnerCore, fragment: LearnerFragment, version: int, merged_version: int, *forgotten: int
    ) -> bool:
        round_number = fragment.pending.round if fragment.pending is not None else 0
        return bool(original(self, fragment, version, round_number, *forgotten))

    return resolve


def drop_what_was_not_merged(original: Any) -> Any:
    """Work that was not merged is not given back."""

    def give_back(self: LearnerFragment) -> None:
        assert self.pending is not None
        self._base_tokens += self.pending.tokens
        self._base_steps += self.pending.steps
        original(self)

    return give_back


def never_give_back(original: Any) -> Any:
    """A contribution that was not merged stays pending."""
    return lambda self: None


def count_the_snapshot_twice(original: Any) -> Any:
    """A version that holds the contribution is laid under all local progress, the contribution's included."""

    def carry(self: LearnerFragment, values: Any, version: int, epoch: int, *, merged: bool, shift: Any) -> None:
        if merged:
            assert self.pending is not None
            assert self.anchor is not None
            self.pending.snapshot = self.anchor
        original(self, values, version, epoch, merged=merged, shift=shift)

    return carry


def forget_what_encoding_lost(original: Any) -> Any:
    """No error feedback, although it is set."""

    def settle(self: LearnerFragment, pending: Any) -> None:
        original(self, pending)
        self._residual = None

    return settle


def keep_what_a_shard_forgot(original: Any) -> Any:
    """A contribution to a shard that has lost its memory stays pending."""

    def rejoined(self: LearnerCore, statuses: Any, epoch: int) -> None:
        for status in statuses:
            self.fragments[status.fragment_id].wanted = None

    return rejoined


def add_changes_to_anything(original: Any) -> Any:
    """Whoever asks gets the change since the version before, whatever version it has."""

    def change_since(self: Shard, fragment_id: int, epoch: int, version: int | None) -> Any:
        return (
            None
            if version is None
            else original(self, fragment_id, self.epoch, self.fragments[fragment_id].version - 1)
        )

    return change_since


def push_to_any_life(original: Any) -> Any:
    """What was taken for one life of a shard is pushed to the next one as well."""
    return lambda self, lease: self.pushes.begin(lease)


def forget_without_a_trace(original: Any) -> Any:
    """A learner that was forgotten hears that nothing of it was merged."""

    def forget(self: FragmentState, learner_id: str) -> None:
        before = self.forgotten_version
        original(self, learner_id)
        self.forgotten_version = before

    return forget


# ------------------------------------------------------------ the disk


def announce_before_saving(original: Any) -> Any:
    """Learners are told of a version while it is being written."""

    def keep(self: SimulatedShard, record: Any, values: Any, published: Any, then: Any, *args: Any) -> None:
        original(self, record, values, published, lambda: None)
        if self._keeper is not None:
            then(*args)

    return keep


def skip_the_sync_of_files(original: Any) -> Any:
    """What was written may be lost although its name is not."""
    return lambda self: None


def skip_the_sync_of_names(original: Any) -> Any:
    """What was renamed may have its old name again."""
    return lambda self: None


def rename_before_sync(original: Any) -> Any:
    """A file gets its name before it is durable."""

    def save(self: FileStore, version: StoredVersion, manifest: Any) -> Any:
        sync, rename = FakeFile.sync, FakeDisk.rename
        files: list[FakeFile] = []

        def rename_then_sync(disk: FakeDisk, old: str, new: str) -> None:
            rename(disk, old, new)
            sync(files.pop())

        def sync_later(file: FakeFile) -> None:
            files.append(file)

        with (
            replaced(FakeFile, "sync", lambda _: sync_later),
            replaced(FakeDisk, "rename", lambda _: rename_then_sync),
        ):
            return original(self, version, manifest)

    return save


def reuse_an_epoch(original: Any) -> Any:
    """A shard that restarts goes on in the epoch of its life before."""

    def begin_epoch(self: FileStore, before: Any) -> None:
        if before:
            self.epoch = before[-1]
        else:
            original(self, before)

    return begin_epoch


def forget_what_was_merged(original: Any) -> Any:
    """A shard that restarts does not look at the merged contributions in its files."""

    def restore(self: Shard, manifest: Any, fragments: Any) -> None:
        forgetful = [replace(f, record=replace(f.record, merged_versions={}, merged_by={})) for f in fragments]
        original(self, manifest, forgetful)

    return restore


def accept_damaged_files(original: Any) -> Any:
    """No checksum of a version file is ever wrong."""
    return lambda content: 0


def accept_damaged_tensors(original: Any) -> Any:
    """The same, of files that hold tensors."""

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
    return lambda self: ()


Mutant = tuple[Any, str, Callable[[Any], Any]]
MUTANTS: dict[str, Mutant] = {
    make.__name__: (owner, name, make)
    for owner, name, make in (
        (Round, "lose", fence_nobody),
        (Membership, "check", let_everybody_speak),
        (Shard, "_admit", accept_late),
        (Shard, "_close_if_ready", merge_twice),
        (Shard, "_close_if_ready", announce_before_computing),
        (Shard, "_admit", take_every_seed),
        (Round, "verdict", wait_for_all),
        (Round, "missing", wait_for_the_dead),
        (Membership, "check", stop_whoever_joins_again),
        (LearnerCore, "_resolve", carry_although_merged),
        (LearnerCore, "_resolve", ignore_merged_version),
        (LearnerFragment, "give_back", drop_what_was_not_merged),
        (LearnerFragment, "give_back", never_give_back),
        (LearnerFragment, "carry", count_the_snapshot_twice),
        (LearnerFragment, "_settle", forget_what_encoding_lost),
        (LearnerCore, "rejoined", keep_what_a_shard_forgot),
        (Shard, "change_since", add_changes_to_anything),
        (Pending, "begin_push", push_to_any_life),
        (FragmentState, "forget", forget_without_a_trace),
        (SimulatedShard, "_keep", announce_before_saving),
        (FakeFile, "sync", skip_the_sync_of_files),
        (FakeDisk, "sync_names", skip_the_sync_of_names),
        (FileStore, "save", rename_before_sync),
        (FileStore, "_begin_epoch", reuse_an_epoch),
        (Shard, "restore", forget_what_was_merged),
        (number_file, "checksum", accept_damaged_files),
        (version_file, "google_crc32c", accept_damaged_tensors),
        (FileStore, "_recover_fragment", keep_the_old_name),
        (ShardLink, "_held", forget_what_is_held),
    )
}
