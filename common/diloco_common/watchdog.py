"""Tells systemd that this process makes progress, where a unit has `WatchdogSec`. Without that, nothing happens."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Mapping

_AGAIN_WITHIN = 4
"""The word is given so many times in the time that systemd waits for it."""


async def feed(is_alive: Callable[[], bool], environ: Mapping[str, str] = os.environ) -> None:
    """Say so for as long as it is true, until cancelled. Returns at once if nobody wants to hear it."""
    address, watched = environ.get("NOTIFY_SOCKET"), environ.get("WATCHDOG_USEC")
    if not address or not watched or environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return
    if address.startswith("@"):  # Linux's abstract namespace
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.setblocking(False)
        while True:
            if is_alive():
                with contextlib.suppress(OSError):  # systemd is busy, or being replaced: the next word reaches it
                    systemd.sendto(b"WATCHDOG=1", address)
            await asyncio.sleep(int(watched) / 1e6 / _AGAIN_WITHIN)
