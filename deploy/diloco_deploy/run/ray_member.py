"""One shard or worker on Ray, from the actor's side: a process on its node, restarted if it dies.

Does not import Ray. If the actor's process or its node dies, Ray recreates the actor elsewhere: the member's next
life. Its former process may still be alive, if only Ray's daemon died. A shard waits until that process has released
the folder; a worker joins with a new generation, which fences that process off. So each life has its own log, address
file and history. The address file that others read is written once the process is up.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from diloco_common.errors import EXIT_IN_USE
from diloco_common.trust.files import REVOKED
from diloco_common.trust.identity import subject_of
from diloco_common.wire.addresses import Role, write_json
from diloco_deploy import ASK_S
from diloco_deploy.run.folder import ClusterFolder, Outputs
from diloco_deploy.run.members import flags
from diloco_deploy.run.supervisor import Action, ChildSpec, Exit, Supervisor
from diloco_deploy.trust.authority import is_good, open_authority
from diloco_deploy.trust.tending import RENEW_EVERY_S


@dataclass(frozen=True)
class Plan:
    """One member; the folder is shared by all nodes."""

    name: str
    role: Role
    index: int
    folder: Path
    """The cluster's folder, with its settings file."""
    num_shards: int
    model: str
    """Digest (`run.model`)."""
    has_certificates: bool
    history: Path | None
    """`run.history`: here the parent of one folder per life."""


@dataclass(frozen=True)
class MemberReport:
    host: str
    life: int
    is_up: bool
    over: Action | None
    """Set when it will not be restarted here."""
    exit_code: int
    events: tuple[str, ...]


class OnRay:
    """A member in the actor's process. All calls come from the thread that made it."""

    def __init__(self, plan: Plan, host: str) -> None:
        """Start the process. `host`: the address of this node, on which a shard listens."""
        self._plan, self._host = plan, host
        self._files = ClusterFolder(plan.folder, Outputs())
        self._life = _next_life(self._files.run / "lives", plan.name)
        self._own = self._files.run / "lives" / f"{plan.name}.{self._life}"
        self._supervisor = Supervisor()
        self._again_at: float | None = None
        self._renew_at = 0.0
        self._is_known = False
        self._over: Action | None = None
        self._exit_code = 0
        self._start()

    def look(self) -> MemberReport:
        """Check the process, and restart it if that is due."""
        now, events = time.monotonic(), []
        for exit in self._supervisor.look(now):
            events.append(f"{exit.name} on {self._host} {self._judge(exit, now)}")
            self._is_known = False
        self._supervisor.start_due(now)
        if self._plan.has_certificates and now >= self._renew_at:
            self._certificate()
            self._renew_at = now + RENEW_EVERY_S
        if self._again_at is not None and now >= self._again_at:
            self._start()
        found = self._supervisor.endpoints(self._plan.name)
        if found is not None and not self._is_known:
            write_json(self._files.run / f"{self._plan.name}.json", asdict(found))
            self._is_known = True  # set only now, since the write may fail
            events.append(f"{self._plan.name} is up on {self._host}")
        return MemberReport(self._host, self._life, found is not None, self._over, self._exit_code, tuple(events))

    def stop(self, grace_s: float) -> bool:
        """Ask the process to end. Returns whether it did within `grace_s` seconds."""
        self._again_at = None
        return not self._supervisor.stop([self._plan.name], grace_s)

    def _judge(self, exit: Exit, now: float) -> str:
        verdict = exit.verdict
        if verdict.exit_code == EXIT_IN_USE:
            self._again_at = now + ASK_S
            return "waits for its former process to end"
        if verdict.action is not Action.AGAIN:
            self._over, self._exit_code = verdict.action, verdict.exit_code
        return f"{verdict.why}; its log is {exit.log}" if verdict.action is Action.FAIL else verdict.why

    def _start(self) -> None:
        self._again_at = None
        log = self._files.logs / f"{self._plan.name}.{self._life}.log"
        module = "diloco_server" if self._plan.role == "shard" else "diloco_demo"
        kind, address_file = self._plan.role, self._own / "address.json"
        self._supervisor.start(ChildSpec(self._plan.name, kind, module, self._arguments, log, address_file))

    def _arguments(self) -> Sequence[str]:
        plan, files = self._plan, self._files
        given: dict[str, object] = {} if plan.history is None else {"run.history": plan.history / str(self._life)}
        if plan.role == "shard":
            given |= {
                "shard.index": plan.index, "shard.count": plan.num_shards, "run.model": plan.model,
                "shard.listen": f"{self._host}:0", "shard.http": f"{self._host}:0",
                "shard.data_dir": files.shard_folder(plan.index),
            }  # fmt: skip
        else:
            given |= {
                "worker.shards": shard_files(plan.folder, plan.num_shards), "worker.learner_id": plan.name,
                "worker.http": f"{self._host}:0", "worker.folder": files.worker_folder(plan.index),
            }  # fmt: skip
        if plan.has_certificates:
            given |= {"security.tls": self._certificate(), "security.revoked": files.certs / REVOKED}
        return flags(files, self._own / "address.json", given)

    def _certificate(self) -> Path:
        """The certificate, renewed if it expires soon. A shard's certificate names this node."""
        authority = open_authority(self._files.certs)
        who, hosts = (f"shard/{self._plan.index}", [self._host]) if self._plan.role == "shard" else (
            f"learner/{self._plan.name}", [])  # fmt: skip
        subject, today = subject_of(authority.run_id, who), datetime.now(UTC)
        folder = self._own / "certificate"
        if not is_good(folder, subject, hosts, authority.registry.revoked(), today):
            authority.issue(subject, today, hosts=hosts, into=folder)
        return folder


def shard_files(folder: Path, num_shards: int) -> str:
    """The address files of all shards, in the form of `worker.shards`."""
    return ",".join(f"@{folder / 'run' / f'shard-{i}.json'}" for i in range(num_shards))


def _next_life(folder: Path, name: str) -> int:
    """A number that no earlier life of this member has had on any node: making the folder claims it."""
    folder.mkdir(parents=True, exist_ok=True)
    life = 0
    while True:
        try:
            (folder / f"{name}.{life}").mkdir()
        except FileExistsError:
            life += 1
        else:
            return life
