"""What waits to be said, to somebody who may read more slowly than there is news."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class Newest(Generic[T]):
    """Of each kind of word about one thing the newest, so that what waits is bounded by how many things there are.

    A thing keeps its turn, however often there is a newer word about it: none is passed over for ever. The words about
    it come together, in the order in which they were said.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[object, dict[object, T]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, about: object, kind: object, word: T) -> None:
        """This, and no more the earlier word of its kind about the same thing."""
        words = self._waiting.setdefault(about, {})
        words.pop(kind, None)
        words[kind] = word

    def drop(self, about: object) -> None:
        """Nothing about this any more."""
        self._waiting.pop(about, None)

    def take(self) -> T:
        """The next word."""
        about, words = next(iter(self._waiting.items()))
        word = words.pop(next(iter(words)))
        if not words:
            del self._waiting[about]
        return word
