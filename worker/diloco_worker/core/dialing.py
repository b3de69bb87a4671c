"""When a learner dials its shard again after a refusal or silence.

join --lease--> attend --broken--> wait --> attend ...
                  |---- lease over --> wait --> join
                  |---- refused for good: join, and tell the others (agreement.py decides what ends a learner)
"""

from __future__ import annotations

from dataclasses import dataclass

from diloco_common import errors
from diloco_common.errors import ConfigError, DilocoError, Refusal, Superseded, Unavailable
from diloco_common.wire.calls import SAY_EVERY_S, backoff_s

JOIN_AGAIN = (errors.NotJoined, errors.LeaseExpired, errors.StaleGeneration, errors.WrongEpoch)
"""The lease is over, or a repeated Join of this process replaced it: join again."""
TRY_AGAIN = (errors.Draining, errors.Busy, errors.NotSeeded, errors.TornUpload)
ALWAYS = (Superseded, ConfigError, errors.ManifestMismatch)
"""Objections even if the shard accepted this learner before: another process is this learner now, or the shard has
changed. Unknown errors count as such, too."""
STAYS = (errors.ForeignCertificate, errors.WrongHost, errors.TlsMismatch, errors.NotAShard)
"""Only other settings or files can fix these. An expired certificate is not among them: it may be renewed while the
learner runs, or a clock corrected."""
STAYS_S = 3.0
"""Seconds for which such a failure must stay the same: long enough to look for the cause twice."""
REVOKED_S = 60.0
"""Seconds until a learner that was revoked in training ends: the time to give it another certificate."""
STEADY_S = 5.0
"""After a connection of this length, the next dial does not wait as long as earlier failures would demand."""
GONE_S = 10.0
"""After this time with nobody listening, a shard is not just restarting: a learner that ends does not wait for it."""


@dataclass(frozen=True, slots=True)
class Redial:
    """The connection ended: dial again after `after_s` seconds."""

    after_s: float
    is_lease_over: bool
    """Whether to join; otherwise attend under the current lease."""
    is_news: bool
    """Whether to log it: the first time, and then now and then."""
    why: str
    is_objection: bool = False
    """Whether this shard would refuse every further try."""


class Dialing:
    """The attempts of one learner to reach one shard. Time is passed in, in seconds."""

    def __init__(self) -> None:
        self._attempt = 0  # attempts since a connection was good
        self._silent_s = 0.0  # waited since the last log line
        self._was_up = False
        self.refused_since: float | None = None
        """Time since when nobody listens there; None: somebody does, or it is not known."""
        self._began = 0.0
        self._had_lease = False
        self._same_since = 0.0
        self._same: type[DilocoError] | None = None  # of STAYS, or Revoked: the error of every attempt since then

    def begin(self, now: float, *, has_lease: bool) -> None:
        """An attempt begins: to join, if there is no lease, and to attend."""
        self._began, self._had_lease = now, has_lease

    def is_up(self) -> None:
        """The shard answers on the control stream."""
        self._was_up, self.refused_since, self._same = True, None, None

    def ended(self, error: DilocoError | None, now: float, jitter: float) -> Redial:
        """The attempt, or the connection that came of it, ended. `error` is None if the shard ended the stream.

        `jitter` is drawn uniformly from [0, 1).
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
        # A shard that ends a lease is reachable: join again without the waits for a silent one.
        if (isinstance(error, JOIN_AGAIN) and self._had_lease) or now - self._began > STEADY_S:
            self._attempt, self._silent_s = 0, 0.0
        is_news = self._attempt == 0 or self._silent_s >= SAY_EVERY_S
        if is_news:
            self._silent_s = 0.0
        after_s = backoff_s(self._attempt, jitter)
        self._attempt += 1
        self._silent_s += after_s
        return Redial(after_s, is_lease_over, is_news, why, is_objection)

    def _is_here_to_stay(self, error: DilocoError | None, now: float) -> bool:
        """Whether waiting will not help. After a connection was up, only a revocation is such an error: for others the
        learner trains on and logs the problem."""
        kind = type(error) if isinstance(error, (*STAYS, errors.Revoked)) else None
        if kind is None or kind is not self._same:
            self._same, self._same_since = kind, now
        lasted_s = now - self._same_since
        if kind is errors.Revoked:
            return lasted_s >= REVOKED_S
        return kind is not None and not self._was_up and lasted_s >= STAYS_S
