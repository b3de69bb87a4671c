"""The compose file as a test drives it: the commands of docs/deploy.md, by either Compose, in a project of their own.

Ports of the host are whatever is free; everything ends with `down -v`, also when the test fails.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, Self, TypeVar

import waiting

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache"
DEADLINE_S = 240.0
"""For things that take seconds on a machine that is not busy."""
LOOK_EVERY_S = 0.5

BEGIN = {"v2": 'set -euo pipefail; docker-compose() { docker compose "$@"; }\n', "v1": "set -euo pipefail\n"}
"""What docker-compose is, as docs/deploy.md says. Version 1 has the classic builder, version 2 BuildKit."""

T = TypeVar("T")

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def until(condition: Callable[[], T], what: str, seconds: float = DEADLINE_S) -> T:
    """The value of the condition once it is true; containers are slower still."""
    return waiting.until(condition, what, seconds, LOOK_EVERY_S)


def installed() -> list[str]:
    """Which versions of Compose there are, the newer one first."""
    asked = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    return [*(["v2"] if asked.returncode == 0 else []), *(["v1"] if shutil.which("docker-compose") else [])]


class Project:
    """The containers of one test. A context manager that removes them, their volumes and their network."""

    def __init__(self, compose: str) -> None:
        """`compose`: one that is `installed`."""
        self.compose = compose
        free = dict.fromkeys(("PAGE_PORT", "PROMETHEUS_PORT", "GRAFANA_PORT", "SHARD_0_PORT", "SHARD_1_PORT"), "")
        mine = {"IMAGE_TAG": f"e2e-{compose}", "COMPOSE_PROJECT_NAME": f"diloco-e2e-{compose}-{os.getpid()}"}
        builder = {"DOCKER_BUILDKIT": {"v1": "0", "v2": "1"}[compose]}
        self._environment = {**os.environ, **free, **builder, **mine}

    def use(self, **variables: str) -> None:
        """From now on, these are in the environment."""
        self._environment |= variables

    def run(self, commands: str, *, seconds: float = 1200.0) -> str:
        """Run shell commands in the top folder; what they wrote to stdout. Fails where one of them does."""
        done = subprocess.run(
            ["bash", "-c", BEGIN[self.compose] + commands], cwd=ROOT, env=self._environment, timeout=seconds,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (
            f"{commands}\nended with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        )
        return done.stdout

    def containers(self, service: str = "") -> list[dict[str, Any]]:
        """What the engine says of the containers, ended ones included."""
        ids = self.run(f"docker-compose ps -a -q {service}").split()
        return list(json.loads(self.run(f"docker inspect {' '.join(ids)}"))) if ids else []

    def health(self) -> dict[str, str]:
        """Container -> "healthy", "starting", "unhealthy", or how it ended."""
        states = {c["Name"]: c["State"] for c in self.containers()}
        return {
            name: state.get("Health", {}).get("Status", "running") if state["Running"] else f"exit {state['ExitCode']}"
            for name, state in states.items()
        }

    def said(self, service: str) -> str:
        return self.run(f"docker-compose logs --no-color {service} 2>&1")

    @property
    def api(self) -> str:
        """Where Prometheus is asked."""
        return f"http://{self.run('docker-compose port prometheus 9090').strip()}/api/v1/"

    def prometheus(self, path: str, **query: str) -> Any:
        """An answer of Prometheus' HTTP API; None while it cannot be reached."""
        try:
            with _opener.open(f"{self.api}{path}?{urllib.parse.urlencode(query)}", timeout=10) as answer:
                return json.load(answer)["data"]
        except OSError:
            return None

    def values(self, query: str) -> dict[str, float]:
        """Instance -> value, of an instant query of one series per instance."""
        return self.by("instance", query)

    def by(self, label: str, query: str) -> dict[str, float]:
        """Value of this label -> value, of an instant query of one series per value of it."""
        answer = self.prometheus("query", query=query) or {"result": []}
        return {one["metric"].get(label, ""): float(one["value"][1]) for one in answer["result"]}

    def first_said(self, service: str, pattern: str) -> float | None:
        """When a container first wrote a line like this, in seconds since 1970, by the engine's clock."""
        said = self.run(f"docker logs --timestamps $(docker-compose ps -q {service}) 2>&1")
        found = re.search(rf"^(\S+?)(\.\d+)Z .*{pattern}", said, re.MULTILINE)
        if found is None:
            return None
        return datetime.fromisoformat(f"{found[1]}+00:00").timestamp() + float(found[2])

    def value(self, query: str) -> float:
        """Of a query with one answer; not a number while there is none."""
        return next(iter(self.values(query).values()), float("nan"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        log = CACHE / f"compose-{self.compose}.log"
        CACHE.mkdir(exist_ok=True)
        log.write_text(self.run("docker-compose ps -a; docker-compose logs --no-color 2>&1 || true"))
        print(f"what the containers said: {log}")
        self.run("docker-compose --profile chaos down -v --remove-orphans -t 5")  # without it, v2 leaves those two
