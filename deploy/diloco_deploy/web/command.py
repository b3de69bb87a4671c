"""`diloco web`: the live page of a run, from any machine that reaches its shards."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path

from diloco_common.errors import EXIT_OK, CannotConnect
from diloco_common.observe.http import check_http_is_meant
from diloco_common.settings import SecuritySettings
from diloco_common.trust.security import read_bearer_token
from diloco_deploy.own_certificates import OwnCertificates
from diloco_deploy.web.credentials import Credentials, door_of
from diloco_deploy.web.live_page import LivePage
from diloco_deploy.web.members import Watched, given, in_folder

LISTEN = "127.0.0.1:7171"


def show(
    folder: Path, shards: Sequence[str], listen: str, security: SecuritySettings, *, tls: Path | None,
    certificate: Path | None,
) -> int:  # fmt: skip
    """Serve until interrupted. `shards`: their HTTP addresses; none: those of the cluster in the folder.

    Raises:
        ConfigError: an address makes no sense, other machines would reach the page unprotected, or a file is wrong.
        CannotConnect: no shards are given, and there is no such folder.
        InUse: the port is taken.
    """
    if not shards and not folder.is_dir():
        raise CannotConnect(
            f"no cluster is running in {folder}: there is no such folder; give the --folder or --config of a run, or "
            "--shards host:port, or start one with `diloco up`"
        )
    tls = tls or (None if shards else OwnCertificates.observer_in(folder))
    page = page_of(listen, given(shards) if shards else in_folder(folder), security, tls, certificate)
    return asyncio.run(_serve(page, page_is_of=", ".join(shards) or str(folder)))


def page_of(
    listen: str, watched: Watched, security: SecuritySettings, tls: Path | None, certificate: Path | None = None
) -> LivePage:
    """A page that shows no more than its viewers may see: whoever asks with a secret also asks for one.

    Args:
        listen: host:port.
        tls: folder of an observer's or admin's certificate, to ask shards with; None: they are asked in plaintext.
        certificate: folder of the certificate to serve with; None: in plaintext, which beyond this machine needs a
            token or `security.insecure`.

    Raises ConfigError, SecretExposed.
    """
    # Neither the run's own certificates nor its key for tokens protect this page.
    check_http_is_meant("--listen", listen, security.model_copy(update={"tls": certificate, "token_key": None}))
    credentials = Credentials(tls, read_bearer_token(security))
    has_secret = tls is not None or credentials.token is not None or security.token_key is not None
    asks_key = has_secret or certificate is not None
    door = None if certificate is None else door_of(certificate, security.revoked)
    return LivePage(listen, watched, credentials, asks_key=asks_key, door=door)


async def _serve(page: LivePage, page_is_of: str) -> int:
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ending.set)
    print(f"the live page of {page_is_of}: {await page.start()}", flush=True)
    try:
        await ending.wait()
    finally:
        await page.stop()
    return EXIT_OK
