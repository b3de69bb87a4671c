"""Who calls, who waits for whom at a shard, what one account may hold of it, and how often it may come."""

from __future__ import annotations

import asyncio
import weakref
from pathlib import Path

import pytest

from builders import make_settings
from certificates import Certificates
from diloco_common.errors import Busy, Expired, Revoked, WrongIdentity
from diloco_common.trust.files import proof_of
from diloco_common.trust.identity import MAY, Identity, Scope
from diloco_server.shell import waits
from diloco_server.shell.access import Callers
from diloco_server.shell.quotas import (
    KEPT,
    SHOWN_BYTES,
    OpenPushes,
    Places,
    Rate,
    Takers,
    connections_allowed,
    connections_wanted,
)
from diloco_server.shell.waits import Bodies, Outgoing, Unread
from waiting import DEADLINE_S, until_async


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class Reader:
    def __init__(self, bodies: Bodies) -> None:
        self.is_read = False
        self.came = asyncio.Event()
        self.task = asyncio.create_task(self._read(bodies))

    async def _read(self, bodies: Bodies) -> None:
        async with bodies.place() as wait:
            self.is_read = True
            deadline = asyncio.get_running_loop().time() + DEADLINE_S
            await wait.until(deadline, Busy("late"), self.came.wait)


async def test_few_messages_are_read_at_once_and_the_newest_caller_is_next() -> None:
    bodies = Bodies()
    callers = [Reader(bodies) for _ in range(waits.BODIES_AT_ONCE + 3)]
    await turns()
    assert [c.is_read for c in callers] == [True] * waits.BODIES_AT_ONCE + [False] * 3
    callers[0].came.set()
    await turns()
    assert [c.is_read for c in callers[-3:]] == [False, False, True]
    for caller in callers:
        caller.came.set()
    await asyncio.gather(*(c.task for c in callers))
    after = Reader(bodies)
    await turns()
    assert after.is_read, "all places came back"
    after.task.cancel()


async def test_who_sends_for_long_makes_room_only_where_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "BODY_SURE_S", 0.0)
    bodies = Bodies()
    slow = [Reader(bodies) for _ in range(waits.BODIES_AT_ONCE)]
    await turns()
    assert not any(c.task.done() for c in slow)
    newcomer = Reader(bodies)
    with pytest.raises(Busy, match="others wait"):
        await slow[0].task
    await turns()
    assert newcomer.is_read
    assert not any(c.task.done() for c in slow[1:])
    for caller in (*slow[1:], newcomer):
        caller.task.cancel()


async def test_with_too_many_waiting_the_one_that_waits_for_longest_is_told_to_come_again(monkeypatch) -> None:
    monkeypatch.setattr(waits, "BODIES_WAITING_MAX", 2)
    bodies = Bodies()
    callers = [Reader(bodies) for _ in range(waits.BODIES_AT_ONCE + 3)]
    await turns()
    with pytest.raises(Busy, match="too many callers join at once"):
        await callers[waits.BODIES_AT_ONCE].task
    assert sum(c.task.done() for c in callers) == 1
    for caller in callers:
        caller.task.cancel()


async def test_a_caller_that_hangs_up_gives_its_place_back() -> None:
    bodies = Bodies()
    for _ in range(3):
        callers = [Reader(bodies) for _ in range(waits.BODIES_AT_ONCE + 2)]
        await turns()
        for caller in callers:
            caller.task.cancel()
        await turns()
    last = Reader(bodies)
    await turns()
    assert last.is_read
    last.task.cancel()


async def test_bytes_wait_in_line_until_they_fit() -> None:
    outgoing, log = Outgoing(100), list[str]()

    async def send(name: str, num_bytes: int, until: asyncio.Event) -> None:
        async with outgoing.held(num_bytes):
            log.append(name)
            await until.wait()

    taken = [asyncio.Event() for _ in range(4)]
    sizes = (60, 60, 30, 500)
    tasks = [asyncio.create_task(send("abcd"[i], size, taken[i])) for i, size in enumerate(sizes)]
    await turns()
    assert (log, outgoing.num_bytes) == (["a"], 60), "c would fit, but b was there before"
    taken[0].set()
    await turns()
    assert (log, outgoing.num_bytes) == (["a", "b", "c"], 90)
    tasks[1].cancel()
    taken[2].set()
    await turns()
    assert (log, outgoing.num_bytes) == (["a", "b", "c", "d"], 500), "more than all, but alone"
    tasks[3].cancel()
    await turns()
    assert outgoing.num_bytes == 0


class Version(list[bytes]):
    """Its chunks, and what a weak reference may be to."""


