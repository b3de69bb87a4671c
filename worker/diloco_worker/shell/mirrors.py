"""Pulls versions from a mirror at the learner's site. Bytes other than those the shard announced only cost time."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from diloco_common.codec import Payload
from diloco_common.errors import BadChecksum, Busy, DilocoError, VersionGone
from diloco_common.ports import Transport
from diloco_common.trust.identity import Identity
from diloco_common.wire.calls import AGAIN_S, CALL_S, backoff_s, call_s, read_version
from diloco_common.wire.messages import Near, PullHeader, PullRequest
from diloco_worker.shell.context import ConnectionContext

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
