"""`diloco status`: the state of a running cluster. Asks every process once, with a short deadline.

`ClusterStatus` is what `--json` prints. Fields are only ever added. Durations are in seconds; no field is secret.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from pydantic import BaseModel, Field
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from diloco_common import units
from diloco_common.command import QuietConsole
from diloco_common.errors import EXIT_OK, CannotConnect, ConfigError
from diloco_common.options import Config, Flag, Json, SettingsOptions, setting, settings_from
from diloco_common.trust.files import read_bearer_token
from diloco_common.wire.addresses import split_addresses
from diloco_deploy import EVERY_S
from diloco_deploy.cluster.asking import IN_PLAINTEXT, Asker, fetch_all
from diloco_deploy.cluster.findings import Finding
from diloco_deploy.cluster.model import Totals
from diloco_deploy.cluster.roll_call import ClusterRecord, Present, Roll, addresses_in, read_record, roll_call
from diloco_deploy.run.folder import is_owned, shown
from diloco_deploy.terminal import Snapshot, legend, line, tables
from diloco_deploy.trust.tending import OwnCertificates

SCHEMA = 1
"""Version of ClusterStatus. Increases when a field changes its meaning."""
EXIT_DEGRADED = 7
"""Exit code with --strict if there is a finding."""
ANSWER_WITHIN_S = 1.2
"""Deadline for all processes together. Without any answer, the command ends within two seconds."""


class ExpectedStatus(BaseModel):
    shards: int | None
    """None: unknown, as no shard answered."""
    workers: int | None
    """Workers of `diloco up`; elsewhere those that have joined and not left."""


class ClusterStatus(BaseModel):
    schema_version: int = SCHEMA
    run: str | None = None
    complete: bool
    expected: ExpectedStatus
    problems: list[Finding] = Field(default_factory=list)
    totals: Totals
    versions: dict[str, int]
    """Fragment -> version, from the shards that answered."""
    members: list[Present]

    @classmethod
    def of(cls, roll: Roll) -> ClusterStatus:
        shards = sum(one.role == "shard" for one in roll.present)
        return cls(
            run=next((str(one.status["run"]) for one in roll.present if one.status and one.status.get("run")), None),
            complete=not any(one.is_missing for one in roll.present),
            expected=ExpectedStatus(shards=shards or None, workers=roll.workers_expected),
            problems=list(roll.problems),
            totals=roll.cluster.totals(),
            versions=roll.cluster.versions(),
            members=list(roll.present),
        )

    def exit_code(self, *, strict: bool) -> int:
        return EXIT_DEGRADED if strict and self.problems else EXIT_OK


@dataclass(frozen=True)
class Where:
    folder: Path
    http: Sequence[str] = ()
    """Addresses to ask instead of those in the folder."""

    def addresses(self) -> dict[str, str]:
        """Name (or address, if no name is known) -> host:port. Raises CannotConnect if there is none."""
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
        """The record that `diloco up` keeps of its members."""
        return None if self.http else read_record(self.folder)


def whom_to_ask(
    folder: str | None, config: Config, http: str | None, tls: Path | None, token_file: str | None
) -> tuple[Where, Asker]:
    """The processes that a command's options name, and how to ask them. Raises ConfigError."""
    settings = settings_from(SettingsOptions(config), {"cluster.folder": folder, "security.token_file": token_file})
    where, bearer_token = (
        Where(settings.cluster.folder, split_addresses(http or "")),
        read_bearer_token(settings.security),
    )
    return where, Asker(tls, bearer_token) if where.http else Asker(tls or OwnCertificates.observer_in(where.folder))


def look(where: Where, asker: Asker = IN_PLAINTEXT) -> Roll:
    """Ask every address once, and compare with the expected members. Raises CannotConnect if none answered.

    A process whose certificate has expired counts as answering.
    """
    addresses = where.addresses()
    over: dict[str, str] = {}
    answers = fetch_all(addresses, ANSWER_WITHIN_S, asker, over)
    if not answers and not over:
        at = ", ".join(addresses.values())
        raise CannotConnect(f"nobody answers at {at}; if no cluster is running, start one with `diloco up`")
    return roll_call(addresses, answers, where.record(), time.time(), over)


