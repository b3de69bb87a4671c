"""The end of a learner: what it waits for, and what not."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from torch import nn
from training import state_of

import diloco_worker
from diloco_common.errors import CannotConnect
from diloco_common.trust.identity import Identity
from diloco_server.shell import server
from diloco_server.shell.servicer import ParameterServer
from diloco_worker import learner
from diloco_worker.shell import boundary
from waiting import DEADLINE_S


class LateGoodbye(ParameterServer):
    """Ends the control stream of a learner that leaves, and answers it a while later."""

    async def Leave(self, caller: Identity, requests: Any, context: Any) -> Any:
        answer = await super().Leave(caller, requests, context)
        for stream in list(self._service._host.streams):
            stream.end()
        await asyncio.sleep(0.3)
        return answer


def test_a_learner_waits_for_the_answer_to_its_goodbye(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "ParameterServer", LateGoodbye)
    shard = serve()
    learner = diloco_worker.join(shard.address, nn.Linear(4, 2), learner_id="a", wait_s=20)

    learner.close()

    assert shard.member_state("a") == "left"


def test_a_learner_does_not_wait_for_seeds_on_hold(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed learner holds its seeds back for 10 s. Pushes under way get half of that."""
    shard = serve()
    monkeypatch.setattr(learner, "SETTLE_S", 10 * DEADLINE_S)
    monkeypatch.setattr(boundary, "SEED_HOLD_S", 20 * DEADLINE_S)
    began = time.monotonic()

    with pytest.raises(CannotConnect, match="fragments are not there yet"):
        diloco_worker.join(shard.address, nn.Linear(4, 2), learner_id="a", wait_s=10.0, state=state_of("a"))

    assert time.monotonic() - began < DEADLINE_S
