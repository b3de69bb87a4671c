"""Pulls what a shard announces, one fragment after the other, newest version only."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import grpc
from torch import Tensor

from diloco_common.codec.change import pull_encodings
from diloco_common.errors import Refusal
from diloco_common.messages import Held
from diloco_protos import parameter_server_pb2 as pb
from diloco_protos import parameter_server_pb2_grpc as pb_grpc
from diloco_worker.core.dialing import backoff_s
from diloco_worker.core.events import Arrived
from diloco_worker.session import Session


class Puller:
    """The pulls of one link. What came goes to the inbox, and to `pulled` as (fragment, version)."""

    def __init__(self, session: Session, pulled: Callable[[int, int], None]) -> None:
        self._session = session
        self._pulled = pulled
        self._announced: dict[int, tuple[int, int]] = {}  # fragment -> (epoch, version) to pull
        self._fetched: dict[int, tuple[int, int]] = {}  # fragment -> (epoch, version) handed to the inbox
        self._held: dict[int, tuple[int, int]] = {}  # the same, also where it is to be fetched again from nothing
        self._anchors: dict[int, Tensor] = {}  # fragment -> its values, where changes are added to them; only read
        self._news = asyncio.Event()

    def announce(self, fragment_id: int, epoch: int, version: int) -> None:
        """There is a version to pull, made in that epoch."""
        self._announced[fragment_id] = (epoch, version)
        self._news.set()

    def is_announced(self, fragment_id: int) -> bool:
        """Whether the shard has a version of this fragment, in its present life."""
        return fragment_id in self._announced

    def held(self) -> list[Held]:
        """What was pulled last, of each fragment."""
        return [Held(fragment_id, *version) for fragment_id, version in sorted(self._held.items())]

    def begin_epoch(self) -> None:
        """The shard has another life: what it announced before is gone."""
        self._announced.clear()

    def look(self) -> None:
        """Something that pulling waited for is there."""
        self._news.set()

    async def run(self, stub: pb_grpc.ParameterServerStub) -> None:
        """Pull until cancelled."""
        session, attempt = self._session, 0
        while True:
            await self._news.wait()
            self._news.clear()
            if session.manifest is None:
                continue
            for fragment_id, version in sorted(self._announced.items()):
                if self._fetched.get(fragment_id) == version or not session.generation:
                    continue
                try:
                    await self._pull(stub, fragment_id)
                    attempt = 0
                except (grpc.aio.AioRpcError, Refusal) as error:
                    if isinstance(error, Refusal):  # bytes that are of no use: ask for the values themselves
                        self._forget(fragment_id)
                    session.context.log.debug("pull failed", shard=session.address, fragment=fragment_id, why=error)
                    self._news.set()
                    await asyncio.sleep(backoff_s(attempt, random.random()))
                    attempt += 1

    async def _pull(self, stub: pb_grpc.ParameterServerStub, fragment_id: int) -> None:
        session = self._session
        assert session.manifest is not None
        assert session.policy is not None
        encodings = pull_encodings(session.policy.pull_encoding)
        request = pb.PullRequest(fragment_id=fragment_id, encodings=encodings)
        known, anchor = self._fetched.get(fragment_id), self._anchors.get(fragment_id)
        if known is not None:
            request.epoch, request.have_version = known
        epoch = session.epoch
        num_elements = session.manifest.fragments[fragment_id].num_elements
        pulled = await session.context.transfer.pull(stub, request, session.metadata(), num_elements, anchor)
        if pulled is None or session.epoch != epoch:  # of an earlier life, which may have lost it: Join did not name it
            return
        self._fetched[fragment_id] = self._held[fragment_id] = (pulled.epoch, pulled.version)
        if len(encodings) > 1:
            self._anchors[fragment_id] = pulled.values
        session.tokens_merged[fragment_id] = pulled.tokens_merged
        self._pulled(fragment_id, pulled.version)
        session.context.inbox.put(
            Arrived(
                fragment_id, pulled.version, pulled.epoch, pulled.values, pulled.merged_version, pulled.shift,
                pulled.forgotten_version,
            )
        )  # fmt: skip

    def _forget(self, fragment_id: int) -> None:
        self._fetched.pop(fragment_id, None)
        self._anchors.pop(fragment_id, None)
