"""A real Ray cluster on this machine: a head without room for members, and nodes, each a raylet with its processes."""

from __future__ import annotations

import os
import signal
from typing import Any, Self

import psutil
from ray._private.ray_constants import PROCESS_TYPE_RAYLET
from ray.cluster_utils import Cluster

CPUS = 2
_SMALL = {"object_store_memory": 80 << 20, "include_dashboard": False}


class RayCluster:
    """A context manager that ends what it started, and nobody else's Ray."""

    def __init__(self, nodes: int) -> None:
        self._count = nodes
        self._cluster: Any = None
        self._orphans: list[psutil.Process] = []

    def __enter__(self) -> Self:
        os.environ.setdefault("RAY_raylet_start_wait_time_s", "150")  # the machine may be busy
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **_SMALL})
        for _ in range(self._count):
            self.add_node()
        return self

    def __exit__(self, *_: object) -> None:
        self._cluster.shutdown()
        for process in self._orphans:
            _kill(process)

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add_node(self) -> None:
        self._cluster.add_node(num_cpus=CPUS, **_SMALL)

    def raylet_of(self, pid: int) -> psutil.Process:
        """The raylet of the node on which a process runs."""
        raylets = {self._raylet(node): node for node in self._cluster.list_all_nodes()}
        (found,) = [parent for parent in psutil.Process(pid).parents() if parent.pid in raylets]
        return found

    def kill(self, raylet: psutil.Process, *, with_processes: bool) -> list[psutil.Process]:
        """Kill a raylet, with the processes below it or without. Returns those."""
        below = raylet.children(recursive=True)
        raylet.send_signal(signal.SIGKILL)
        for process in below if with_processes else ():
            _kill(process)
        self._orphans += below
        return below

    @staticmethod
    def _raylet(node: Any) -> int:
        return int(node.all_processes[PROCESS_TYPE_RAYLET][0].process.pid)


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return
