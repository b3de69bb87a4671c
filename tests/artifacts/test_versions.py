"""The version of what is built: the tag of a release, a number after it between releases, and never a failure."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest


@pytest.fixture
def sources(repository: Path, tmp_path: Path) -> Path:
    """As much of the repository as its version depends on, outside of any checkout."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "deploy").mkdir()
    for name in (
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "hatch_build.py",
        "deploy/pyproject.toml",
        "deploy/README.md",
    ):
        shutil.copy(repository / name, folder / name)
    return folder


def version(folder: Path) -> str:
    """That of the node, which is that of the tools."""
    found = {_version(folder), _version(folder / "deploy")}
    assert len(found) == 1
    return found.pop()


def _version(folder: Path) -> str:
    told = {name: value for name, value in os.environ.items() if not name.startswith(("SETUPTOOLS_SCM", "GIT_"))}
    command = [sys.executable, "-m", "hatchling", "version"]
    asked = subprocess.run(command, cwd=folder, env=told, capture_output=True, text=True, check=False)
    assert asked.returncode == 0, asked.stderr
    return asked.stdout.strip()


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, check=True)


def test_the_tag_of_a_release_is_its_version(sources: Path) -> None:
    assert version(sources) == "0.0.0", "an archive without git says that it knows no version"

    git(sources, "init")
    git(sources, "add", ".")
    git(sources, "commit", "-m", "first")
    assert re.fullmatch(r"0\.0\.1\.dev\d+\+g[0-9a-f]+", version(sources)), "a clone without tags"

    git(sources, "tag", "v9.8.0")
    assert version(sources) == "9.8.0"

    git(sources, "commit", "--allow-empty", "-m", "second")
    assert re.fullmatch(r"9\.8\.1\.dev1\+g[0-9a-f]+", version(sources)), "between two releases"


@pytest.mark.gate
def test_the_sources_make_the_same_wheel_as_the_repository(repository: Path, tmp_path: Path) -> None:
    """`pip install` of the sdist and of the wheel gives the same files and the same metadata."""
    build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir"]
    subprocess.run([*build[:-2], "--sdist", "--outdir", tmp_path, repository], capture_output=True, check=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as unpacked:
        unpacked.extractall(tmp_path / "sources", filter="data")
    (folder,) = (tmp_path / "sources").iterdir()
    subprocess.run([*build, tmp_path / "from-sdist", folder], capture_output=True, check=True)
    subprocess.run([*build, tmp_path / "from-repository", repository], capture_output=True, check=True)
    (ours,), (theirs,) = (list((tmp_path / where).iterdir()) for where in ("from-repository", "from-sdist"))

    assert theirs.name == ours.name
    with zipfile.ZipFile(ours) as one, zipfile.ZipFile(theirs) as other:
        assert {name: one.read(name) for name in one.namelist()} == {
            name: other.read(name) for name in other.namelist()
        }
