"""Addresses: split, parse and bind them, and name the process that already has a port.

HTTP takes the bound socket. gRPC binds by itself: pass it `str(parse_address(...))` and the option `grpc.so_reuseport`
0, and raise `in_use(address)` if it does not get the port.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import os
import re
import socket
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from diloco_common.errors import ConfigError, InUse

_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}")
_TCP_LISTEN = "0A"  # the state column of /proc/net/tcp


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def split_addresses(text: str) -> list[str]:
    """The addresses between commas, unparsed."""
    return [address.strip() for address in text.split(",") if address.strip()]


def parse_address(text: str) -> Address:
    """Parse "host:port" or "[v6]:port". Raises ConfigError for anything else."""

    def wrong(why: str) -> ConfigError:
        shown = text if len(text) <= 80 else text[:80] + "..."
        return ConfigError(
            f"{shown!a} is not an address: {why}. Write host:port, for example 127.0.0.1:50051 or [::1]:50051"
        )

    if "://" in text:
        raise wrong("it has a scheme")
    host, colon, port = text.rpartition(":")
    if not colon:
        raise wrong("the port is missing")
    if not host:
        raise wrong("the host is missing (0.0.0.0 is every IPv4 interface, [::] every interface)")
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise wrong("the port must be a number from 0 to 65535")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise wrong("there is no IPv6 address between the brackets") from None
    elif ":" in host:
        raise wrong("an IPv6 address needs brackets")
    elif not _HOST.fullmatch(host):
        raise wrong("a host name has letters, digits, '.', '-' and '_' only")
    return Address(host, int(port))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`: localhost, 127.0.0.0/8 or ::1. Resolves no names."""
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def is_no_name(host: str) -> bool:
    """Whether a Host header is a number or localhost, with or without a port.

    Another site can make its own name point to this machine, and then read whatever its visitor may read (DNS
    rebinding). A number or localhost cannot be such a name.
    """
    before, _, port = host.rpartition(":")
    name = (before if port.isdigit() else host).strip("[]").lower()
    if name == "localhost":
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def bind_socket(address: str) -> socket.socket:
    """Bind and listen on "host:port"; port 0 takes a free one. Non-blocking, for an event loop.
    Raises ConfigError (malformed address, host of another machine, no permission) or InUse."""
    wanted = parse_address(address)
    try:
        found = socket.getaddrinfo(wanted.host, wanted.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"cannot listen on {wanted}: {error.strerror or error}") from None
    family, kind, protocol, _, name = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and wanted.host == "::":
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(name)
        sock.listen(128)  # two sockets may bind one port, but only one may listen: claim it now
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise in_use(address) from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(
                f"cannot listen on {wanted}: no interface of this machine has that address. "
                "Use one of its own addresses, or 0.0.0.0 for all"
            ) from None
        if error.errno in (errno.EACCES, errno.EPERM):
            raise ConfigError(f"cannot listen on {wanted}: not permitted. Ports below 1024 need privileges") from None
        raise
    return sock


def bound_address(sock: socket.socket) -> Address:
    """The address of a bound socket, with the real port if 0 was asked for."""
    host, port = sock.getsockname()[:2]
    return Address(host, port)


def in_use(address: str) -> InUse:
    """The error for a port in use. It names the process that has the port, if /proc shows it."""
    wanted = parse_address(address)
    pid = who_listens(wanted.port)
    owner = "another process" if pid is None else f"process {pid} ({_command(pid)})"
    return InUse(f"{wanted} is in use by {owner}. Stop it, or listen on another port (port 0 takes a free one)")


def who_listens(port: int) -> int | None:
    """Id of the process that listens on a TCP port of this machine. None: no process, a hidden one, or no /proc."""
    inodes = _listening_inodes(port)
    if not inodes:
        return None
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            if any(_links_to(fd, wanted) for fd in (process / "fd").iterdir()):
                return int(process.name)
    return None


def _links_to(fd: Path, wanted: Collection[str]) -> bool:
    """Whether an open file is one of these. False if it was just closed."""
    try:
        return os.readlink(fd) in wanted
    except FileNotFoundError:
        return False


def _listening_inodes(port: int) -> set[str]:
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            columns = line.split()
            local, state, inode = columns[1], columns[3], columns[9]
            if state == _TCP_LISTEN and int(local.rpartition(":")[2], 16) == port:
                inodes.add(inode)
    return inodes


def _command(pid: int) -> str:
    try:
        name = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return "it has just ended"
    return name if name.isprintable() else ascii(name)


Role = Literal["shard", "worker"]


@dataclass(frozen=True)
class Endpoints:
    """The addresses of one process. `grpc` is empty for a worker, which only dials out."""

    role: Role
    name: str
    pid: int
    grpc: str
    http: str


def write_address(path: Path, role: Role, name: str, *, grpc: str = "", http: str) -> Endpoints:
    """Write this process's addresses atomically. Raises OSError if the folder does not exist or cannot be written."""
    endpoints = Endpoints(role=role, name=name, pid=os.getpid(), grpc=grpc, http=http)
    write_json(path, asdict(endpoints))
    return endpoints


def read_address(path: Path) -> Endpoints | None:
    """The endpoints in a file; None if the file is absent or malformed."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return Endpoints(**found)
    except (OSError, ValueError, TypeError):
        return None


def write_json(path: Path, value: Any) -> None:
    """Write JSON under a temporary name and rename it, so that a reader never sees half of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def dialable(address: str) -> str:
    """The address at which a process on the same machine reaches a listener."""
    host, _, port = address.rpartition(":")
    return f"127.0.0.1:{port}" if host in ("", "0.0.0.0", "[::]", "::") else address
