"""The manifests for Kubernetes: Kustomize builds them, the API takes them, and all parts agree with each other.

The definitions of cert-manager's kinds cannot be had here. So the fields of the overlay with certificates are compared
with a list that was written by hand from its documentation (v1), and a certificate is made of each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft202012Validator

from diloco_common.observe.http import check_http_is_meant
from diloco_common.observe.http_listener import LOOKERS
from diloco_common.settings_loader import load
from diloco_common.trust.files import KEY, LEARNER_HOST, exposure
from diloco_common.trust.identity import Scope, Subject, subject_of_uri
from diloco_server.shell.access import check_consent
from manifests import FOLDER, ROOT, built, environment, on_top_of, one, pods

OVERLAYS = [f"overlays/{folder.name}" for folder in sorted((FOLDER / "overlays").iterdir())]
BUILDS = ["base", *OVERLAYS]
WITH_TOKEN = [build for build in BUILDS if build != "overlays/mtls"]
VERSIONS = ["1.29", "1.30", "1.31", kubernetes_validate.latest_version()]
"""From the oldest that has what we use to the newest."""
OF_OPERATORS = {
    path.stem: Draft202012Validator(json.loads(path.read_text())) for path in (ROOT / "tests/data/crds").glob("*.json")
}
"""Kinds that Kubernetes itself does not know, and what their operators take."""


@pytest.mark.parametrize("build", BUILDS)
def test_the_api_of_kubernetes_takes_every_resource(build: str) -> None:
    for resource in built(build):
        for version in VERSIONS if resource["kind"] not in OF_OPERATORS else ():
            kubernetes_validate.validate(resource, version, strict=True)


def test_the_example_with_a_mirror_and_a_standby_is_taken_and_its_settings_hold() -> None:
    base = {c["metadata"]["name"].rpartition("-")[0]: c["data"] for c in built("base") if c["kind"] == "ConfigMap"}
    roles = []
    for resource in yaml.safe_load_all((FOLDER / "examples/readers.yaml").read_text()):
        for version in VERSIONS:
            kubernetes_validate.validate(resource, version, strict=True)
        if "template" in resource["spec"]:
            (container,) = resource["spec"]["template"]["spec"]["containers"]
            given = {k: v for f in container.get("envFrom", ()) for k, v in base[f["configMapRef"]["name"]].items()}
            settings = load(None, given | {e["name"]: e["value"] for e in container["env"]}).settings
            check_consent(settings)
            roles.append(settings.shard.role)
    assert roles == ["mirror", "standby"]


@pytest.mark.parametrize("build", BUILDS)
def test_operators_take_every_resource_of_theirs(build: str) -> None:
    known = {"v1", "apps/v1", "batch/v1", "policy/v1", "networking.k8s.io/v1"}
    for resource in built(build):
        assert (resource["kind"] in OF_OPERATORS) is (resource["apiVersion"] not in known), resource["kind"]
        if (schema := OF_OPERATORS.get(resource["kind"])) is not None:
            schema.validate(resource)


@pytest.mark.parametrize("build", BUILDS)
def test_shards_are_as_many_everywhere(build: str) -> None:
    stateful = one(build, "StatefulSet")
    settings = [load(None, environment(build, pod)).settings for pod in pods(build)]
    shards = [f"diloco-shard-{i}.{one(build, 'Service')['metadata']['name']}:50051"
              for i in range(stateful["spec"]["replicas"])]  # fmt: skip
    assert sorted(s.worker.shards for s in settings) == [(), tuple(shards)]
    assert max(s.shard.count for s in settings) == len(shards)


@pytest.mark.parametrize("build", BUILDS)
def test_shards_and_workers_start_with_these_settings(build: str) -> None:
    """What other machines reach is protected, or said to be open."""
    for pod in pods(build):
        settings = load(None, environment(build, pod)).settings
        security = settings.security
        assert (str(security.token_file) == "/run/diloco/token") is (build in WITH_TOKEN)
        assert (security.tls is None) is (build in WITH_TOKEN)
        check_http_is_meant(
            "http", settings.worker.http if settings.worker.learner_id else settings.shard.http, security
        )
        check_consent(settings)


@pytest.mark.parametrize("build", BUILDS)
def test_pods_have_no_rights(build: str) -> None:
    for pod in pods(build):
        (container,) = pod["spec"]["containers"]
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert pod["spec"]["enableServiceLinks"] is False, "no variable of a service is taken for a setting"
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip
        assert "memory" in container["resources"]["limits"]
        scratch = [volume["emptyDir"] for volume in pod["spec"]["volumes"] if "emptyDir" in volume]
        assert all("sizeLimit" in each for each in scratch)


@pytest.mark.parametrize("build", WITH_TOKEN)
def test_the_secret_is_mounted_as_a_process_takes_it(build: str) -> None:
    """The kubelet makes it root's, and of the group fsGroup."""
    for pod in pods(build):
        user = pod["spec"]["securityContext"]
        (mode,) = [volume["secret"]["defaultMode"] for volume in pod["spec"]["volumes"] if "secret" in volume]
        groups = {user["runAsGroup"], user["fsGroup"]}
        assert exposure(mode, 0, user["fsGroup"], user["runAsUser"], groups) is None
        assert mode & 0o040, "user 10001 is not root, and reads it as a member of the group"


