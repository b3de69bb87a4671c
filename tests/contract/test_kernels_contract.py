"""Where the C kernels come from, and what happens where they cannot be had."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from diloco_common.codec import library, native
from diloco_common.codec.registry import get_codec


@pytest.fixture(autouse=True)
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installation whose kernels nobody has built."""
    folder = tmp_path / "kernels"
    shutil.copytree(library.SOURCES, folder, ignore=shutil.ignore_patterns("*.so"))
    monkeypatch.setattr(library, "SOURCES", folder)
    native.find.cache_clear()
    yield folder
    native.find.cache_clear()


def torch_does_it() -> bool:
    """Three numbers as int8."""
    codec = get_codec("int8")
    out = torch.zeros(codec.num_bytes(3), dtype=torch.uint8)
    codec.encode(torch.ones(3), out)
    return native.kernels() is None and native.origin() == "torch" and out.tolist()[4:] == [127] * 3


def test_they_are_built_once_and_stale_ones_go(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "have not been built" in str(native.find())
    assert torch_does_it()
    (sources / "kernels-0123456789abcdef.so").touch()
    built = library.build()
    if isinstance(built, str):
        pytest.skip(built)
    native.find.cache_clear()
    monkeypatch.setenv("CC", "no-such-compiler")
    kernels = native.kernels()
    assert kernels is not None
    assert kernels.path == built
    assert native.origin() == "prebuilt"
    assert kernels.path.name == library.built_name(library.fitting()[0])
    names = {library.built_name(one) for one in library.PORTABLE[library.platform.machine()]}
    assert {path.name for path in sources.glob("*.so")} == names


@pytest.mark.parametrize(
    ("compiler", "why"), [("no-such-compiler", "no C compiler (no-such-compiler)"), ("false", "the C compiler failed")]
)
def test_what_cannot_be_built_says_why(compiler: str, why: str, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", compiler)
    assert why in str(library.build())
    assert not list(sources.rglob("*.so"))
    assert torch_does_it()


def test_they_are_switched_off_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_NATIVE", "0")
    assert native.find() == "DILOCO_NATIVE is 0"
    assert torch_does_it()


def test_a_cpu_that_lacks_their_instructions_leaves_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_cpu", lambda: "flags : fpu sse2")
    assert "no kernels for this CPU" in str(library.build())
    assert "no kernels for this CPU" in str(native.find())
    assert torch_does_it()


def test_a_cpu_without_avx512_takes_the_library_for_avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(built := library.build(), str) or library.platform.machine() != "x86_64":
        pytest.skip(str(built))
    monkeypatch.setattr(library, "_cpu", lambda: f"flags : {library.AVX2}")
    kernels = native.kernels()
    assert kernels is not None
    assert kernels.path.name == library.built_name(library.PORTABLE["x86_64"][1])


def test_a_compiler_that_does_not_know_avx512_builds_the_library_for_avx2(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shutil.which("cc") or library.platform.machine() != "x86_64":
        pytest.skip("needs a C compiler for x86_64")
    old = tmp_path / "old-cc"
    old.write_text('#!/bin/sh\ncase "$*" in *x86-64-v4*) exit 1;; esac\nexec cc "$@"\n')
    old.chmod(0o755)
    monkeypatch.setenv("CC", str(old))
    built = library.build()
    assert isinstance(built, Path), built
    assert list(sources.glob("*.so")) == [built] == [sources / library.built_name(library.PORTABLE["x86_64"][1])]


def test_a_library_that_cannot_be_loaded_leaves_the_work_to_torch(sources: Path) -> None:
    """As one for another libc, or on a file system that forbids programs."""
    for one in library.fitting():
        (sources / library.built_name(one)).write_bytes(b"not a library")
    assert "cannot be loaded" in str(native.find())
    assert torch_does_it()
