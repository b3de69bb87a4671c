"""The end of a learner: the answer to Leave may come after the control stream has ended."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from torch import nn

import diloco_worker
from diloco_server import server
from diloco_server.servicer import ParameterServer


class LateGoodbye(ParameterServer):
    """Ends the control stream of a learner that leaves, and answers it a while later."""

    async def Leave(self, request: Any, context: Any) -> Any:
        answer = await super().Leave(request, context)
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
