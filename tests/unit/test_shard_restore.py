"""A shard that comes back with its versions: what learners go on with, what is fenced off, what loss is told.

P1, P2, P4; Faults 5, 6 and 8 in the pure core. A `Rig` is one epoch; versions go from one to the next as a store
keeps them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch

from builders import random_values
from diloco_common.errors import WrongFolder
from diloco_common.observe.logs import Log
from diloco_common.settings import Settings
from diloco_common.wire.manifest import Fragment, model_digest
from diloco_common.wire.messages import Collect, Committed, Held, Outcome, PushAnswer, Stop
from diloco_server.core.arithmetic import Values, VersionRules
from diloco_server.core.fragment import Restored
from diloco_server.core.ledger import VersionsLost
from diloco_server.core.outer import make_outer_optimizer
from diloco_server.shell.keeper import recover
from diloco_simulator.world.disk import FakeDisk
from rig import TOKENS, Rig
from stores import MANIFEST, SIZE, make_version, open_store


class Life(Rig):
    """One epoch of a shard, K = all, H = 1."""

    def __init__(self, epoch: int, restored: Restored | None = None, **run: Any) -> None:
        outer = {"optimizer": "nesterov", "lr": 0.7, "momentum": 0.9}
        super().__init__(epoch=epoch, sync={"sync_every": 1}, outer=outer, run=run)
        if restored is not None:
            self.shard.versions.restore(KNOWN.shard.manifest, [restored])  # type: ignore[arg-type]

    def come(self, name: str, held: tuple[int, int] | None = None, process_id: str = "process") -> None:
        """Join, listen, and take a step."""
        told = [Held(0, *held)] if held else []
        self.steps[name] = self.steps.get(name, 0) + 1
        self.shard.attend(self.join(name, process_id=f"{name}'s {process_id}", held=told))
        self.advance()

    def push_from(self, name: str, round_number: int, base: tuple[int, int]) -> PushAnswer:
        """A contribution that is relative to the version `base`, as (epoch, version)."""
        return self.contribute(
            name, round_number, float(round_number), epoch=base[0], base_version=base[1], tokens=TOKENS, steps=1
        )

    def seeded(self) -> Life:
        self.come("ann")
        self.seed("ann", 1.0)
        return self

    def trained(self, rounds: int) -> Life:
        for _ in range(rounds):
            self.step("ann")
            answer = self.push_from("ann", self.state.version + 1, self.state.version_id)
            assert answer.outcome is Outcome.ACCEPTED
        return self

    def kept(self, *, is_new_line: bool = False) -> Restored:
        """What a store would bring back, were the shard killed now."""
        state = self.state
        record, values = deepcopy((state.record, state.values))  # payloads never change
        return Restored(record, values, state.published, is_new_line)  # type: ignore[arg-type]

    @property
    def identity(self) -> tuple[int, int]:
        return self.state.version_id

    @property
    def lost(self) -> list[VersionsLost]:
        return self.noted(VersionsLost)

    def merged(self, name: str) -> int:
        return self.shard.join_answer(name).fragments[0].merged_version


KNOWN = Life(3).seeded()


def first_epoch(rounds: int = 2) -> Life:
    return Life(3).seeded().trained(rounds)


def test_a_restart_brings_a_version_back_under_its_name() -> None:
    old = first_epoch()
    new = Life(4, old.kept())
    assert (new.shard.epoch, new.identity, old.identity) == (4, (3, 2), (3, 2))
    assert (new.state.record, new.merged("ann")) == (old.state.record, 2)
    assert new.shard.tokens_merged == 2 * TOKENS


def test_learners_go_on_with_what_they_hold() -> None:
    new = Life(4, first_epoch().kept())
    new.come("ann", held=(3, 2))
    assert Committed(0, 2, 3) in new.told["ann"]
    new.step("ann")
    assert Collect(0, 3, 3) in new.take_told("ann")
    assert new.push_from("ann", 3, (3, 2)).outcome is Outcome.ACCEPTED
    assert (new.identity, new.merged("ann")) == ((4, 3), 3)
    assert new.state.before == (3, 2), "a change leads from what ann holds"
    assert not new.lost


def test_the_same_contributions_make_the_same_bytes_with_a_restart_in_between() -> None:
    """P3: momentum comes back bit for bit, too."""
    whole, restarted = first_epoch(5), Life(4, first_epoch(3).kept())
    restarted.come("ann", held=(3, 3))
    restarted.trained(2)
    mine, theirs = (rig.state.values for rig in (whole, restarted))
    assert torch.equal(mine.theta, theirs.theta)
    assert torch.equal(mine.buffers[0], theirs.buffers[0])


def test_a_version_that_was_made_durable_but_not_announced_tells_who_is_in_it() -> None:
    """P1: ann's contribution was merged, the shard was killed before it could say so."""
    new = Life(4, first_epoch(2).kept())
    new.come("ann", held=(3, 1))
    (status,) = new.shard.join_answer("ann").fragments
    assert (status.epoch, status.version, status.merged_version) == (3, 2, 2)
    new.step("ann")
    assert new.push_from("ann", 2, (3, 1)).outcome is Outcome.DUPLICATE, "her retry of round 2 is not merged again"
    assert new.shard.ledger.duplicates == 1
    assert new.identity == (3, 2)


