"""`diloco status`: the state of a running cluster. Asks every process once and waits only a moment."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from diloco_common.endpoints import Role, dialable, read_address
from diloco_common.errors import CannotConnect
from diloco_deploy.live import tables
from diloco_deploy.polling import fetch_all
from diloco_deploy.snapshot import Member, Snapshot

ANSWER_WITHIN_S = 1.2
"""Deadline for all processes together. If nobody answers, the command ends within two seconds."""


def addresses_in(folder: Path) -> dict[str, str]:
    """Name -> host:port of every process with an address file in the folder of a cluster."""
    found = (read_address(path) for path in sorted((folder / "run").glob("*.json")))
    return {one.name: dialable(one.http) for one in found if one is not None}


def look(addresses: Mapping[str, str], timeout_s: float = ANSWER_WITHIN_S) -> Snapshot:
    """Ask every address once. A process that does not answer becomes a member in state "no answer".

    Raises:
        CannotConnect: nobody answered.
    """
    answers = fetch_all(addresses, timeout_s)
    if not answers:
        where = ", ".join(addresses.values())
        raise CannotConnect(f"nobody answers at {where}; if no cluster is running, start one with `diloco up`")
    members = []
    for name in addresses:
        status = answers.get(name)
        known = str(status.get("name") or name) if status else name
        role: Role = "worker" if (status["role"] if status else known).startswith("worker") else "shard"
        members.append(Member(known, role, "up" if status else "no answer", status))
    return Snapshot(tuple(members), doing="running")


def as_json(snapshot: Snapshot) -> dict[str, Any]:
    """The contents of the tables, with all details."""
    return {
        "totals": asdict(snapshot.totals()),
        "versions": {str(fragment): version for fragment, version in snapshot.versions().items()},
        "members": [
            {
                "name": member.name,
                "role": member.role,
                "state": snapshot.state_of(member),
                "answered": member.status is not None,
                "status": member.status,
            }
            for member in snapshot.members
        ],
    }


def show_status(folder: Path, http: Sequence[str], *, as_text: bool, console: Console) -> int:
    """The command. `http` lists addresses to ask instead of those in the folder.

    Raises:
        CannotConnect: nobody answered, or there are no address files.
    """
    addresses = {address: address for address in http} or addresses_in(folder)
    if not addresses:
        raise CannotConnect(
            f"no cluster is running in {folder}; give its --folder or --http host:port, or start one with `diloco up`"
        )
    snapshot = look(addresses)
    if as_text:
        console.print(tables(snapshot, console.width))
    else:
        console.file.write(json.dumps(as_json(snapshot), indent=2) + "\n")
    return 0
