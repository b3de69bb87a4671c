"""The one thread that encodes and decodes for a learner, with the payloads and versions that are kept.

`ConnectionContext` is what all connections of the learner share: this thread, and the things that they need.

Encoding a contribution is one job; so is decoding a version, with the computation ahead of applying it. Neither the
training thread nor the event loop waits for a job. A contribution's job starts at the step boundary (`begin`). Its
payload is kept until its fate is known, and the latest pulled version until the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from diloco_common.codec import Payload, encode_payload
from diloco_common.codec.change import decode_version
from diloco_common.codec.parts import sha256
from diloco_common.ports import Transport, World
from diloco_common.wire.manifest import TensorSpec, Tie
from diloco_common.wire.messages import FrozenTensor, Held, PullHeader
from diloco_worker.core.connection import Caller
from diloco_worker.core.device import wait_for_device
from diloco_worker.core.events import Arrived
from diloco_worker.core.fragment import PendingContribution
from diloco_worker.core.parts import LocalFragment
from diloco_worker.core.tensors import Difference, FragmentTensors
from diloco_worker.shell.council import Council, Inbox
from diloco_worker.shell.telemetry import LearnerTelemetry

SEED_ENCODING = "float32"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HeldVersion:
    epoch: int
    version: int
    tokens_merged: int
    """Tokens merged into it, in this epoch of the shard or earlier ones."""
    values: Tensor | None
    """Base of the next change. None: a change to it arrived damaged, so the next pull asks for values."""


class CodecThread:
    """One per learner. Its methods return at once; results are ready later."""

    def __init__(
        self, device: torch.device, world: World, telemetry: LearnerTelemetry, tokens_seen: int = 0
    ) -> None:  # fmt: skip
        """`tokens_seen`: tokens merged into the versions that an earlier process of this learner had seen."""
        self._device = device
        self._clock = world.clock
        self._cpu_clock = world.cpu_clock
        self._telemetry = telemetry
        self._executor: Executor = world.threads(1, "diloco-codec")
        self._tensors: Mapping[int, FragmentTensors] = {}
        self._payloads: dict[
            PendingContribution, Future[Payload]
        ] = {}  # the training thread adds, the network thread removes
        self._held: dict[int, HeldVersion] = {}
        self._tokens_seen = tokens_seen
        self._is_closed = False
        self._give_back = world.give_back
        self._has_encoded_seed = False  # used only by the codec thread

    def close(self) -> None:
        """End the thread; jobs that have not started are dropped. May be repeated."""
        self._is_closed = True
        self._executor.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------ in the training thread

    def begin(self, contribution: PendingContribution, encoding: str) -> None:
        """Encode a contribution, unless that is done or in progress, or this is closed."""
        if contribution not in self._payloads and not self._is_closed and not contribution.tensors.is_others:
            self.drop(lambda earlier: earlier.fragment_id == contribution.fragment_id)
            self._payloads[contribution] = self._executor.submit(self._contribution, contribution, encoding)

    # ------------------------------------------------------------ in the network thread: sending

    async def payload(self, contribution: PendingContribution) -> Payload | None:
        """The encoded contribution; None: its fate is known already. Raises NotFinite."""
        job = self._payloads.get(contribution)
        if job is None:
            return None
        # A caller that stops waiting must not cancel the job: the same contribution may be pushed again.
        return await asyncio.shield(asyncio.wrap_future(job))

    async def encode_seed(self, values: Tensor) -> Payload:
        """Encode values of version 0. Raises NotFinite."""
        return await self._run(lambda: self._seed(values))

    def drop(self, is_over: Callable[[PendingContribution], bool]) -> None:
        """Forget these contributions: their fate is known, and they are not pushed again."""
        for contribution in list(self._payloads):
            if is_over(contribution):
                self._payloads.pop(contribution, None)

    # ------------------------------------------------------------ in the network thread: receiving

    def own(self, tensors: Mapping[int, FragmentTensors]) -> None:
        """Use these tensors: the model is cut."""
        self._tensors = tensors

    def nothing(self, header: PullHeader) -> Arrived:
        values = torch.empty(0, device=self._device)
        return Arrived(
            header.fragment_id, header.version, header.epoch, values, header.merged_version,
            forgotten_version=header.forgotten_version,
        )  # fmt: skip

    def local(self, fragment_id: int) -> LocalFragment | None:
        """The part that this process holds. None: the model is not cut yet."""
        tensors = self._tensors.get(fragment_id)
        return None if tensors is None else tensors.fragment

    def held(self, fragment_ids: Collection[int]) -> tuple[Held, ...]:
        """The latest pulled version of each of these fragments that was pulled at all."""
        held = ((i, self._held[i]) for i in fragment_ids if i in self._held)
        return tuple(Held(i, h.epoch, h.version) for i, h in held)

    def base(self, fragment_id: int) -> tuple[int, int] | None:
        """Epoch and version that a change may be relative to; None: none."""
        held = self._held.get(fragment_id)
        return None if held is None or held.values is None else (held.epoch, held.version)

    def tokens_merged(self, fragment_id: int) -> int:
        """Tokens merged into the held version; without one, into those that an earlier process had seen."""
        held = self._held.get(fragment_id)
        return self._tokens_seen if held is None else held.tokens_merged

    def tokens_seen(self, fragment_ids: Collection[int]) -> int:
        """Tokens merged into the newest version of these fragments that this learner has seen; 0: none."""
        return max((self._held[i].tokens_merged for i in fragment_ids if i in self._held), default=self._tokens_seen)

    async def decode(self, header: PullHeader, payload: Payload) -> Arrived:
        held = self._held.get(header.fragment_id)
        base = held.values if held is not None and header.base_version is not None else None
        return await self._run(lambda: self._version(header, payload, base))

    async def name(self, payload: Payload) -> bytes:
        """The SHA-256 that identifies its bytes (`codec.parts.sha256`)."""
        return await self._run(lambda: sha256(payload))

    def hold(self, arrived: Arrived, tokens_merged: int) -> None:
        """Keep this version, which goes to the training thread. Pushes for it or earlier versions are forgotten."""
        fragment_id, version = arrived.fragment_id, arrived.version
        self._held[fragment_id] = HeldVersion(arrived.epoch, version, tokens_merged, arrived.values)
        self.drop(lambda c: c.fragment_id == fragment_id and c.round <= version)

    def lose_base(self, fragment_id: int) -> None:
        """A version's bytes were unusable: ask for values next."""
        if (held := self._held.get(fragment_id)) is not None:
            self._held[fragment_id] = replace(held, values=None)

    # ------------------------------------------------------------ jobs

    def _seed(self, values: Tensor) -> Payload:
        self._has_encoded_seed = True
        return self._encode(lambda: encode_payload(values, SEED_ENCODING))

    @torch.no_grad()
    def _contribution(self, contribution: PendingContribution, encoding: str) -> Payload:
        if self._has_encoded_seed:  # its memory is free now, and nothing later is as large
            self._give_back()
            self._has_encoded_seed = False
        return self._encode(lambda: contribution.tensors.encode(encoding))

    def _encode(self, encode: Callable[[], Payload]) -> Payload:
        began, cpu_began = self._clock(), self._cpu_clock()
        payload = encode()
        self._telemetry.encoded(self._clock() - began)
        self._telemetry.computed("encode", self._cpu_clock() - cpu_began)
        return payload

    @torch.no_grad()
    def _version(self, header: PullHeader, payload: Payload, base: Tensor | None) -> Arrived:
        began = self._cpu_clock()
        reference = self._tensors[header.fragment_id].reference_of(header.version, header.merged_version)
        values, added = decode_version(payload, base, self._device, reference)
        difference = None if reference is None or added is None else Difference(reference, added)
        wait_for_device(self._device)
        self._telemetry.computed("decode", self._cpu_clock() - began)
        return Arrived(
            header.fragment_id, header.version, header.epoch, values, header.merged_version, difference,
            header.forgotten_version,
        )  # fmt: skip

    async def _run(self, job: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, job)


@dataclass(frozen=True)
class ConnectionContext:
    caller: Caller
    tensors: tuple[TensorSpec, ...]
    dial: Callable[[str], Transport]
    """Returns the transport to the shard at an address. Nothing is sent before the first call."""
    world: World
    council: Council
    codec: CodecThread
    telemetry: LearnerTelemetry
    frozen: tuple[FrozenTensor, ...] = ()
    """Tensors that must be equal in all learners, for Join."""
    ties: tuple[Tie, ...] = ()
    index: int | None = None
    """This learner's number in an earlier process."""
    site: str = ""
    """The learner's place, for mirrors; empty: none."""

    @property
    def inbox(self) -> Inbox:
        return self.council.inbox
