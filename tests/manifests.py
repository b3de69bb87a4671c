"""The manifests for Kubernetes as Kustomize builds them, and what a pod of theirs would see."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from programs import kubectl

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "deploy/kubernetes"
Resource = dict[str, Any]


@cache
def built(build: str) -> list[Resource]:
    ended = subprocess.run([kubectl(), "kustomize", FOLDER / build], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    return list(yaml.safe_load_all(ended.stdout))


def one(build: str, kind: str) -> Resource:
    (found,) = [resource for resource in built(build) if resource["kind"] == kind]
    return found


def pods(build: str) -> Iterator[Resource]:
    for resource in built(build):
        if resource["kind"] in ("StatefulSet", "Job"):
            yield resource["spec"]["template"]
        if resource["kind"] == "JobSet":
            yield from (job["template"]["spec"]["template"] for job in resource["spec"]["replicatedJobs"])


def environment(build: str, pod: Resource) -> dict[str, str]:
    """What the pod's container sees of ours, as the pod with index 0."""
    (container,) = pod["spec"]["containers"]
    names = [source["configMapRef"]["name"] for source in container["envFrom"]]
    variables = {}
    for resource in built(build):
        if resource["kind"] == "ConfigMap" and resource["metadata"]["name"] in names:
            variables |= resource["data"]
    for variable in container["env"]:
        variables[variable["name"]] = variable.get("value", "0").replace("$(INDEX)", "0")
    return {name: value for name, value in variables.items() if name.startswith("DILOCO_")}
