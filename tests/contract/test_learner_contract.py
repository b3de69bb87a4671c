"""Real learners against real shards in one process: joining, training, returning, and loops that clamp their steps."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable

import pytest
import torch
from in_process import settings_with
from torch import Tensor, nn
from training import EXACT, Training, global_values, state_of, tiny_model

import diloco_worker
from diloco_common.errors import CannotConnect, DilocoError, ManifestMismatch, Superseded
from diloco_common.wire.calls import FIRST_S, GROWTH
from diloco_worker.learner import AWAY_S
from waiting import until


def test_the_first_learner_seeds_and_the_second_adopts(serve, train):
    shard = serve(settings_with(sync=EXACT | {"sync_every": 1000, "fragments": 2}))
    first = tiny_model(seed=1)

    a = train(shard.address, "a", seed=1)
    b = train(shard.address, "b", seed=2)

    untouched = torch.cat([p.detach().flatten() for p in first.parameters()])
    assert torch.equal(a.values(), untouched)
    assert torch.equal(b.values(), untouched)
    assert (a.learner.state, shard.member_state("a"), shard.member_state("b")) == ("training", "alive", "alive")


def test_training_goes_on_without_the_shard_and_its_work_arrives_after(serve, train):
    """Fault 10: everything that was not merged when the shard went away is part of its next life."""
    first = serve(settings_with(sync=EXACT))
    a = train(first.address, "a")
    a.until(lambda: first.version() >= 2, "two versions")
    address, tokens_merged = first.address, first.core.tokens_merged
    first.stop()

    step_before = a.learner.core.inner_step
    for _ in range(50):
        a.step()
    until(lambda: not a.connection.is_up, "the loss is noticed")
    assert a.learner.core.inner_step == step_before + 50

    second = serve(settings_with(sync=EXACT, shard={"listen": address}))
    a.until(lambda: second.version() >= 2 if second.core.fragments else False, "versions of its second life")
    assert second.member_state("a") == "alive"
    assert a.connection.state.epoch == second.core.epoch
    assert second.core.tokens_merged > tokens_merged  # goes on from what the learner knew


def test_a_shard_that_falls_silent_is_dialed_again(serve, front, train, written):
    """Fault 4: after 2.5 heartbeats, whatever the transport believes; and nothing counts twice."""
    shard = serve(settings_with(lease={"lease_s": 60.0, "heartbeat_s": 0.1}))
    between = front(shard)
    a = train(between.address, "a")
    a.until(lambda: shard.version() >= 1, "a version")
    generation, attends = a.generation, len(between.attends)

    between.frozen = True
    a.until(lambda: "silent for 0.2 s" in written.getvalue(), "the silence is noticed")
    between.frozen = False

    version = shard.version()
    a.until(lambda: shard.version() > version + 1, "versions after the thaw")
    assert len(between.attends) > attends
    assert a.generation == generation
    assert shard.ledger.participants == shard.ledger.rounds


def test_a_lost_ack_is_repeated_and_counts_once(serve, front, train):
    """Fault 11."""
    shard = serve(settings_with(sync={"quorum": 1}))
    between = front(shard)
    a = train(between.address, "a")
    a.until(lambda: shard.version() >= 1, "a version")

    between.acks_to_lose = 2
    a.until(lambda: between.acks_to_lose < 2, "an ack is lost")
    until(lambda: shard.ledger.duplicates >= 2, "the push is repeated until its ack comes through")
    between.acks_to_lose = 5
    a.until(lambda: between.acks_to_lose == 0, "acks are lost while training goes on")
    version = shard.version()
    a.until(lambda: shard.version() > version + 5, "it goes on")

    def counts() -> tuple[int, int]:
        """Accepted and ended, at one moment."""
        ledger = shard.ledger
        return ledger.tokens_accepted, ledger.tokens_merged + ledger.tokens_fenced + ledger.tokens_in_flight

    accepted, ended = shard.loop.look(counts)
    assert accepted == ended
    assert shard.ledger.late == 0
    merged_by_learner = a.learner.core.contributions["merged"]
    assert 0 <= shard.ledger.participants - merged_by_learner <= 1  # the last version may not have arrived yet
    assert shard.ledger.tokens_merged <= a.learner.core.tokens
    assert a.learner.core.contributions["carried"] == 0


def test_an_evicted_learner_joins_again_by_itself(serve, front, train, written):
    """Fault 3: what it reports got lost for longer than its lease."""
    shard = serve(settings_with(lease={"lease_s": 0.4, "heartbeat_s": 0.1}))
    between = front(shard)
    a = train(between.address, "a")
    a.until(lambda: shard.version() >= 1, "a version")
    generation = a.generation

    between.deaf = True
    a.until(lambda: shard.ledger.evictions["LEASE_EXPIRED"] >= 1, "a is evicted")
    between.deaf = False
    version = shard.version()
    a.until(lambda: a.generation > generation and shard.version() > version, "a contributes again")

    assert "was silent for more than 0.4 s (lease.lease_s); join again" in written.getvalue()


def test_a_resumed_learner_trains_on_without_a_shard_that_is_away_and_its_work_arrives_after(serve, front, train):
    """Fault 2 during 4 or 5: it begins from the values of its checkpoint, and nothing that it adds is lost."""
    shards = [serve(settings_with(sync=EXACT | {"fragments": 2}, shard={"index": i, "count": 2})) for i in (0, 1)]
    between = front(shards[1])
    addresses = f"{shards[0].address},{between.address}"
    first = train(addresses, "first")
    first.until(lambda: min(shard.version(i) for i, shard in enumerate(shards)) >= 1, "versions of both shards")
    first.learner.close()
    between.refuse_join = True

    resumed = train(addresses, "resumed", seed=1, state=state_of("resumed"))
    assert [f.is_adopted for f in resumed.learner.core.fragments.values()] == [True, False]
    versions = [shard.version(i) for i, shard in enumerate(shards)]
    resumed.until(lambda: shards[0].version() > versions[0] + 3, "versions with the shard that is there")
    alone = resumed.learner.core.tokens
    assert shards[1].version(1) == versions[1]

    between.refuse_join = False
    resumed.until(lambda: shards[1].version(1) > versions[1], "a version with the shard that is back")
    assert shards[1].core.membership.get("resumed").tokens_merged >= alone


def test_a_resumed_learner_lets_a_new_one_begin_a_run_of_which_nothing_is_left(serve, train):
    """Not some fragments of the one and some of the other."""
    shard = serve(settings_with(sync=EXACT | {"fragments": 4, "sync_every": 1000}))
    joined: list[Training] = []
    waiting = threading.Thread(
        target=lambda: joined.append(train(shard.address, "resumed", seed=1, state=state_of("resumed")))
    )
    waiting.start()
    until(lambda: shard.core.membership.get("resumed") is not None, "the resumed learner has a lease")

    new = train(shard.address, "new")
    waiting.join(120)

    (resumed,) = joined
    begun = torch.cat([p.detach().flatten() for p in tiny_model().parameters()])
    assert torch.equal(new.values(), begun)
    assert torch.equal(resumed.values(), begun)


def test_a_resumed_learner_to_whom_nobody_comes_begins_with_what_it_has(serve, train, monkeypatch):
    monkeypatch.setattr("diloco_worker.shell.boundary.SEED_HOLD_S", 0.2)
    shard = serve(settings_with())
    train(shard.address, "resumed", seed=1, state=state_of("resumed"))
    assert shard.version() == 0


@pytest.mark.parametrize("resumed", [False, True])
def test_without_any_shard_nobody_begins_to_train(serve, front, resumed):
    between = front(serve(settings_with()))
    between.refuse_join = True
    with pytest.raises(CannotConnect, match=f"no answer from {between.address}"):
        diloco_worker.join(
            between.address, tiny_model(), learner_id="a", wait_s=1.5 * AWAY_S, state=state_of("a") if resumed else None
        )


def test_the_second_process_with_a_learner_id_fences_off_the_first(serve, train):
    """Fault 20."""
    shard = serve(settings_with())
    older = train(shard.address, "same")
    older.until(lambda: shard.version() >= 1, "a version")

    newer = train(shard.address, "same")
    with pytest.raises(Superseded, match="learner id") as told:
        older.until(lambda: False, "the older is told")
    older.learner.close()

    assert (told.value.code, told.value.exit_code) == ("SUPERSEDED", 4)
    version = shard.version()
    newer.until(lambda: shard.version() > version, "the newer goes on")
    assert shard.member_state("same") == "alive"


def test_a_learner_that_diverges_is_told_and_keeps_the_global_weights_clean(serve, train, written):
    """Fault 14: it takes the global values, and contributes again."""
    shard = serve(settings_with(sync={"quorum": 1}))
    sick, well = train(shard.address, "sick"), train(shard.address, "well", seed=1)
    well.until(lambda: sick.step() or shard.version() >= 1, "a version")
    with torch.no_grad():
        sick.model[0].weight.fill_(float("nan"))
    version = shard.version()
    well.until(lambda: sick.step() or torch.isfinite(sick.model[0].weight).all(), "the values of the run")
    assert sick.learner.core.contributions["NOT_FINITE"]
    merged = sick.learner.core.contributions["merged"]
    well.until(lambda: sick.step() or sick.learner.core.contributions["merged"] > merged, "it contributes again")
    assert shard.version() > version + 1
    assert "contribution is not finite" in written.getvalue()
    assert "values were not finite" in written.getvalue()
    assert torch.isfinite(global_values(shard)).all()


@pytest.mark.parametrize("switch", ["refuse_join", "cut_attend"])
def test_dialing_again_slows_down(serve, front, train, written, switch):
    """Fault 13: each wait is at least half of what doubles as long as nobody answers."""
    shard = serve(settings_with(lease={"lease_s": 60.0, "heartbeat_s": 0.2}))
    between = front(shard)
    if switch == "cut_attend":
        a = train(between.address, "a")
        between.cut_attend = True
        between.loop.look(between.attends.clear)
        calls = between.attends
        shard.break_streams()
    else:
        between.refuse_join = True
        calls = between.joins
        a = None
        joining = threading.Thread(target=_join_in_vain, args=(between.address,))
        joining.start()

    until(lambda: len(calls) >= 5, "five attempts")
    between.refuse_join = between.cut_attend = False

    gaps = [later - earlier for earlier, later in itertools.pairwise(calls[:5])]
    assert all(gap >= 0.5 * FIRST_S * GROWTH**n for n, gap in enumerate(gaps)), gaps
    assert written.getvalue().count("no connection, trying again") <= 3
    if a is None:
        joining.join()


def _join_in_vain(address: str) -> None:
    diloco_worker.join(address, tiny_model(), learner_id="a", wait_s=20).close()


def test_workers_may_come_before_their_shard(serve, train, written):
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
    joined: list[Training] = []
    waiting = threading.Thread(target=lambda: joined.append(train(address, "early")))
    waiting.start()
    until(lambda: "no connection, trying again" in written.getvalue(), "the learner waits, and says so")

    shard = serve(settings_with(shard={"listen": address}))

    waiting.join(120)
    assert joined
    assert shard.member_state("early") == "alive"


def _threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(("diloco-network", "diloco-codec"))]


def test_close_leaves_the_run_and_no_thread_and_may_be_repeated(serve, train):
    shard = serve(settings_with())
    until(lambda: _threads() == [], "threads of the test before end")
    a = train(shard.address, "a")
    a.until(lambda: shard.version() >= 1, "a version")

    for _ in range(3):
        a.learner.close()

    until(lambda: _threads() == [], "all threads end")
    assert shard.member_state("a") == "left"
    assert a.learner.state == "stopped"
    assert shard.ledger.evictions == {}


def test_close_ends_without_a_shard_to_leave(serve, train):
    shard = serve(settings_with())
    a = train(shard.address, "a")
    shard.stop()
    a.step()

    a.learner.close()

    until(lambda: _threads() == [], "all threads end")


def test_a_failed_join_leaves_no_thread(serve):
    shard = serve()
    with pytest.raises(DilocoError):
        diloco_worker.join(shard.address, tiny_model(), run="other", learner_id="a", wait_s=20)
    until(lambda: _threads() == [], "all threads end")


def test_a_learner_with_another_model_sees_the_differences(serve, train):
    """Fault 21."""
    shard = serve(settings_with(sync={"fragments": 2}))
    train(shard.address, "a")

    with pytest.raises(ManifestMismatch) as refused:
        diloco_worker.join(shard.address, tiny_model(width=7), learner_id="b", wait_s=20)

    assert "0.weight: [6, 4] <-> [7, 4]" in str(refused.value)
    assert "2.weight: [2, 6] <-> [2, 7]" in str(refused.value)
    assert refused.value.exit_code == 6


OVERSHOOTS = {"optimizer": "nesterov", "lr": 1.0, "momentum": 0.9}

Project = Callable[[Tensor], Tensor]
SETS: dict[str, tuple[Project, Callable[[Tensor], bool]]] = {
    "at least 0.001": (lambda w: w.clamp(min=1e-3), lambda w: bool((w >= 1e-3 - 1e-6).all())),
    "within 0.01": (lambda w: w.clamp(-0.01, 0.01), lambda w: bool((w.abs() <= 0.01 + 1e-6).all())),
    "a ball": (lambda w: w * (1.0 / w.norm()).clamp(max=1.0), lambda w: float(w.norm()) <= 1.0 + 1e-5),
    "a simplex": (
        lambda w: w.clamp(min=1e-6) / w.clamp(min=1e-6).sum(),
        lambda w: abs(float(w.sum()) - 1.0) < 1e-5 and bool((w >= 0).all()),
    ),
    "a grid": (lambda w: (w * 64).round() / 64, lambda w: torch.equal(w * 64, (w * 64).round())),
}


class Mixture(nn.Module):
    """64 numbers that its loss draws out of every set."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.full((64,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weights).sum(1).square().mean() - self.weights[0]


@pytest.mark.parametrize("name", SETS)
def test_versions_lie_in_the_set_of_the_loop(serve, written, name: str) -> None:
    project, is_in = SETS[name]
    shard = serve(settings_with(sync={"sync_every": 2, "quorum": 1}, outer=OVERSHOOTS))
    model = Mixture()

    def clamp() -> None:
        model.weights.copy_(project(model.weights))

    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    learner = diloco_worker.join(shard.address, model, after_version=clamp, optimizer=optimizer, wait_s=20.0)

    def trained() -> bool:
        optimizer.zero_grad()
        model(torch.randn(16, 64)).backward()
        optimizer.step()
        with torch.no_grad():
            clamp()
        learner.step(samples=16)
        assert is_in(model.weights.detach())
        return shard.version() >= 60

    until(trained, "many versions, none of which ends the learner")
    with learner.global_values():
        assert is_in(model.weights.detach())
    assert learner.finish()
    assert is_in(model.weights.detach())
    assert "VERSION_UNDONE" not in written.getvalue()
