"""What systemd hears of a process."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from diloco_common.observe import http


def test_systemd_hears_from_a_process_for_as_long_as_it_makes_progress(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(0.0)
        environ = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "4000", "WATCHDOG_PID": str(os.getpid())}
        looks = [True, True, False, True]

        def is_alive() -> bool:
            if not looks:
                raise EOFError
            return looks.pop(0)

        with pytest.raises(EOFError):
            asyncio.run(http.feed_watchdog(is_alive, environ))
        assert [systemd.recv(64) for _ in range(3)] == [b"WATCHDOG=1"] * 3
        with pytest.raises(BlockingIOError):
            systemd.recv(64)


@pytest.mark.parametrize(
    "environ", [{}, {"NOTIFY_SOCKET": "/x"}, {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "9", "WATCHDOG_PID": "1"}]
)
def test_where_nobody_listens_nothing_is_said(environ: dict[str, str]) -> None:
    asyncio.run(asyncio.wait_for(http.feed_watchdog(lambda: True, environ), 5.0))
