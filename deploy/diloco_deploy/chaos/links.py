"""Network links between workers and shards that can be cut, in a network namespace of this process and its children.

Each worker dials the shards at a loopback address of its own, so a rule can tell the links of different workers apart.
Needs root, `ip` and `nft`. Namespace and rules vanish when the last process in it ends in any way.
"""

from __future__ import annotations

import ctypes
import os
import subprocess

_NEW_NETWORK = 0x40000000
"""CLONE_NEWNET. (os.unshare exists only from Python 3.12 on.)"""
LISTEN = "0.0.0.0:0"
"""The address of shards. Nobody outside the namespace can reach it."""
_RULES = """
table inet diloco {
  set cut { type ipv4_addr . inet_service; }
  chain output {
    type filter hook output priority 0;
    ip daddr . tcp dport @cut drop
    ip saddr . tcp sport @cut drop
  }
}
"""


class NoLinks(Exception):
    """Links cannot be cut here. The message says why."""


class Links:
    """All network links of a cluster.

    Make it in the main thread: this thread enters the namespace, and so does every process that it starts later.
    """

    def __init__(self) -> None:
        """Raises NoLinks."""
        # Try in a child first, because this process cannot leave the namespace again.
        _run("unshare", "--net", "sh", "-c", "ip link set lo up && nft -f -", given=_RULES)
        if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK) != 0:
            raise NoLinks(os.strerror(ctypes.get_errno()))
        _run("ip", "link", "set", "lo", "up")
        _run("nft", "-f", "-", given=_RULES)

    @staticmethod
    def host(worker: int) -> str:
        """The address at which worker number `worker` reaches every shard."""
        return f"127.1.{worker // 250}.{worker % 250 + 1}"

    def cut(self, worker: int, port: int) -> None:
        """Block all traffic between a worker and the shard that listens on `port`, in both directions."""
        self._element("add", worker, port)

    def heal(self, worker: int, port: int) -> None:
        """Let traffic through again."""
        self._element("delete", worker, port)

    def _element(self, verb: str, worker: int, port: int) -> None:
        _run("nft", verb, "element", "inet", "diloco", "cut", f"{{ {self.host(worker)} . {port} }}")


def _run(*command: str, given: str = "") -> None:
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    except OSError:
        raise NoLinks(f"{command[0]} is not installed") from None
    if done.returncode != 0:
        raise NoLinks(f"{' '.join(command)}: {done.stderr.strip()}")
