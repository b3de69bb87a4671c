"""Machines for versus.py: network namespaces around a hub, each behind a link of its own. Needs root.

A link is a veth pair or, where packets should take time, two TUN devices with a forwarder between them (`LongLink` of
the fault tests). Both ends of every link are shaped by `tc tbf`. Machines have host names and know each other's. A
process on a machine has a process namespace of its own, and whatever it starts dies with it. Everything that was made
is taken away at the end, also after a failure.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Self

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "faults"))
from networks import LongLink, NotPossible

INSIDE = "eth0"
"""Name of its link's device on each machine."""


@dataclass(frozen=True)
class Link:
    """Of each machine to the hub, both ways."""

    rate: str
    burst: str
    delay_s: float = 0.0
    """Of the link, one way. Two machines are two links apart, so there and back takes four times that."""
    words: str = ""


LINKS = {
    "1gbit": Link("1gbit", "1mb", words="1 Gbit/s"),
    "100mbit": Link("100mbit", "256kb", words="100 Mbit/s"),
    "20mbit": Link("20mbit", "64kb", 0.01, words="20 Mbit/s, 40 ms"),
}


class Machines:
    """`count` machines with the same link each."""

    def __init__(self, count: int, link: Link) -> None:
        self._link = link
        self._names = [f"versus-{os.getpid()}-{i}" for i in range(count)]
        self._hub = f"versus-{os.getpid()}-hub"
        self.hosts = tuple(f"10.77.{i + 1}.2" for i in range(count))
        self._stack = ExitStack()
        self._hosts_file = Path()

    def __enter__(self) -> Self:
        try:
            self._hosts_file = Path(self._stack.enter_context(TemporaryDirectory()), "hosts")
            known = [("127.0.0.1", "localhost"), *((host, f"machine-{i}") for i, host in enumerate(self.hosts))]
            self._hosts_file.write_text("".join(f"{address} {name}\n" for address, name in known))
            for name in (self._hub, *self._names):
                _run("ip", "netns", "add", name)
                self._stack.callback(_run, "ip", "netns", "del", name)
                _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("nsenter", f"--net=/run/netns/{self._hub}", "sysctl", "-qw", "net.ipv4.ip_forward=1")
            for i in range(len(self._names)):
                self._plug_in(i)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def command(self, machine: int, command: list[str]) -> list[str]:
        """What runs `command` on a machine. Killing it kills all that it has started there."""
        return [
            "nsenter", f"--net=/run/netns/{self._names[machine]}",
            "unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc",
            "bash", "-ec", 'hostname "$0"; mount --bind "$1" /etc/hosts; shift; exec "$@"',
            f"machine-{machine}", str(self._hosts_file), *command,
        ]  # fmt: skip

    def sent_bytes(self) -> int:
        """By all machines together onto their links so far."""
        shown = (json.loads(_run("ip", "-s", "-j", "-n", name, "link", "show", INSIDE)) for name in self._names)
        return sum(int(found[0]["stats64"]["tx"]["bytes"]) for found in shown)

    # ------------------------------------------------------------ helpers

    def _plug_in(self, i: int) -> None:
        name, hub_end, machine_end = self._names[i], f"vh{i}", f"v{os.getpid()}m{i}"
        if self._link.delay_s:
            outside = f"v{os.getpid()}h{i}"
            line = LongLink(outside, machine_end, self._link.delay_s, 0.0, 0.0, seed=0)
            self._stack.callback(line.close)
            _run("ip", "link", "set", outside, "netns", self._hub, "name", hub_end)
            _run("ip", "link", "set", machine_end, "netns", name, "name", INSIDE)
        else:
            _run(
                "ip", "-n", self._hub, "link", "add", hub_end, "type", "veth", "peer", "name", INSIDE, "netns", name
            )  # fmt: skip
        near, far = f"10.77.{i + 1}.1", f"10.77.{i + 1}.2"
        for where, device, address in ((self._hub, hub_end, near), (name, INSIDE, far)):
            _run("ip", "-n", where, "addr", "add", f"{address}/24", "dev", device)
            _run("ip", "-n", where, "link", "set", device, "up")
            shape = ("root", "tbf", "rate", self._link.rate, "burst", self._link.burst, "latency", "50ms")
            _run("tc", "-n", where, "qdisc", "add", "dev", device, *shape)
        _run("ip", "-n", name, "route", "add", "default", "dev", INSIDE, *(() if self._link.delay_s else ("via", near)))


def _run(*command: str) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise NotPossible(f"{' '.join(command)}: {ended.stderr.strip()}")
    return ended.stdout
