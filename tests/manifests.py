"""The manifests for Kubernetes as Kustomize builds them, and what a pod of theirs would see."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Iterator
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
    return _built(FOLDER / build)


def on_top_of(build: str, folder: Path, **kustomization: object) -> list[Resource]:
    """What somebody gets whose own overlay, in `folder`, says this and no more."""
    parent = os.path.relpath(FOLDER / build, folder.resolve())
    (folder / "kustomization.yaml").write_text(yaml.safe_dump({"resources": [parent], **kustomization}))
    return _built(folder)


def _built(folder: Path) -> list[Resource]:
    ended = subprocess.run([kubectl(), "kustomize", folder], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    return list(yaml.safe_load_all(ended.stdout))


def one(build: str, kind: str) -> Resource:
    (found,) = [resource for resource in built(build) if resource["kind"] == kind]
    return found


def pods(build: str) -> Iterator[Resource]:
    return _pods(built(build))


def containers(resources: Iterable[Resource]) -> list[Resource]:
    return [container for pod in _pods(resources) for container in pod["spec"]["containers"]]


def _pods(resources: Iterable[Resource]) -> Iterator[Resource]:
    for resource in resources:
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
        variables[variable["name"]] = re.sub(r"\$\(\w+\)", "0", variable.get("value", "0"))
    return {name: value for name, value in variables.items() if name.startswith("DILOCO_")}
