"""Limits on the use of a shard by one account and by all together: places, bytes and rates, as pure accounting.

An account is a learner with a lease; without one, the proven identity of the caller, or its host. A `Busy` tells the
caller to try again; a call that must end is ended by the shell.

gRPC connections have their own limit, since each takes a file descriptor. If they took all descriptors, versions could
not be written, and /healthz could not answer. So fewer connections are accepted than there are descriptors.
"""

from __future__ import annotations

import resource
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from diloco_common.errors import Busy
from diloco_common.settings import ShardSettings

SHOWN_BYTES = 256 << 10
"""An account that has taken a pull of this size is known to read. For one that does not, a transport buffers less."""
TAKERS_MAX = 8192
"""Maximum number of accounts remembered as reading: those that pulled last."""

H = TypeVar("H", bound=Hashable)


class Bytes:
    """Bytes in flight, up to a limit. A single item always fits, however large it is; otherwise it could never pass."""

    def __init__(self, what: str, most: int) -> None:
        """`what`: the name of these bytes in messages."""
        self.most = most
        self.held = 0
        self._what = what

    def fits(self, num_bytes: int, freed: int = 0) -> bool:
        """Whether they fit once `freed` bytes are given back."""
        held = self.held - freed
        return held == 0 or held + num_bytes <= self.most

    def check(self, num_bytes: int, freed: int = 0) -> None:
        """Raises Busy if they do not fit."""
        if not self.fits(num_bytes, freed):
            raise Busy(f"{self.held >> 20} MiB are on their way ({self._what}); try again in a moment")

    def take(self, num_bytes: int) -> None:
        self.held += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self.held -= num_bytes
        assert self.held >= 0


class Places(Generic[H]):
    """Places of one kind, with a limit per account. Holders stay in order of arrival."""

    def __init__(self, each: int, together: int | None = None, crowded: str = "") -> None:
        """`together`: the limit for all accounts together; `crowded`: the message when it is reached."""
        self._each, self._together, self._crowded = each, together, crowded
        self._holders: dict[str, dict[H, None]] = {}  # not sets: they have no order
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def of(self, account: str) -> int:
        return len(self._holders.get(account, ()))

    def take(self, account: str, holder: H) -> H | None:
        """Take a place for an account's newest holder. If it has too many, returns its oldest, which must end.

        So a learner whose connection broke is not kept out by its old calls.
        """
        oldest = next(iter(self._holders[account])) if self.of(account) >= self._each else None
        if oldest is not None:
            self.give_back(account, oldest)
        self._holders.setdefault(account, {})[holder] = None
        self._count += 1
        return oldest

    @contextmanager
    def held(self, account: str, what: str) -> Iterator[None]:
        """Hold a place that no later holder can take. Raises Busy."""
        if self._together is not None and self._count >= self._together:
            raise Busy(f"{self._together} {self._crowded}")
        if self.of(account) >= self._each:
            raise Busy(f"{self._each} {what} are open; try again in a moment")
        holder: Any = object()
        self.take(account, holder)
        try:
            yield
        finally:
            self.give_back(account, holder)

    def give_back(self, account: str, holder: H) -> None:
        """Free a place. Calls after the first do nothing: a holder that was pushed out also ends by itself."""
        holders = self._holders.get(account, {})
        if holder in holders:
            del holders[holder]
            self._count -= 1
        if not holders:
            self._holders.pop(account, None)


class Ranks:
    """Accounts for a learner's ranks, one for each. Callers choose their rank, so ranks above 0 share a limit."""

    def __init__(self, what: str, each: int) -> None:
        self._what, self._places = what, Places[object](each)

    @contextmanager
    def account(self, learner_id: str, rank: int) -> Iterator[str]:
        """Hold this while a call is open; it gives the account. Raises Busy."""
        if not rank:
            yield learner_id
            return
        with self._places.held(learner_id, f"{self._what} of ranks of {learner_id}"):
            yield f"{learner_id}/{rank}"


class Pulled:
    def __init__(self, *, is_trusted: bool) -> None:
        self.is_trusted = is_trusted
        self.num_bytes = 0


class Takers:
    """Accounts that are known to read what they pull. They get large chunks, but only in one pull at a time.

    A chunk that is not read occupies the shard's memory until the pull's deadline. Learners pull one version at a time.
    """

    def __init__(self) -> None:
        self._shown: dict[str, None] = {}  # in order of the last pull
        self._pulling: set[str] = set()  # with large chunks

    @contextmanager
    def pulling(self, account: str) -> Iterator[Pulled]:
        pulled = Pulled(is_trusted=account in self._shown and account not in self._pulling)
        if pulled.is_trusted:
            self._pulling.add(account)
        try:
            yield pulled
        finally:
            if pulled.is_trusted:
                self._pulling.discard(account)
            if pulled.num_bytes > SHOWN_BYTES:
                self._shown.pop(account, None)
                self._shown[account] = None
            if len(self._shown) > TAKERS_MAX:
                del self._shown[next(iter(self._shown))]


