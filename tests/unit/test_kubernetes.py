"""The manifests for Kubernetes: Kustomize builds them, the API takes them, and all parts agree with each other."""

from __future__ import annotations

import re
import subprocess
import sys

import kubernetes_validate
import pytest
import yaml

from diloco_common.settings import Settings
from diloco_common.settings_loader import load
from manifests import ROOT, built, environment, one, pods

BUILDS = ["base", "overlays/demo", "overlays/gpu", "overlays/jobset"]
VERSIONS = ["1.29", "1.33", kubernetes_validate.latest_version()]
"""The oldest that has what we use, one between, and the newest."""
OF_OPERATORS = {"PodMonitor", "PrometheusRule", "JobSet"}
"""Kinds that Kubernetes itself does not know."""


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("build", BUILDS)
def test_the_api_of_kubernetes_takes_every_resource(build: str, version: str) -> None:
    for resource in built(build):
        if resource["kind"] not in OF_OPERATORS:
            kubernetes_validate.validate(resource, version, strict=True)


@pytest.mark.parametrize("build", BUILDS)
def test_shards_are_as_many_everywhere(build: str) -> None:
    stateful = one(build, "StatefulSet")
    settings = [load(None, environment(build, pod)).settings for pod in pods(build)]
    shards = [f"diloco-shard-{i}.{one(build, 'Service')['metadata']['name']}:50051"
              for i in range(stateful["spec"]["replicas"])]  # fmt: skip
    assert sorted(s.worker.shards for s in settings) == [(), tuple(shards)]
    assert max(s.shard.count for s in settings) == len(shards)


@pytest.mark.parametrize("build", BUILDS)
def test_every_variable_is_a_setting_and_both_sides_are_of_one_run(build: str) -> None:
    settings: list[Settings] = [load(None, environment(build, pod)).settings for pod in pods(build)]
    assert len({s.run.id for s in settings}) == 1
    assert {str(s.security.token_file) for s in settings} == {"/run/diloco/token"}
    assert {s.worker.learner_id for s in settings} == {"", "worker-0"}


@pytest.mark.parametrize("build", BUILDS)
def test_pods_have_no_rights(build: str) -> None:
    for pod in pods(build):
        (container,) = pod["spec"]["containers"]
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip
        assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize("build", BUILDS)
def test_no_variable_of_a_service_is_taken_for_a_setting(build: str) -> None:
    assert [pod["spec"]["enableServiceLinks"] for pod in pods(build)] == [False, False]


@pytest.mark.parametrize("build", BUILDS)
def test_traffic_is_restricted_for_every_pod(build: str) -> None:
    policies = [r["spec"] for r in built(build) if r["kind"] == "NetworkPolicy"]
    for pod in pods(build):
        (policy,) = [
            p for p in policies if p["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        ]
        assert policy["policyTypes"] == ["Ingress", "Egress"]


@pytest.mark.parametrize("build", BUILDS)
def test_a_shard_is_asked_for_its_health_where_it_listens(build: str) -> None:
    (container,) = one(build, "StatefulSet")["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {container[probe]["grpc"]["port"] for probe in ("startupProbe", "readinessProbe")} == {ports["grpc"]}
    for pod in pods(build):
        variables = environment(build, pod)
        assert {variables[name] for name in variables if name.endswith("__HTTP")} == {f"0.0.0.0:{ports['http']}"}


def test_the_operator_gets_the_rules_that_are_tested() -> None:
    ended = subprocess.run(
        [sys.executable, ROOT / "tools/prometheus_rule.py", "--check"], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    files = sorted((ROOT / "deploy/prometheus/rules").glob("*.yml"))
    groups = [group for path in files for group in yaml.safe_load(path.read_text())["groups"]]
    assert one("overlays/gpu", "PrometheusRule")["spec"]["groups"] == groups


def test_scraped_series_have_the_job_names_that_the_rules_know() -> None:
    rules = (ROOT / "deploy/prometheus/rules/alerts.yml").read_text()
    monitors = [r for r in built("overlays/gpu") if r["kind"] == "PodMonitor"]
    jobs = {rule["replacement"] for m in monitors for rule in m["spec"]["podMetricsEndpoints"][0]["relabelings"]
            if rule["targetLabel"] == "job"}  # fmt: skip
    assert jobs == {"diloco-shard", "diloco-worker"}
    assert set(re.findall(r'job="([^"]+)"', rules)) <= jobs
