"""Pushes contributions and seeds to one shard, repeatedly, until they are answered or the lease is over."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from diloco_common.codec import Payload, PayloadHeader, usual_chunk_elements
from diloco_common.errors import DilocoError, NotFinite, Refusal, Unavailable, refusal_from
from diloco_common.ports import Transport
from diloco_common.wire.calls import LONG_S, backoff_s, call_s
from diloco_common.wire.messages import TRANSFERS_AT_ONCE, Outcome, PushAnswer, PushHeader
from diloco_worker.core.connection import TRY_AGAIN, ConnectionState
from diloco_worker.core.events import Answered, Failed, OfferSeed, PushContribution
from diloco_worker.core.fragment import Lease, PendingContribution
from diloco_worker.shell.codec_thread import ConnectionContext

FAILING_S = LONG_S
"""Seconds after which failing pushes are logged, while the control stream is up."""
SEEDS_IN_FLIGHT = 2
"""Seeds encoded and pushed at once; a shard accepts only a few at once, from all learners together."""


@dataclass(frozen=True, slots=True)
class FailingPushes:
    """Pushes that do not get through although the control stream does: a proxy's limit, the MTU of a path."""

    for_s: float = 0.0
    """Seconds since the first attempt began."""
    why: str = ""
    """Empty: the last attempts all succeeded."""


