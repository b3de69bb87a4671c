"""Shows the state of a running cluster (`diloco status`), and whose work is in each version (`diloco record`).

`status` asks every process once, with a short deadline. `ClusterStatus` is what its `--json` prints. Fields are only
ever added. Durations are in seconds; no field is secret. `record` shows the weight of a learner's work in a version,
and how much of the work was cut. Shards remember the last contributions of their epoch (`ledger.RECORD_MAX`) while they
run; `--follow --json` can write all of them to a file.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import Annotated, NamedTuple

from cyclopts import Parameter
from pydantic import BaseModel, Field
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from diloco_common import units
from diloco_common.command import QuietConsole
from diloco_common.errors import EXIT_OK, CannotConnect, ConfigError
from diloco_common.options import Config, Flag, Json, SettingsOptions, setting, settings_from
from diloco_common.trust.files import read_bearer_token
from diloco_common.wire.addresses import split_addresses
from diloco_deploy import EVERY_S
from diloco_deploy.cluster.asking import IN_PLAINTEXT, Asker, NoAnswer, ask_record, fetch_all
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


Folder = Annotated[str | None, setting("cluster.folder", "PATH", "folder of the cluster that `diloco up` runs")]
Tls = Annotated[
    Path | None, Parameter(metavar="FOLDER", help="for TLS: folder of an observer's or admin's certificate")
]
TokenFile = Annotated[
    str | None, Parameter(metavar="FILE", help="with --http: send this token, so that other machines show everything")
]


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
    """Repeat the status until Ctrl-C; without a terminal, as lines. Raises CannotConnect if the first attempt fails."""
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
    """How long no process has answered; empty: some answer."""


def _glances(where: Where, asker: Asker, wait: Callable[[float], None]) -> Iterator[_Glance]:
    """An endless iterator. Raises CannotConnect if no process answers the first time."""
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
    folder: Folder = None,
    config: Config = None,
    http: Annotated[str | None, Parameter(metavar="HOST:PORT,...", help="ask these processes instead")] = None,
    tls: Tls = None,
    token_file: TokenFile = None,
    strict: Annotated[Flag, Parameter(help="exit code 7 if anything is wrong")] = False,
    watch: Annotated[Flag, Parameter(help="repeat every second, until Ctrl-C")] = False,
    json: Json = False,
) -> int:
    """Show a running cluster: shards and workers, including those that are away or dead, and what that means.

    Asking any one shard is enough: it knows how many there are, and hears from its learners which of them they do not
    reach. Exit code 0 if any process answers, 5 if none does; with --strict, 7 if anything is wrong.
    """
    whom, asker = whom_to_ask(folder, config, http, tls, token_file)
    if watch and (json or strict):
        raise ConfigError("--watch goes on until Ctrl-C; leave out --json and --strict, or repeat `diloco status`")
    if watch:
        return watch_status(whom, console=QuietConsole(), asker=asker)
    return show_status(whom, as_json=json, strict=strict, console=QuietConsole(), asker=asker)


# ---------------------------------------------------------------- whose work is in each version


class Line(BaseModel):
    """One learner's contribution to one version of one fragment, as a line of `--json`."""

    at: float
    """Unix time of the version's announcement, by the caller's clock."""
    shard: str
    epoch: int
    fragment: int
    version: int
    learner: str
    tokens: int
    """Tokens trained for this, as the learner claims."""
    share: float
    """Share of the version's weights, in [0, 1]; 0: it was left out."""
    kept: float
    """Factor that scaled its length, in (0, 1]."""


class AskedShards(NamedTuple):
    addresses: list[str]
    known: dict[str, tuple[int, int]]
    """Address -> epoch and number of the last line."""

    def news(self, asker: Asker, silent: dict[str, str]) -> Iterator[Line]:
        """New lines. `silent`: filled with the reasons why shards do not answer."""
        for address in self.addresses:
            try:
                yield from self._of(address, asker)
            except NoAnswer as error:
                silent[address] = str(error)

    def _of(self, address: str, asker: Asker) -> Iterator[Line]:
        while True:
            said, now = ask_record(asker, address, *self.known.get(address, (0, 0))), time.time()
            self.known[address] = int(said["epoch"]), int(said["seq"])
            for one in said["lines"]:
                at = round(now - float(one.pop("ago_s")), 3)
                yield Line(at=at, shard=address, epoch=said["epoch"], **one)
            if not said["lines"]:
                return


def record(
    *,
    folder: Folder = None,
    config: Config = None,
    http: Annotated[str | None, Parameter(metavar="HOST:PORT,...", help="ask these shards instead")] = None,
    tls: Tls = None,
    token_file: TokenFile = None,
    follow: Annotated[Flag, Parameter(name=("--follow", "-f"), help="follow new contributions until Ctrl-C")] = False,
    json: Json = False,
) -> int:
    """Show whose work is in each version: its share of the weights, and how much of its length was kept.

    Without --json, a table over all versions that shards remember: how often each learner was merged, its mean share,
    and what was cut. With --json, a line for each contribution to each version.
    """
    where, asker = whom_to_ask(folder, config, http, tls, token_file)
    found = where.addresses()
    shards = AskedShards([at for name, at in found.items() if where.http or name.startswith("shard-")], {})
    silent: dict[str, str] = {}
    lines = list(shards.news(asker, silent))
    if len(silent) == len(shards.addresses):
        raise CannotConnect("; ".join(silent.values()))
    console, said = QuietConsole(), set[str]()
    while True:
        for why in set(silent.values()) - said:
            print(f"! {why}: its versions are missing here", file=sys.stderr, flush=True)
        said = set(silent.values())
        if follow or json:
            console.file.writelines(f"{dumps(one.model_dump()) if json else _words(one)}\n" for one in lines)
            console.file.flush()
        else:
            console.print(table(lines))
        if not follow:
            return 0
        time.sleep(EVERY_S)
        silent = {}
        lines = list(shards.news(asker, silent))


def table(lines: list[Line]) -> Table:
    shown = Table("learner", "versions", "left out", "tokens", "mean share", "cut", "mean cut", box=None)
    versions = len({(one.shard, one.epoch, one.fragment, one.version) for one in lines})
    for learner in sorted({one.learner for one in lines}):
        mine = [one for one in lines if one.learner == learner]
        merged = [one for one in mine if one.share > 0]
        cut = [1 - one.kept for one in merged if one.kept < 1]
        tokens, share = sum(one.tokens for one in merged), sum(one.share for one in merged) / max(1, len(merged))
        shown.add_row(
            learner, f"{len(merged)} of {versions}", str(len(mine) - len(merged)), f"{tokens:,}", f"{share:.1%}",
            f"{len(cut)} times", f"{sum(cut) / max(1, len(cut)):.1%}",
        )  # fmt: skip
    return shown


def _words(one: Line) -> str:
    what = f"share {one.share:.1%}" if one.share else "left out"
    cut = f", cut to {one.kept:.1%}" if one.kept < 1 else ""
    return f"{one.shard} fragment {one.fragment} version {one.version}: {one.learner} {what}{cut}"
