"""The members of a local cluster: how their processes are started, and what happens to them over time.

`Watch` is pure: answers and times are passed in. It feeds the display; the record in the folder feeds `diloco status`
and `diloco scale`; `Members` updates both. `diloco scale` writes a file that asks for another number of workers, and
`diloco up` answers in its record. The folder is the only interface: anyone who may write to it controls the run anyway.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from diloco_common.errors import CannotConnect, ConfigError
from diloco_common.settings import Settings
from diloco_common.wire.addresses import Endpoints, Role, dialable, write_json
from diloco_common.wire.calls import END_S
from diloco_demo.cli import declared_digest
from diloco_deploy import ASK_S, LOOK_S
from diloco_deploy.cluster.findings import findings
from diloco_deploy.cluster.members import KEPT_S, SAME_S, Status
from diloco_deploy.cluster.model import Cluster, Pace
from diloco_deploy.cluster.roll_call import ClusterRecord, MemberRecord, read_record
from diloco_deploy.run.folder import ClusterFolder
from diloco_deploy.run.supervisor import ChildSpec
from diloco_deploy.terminal import Snapshot
from diloco_deploy.trust.tending import OBSERVER, OwnCertificates
from diloco_deploy.web.drawn import POINTS_MAX

EVALUATE = "evaluate"


@dataclass(frozen=True)
class Programs:
    server: str = "diloco_server"
    worker: str = "diloco_demo"


class Children:
    def __init__(
        self, settings: Settings, files: ClusterFolder, programs: Programs, certificates: OwnCertificates | None = None
    ) -> None:
        """`certificates`: of these processes; None: they use plaintext."""
        self._settings, self._files, self._programs, self._certificates = settings, files, programs, certificates
        self._model = settings.run.model or declared_digest(settings)
        self._ports: dict[str, tuple[str, str]] = {}  # shard -> gRPC and HTTP address, kept over restarts
        self.shards = names("shard", settings.cluster.shards)
        self.workers = names("worker", settings.cluster.workers)

    def scale(self, workers: int) -> None:
        self.workers = names("worker", workers)

    def found(self, name: str, at: Endpoints) -> None:
        """A child is up. A restarted shard gets the same ports again."""
        if name in self.shards:
            self._ports[name] = (at.grpc, at.http)

    @property
    def shards_are_up(self) -> bool:
        return len(self._ports) == len(self.shards)

    def shard(self, index: int) -> ChildSpec:
        name = self.shards[index]
        shard, address_file = self._settings.shard, self._files.run / f"{name}.json"

        def arguments() -> Sequence[str]:
            grpc, http = self._ports.get(name, (nth_port(shard.listen, index), nth_port(shard.http, index)))
            given = {
                "shard.index": index, "shard.count": len(self.shards), "shard.listen": grpc, "shard.http": http,
                "shard.data_dir": self._files.shard_folder(index), "run.model": self._model,
                **self._proof_of(f"shard/{index}"),
            }  # fmt: skip
            return flags(self._files, address_file, given)

        return ChildSpec(name, "shard", self._programs.server, arguments, self.log(name), address_file)

    def worker(self, index: int) -> ChildSpec:
        """All shards must be up."""
        name = self.workers[index]
        worker, address_file = self._settings.worker, self._files.run / f"{name}.json"
        given = {
            "worker.shards": self.shard_addresses(), "worker.learner_id": name,
            "worker.folder": self._files.worker_folder(index), "worker.http": nth_port(worker.http, index),
            "worker.threads": worker.threads or max(1, len(os.sched_getaffinity(0)) // len(self.workers)),
            **self._proof_of(f"learner/{name}"),
        }  # fmt: skip
        arguments = [*flags(self._files, address_file, given), f"--final-status={self._files.final_status(name)}"]
        return ChildSpec(name, "worker", self._programs.worker, lambda: arguments, self.log(name), address_file)

    def evaluation(self) -> ChildSpec:
        """The job that evaluates and exports the model. All shards must be up."""
        arguments = [
            "evaluate", f"--settings={self._files.settings}", f"--shards={self.shard_addresses()}",
            *_sets(self._proof_of(OBSERVER)), f"--export={self._files.model}", f"--out={self._files.evaluation}",
            f"--progress={self._files.evaluated}",
        ]  # fmt: skip
        return ChildSpec(EVALUATE, "job", self._programs.worker, lambda: arguments, self.log(EVALUATE))

    def log(self, name: str) -> Path:
        return self._files.logs / f"{name}.log"

    def shard_addresses(self) -> str:
        """Addresses of all shards, which must be up, separated by commas."""
        return ",".join(dialable(self._ports[shard][0]) for shard in self.shards)

    def _proof_of(self, who: str) -> dict[str, object]:
        own = self._certificates
        return {} if own is None else {"security.tls": own.of(who), "security.revoked": own.deny_list}


def names(kind: Role, count: int) -> list[str]:
    return [f"{kind}-{i}" for i in range(count)]


def nth_port(address: str, index: int) -> str:
    """The address of process number `index`: a port in the settings is the first process's, and later ones count up."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + index}" if port.isdigit() and int(port) else address


