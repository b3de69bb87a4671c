"""The library of C kernels (kernels/*.c): where it comes from, and why it may be missing.

A platform wheel and the container images bring one that was built before, for machines of one instruction set; it is
used where the CPU has that. Otherwise the machine's C compiler makes one at first use, in about a second. The user's
cache folder keeps it. Either is named by the hash of sources, compiler flags, and the machines that it is for. So a
stale one is never found.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).with_name("kernels")
"""The folder of the sources. A prebuilt library is in it."""
FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
PORTABLE = {"x86_64": ("-march=x86-64-v3", "abm avx2 bmi1 bmi2 f16c fma movbe"), "aarch64": ("-march=armv8-a", "asimd")}
"""Machine -> the instruction set of a prebuilt library, and the flags in /proc/cpuinfo of a CPU that has it."""
COMPILE_S = 60.0


@dataclass(frozen=True)
class Library:
    path: Path
    origin: str
    """"prebuilt" or "compiled"."""


def find() -> Library | str:
    """The library, compiled if necessary, or the reason why there is none."""
    if os.environ.get("DILOCO_NATIVE", "1") == "0":
        return "DILOCO_NATIVE is 0"
    try:
        return _prebuilt() or _compiled()
    except _Unusable as error:
        return str(error)
    except subprocess.SubprocessError as error:
        return f"the C compiler failed: {error}"
    except (OSError, RuntimeError) as error:  # a folder that cannot be written to, or no home at all
        return f"there is no place to keep them ({error}); set XDG_CACHE_HOME"


class _Unusable(Exception):
    """The kernels cannot be used; the message says why."""


def _check_owner(path: Path) -> None:
    """Loading a library runs its code, so nobody else may be able to write it. Raises _Unusable.

    A prebuilt one needs no such check: who can write to it can write to this module, too.
    """
    for place in (path, path.parent):
        status = place.stat()
        if status.st_uid not in (0, os.getuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise _Unusable(f"another user can write to {place}; make it yours alone, or set XDG_CACHE_HOME")


def prebuild() -> Path | None:
    """Compile the portable library of this machine into SOURCES; None if this CPU could not run it.

    Raises OSError or CalledProcessError.
    """
    if not _fits():
        return None
    path = SOURCES / prebuilt_name(platform.machine())
    _compile(PORTABLE[platform.machine()][0], path)
    return path


def prebuilt_name(machine: str) -> str:
    """The file of a prebuilt library for a machine of PORTABLE."""
    return f"kernels-{_digest(PORTABLE[machine][0])}.so"


def sources() -> list[Path]:
    """The files to compile, in the order of their names."""
    return sorted(SOURCES.glob("*.c"))


def _prebuilt() -> Library | None:
    if not _fits():
        return None
    path = SOURCES / prebuilt_name(platform.machine())
    return Library(path, "prebuilt") if path.exists() else None


def _fits() -> bool:
    """Whether this CPU can run a portable library."""
    march, needed = PORTABLE.get(platform.machine(), ("", ""))
    return bool(march) and set(needed.split()) <= set(_cpu().split())


def _compiled() -> Library:
    """The compiled library, in the cache. Compiles it if it is not there yet.

    Raises _Unusable, SubprocessError, OSError, and RuntimeError if there is no home folder.
    """
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = cache_home / "decoupled-diloco" / f"kernels-{_digest(_cpu())}.so"
    if not path.exists():
        if shutil.which(_compiler()) is None:
            raise _Unusable(f"there is no C compiler ({_compiler()})")
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _compile("-march=native", path)
    _check_owner(path)
    return Library(path, "compiled")


def _digest(runs_on: str) -> str:
    digest = hashlib.sha256(" ".join(FLAGS).encode() + runs_on.encode())
    for path in sorted(SOURCES.glob("*.[ch]")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _compiler() -> str:
    return os.environ.get("CC", "cc")


def _compile(march: str, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder, path.name)
        command = [_compiler(), march, *FLAGS, "-o", str(made), *map(str, sources()), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_S)
        made.replace(path)  # in one step, so a process that starts at the same time never reads half of it


def _cpu() -> str:
    """The facts that -march=native depends on. Several machines may share a home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line for line in lines if line.startswith(("model name", "flags", "Features"))][:2]
    return platform.machine() + "".join(named)