class OpenPushes(Generic[H]):
    """Limits on open pushes: per account, one per account and fragment, in all, and by announced bytes.

    A new push ends an older one of the same fragment, or the account's oldest if it has too many. The last quarter of
    the places is for accounts without another push: uploads over slow links take long, and a few learners with four
    pushes each would take all places.
    """

    def __init__(self, each: int, together: int, bytes_most: int) -> None:
        self._places = Places[H](each)
        self._together = together
        self._bytes = Bytes("bytes that open pushes announced", bytes_most)
        self._by_fragment: dict[tuple[str, int], H] = {}
        self._announced: dict[H, tuple[tuple[str, int], int]] = {}  # push -> (account, fragment), bytes

    def __len__(self) -> int:
        return len(self._places)

    @property
    def bytes_held(self) -> int:
        return self._bytes.held

    def opened(self, account: str, push: H) -> H | None:
        """Start a push. Returns an older push that must end to make room. Raises Busy.

        If all places are taken, an account that has one may still send a header, which may replace its own push.
        """
        if len(self) >= self._together and not self._places.of(account):
            raise self._busy()
        oldest = self._places.take(account, push)
        if oldest is not None:
            self.closed(account, oldest)
        return oldest

    def announced(self, account: str, push: H, fragment_id: int, num_bytes: int) -> H | None:
        """A push's header was admitted. Returns an older push of the fragment that must end for it. Raises Busy."""
        key = (account, fragment_id)
        older = self._by_fragment.get(key)
        freed = 0 if older is None else self._announced[older][1]
        others = self._places.of(account) - 1 - (older is not None)
        if len(self) - (older is not None) > self._together - (self._together // 4 if others else 0):
            raise self._busy()
        self._bytes.check(num_bytes, freed)
        if older is not None:
            self.closed(account, older)
        self._bytes.take(num_bytes)
        self._by_fragment[key] = push
        self._announced[push] = key, num_bytes
        return older

    def closed(self, account: str, push: H) -> None:
        """End a push. Calls after the first do nothing."""
        self._places.give_back(account, push)
        if (announced := self._announced.pop(push, None)) is not None:
            key, num_bytes = announced
            self._bytes.give_back(num_bytes)
            if self._by_fragment.get(key) == push:
                del self._by_fragment[key]

    def _busy(self) -> Busy:
        return Busy(f"{self._together} pushes are open (shard.max_pushes); try again in a moment")


KEPT = 448
"""File descriptors reserved for HTTP, versions, checkpoints, logs and gRPC itself."""
CONNECTIONS_PER_LEARNER = 4
"""A learner has three. The fourth is for connecting again before the shard notices a broken connection."""
ENOUGH = 1 << 20
"""The limit to request if the system allows any number."""


def raise_limit() -> None:
    """Raise the soft limit on open files as far as allowed (RLIMIT_NOFILE)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def files_max() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ENOUGH if soft == resource.RLIM_INFINITY else soft


def connections_wanted(settings: ShardSettings) -> int:
    return CONNECTIONS_PER_LEARNER * settings.max_learners


def connections_allowed(settings: ShardSettings, files: int) -> int:
    """gRPC connections to accept if the process may open `files` files."""
    return max(16, min(connections_wanted(settings), files - KEPT))


class Rate:
    """A token bucket per account: `burst` events at once, `per_s` per second in the long run."""

    def __init__(self, what: str, burst: float, per_s: float, accounts_max: int = 8192) -> None:
        """`what`: the name of the events in messages. `accounts_max`: how many accounts are remembered."""
        self._what, self._burst, self._per_s, self._accounts_max = what, burst, per_s, accounts_max
        self._left: dict[str, tuple[float, float]] = {}  # account -> (events left, at this time)

    def take(self, account: str, now: float) -> None:
        """Count one event. Raises Busy if there are too many."""
        left, since = self._left.pop(account, (self._burst, now))
        left = min(self._burst, left + self._per_s * (now - since))
        if len(self._left) >= self._accounts_max:
            self._forget(now)
        self._left[account] = (left - 1 if left >= 1 else left, now)
        if left < 1:
            raise Busy(f"too many {self._what}: at most {self._per_s:g} per second; try again in a moment")

    def _forget(self, now: float) -> None:
        """Make room: drop accounts with a full bucket, or else the account whose last event is the oldest."""
        full = [a for a, (left, since) in self._left.items() if left + self._per_s * (now - since) >= self._burst]
        for account in full or [next(iter(self._left))]:
            del self._left[account]
