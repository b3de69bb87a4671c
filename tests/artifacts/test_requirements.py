"""requirements/ as tools/lock.py writes it: everything by hash, wheels for what is supported, and nothing else."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tools.lock import GROUPS, OF_CUDA, Package, fits, is_needed, known_builds, merged, packages_in, pins_in, written

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


def test_libraries_of_cuda_are_apart(repository: Path) -> None:
    for file in FILES:
        of_cuda = {name for name in pins_in(file.read_text()) if OF_CUDA.match(name)}
        assert bool(of_cuda) == (file.stem == "cuda"), of_cuda


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


@pytest.mark.parametrize(
    ("file", "is_ours"),
    [
        ("a-1-py3-none-any.whl", True),
        ("a-1-cp312-cp312-manylinux_2_28_x86_64.whl", True),
        ("a-1-cp39-abi3-manylinux_2_34_aarch64.whl", True),
        ("a-1-cp310-cp310-manylinux_2_28_x86_64.whl", False),
        ("a-1-cp314-cp314t-manylinux_2_28_x86_64.whl", False),
        ("a-1-cp312-cp312-musllinux_1_2_x86_64.whl", False),
        ("a-1-cp312-cp312-win_amd64.whl", False),
    ],
)
def test_wheels_for_linux_on_two_machines_and_four_pythons_are_listed(file: str, is_ours: bool) -> None:
    assert fits(file) == is_ours


@pytest.mark.parametrize(
    ("marker", "needed"),
    [
        ("", True),
        ("python_full_version < '3.12'", True),
        ("os_name == 'nt' or sys_platform == 'win32'", False),
        ("python_full_version < '3.11'", False),
    ],
)
def test_what_no_supported_machine_needs_is_left_out(marker: str, needed: bool) -> None:
    assert is_needed(marker) == needed


def lock_file(*wheels: str) -> str:
    listed = "".join(
        f'[[packages.wheels]]\nurl = "https://index/a%2Bb/{name}"\nhashes = {{ sha256 = "{index:064x}" }}\n'
        for index, name in enumerate(wheels)
    )
    return f'[[packages]]\nname = "A.package"\nversion = "1"\n{listed}'


def test_a_package_is_listed_with_the_wheels_that_fit() -> None:
    (found,) = packages_in(lock_file("a-1-cp312-cp312-win_amd64.whl", "a-1%2Bcpu-py3-none-any.whl"))
    assert found == Package("a-package", "1", {"a-1+cpu-py3-none-any.whl": f"{1:064x}"})
    assert written([found], "Head.").splitlines()[1:] == ["a-package==1 \\", f"    --hash=sha256:{1:064x}"]


def test_a_package_without_a_wheel_is_refused_and_not_built_from_source() -> None:
    with pytest.raises(ValueError, match=r"A\.package 1 has no wheel"):
        packages_in(lock_file("a-1-cp312-cp312-win_amd64.whl"))


def test_builds_of_torch_stay_as_long_as_its_version_does() -> None:
    cuda, cpu = Package("torch", "2", {"cuda.whl": "a"}), Package("torch", "2+cpu", {"cpu.whl": "b"})
    assert merged([cuda, None, cpu]) == Package("torch", "2", {"cuda.whl": "a", "cpu.whl": "b"})
    assert merged([Package("torch", "3", {"new.whl": "c"}), None, cpu]) == Package("torch", "3", {"new.whl": "c"})
