"""The libraries of C kernels (kernels/*.c): built once, and looked for beside their sources.

A platform wheel brings them. Elsewhere `python -m diloco_common.codec --build` makes them: `make install` does so in
a checkout, the Dockerfile in an image. There is one for each instruction set of this kind of machine, and the best that
the CPU has is used. A name has the hash of sources, compiler flags and instruction set, so a stale one is never found.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).with_name("kernels")
"""The folder of the sources, and of the library."""
FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")


class InstructionSet(NamedTuple):
    flags: tuple[str, ...]
    """For the compiler."""
    needs: str
    """The flags in /proc/cpuinfo of a CPU that has it."""


AVX2 = "abm avx2 bmi1 bmi2 f16c fma movbe"
AVX512 = f"{AVX2} avx512bw avx512cd avx512dq avx512f avx512vl"
PORTABLE = {
    "x86_64": (
        InstructionSet(("-march=x86-64-v4", "-mprefer-vector-width=512"), AVX512),
        InstructionSet(("-march=x86-64-v3",), AVX2),
    ),
    "aarch64": (InstructionSet(("-march=armv8-a",), "asimd"),),
}
"""Machine -> those that have a library, the best first."""
BUILD = "python -m diloco_common.codec --build"
COMPILE_S = 60.0


def find() -> Path | str:
    """The best library for this CPU, or the reason why there is none."""
    if os.environ.get("DILOCO_NATIVE", "1") == "0":
        return "DILOCO_NATIVE is 0"
    if not (sets := fitting()):
        return f"there are no kernels for this CPU ({platform.machine()})"
    paths = [SOURCES / built_name(one) for one in sets]
    why = f"they have not been built: `{BUILD}` does, where there is a C compiler"
    return next((path for path in paths if path.exists()), why)


def build() -> Path | str:
    """Compile all libraries for machines like this one that this compiler can, or say why not. Those of other sources
    go."""
    if not fitting():
        return f"there are no kernels for this CPU ({platform.machine()})"
    compiler, made, failed = os.environ.get("CC", "cc"), set[Path](), ""
    try:
        for one in PORTABLE[platform.machine()]:
            path = SOURCES / built_name(one)
            try:
                compile_here(compiler, one, path)
            except subprocess.SubprocessError as error:  # it is too old for this instruction set
                failed = f"the C compiler failed: {error}"
                continue
            made.add(path)
    except FileNotFoundError:
        return f"there is no C compiler ({compiler})"
    except OSError as error:
        return f"{SOURCES} cannot be written to: {error}"
    if not made:
        return failed
    for stale in set(SOURCES.glob("kernels-*.so")) - made:
        stale.unlink(missing_ok=True)
    return find()


def compile_here(
    compiler: str, one: InstructionSet, path: Path, flags: Sequence[str] = FLAGS, files: Sequence[Path] = ()
) -> None:
    """Make a library with this machine's compiler: of these files, or of the kernels. Raises OSError and
    SubprocessError."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder, path.name)
        command = [compiler, *one.flags, *flags, "-o", str(made), *map(str, files or sources()), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_S)
        made.replace(path)  # in one step: nobody who starts meanwhile reads half of it


def built_name(one: InstructionSet) -> str:
    """The file of its library."""
    return f"kernels-{digest((*FLAGS, *one.flags), sorted(SOURCES.glob('*.[ch]')))}.so"


def digest(flags: Sequence[str], files: Sequence[Path]) -> str:
    """Of what a library is made of."""
    found = hashlib.sha256(" ".join(flags).encode())
    for path in files:
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()[:16]


def sources() -> list[Path]:
    """The files to compile, in the order of their names."""
    return sorted(SOURCES.glob("*.c"))


def fitting() -> list[InstructionSet]:
    """The instruction sets that this CPU has, the best first."""
    has = set(_cpu().split())
    return [one for one in PORTABLE.get(platform.machine(), ()) if set(one.needs.split()) <= has]


def _cpu() -> str:
    """What the CPU can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