def flags(files: ClusterFolder, address_file: Path, given: Mapping[str, object]) -> list[str]:
    """Arguments of a shard or worker: the cluster's settings, and its own."""
    return [f"--settings={files.settings}", f"--address-file={address_file}", *_sets(given)]


def _sets(given: Mapping[str, object]) -> list[str]:
    return [f"--set={name}={value}" for name, value in given.items()]


HOLD_S = ASK_S
"""Findings that last for a shorter time are not reported."""


@dataclass(frozen=True)
class _Seen:
    """An event that was already reported. Shards report its age, so its time varies a little."""

    key: tuple[str, int, str, str, str]
    """Member, number of its process, event, learner, code."""
    at: float
    """By the process's clock, so that a delayed answer does not look like a new event."""
    told_at: float


class Watch:
    """The known members of a cluster. Owned by one thread."""

    def __init__(self, started_at: float) -> None:
        self.doing = "starting"
        self._started_at = started_at
        self.cluster = Cluster()
        self._losses: list[float] = []
        self._pace = Pace()
        self._seen: list[_Seen] = []
        self._wrong_since: dict[tuple[str, str], float] = {}  # code and member of a finding -> since when it holds
        self._told: set[tuple[str, str]] = set()

    def expect(self, name: str, role: Role) -> None:
        """Add a member. A known member has started a new process."""
        if name in self.cluster.members:
            self.cluster.begins_anew(name)
        self.cluster.expect(name, role)
        self.cluster.members[name].again = "`diloco up` starts it again once it has ended, or hangs"

    def process(self, name: str, state: str) -> None:
        """The state of a member's process changed. A member that left is not expected, but its work counts."""
        self.cluster.process(name, state)

    def heard(self, name: str, status: Status, now: float) -> list[str]:
        """A member answered. Returns its new events, as lines to print."""
        self.cluster.heard(name, status, now)
        if status.get("role") == "shard":
            self._pace.heard(now, self.cluster.tokens_merged or 0)
        return self._new_events(name, status, now)

    def wrong(self, now: float) -> list[str]:
        """Findings that started and lasted, and those that ended, as lines to print.

        Members whose process is down are left out: the supervisor reports them.
        """
        down = {member.name for member in self.cluster.members.values() if member.process != "up"}
        found = {(f.code, f.member): f for f in findings(self.cluster, now) if f.member not in down}
        over = [f"{member or 'cluster'}: {code} is over" for code, member in self._told - found.keys()]
        self._told &= found.keys()
        self._wrong_since = {key: self._wrong_since.get(key, now) for key in found}
        begun = [key for key, since in self._wrong_since.items() if now - since >= HOLD_S and key not in self._told]
        self._told.update(begun)
        return sorted(over) + [f"! {found[key]}" for key in begun]

    def sample_loss(self) -> None:
        """Add the current training loss to its history. Call this at a steady pace."""
        loss = self.cluster.totals().loss
        if loss is None:
            return
        self._losses.append(loss)
        if len(self._losses) > POINTS_MAX:  # halve the resolution, keep the whole curve
            self._losses = [(a + b) / 2 for a, b in zip(self._losses[::2], self._losses[1::2], strict=False)]

    def snapshot(self, now: float) -> Snapshot:
        left_s = self._pace.left_s(self.cluster.tokens_budget)
        return Snapshot(self.cluster, now - self._started_at, now, tuple(self._losses), left_s, self.doing)

    def _new_events(self, name: str, status: Status, now: float) -> list[str]:
        lines = []
        self._seen = [seen for seen in self._seen if now - seen.told_at < KEPT_S]
        life, uptime_s = self.cluster.members[name].starts, float(status.get("uptime_s", now))
        for event in status.get("events", []):
            ago_s = float(event.get("ago_s", 0.0))
            if ago_s > KEPT_S:
                continue
            at = uptime_s - ago_s
            what, learner, code = (str(event.get(key) or "") for key in ("event", "learner", "code"))
            key = (name, life, what, learner, code)
            if any(seen.key == key and abs(seen.at - at) < SAME_S for seen in self._seen):
                continue
            self._seen.append(_Seen(key, at, now))
            lines.append(f"{name}: {learner} {what}".replace("  ", " ") + (f" ({code})" if code else ""))
        return lines


