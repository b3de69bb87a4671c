"""Directives on their way to learners: one bounded stream per learner.

Owned by the shard's event loop. The core decides what to send; the transport reads the streams.

A later directive replaces a waiting one of its kind about the same fragment. So for a learner that reads nothing, at
most two directives per fragment wait, and one of every other kind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from diloco_common.wire.messages import Collect, Committed, Directive, Evicted, Newest
from diloco_server.core.effects import Tell


class LearnerStream:
    def __init__(self, learner_id: str, generation: int) -> None:
        self.learner_id = learner_id
        self.generation = generation
        self._waiting: Newest[Directive] = Newest()
        self._is_over = False
        self._changed = asyncio.Event()

    def send(self, directive: Directive) -> None:
        """Queue a directive, replacing an outdated one. Nothing follows an eviction."""
        match directive:
            case Collect() | Committed():
                self._waiting.put(directive.fragment_id, type(directive), directive)
            case Evicted():
                if not self._is_over:
                    self._waiting.put(Evicted, Evicted, directive)
                self._is_over = True
            case _:
                self._waiting.put(type(directive), type(directive), directive)
        self._changed.set()

    def end(self) -> None:
        """Accept no more directives. Waiting ones still go out: one may be the eviction."""
        self._is_over = True
        self._changed.set()

    async def next(self) -> Directive | None:
        """The next directive; None at the end."""
        while not self._waiting and not self._is_over:
            self._changed.clear()
            await self._changed.wait()
        return self._waiting.take() if self._waiting else None


class ControlStreams:
    def __init__(self) -> None:
        self._by_learner: dict[str, LearnerStream] = {}

    def __len__(self) -> int:
        return len(self._by_learner)

    def __iter__(self) -> Iterator[LearnerStream]:
        return iter(self._by_learner.values())

    def open(self, learner_id: str, generation: int) -> LearnerStream:
        """Open a stream, and end an older one of the same learner."""
        self.end(learner_id)
        self._by_learner[learner_id] = stream = LearnerStream(learner_id, generation)
        return stream

    def close(self, stream: LearnerStream) -> None:
        if self._by_learner.get(stream.learner_id) is stream:
            del self._by_learner[stream.learner_id]

    def tell(self, tell: Tell) -> None:
        """Send a directive. It is lost if this generation has no stream: a new stream starts with the full state."""
        stream = self._by_learner.get(tell.learner_id)
        if stream is not None and stream.generation == tell.generation:
            stream.send(tell.directive)

    def end(self, learner_id: str) -> None:
        stream = self._by_learner.get(learner_id)
        if stream is not None:
            stream.end()

    def end_all(self) -> None:
        for stream in self:
            stream.end()