def test_another_process_of_the_same_id_is_not_told_of_merges_that_are_not_its_own() -> None:
    """P1: membership does not outlive a restart, what was merged and by whom does."""
    new = Life(4, first_epoch().kept())
    new.come("ann", process_id="process 2")
    assert new.merged("ann") == 0


def test_generations_of_the_old_epoch_are_fenced_off() -> None:
    """P4: a lease is (epoch, generation); epochs are never used again, so generations need not be kept."""
    new = Life(4, first_epoch().kept())
    new.come("ann", held=(3, 2))
    generation = new.members["ann"].generation
    with pytest.raises(Exception, match="has no lease here since this shard restarted"):
        new.shard.check("ann", generation, 3)
    assert new.shard.check("ann", generation, 4) is new.members["ann"]


def test_a_version_that_is_behind_what_was_announced_gets_a_name_of_its_own() -> None:
    """reliability.md 8: (3, 3) rotted, version 2 came back. Nobody may confuse two versions 3."""
    new = Life(4, first_epoch(2).kept(is_new_line=True))
    assert new.identity == (4, 2)
    new.come("ann", held=(3, 3))
    assert new.lost == [VersionsLost(0, 3, 2, 3, "ann")]
    assert Committed(0, 2, 4) in new.take_told("ann")
    new.step("ann")
    lost = new.push_from("ann", 3, (3, 3))
    assert (lost.outcome, lost.code) == (Outcome.REJECTED, "WRONG_EPOCH")


def test_a_learner_that_holds_what_is_lost_makes_the_shard_begin_a_new_line() -> None:
    """Durability "interval", or a disk that lied: the shard cannot know by itself. reliability.md 5."""
    new = Life(4, first_epoch(1).kept())
    new.come("ben", held=(3, 1))
    new.take_told("ben")
    assert new.identity == (3, 1)

    new.come("ann", held=(3, 3))
    new.come("cat", held=(3, 2))

    assert new.identity == (4, 1)
    assert new.lost == [VersionsLost(0, 3, 1, 3, "ann")]
    assert Committed(0, 1, 4) in new.take_told("ben"), "everybody is told the new name"


class Anew(Life):
    """A shard that came back with nothing; "new" has never seen a version, the others have trained."""

    def __init__(self) -> None:
        super().__init__(4)

    def arrives(self, name: str, seen: int = 0, held: tuple[int, int] | None = (3, 2)) -> None:
        self.take_told(name)
        told = [Held(0, *held)] if held else []
        self.steps[name] = self.steps.get(name, 0) + 1
        self.shard.attend(self.join(name, process_id=name, held=told, tokens_seen=seen))
        self.advance()

    def brings(self, name: str, value: float, seen: int = 0) -> Outcome:
        return self.seed(name, value, tokens_merged=seen).outcome

    def is_asked(self, name: str) -> bool:
        (status,) = self.shard.join_answer(name).fragments
        return not status.seeded


