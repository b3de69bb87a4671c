"""Address files: a process of a local cluster writes its bound ports into one.

A server or worker with `--address-file` calls `write_address` once its ports are bound. `diloco up` and `diloco status`
read the file. `addresses.py` parses and binds addresses.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Role = Literal["shard", "worker"]


@dataclass(frozen=True)
class Endpoints:
    """Where one process can be reached. `grpc` is empty for a worker, which only dials out."""

    role: Role
    name: str
    pid: int
    grpc: str
    http: str


def write_address(path: Path, role: Role, name: str, *, grpc: str = "", http: str) -> Endpoints:
    """Write where this process can be reached. A reader sees the whole file or none.

    Raises:
        OSError: the folder does not exist or cannot be written.
    """
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
    """Write JSON under a temporary name and rename it, so a reader never sees half of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def dialable(address: str) -> str:
    """The address at which a process of the same machine reaches a listener."""
    host, _, port = address.rpartition(":")
    return f"127.0.0.1:{port}" if host in ("", "0.0.0.0", "[::]", "::") else address
