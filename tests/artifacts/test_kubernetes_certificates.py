"""The overlay with certificates: what cert-manager would make is what shards and learners take.

The definitions of cert-manager's kinds cannot be had here. So their fields are compared with a list that was written by
hand from its documentation (v1), and a certificate is made of each, and read by our own code.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from diloco_common.observe.http_listener import LOOKERS
from diloco_common.settings_loader import load
from diloco_common.trust.files import KEY, LEARNER_HOST, exposure
from diloco_common.trust.identity import Scope, Subject, subject_of_uri
from manifests import FOLDER, built, environment, on_top_of, one, pods

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
