"""requirements/ as tools/lock.py writes it, by hash and nothing else; and the bills of materials made of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tools.lock import GROUPS, known_builds, pins_in

FOLDER = Path(__file__).resolve().parents[2] / "requirements"
FILES = sorted(FOLDER.glob("*.txt"))
ENTRY = re.compile(r"^[a-z0-9-]+==\S+(?: \\\n    --hash=sha256:[0-9a-f]{64})+$")


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_every_package_is_pinned_by_hash(file: Path) -> None:
    text = "\n".join(line for line in file.read_text().splitlines() if not line.startswith("#"))
    entries = text.replace("\\\n", "\\").splitlines()
    assert entries
    for entry in entries:
        assert ENTRY.match(entry.replace("\\", "\\\n")), entry
    names = [entry.partition("==")[0] for entry in entries]
    assert len(names) == len(set(names)), "two versions of one package: pip installs neither"


def test_what_is_installed_together_is_pinned_to_one_version() -> None:
    """torch, run and dev in .venv; torch, run and build in an environment of a user's; any of them with cuda."""
    for parts in (("torch", "cuda", "run", "dev"), ("torch", "cuda", "run", "build")):
        pinned: dict[str, str] = {}
        for part in parts:
            for name, version in pins_in((FOLDER / f"{part}.txt").read_text()).items():
                assert pinned.setdefault(name, version) == version, name


def test_every_hash_of_torch_says_which_build_it_is_of() -> None:
    text = (FOLDER / "torch.txt").read_text()
    known = known_builds(text)
    assert known is not None
    assert set(known.wheels.values()) == set(re.findall("sha256:([0-9a-f]{64})", text))
    pythons = {"cp311", "cp312", "cp313", "cp314"}
    for machine in ("x86_64", "aarch64"):
        for local in ("", "+cpu"):
            names = [f"torch-{known.version}{local}-{p}-{p}-manylinux_2_28_{machine}.whl" for p in pythons]
            assert set(names) <= known.wheels.keys()


@pytest.mark.parametrize("group", GROUPS)
def test_tools_are_pinned_within_what_the_project_says(repository: Path, group: str) -> None:
    wanted = tomllib.loads((repository / "pyproject.toml").read_text())["dependency-groups"][group]
    pinned = pins_in((FOLDER / f"{group}.txt").read_text())
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)])


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
