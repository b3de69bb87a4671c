"""When a learner dials its shard again: after which refusals, after which silence, and how soon.

join --lease--> attend --broken--> wait --> attend ...
                  |---- lease over --> wait --> join
                  |---- refused for good: join, and tell the others (agreement.py says what ends a learner)
"""

from __future__ import annotations

from dataclasses import dataclass

from diloco_common import errors
from diloco_common.errors import ConfigError, DilocoError, Refusal, Superseded, Unavailable
from diloco_common.wire.calls import backoff_s

JOIN_AGAIN = (errors.NotJoined, errors.LeaseExpired, errors.Stalled, errors.StaleGeneration, errors.WrongEpoch)
"""The lease is over, or a repeated Join of this very process replaced it; a new one is to be had."""
TRY_AGAIN = (errors.Draining, errors.Busy, errors.NotSeeded, errors.TornUpload)
"""Not now."""
ALWAYS = (Superseded, ConfigError, errors.ManifestMismatch)
"""Also of a shard that was there before: another process is this learner now, or it is no longer the shard it was. So
is an error that nobody thought of."""
STAYS = (errors.ForeignCertificate, errors.WrongHost, errors.TlsMismatch, errors.NotAShard)
"""Only other settings or files can mend it. An expired certificate is waited for: it may be renewed under way, and a
clock may be set."""
STAYS_S = 3.0
"""Such a failure is believed once it was the same for so long: long enough for the cause to be looked for twice."""
REVOKED_S = 60.0
"""A learner that is revoked while it trains ends after so long. Whoever gives it another certificate has that time."""
STEADY_S = 5.0
"""A connection that held for so long is dialed again without the wait that its predecessors earned."""
GONE_S = 10.0
"""A shard at which nobody has listened for so long is not starting again: a learner that ends does not wait for it."""
ANNOUNCE_WAIT_S = 10.0
"""How often a learner that cannot reach a shard says so."""


@dataclass(frozen=True, slots=True)
class Redial:
    """The connection ended: dial again."""

    after_s: float
    is_lease_over: bool
    """Join, rather than attend under the lease that there is."""
    is_news: bool
    """Whether to say so: at first, and then from time to time."""
    why: str
    is_objection: bool = False
    """Trying again would not change it, as far as this shard is concerned."""


class Dialing:
    """The attempts of one learner to reach one shard. Time is passed in, in seconds."""

    def __init__(self) -> None:
        self._attempt = 0  # since a connection was good
        self._silent_s = 0.0  # waited since that was said
        self._was_up = False
        self.refused_since: float | None = None
        """Since when nobody listens there; None: somebody does, or nothing is known."""
        self._began = 0.0
        self._had_lease = False
        self._same_since = 0.0
        self._same: type[DilocoError] | None = None  # of STAYS, or Revoked, as it ended every attempt since then

    def begin(self, now: float, *, has_lease: bool) -> None:
        """An attempt begins: to join if there is no lease, and to attend."""
        self._began, self._had_lease = now, has_lease

    def is_up(self) -> None:
        """The shard speaks on the control stream."""
        self._was_up, self.refused_since, self._same = True, None, None

    def ended(self, error: DilocoError | None, now: float, jitter: float) -> Redial:
        """The attempt, or the connection that it led to, has ended. None: the shard ended the stream.

        `jitter` is drawn evenly from [0, 1).
        """
        why = "the stream ended" if error is None else str(error)
        is_refused = isinstance(error, Unavailable) and error.is_refused
        self.refused_since = (now if self.refused_since is None else self.refused_since) if is_refused else None
        is_for_good = isinstance(error, Refusal | ConfigError) and not isinstance(error, JOIN_AGAIN + TRY_AGAIN)
        is_lease_over = isinstance(error, (*JOIN_AGAIN, Superseded))
        if is_for_good and error is not None:
            why = f"{error} [{error.code}]"
        stays = self._is_here_to_stay(error, now) or (is_for_good and not self._was_up)  # wrong from the start
        is_objection = stays or isinstance(error, ALWAYS) or type(error) is DilocoError
        # A shard that ends a lease answers: a new one is to be had without the waits of its silence.
        if (isinstance(error, JOIN_AGAIN) and self._had_lease) or now - self._began > STEADY_S:
            self._attempt, self._silent_s = 0, 0.0
        is_news = self._attempt == 0 or self._silent_s >= ANNOUNCE_WAIT_S
        if is_news:
            self._silent_s = 0.0
        after_s = backoff_s(self._attempt, jitter)
        self._attempt += 1
        self._silent_s += after_s
        return Redial(after_s, is_lease_over, is_news, why, is_objection)

    def _is_here_to_stay(self, error: DilocoError | None, now: float) -> bool:
        """Whether waiting will not help. Once a connection was up, a learner trains on and says what is wrong, unless
        it is revoked."""
        kind = type(error) if isinstance(error, (*STAYS, errors.Revoked)) else None
        if kind is None or kind is not self._same:
            self._same, self._same_since = kind, now
        lasted_s = now - self._same_since
        if kind is errors.Revoked:
            return lasted_s >= REVOKED_S
        return kind is not None and not self._was_up and lasted_s >= STAYS_S
