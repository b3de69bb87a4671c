"""What a caller proves itself with: TLS files and a bearer token. Both are read again when they change.

So a learner that runs for longer than its certificate is valid goes on with the next one.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from diloco_common.errors import ConfigError
from diloco_common.settings import SecuritySettings
from diloco_common.trust.identity import Scope, Subject, check_learner_id
from diloco_common.trust.security import read_bearer_token
from diloco_common.trust.tls import Stamp, TlsFiles, TlsFolder, stamp_of


class Credentials:
    """Of one caller, for all shards."""

    def __init__(self, tls: Path | None = None, token: str | Path | None = None) -> None:
        """`tls`: a folder of `diloco certs issue`. `token`: the bearer token, or the file that holds it.

        Raises ConfigError, SecretExposed.
        """
        self._tls = None if tls is None else TlsFolder(tls)
        self._token_file = token if isinstance(token, Path) else None
        self._token = None if isinstance(token, Path) else token
        self._token_stamp: Stamp = ()
        if self._token_file is not None:
            self._read_token(self._token_file)

    def tls(self) -> TlsFiles | None:
        """The newest files; the same object as before if nothing changed. None: plaintext."""
        if self._tls is None:
            return None
        self._tls.refresh()
        return self._tls.files

    def files(self) -> TlsFiles:
        """The same, where there are some."""
        files = self.tls()
        assert files is not None, "security.tls is set"
        return files

    def token(self) -> str | None:
        """The newest token; what was read before if the file is gone or damaged."""
        if self._token_file is not None and stamp_of([self._token_file]) != self._token_stamp:
            with contextlib.suppress(ConfigError):  # it is being written, or gone: the shard will say if that matters
                self._read_token(self._token_file)
        return self._token

    def learner_id(self, wanted: str, run_id: str) -> str:
        """Under which id to join: the certificate's, if there is one; else what is wanted; else host name and process
        id. Raises ConfigError if the certificate says otherwise, and BadLearnerId."""
        files = self.tls()
        subject = None if files is None else files.subject
        if files is None or subject is None:
            name = wanted or f"{socket.gethostname()[:40]}-{os.getpid()}"
            check_learner_id(name)
            return name
        if subject != Subject(run_id, Scope.LEARNER, wanted or subject.name):
            who = f"learner {wanted or '?'} of run {run_id}"
            raise ConfigError(
                f"security.tls (tls= of join): the certificate in {files.folder} is of {subject.uri}, and this is {who}"
            )
        return subject.name

    def _read_token(self, path: Path) -> None:
        stamp = stamp_of([path])
        self._token = read_bearer_token(SecuritySettings(token_file=path))
        self._token_stamp = stamp
