"""requirements/ as tools/lock.py writes it: everything by hash, wheels for what is supported, and nothing else."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
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
