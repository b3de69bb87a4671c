"""The training loop's calls, one at a time: a learner, and the model that it writes to, belong to one thread.

Which thread that is may change, as in a notebook; two at once may not. A call inside a call is fine.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from diloco_common.errors import WrongCall

P = ParamSpec("P")
T = TypeVar("T")


class OneThread:
    """Whether a call is under way, and in which thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._holder = ""

    def enter(self, what: str) -> None:
        """Raises WrongCall while another thread is inside a call."""
        if not self._lock.acquire(blocking=False):
            raise WrongCall(
                f"{what}() in thread {threading.current_thread().name}, while {self._holder} is inside a call of this "
                "learner: let one thread train, and call step, poll, finish and leave there"
            )
        self._holder = f"thread {threading.current_thread().name}"

    def leave(self) -> None:
        self._lock.release()


class _Owned(Protocol):
    one_thread: OneThread


Owner = TypeVar("Owner", bound=_Owned)


def one_thread(call: Callable[Concatenate[Owner, P], T]) -> Callable[Concatenate[Owner, P], T]:
    """A method that may not be called in two threads at once."""
    name = call.__name__

    @functools.wraps(call)
    def called(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> T:
        self.one_thread.enter(name)
        try:
            return call(self, *args, **kwargs)
        finally:
            self.one_thread.leave()

    return called