class Members:
    """Keeps the record of a cluster's members up to date. Owned by one thread. Methods raise OSError."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.watch = Watch(time.monotonic())
        self._record, self._folder = ClusterRecord.of(settings), folder
        self._write()

    @property
    def are_training(self) -> bool:
        """Whether workers may be added and removed."""
        return self._record.training

    def train(self, training: bool) -> None:
        self._record.training = training
        self._write()

    def want_workers(self, count: int) -> None:
        self._record.workers = count
        self._write()

    def expect(self, name: str, role: Role) -> None:
        self.watch.expect(name, role)
        old = self._record.members.get(name)
        self._record.members[name] = MemberRecord(
            role=role, process="starting", since=time.time(), why=old.why if old else "",
            restarts=old.restarts + 1 if old else 0,
        )  # fmt: skip
        self._write()

    def process_is(self, name: str, state: str, why: str = "") -> None:
        self.watch.process(name, state)
        one = self._record.members[name]
        one.process, one.since, one.why = state, time.time(), why or one.why
        self._write()

    def left(self, name: str) -> None:
        """A member that was told to leave is gone, and no longer expected."""
        self.watch.process(name, "left")
        self._record.members.pop(name, None)
        self._write()

    def _write(self) -> None:
        self._record.write(self._folder)


def wish_file(folder: Path) -> Path:
    return folder / "run" / "wish.json"


def take_wish(folder: Path) -> int | None:
    """Take the requested number of workers. None: there is no request, or it is invalid."""
    mine = wish_file(folder).with_suffix(".taken")  # renaming takes it, so a newer request is kept
    try:
        wish_file(folder).rename(mine)
    except FileNotFoundError:
        return None
    try:
        wanted = json.loads(mine.read_text(encoding="utf-8"))["workers"]
    except (OSError, ValueError, KeyError, TypeError):
        wanted = None
    mine.unlink(missing_ok=True)
    return wanted if isinstance(wanted, int) and wanted >= 1 else None


def scale_to(folder: Path, workers: int) -> int:
    """Request this many workers. Raises ConfigError, and CannotConnect if no `diloco up` runs there or it is silent."""
    before = read_record(folder)
    if before is None:
        raise CannotConnect(
            f"no `diloco up` runs in {folder}; give its --folder, or start one: diloco up --folder {folder}"
        )
    if before.quorum > workers:
        raise ConfigError(
            f"--workers {workers} is below the quorum of {before.quorum} (sync.quorum), so no round could close; give "
            f"at least {before.quorum}"
        )
    if not before.training:
        raise _not_training(folder)
    write_json(wish_file(folder), {"workers": workers})
    deadline = time.monotonic() + END_S
    while (now := read_record(folder)) is None or now.workers != workers:
        if now is None or not now.training:
            wish_file(folder).unlink(missing_ok=True)
            raise _not_training(folder)
        if time.monotonic() > deadline:
            wish_file(folder).unlink(missing_ok=True)
            raise CannotConnect(f"`diloco up` in {folder} does not answer; look at it: diloco status --folder {folder}")
        time.sleep(LOOK_S)
    change = workers - before.workers
    what = f"{change} start" if change > 0 else f"{-change} leave" if change < 0 else "as it was"
    print(f"{before.workers} -> {workers} workers ({what}); see them come and go: diloco status --watch")
    return 0


def _not_training(folder: Path) -> CannotConnect:
    return CannotConnect(
        f"`diloco up` in {folder} is not training yet, or no longer (on Ray, workers never change); look at it: "
        f"diloco status --folder {folder}"
    )
