"""C libraries: built once, and stored beside their sources.

`pip install .` compiles the encodings' kernels if there is a C compiler (hatch_build.py), and published wheels contain
them: one file per instruction set of this machine type. The best one that the CPU supports is used. A file name
contains a hash of sources, compiler flags and instruction set, so a stale library is never found.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class InstructionSet(NamedTuple):
    flags: tuple[str, ...]
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
"""Machine -> the instruction sets with a library, best first."""


@dataclass(frozen=True)
class Library:
    """All C of a folder, compiled into one file per instruction set."""

    folder: Path
    prefix: str
    """The compiled files are named `prefix-HASH.so`."""
    flags: tuple[str, ...]
    """Compiler flags on every machine."""
    out: Path

    def load(self) -> tuple[Path, ctypes.CDLL] | str:
        """The best library for this CPU, or why none can be used."""
        path = self.find()
        if isinstance(path, str):
            return path
        try:
            return path, ctypes.CDLL(str(path))
        except OSError as error:
            return f"{path} cannot be loaded: {error}"

    def find(self) -> Path | str:
        if os.environ.get("DILOCO_NATIVE", "1") == "0":
            return "DILOCO_NATIVE is 0"
        if not (sets := fitting()):
            return f"there are no kernels for this CPU ({platform.machine()})"
        paths = [self.out / self.built_name(one) for one in sets]
        why = "they have not been built: `pip install --force-reinstall --no-deps .` does, where there is a C compiler"
        return next((path for path in paths if path.exists()), why)

    def build(self) -> Path | str:
        """Compile it for all instruction sets that this compiler supports, or say why not. Removes stale files."""
        if os.environ.get("DILOCO_NATIVE", "1") == "0" or not fitting():
            return self.find()
        if not self.sources():
            return f"there is no C in {self.folder}"
        compiler, failed = shlex.split(os.environ.get("CC", "cc")), ""
        paths = {self.out / self.built_name(one): one for one in PORTABLE[platform.machine()]}
        made = 0
        try:
            for path, one in paths.items():
                try:
                    self.compile_here(compiler, one, path)
                except subprocess.SubprocessError as error:  # the compiler is too old for this instruction set
                    failed = f"the C compiler failed: {_words_of(error)}"
                    continue
                made += 1
        except FileNotFoundError:
            return f"there is no C compiler ({shlex.join(compiler)})"
        except OSError as error:
            return f"{self.out} cannot be written to: {error}"
        if not made:
            return failed
        for stale in set(self.out.glob(f"{self.prefix}-*.so")) - paths.keys():
            stale.unlink(missing_ok=True)
        return self.find()

    def compile_here(self, compiler: Sequence[str], one: InstructionSet, path: Path) -> None:
        """Compile one file. Raises OSError and SubprocessError."""
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder, path.name)
            command = [*compiler, *one.flags, *self.flags, "-o", str(made), *map(str, self.sources()), "-lm"]
            subprocess.run(command, check=True, capture_output=True, timeout=60.0)
            made.replace(path)  # atomic: a process that starts now never reads half of it

    def built_name(self, one: InstructionSet) -> str:
        found = hashlib.sha256(" ".join((*self.flags, *one.flags)).encode())
        for path in sorted(self.folder.glob("*.[ch]")):
            found.update(path.name.encode() + path.read_bytes())
        return f"{self.prefix}-{found.hexdigest()[:16]}.so"

    def sources(self) -> list[Path]:
        return sorted(self.folder.glob("*.c"))


KERNELS = Library(
    Path(__file__).with_name("kernels"),
    "kernels",
    ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"),
    Path(__file__).with_name("kernels"),
)


def fitting() -> list[InstructionSet]:
    has = set(_cpu().split())
    return [one for one in PORTABLE.get(platform.machine(), ()) if set(one.needs.split()) <= has]


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _words_of(error: subprocess.SubprocessError) -> str:
    """The compiler's error message or, without one, how it ended."""
    said = (getattr(error, "stderr", None) or b"").decode(errors="replace").splitlines()
    return next((line for line in said if "error" in line), str(error))