class Pusher:
    """The pushes of one connection, each in its own task. Outcomes go to the inbox."""

    def __init__(self, state: ConnectionState, transport: Transport, context: ConnectionContext) -> None:
        self._state = state
        self._transport = transport
        self._c = context
        self._pushes: set[asyncio.Task[None]] = set()
        self._on_hold: set[asyncio.Task[None]] = set()  # seeds that others may push first
        self._pushing = asyncio.Semaphore(TRANSFERS_AT_ONCE)
        self._seeding = asyncio.Semaphore(SEEDS_IN_FLIGHT)
        self._failing: dict[int, tuple[float, str]] = {}  # fragment -> since when, and the last error
        self._said_at = -math.inf
        self.refused: Callable[[DilocoError], None] = lambda error: None
        """Called when the shard refuses a seed, without which everybody would wait."""

    def push(self, act: PushContribution) -> None:
        """Push a contribution in the background, once it is encoded."""
        contribution, lease = act.contribution, self._state.lease
        if contribution.begin_push(lease):
            if self._c.council.is_alone:  # in an island, `Connections` records it for all ranks
                self._c.telemetry.pushing(act, lease)
            name = f"push {contribution.fragment_id} of round {contribution.round}"
            self._start(self._push_contribution(contribution, lease), name)

    def seed(self, act: OfferSeed) -> None:
        """Offer the values of version 0 in the background; the first writer wins."""
        known = self._c.codec.tokens_merged(act.fragment_id)  # now: a version that is pulled meanwhile has other values
        task = self._start(self._push_seed(act, known, self._state.lease), f"seed {act.fragment_id}")
        if act.hold_s:
            self._on_hold.add(task)
            task.add_done_callback(self._on_hold.discard)

    async def settle(self, timeout_s: float) -> None:
        """Wait for answers to the pushes in flight, but not for seeds on hold."""
        if under_way := self._pushes - self._on_hold:
            await asyncio.wait(under_way, timeout=timeout_s)

    @property
    def failing(self) -> FailingPushes:
        """The push that has failed for longest. May be read in any thread."""
        oldest = min(self._failing.copy().values(), default=None)
        return FailingPushes() if oldest is None else FailingPushes(self._c.world.clock() - oldest[0], oldest[1])

    def begin_anew(self) -> None:
        """The shard is up again: earlier failures do not count."""
        self._failing.clear()

    def say_what_fails(self) -> None:
        """Log pushes that have failed for long, at intervals. Call it while the control stream is up."""
        failing, now = self.failing, self._c.world.clock()
        if failing.for_s >= FAILING_S <= now - self._said_at:
            self._said_at = now
            self._c.telemetry.log.warning(
                "pushes fail: this learner's work is not merged", code="PUSHES_FAIL",
                shard=self._state.address, for_s=round(failing.for_s), why=failing.why,
            )  # fmt: skip

    def cancel(self) -> None:
        for push in self._pushes:
            push.cancel()

    # ------------------------------------------------------------ contributions

    async def _push_contribution(self, contribution: PendingContribution, lease: Lease) -> None:
        answer = None
        try:
            payload, not_finite = await self._payload(contribution)
            if payload is not None:
                header = PushHeader(
                    contribution.fragment_id, contribution.round, contribution.epoch, contribution.base_version,
                    contribution.tokens, contribution.steps, payload.header, self._manifest_digest,
                    not_finite=not_finite, **self._part(contribution.fragment_id),
                )  # fmt: skip
                if not not_finite:
                    contribution.pushes.sending_values()
                answer = await self._push_until_answered(header, payload, lease)
        finally:
            contribution.pushes.ended(lease, answer)
        if answer is not None:
            self._c.inbox.put(Answered(contribution.fragment_id, contribution.round, answer, contribution.tokens))

    async def _payload(self, contribution: PendingContribution) -> tuple[Payload | None, bool]:
        """The encoded contribution, and whether it is not finite; then the payload is empty. None: the fate is
        known."""
        try:
            return await self._c.codec.payload(contribution), False
        except NotFinite as error:
            fragment_id, round_number = contribution.fragment_id, contribution.round
            self._c.telemetry.log.error(
                "contribution is not finite", fragment=fragment_id, round=round_number, why=error
            )
            return self._empty_payload(fragment_id), True

    def _empty_payload(self, fragment_id: int) -> Payload:
        assert self._state.manifest is not None
        fragment = self._c.codec.local(fragment_id) or self._state.manifest.fragments[fragment_id]
        num_elements = fragment.num_elements
        encoding = fragment.encoding(self._state.policy.push_encoding)
        return Payload(PayloadHeader(encoding, num_elements, usual_chunk_elements(encoding), 0, 0), ())

    def _part(self, fragment_id: int) -> dict[str, Any]:
        """The header fields for the part that this rank pushes; none if it pushes everything."""
        local = self._c.codec.local(fragment_id)
        if local is None or local.num_parts == 1:
            return {}
        return {"part": local.part, "num_parts": local.num_parts, "ranges": local.own_ranges}

    # ------------------------------------------------------------ seeds

    async def _push_seed(self, act: OfferSeed, known: int, lease: Lease) -> None:
        """`known`: tokens merged into the values."""
        await asyncio.sleep(act.hold_s)
        task = asyncio.current_task()
        assert task is not None
        self._on_hold.discard(task)
        async with self._seeding:
            if act.fragment_id not in self._state.unseeded:  # another learner has seeded it since
                return
            try:
                payload = await self._c.codec.encode_seed(act.values)
            except NotFinite as error:  # nobody could train on it, and without a seed all would wait
                refusal = NotFinite(f"this model cannot seed fragment {act.fragment_id}: {error}")
                self._c.inbox.put(Failed(refusal))
                return
            header = PushHeader(
                act.fragment_id, 0, lease.epoch, 0, 0, 0, payload.header, self._manifest_digest, known,
                **self._part(act.fragment_id),
            )  # fmt: skip
            answer = await self._push_until_answered(header, payload, lease)
        if answer is not None and answer.outcome is Outcome.REJECTED:
            self.refused(refusal_from(answer.code, answer.message))

    # ------------------------------------------------------------ both

    @property
    def _manifest_digest(self) -> str:
        assert self._state.manifest is not None
        return self._state.manifest.digest

    async def _push_until_answered(self, header: PushHeader, payload: Payload, lease: Lease) -> PushAnswer | None:
        """Push, repeatedly if it fails. None: the lease is over, so that an answer under it does not count.

        The contribution may still have been accepted. Only a version shows it; a round that still wants it asks again.
        """
        telemetry, attempt, began = self._c.telemetry, 0, self._c.world.clock()
        while lease == self._state.lease:
            try:
                answer = await self._push_once(header, payload, lease)
            except (Refusal, Unavailable) as error:
                if isinstance(error, Refusal) and not isinstance(error, TRY_AGAIN):
                    telemetry.log.warning("push refused", fragment=header.fragment_id, code=error.code, why=error)
                    return None
                telemetry.pushed("failed", 0)
                since, _ = self._failing.get(header.fragment_id, (began, ""))
                self._failing[header.fragment_id] = since, str(error)
                await asyncio.sleep(backoff_s(attempt, self._c.world.random.random()))
                attempt += 1
                continue
            if answer is not None:
                self._failing.pop(header.fragment_id, None)
            if answer is None or lease != self._state.lease:  # the next contribution may have the same round
                return None
            if answer.outcome is Outcome.REJECTED:
                telemetry.log.warning(
                    "contribution refused", fragment=header.fragment_id, code=answer.code, why=answer.message
                )
            return answer
        return None

    async def _push_once(self, header: PushHeader, payload: Payload, lease: Lease) -> PushAnswer | None:
        """Try once, when it is its turn. None: the lease was over by then. Raises a Refusal or Unavailable."""
        async with self._pushing:
            if lease != self._state.lease:
                return None
            num_bytes = payload.header.num_bytes
            caller = self._state.caller.under(lease)
            answer = await self._transport.push(caller, header, payload, call_s(num_bytes))
        self._c.telemetry.pushed(answer.outcome.value, num_bytes)
        return answer

    def _start(self, push: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(push, name=name)
        self._pushes.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._pushes.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._c.telemetry.log.error("push failed", trace=task.exception(), push=task.get_name())
