"""Directives on their way to learners: one stream per learner, each with a bound.

Owned by the shard's event loop. What is said is decided by the core; the transport reads the streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from diloco_common.messages import Directive
from diloco_server.core.effects import Tell

BACKLOG_MAX = 4096
"""Directives that wait for a learner that does not read. With more the stream ends, so that the learner comes back."""


class ControlStream:
    """Directives on their way to one learner."""

    def __init__(self, learner_id: str, generation: int) -> None:
        self.learner_id = learner_id
        self.generation = generation
        self._queue: asyncio.Queue[Directive | None] = asyncio.Queue(BACKLOG_MAX)

    def send(self, directive: Directive) -> None:
        try:
            self._queue.put_nowait(directive)
        except asyncio.QueueFull:
            self.end()

    def end(self) -> None:
        """No more directives. Those that wait still go out, unless they are too many: a goodbye may be among them."""
        if self._queue.full():
            while not self._queue.empty():
                self._queue.get_nowait()
        self._queue.put_nowait(None)

    async def next(self) -> Directive | None:
        """The next directive; None at the end."""
        return await self._queue.get()


class ControlStreams:
    """The open streams of a shard, at most one per learner."""

    def __init__(self) -> None:
        self._by_learner: dict[str, ControlStream] = {}

    def __len__(self) -> int:
        return len(self._by_learner)

    def __iter__(self) -> Iterator[ControlStream]:
        return iter(self._by_learner.values())

    def open(self, learner_id: str, generation: int) -> ControlStream:
        """The stream of a generation; ends an older one of the same learner."""
        self.end(learner_id)
        self._by_learner[learner_id] = stream = ControlStream(learner_id, generation)
        return stream

    def close(self, stream: ControlStream) -> None:
        """Nobody reads this one any more."""
        if self._by_learner.get(stream.learner_id) is stream:
            del self._by_learner[stream.learner_id]

    def tell(self, tell: Tell) -> None:
        """Send a directive to a learner. It is lost if this generation has no stream: a new one hears the state."""
        stream = self._by_learner.get(tell.learner_id)
        if stream is not None and stream.generation == tell.generation:
            stream.send(tell.directive)

    def end(self, learner_id: str) -> None:
        """End a learner's stream, if it has one."""
        stream = self._by_learner.get(learner_id)
        if stream is not None:
            stream.end()

    def end_all(self) -> None:
        for stream in self:
            stream.end()
