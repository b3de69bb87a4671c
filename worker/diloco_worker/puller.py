"""Pulls what a shard announces, one fragment after the other, newest version only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from diloco_common.codec import Payload, PayloadReceiver
from diloco_common.codec.change import pull_encodings
from diloco_common.errors import (
    BadChecksum,
    BadEncoding,
    BadRequest,
    BadSize,
    NotFinite,
    Refusal,
    UnknownEncoding,
)
from diloco_common.messages import PullHeader, PullRequest
from diloco_common.ports import Transport, Unavailable
from diloco_worker.context import ConnectionContext
from diloco_worker.core.connection import ConnectionState
from diloco_worker.core.dialing import backoff_s, call_s

UNREADABLE = (BadRequest, BadSize, BadChecksum, BadEncoding, UnknownEncoding, NotFinite)
"""What came cannot be read: the next pull asks for the values. Other refusals are of the call, and cost no base."""


class Puller:
    """The pulls of one connection. What came goes to the inbox."""

    def __init__(self, state: ConnectionState, transport: Transport, context: ConnectionContext) -> None:
        self._state = state
        self._transport = transport
        self._c = context
        self._has_news = asyncio.Event()

    def wake(self) -> None:
        """A version was announced, or the model was cut."""
        self._has_news.set()

    async def run(self) -> None:
        """Pull until cancelled."""
        state, attempt = self._state, 0
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            if state.manifest is None:
                continue
            for fragment_id, version in sorted(state.announced.items()):
                if self._c.codec.base(fragment_id) == version or not state.has_lease:
                    continue
                try:
                    await self._pull(fragment_id)
                    attempt = 0
                except (Refusal, Unavailable) as error:
                    if isinstance(error, UNREADABLE):
                        self._c.codec.lose_base(fragment_id)
                    self._c.telemetry.log.debug("pull failed", shard=state.address, fragment=fragment_id, why=error)
                    self._has_news.set()
                    await asyncio.sleep(backoff_s(attempt, self._c.world.random.random()))
                    attempt += 1

    async def _pull(self, fragment_id: int) -> None:
        """One attempt. Raises Unavailable, or a Refusal of the call or of the bytes."""
        state, codec = self._state, self._c.codec
        assert state.manifest is not None
        assert state.policy is not None
        encodings = pull_encodings(state.policy.pull_encoding)
        request = PullRequest(fragment_id, encodings, codec.base(fragment_id))
        epoch, num_elements = state.epoch, state.manifest.fragments[fragment_id].num_elements
        parts = self._transport.pull(state.identity, request, call_s(4 * num_elements))
        header, payload = await read_version(parts, request, num_elements)
        if payload is None:
            return
        self._c.telemetry.pulled(payload.header.num_bytes)
        arrived = await codec.decode(header, payload)
        if state.epoch != epoch:  # of an earlier epoch, which may have lost it: Join did not name it
            return
        codec.hold(arrived, header.tokens_merged)
        self._c.inbox.put(arrived)


async def read_version(
    parts: AsyncGenerator[PullHeader | bytes, None], request: PullRequest, num_elements: int
) -> tuple[PullHeader, Payload | None]:
    """Read the answer to a Pull, and close it; no payload if the caller has that version.

    Raises Unavailable, or a Refusal of the call or of what came.
    """
    try:
        found = await _read_version(parts, request, num_elements)
    except Refusal:
        await parts.aclose()  # the rest need not come
        raise
    await parts.aclose()
    return found


async def _read_version(
    parts: AsyncGenerator[PullHeader | bytes, None], request: PullRequest, num_elements: int
) -> tuple[PullHeader, Payload | None]:
    header = await anext(parts, None)
    if not isinstance(header, PullHeader):
        raise BadRequest("the shard answered Pull without a header")
    if header.fragment_id != request.fragment_id:
        raise BadRequest(f"the shard answered with fragment {header.fragment_id}, not {request.fragment_id}")
    if header.payload is None:
        return header, None
    if header.payload.num_elements != num_elements:
        raise BadRequest(
            f"fragment {header.fragment_id} has {header.payload.num_elements} elements, not {num_elements}"
        )
    have = request.have[1] if request.have is not None else None
    if header.base_version is not None and header.base_version != have:
        raise BadRequest(
            f"fragment {header.fragment_id} came as a change since version {header.base_version}, "
            "which is not what was asked for"
        )
    receiver = PayloadReceiver(header.payload)
    async for part in parts:
        if isinstance(part, PullHeader):
            raise BadRequest("the shard answered Pull with two headers")
        receiver.add(part)
    return header, receiver.finish()
