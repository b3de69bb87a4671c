"""What is shipped: the wheel holds the named packages and nothing else, and pins agree with ranges."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from tools.lock import pins_in

from diloco_common.codec import library

PACKAGES = {
    f"diloco_{name}"
    for name in ["protos", "common", "server", "worker", "simulator", "lab", "planner", "deploy", "demo"]
}


@pytest.fixture(scope="module")
def wheel(pure: Path) -> Iterator[zipfile.ZipFile]:
    with zipfile.ZipFile(pure) as archive:
        yield archive


@pytest.fixture(scope="module")
def project(repository: Path) -> dict[str, object]:
    project: dict[str, object] = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    return project


def requirements(project: dict[str, object]) -> list[Requirement]:
    """All but those of the extra `ray`, which is not in the locked set: 240 MB that one test wants."""
    extras = [texts for name, texts in project["optional-dependencies"].items() if name != "ray"]
    return [Requirement(text) for texts in (project["dependencies"], *extras) for text in texts]


def pins(repository: Path) -> dict[str, Version]:
    texts = [(repository / f"requirements/{part}.txt").read_text() for part in ("torch", "run", "dev")]
    return {name: Version(version) for text in texts for name, version in pins_in(text).items()}


def test_the_wheel_holds_the_named_packages_which_are_typed_and_nothing_else(wheel):
    tops = {name.partition("/")[0] for name in wheel.namelist()}

    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES
    assert len(tops) == len(PACKAGES) + 1
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(wheel.namelist())


def test_the_wheel_holds_every_module_and_no_rubbish(wheel, repository):
    """A file that git does not ignore is in, others are not."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*diloco_*/*"]
    listed = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    sources = {
        path[path.index("diloco_") :]
        for path in listed.stdout.splitlines()
        if path[path.index("diloco_") :].partition("/")[0] in PACKAGES and (repository / path).exists()
    }

    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == sources


def test_the_wheel_carries_its_license_its_protocol_and_its_commands(wheel):
    names = wheel.namelist()
    (entry_points,) = (name for name in names if name.endswith(".dist-info/entry_points.txt"))
    (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))

    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert "diloco_protos/parameter_server.proto" in names
    commands = set(re.findall(r"^(\S+) =", wheel.read(entry_points).decode(), re.MULTILINE))
    assert commands == {"diloco", "diloco-server", "diloco-worker"}
    assert Parser().parsestr(wheel.read(metadata).decode())["License-Expression"] == "Apache-2.0"


def test_every_requirement_is_pinned_within_its_range(project, repository):
    pinned = pins(repository)

    for requirement in requirements(project):
        name = canonicalize_name(requirement.name)
        assert name in pinned, f"{name} is not in requirements/: run `make lock`"
        assert pinned[name] in requirement.specifier, f"{requirement} excludes the pinned {pinned[name]}"


@pytest.mark.parametrize(
    ("requirement", "file", "pattern"),
    [
        ("grpcio", "parameter_server_pb2_grpc.py", r"GRPC_GENERATED_VERSION = '([\d.]+)'"),
        ("protobuf", "parameter_server_pb2.py", r"# Protobuf Python Version: ([\d.]+)"),
    ],
)
def test_the_lowest_runtime_allowed_is_the_generators(project, repository, requirement, file, pattern):
    """Generated code refuses an older runtime, so an older one must not be installable."""
    text = (repository / "protos" / "diloco_protos" / file).read_text()
    generator = Version(re.search(pattern, text)[1])

    (ours,) = (r for r in requirements(project) if r.name == requirement)
    (lowest,) = (Version(s.version) for s in ours.specifier if s.operator == ">=")
    assert lowest == generator


@pytest.mark.parametrize("compiler", ["cc", "no-such-compiler"])
def test_a_build_compiles_the_kernels_or_says_why_not(repository, tmp_path, compiler):
    """As `pip install .` builds."""
    if not (library.fitting() and shutil.which("cc")):
        pytest.skip("there is no C compiler, or no vector instruction set that we know")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(repository)]
    environment = {**os.environ, "CC": compiler}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    (path,) = tmp_path.iterdir()
    with zipfile.ZipFile(path) as archive:
        compiled = {name.rpartition("/")[2] for name in archive.namelist() if name.endswith(".so")}
    if compiler == "cc":
        assert library.KERNELS.built_name(library.fitting()[0]) in compiled
        assert "-none-linux_" in path.name
    else:
        assert not compiled
        assert path.name.endswith("py3-none-any.whl")
        words = "no native kernels, torch does their work: there is no C compiler (no-such-compiler)"
        assert f"{said.stdout}{said.stderr}".count(words) == 1


@pytest.mark.parametrize("package", ["diloco_worker", "diloco_server", "diloco_deploy.cli", "diloco_demo.cli"])
def test_on_windows_an_import_says_what_it_needs(package: str) -> None:
    code = f"import sys; sys.platform = 'win32'; import {package}"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.stderr.strip().endswith(
        "ImportError: decoupled-diloco needs Linux; on Windows, install it in WSL 2 (docs/home.md)"
    )
