"""Threads that write to a data folder, and know whether one still does: nothing can call back a write that hangs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class Writers(ThreadPoolExecutor):
    """Work is given by one thread."""

    def __init__(self, count: int, name: str) -> None:
        super().__init__(count, thread_name_prefix=name)
        self._under_way: set[Future[Any]] = set()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        work = super().submit(fn, *args, **kwargs)
        self._under_way.add(work)
        work.add_done_callback(self._under_way.discard)
        return work

    @property
    def busy(self) -> bool:
        """Whether a thread may still write; also after `shutdown`."""
        return bool(self._under_way)

    def close(self) -> None:
        """Begin nothing more, and wait for nothing."""
        self.shutdown(wait=False, cancel_futures=True)
