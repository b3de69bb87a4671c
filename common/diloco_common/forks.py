"""Keeps gRPC's threads and our ports out of forked children.

gRPC registers handlers that run in each forked child. Half of them are skipped while a thread waits inside gRPC, and
one of ours always does ("Other threads are currently calling into gRPC, skipping fork() handlers"). The other half
start gRPC's threads in the child, on the parent's connections: about one child in three dies of a segmentation fault.
Without handlers, a child leaves gRPC alone. gRPC reads `GRPC_ENABLE_FORK_SUPPORT` once, when it is loaded. So
`diloco_common` imports this module before anything else, and our packages import `diloco_common` first.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Any
from weakref import WeakSet

from diloco_common.errors import ForkUnsafe

VARIABLE = "GRPC_ENABLE_FORK_SUPPORT"
_OFF = ("0", "f", "false", "n", "no")
_LIBRARY = "grpc._cython.cygrpc"


def danger(value: str, *, is_loaded: bool) -> str:
    """Why forked children may crash; empty if they cannot.

    value: the variable's value; empty: it is not set. is_loaded: whether gRPC has already read it.
    """
    if value:
        return "" if value.lower() in _OFF else f"{VARIABLE}={value} is set"
    return "grpc was imported before diloco_worker (import that first)" if is_loaded else ""


DANGER = danger(os.environ.get(VARIABLE, ""), is_loaded=_LIBRARY in sys.modules)
os.environ[VARIABLE] = os.environ.get(VARIABLE) or "0"

_ports: WeakSet[socket.socket] = WeakSet()
_is_listening = _refuses = False


def close_in_children(listening: socket.socket) -> None:
    """Close this port in forked children: a child that outlives its parent must not keep it from a new process."""
    _ports.add(listening)


def refuse(refuses: bool) -> None:
    """Set whether a fork whose child may crash raises ForkUnsafe instead."""
    global _is_listening, _refuses
    _refuses = refuses
    if DANGER and not _is_listening:
        _is_listening = True
        sys.addaudithook(_hear)  # Python cannot remove a hook


def _hear(event: str, _: tuple[Any, ...]) -> None:
    if _refuses and event in ("os.fork", "os.forkpty"):
        raise ForkUnsafe(
            f"{DANGER}, so gRPC starts its threads in forked children, and this kills them: start this process with "
            f"{VARIABLE}=0"
        )


def _in_child() -> None:
    for port in list(_ports):
        port.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
