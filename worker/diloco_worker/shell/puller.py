"""Pulls the versions that a shard announces: one fragment after the other, and only the newest version."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from diloco_common import errors
from diloco_common.codec.change import pull_encodings
from diloco_common.errors import BadRequest, DilocoError, Refusal, Unavailable, VersionGone
from diloco_common.ports import Transport
from diloco_common.wire.calls import backoff_s, call_s, read_version
from diloco_common.wire.messages import Near, PullRequest, Range
from diloco_worker.core.connection import ConnectionState
from diloco_worker.core.events import Event
from diloco_worker.shell.context import ConnectionContext
from diloco_worker.shell.mirrors import Mirrors

UNREADABLE = (
    BadRequest, errors.BadPayload, errors.BadChecksum, errors.UnknownEncoding, errors.NotFinite,
)  # fmt: skip
"""The answer was unreadable: the next pull asks for values. Other refusals concern the call, and the base stays."""


class Puller:
    """The pulls of one connection. Versions go to the inbox."""

    def __init__(self, state: ConnectionState, transport: Transport, context: ConnectionContext) -> None:
        self._state = state
        self._transport = transport
        self._c = context
        self._has_news = asyncio.Event()
        self._mirrors = Mirrors(context)
        self.near: dict[int, Near | None] = {}
        """Fragment -> where a mirror has the version that was announced last."""
        self.failed: Callable[[DilocoError], None] = lambda error: None
        """Called when a pull fails with an unexpected error."""
        self.why_not = ""
        """Why the last pull failed; empty: it did not."""

    async def close(self) -> None:
        await self._mirrors.close()

    def wake(self) -> None:
        """A version was announced, or the model was cut."""
        self._has_news.set()

    async def run(self) -> None:
        state, attempt = self._state, 0
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            if state.manifest is None:
                continue
            for fragment_id, version in sorted(state.to_pull.now.items()):
                is_here = not state.to_pull.is_by_name and self._c.codec.base(fragment_id) == version
                if not state.has_lease or is_here:
                    continue
                try:
                    await self._pull(fragment_id, version)
                    attempt, self.why_not = 0, ""
                except VersionGone:
                    self._tell(state.to_pull.gone(fragment_id, version))
                    self._has_news.set()
                except Exception as error:
                    self.why_not = str(error)
                    if isinstance(error, UNREADABLE):
                        self._c.codec.lose_base(fragment_id)
                    if isinstance(error, Refusal | Unavailable):
                        self._c.telemetry.log.debug("pull failed", shard=state.address, fragment=fragment_id, why=error)
                    else:  # caused by the shard's bytes or a bug of ours; other shards go on
                        self._c.telemetry.log.error("pull failed", trace=error, shard=state.address)
                        self.failed(DilocoError(f"pulling from {state.address} failed: {error!r}"))
                    self._has_news.set()
                    await asyncio.sleep(backoff_s(attempt, self._c.world.random.random()))
                    attempt += 1

    def _tell(self, event: Event | None) -> None:
        if event is not None:
            self._c.inbox.put(event)

    async def _pull(self, fragment_id: int, want: tuple[int, int]) -> None:
        """Try once. `want` matters if versions are pulled by name; otherwise the latest one is pulled.
        Raises Unavailable, or a Refusal of the call or of the bytes."""
        state, codec = self._state, self._c.codec
        assert state.manifest is not None
        epoch, local = state.epoch, codec.local(fragment_id)
        fragment = local or state.manifest.fragments[fragment_id]
        held = num_elements = fragment.num_elements
        encodings = pull_encodings(fragment.encoding(state.policy.pull_encoding))
        request = PullRequest(fragment_id, encodings, codec.base(fragment_id))
        if local is not None and state.to_pull.is_by_name:
            have = None if request.have == want else request.have  # this version may have been dropped since
            request = replace(request, have=have, want=want, ranges=local.ranges)
            if not num_elements:  # pull one element, for the version's header and so that the shard keeps the version
                request, num_elements = replace(request, ranges=(Range(0, 1),), have=None), 1
        # The shard of an island must hold the version for the other ranks, which hear of it from the leader's pull.
        near, found = None if state.to_pull.is_by_name else self.near.get(fragment_id), None
        if near is not None and want == (near.header.epoch, near.header.version):
            found = await self._mirrors.pull(near, request, num_elements)
        header, payload = found or await read_version(
            self._transport.pull(state.identity, request, call_s(4 * num_elements)), request, num_elements,
            lambda: self._tell(state.to_pull.begun(fragment_id, want)),
        )  # fmt: skip
        if payload is None:
            return
        self._c.telemetry.pulled(payload.header.num_bytes, is_near=found is not None)
        arrived = await codec.decode(header, payload) if held else codec.nothing(header)
        if state.epoch != epoch:  # from an earlier epoch, which may have lost it: Join did not name it
            return
        if held:
            codec.hold(arrived, header.tokens_merged)
        state.to_pull.pulled(fragment_id, want)
        self._c.inbox.put(arrived)
