"""Where the C of the encodings comes from, and what happens where it cannot be had."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco_common.codec import library, native
from diloco_common.codec.library import Library
from diloco_common.codec.registry import get_codec


def torch_encodes() -> bool:
    """Three numbers as int8, whoever does it."""
    codec = get_codec("int8")
    out = torch.zeros(codec.num_bytes(3), dtype=torch.uint8)
    codec.encode(torch.ones(3), out)
    assert out.tolist()[4:] == [127] * 3
    return native.kernels() is None and native.origin() == "torch"


@dataclass(frozen=True)
class Installation:
    """One whose C nobody has built."""

    of: Library
    find: Any = native.find

    def names(self) -> set[str]:
        return {path.name for path in self.of.folder.glob("*.so")}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installation]:
    of = library.KERNELS
    folder = tmp_path / "c"
    folder.mkdir()
    for source in of.folder.glob("*.[ch]"):
        shutil.copy(source, folder)
    copy = replace(of, folder=folder, out=folder, flags=(*of.flags, "-O1"))  # it is built many times
    monkeypatch.setattr(library, "KERNELS", copy)
    native.find.cache_clear()
    yield Installation(copy)
    native.find.cache_clear()


def test_it_is_built_once_and_stale_ones_go(here: Installation, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "have not been built: `pip install" in str(here.find())
    assert torch_encodes()
    (here.of.folder / f"{here.of.prefix}-0123456789abcdef.so").touch()
    built = here.of.build()
    if isinstance(built, str):
        pytest.skip(built)
    here.find.cache_clear()
    monkeypatch.setenv("CC", "no-such-compiler")
    assert not isinstance(here.find(), str)
    assert not torch_encodes()
    found = here.of.load()
    assert found[0] == built == here.of.folder / here.of.built_name(library.fitting()[0])
    assert here.names() == {here.of.built_name(one) for one in library.PORTABLE[library.platform.machine()]}


ANGRY = "sh -c 'echo a.c:1: warning: odd >&2; echo a.c:2: error: bad >&2; exit 1'"


@pytest.mark.parametrize(
    ("compiler", "why"),
    [
        ("no-such-compiler", "no C compiler (no-such-compiler)"),
        ("no-such-cache cc", "no C compiler (no-such-cache cc)"),
        ("false", "the C compiler failed: Command"),
        (ANGRY, "the C compiler failed: a.c:2: error: bad"),
    ],
    ids=["none", "none to call another", "silent", "angry"],
)
def test_what_cannot_be_built_says_why(
    compiler: str, why: str, here: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", compiler)
    assert why in str(here.of.build())
    assert not here.names()
    assert torch_encodes()


def test_a_cpu_that_lacks_its_instructions_leaves_it_alone(here: Installation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_cpu", lambda: "flags : fpu sse2")
    assert "no kernels for this CPU" in str(here.of.build())
    assert "no kernels for this CPU" in str(here.find())
    assert torch_encodes()


def test_a_library_that_cannot_be_loaded_leaves_the_work_to_torch(here: Installation) -> None:
    """As one for another libc, or on a file system that forbids programs."""
    for one in library.fitting():
        (here.of.folder / here.of.built_name(one)).write_bytes(b"not a library")
    assert "cannot be loaded" in str(here.find())
    assert torch_encodes()
