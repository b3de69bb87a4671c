"""The library of C kernels (kernels/*.c): built once, and looked for beside its sources.

A platform wheel brings it. Elsewhere `python -m diloco_common.codec --build` makes it: `make install` does so in
a checkout, the Dockerfile in an image. It is for all machines of one instruction set, and used where the CPU has that.
Its name has the hash of sources, compiler flags and instruction set. So a stale one is never found.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).with_name("kernels")
"""The folder of the sources, and of the library."""
FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
PORTABLE = {"x86_64": ("-march=x86-64-v3", "abm avx2 bmi1 bmi2 f16c fma movbe"), "aarch64": ("-march=armv8-a", "asimd")}
"""Machine -> the instruction set of its library, and the flags in /proc/cpuinfo of a CPU that has it."""
BUILD = "python -m diloco_common.codec --build"
COMPILE_S = 60.0


def find() -> Path | str:
    """The library, or the reason why there is none."""
    if os.environ.get("DILOCO_NATIVE", "1") == "0":
        return "DILOCO_NATIVE is 0"
    if not _fits():
        return f"there are no kernels for this CPU ({platform.machine()})"
    path = SOURCES / built_name(platform.machine())
    return path if path.exists() else f"they have not been built: `{BUILD}` does, where there is a C compiler"


def build() -> Path | str:
    """Compile the library of this machine, or say why not. Those of other sources go."""
    if not _fits():
        return f"there are no kernels for this CPU ({platform.machine()})"
    path, compiler = SOURCES / built_name(platform.machine()), os.environ.get("CC", "cc")
    march = PORTABLE[platform.machine()][0]
    try:
        with tempfile.TemporaryDirectory(dir=SOURCES) as folder:
            made = Path(folder, path.name)
            command = [compiler, march, *FLAGS, "-o", str(made), *map(str, sources()), "-lm"]
            subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_S)
            made.replace(path)  # in one step, so a process that starts at the same time never reads half of it
    except FileNotFoundError:
        return f"there is no C compiler ({compiler})"
    except subprocess.SubprocessError as error:
        return f"the C compiler failed: {error}"
    except OSError as error:
        return f"{SOURCES} cannot be written to: {error}"
    for stale in set(SOURCES.glob("kernels-*.so")) - {path}:
        stale.unlink(missing_ok=True)
    return path


def built_name(machine: str) -> str:
    """The file of the library for a machine of PORTABLE."""
    digest = hashlib.sha256(" ".join((*FLAGS, PORTABLE[machine][0])).encode())
    for path in sorted(SOURCES.glob("*.[ch]")):
        digest.update(path.name.encode() + path.read_bytes())
    return f"kernels-{digest.hexdigest()[:16]}.so"


def sources() -> list[Path]:
    """The files to compile, in the order of their names."""
    return sorted(SOURCES.glob("*.c"))


def _fits() -> bool:
    """Whether this CPU can run the library of its machine."""
    march, needed = PORTABLE.get(platform.machine(), ("", ""))
    return bool(march) and set(needed.split()) <= set(_cpu().split())


def _cpu() -> str:
    """What the CPU can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
