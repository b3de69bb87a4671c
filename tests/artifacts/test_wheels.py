"""A platform wheel brings its kernels: used where there is no compiler, they compute the same on any machine."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from tools.wheels import platform_wheel

from diloco_common.codec import library

MACHINE = platform.machine()


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Those for other machines like this one, as this machine's compiler makes them: the best first."""
    if MACHINE not in library.PORTABLE or not (compiler := shutil.which("cc")):
        pytest.skip("this machine has no C compiler, or nobody builds wheels for it")
    folder = tmp_path_factory.mktemp("prebuilt")
    for one in library.PORTABLE[MACHINE]:
        library.KERNELS.compile_here([compiler], one, folder / library.KERNELS.built_name(one))
    return [folder / library.KERNELS.built_name(one) for one in library.PORTABLE[MACHINE]]


@pytest.fixture(scope="module")
def prebuilt(libraries: list[Path]) -> Path:
    """The best that this CPU can run."""
    runs = library.KERNELS.find()
    return next(path for path in libraries if isinstance(runs, Path) and path.name == runs.name)


@pytest.fixture(scope="module")
def installed(pure: Path, libraries: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but the platform wheel, as pip installs it."""
    folder = tmp_path_factory.mktemp("installed")
    wheel = platform_wheel(pure, MACHINE, {path.name: path.read_bytes() for path in libraries}, folder)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", folder / "all", wheel], check=True)
    return folder / "all"


def python(*arguments: object, variables: Mapping[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python without a compiler on PATH."""
    environment = {"PATH": "", **variables}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)


def without_library(installed: Path, folder: Path) -> Path:
    copy = folder / "copy"
    shutil.copytree(installed, copy)
    for path in (copy / "diloco_common/codec/kernels").glob("*.so"):
        path.unlink()
    return copy


def test_what_is_installed_from_a_platform_wheel_needs_no_compiler(installed, prebuilt, tmp_path) -> None:
    ask = ("-m", "diloco_common.codec")
    found = python(*ask, variables={"PYTHONPATH": str(installed)}, folder=tmp_path)
    inside = installed / "diloco_common/codec/kernels" / prebuilt.name
    assert found.stdout == f"native kernels: {inside}\n", found.stderr

    bare = python(*ask, variables={"PYTHONPATH": str(without_library(installed, tmp_path))}, folder=tmp_path)
    assert bare.returncode == 1
    assert "torch does their work: they have not been built" in bare.stderr


@pytest.mark.gate
@pytest.mark.parametrize("best", [0, 1])
def test_what_comes_prebuilt_makes_the_bytes_that_torch_makes(
    best: int, installed, libraries, prebuilt, repository, tmp_path
) -> None:
    """By the tests of the compiled kernels, run with the prebuilt ones, from the best or the next one on."""
    runs = libraries[libraries.index(prebuilt) :]
    if best >= len(runs):
        pytest.skip("this CPU runs one library alone")
    if best:
        installed = Path(shutil.copytree(installed, tmp_path / "copy"))
        (installed / "diloco_common/codec/kernels" / runs[0].name).unlink()
    tests = repository / "tests/unit/test_codec_native.py"
    variables = {"PYTHONPATH": f"{installed}:{repository / 'tests'}", "HYPOTHESIS_STORAGE_DIRECTORY": str(tmp_path)}
    ran = python(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={repository}", tests,
        variables=variables, folder=tmp_path,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "skipped" not in ran.stdout


def test_the_platform_wheel_is_the_other_one_and_libraries(pure: Path, tmp_path: Path) -> None:
    wheel = platform_wheel(pure, MACHINE, {"one.so": b"1", "other.so": b"2"}, tmp_path)
    assert wheel.name.endswith(f"-py3-none-manylinux_2_17_{MACHINE}.whl")
    with zipfile.ZipFile(pure) as without, zipfile.ZipFile(wheel) as archive:
        told = archive.read(next(name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))).decode()
        assert f"Tag: py3-none-manylinux_2_17_{MACHINE}" in told.splitlines()
        added = set(archive.namelist()) - set(without.namelist())
        assert added == {"diloco_common/codec/kernels/one.so", "diloco_common/codec/kernels/other.so"}


def hashes(runner: list[object], program: Path, compiled: Path) -> str:
    return subprocess.run([*runner, program, compiled], capture_output=True, text=True, check=True).stdout


def test_all_that_this_cpu_can_run_make_the_same_bytes(libraries, prebuilt, repository, tmp_path) -> None:
    program = tmp_path / "program"
    source = repository / "tests/artifacts/run_kernels.c"
    subprocess.run(["cc", "-O1", "-o", program, source, "-ldl", "-lm"], check=True)
    runs = libraries[libraries.index(prebuilt) :]
    assert len({hashes([], program, one) for one in runs}) == 1