def snapshot_of(roll: Roll) -> Snapshot:
    """A snapshot for the tables. The run is as old as its oldest process."""
    elapsed_s = max((float(member.get("uptime_s", 0.0)) for member in roll.cluster.members.values()), default=0.0)
    return Snapshot(roll.cluster, elapsed_s, doing="running")


def show_status(where: Where, *, as_json: bool, strict: bool, console: Console, asker: Asker = IN_PLAINTEXT) -> int:
    """Show the status once. Returns the exit code. Raises CannotConnect if none answered, or there are no addresses."""
    roll = look(where, asker=asker)
    status = ClusterStatus.of(roll)
    if as_json:
        console.file.write(status.model_dump_json(indent=2) + "\n")
    else:
        console.print(page(roll, console.width))
    return status.exit_code(strict=strict)


def watch_status(
    where: Where, *, console: Console, asker: Asker = IN_PLAINTEXT, wait: Callable[[float], None] = time.sleep
) -> int:
    """Repeat the status until Ctrl-C; without a terminal, as one line. Raises CannotConnect at the first."""
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
    roll: Roll
    silence: str = ""
    """How long no process has answered since; empty: some do."""


def _glances(where: Where, asker: Asker, wait: Callable[[float], None]) -> Iterator[_Glance]:
    """Endless. Raises CannotConnect if none answers the first time."""
    glance = _Glance(look(where, asker=asker))
    answered_at = time.monotonic()
    while True:
        yield glance
        wait(EVERY_S)
        try:
            glance = _Glance(look(where, asker=asker))
            answered_at = time.monotonic()
        except CannotConnect:
            silence = f"nobody has answered for {units.clock(time.monotonic() - answered_at)}"
            glance = _Glance(glance.roll, silence)


def _one_line(glance: _Glance) -> str:
    if glance.silence:
        return glance.silence
    wrong = [f"{one.member} {one.code}".strip() for one in glance.roll.problems]
    return line(snapshot_of(glance.roll), 200) + ("  ! " + ", ".join(wrong) if wrong else "")


def _screen(glance: _Glance, width: int) -> RenderableType:
    """The page, with the run's progress on top."""
    head = Text(line(snapshot_of(glance.roll), width), style="bold")
    if glance.silence:
        head = Text(f"! {glance.silence}; these figures are older", style="red")
    return Group(head, page(glance.roll, width))


def page(roll: Roll, width: int) -> RenderableType:
    """The tables, a legend, and the findings."""
    snapshot = snapshot_of(roll)
    parts: list[RenderableType] = [tables(snapshot, width), Text(legend(snapshot), style="dim")]
    parts += [Text(f"! {problem}", style="red") for problem in roll.problems]
    return Group(*parts)


def status(
    *,
    folder: Annotated[
        str | None, setting("cluster.folder", "PATH", "folder of the cluster that `diloco up` runs")
    ] = None,
    config: Config = None,
    http: Annotated[str | None, Parameter(metavar="HOST:PORT,...", help="ask these processes instead")] = None,
    tls: Annotated[
        Path | None,
        Parameter(metavar="FOLDER", help="they serve over TLS: folder of an observer's or admin's certificate"),
    ] = None,
    token_file: Annotated[
        str | None, Parameter(metavar="FILE", help="with --http: send this token, so that other machines show all")
    ] = None,
    strict: Annotated[Flag, Parameter(help="exit code 7 if anything is wrong")] = False,
    watch: Annotated[Flag, Parameter(help="repeat every second, until Ctrl-C")] = False,
    json: Json = False,
) -> int:
    """Show a running cluster: shards and workers, including those that are away or dead, and what that means.

    Asking any one shard is enough: it knows how many there are, and hears from its learners which they do not reach.
    Exit code 0 if any process answers, 5 if none does; with --strict, 7 if anything is wrong.
    """
    whom, asker = whom_to_ask(folder, config, http, tls, token_file)
    if watch and (json or strict):
        raise ConfigError("--watch goes on until Ctrl-C; leave out --json and --strict, or repeat `diloco status`")
    if watch:
        return watch_status(whom, console=QuietConsole(), asker=asker)
    return show_status(whom, as_json=json, strict=strict, console=QuietConsole(), asker=asker)
