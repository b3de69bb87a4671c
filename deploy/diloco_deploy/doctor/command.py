"""`diloco doctor`: selects the checks, and prints their findings."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import chain
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from diloco_common import units
from diloco_common.command import version
from diloco_common.errors import ConfigError, plain
from diloco_common.options import NO_SETTINGS, Flag, Json, SettingsOptions, number, setting, settings_from
from diloco_common.settings import Settings
from diloco_deploy import THREADS_MAX
from diloco_deploy.doctor import (
    TOTAL_S,
    Check,
    CheckedLine,
    Door,
    Known,
    ReportLine,
    State,
    failure,
    ok,
    run_checks,
    warning,
)
from diloco_deploy.run.folder import shards_in

if TYPE_CHECKING:
    from diloco_deploy.cluster.roll_call import Roll
    from diloco_deploy.doctor.machine import PlannedShard

MARKS = {State.OK: "ok", State.WARNING: "WARNING", State.FAILURE: "FAILURE", State.SKIPPED: "skipped"}


@dataclass(frozen=True)
class Patient:
    settings: Settings
    shards: Sequence[str] = ()
    """Addresses of shards to check the connection to; empty: none."""
    is_shard: bool = False
    params: float | None = None
    """Parameters of the whole model; None: unknown."""
    step_s: float = 1.0
    learners: int = 8
    folder: Path | None = None
    """Folder of a cluster of `diloco up`, whose findings in `diloco status` are included."""
    device: str | None = None
    """A device of this machine to check, as torch names it; None: none."""


def examine(patient: Patient, *, as_json: bool = False) -> int:
    """Run all checks, and print findings as they are made. Exit code 1 if something fails."""
    began, seen = time.monotonic(), []
    for found in look(patient):
        seen.append(found)
        if not as_json:
            print("\n".join(_lines(found)), flush=True)
    count = {state: sum(found.finding.state is state for found in seen) for state in State}
    seconds = time.monotonic() - began
    if as_json:
        rows = [
            {"check": check.name, "about": check.about, "state": finding.state, "code": finding.code,
             "what": finding.what, "do": finding.do, "figures": dict(finding.figures)}
            for check, finding in seen
        ]  # fmt: skip
        print(dumps({"findings": rows, "counts": count, "seconds": seconds}, indent=2))
    else:
        print(f"\n{_summary(count)} ({seconds:.1f} s)")
    return 1 if count[State.FAILURE] else 0


def look(patient: Patient) -> Iterator[CheckedLine]:
    # This imports torch, for the codec: two seconds, or many on a busy machine. No check's time should include it.
    import_module("diloco_deploy.doctor.shards")
    ends_at = time.monotonic() + TOTAL_S
    if patient.shards:
        yield from _ways(patient, ends_at)
    if patient.folder is not None:
        yield from run_checks([Check("cluster", "", 4.0, partial(_cluster, patient.folder))], time.monotonic, ends_at)
    checks = _of_machine(patient) if patient.is_shard else [_kernels()]
    yield from run_checks(checks, time.monotonic, ends_at)
    if patient.device is not None:
        from diloco_deploy.doctor import device

        yield from run_checks(device.checks(patient.device), time.monotonic, time.monotonic() + 2 * device.SOAK_S)


def _ways(patient: Patient, ends_at: float) -> Iterator[CheckedLine]:
    """Check all connections in parallel; then check whether these are all the shards."""
    from diloco_common.trust.credentials import Credentials
    from diloco_deploy.doctor import shards

    known, security = Known(), patient.settings.security
    credentials = Credentials(security.tls, security.token_file)
    doors = [Door(a, patient.settings.run.id, credentials.tls(), credentials.token()) for a in patient.shards]
    pool = ThreadPoolExecutor(min(THREADS_MAX, len(doors)), "way")
    try:
        yield from chain.from_iterable(pool.map(lambda door: list(_walked(door, known, ends_at)), doors))
    finally:
        pool.shutdown(wait=False)
    if known.answers:
        yield from run_checks([Check("all shards", "", 1.0, partial(shards.complete, known))], time.monotonic, ends_at)


def _walked(door: Door, known: Known, ends_at: float) -> Iterator[CheckedLine]:
    from diloco_common.wire.messages import PROTOCOL
    from diloco_deploy.doctor import shards

    def port() -> ReportLine:
        found = shards.port(door.address)
        known.round_trip_s[door.address] = found.figures.get("round_trip_s", 0.0)
        return found

    a, ours = door.address, version().removeprefix("diloco ").removesuffix(" (not installed)")
    checks = [
        Check("name", a, 4.0, partial(shards.name, a)),
        Check("port", a, 4.0, port, ("name",)),
        Check("tls", a, 7.0, partial(shards.handshake, a, door.files), ("port",)),
        Check("run", a, 12.0, partial(shards.describe, door, known, PROTOCOL), ("port", "tls")),
        Check("clock", a, 1.0, partial(shards.clock_of, door, known), ("run",)),
        Check("version", a, 1.0, partial(shards.version, door, known, ours), ("run",)),
    ]
    return run_checks(checks, time.monotonic, ends_at)


def _cluster(folder: Path) -> list[ReportLine]:
    """The findings of `diloco status`. Raises CannotConnect."""
    from diloco_deploy.cluster.asking import Asker
    from diloco_deploy.status import Where, look
    from diloco_deploy.trust.tending import OwnCertificates

    return of_roll(look(Where(folder), Asker(OwnCertificates.observer_in(folder))))


def of_roll(roll: Roll) -> list[ReportLine]:
    found = [failure(one.code, one.words, one.do) for one in roll.problems]
    return found or [ok(f"{len(roll.present)} members, and nothing is wrong with them")]


def _of_machine(patient: Patient) -> list[Check]:
    from diloco_deploy.doctor import machine

    settings, shard = patient.settings, _shard(patient)
    folder = settings.shard.data_dir
    about = "" if folder is None else str(folder)
    checks = [
        Check("files", "", 2.0, partial(machine.files, settings.shard)),
        Check("memory", "", 2.0, partial(machine.memory, shard)),
        _kernels(),
    ]
    if folder is None:
        none = warning("NOT_DURABLE", "no data folder is set (shard.data_dir): a restart starts from nothing")
        return [Check("disk", "", 1.0, lambda: none), *checks]
    return [
        Check("disk speed", about, 10.0, partial(machine.speed, folder, shard, time.monotonic)),
        Check("disk space", about, 2.0, partial(machine.room, folder, shard)),
        *checks,
    ]


def _kernels() -> Check:
    from diloco_deploy.doctor import machine

    return Check("kernels", "", 15.0, machine.kernels)


def _shard(patient: Patient) -> PlannedShard | None:
    from diloco_deploy.doctor.machine import PlannedShard

    if patient.params is None:
        return None
    settings = patient.settings
    sync, count = settings.sync, settings.shard.count
    outer = settings.outer.optimizer
    return PlannedShard(
        params=patient.params / count, fragments=max(1, sync.fragments // count), learners=patient.learners,
        push=sync.push, pull=sync.pull, outer=outer, every=sync.first_every, step_s=patient.step_s,
        checkpoints=settings.checkpoint.keep if settings.checkpoint.every else 0,
        companions_every=sync.companions_every if settings.train.average_momentum else None,
    )  # fmt: skip


def _lines(found: CheckedLine) -> Iterator[str]:
    """Escapes the texts, since some come from a shard and must not control the terminal."""
    check, finding = found
    mark = MARKS[finding.state]
    code = "" if finding.state in (State.OK, State.SKIPPED) else f" [{finding.code}]"
    yield f"{mark:<8} {check.name:<11} {plain(finding.what)}{code}"
    if finding.do:
        yield f"{'':<20} -> {plain(finding.do)}"


def _summary(count: dict[State, int]) -> str:
    failed, warnings = count[State.FAILURE], count[State.WARNING]
    if not failed and not warnings:
        return "all is well"
    return f"{failed or 'nothing'} failed, {warnings} warnings; `diloco explain CODE` says more"


_PARAMS = number(units.whole, 1, 10**13, "a number of parameters, such as 125M or 70B")
_LEARNERS = number(units.whole, 1, 1_000_000, "a whole number from 1")
_SECONDS = number(units.seconds, 1e-4, 86_400.0, "a time, such as 1s or 250ms")


def doctor(
    shards: Annotated[
        str | None, setting("worker.shards", "HOST:PORT,...", "check the connection from here to these shards")
    ] = None,
    *,
    folder: Annotated[
        Path | None, Parameter(metavar="PATH", help="check the shards of the cluster that `diloco up` runs there")
    ] = None,
    shard: Annotated[Flag, Parameter(help="check whether this machine can run the configured shard")] = False,
    device: Annotated[
        str | None,
        Parameter(
            metavar="cuda", help="check that a device of this machine computes the same bits twice (takes a minute)"
        ),
    ] = None,
    run: Annotated[str | None, setting("run.id", "ID", "id of the run")] = None,
    tls: Annotated[str | None, setting("security.tls", "FOLDER", "certificate of the caller")] = None,
    token_file: Annotated[str | None, setting("security.token_file", "FILE", "bearer token of the caller")] = None,
    data_dir: Annotated[str | None, setting("shard.data_dir", "FOLDER", "data folder of the shard")] = None,
    params: Annotated[
        int | None, Parameter(converter=_PARAMS, metavar="125M", help="parameters of the model", show_default="ask")
    ] = None,
    step_time: Annotated[
        float, Parameter(converter=_SECONDS, metavar="1s", help="time of one inner step", show_default="1s")
    ] = 1.0,
    learners: Annotated[int, Parameter(converter=_LEARNERS, metavar="L", help="learners that the shard will have")] = 8,
    options: SettingsOptions = NO_SETTINGS,
    json: Json = False,
) -> int:
    """Report problems, each with a code for `diloco explain` and what to do. On a learner's machine: the connection to
    the shards, from host name to clock and version. With --shard: disk, files, memory and kernels. Changes nothing, and
    ends within 20 s. With --device: for a minute, a device repeats the same work, and every bit is compared. Exit code
    1 if something fails."""
    if folder is not None:
        if shards is not None:
            raise ConfigError("give --shards or --folder, one of them")
        found = shards_in(folder)
        shards, run, tls = ",".join(found.addresses), run or found.run, tls or (str(found.tls) if found.tls else None)
    flags = {
        "worker.shards": shards, "run.id": run, "security.tls": tls, "security.token_file": token_file,
        "shard.data_dir": data_dir,
    }  # fmt: skip
    settings = settings_from(options, flags)
    addresses = () if (shard or device) and shards is None else settings.worker.shards
    if not addresses and not shard and not device:
        raise ConfigError(
            "nothing to check: give --shards ps-0:50051,ps-1:50051, the --folder of `diloco up`, --shard (this "
            "machine) or --device cuda"
        )
    return examine(Patient(settings, addresses, shard, params, step_time, learners, folder, device), as_json=json)
