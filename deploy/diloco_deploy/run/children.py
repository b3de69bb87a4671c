"""Defines how to start a local cluster's shards and workers: names, arguments, ports and log files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from diloco_common.settings import Settings
from diloco_common.wire.addresses import Endpoints, Role, dialable
from diloco_demo.cli import declared_digest
from diloco_deploy.run.folder import ClusterFolder
from diloco_deploy.run.supervisor import ChildSpec
from diloco_deploy.trust.tending import OBSERVER, OwnCertificates

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

    def worker(self, index: int, host: str = "") -> ChildSpec:
        """All shards must be up. `host`: the host at which the worker reaches them, if not their own address."""
        name = self.workers[index]
        worker, address_file = self._settings.worker, self._files.run / f"{name}.json"
        given = {
            "worker.shards": self.shard_addresses(host), "worker.learner_id": name,
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

    def port(self, shard: str) -> int:
        return int(self._ports[shard][0].rpartition(":")[2])

    def shard_addresses(self, host: str = "") -> str:
        """Addresses of all shards, which must be up, as one text. `host`: see `worker`."""
        return ",".join(f"{host}:{self.port(s)}" if host else dialable(self._ports[s][0]) for s in self.shards)

    def _proof_of(self, who: str) -> dict[str, object]:
        own = self._certificates
        return {} if own is None else {"security.tls": own.of(who), "security.revoked": own.deny_list}


def names(kind: Role, count: int) -> list[str]:
    return [f"{kind}-{i}" for i in range(count)]


def nth_port(address: str, index: int) -> str:
    """The address of process number `index`: a port in the settings counts up from the first process."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + index}" if port.isdigit() and int(port) else address


def flags(files: ClusterFolder, address_file: Path, given: Mapping[str, object]) -> list[str]:
    """Arguments of a shard or worker: the cluster's settings, and its own."""
    return [f"--settings={files.settings}", f"--address-file={address_file}", *_sets(given)]


def _sets(given: Mapping[str, object]) -> list[str]:
    return [f"--set={name}={value}" for name, value in given.items()]
