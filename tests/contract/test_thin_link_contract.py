"""A learner behind a link so thin that one chunk takes longer than a lease: reliability.md 12."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch
from in_process import InProcessShard, LoopThread, settings_with
from torch import nn

import diloco_worker

LEASE_S = 0.6
NUM_ELEMENTS = 250_000
BYTES_PER_S = 1_000_000
"""The seed, one chunk of 1 MB, takes a second."""


class ThinLink:
    """Forwards a port; what goes up is slowed down, with little room to wait in."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._free_at = 0.0  # when the link has sent all that it took
        self._pumps: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0, limit=1 << 14)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _connected(self, near: asyncio.StreamReader, to_near: asyncio.StreamWriter) -> None:
        far, to_far = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 14)
        for pump in (self._pump(near, to_far, thin=True), self._pump(far, to_near, thin=False)):
            task = asyncio.create_task(pump)
            self._pumps.add(task)
            task.add_done_callback(self._pumps.discard)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, thin: bool) -> None:
        clock = asyncio.get_running_loop().time
        try:
            while data := await reader.read(1 << 13):
                if thin:
                    self._free_at = max(self._free_at, clock()) + len(data) / BYTES_PER_S
                    await asyncio.sleep(self._free_at - clock())
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


@pytest.fixture
def thin(loop: LoopThread, serve) -> Iterator[tuple[InProcessShard, str]]:
    """A shard, and the address under which it is slow to reach."""
    shard = serve(settings_with(sync={"fragments": 1}, lease={"lease_s": LEASE_S, "heartbeat_s": 0.2}))
    link = ThinLink(int(shard.server.grpc_address.rpartition(":")[2]))
    yield shard, loop.run(link.start())
    loop.run(link.stop())


def test_a_seed_arrives_over_a_link_on_which_a_chunk_outlasts_the_lease(thin):
    shard, address = thin
    model = nn.Linear(NUM_ELEMENTS // 10, 10, bias=False)
    with diloco_worker.join(address, model, learner_id="a", wait_s=120.0):
        assert shard.core.versions.all_seeded
        found = shard.core.fragments[0].values
        assert found is not None
        assert torch.equal(found.theta.bfloat16().float(), model.weight.detach().flatten())
    assert "BAD_REQUEST" not in shard.ledger.rejected
