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
def _compiled() -> None:
    found = native.find()
    if isinstance(found, str):
        assert not found.startswith("the C compiler failed"), found
        pytest.skip(found)


def encoded() -> torch.Tensor:
    """Three numbers as int8."""
    codec = get_codec("int8")
    out = torch.zeros(codec.num_bytes(3), dtype=torch.uint8)
    codec.encode(torch.ones(3), out)
    return out


@pytest.fixture
def _asked_anew() -> Iterator[None]:
    native.find.cache_clear()
    yield
    native.find.cache_clear()


@pytest.mark.usefixtures("_asked_anew")
@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"DILOCO_NATIVE": "0"}, "DILOCO_NATIVE is 0"),
        ({"CC": "no-such-compiler"}, "no C compiler (no-such-compiler)"),
        ({"CC": "false"}, "the C compiler failed"),
        ({"XDG_CACHE_HOME": "/dev/null"}, "no place to keep them"),
    ],
    ids=["switched off", "no compiler", "a compiler that fails", "no folder"],
)
def test_without_them_torch_does_it(
    environment: dict[str, str], why: str, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert native.kernels() is None
    assert why in native.find()
    assert native.origin() == "torch"
    assert encoded().numel() == 7
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.usefixtures("_asked_anew")
def test_they_are_compiled_once(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = native.kernels()
    assert first is not None
    native.find.cache_clear()
    monkeypatch.setenv("CC", "no-such-compiler")
    again = native.kernels()
    assert again is not None
    assert again.found == first.found
    assert native.origin() == "compiled"
    assert list(tmp_path.rglob("*.so")) == [first.found.path]


@pytest.mark.usefixtures("_asked_anew")
def test_a_portable_library_beside_the_source_needs_no_compiler_and_no_cache(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / "installed"
    shutil.copytree(library.SOURCES, sources)
    monkeypatch.setattr(library, "SOURCES", sources)
    portable = library.prebuild()
    if portable is None:
        pytest.skip("this machine's CPU is older than the portable instruction set")
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = native.kernels()
    assert found is not None
    assert found.found == library.Library(portable, "prebuilt")
    assert encoded().numel() == 7
    assert not (tmp_path / "cache").exists()


@pytest.mark.usefixtures("_asked_anew")
def test_a_portable_library_is_left_alone_by_a_cpu_that_lacks_its_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_cpu", lambda: "flags : fpu sse2")
    assert library.prebuild() is None


@pytest.mark.usefixtures("_asked_anew")
def test_a_library_that_cannot_be_loaded_leaves_the_work_to_torch(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one for another libc, or on a file system that forbids programs."""
    broken = tmp_path / "kernels.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(library, "_prebuilt", lambda: library.Library(broken, "prebuilt"))
    assert "cannot be loaded" in native.find()
    assert encoded().numel() == 7


@pytest.mark.usefixtures("_asked_anew")
def test_a_process_without_a_home_does_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert "Could not determine home directory" in native.find()


@pytest.mark.usefixtures("_asked_anew")
@pytest.mark.parametrize("writable", ["folder", "file"])
def test_what_others_can_write_to_is_not_loaded(writable: str, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = native.kernels()
    assert found is not None
    (found.found.path if writable == "file" else found.found.path.parent).chmod(0o777)
    native.find.cache_clear()
    assert "another user can write to" in native.find()