def newcomer_first(rig: Anew) -> None:
    rig.arrives("new", held=None)
    rig.brings("new", 9.0)
    rig.arrives("old", 40)
    assert not rig.told_of("old", Committed)
    rig.brings("old", 1.0, 40)


def newcomer_has_trained_a_little(rig: Anew) -> None:
    rig.arrives("new", held=None)
    rig.brings("new", 9.0)
    rig.step("new")
    assert rig.contribute("new", 1, 9.0, steps=1, tokens=TOKENS).outcome is Outcome.ACCEPTED
    rig.step("new")
    rig.arrives("old", 40)
    rig.brings("old", 1.0, 40)


def trained_first(rig: Anew) -> None:
    rig.arrives("old", 40)
    rig.brings("old", 1.0, 40)
    rig.arrives("new", held=None)
    assert not rig.is_asked("new")


def the_newest_comes_last(rig: Anew) -> None:
    rig.arrives("less", 30)
    rig.brings("less", 3.0, 30)
    rig.arrives("old", 40)
    rig.brings("old", 1.0, 40)
    rig.arrives("as much", 40)
    assert not rig.is_asked("as much")


def two_are_asked_at_once(rig: Anew) -> None:
    rig.arrives("new", held=None)
    rig.brings("new", 9.0)
    rig.arrives("less", 30)
    rig.arrives("old", 40)
    rig.brings("old", 1.0, 40)
    assert not rig.is_asked("less")
    assert rig.brings("less", 3.0, 30) is Outcome.DUPLICATE


def of_a_checkpoint_of_the_loop(rig: Anew) -> None:
    rig.arrives("new", held=None)
    rig.brings("new", 9.0)
    rig.arrives("old", 40, held=None)
    rig.brings("old", 1.0, 40)


@pytest.mark.parametrize(
    "comes",
    [
        newcomer_first, newcomer_has_trained_a_little, trained_first, the_newest_comes_last, two_are_asked_at_once,
        of_a_checkpoint_of_the_loop,
    ],
)  # fmt: skip
def test_an_empty_shard_takes_the_values_of_whoever_has_seen_the_newest_version(comes: Callable[[Anew], None]) -> None:
    rig = Anew()
    comes(rig)
    assert (rig.theta, rig.shard.tokens_merged) == ([1.0], 40)
    rig.assert_accounts_balance()
    names = [said for name in rig.members for said in rig.told_of(name, Committed)]
    assert names[-1] == Committed(0, *reversed(rig.identity))


def too_late(rig: Anew) -> None:
    rig.arrives("new", held=None)
    rig.brings("new", 9.0)
    rig.now += rig.settings.lease.lease_s + 1


def of_this_line(rig: Anew) -> None:
    rig.arrives("old", held=None)
    rig.brings("old", 9.0)
    rig.arrives("old", 40, held=(4, 0))


@pytest.mark.parametrize("comes", [too_late, of_this_line])
def test_a_line_that_has_begun_stays(comes: Callable[[Anew], None]) -> None:
    rig = Anew()
    comes(rig)
    if comes is too_late:
        rig.arrives("old", 40)
    assert not rig.is_asked("old")
    assert rig.brings("old", 1.0, 40) is Outcome.DUPLICATE
    assert rig.theta == [9.0]


def test_what_this_epoch_has_made_is_no_loss() -> None:
    new = Life(4).seeded().trained(2)
    new.come("ann", held=(4, 2))
    assert not new.lost


def test_a_run_that_was_over_is_over() -> None:
    new = Life(4, first_epoch(2).kept(), tokens=2 * TOKENS)
    assert new.shard.done
    new.come("ann", held=(3, 2))
    assert Stop() in new.take_told("ann")


