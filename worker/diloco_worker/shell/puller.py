"""Pulls the versions that a shard announces: one fragment after the other, and only the newest version.

A version comes from a mirror at the learner's site, if there is one. If the mirror sends other bytes than the shard
announced, that only costs time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from diloco_common import errors
from diloco_common.codec import Payload
from diloco_common.codec.change import pull_encodings
from diloco_common.errors import BadChecksum, BadRequest, Busy, DilocoError, Refusal, Unavailable, VersionGone
from diloco_common.ports import Transport
from diloco_common.trust.identity import Identity
from diloco_common.wire.calls import AGAIN_S, CALL_S, backoff_s, call_s
from diloco_common.wire.follower import read_version
from diloco_common.wire.messages import Near, PullHeader, PullRequest, Range
from diloco_worker.core.connection import ConnectionState
from diloco_worker.core.events import Event
from diloco_worker.shell.codec_thread import ConnectionContext

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
        if state.epoch != epoch:  # from an earlier epoch: the shard may have lost it since, as Join did not name it
            return
        if held:
            codec.hold(arrived, header.tokens_merged)
        state.to_pull.pulled(fragment_id, want)
        self._c.inbox.put(arrived)


SILENT_S = CALL_S
"""Seconds that a mirror may be silent: it may be pulling the version itself."""


class Mirrors:
    def __init__(self, context: ConnectionContext) -> None:
        self._c = context
        self._dialed: dict[str, Transport] = {}
        self._shunned_until: dict[str, float] = {}
        self._failures = 0

    async def pull(self, near: Near, request: PullRequest, num_elements: int) -> tuple[PullHeader, Payload] | None:
        """The announced version; None: pull it from the shard."""
        clock = self._c.world.clock
        if clock() < self._shunned_until.get(near.address, 0.0):
            return None
        try:
            found = await self._pull(near, request, num_elements)
        except VersionGone:  # the mirror is behind or ahead
            return None
        except Exception as error:  # whatever it sent
            after_s = 20 * backoff_s(self._failures, self._c.world.random.random())  # longer than a shard is avoided
            self._failures += 1
            self._shunned_until[near.address] = clock() + after_s
            code = error.code if isinstance(error, DilocoError) else None
            self._c.telemetry.log.warning(
                "a mirror failed: versions come from the shard", mirror=near.address, why=error or type(error).__name__,
                code=code, again_s=round(after_s, 1),
            )  # fmt: skip
            return None
        self._failures = 0
        return found

    async def close(self) -> None:
        for transport in self._dialed.values():
            await transport.close(0.0)

    async def _pull(self, near: Near, request: PullRequest, num_elements: int) -> tuple[PullHeader, Payload]:
        transport = self._dialed.get(near.address)
        if transport is None:
            transport = self._dialed[near.address] = self._c.dial(near.address)
        request = replace(request, want=(near.header.epoch, near.header.version))
        reader = Identity(self._c.caller.run_id)
        now = asyncio.get_running_loop().time
        async with asyncio.timeout(SILENT_S) as limit:
            while True:
                parts = transport.pull(reader, request, call_s(4 * num_elements))
                try:
                    header, payload = await read_version(
                        parts, request, num_elements, lambda: limit.reschedule(now() + SILENT_S)
                    )
                    break
                except Busy:
                    await asyncio.sleep(AGAIN_S)
        expected = near.values_sha256 if header.base_version is None else near.change_sha256
        if payload is None or await self._c.codec.name(payload) != expected:
            raise BadChecksum("these are not the bytes that the shard announced")
        return replace(near.header, payload=payload.header, base_version=header.base_version), payload
