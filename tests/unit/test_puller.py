"""What a learner says that it holds: what it pulled last, whatever it asks for next."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diloco_worker.session import Session

from diloco_common.errors import BadChecksum
from diloco_common.manifest import TensorSpec, cut
from diloco_common.messages import Held, LearnerPolicy
from diloco_worker import puller as module
from diloco_worker.puller import Puller
from waiting import until_async

EPOCH = 7
MANIFEST = cut([TensorSpec("w", (4,))], 1, 1)
NOTHING, FIRST = None, (EPOCH, 1)


class Shard:
    """Answers each pull in turn: with that version, or with bytes that are damaged."""

    def __init__(self, *answers: int | BadChecksum) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[int, int] | None] = []
        """What each pull said that the learner has."""
        self.held: list[list[Held]] = []
        """What a Join would have said when each pull was made."""
        self.puller: Puller

    async def pull(self, stub: Any, request: Any, *_: Any) -> Any:
        self.asked.append((request.epoch, request.have_version) if request.HasField("have_version") else None)
        self.held.append(self.puller.held())
        answer = self.answers.pop(0)
        if isinstance(answer, BadChecksum):
            raise answer
        return SimpleNamespace(
            version=answer, epoch=EPOCH, merged_version=0, forgotten_version=0, tokens_merged=0,
            values=torch.zeros(4), shift=None,
        )  # fmt: skip


def pulled(shard: Shard, *announced: int) -> Puller:
    """Announce these versions, each once the one before is there."""

    async def run() -> Puller:
        log = SimpleNamespace(debug=lambda *_, **__: None)
        inbox: list[Any] = []
        context: Any = SimpleNamespace(
            transfer=shard, log=log, inbox=SimpleNamespace(put=inbox.append), run_id="", learner_id="", token=None
        )
        session = Session("shard", context)
        session.epoch, session.generation, session.manifest = EPOCH, 1, MANIFEST
        session.policy = LearnerPolicy(4, "int8", "int8", "carry", 0.5, True)
        shard.puller = puller = Puller(session, lambda *_: None)
        running = asyncio.create_task(puller.run(None))  # type: ignore[arg-type]
        for number, version in enumerate(announced, 1):
            puller.announce(0, EPOCH, version)
            await until_async(lambda: len(inbox) >= number, f"version {version}")  # noqa: B023
        running.cancel()
        return puller

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def tries_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "backoff_s", lambda *_: 0.0)


def test_what_was_pulled_is_held_and_the_next_is_asked_for_as_a_change_of_it() -> None:
    shard = Shard(1, 2)
    assert pulled(shard, 1, 2).held() == [Held(0, EPOCH, 2)]
    assert shard.asked == [NOTHING, FIRST]


def test_a_change_that_came_damaged_is_fetched_from_nothing_and_what_was_held_still_is() -> None:
    """The learner's anchor is what it was. A shard that comes back without that version must hear of it."""
    shard = Shard(1, BadChecksum("damaged"), 2)
    assert pulled(shard, 1, 2).held() == [Held(0, EPOCH, 2)]
    assert shard.asked == [NOTHING, FIRST, NOTHING]
    assert shard.held == [[], [Held(0, EPOCH, 1)], [Held(0, EPOCH, 1)]]


def test_another_life_of_the_shard_is_told_what_an_earlier_one_gave() -> None:
    puller = pulled(Shard(1), 1)
    puller.begin_epoch()
    assert not puller.is_announced(0)
    assert puller.held() == [Held(0, EPOCH, 1)]
