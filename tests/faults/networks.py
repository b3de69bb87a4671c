"""Network namespaces whose links to the test are cut, one way or both, refused, thinned or made long. Needs root.

`tc netem` is not in every kernel, so delay, jitter, loss and reordering are made by `LongLink`: two TUN devices, and a
thread that carries packets from one to the other. Real TCP runs over it.
"""

from __future__ import annotations

import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Self

import loudly

_SET_TUN, _IS_TUN, _NO_HEADER = 0x400454CA, 0x0001, 0x1000
MTU = 1500


class NotPossible(Exception):
    """This machine does not let us."""


def run(*command: str) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise NotPossible(f"{' '.join(command)}: {ended.stderr.strip()}")
    return ended.stdout


class Namespace:
    """A network namespace with one link to the outside. A context manager that takes both away."""

    def __init__(self) -> None:
        pid = os.getpid()
        self.name = f"diloco-{pid}"
        self.near, self.far = (f"10.{pid >> 8 & 255}.{pid & 255}.{end}" for end in (1, 2))
        """Addresses of the test, and in the namespace."""
        self._near_device, self._far_device = f"dl{pid}a", f"dl{pid}b"
        self._link: LongLink | None = None

    def __enter__(self) -> Self:
        run("ip", "netns", "add", self.name)
        run("ip", "-n", self.name, "link", "set", "lo", "up")
        return self

    def __exit__(self, *_: object) -> None:
        if self._link is not None:
            self._link.close()
        with suppress(NotPossible):
            run("ip", "link", "del", self._near_device)
        run("ip", "netns", "del", self.name)

    def plug_in(self) -> None:
        run("ip", "link", "add", self._near_device, "type", "veth", "peer", self._far_device, "netns", self.name)
        self._bring_up()

    def plug_in_far_away(self, delay_s: float, jitter_s: float, loss: float, seed: int) -> LongLink:
        """A long and bad line, by packet and direction."""
        self._link = LongLink(self._near_device, self._far_device, delay_s, jitter_s, loss, seed)
        run("ip", "link", "set", self._far_device, "netns", self.name)
        self._bring_up()
        return self._link

    def thin(self, rate: str) -> None:
        """Let no more than `rate`, such as "5mbit", through, each way."""
        shape = ("root", "tbf", "rate", rate, "burst", "16k", "latency", "400ms")
        run("tc", "qdisc", "add", "dev", self._near_device, *shape)
        run("tc", "-n", self.name, "qdisc", "add", "dev", self._far_device, *shape)

    def cut(self, ports: Iterable[int], *, both_ways: bool = True) -> None:
        """Packets to these ports outside get lost; with `both_ways` off, only those that come back."""
        which = f"{{ {', '.join(map(str, ports))} }}"
        self._chain("input", f"tcp sport {which} drop")
        if both_ways:
            self._chain("output", f"tcp dport {which} drop")

    def refuse(self, port: int) -> None:
        """Answer everything that is sent to this port outside with a reset, and count attempts to connect."""
        self._chain(
            "output",
            f"tcp dport {port} tcp flags & (syn|ack) == syn counter",
            f"tcp dport {port} reject with tcp reset",
        )

    def dials(self) -> int:
        """Attempts to connect that were refused so far."""
        rules = json.loads(self._nft("-j", "list", "chain", "inet", "faults", "output"))["nftables"]
        counters = [e["counter"] for r in rules if "rule" in r for e in r["rule"]["expr"] if "counter" in e]
        return int(counters[0]["packets"])

    def heal(self) -> None:
        """Everything gets through again."""
        self._nft("delete", "table", "inet", "faults")

    def _bring_up(self) -> None:
        for address, device, where in (
            (self.near, self._near_device, ()),
            (self.far, self._far_device, ("-n", self.name)),
        ):
            run("ip", *where, "addr", "add", f"{address}/24", "dev", device)
            run("ip", *where, "link", "set", device, "up")

    def _chain(self, hook: str, *rules: str) -> None:
        self._nft("add", "table", "inet", "faults")
        self._nft("add", "chain", "inet", "faults", hook, f"{{ type filter hook {hook} priority 0; }}")
        for rule in rules:
            self._nft("add", "rule", "inet", "faults", hook, rule)

    def _nft(self, *command: str) -> str:
        return run("ip", "netns", "exec", self.name, "nft", *command)


class LongLink:
    """Two TUN devices, and a thread that carries packets between them: late, some never, and not in order."""

    def __init__(self, near: str, far: str, delay_s: float, jitter_s: float, loss: float, seed: int) -> None:
        self._ends = {_open_tun(near): 0, _open_tun(far): 1}
        self._delay_s, self._jitter_s, self._loss = delay_s, jitter_s, loss
        self._chance = random.Random(seed)
        self._stopped, self._stop = os.pipe()
        self.carried = self.lost = self.overtaken = 0
        self._thread = threading.Thread(target=self._carry, name="long-link", daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.write(self._stop, b"x")
        self._thread.join()
        for descriptor in (*self._ends, self._stop, self._stopped):
            os.close(descriptor)

    def _carry(self) -> None:
        under_way: list[tuple[float, int, int, bytes]] = []  # due, number, to, packet
        near, far = self._ends
        other, latest, number = {near: far, far: near}, {near: 0.0, far: 0.0}, 0
        while True:
            wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
            ready, _, _ = select.select([near, far, self._stopped], [], [], wait_s)
            if self._stopped in ready:
                return
            now = time.monotonic()
            for descriptor in ready:
                packet = os.read(descriptor, 2 * MTU)
                if self._chance.random() < self._loss:
                    self.lost += 1
                    continue
                due = now + self._delay_s + self._chance.uniform(-1, 1) * self._jitter_s
                to, number = other[descriptor], number + 1
                self.overtaken += due < latest[to]
                latest[to] = max(latest[to], due)
                heapq.heappush(under_way, (due, number, to, packet))
            while under_way and under_way[0][0] <= now:
                _, _, to, packet = heapq.heappop(under_way)
                with suppress(OSError):  # not up yet, or gone
                    os.write(to, packet)
                    self.carried += 1


def _open_tun(name: str) -> int:
    if not Path("/dev/net/tun").exists():
        raise NotPossible("there is no /dev/net/tun")
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(descriptor, _SET_TUN, struct.pack("16sH22x", name.encode(), _IS_TUN | _NO_HEADER))
    return descriptor


def need_namespaces(what: str) -> None:
    """Skips, loudly, where there are none to be had."""
    loudly.need(what, ip="iproute2", tc="iproute2", nft="nftables")
    try:
        with Namespace() as tried:
            tried.plug_in()
            tried.cut([1])
            tried.heal()
    except NotPossible as error:
        loudly.skip(what, str(error))
