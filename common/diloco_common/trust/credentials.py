"""How to reach shards: their addresses, and the credentials of a caller.

All files are read again when they change, so a learner may run longer than its certificate is valid. An address may be
`@FILE`, the address file of a shard that may come back on another machine: the shard writes it atomically after binding
its ports (`--address-file`).
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path

from diloco_common.errors import ConfigError, WrongCall, shown
from diloco_common.ports import Unavailable
from diloco_common.settings import SecuritySettings
from diloco_common.trust.files import Stamp, TlsFiles, TlsFolder, read_bearer_token, stamp_of
from diloco_common.trust.identity import Scope, Subject, check_learner_id
from diloco_common.wire.addresses import parse_address, read_address

FILE_MARK = "@"
_WORD = re.compile(r"[!-~]+")
MISSING: Stamp = (None,)


DRAWN = secrets.token_hex(3)
"""Random part of generated learner names, one per process: containers may share host name and process id."""


class Credentials:
    def __init__(self, tls: Path | None = None, token: str | Path | None = None) -> None:
        """`tls`: a folder of `diloco certs issue`. `token`: the bearer token, or a file that holds it.
        Raises ConfigError, SecretExposed, and WrongCall for a token that no header can carry."""
        if isinstance(token, str) and not _WORD.fullmatch(token):
            raise WrongCall("token= is not one word of plain ASCII: give the bearer token")  # do not quote a secret
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
        """Like `tls`, for callers that know that `security.tls` is set."""
        files = self.tls()
        assert files is not None, "security.tls is set"
        return files

    def token(self) -> str | None:
        """The newest token; the previous one if the file is gone or damaged."""
        if self._token_file is not None and stamp_of([self._token_file]) != self._token_stamp:
            with contextlib.suppress(ConfigError):  # being written, or gone: the shard says if that matters
                self._read_token(self._token_file)
        return self._token

    def learner_id(self, wanted: str, run_id: str) -> str:
        """The id to join with: the certificate's, if any; else `wanted`; else host name, process id and a random part.
        Raises ConfigError if the certificate is for another id, and BadRequest."""
        files = self.tls()
        subject = None if files is None else files.subject
        if files is None or subject is None:
            name = wanted or f"{socket.gethostname()[:40]}-{os.getpid()}-{DRAWN}"
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


def addresses_of(shards: str | Sequence[str]) -> list[str]:
    """The addresses of all shards of a run, or their address files, each once. Raises ConfigError."""
    if not isinstance(shards, list | tuple | set | frozenset | str) or not all(isinstance(a, str) for a in shards):
        raise WrongCall(f"shards is {shown(shards)}: give addresses, such as ps-0:50051,ps-1:50051, or a list of them")
    named = shards.split(",") if isinstance(shards, str) else list(shards)
    stripped = [a.strip() for a in named if a.strip()]
    addresses = [a if a.startswith(FILE_MARK) else str(parse_address(a)) for a in stripped]
    if not addresses:
        raise ConfigError("no shard addresses given; name all shards, such as ps-0:50051,ps-1:50051")
    twice = sorted({a for a in addresses if addresses.count(a) > 1})
    if twice:
        raise ConfigError(f"shard {twice[0]} is named twice; name every shard once")
    return addresses


class Whereabouts:
    """The address of one shard. An address file is read again before each call, if it has changed."""

    def __init__(self, given: str) -> None:
        """`given`: host:port or `@FILE`."""
        self._file = Path(given[len(FILE_MARK) :]) if given.startswith(FILE_MARK) else None
        self._address = "" if self._file is not None else given
        self._stamp: Stamp = ()

    def now(self) -> str:
        """host:port; while the file is gone, the last known one, since the shard may still be there.
        Raises Unavailable if the shard has never had an address."""
        if self._file is not None and (stamp := stamp_of([self._file])) != self._stamp:
            found = read_address(self._file)
            if found is not None and found.role == "shard" and found.grpc:
                self._address = found.grpc
                self._stamp = stamp  # only after success: a failed read is repeated even if the file does not change
            elif stamp == MISSING:
                self._stamp = stamp
        if not self._address:
            raise Unavailable(f"{self._file} names no address: the shard that writes it has not started yet")
        return self._address
