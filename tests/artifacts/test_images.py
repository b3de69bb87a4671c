"""tools/images.py: which images of others are tags, and how they get the digests that a registry has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tools.images import FILES, images_in

ROOT = Path(__file__).resolve().parents[2]
DIGEST = "@sha256:" + "5" * 64


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A repository with the tool and the files, and a docker whose registry has every image under one digest."""
    for file in ("tools/images.py", *FILES):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    docker(tmp_path, f'name=${{!#}}; echo "mirror/other{DIGEST}"; echo "${{name%:*}}{DIGEST}"')
    return tmp_path


def docker(folder: Path, inspect: str) -> None:
    (folder / "bin").mkdir(exist_ok=True)
    program = folder / "bin/docker"
    program.write_text(f'#!/bin/bash\n[[ "${{!#}}" != *@* ]] || exit 1\n[ "$1" = pull ] && exit\n{inspect}\n')
    program.chmod(0o755)


def run(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, place / "tools/images.py", *arguments],
        env={**os.environ, "PATH": f"{place / 'bin'}:{os.environ['PATH']}"},
        capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip


def named(place: Path) -> set[str]:
    return {image for file in FILES for image in images_in((place / file).read_text())}


def test_pinned_images_keep_their_tags_and_get_a_digest_once(place: Path) -> None:
    before = {image.partition("@")[0] for image in named(place)}
    assert len(before) == 3
    for _ in range(2):
        ended = run(place, "--pin")
        assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
        assert named(place) == {image + DIGEST for image in before}


def test_what_is_not_pinned_is_named_and_no_failure(place: Path) -> None:
    (place / "deploy/Dockerfile").write_text("ARG BASE_IMAGE=python:3.11-slim\n")
    ended = run(place)
    assert ended.returncode == 0
    assert "NOT PINNED: python:3.11-slim is a tag" in ended.stdout
