"""What the page's server shows to shards, and to viewers: read again when the files change."""

from __future__ import annotations

import contextlib
from pathlib import Path

from diloco_common.errors import ConfigError
from diloco_common.observe.http_tls import TlsDoor
from diloco_common.trust.identity import Proof
from diloco_common.trust.revocations import REVOKED, DenyList
from diloco_common.trust.tls import TlsFiles, TlsFolder
from diloco_deploy.cluster.asking import Asker


class Credentials:
    """Owned by one event loop."""

    def __init__(self, tls: Path | None, token: str | None) -> None:
        """`tls`: folder with the certificate of an observer or admin; shards are asked over TLS then.

        Raises ConfigError, SecretExposed.
        """
        self.tls, self.token = tls, token
        self._folder = None if tls is None else TlsFolder(tls, needs_pair=True)
        self._asker = Asker(tls, token)
        self._is_old = False  # there are newer files

    def asker(self) -> Asker:
        """To ask shards with, now. Files that cannot be used change nothing: they may be half written."""
        if self._folder is not None:
            self._is_old |= self._folder.refresh()
        if self._is_old:
            with contextlib.suppress(ConfigError):
                self._asker = Asker(self.tls, self.token)
                self._is_old = False
        return self._asker


def door_of(certificate: Path, revoked: Path | None) -> TlsDoor:
    """Serve with the certificate in a folder; its ca.pem says who are observers and admins.

    `revoked`: a deny-list other than the one in the folder. Raises ConfigError, SecretExposed.
    """
    folder = TlsFolder(certificate, needs_pair=True)
    deny_list = DenyList(revoked or certificate / REVOKED, is_required=revoked is not None)

    def files() -> TlsFiles:
        folder.refresh()
        return folder.files

    def is_welcome(proof: Proof) -> bool:
        deny_list.refresh()
        return proof.serial not in deny_list.serials

    return TlsDoor(files, is_welcome)
