"""Pushes contributions and seeds to one shard, again and again until they are answered or the lease is over."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import grpc
from torch import Tensor

from diloco_common import rpc
from diloco_common.codec import CHUNK_ELEMENTS, Payload, PayloadHeader, encode_payload
from diloco_common.errors import NotFinite
from diloco_common.messages import Outcome, PushAnswer, PushHeader
from diloco_protos import parameter_server_pb2_grpc as pb_grpc
from diloco_worker.core.dialing import TRY_AGAIN, backoff_s
from diloco_worker.core.events import Answered, Failed
from diloco_worker.core.fragment import Pending
from diloco_worker.core.pushes import Lease
from diloco_worker.session import Session

SEED_ENCODING = "float32"
SEEDS_AT_ONCE = 2
"""Seeds encoded and pushed at once; a shard refuses more than a few of all learners together."""


class Pusher:
    """The pushes of one link; each is a task. Outcomes go to the inbox."""

    def __init__(self, session: Session, is_announced: Callable[[int], bool]) -> None:
        self._session = session
        self._is_announced = is_announced
        self._stub: pb_grpc.ParameterServerStub | None = None
        self._encoded: dict[int, tuple[Pending, asyncio.Task[Payload]]] = {}
        self._pushes: set[asyncio.Task[None]] = set()
        self._pushing = asyncio.Semaphore(rpc.PUSHES_AT_ONCE)
        self._seeding = asyncio.Semaphore(SEEDS_AT_ONCE)

    def dialed(self, stub: pb_grpc.ParameterServerStub) -> None:
        """The channel to push over."""
        self._stub = stub

    def push(self, pending: Pending) -> None:
        """Encode and push a contribution in the background."""
        lease = self._session.lease
        if pending.begin_push(lease):
            name = f"push {pending.fragment_id} of round {pending.round}"
            self._start(self._push_contribution(pending, lease), name)

    def seed(self, fragment_id: int, values: Tensor, hold_s: float) -> None:
        """Offer the values of version 0 in the background, after `hold_s` seconds; first writer wins."""
        self._start(self._push_seed(fragment_id, values, self._session.lease, hold_s), f"seed {fragment_id}")

    def begin_epoch(self) -> None:
        """The shard has another life: contributions to the old one are not pushed again."""
        self._encoded.clear()

    def forget(self, fragment_id: int, version: int) -> None:
        """The fate of contributions up to this version is known: their bytes are not pushed again."""
        known = self._encoded.get(fragment_id)
        if known is not None and known[0].round <= version:
            del self._encoded[fragment_id]

    async def settle(self, timeout_s: float) -> None:
        """Give pushes that are under way time to be answered."""
        if self._pushes:
            await asyncio.wait(self._pushes, timeout=timeout_s)

    def cancel(self) -> None:
        for push in self._pushes:
            push.cancel()

    # ------------------------------------------------------------ contributions

    async def _push_contribution(self, pending: Pending, lease: Lease) -> None:
        answer = None
        try:
            header, payload = await self._message(pending)
            answer = await self._push_until_answered(header, payload, lease)
        finally:
            pending.pushes.ended(lease, answer)
        if answer is not None:
            self._session.context.inbox.put(Answered(pending.fragment_id, pending.round, answer))

    async def _message(self, pending: Pending) -> tuple[PushHeader, Payload]:
        """The encoded contribution; where it is not finite, word of that."""
        try:
            payload = await self._payload(pending)
        except NotFinite as error:
            log = self._session.context.log
            log.error("contribution is not finite", fragment=pending.fragment_id, round=pending.round, why=error)
            payload = self._nothing(pending)
            return self._header(pending, payload, not_finite=True), payload
        return self._header(pending, payload), payload

    async def _payload(self, pending: Pending) -> Payload:
        """The encoded contribution; encoded once. Raises NotFinite."""
        policy, transfer = self._session.policy, self._session.context.transfer
        assert policy is not None
        known = self._encoded.get(pending.fragment_id)
        if known is None or known[0] is not pending:
            encoding = transfer.contribution(pending, policy.push_encoding)
            known = (pending, asyncio.create_task(encoding))
            self._encoded[pending.fragment_id] = known
        return await known[1]

    def _nothing(self, pending: Pending) -> Payload:
        """What goes with the word that there is nothing to merge."""
        assert self._session.policy is not None
        encoding = self._session.policy.push_encoding
        return Payload(PayloadHeader(encoding, pending.anchor.numel(), CHUNK_ELEMENTS, 0, 0), ())

    def _header(self, pending: Pending, payload: Payload, *, not_finite: bool = False) -> PushHeader:
        assert self._session.manifest is not None
        return PushHeader(
            pending.fragment_id, pending.round, pending.epoch, pending.base_version, pending.tokens, pending.steps,
            payload.header, self._session.manifest.digest, not_finite=not_finite,
        )  # fmt: skip

    # ------------------------------------------------------------ seeds

    async def _push_seed(self, fragment_id: int, values: Tensor, lease: Lease, hold_s: float) -> None:
        session = self._session
        await asyncio.sleep(hold_s)
        async with self._seeding:
            if self._is_announced(fragment_id):  # another learner was first
                return
            try:
                payload = await session.context.transfer.encode(partial(encode_payload, values, SEED_ENCODING))
            except NotFinite as error:  # nobody could train on it, and without a seed all would wait
                refusal = NotFinite(f"this model cannot seed fragment {fragment_id}: {error}")
                session.context.inbox.put(Failed(refusal))
                return
            assert session.manifest is not None
            known = session.tokens_merged.get(fragment_id, 0)
            header = PushHeader(fragment_id, 0, session.epoch, 0, 0, 0, payload.header, session.manifest.digest, known)
            answer = await self._push_until_answered(header, payload, lease)
        if answer is not None and answer.outcome is Outcome.REJECTED:  # without a seed all would wait
            session.context.inbox.put(Failed(rpc.refusal_from(answer.code, answer.message)))

    # ------------------------------------------------------------ both

    async def _push_until_answered(self, header: PushHeader, payload: Payload, lease: Lease) -> PushAnswer | None:
        """Push, again and again while it cannot be heard. None: the lease is over, and what was answered under it.

        A contribution may have been accepted even so; only a version tells, and a round that still wants it asks again.
        """
        c, attempt = self._session.context, 0
        while lease == self._session.lease:
            try:
                async with self._pushing:
                    answer = await c.transfer.push(self._stub, header, payload, self._session.metadata())
            except grpc.aio.AioRpcError as error:
                refusal = rpc.refusal_of(error)
                if refusal is not None and not isinstance(refusal, TRY_AGAIN):
                    c.log.warning("push refused", fragment=header.fragment_id, code=refusal.code, why=refusal)
                    return None
                c.metrics.exchange.pushed("failed", 0)
                await asyncio.sleep(backoff_s(attempt, random.random()))
                attempt += 1
                continue
            if lease != self._session.lease:  # a later contribution may have the same fragment and round
                return None
            if answer.outcome is Outcome.REJECTED:
                c.log.warning("contribution refused", fragment=header.fragment_id, code=answer.code, why=answer.message)
            return answer
        return None

    def _start(self, push: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(push, name=name)
        self._pushes.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._pushes.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._session.context.log.error("push failed", trace=task.exception(), push=task.get_name())
