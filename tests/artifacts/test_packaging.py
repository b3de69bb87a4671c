"""What is shipped: each wheel holds the named packages and nothing else, and pins agree with ranges."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from tools.lock import pins_in
from tools.wheels import TOOLS

from diloco_common.codec import library

PACKAGES = {
    "decoupled-diloco": {"diloco_protos", "diloco_common", "diloco_server", "diloco_worker", "diloco_demo"},
    "decoupled-diloco-ops": {"diloco_deploy"},
    "decoupled-diloco-lab": {"diloco_lab", "diloco_planner"},
}
"""What proves them, diloco_simulator and diloco_chaos, is in none."""


@pytest.fixture(params=PACKAGES)
def name(request: pytest.FixtureRequest) -> str:
    """Of a distribution."""
    return request.param


@pytest.fixture
def wheel(wheels: Mapping[str, Path], name: str) -> Iterator[zipfile.ZipFile]:
    with zipfile.ZipFile(wheels[name]) as archive:
        yield archive


def projects(repository: Path) -> list[dict[str, object]]:
    return [tomllib.loads((repository / f / "pyproject.toml").read_text())["project"] for f in (".", *TOOLS)]


def requirements(project: dict[str, object]) -> list[Requirement]:
    """All but those of the extra `ray`, which is not in the locked set: 240 MB that one test wants."""
    extras = [texts for name, texts in project.get("optional-dependencies", {}).items() if name != "ray"]
    return [Requirement(text) for texts in (project.get("dependencies", []), *extras) for text in texts]


def pins(repository: Path) -> dict[str, Version]:
    texts = [(repository / f"requirements/{part}.txt").read_text() for part in ("torch", "run", "dev")]
    return {name: Version(version) for text in texts for name, version in pins_in(text).items()}


def test_a_wheel_holds_every_module_and_no_rubbish(wheel, name, repository):
    """A file that git does not ignore is in, others are not."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*diloco_*/*"]
    listed = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    sources = {
        path[path.index("diloco_") :]
        for path in listed.stdout.splitlines()
        if path[path.index("diloco_") :].partition("/")[0] in PACKAGES[name] and (repository / path).exists()
    }

    packed = {path for path in wheel.namelist() if ".dist-info/" not in path}
    assert packed == sources


def test_the_node_brings_the_protocol_and_all_programs(pure):
    with zipfile.ZipFile(pure) as wheel:
        (entry_points,) = (path for path in wheel.namelist() if path.endswith(".dist-info/entry_points.txt"))
        commands = set(re.findall(r"^(\S+) =", wheel.read(entry_points).decode(), re.MULTILINE))
        assert commands == {"diloco", "diloco-server", "diloco-worker"}
        assert "diloco_protos/parameter_server.proto" in wheel.namelist()


def test_every_requirement_is_pinned_within_its_range(repository):
    pinned = pins(repository)

    for requirement in (each for project in projects(repository) for each in requirements(project)):
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
def test_the_lowest_runtime_allowed_is_the_generators(repository, requirement, file, pattern):
    """Generated code refuses an older runtime, so an older one must not be installable."""
    text = (repository / "protos" / "diloco_protos" / file).read_text()
    generator = Version(re.search(pattern, text)[1])

    (ours,) = (r for r in requirements(projects(repository)[0]) if r.name == requirement)
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