@pytest.mark.parametrize("build", BUILDS)
def test_traffic_is_restricted_for_every_pod(build: str) -> None:
    policies = [r["spec"] for r in built(build) if r["kind"] == "NetworkPolicy"]
    for pod in pods(build):
        mine = [p for p in policies if p["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()]
        assert {direction for policy in mine for direction in policy["policyTypes"]} == {"Ingress", "Egress"}


@pytest.mark.parametrize("build", WITH_TOKEN)
def test_a_shard_is_asked_for_its_health_where_it_listens(build: str) -> None:
    (container,) = one(build, "StatefulSet")["spec"]["template"]["spec"]["containers"]
    assert one(build, "Service")["spec"]["ports"][0]["port"] == container["ports"][0]["containerPort"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {container[probe]["grpc"]["port"] for probe in ("startupProbe", "readinessProbe")} == {ports["grpc"]}
    for pod in pods(build):
        variables = environment(build, pod)
        assert {variables[name] for name in variables if name.endswith("__HTTP")} == {f"0.0.0.0:{ports['http']}"}


def test_a_learner_that_dies_starts_again_alone_and_one_that_is_refused_does_not() -> None:
    job = one("overlays/demo", "Job")["spec"]
    jobset = one("overlays/jobset", "JobSet")["spec"]
    (alone,) = [replicated["template"]["spec"] for replicated in jobset["replicatedJobs"]]
    refused = [rule["onExitCodes"]["values"] for spec in (job, alone) for rule in spec["podFailurePolicy"]["rules"]
               if "onExitCodes" in rule]  # fmt: skip
    assert refused == [[2, 6], [2, 6]]
    assert alone["backoffLimit"] == 2**31 - 1
    (rule,) = jobset["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])


def test_the_operator_gets_the_rules_that_are_tested() -> None:
    ended = subprocess.run(
        [sys.executable, ROOT / "tools/prometheus_rule.py", "--check"], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    files = sorted((ROOT / "deploy/prometheus/rules").glob("*.yml"))
    groups = [group for path in files for group in yaml.safe_load(path.read_text())["groups"]]
    assert one("overlays/gpu", "PrometheusRule")["spec"]["groups"] == groups


BUILD = "overlays/mtls"


def certificates() -> dict[str, dict[str, Any]]:
    """Secret -> spec, of all that are no authority."""
    found = [r["spec"] for r in built(BUILD) if r["kind"] == "Certificate"]
    return {spec["secretName"]: spec for spec in found if not spec.get("isCA")}


def subject_of_secret(secret: str) -> Subject:
    (uri,) = certificates()[secret]["uris"]
    return subject_of_uri(uri)


def mounted(pod: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Folder -> file -> secret and key."""
    (volume,) = [v["projected"] for v in pod["spec"]["volumes"] if "projected" in v]
    found: dict[str, dict[str, str]] = {}
    for source in volume["sources"]:
        for item in source["secret"]["items"]:
            folder, _, file = item["path"].partition("/")
            found.setdefault(folder, {})[file] = f"{source['secret']['name']} {item['key']}"
    return found


def test_every_process_has_a_certificate_that_names_it() -> None:
    shard, worker = pods(BUILD)
    run_id = load(None, environment(BUILD, shard)).settings.run.id
    wanted = {
        f"shard-{i}": Subject(run_id, Scope.SHARD, str(i)) for i in range(one(BUILD, "StatefulSet")["spec"]["replicas"])
    }
    assert {name: subject_of_secret(files[KEY].split()[0]) for name, files in mounted(shard).items()} == wanted
    wanted = {
        f"worker-{i}": Subject(run_id, Scope.LEARNER, f"worker-{i}")
        for i in range(one(BUILD, "Job")["spec"]["completions"])
    }
    assert {name: subject_of_secret(files[KEY].split()[0]) for name, files in mounted(worker).items()} == wanted
    for pod in (shard, worker):
        settings = load(None, environment(BUILD, pod)).settings
        assert settings.security.tls is not None
        assert settings.security.tls.name in mounted(pod)


def test_a_worker_starts_without_the_secret_of_one_that_is_revoked_and_a_shard_waits_for_its_own() -> None:
    shard, worker = pods(BUILD)
    for pod, is_optional in [(shard, False), (worker, True)]:
        (volume,) = [v["projected"] for v in pod["spec"]["volumes"] if "projected" in v]
        assert {source["secret"].get("optional", False) for source in volume["sources"]} == {is_optional}


def test_shards_are_dialed_under_names_of_their_certificates_and_learners_are_scraped_under_theirs() -> None:
    _, worker = pods(BUILD)
    for address in load(None, environment(BUILD, worker)).settings.worker.shards:
        host = address.rpartition(":")[0]
        assert host in certificates()[host.partition(".")[0]]["dnsNames"]
    for secret, spec in certificates().items():
        if subject_of_secret(secret).scope is Scope.LEARNER:
            assert spec["dnsNames"] == [LEARNER_HOST]


def test_who_serves_may_and_who_only_looks_may_not() -> None:
    for secret, spec in certificates().items():
        assert ("server auth" in spec["usages"]) is (subject_of_secret(secret).scope not in LOOKERS), secret
        assert "client auth" in spec["usages"]


def test_keys_are_mounted_as_a_process_takes_them() -> None:
    """The kubelet makes them root's, and of the group fsGroup."""
    for pod in pods(BUILD):
        user = pod["spec"]["securityContext"]
        (mode,) = [v["projected"]["defaultMode"] for v in pod["spec"]["volumes"] if "projected" in v]
        assert exposure(mode, 0, user["fsGroup"], user["runAsUser"], {user["runAsGroup"], user["fsGroup"]}) is None
        assert all("subPath" not in mount for mount in pod["spec"]["containers"][0]["volumeMounts"]), "never renewed"


def test_the_operator_scrapes_with_the_certificate_of_an_observer(tmp_path: Path) -> None:
    parts = [os.path.relpath(FOLDER / "components" / name, tmp_path.resolve()) for name in ("monitoring", "mtls")]
    monitors = [r for r in on_top_of("overlays/demo", tmp_path, components=parts) if r["kind"] == "PodMonitor"]
    named = {r["metadata"]["name"]: r["spec"]["podMetricsEndpoints"][0] for r in monitors}
    assert {each["scheme"] for each in named.values()} == {"https"}
    for name, secrets in [("diloco-shard", "diloco-shard-"), ("diloco-worker", "diloco-worker-")]:
        tls = named[name]["tlsConfig"]
        scraped = [spec for secret, spec in certificates().items() if secret.startswith(secrets)]
        assert all(tls["serverName"] in spec["dnsNames"] for spec in scraped)
        assert subject_of_secret(tls["keySecret"]["name"]).scope is Scope.OBSERVER