async def test_who_pauses_for_long_no_longer_keeps_a_version_in_memory() -> None:
    version = Version([b"1", b"2", b"3"])
    held, unread = weakref.ref(version), Unread(version, 0.0)
    del version
    assert unread.next(1 << 30) == b"1"  # these take a slow link for hours
    assert unread.next(0) == b"2"
    await until_async(lambda: held() is None, "the pause to be too long")
    with pytest.raises(Busy, match="not taken in time"):
        unread.next(0)


def granted(rate: Rate, account: str, times: list[float]) -> list[bool]:
    """Whether each of these events was let through."""

    def is_granted(now: float) -> bool:
        try:
            rate.take(account, now)
        except Busy:
            return False
        return True

    return [is_granted(now) for now in times]


@pytest.mark.parametrize(
    ("times", "let_through"),
    [
        ([0.0, 0.0, 0.0], [True, True, True]),
        ([0.0, 0.0, 0.0, 0.0, 0.4], [True, True, True, False, False]),
        ([0.0, 0.0, 0.0, 0.5, 0.5, 1.0], [True, True, True, True, False, True]),
        ([0.0, 0.0, 0.0, 100.0, 100.0, 100.0, 100.0], [True] * 6 + [False]),
    ],
    ids=["a burst", "and no more", "2 per second after it", "a rest earns one burst"],
)
def test_an_account_may_come_in_a_burst_and_then_at_a_rate(times: list[float], let_through: list[bool]) -> None:
    assert granted(Rate("joins", burst=3, per_s=2), "ann", times) == let_through


def test_accounts_without_number_cost_no_memory_and_forget_the_oldest() -> None:
    rate = Rate("joins", burst=1, per_s=1, accounts_max=10)
    for account in range(1000):
        assert granted(rate, str(account), [0.0]) == [True]
    assert granted(rate, "999", [0.0]) == [False], "it was heard last"
    assert granted(rate, "1", [0.0]) == [True], "forgotten"


def test_an_account_that_comes_too_often_loses_its_oldest_place() -> None:
    places = Places[str](each=2)
    assert [places.take("ann", name) for name in ("1", "2", "3", "4")] == [None, None, "1", "2"]
    assert places.take("ben", "5") is None, "that is its own account"
    assert (len(places), places.of("ann"), places.of("ben")) == (3, 2, 1)


def pushes(each: int = 4, together: int = 64, bytes_most: int = 100) -> OpenPushes[str]:
    return OpenPushes(each, together, bytes_most)


def begin(all_of_them: OpenPushes[str], account: str, push: str, fragment_id: int, num_bytes: int = 1) -> list[str]:
    """Open and announce a push. Answers which ones must end for it."""
    ended = [all_of_them.opened(account, push), all_of_them.announced(account, push, fragment_id, num_bytes)]
    return [push for push in ended if push is not None]


def test_a_later_push_of_a_fragment_ends_the_earlier_one() -> None:
    now_open = pushes()
    assert begin(now_open, "ann", "old", 7, num_bytes=60) == []
    assert begin(now_open, "ann", "new", 7, num_bytes=60) == ["old"], "its bytes count once"
    now_open.closed("ann", "old")  # which ends a moment later
    assert (len(now_open), now_open.bytes_held) == (1, 60)
    assert begin(now_open, "ann", "newer", 7) == ["new"]


def test_learners_on_thin_links_leave_places_to_the_others() -> None:
    """16 with four uploads each, which may all take minutes: whoever has none yet finds a place."""
    now_open = pushes(bytes_most=1 << 40)
    refused = 0
    for learner in range(16):
        for fragment in range(4):
            push = f"thin {learner} {fragment}"
            try:
                begin(now_open, f"thin {learner}", push, fragment)
            except Busy:
                refused += 1
                now_open.closed(f"thin {learner}", push)
    assert (len(now_open), refused) == (48 + 4, 12), "each of the last ones has its first place"
    for learner in range(12):
        begin(now_open, f"fast {learner}", f"push {learner}", 0)
    assert len(now_open) == 64


def test_announced_bytes_are_bounded_and_come_back() -> None:
    now_open = pushes(bytes_most=100)
    begin(now_open, "ann", "a", 1, num_bytes=70)
    now_open.opened("ben", "b")
    with pytest.raises(Busy, match="open pushes announced"):
        now_open.announced("ben", "b", 1, 31)
    now_open.closed("ann", "a")
    assert now_open.announced("ben", "b", 1, 31) is None
    now_open.closed("ben", "b")
    assert (now_open.bytes_held, len(now_open)) == (0, 0)


def test_one_push_always_fits_if_there_is_no_other() -> None:
    now_open = pushes(bytes_most=100)
    assert begin(now_open, "ann", "larger than all that is allowed", 1, num_bytes=1000) == []


def pulled(takers: Takers, account: str, num_bytes: int) -> bool:
    """A pull that is taken whole. Whether it had large chunks."""
    with takers.pulling(account) as pull:
        pull.num_bytes = num_bytes
    return pull.is_trusted


