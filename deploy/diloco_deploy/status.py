"""`diloco status`: the state of a running cluster. Asks every process once and waits only a moment."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from diloco_common.endpoints import dialable, read_address
from diloco_common.errors import EXIT_OK, CannotConnect, ConfigError
from diloco_deploy import units
from diloco_deploy.folder import is_owned, shown
from diloco_deploy.live import legend, line, tables
from diloco_deploy.own_certificates import OwnCertificates
from diloco_deploy.polling import IN_PLAINTEXT, Asker, fetch_all
from diloco_deploy.roll_call import Present, as_snapshot, expected_workers, problems, roll_call
from diloco_deploy.snapshot import Snapshot
from diloco_deploy.status_schema import (
    ClusterRecord,
    ClusterStatus,
    ExpectedStatus,
    MemberStatus,
    read_record,
)

ANSWER_WITHIN_S = 1.2
"""Deadline for all processes together. If nobody answers, the command ends within two seconds."""
WATCH_EVERY_S = 2.0


@dataclass(frozen=True)
class Where:
    """Whom to ask."""

    folder: Path
    http: Sequence[str] = ()
    """Addresses to ask instead of those in the folder."""

    def addresses(self) -> dict[str, str]:
        """Name, or address where no name is known, -> host:port. Raises CannotConnect if there is nobody to ask."""
        found = {address: address for address in self.http} or addresses_in(self.folder)
        if not found and (record := self.record()) is not None and is_owned(self.folder):
            raise CannotConnect(
                f"the cluster in {self.folder} is starting: {record.shards} shards, {record.workers} workers, and none "
                f"is up yet; look again in a few seconds, or at `diloco logs --folder {shown(self.folder)}`"
            )
        if not found:
            raise CannotConnect(
                f"no cluster is running in {self.folder}; give its --folder, --config or --http host:port, or start "
                "one with `diloco up`"
            )
        return found

    def record(self) -> ClusterRecord | None:
        """What `diloco up` says of the members."""
        return None if self.http else read_record(self.folder)


def addresses_in(folder: Path) -> dict[str, str]:
    """Name -> host:port of every process with an address file in the folder of a cluster."""
    found = (read_address(path) for path in sorted((folder / "run").glob("*.json")))
    return {one.name: dialable(one.http) for one in found if one is not None}


def look(where: Where, asker: Asker = IN_PLAINTEXT) -> list[Present]:
    """Ask every address once: who is there, and who ought to be.

    Raises:
        CannotConnect: nobody answered.
    """
    addresses = where.addresses()
    answers = fetch_all(addresses, ANSWER_WITHIN_S, asker)
    if not answers:
        at = ", ".join(addresses.values())
        raise CannotConnect(f"nobody answers at {at}; if no cluster is running, start one with `diloco up`")
    return roll_call(addresses, answers, where.record(), time.time())


def cluster_status(present: Sequence[Present]) -> ClusterStatus:
    """All that is known, typed: what --json prints, and what the page shows."""
    snapshot = as_snapshot(present)
    runs = [str(one.status["run"]) for one in present if one.status and one.status.get("run")]
    shards = sum(one.role == "shard" for one in present)
    return ClusterStatus(
        run=runs[0] if runs else None,
        complete=not any(one.is_missing for one in present),
        expected=ExpectedStatus(shards=shards or None, workers=expected_workers(present)),
        problems=problems(present),
        totals=snapshot.totals(),
        versions={str(fragment): version for fragment, version in snapshot.versions().items()},
        members=[
            MemberStatus(
                name=one.name, role=one.role, presence=one.presence,
                state=snapshot.state_of(member) if one.presence == "alive" else one.state or one.presence,
                since_s=one.since_s, why=one.why, answered=one.answered, restarts=one.restarts,
                status=dict(one.status) if one.status is not None else None,
            )
            for one, member in zip(present, snapshot.members, strict=True)
        ],
    )  # fmt: skip


def asker_for(folder: Path, http: Sequence[str], tls: Path | None, bearer_token: str | None) -> Asker:
    """How to ask the processes of a folder, or those at the addresses `http`. Raises ConfigError, SecretExposed.

    `tls`: folder of an observer's certificate; None: the one that `diloco up` made for itself in the folder, if it did.
    """
    if http:
        return Asker(tls, bearer_token)
    return Asker(tls or OwnCertificates.observer_in(folder))


def show_status(where: Where, *, as_json: bool, strict: bool, console: Console, asker: Asker = IN_PLAINTEXT) -> int:
    """The command, once. The exit code. Raises CannotConnect: nobody answered, or there are no address files."""
    present = look(where, asker=asker)
    status = cluster_status(present)
    if as_json:
        console.file.write(status.model_dump_json(indent=2) + "\n")
    else:
        console.print(page(as_snapshot(present), status, console.width))
    return status.exit_code(strict=strict)


def watch_status(
    where: Where, *, console: Console, asker: Asker = IN_PLAINTEXT, wait: Callable[[float], None] = time.sleep
) -> int:
    """Show it again and again, until Ctrl-C. On no terminal, one line each time. Raises CannotConnect at the first."""
    glances = _glances(where, asker, wait)
    if not console.is_terminal:
        for glance in glances:
            console.file.write(_one_line(glance) + "\n")
            console.file.flush()
    with Live(console=console, auto_refresh=False, screen=True) as live:
        for glance in glances:
            live.update(_screen(glance, console.width), refresh=True)
    return EXIT_OK


@dataclass(frozen=True)
class _Glance:
    """What was seen last."""

    present: Sequence[Present]
    silent_s: float | None = None
    """For how long nobody has answered since; None: somebody does."""

    @property
    def silence(self) -> str:
        return "" if self.silent_s is None else f"nobody has answered for {units.clock(self.silent_s)}"


def _glances(where: Where, asker: Asker, wait: Callable[[float], None]) -> Iterator[_Glance]:
    """Without end. Raises CannotConnect: nobody answered the first time."""
    glance = _Glance(look(where, asker=asker))
    answered_at = time.monotonic()
    while True:
        yield glance
        wait(WATCH_EVERY_S)
        try:
            glance = _Glance(look(where, asker=asker))
            answered_at = time.monotonic()
        except CannotConnect:
            glance = _Glance(glance.present, time.monotonic() - answered_at)


def _one_line(glance: _Glance) -> str:
    if glance.silence:
        return glance.silence
    missing = [f"{one.name} {one.as_member().process}" for one in glance.present if one.is_missing]
    return line(as_snapshot(glance.present), 200) + ("  MISSING " + ", ".join(missing) if missing else "")


def _screen(glance: _Glance, width: int) -> RenderableType:
    """The page, below how far the run is."""
    snapshot = as_snapshot(glance.present)
    head = Text(line(snapshot, width), style="bold")
    if glance.silence:
        head = Text(f"! {glance.silence}; this is from before", style="red")
    return Group(head, page(snapshot, cluster_status(glance.present), width))


def page(snapshot: Snapshot, status: ClusterStatus, width: int) -> RenderableType:
    """The tables, what the words mean, and what is wrong."""
    parts: list[RenderableType] = [tables(snapshot, width), Text(legend(snapshot), style="dim")]
    parts += [Text(f"! {problem.words} [{problem.code}]", style="red") for problem in status.problems]
    return Group(*parts)


def check_watch(*, as_json: bool, strict: bool) -> None:
    """Raises ConfigError: these are for one look."""
    if as_json or strict:
        raise ConfigError("--watch goes on until Ctrl-C; leave out --json and --strict, or repeat `diloco status`")
