"""docker-compose.yml and what it mounts fit together; tests/e2e/test_compose.py runs it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from diloco_common.settings_loader import load


@pytest.fixture
def compose(repository: Path) -> dict[str, Any]:
    return dict(yaml.safe_load((repository / "docker-compose.yml").read_text()))


def test_grafana_finds_its_dashboards_its_data_source_and_its_password(
    repository: Path, compose: dict[str, Any]
) -> None:
    grafana, provisioning = compose["services"]["grafana"], repository / "deploy/grafana/provisioning"
    mounts = dict(reversed(volume.split(":")[:2]) for volume in grafana["volumes"])
    assert mounts["/etc/grafana/provisioning"] == "./deploy/grafana/provisioning"
    (provider,) = yaml.safe_load((provisioning / "dashboards/diloco.yml").read_text())["providers"]
    assert mounts[provider["options"]["path"]] == "./deploy/grafana/dashboards"

    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())["datasources"]
    host, port = source["url"].removeprefix("http://").split(":")
    assert any(published.endswith(f":{port}") for published in compose["services"][host]["ports"])

    (secret,) = grafana["secrets"]
    assert secret in compose["secrets"]
    assert grafana["environment"]["GF_SECURITY_ADMIN_PASSWORD__FILE"] == f"/run/secrets/{secret}"


def test_every_port_is_open_on_this_host_alone(compose: dict[str, Any]) -> None:
    ports = [port for service in compose["services"].values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_every_service_is_confined(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        confined = (service["read_only"], service["cap_drop"], service["security_opt"])
        assert confined == (True, ["ALL"], ["no-new-privileges:true"]), name


def test_every_service_is_bounded(compose: dict[str, Any]) -> None:
    """One that leaks, forks or talks too much ends itself, and not its host."""
    for name, service in compose["services"].items():
        assert re.fullmatch(r"\$\{\w+:-\d+g\}|\d+[mg]", service["mem_limit"]), name
        assert 0 < service["pids_limit"] <= 512, name
        assert service["logging"]["options"].keys() == {"max-size", "max-file"}, name


def test_every_setting_of_a_service_is_one(compose: dict[str, Any]) -> None:
    found = 0
    for service in compose["services"].values():
        given = {
            name: re.sub(r"\$\{\w+:-(.*)\}", r"\1", str(value))
            for name, value in service.get("environment", {}).items()
        }
        found += len(load(None, given).given)
    assert found > 10
