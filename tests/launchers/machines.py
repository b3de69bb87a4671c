"""Several machines on this one: each has a network, a host name and process ids of its own. Needs root.

They share the file system, as the nodes of a cluster share a folder. A machine that is killed loses all its processes
at once; nobody there says goodbye.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

_ADDRESS = "10.77.0.{}"


class Machines:
    """A context manager that takes everything away at its end."""

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        """`folder`: for the hosts file and the logs of programs."""
        self.names = names
        self.addresses = {name: _ADDRESS.format(i) for i, name in enumerate(names, 1)}
        self._folder = folder
        self._hosts = folder / "hosts"
        self._running: dict[str, list[subprocess.Popen[bytes]]] = {name: [] for name in names}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        known = [("127.0.0.1", "localhost"), *((address, name) for name, address in self.addresses.items())]
        self._hosts.write_text("".join(f"{address} {name}\n" for address, name in known))
        try:
            self._wire()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            self.kill(name)
        self._stack.close()

    def start(self, name: str, *command: str | Path, env: Mapping[str, str]) -> None:
        """Start a program on a machine; its log is PROGRAM-MACHINE.log."""
        log = (self._folder / f"{Path(command[0]).name}-{name}.log").open("ab")
        with log:
            started = subprocess.Popen(self.command(name, *command), stdout=log, stderr=log, env=dict(env))
        self._running[name].append(started)

    def command(self, name: str, *command: str | Path) -> list[str | Path]:
        """What runs a command on a machine. `ip netns exec` would hide the mount of the cgroups."""
        return [
            "nsenter", f"--net=/run/netns/{self._space(name)}",
            "unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc",
            "bash", "-ec", 'hostname "$0"; mount --bind "$1" /etc/hosts; shift; exec "$@"', name, self._hosts,
            *command,
        ]  # fmt: skip

    def kill(self, name: str) -> None:
        """All that runs on a machine dies at once. It may be started again."""
        for process in self._running[name]:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)  # `--kill-child` takes the machine's first process with it
            process.wait()
        self._running[name].clear()

    def _wire(self) -> None:
        switch = self._space("switch")
        for name in (switch, *map(self._space, self.names)):
            _run("ip", "netns", "add", name)
            self._stack.callback(_run, "ip", "netns", "del", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "br0", "up")
        for i, name in enumerate(self.names):
            space = self._space(name)
            _run("ip", "-n", switch, "link", "add", f"v{i}", "type", "veth", "peer", "name", "eth0", "netns", space)
            _run("ip", "-n", switch, "link", "set", f"v{i}", "master", "br0", "up")
            _run("ip", "-n", space, "addr", "add", f"{self.addresses[name]}/24", "dev", "eth0")
            _run("ip", "-n", space, "link", "set", "eth0", "up")

    def _space(self, name: str) -> str:
        return f"diloco-{os.getpid()}-{name}"


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