@pytest.mark.parametrize("restarts", [False, True])
def test_a_process_that_slept_through_its_successor_is_not_told_that_nothing_was_merged(restarts: bool) -> None:
    """Its contribution is in version 2. Another process took its id then, so its merges were forgotten."""
    life = first_epoch()
    life.come("ann", process_id="process 2")
    life.shard.leave(life.members["ann"])
    life = Life(4, life.kept()) if restarts else life
    life.come("ann", held=(3, 1))
    (status,) = life.shard.join_answer("ann").fragments
    assert (status.merged_version, status.forgotten_version) == (0, 2)


def test_merges_of_learners_that_never_come_back_are_forgotten_above_a_bound() -> None:
    """P7: learner ids that are made up anew at each start must not fill the files."""
    old = first_epoch()
    bound = 2 * old.settings.shard.max_learners
    old.shard.fragments[0].record.merged_versions.update({f"gone-{i}": i for i in range(3000)})
    old.trained(1)
    merged = old.shard.fragments[0].record.merged_versions
    assert len(merged) == bound
    assert merged["ann"] == 3
    assert "gone-2999" in merged
    assert "gone-0" not in merged


def test_values_that_cannot_be_made_durable_leave_the_line_that_there_is() -> None:
    rig = Anew()
    rig.arrives("new", held=None)
    rig.brings("new", 9.0)
    rig.arrives("old", 40)
    rig.holds_jobs = True
    rig.brings("old", 1.0, 40)
    assert rig.identity == (4, 0), "what is pulled meanwhile goes by its own name"
    rig.shard.fragments[0].fail_seed()
    assert (rig.theta, rig.identity) == ([9.0], (4, 0))


class Heard(Log):
    def __init__(self) -> None:
        super().__init__("test")
        self.errors: list[dict[str, Any]] = []

    def error(self, event: str, **facts: Any) -> None:
        self.errors.append(facts)


def made_by(settings: Settings) -> Callable[[Fragment], VersionRules]:
    """How versions are made, of all fragments alike."""
    return lambda fragment: VersionRules("mean", make_outer_optimizer(settings.outer))


@pytest.fixture
def disk() -> FakeDisk:
    return FakeDisk()


def recovered_from(disk: FakeDisk, settings: Settings, log: Log | None = None) -> Any:
    return recover(open_store(disk), settings, made_by(settings), log or Heard())


@pytest.mark.parametrize(("version", "missing"), [(0, None), (3, [1])], ids=["still being seeded", "taken away"])
def test_a_fragment_without_any_file_is_named_where_others_have_versions(disk, version: int, missing: Any) -> None:
    log = Heard()
    open_store(disk).save(make_version(version, fragment_id=0), MANIFEST)
    assert [f.fragment_id for f in MANIFEST.owned_by(0)] == [0, 1]
    _, restored = recovered_from(disk, Settings(), log)
    assert [r.record.fragment_id for r in restored] == [0]
    assert [facts.get("fragments") for facts in log.errors] == ([] if missing is None else [missing])


@pytest.mark.parametrize(("model", "is_taken"), [("", True), (model_digest(MANIFEST.tensors), True), ("0" * 32, False)])
def test_a_folder_with_another_model_than_the_shard_was_told_is_not_served(disk, model: str, is_taken: bool) -> None:
    open_store(disk).save(make_version(3), MANIFEST)
    words = rf"{model_digest(MANIFEST.tensors)}, but run.model is {model}"
    with nullcontext() if is_taken else pytest.raises(WrongFolder, match=words):
        assert recovered_from(disk, Settings.model_validate({"run": {"model": model}})) is not None


def test_a_shard_goes_on_from_a_folder_whose_momentum_is_float32(disk) -> None:
    stored, exact = make_version(3), [random_values(SIZE, 1)]
    open_store(disk).save(replace(stored, values=Values(stored.values.theta, exact)), MANIFEST)
    _, (restored,) = recovered_from(disk, Settings())
    assert torch.equal(restored.values.theta, stored.values.theta)
    assert torch.equal(restored.values.buffers[0], exact[0].bfloat16())
