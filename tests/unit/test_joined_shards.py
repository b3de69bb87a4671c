"""What a learner makes of the shards that give it a lease."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco_common.errors import ConfigError, ManifestMismatch
from diloco_common.manifest import TensorSpec, cut
from diloco_common.messages import FragmentStatus, LearnerPolicy
from diloco_worker.core.events import Joined
from diloco_worker.core.shards import Shards

POLICY = LearnerPolicy(4, "int8", "bfloat16", "carry", 0.5, True)
FIRST = Joined("ps-0:50051", 0, 2, 6, "digest", POLICY, 1, ())
SECOND = replace(FIRST, address="ps-1:50051", shard_index=1)


def test_a_run_is_complete_once_every_address_is_another_shard_of_it() -> None:
    shards = Shards(2)

    assert (shards.join(FIRST), shards.are_complete) == (True, False)
    assert (shards.join(SECOND), shards.are_complete) == (True, True)
    assert not shards.join(replace(FIRST, epoch=2)), "it is not new, it came back"
    assert [s.epoch for s in shards.joined] == [2, 1]


@pytest.mark.parametrize(
    ("before", "joined", "why"),
    [
        ([], replace(FIRST, num_shards=3), "has 3 shards .* but 2 addresses"),
        ([FIRST], replace(SECOND, shard_index=0), "ps-0:50051 and ps-1:50051 both are shard 0"),
    ],
)
def test_addresses_that_are_no_run_are_a_mistake_of_the_user(before: list[Joined], joined: Joined, why: str) -> None:
    shards = Shards(2)
    for shard in before:
        shards.join(shard)

    with pytest.raises(ConfigError, match=why):
        shards.join(joined)


def test_a_shard_that_reads_the_model_in_another_way_is_of_another_version() -> None:
    shards = Shards(2)
    shards.join(FIRST)
    with pytest.raises(ManifestMismatch, match=r"ps-0:50051 reads this model in another way .* of another version"):
        shards.check(replace(FIRST, manifest_digest="another"), "digest", is_new=True)


@pytest.mark.parametrize(
    "other", [{"num_fragments": 7, "manifest_digest": "another"}, {"policy": replace(POLICY, sync_every=5)}]
)
def test_shards_with_other_settings_than_the_first_one_are_refused(other: dict[str, object]) -> None:
    shards = Shards(2)
    shards.join(FIRST)
    shards.join(SECOND)

    shards.check(SECOND, "digest", is_new=True)
    with pytest.raises(ManifestMismatch, match=r"ps-1:50051 cuts the model .* ps-0:50051 in 6 for 2"):
        shards.check(replace(SECOND, **other), "digest", is_new=True)  # type: ignore[arg-type]


def test_a_shard_that_comes_back_with_other_settings_is_refused_but_for_h_and_pulls() -> None:
    shards = Shards(2)
    shards.join(FIRST)
    shards.join(SECOND)
    back = replace(FIRST, epoch=2, policy=replace(POLICY, pull_encoding="int8", sync_every=9))

    shards.join(back)
    shards.check(back, "digest", is_new=False)
    back = replace(back, policy=replace(POLICY, push_encoding="int4"))
    shards.join(back)
    with pytest.raises(ManifestMismatch, match=r"push_encoding='int4'.*, ps-0:50051 before in 6 .*'int8'"):
        shards.check(back, "digest", is_new=False)


def test_shards_that_make_versions_by_other_rules_are_refused() -> None:
    rda, mean = "sync.merge rda, outer.optimizer nesterov", "sync.merge mean, outer.optimizer nesterov"
    shards = Shards(2)
    shards.join(replace(FIRST, rules=rda))

    shards.check(replace(SECOND, rules=rda), "digest", is_new=True)
    shards.check(replace(SECOND, rules=""), "digest", is_new=True)  # of a release that did not say
    with pytest.raises(
        ConfigError, match=r"ps-1:50051 makes versions by sync.merge mean.* ps-0:50051 by sync.merge rda"
    ):
        shards.check(replace(SECOND, rules=mean), "digest", is_new=True)


@pytest.mark.parametrize(("named", "is_taken"), [((), True), ((0,), True), ((0, 1), False), ((4000,), False)])
def test_a_shard_owns_what_the_manifest_places_on_it(named: tuple[int, ...], is_taken: bool) -> None:
    manifest = cut([TensorSpec("a", (8,)), TensorSpec("b", (8,))], 2, 2)
    assert [f.shard_index for f in manifest.fragments] == [0, 1]
    says = replace(FIRST, fragments=tuple(FragmentStatus(i, True, 0, 0, 1) for i in named))

    if is_taken:
        Shards(2).check_owned(says, manifest)
    else:
        with pytest.raises(ManifestMismatch, match=rf"ps-0:50051 says that it owns fragments \[{named[-1]}\]"):
            Shards(2).check_owned(says, manifest)


def test_a_shard_that_came_back_has_not_stopped() -> None:
    shards = Shards(2)
    for shard in (FIRST, SECOND):
        shards.join(shard)
        shards.stop(shard.shard_index)
    assert shards.have_stopped

    shards.join(FIRST)
    assert not shards.have_stopped
