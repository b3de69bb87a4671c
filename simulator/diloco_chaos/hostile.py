"""`python -m diloco_chaos.hostile`: a hostile learner next to the workers of `diloco_chaos`, over real gRPC.

It does the same as in simulated schedules (`diloco_simulator/hostile.py`), under its own learner id.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import grpc
import torch
from torch import Tensor

from diloco_common.codec import Chunk
from diloco_common.command import end_on_sigterm, new_app, run_app
from diloco_common.errors import Refusal
from diloco_common.options import NO_SETTINGS, SettingsOptions, settings_from
from diloco_common.ports import Unavailable
from diloco_common.settings import Settings
from diloco_common.trust.credentials import Credentials
from diloco_common.trust.identity import Identity
from diloco_common.wire import protobuf, rpc
from diloco_common.wire.grpc_transport import GrpcTransport
from diloco_common.wire.manifest import Fragment, cut
from diloco_common.wire.messages import PROTOCOL, JoinAnswer, JoinRequest, PullRequest, PushHeader
from diloco_deploy import LOOK_S, SAY_EVERY_S, START_S
from diloco_simulator.hostile import HostileLearner
from diloco_simulator.lies import MANNERS, TACTICS, Plot

ANSWERS = 0.7
HONEST = 1e-3
"""Rough size of a value in an honest contribution."""


class HoldingTransport(GrpcTransport):
    """`hostile.HostileTransport` over gRPC."""

    def hold_push(self, caller: Identity, *parts: PushHeader | Chunk) -> HeldCall:
        """Start a push that never ends."""
        push = self._pushes.dialed("Push", "stream_unary", serializer=None)
        return HeldCall(push(_Endless(parts), metadata=self._metadata(caller)), reads=False)

    def hold_pull(self, caller: Identity, request: PullRequest) -> HeldCall:
        """Start a pull that nobody reads."""
        message = protobuf.to_pb(request)
        return HeldCall(
            self._pulls.dialed("Pull", "unary_stream")(message, metadata=self._metadata(caller)), reads=True
        )

    def hold_stream(self, caller: Identity) -> HeldCall:
        """Open a control stream that nobody reads, and on which nothing is reported."""
        return HeldCall(self._control.dialed("Attend", "stream_stream")(metadata=self._metadata(caller)), reads=True)


class _Endless:
    """The messages of a push; after the last one, the caller waits forever."""

    def __init__(self, parts: Sequence[PushHeader | Chunk]) -> None:
        self._parts = iter(parts)

    def __aiter__(self) -> _Endless:
        return self

    async def __anext__(self) -> bytes:
        while (part := next(self._parts, None)) is None:
            await asyncio.Event().wait()
        return protobuf.push_request(part)


class HeldCall:
    def __init__(self, call: Any, *, reads: bool) -> None:
        self._call = call
        self._reads = reads

    async def receive(self) -> Any:
        """Wait for the shard's first answer. Raises a Refusal or Unavailable."""
        try:
            return await (self._call.read() if self._reads else self._call)
        except grpc.aio.AioRpcError as error:
            raise (rpc.refusal_of(error) or Unavailable(str(error.code()))) from None

    def cancel(self) -> None:
        self._call.cancel()


app = new_app("hostile", "Do harm to a run on this machine, for `diloco_chaos`.")


@app.default
def harm(*, options: SettingsOptions = NO_SETTINGS) -> None:
    """Do harm until told to end."""
    settings = settings_from(options, {})
    end_on_sigterm()
    torch.set_num_threads(1)
    asyncio.run(_live(settings))


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return run_app(app, argv)


async def _live(settings: Settings) -> None:
    """Do harm until told to end."""
    name, credentials = settings.worker.learner_id, Credentials(settings.security.tls, settings.security.token_file)
    found: dict[int, HoldingTransport] = {}
    for address in settings.worker.shards:
        transport = HoldingTransport(address, credentials)
        answer = await _described(transport, settings.run.id)
        found[answer.shard_index] = transport
    chance = random.Random(f"{settings.run.seed} {name}")
    plot = Plot(
        settings.run.id, cut(answer.tensors, answer.num_fragments, answer.num_shards), answer.policy.push_encoding,
        answer.policy.pull_encoding, _honest, lambda: (), TACTICS, MANNERS, ANSWERS, settings.worker.step_min_s,
        START_S,
    )  # fmt: skip
    counts = Counter[str]()
    learner = HostileLearner(name, [found[i] for i in sorted(found)], plot, chance, lambda what: counts.update([what]))
    harm = asyncio.create_task(learner.run(), name=name)
    while True:
        done, _ = await asyncio.wait([harm], timeout=SAY_EVERY_S)
        print(json.dumps(dict(sorted(counts.items()))), flush=True)
        for task in done:
            task.result()  # raises what ended it


async def _described(transport: HoldingTransport, run_id: str) -> JoinAnswer:
    """The shard's description of the run, once it has a model."""
    while True:
        try:
            return await transport.join(Identity(run_id), JoinRequest(PROTOCOL, "", observe=True), START_S)
        except (Refusal, Unavailable) as error:
            print(f"{error} [{error.code}]", flush=True)
            await asyncio.sleep(LOOK_S)


def _honest(fragment: Fragment, tokens: int) -> Tensor:
    return HONEST * torch.randn(fragment.num_elements)


if __name__ == "__main__":
    sys.exit(main())
