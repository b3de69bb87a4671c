"""When a learner dials its shard again, and how long it waits before."""

from __future__ import annotations

import pytest

from diloco_common.errors import (
    CertificateNotValid,
    DilocoError,
    ForeignCertificate,
    LeaseExpired,
    ManifestMismatch,
    Revoked,
    StaleGeneration,
    Superseded,
    WrongHost,
    WrongRun,
)
from diloco_common.ports import Unavailable
from diloco_common.wire.calls import FIRST_S, LONG_S, SETTLE_S, backoff_s
from diloco_worker.core.connection import STAYS_S, Dialing, Redial


@pytest.mark.parametrize(("after_s", "ends"), [(LONG_S - 0.1, False), (LONG_S, True)])
def test_a_learner_that_is_revoked_while_it_trains_ends_unless_it_gets_another_certificate(
    after_s: float, ends: bool
) -> None:
    dialing = Dialing()
    dialing.is_up()
    for now in (0.0, after_s):
        dialing.begin(now, has_lease=False)
        redial = dialing.ended(Revoked("its certificate was revoked"), now, 0.0)
    assert redial.is_objection is ends


@pytest.mark.parametrize(
    ("attempt", "jitter", "seconds"),
    [(0, 0.0, 0.1), (0, 1.0, 0.2), (8, 0.0, 0.82), (9, 1.0, 2.0), (9, 0.0, 1.0)],
)
def test_the_wait_grows_to_a_bound_and_half_of_it_is_chance(attempt: int, jitter: float, seconds: float) -> None:
    """After 10 s of failures, the ninth, it is a second at least."""
    assert backoff_s(attempt, jitter) == pytest.approx(seconds, rel=1e-2)


LEASE_OVER, FOREVER = LeaseExpired("silent"), WrongRun("another run")
CUT = Unavailable("unavailable: cut off")


def attempts(*errors: DilocoError | None, lasting_s: float = 0.0, has_lease: bool = True) -> Redial:
    """Attempts that end with these errors, one after the other; what becomes of the last one."""
    dialing, now = Dialing(), 0.0
    for error in errors:
        dialing.begin(now, has_lease=has_lease)
        redial = dialing.ended(error, now + lasting_s, 0.0)
        now += lasting_s + redial.after_s
    return redial


@pytest.mark.parametrize(
    ("error", "joins", "why"),
    [
        (None, False, "the stream ended"),
        (CUT, False, "unavailable: cut off"),
        (LEASE_OVER, True, "silent"),
        (StaleGeneration("cat", 1, 2), True, "generation 1 is over"),
    ],
)
def test_a_connection_that_ended_is_dialed_again_and_joined_where_the_lease_is_over(
    error: DilocoError | None, joins: bool, why: str
) -> None:
    redial = attempts(error)
    assert (redial.is_lease_over, redial.after_s) == (joins, FIRST_S / 2)
    assert why in redial.why


@pytest.mark.parametrize(
    ("errors", "waits"),
    [
        ((CUT,) * 4, 3),  # each wait is longer than the one before
        ((CUT, CUT, CUT, LEASE_OVER), 0),  # the shard answers: no need to wait for it
    ],
)
def test_waits_grow_until_the_shard_answers_that_the_lease_is_over(errors: tuple[DilocoError, ...], waits: int) -> None:
    assert attempts(*errors).after_s == backoff_s(waits, 0.0)


@pytest.mark.parametrize(("lasting_s", "waits"), [(SETTLE_S - 1, 3), (SETTLE_S + 1, 0)])
def test_a_connection_that_held_is_dialed_again_without_the_waits_before_it(lasting_s: float, waits: int) -> None:
    assert attempts(CUT, CUT, CUT, CUT, lasting_s=lasting_s).after_s == backoff_s(waits, 0.0)


SUPERSEDED, OTHER_MODEL = Superseded("another process is cat now"), ManifestMismatch("cut in another way")


@pytest.mark.parametrize(
    ("was_up", "error", "is_objection", "joins", "why"),
    [
        (False, FOREVER, True, False, "another run [WRONG_RUN]"),  # it is wrong from the start
        (True, FOREVER, False, False, "another run [WRONG_RUN]"),  # it came back as another one
        (True, SUPERSEDED, True, True, "another process"),
        (True, OTHER_MODEL, True, False, "cut in another way"),
        (True, LEASE_OVER, False, True, "silent"),
        (True, CUT, False, False, "cut off"),
    ],
)
def test_of_a_shard_that_was_up_few_words_are_objections(
    was_up: bool, error: DilocoError, is_objection: bool, joins: bool, why: str
) -> None:
    dialing = Dialing()
    dialing.begin(0.0, has_lease=True)
    if was_up:
        dialing.is_up()
    redial = dialing.ended(error, 1.0, 0.0)
    assert (redial.is_objection, redial.is_lease_over) == (is_objection, joins)
    assert why in redial.why


FOREIGN, HOST, EXPIRED = ForeignCertificate("of another"), WrongHost("no such name"), CertificateNotValid("too old")


@pytest.mark.parametrize(
    ("failures", "ends"),
    [
        ([(0.0, FOREIGN)], False),
        ([(0.0, FOREIGN), (STAYS_S - 0.1, FOREIGN)], False),
        ([(0.0, FOREIGN), (STAYS_S, FOREIGN)], True),
        ([(0.0, FOREIGN), (1.0, CUT), (STAYS_S, FOREIGN)], False),
        ([(0.0, HOST), (STAYS_S, FOREIGN)], False),
        ([(0.0, EXPIRED), (100.0, EXPIRED)], False),
        ([(0.0, CUT), (100.0, CUT)], False),
    ],
    ids=["once", "not for long", "it stays", "another in between", "two causes", "it may be renewed", "the network"],
)
def test_what_waiting_does_not_mend_is_an_objection_once_it_has_stayed(
    failures: list[tuple[float, DilocoError]], ends: bool
) -> None:
    dialing = Dialing()
    *earlier, last = failures
    for now, error in earlier:
        dialing.begin(now, has_lease=False)
        dialing.ended(error, now, 0.0)
    dialing.begin(last[0], has_lease=False)
    redial = dialing.ended(last[1], last[0], 0.0)
    assert (redial.is_objection, redial.why) == (ends, str(last[1]))


@pytest.mark.parametrize("error", [FOREIGN, HOST])
def test_a_learner_that_was_up_goes_on_whatever_becomes_of_its_certificate(error: DilocoError) -> None:
    dialing = Dialing()
    dialing.is_up()
    for now in (0.0, 10.0, 100.0):
        dialing.begin(now, has_lease=False)
        redial = dialing.ended(error, now, 0.0)
        assert str(error) in redial.why
        assert not redial.is_objection
