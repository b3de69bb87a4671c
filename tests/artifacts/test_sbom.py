"""Bills of materials: valid CycloneDX, with everything that is locked, and everything that is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.utils import canonicalize_name
from tools.lock import pins_in

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools/sbom.py"


def written(*arguments: str, **variables: str) -> dict[str, Any]:
    ended = subprocess.run(
        [sys.executable, TOOL, *arguments],
        env={**os.environ, **variables}, capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(ended.stdout) is None
    document: dict[str, Any] = json.loads(ended.stdout)
    return document


def libraries(document: dict[str, Any]) -> dict[str, str]:
    """normalized name -> version of the Python packages."""
    return {
        canonicalize_name(part["name"]): part["version"]
        for part in document["components"] if part.get("purl", "").startswith("pkg:pypi/")
    }  # fmt: skip


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "decoupled_diloco-0.1.0-py3-none-any.whl"
    path.write_bytes(b"PK")
    return path


def test_the_bill_of_the_wheel_names_every_locked_package_with_its_hashes(wheel: Path) -> None:
    document = written("wheel", str(wheel))
    locked: dict[str, str] = {}
    for part in ("torch", "run", "cuda"):
        locked |= pins_in((ROOT / f"requirements/{part}.txt").read_text())
    assert libraries(document) == locked
    assert all(part["hashes"] for part in document["components"])
    assert document["metadata"]["component"]["version"] == "0.1.0"
