"""A hostile learner: it makes the five calls with production messages, and lies.

It holds a lease with every shard, sends reports under it, listens, and sometimes tries one of its tactics. `lies.py`
draws its messages.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import torch

from diloco_common.codec import Payload, encode_payload
from diloco_common.errors import Refusal, Superseded
from diloco_common.ports import Unavailable
from diloco_common.trust.identity import Identity
from diloco_common.wire.messages import (
    PROTOCOL,
    Collect,
    Committed,
    Directive,
    JoinRequest,
    Progress,
    PullRequest,
    PushHeader,
)
from diloco_simulator import lies
from diloco_simulator.lies import AS_OTHERS, FOREIGN, PUSHES, HostileTransport, OpenCall, Plot, Session, Sniffed

DECODES = ("float32", "bfloat16", "int8", "int4")
PAUSE_S = 0.15
"""Mean time between two tactics."""
REPORT_S = 0.2
ANSWER_S = 0.05
"""Longest wait before it contributes to a round that opens."""
FLOOD = 12
HOLDS = 4
"""How many times it retakes a place that it has lost."""
HELD_MAX = 64


class HostileLearner:
    def __init__(
        self, learner_id: str, transports: Sequence[HostileTransport], plot: Plot, random: Random,
        note: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`note` is called with everything that it tries or hears, so that the cluster can count it."""
        self.learner_id = learner_id
        self.calm = False
        """Whether it uses only its own id from now on."""
        self.spoke_as: set[str] = {learner_id}
        """All learner ids that it has used."""
        self._plot, self._r, self._note = plot, random, note
        self._peer = f"machine of {learner_id}"
        self._manner = random.choice(plot.manners)
        self._truth = Progress(0, 0, 2.0, plot.step_s)
        self._pushed: deque[tuple[PushHeader, Payload]] = deque(maxlen=16)
        self._held: deque[OpenCall] = deque()
        self._tasks: dict[asyncio.Task[None], None] = {}  # an event loop does not keep its tasks alive
        me = Identity(plot.run_id, learner_id, peer=self._peer)
        self._sessions = [Session(n, transport, me, self._new_process()) for n, transport in enumerate(transports)]

    async def run(self) -> None:
        for session in self._sessions:
            self._start(self._stay(session))
        while True:
            await asyncio.sleep(self._r.expovariate(1 / PAUSE_S))
            self._start(self._try(self._r.choice(self._plot.tactics), self._r.choice(self._sessions)))

    # ------------------------------------------------------------ leases and reports

    async def _stay(self, session: Session) -> None:
        """Hold a lease, and join again when it is lost."""
        while True:
            try:
                await self._join(session)
                session.stream = session.transport.attend(session.caller)
                reports = self._start(self._report(session))
                try:
                    while (directive := await session.stream.hear()) is not None:
                        self._hear(session, directive)
                finally:
                    reports.cancel()
                    session.stream.cancel()
            except Superseded:
                session.process_id = self._new_process()
            except (Refusal, Unavailable):
                pass
            await asyncio.sleep(self._r.uniform(0.1, 0.6))

    async def _join(self, session: Session) -> None:
        request = JoinRequest(PROTOCOL, session.process_id, self._plot.manifest.tensors, DECODES)
        answer = await session.transport.join(session.caller, request, self._plot.call_s)
        session.caller = replace(session.caller, generation=answer.generation, epoch=answer.epoch)
        session.base = {s.fragment_id: (s.epoch, s.version) for s in answer.fragments if s.seeded}

    async def _report(self, session: Session) -> None:
        while True:
            await asyncio.sleep(REPORT_S * self._r.uniform(0.5, 1.5))
            manner = self._manner if self._r.random() < 0.8 else self._r.choice(self._plot.manners)
            if manner != "silent":
                await self._quietly(session.stream.report(self._progress(manner)))

    def _progress(self, manner: str) -> Progress:
        ahead = {"fast": lies.STEPS_AHEAD, "still": 0}.get(manner, 1)
        self._truth = truth = replace(
            self._truth, inner_step=self._truth.inner_step + ahead, tokens=self._truth.tokens + 3 * ahead
        )
        match manner:
            case "slow":
                return replace(truth, step_time_s=self._r.choice(lies.SLOW_S))
            case "liar":
                return lies.progress(self._r, truth)
        return truth

    def _hear(self, session: Session, directive: Directive) -> None:
        match directive:
            case Collect():
                session.asked[directive.fragment_id] = directive
                if self._r.random() < self._plot.answers:
                    self._start(self._answer(session, directive.fragment_id))
            case Committed():
                session.base[directive.fragment_id] = directive.epoch, directive.version

    async def _answer(self, session: Session, fragment_id: int) -> None:
        await asyncio.sleep(self._r.random() * ANSWER_S)
        ways = [tactic for tactic in self._plot.tactics if tactic in PUSHES] or [AS_OTHERS]
        await self._contribute(session, self._r.choice(ways), fragment_id)

    # ------------------------------------------------------------ tactics

    async def _try(self, tactic: str, session: Session) -> None:
        if self.calm and tactic in FOREIGN:
            return
        self._note(f"hostile: {tactic}")
        match tactic:
            case "replay":
                await self._replay(session)
            case "seed":
                await self._seed(session)
            case "join":
                await session.transport.join(session.caller, self._odd_join(session), self._plot.call_s)
            case "come and go":
                await self._come_and_go(session)
            case "hold pushes":
                for _ in range(self._r.randint(1, FLOOD)):
                    self._start(self._hold_pushes(session))
            case "hold pulls":
                for _ in range(self._r.randint(1, FLOOD)):
                    request = PullRequest(self._any_of(session), self._r.choice(((), ("float32",))))
                    self._hold(session.transport.hold_pull(session.caller, request))
            case "hold streams":
                for _ in range(self._r.randint(1, FLOOD)):
                    self._hold(session.transport.hold_stream(session.caller))
            case "pull":
                odd = lies.pull_request(self._r, self._any_of(session), self._plot.pull_encoding)
                async for _ in session.transport.pull(session.caller, odd, self._plot.call_s):
                    pass
            case "extreme lease":
                await self._speak_under(session, lies.lease(self._r, session.caller))
            case "ghosts":
                await self._send_ghosts(session)
            case _ if tactic in (*PUSHES, AS_OTHERS):
                await self._contribute(session, tactic, self._any_of(session))
            case _:
                await self._as_another(tactic, session)

    async def _contribute(self, session: Session, tactic: str, fragment_id: int) -> None:
        header, payload = self._contribution(session, fragment_id, is_honest=tactic == AS_OTHERS)
        match tactic:
            case "not finite":
                header = replace(header, not_finite=True)
                payload = Payload(payload.header, ())
            case "claim":
                header = lies.push_header(self._r, header, ("tokens", "steps"))
            case "lie":
                header = lies.push_header(self._r, header)
            case "other bytes":
                payload = Payload(payload.header, lies.chunks(self._r, payload))
        self._pushed.append((header, payload))
        await self._push(session, session.caller, header, payload)

    async def _push(self, session: Session, caller: Identity, header: PushHeader, payload: Payload) -> None:
        answer = await session.transport.push(caller, header, payload, self._plot.call_s)
        self._note(f"hostile pushes: {answer.code or answer.outcome.value}")

    def _contribution(
        self, session: Session, fragment_id: int, *, is_honest: bool = False
    ) -> tuple[PushHeader, Payload]:
        """A contribution that is honest except for its values, or in every respect."""
        epoch, version = session.base.get(fragment_id, (session.caller.epoch, 0))
        asked = session.asked.get(fragment_id)
        tokens = self._r.randint(1, 30)
        honest = self._plot.honest(self._plot.manifest.fragments[fragment_id], tokens)
        encoding = self._plot.push_encoding
        payload = encode_payload(honest, encoding) if is_honest else lies.payload(self._r, honest, encoding)
        return PushHeader(
            fragment_id, asked.round if asked else version + 1, asked.epoch if asked else epoch, version, tokens,
            max(1, tokens // 3), payload.header, self._plot.manifest.digest,
        ), payload  # fmt: skip

    async def _replay(self, session: Session) -> None:
        """Push its own contribution again, or another learner's as its own, perhaps in another round."""
        known = [*self._pushed, *((s.header, s.payload) for s in self._overheard(session))]
        if not known:
            return
        header, payload = self._r.choice(known)
        asked = session.asked.get(header.fragment_id)
        if asked is not None and self._r.random() < 0.5:
            base = session.base.get(header.fragment_id, (asked.epoch, header.base_version))[1]
            header = replace(header, round=asked.round, epoch=asked.epoch, base_version=base)
        await self._push(session, session.caller, header, payload)

    async def _seed(self, session: Session) -> None:
        """Seed a model of its own, and claim that the run is over."""
        fragment = self._r.choice(self._plot.manifest.fragments)
        values = torch.tensor([self._r.uniform(-1, 1) for _ in range(fragment.num_elements)])
        payload = encode_payload(values * self._r.choice((1.0, 100.0, 1e18)), "float32")
        header = PushHeader(
            fragment.fragment_id, 0, session.caller.epoch, 0, 0, 0, payload.header, self._plot.manifest.digest,
            lies.number(self._r, 0),
        )  # fmt: skip
        if self._r.random() < 0.3:
            header = lies.push_header(self._r, header)
        await self._push(session, session.caller, header, payload)

    async def _hold_pushes(self, session: Session) -> None:
        """Push without the bytes or even the header, and push again after each refusal."""
        for _ in range(HOLDS):
            header, payload = self._contribution(session, self._any_of(session))
            parts = self._r.choice(((), (header,), (header, payload.chunks[0][:1])))
            call = session.transport.hold_push(session.caller, *parts)
            self._hold(call)
            with contextlib.suppress(Refusal):
                await call.receive()

    def _odd_join(self, session: Session) -> JoinRequest:
        r, manifest = self._r, self._plot.manifest
        return JoinRequest(
            r.choice((PROTOCOL, PROTOCOL, 0, 2**32 - 1)), r.choice((session.process_id, "another", "", "x" * 65)),
            lies.tensors(r, manifest.tensors), r.choice((DECODES, (), lies.ENCODINGS)),
            lies.held(r, len(manifest.fragments)), r.random() < 0.2,
        )  # fmt: skip

    async def _come_and_go(self, session: Session) -> None:
        for _ in range(self._r.randint(1, FLOOD)):
            session.process_id = self._r.choice((session.process_id, self._new_process()))
            await self._quietly(self._join(session))
            if self._r.random() < 0.5:
                await self._quietly(session.transport.leave(session.caller, self._plot.call_s))

    async def _speak_under(self, session: Session, caller: Identity) -> None:
        """Make one of the calls under a lease that is not its own."""
        header, payload = self._contribution(session, self._any_of(session))
        match self._r.choice(("push", "leave", "pull", "attend")):
            case "push":
                await self._push(session, caller, header, payload)
            case "leave":
                await session.transport.leave(caller, self._plot.call_s)
            case "pull":
                self._hold(session.transport.hold_pull(caller, PullRequest(header.fragment_id)))
            case "attend":
                self._hold(session.transport.hold_stream(caller))

    # ------------------------------------------------------------ as another learner

    async def _send_ghosts(self, session: Session) -> None:
        """Take leases for learners that do not exist."""
        for _ in range(self._r.randint(1, FLOOD)):
            ghost = Identity(self._plot.run_id, f"{self.learner_id}-{self._r.randrange(10_000)}", peer=self._peer)
            self.spoke_as.add(ghost.learner_id)
            request = JoinRequest(PROTOCOL, "ghost", self._plot.manifest.tensors, DECODES)
            await self._quietly(session.transport.join(ghost, request, self._plot.call_s))

    async def _as_another(self, tactic: str, session: Session) -> None:
        if not (overheard := self._overheard(session)):
            return
        sniffed = self._r.choice(overheard)
        victim = replace(sniffed.caller, peer=self._peer)
        self.spoke_as.add(victim.learner_id)
        match tactic:
            case "join as another":
                request = JoinRequest(PROTOCOL, "hostile", self._plot.manifest.tensors, DECODES)
                caller = replace(victim, generation=0, epoch=0)
                await session.transport.join(caller, request, self._plot.call_s)
            case "leave as another":
                await session.transport.leave(victim, self._plot.call_s)
            case "push as another":
                ways = (
                    (sniffed.header, sniffed.payload),
                    (lies.push_header(self._r, sniffed.header), sniffed.payload),
                    self._contribution(session, self._any_of(session)),
                )
                await self._push(session, victim, *self._r.choice(ways))
            case "attend as another":
                self._hold(session.transport.hold_stream(victim))

    def _overheard(self, session: Session) -> list[Sniffed]:
        return [sniffed for sniffed in self._plot.sniffed() if sniffed.shard == session.shard]

    # ------------------------------------------------------------ helpers

    def _any_of(self, session: Session) -> int:
        """Usually a fragment for which the shard asked; sometimes another one of the shard, or any fragment."""
        at = self._r.random()
        if at < 0.1:
            return self._r.randrange(len(self._plot.manifest.fragments))
        owned = [fragment.fragment_id for fragment in self._plot.manifest.owned_by(session.shard)]
        return self._r.choice(owned if at < 0.3 or not session.asked else sorted(session.asked))

    def _new_process(self) -> str:
        return f"hostile {self._r.randrange(10**6)}"

    def _hold(self, call: OpenCall) -> None:
        """Keep a call open and never read it."""
        self._held.append(call)
        if len(self._held) > HELD_MAX:
            self._held.popleft().cancel()

    def _start(self, work: Awaitable[Any]) -> asyncio.Task[None]:
        task = asyncio.create_task(self._quietly(work), name=self.learner_id)
        self._tasks[task] = None
        task.add_done_callback(lambda _: self._tasks.pop(task))
        return task

    async def _quietly(self, work: Awaitable[Any]) -> None:
        """Do the work, and ignore refusals: a hostile learner expects them."""
        try:
            await work
        except (Refusal, Unavailable) as refused:
            self._note(f"refused: {refused.code}")