def test_large_chunks_are_for_who_has_shown_that_it_reads() -> None:
    takers = Takers()
    assert not pulled(takers, "ann", SHOWN_BYTES)
    assert not pulled(takers, "ann", SHOWN_BYTES + 1), "a transport takes so many for who reads nothing"
    assert pulled(takers, "ann", 1)
    assert pulled(takers, "ann", 1)
    assert not pulled(takers, "ben", 1)


@pytest.mark.parametrize(
    ("shard", "files", "wanted", "allowed"),
    [
        ({}, 1 << 20, 4096, 4096),
        ({}, 4544, 4096, 4096),
        ({}, 1024, 4096, 1024 - KEPT),
        ({}, 256, 4096, 16),
        ({"max_learners": 10}, 1024, 40, 40),
        ({"max_learners": 25_000}, 20_000, 100_000, 20_000 - KEPT),
    ],
    ids=["as a rule", "just enough", "few", "hardly any", "few learners", "more than there are"],
)
def test_connections_leave_files_for_the_shard(shard: dict[str, int], files: int, wanted: int, allowed: int) -> None:
    settings = make_settings(shard=shard).shard
    assert (connections_wanted(settings), connections_allowed(settings, files)) == (wanted, allowed)


@pytest.fixture
def run(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path / "certs")


def pem(run: Certificates, who: str) -> bytes:
    return (run.issue(who) / "cert.pem").read_bytes()


def test_where_nothing_is_asked_for_callers_are_who_they_say(run: Certificates) -> None:
    caller = Callers(lambda: 0.0).proven(Identity("local", "b"), pem(run, "learner/a"))
    assert caller == Identity("local", "b")
    caller.check_may("Join")


@pytest.mark.parametrize("scope", list(Scope))
def test_a_scope_may_what_the_table_says(run: Certificates, scope: Scope) -> None:
    proof = proof_of(pem(run, f"{scope.value}/1"))
    caller = Identity("local", proof=proof)
    for call in ("Join", "Observe", "Attend", "Push", "Pull", "Leave", "Drain", "Checkpoint"):
        if call in MAY[scope]:
            caller.check_may(call)
        else:
            with pytest.raises(WrongIdentity):
                caller.check_may(call)


@pytest.mark.parametrize(
    ("who", "claimed"), [("learner/a", "b"), ("observer/a", "a"), ("admin/a", "a"), ("shard/0", "0")]
)
def test_a_call_is_of_whom_the_certificate_names(run: Certificates, who: str, claimed: str) -> None:
    callers = Callers(lambda: 0.0, needs_certificate=True)
    with pytest.raises(WrongIdentity):
        callers.proven(Identity("local", claimed), pem(run, who))


def test_what_has_expired_proves_nothing(run: Certificates) -> None:
    certificate = pem(run, "learner/a")
    expires = proof_of(certificate).expires
    clock = [expires - 1]
    callers = Callers(lambda: clock[0], needs_certificate=True)
    callers.proven(Identity("local", "a"), certificate)

    clock[0] = expires
    with pytest.raises(Expired, match="issue another"):
        callers.proven(Identity("local", "a"), certificate)


def test_an_open_call_ends_when_its_proof_expires(run: Certificates) -> None:
    proof = proof_of(pem(run, "learner/a"))
    callers = Callers(lambda: proof.expires - 0.01, needs_certificate=True)

    async def call(*, revokes: bool) -> None:
        async with callers.holding(Identity("local", "a", 7, proof=proof)):
            try:
                await asyncio.Event().wait()
            finally:  # its time is up, and it has not ended yet
                if revokes:
                    callers.revoke(frozenset({proof.serial}))

    for revokes, ends in ((False, Expired), (True, Revoked)):
        with pytest.raises(ends):
            asyncio.run(asyncio.wait_for(call(revokes=revokes), 20))


def test_open_calls_of_the_revoked_end_and_no_others(run: Certificates) -> None:
    proofs = {name: proof_of(pem(run, f"learner/{name}")) for name in "ab"}
    callers = Callers(lambda: 0.0, needs_certificate=True)

    async def call(name: str, generation: int) -> None:
        async with callers.holding(Identity("local", name, generation, proof=proofs[name])):
            await asyncio.Event().wait()

    async def scene() -> None:
        *revoked, other = [asyncio.create_task(call(*of)) for of in (("a", 7), ("a", 7), ("b", 8))]
        await asyncio.sleep(0)
        callers.revoke(frozenset({proofs["a"].serial}))
        ended = await asyncio.wait_for(asyncio.gather(*revoked, return_exceptions=True), 120)
        assert [type(error) for error in ended] == [Revoked] * 2
        assert not other.done()
        other.cancel()

    asyncio.run(scene())
