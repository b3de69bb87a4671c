"""The end of a run, and what a loop is told when something is wrong with its model: real learners and real shards."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from in_process import InProcessShard, settings_with
from training import EXACT, Training, global_values, tiny_model

import diloco_worker
from diloco_common.errors import NotFinite
from diloco_worker.core.agreement import REFUSALS_MAX
from diloco_worker.shell import connection
from diloco_worker.shell.ending import FinishWait
from waiting import until


def run_until_done(*learners: Training) -> None:
    def all_are_done() -> bool:
        for training in learners:
            if not training.learner.done:
                training.step()
        return all(training.learner.done for training in learners)

    until(all_are_done, "all are done")


def test_at_the_end_every_learner_holds_the_final_model(serve, train):
    shards = [
        serve(settings_with(run={"tokens": 400}, sync=EXACT | {"fragments": 4}, shard={"index": i, "count": 2}))
        for i in range(2)
    ]
    addresses = ",".join(shard.address for shard in shards)
    a, b = train(addresses, "a"), train(addresses, "b", seed=1)
    run_until_done(a, b)
    for _ in range(20):
        a.step()  # what it trains now belongs to nobody

    assert a.learner.finish()
    assert b.learner.finish()

    final = global_values(*shards)
    assert torch.equal(a.values(), final)
    assert torch.equal(b.values(), final)
    assert (a.learner.state, shards[0].member_state("a")) == ("done", "left")
    assert a.learner.finish()  # changes nothing


def test_finish_hands_over_what_no_round_has_asked_for(serve, train):
    """Less than one H: without a last round the untrained model would come back."""
    shard = serve(settings_with(sync=EXACT | {"sync_every": 500}))
    a = train(shard.address, "a")
    for _ in range(40):
        a.step()
    trained = a.values()
    finished = a.learner.finish()
    assert (bool(finished), finished.work, finished.tokens, finished.tokens_unmerged) == (True, "all", 320, 0)
    assert torch.allclose(a.values(), trained, atol=1e-6)
    assert torch.equal(a.values(), global_values(shard))


def no_tokens(a: Training, shard: InProcessShard) -> None:
    for _ in range(5):
        a.step(8, counted=0)


def never_in_time(a: Training, shard: InProcessShard) -> None:
    shard.stop()
    until(lambda: not a.connection.is_up, "the loss is noticed")
    a.step()


def some_in_time(a: Training, shard: InProcessShard) -> None:
    a.until(lambda: shard.version() >= 2, "versions")
    never_in_time(a, shard)


def after_the_budget(a: Training, shard: InProcessShard) -> None:
    a.until(lambda: a.learner.done, "the budget is merged")


LOST = [
    (no_tokens, 1_000_000, "none", False, "every step said tokens=0"),
    (never_in_time, 1_000_000, "none", False, "no answer from"),
    (some_in_time, 1_000_000, "partly", False, "no answer from"),
    (after_the_budget, 100, "all", True, ""),
]


@pytest.mark.parametrize(("trained", "budget", "work", "is_global", "why"), LOST)
def test_what_is_in_no_version_is_kept_and_said(serve, train, written, trained, budget, work, is_global, why):
    sync = EXACT | {"sync_every": 500 if trained is never_in_time else 2}
    shard = serve(settings_with(run={"tokens": budget}, sync=sync))
    a = train(shard.address, "a")
    before = a.values()
    trained(a, shard)
    local = a.values()

    finished = a.learner.finish(wait_s=0.3)

    assert (bool(finished), finished.work, finished.is_global) == (work == "all", work, is_global)
    assert why in finished.why
    assert ("code=NOT_MERGED" in written.getvalue()) is (work != "all")
    assert torch.equal(a.values(), local) is not is_global
    assert not torch.equal(local, before)
    assert a.learner.finish() is finished
    assert a.learner.finish(regardless=True).is_global
    assert not torch.equal(a.values(), local)


def test_finish_does_not_wait_for_shards_that_are_gone(serve, train, written, monkeypatch):
    """Nobody listens there any more: it says so, long before the minute that it would wait for a silent one."""
    monkeypatch.setattr(connection, "GONE_S", 0.5)
    monkeypatch.setattr(FinishWait, "usual_s", math.inf)
    shard = serve(settings_with(sync=EXACT))
    a = train(shard.address, "a")
    a.until(lambda: shard.version() >= 2, "versions")
    shard.stop()
    assert not a.learner.finish()
    assert f'why="no answer from {shard.address}"' in written.getvalue()


def test_finish_waits_for_a_shard_that_starts_again(serve, train):
    shard = serve(settings_with(sync=EXACT | {"sync_every": 500}))
    a = train(shard.address, "a")
    a.step()
    address = shard.address
    shard.stop()
    until(lambda: not a.connection.is_up, "the loss is noticed")
    again = settings_with(sync=EXACT, shard={"listen": address})
    starting = threading.Timer(1.0, lambda: serve(again))
    starting.start()
    assert a.learner.finish()
    starting.join()


def test_a_model_that_is_not_finite_again_and_again_ends_the_learner(serve, train):
    shard = serve(settings_with(sync={"quorum": 1}))
    a, b = train(shard.address, "a"), train(shard.address, "b", seed=1)
    a.until(lambda: shard.version() >= 1, "a version")

    def forever() -> bool:
        with torch.no_grad():
            a.model[0].weight.fill_(float("nan"))
        a.step()
        b.step()
        return False

    with pytest.raises(NotFinite, match=f"{REFUSALS_MAX} rounds in a row"):
        until(forever, "the learner gives up")
    assert a.learner.state == "stopped"
    assert b.learner.core.contributions["NOT_FINITE"] == 0


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_in_the_loop_ends_the_lease_at_once(serve, error):
    shard = serve(settings_with())
    with pytest.raises(error), diloco_worker.join(shard.address, tiny_model(), learner_id="a", wait_s=20):
        raise error
    assert shard.member_state("a") == "left"


def test_the_first_steps_without_tokens_are_said_once(serve, train, written):
    a, b = train(serve().address, "a"), train(serve().address, "b")
    for step in range(6):
        a.step(8, counted=0)
        b.step(8, counted=8 * (step > 1))
    assert written.getvalue().count("code=NO_TOKENS") == 1


def test_a_learner_goes_on_from_its_state_as_the_same_one(serve, train):
    shard = serve(settings_with())
    other, a = train(shard.address, "other"), train(shard.address, "a")
    for _ in range(3):
        a.step()
    state, seed = a.learner.state_dict(), a.learner.seed
    a.learner.close()

    again = diloco_worker.join(shard.address, tiny_model(), state=state, wait_s=20)
    with again:
        assert again.learner_id == "a"
        assert (again.inner_step, again.tokens, again.index) == (3, 24, a.learner.index)
        assert (again.seed, again.seed == other.learner.seed) == (seed, False)
        assert again.state_dict() == state
