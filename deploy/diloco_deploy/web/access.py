"""Who may look at the live page.

Three ways, whatever the address: nothing is asked, as the shards ask for nothing; a key,
as a cookie or a bearer token; or, over TLS, the certificate of an observer or admin.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable

from diloco_common.wire.addresses import is_no_name

_SESSION = b"diloco live page"


class Access:
    """Decides on one request."""

    def __init__(
        self, key: str | None, token: str | None = None, admits: Callable[[bytes | None], bool] | None = None
    ) -> None:
        """`key`: what viewers must know; None: nothing is asked. `token`: the run's; it does as well.

        `admits`: whether a certificate is enough.
        """
        self._key, self._admits = key, admits
        self._words = [word.encode() for word in (key, token) if word]
        session = "" if key is None else hmac.new(key.encode(), _SESSION, hashlib.sha256).hexdigest()
        self.session = session
        """What the cookie of a viewer holds. The key itself is not in it."""

    def is_key(self, word: str) -> bool:
        given = word.strip().encode()
        return self._key is not None and any(hmac.compare_digest(given, good) for good in self._words)

    def may_look(self, certificate: bytes | None, authorization: str, cookie: str) -> bool:
        """Whether to show the run to a caller with these: in PEM, the header, the value of our cookie."""
        if self._key is None or (self._admits is not None and self._admits(certificate)):
            return True
        kind, _, word = authorization.partition(" ")
        if kind.lower() == "bearer" and self.is_key(word):
            return True
        return hmac.compare_digest(cookie.encode(), self.session.encode())

    def answers_to(self, host: str) -> bool:
        """Whether a request with this Host header is meant for us. Where a key is asked, any is: it has no cookie."""
        return self._key is not None or is_no_name(host)
