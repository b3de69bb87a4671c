"""Connections over a transport in memory: when they are dialed, and what either side hears of what goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from diloco_common.errors import (
    CertificateNotValid,
    DilocoError,
    ForeignCertificate,
    LeaseExpired,
    ManifestMismatch,
    Revoked,
    StaleGeneration,
    Superseded,
    WrongHost,
    WrongRun,
)
from diloco_common.ports import Unavailable
from diloco_common.wire.calls import FIRST_S, LONG_S, SETTLE_S, backoff_s
from diloco_common.wire.manifest import cut
from diloco_common.wire.messages import Collect, Committed, Directive, LearnerPolicy, Progress, PullHeader, Pulse
from diloco_worker.core.connection import STAYS_S, ConnectionState, Dialing, Redial
from diloco_worker.core.events import Failed, Joined, ModelCut, StepEnded
from diloco_worker.core.learner import LearnerCore
from diloco_worker.core.replica import Replica
from diloco_worker.shell.codec_thread import ConnectionContext
from diloco_worker.shell.connections import Connections
from parts import Believes, Parts, joined
from waiting import until_async

EPOCH = 7
NO_MANIFEST: Any = None
BELIEVES: Any = Believes()
POLICY = LearnerPolicy(4, "int8", "int8")


def test_an_act_that_fails_is_told_and_the_others_are_performed() -> None:
    """Only the event loop would hear of it, and the learner would train on alone."""
    parts = Parts()
    context = parts.context()

    def fails(tensors: object) -> None:
        raise RuntimeError("no room for the tensors")

    context.codec.own = fails  # type: ignore[method-assign,assignment]
    connections = Connections([], Progress(0, 0), context)

    connections.perform([ModelCut(NO_MANIFEST, {}), StepEnded(Progress(1, 8), 8, 0.5, 0.001)])

    failed = context.inbox.pop()
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, DilocoError)
    assert "ModelCut failed: RuntimeError('no room for the tensors')" in str(failed.error)
    assert parts.telemetry.metrics.registry.get_sample_value("diloco_worker_inner_steps_total") == 1


class Shard:
    """A shard whose control stream says these directives and keeps the reports it gets. Pulls from it fail."""

    def __init__(self, *directives: Directive, is_there: bool = True, pull_fails: Exception | None = None) -> None:
        self.is_there = is_there
        self._pull_fails = pull_fails or RuntimeError("no room for a version")
        self.reports: list[Progress] = []
        self._directives = [Pulse(0, 0), *directives]

    async def join(self, *_: Any) -> Any:
        if not self.is_there:
            raise Unavailable("nobody answers")
        return joined(EPOCH, POLICY)

    def attend(self, *_: Any) -> Any:
        return self

    async def hear(self) -> Directive | None:
        if not self._directives:
            await asyncio.Event().wait()
        return self._directives.pop(0)

    async def report(self, progress: Progress) -> None:
        self.reports.append(progress)

    async def pull(self, *_: Any) -> AsyncGenerator[PullHeader | bytes, None]:
        raise self._pull_fails
        yield b""

    def cancel(self) -> None:
        pass

    async def leave(self, *_: Any) -> None:
        pass

    async def close(self, grace_s: float) -> None:
        pass


def cut_a_model(connections: Connections) -> None:
    replica = Replica(nn.Linear(2, 2, bias=False))
    core = LearnerCore(replica, cut(replica.specs, 1, 1), POLICY)
    connections.perform([ModelCut(core.manifest, {0: core.fragments[0].tensors})])


@asynccontextmanager
async def connected(**shards: Any) -> AsyncIterator[tuple[Connections, ConnectionContext]]:
    context = replace(Parts(encodes_at_once=True).context(), dial=shards.__getitem__)
    connections = Connections(list(shards), Progress(0, 0), context)
    for connection in connections:
        connection.agreement = BELIEVES
    running = asyncio.create_task(connections.run())
    yield connections, context
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_learner_whose_pulls_fail_for_good_is_told() -> None:
    """It would train on alone for ever, and hear nothing."""
    async with connected(shard=Shard(Committed(0, 1, EPOCH))) as (connections, context):
        cut_a_model(connections)
        while not isinstance(event := await until_async(context.inbox.pop, "the end"), Failed):
            assert isinstance(event, Joined)
        assert "no room for a version" in str(event.error)


@pytest.mark.parametrize("directive", [Committed(1, 1, EPOCH), Collect(4000, 1, EPOCH)])
async def test_what_a_shard_says_of_the_fragments_of_others_is_not_heard(directive: Directive) -> None:
    """It would be pulled from it, or end the training: there is no such fragment."""
    async with connected(shard=Shard(directive)) as (connections, context):
        (connection,) = connections
        await until_async(lambda: connection.times_up, "the stream")
        await until_async(lambda: not connection.is_up, "its end")
        assert connection.state.to_pull.now == {}
        assert {type(event) for event in context.inbox.unread()} == {Joined}


def test_a_new_lease_says_anew_which_fragments_have_no_version() -> None:
    """The learner would send no seed, and the shard wait for it forever (schedule sick:87)."""
    state = ConnectionState(Parts().context().caller, "shard:1")
    answer = joined(EPOCH, POLICY)
    for _ in range(2):
        state.take_lease(replace(answer, fragments=(replace(answer.fragments[0], seeded=False),)))
        assert state.unseeded == {0}
        state.announced(0, (EPOCH, 0))
        assert not state.unseeded


async def test_a_learner_that_waits_for_values_says_why_none_come() -> None:
    shard = Shard(Committed(0, 1, EPOCH), pull_fails=Unavailable("deadline exceeded"))
    async with connected(shard=shard) as (connections, _):
        cut_a_model(connections)
        await until_async(lambda: connections.objections, "a pull that fails")
        assert connections.objections == "pulls from shard fail: deadline exceeded"


async def test_a_shard_hears_that_pushes_to_it_fail() -> None:
    """It gets none, and cannot know."""
    there = Shard()
    async with connected(there=there) as (connections, context):
        (connection,) = connections
        await until_async(lambda: there.reports, "a report")
        connection.pusher._failing[0] = (context.world.clock() - 9.0, "status: 413")
        connection.report(Progress(1, 8))
        await until_async(lambda: there.reports[1:], "another")
    assert there.reports[1].pushes_fail_why == "status: 413"
    assert there.reports[1].pushes_fail_s >= 9.0


async def test_a_shard_hears_which_of_the_others_its_learner_does_not_reach() -> None:
    """So one shard that answers is enough to miss another one."""
    there = Shard()
    async with connected(there=there, gone=Shard(is_there=False)):
        await until_async(lambda: there.reports, "a report")
    (away,) = there.reports[0].away
    assert (away.address, away.index) == ("gone", None)
    assert away.for_s >= 0


def joining(*tries: tuple[float, DilocoError | None]) -> Redial:
    """Try to join at these times: each try fails with its error, or succeeds (None). Returns what follows the last."""
    dialing = Dialing()
    for now, error in tries:
        dialing.begin(now, has_lease=False)
        if error is None:
            dialing.is_up()
        redial = dialing.ended(error, now, 0.0)
    return redial


@pytest.mark.parametrize(("after_s", "ends"), [(LONG_S - 0.1, False), (LONG_S, True)])
def test_a_learner_that_is_revoked_while_it_trains_ends_unless_it_gets_another_certificate(
    after_s: float, ends: bool
) -> None:
    revoked = Revoked("its certificate was revoked")
    assert joining((0.0, None), (0.0, revoked), (after_s, revoked)).is_objection is ends


@pytest.mark.parametrize(
    ("attempt", "jitter", "seconds"),
    [(0, 0.0, 0.1), (0, 1.0, 0.2), (8, 0.0, 0.82), (9, 1.0, 2.0), (9, 0.0, 1.0)],
)
def test_the_wait_grows_to_a_bound_and_half_of_it_is_chance(attempt: int, jitter: float, seconds: float) -> None:
    """After 10 s of failures, the ninth, it is a second at least."""
    assert backoff_s(attempt, jitter) == pytest.approx(seconds, rel=1e-2)


LEASE_OVER, FOREVER, CUT = LeaseExpired("silent"), WrongRun("another run"), Unavailable("unavailable: cut off")


def attempts(*errors: DilocoError | None, lasting_s: float = 0.0, has_lease: bool = True) -> Redial:
    """Attempts that end with these errors, one after the other; what becomes of the last one."""
    dialing, now = Dialing(), 0.0
    for error in errors:
        dialing.begin(now, has_lease=has_lease)
        redial = dialing.ended(error, now + lasting_s, 0.0)
        now += lasting_s + redial.after_s
    return redial


@pytest.mark.parametrize(
    ("error", "joins", "why"),
    [
        (None, False, "the stream ended"),
        (CUT, False, "unavailable: cut off"),
        (LEASE_OVER, True, "silent"),
        (StaleGeneration("cat", 1, 2), True, "generation 1 is over"),
    ],
)
def test_a_connection_that_ended_is_dialed_again_and_joined_where_the_lease_is_over(
    error: DilocoError | None, joins: bool, why: str
) -> None:
    redial = attempts(error)
    assert (redial.is_lease_over, redial.after_s) == (joins, FIRST_S / 2)
    assert why in redial.why


@pytest.mark.parametrize(
    ("errors", "lasting_s", "waits"),
    [
        ((CUT, CUT, CUT, LEASE_OVER), 0.0, 0),  # the shard answers: no need to wait for it
        ((CUT,) * 4, 0.0, 3),  # each wait is longer than the one before
        ((CUT,) * 4, SETTLE_S - 1, 3),
        ((CUT,) * 4, SETTLE_S + 1, 0),
    ],
)
def test_waits_grow_until_the_shard_answers_or_a_connection_has_held(
    errors: tuple[DilocoError, ...], lasting_s: float, waits: int
) -> None:
    assert attempts(*errors, lasting_s=lasting_s).after_s == backoff_s(waits, 0.0)


SUPERSEDED, OTHER_MODEL = Superseded("another process is cat now"), ManifestMismatch("cut in another way")


@pytest.mark.parametrize(
    ("was_up", "error", "is_objection", "joins", "why"),
    [
        (False, FOREVER, True, False, "another run [WRONG_RUN]"),  # it is wrong from the start
        (True, FOREVER, False, False, "another run [WRONG_RUN]"),  # it came back as another one
        (True, SUPERSEDED, True, True, "another process"),
        (True, OTHER_MODEL, True, False, "cut in another way"),
        (True, LEASE_OVER, False, True, "silent"),
        (True, CUT, False, False, "cut off"),
    ],
)
def test_of_a_shard_that_was_up_few_words_are_objections(
    was_up: bool, error: DilocoError, is_objection: bool, joins: bool, why: str
) -> None:
    dialing = Dialing()
    dialing.begin(0.0, has_lease=True)
    if was_up:
        dialing.is_up()
    redial = dialing.ended(error, 1.0, 0.0)
    assert (redial.is_objection, redial.is_lease_over) == (is_objection, joins)
    assert why in redial.why


FOREIGN, HOST, EXPIRED = ForeignCertificate("of another"), WrongHost("no such name"), CertificateNotValid("too old")


@pytest.mark.parametrize(
    ("tries", "ends"),
    [
        ([(0.0, FOREIGN)], False),
        ([(0.0, FOREIGN), (STAYS_S - 0.1, FOREIGN)], False),
        ([(0.0, FOREIGN), (STAYS_S, FOREIGN)], True),
        ([(0.0, FOREIGN), (1.0, CUT), (STAYS_S, FOREIGN)], False),
        ([(0.0, HOST), (STAYS_S, FOREIGN)], False),
        ([(0.0, EXPIRED), (100.0, EXPIRED)], False),
        ([(0.0, CUT), (100.0, CUT)], False),
        ([(0.0, None), (1.0, HOST), (10.0, HOST), (100.0, HOST)], False),
        ([(0.0, None), (1.0, FOREIGN), (10.0, FOREIGN), (100.0, FOREIGN)], False),
    ],
    ids=["once", "not for long", "it stays", "another between", "two causes", "renewable", "network", "up", "foreign"],
)
def test_what_waiting_does_not_mend_is_an_objection_once_it_has_stayed(
    tries: list[tuple[float, DilocoError | None]], ends: bool
) -> None:
    redial = joining(*tries)
    assert (redial.is_objection, redial.why) == (ends, str(tries[-1][1]))
