"""The encodings' inner loops in C (kernels.c), three to nine times as fast on a CPU as the same in torch.

Compiled with the machine's C compiler when they are first used, in under a second, and kept under the user's cache
folder by the hash of source, compiler flags and CPU. Nothing depends on them: without a compiler, with DILOCO_NATIVE=0,
or on another device, the torch code runs and gives the same bytes. `python -m diloco_common.codec.native` compiles them
now and says whether they are used; with `--portable` it lays a library beside the source that runs on other machines
too, for container images, which have no compiler. Where that library fits the CPU, it is the one that is used.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch import Tensor

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
PORTABLE = {"x86_64": ("-march=x86-64-v3", "abm avx2 bmi1 bmi2 f16c fma movbe"), "aarch64": ("-march=armv8-a", "asimd")}
"""Machine -> the instruction set of a portable library, and what /proc/cpuinfo says where a CPU has it."""
COMPILE_S = 60.0
BLOCK = 256
"""BLOCK_ELEMENTS of the encodings; kernels.c has it too."""


@dataclass(frozen=True)
class Kernels:
    """The loaded library. Tensors are contiguous, on the CPU; callers have checked sizes and codes."""

    path: Path
    library: ctypes.CDLL

    def encode(
        self, bits: int, values: Tensor, minus: Tensor | None, plus: Tensor | None, loss: Tensor | None,
        limits: tuple[float, float, float], out: Tensor,
    ) -> bool:  # fmt: skip
        """Encode `values - minus + plus` (n,) float32 as int8 or int4 into `out` uint8; `loss` is what was lost.

        `limits`: code_max, scale_min, scale_max of the codec. Returns False if an element is not finite.
        """
        pointers = [0 if t is None else t.data_ptr() for t in (values, minus, plus, loss)]
        block: int = self.library.diloco_encode(bits, *pointers, values.numel(), *limits, out.data_ptr())
        return block < 0

    def decode(self, bits: int, data: Tensor, num_elements: int, start: int, out: Tensor) -> None:
        """`out` (m,) float32 <- elements start..start+m of a chunk."""
        self.library.diloco_decode(bits, data.data_ptr(), num_elements, start, start + out.numel(), out.data_ptr())

    def accumulate(self, bits: int, data: Tensor, num_elements: int, start: int, out: Tensor, weight: float) -> None:
        """`out` (m,) float32 += weight * elements start..start+m of a chunk."""
        self.library.diloco_accumulate(
            bits, data.data_ptr(), num_elements, start, start + out.numel(), weight, out.data_ptr()
        )

    def encode_change(
        self, bits: int, values: Tensor, base: Tensor, limits: tuple[float, float, float], anchor_max: float,
        out: Tensor, anchor: Tensor,
    ) -> bool:  # fmt: skip
        """As `encode` with `minus=base`, and `anchor` <- base + decoded, saturating; base and anchor (n,) bfloat16."""
        block: int = self.library.diloco_encode_change(
            bits, values.data_ptr(), base.data_ptr(), values.numel(), *limits, anchor_max, out.data_ptr(),
            anchor.data_ptr(),
        )  # fmt: skip
        return block < 0

    def encode_bfloat16(self, values: Tensor, most: float, out: Tensor) -> bool:
        """`out` (n,) bfloat16 <- `values` (n,) float32, at most `most` in magnitude; False if one is not finite."""
        return bool(self.library.diloco_encode_bfloat16(values.data_ptr(), values.numel(), most, out.data_ptr()))

    def sum_squares(self, bits: int, data: Tensor, num_elements: int, start: int, stop: int) -> float:
        """Sum of squares of elements start..stop of a chunk, in float64."""
        return float(self.library.diloco_sum_squares(bits, data.data_ptr(), num_elements, start, stop))


class _Source(ctypes.Structure):
    """`struct source` of kernels.c."""

    _fields_ = (("scales", ctypes.c_void_p), ("codes", ctypes.c_void_p), ("weight", ctypes.c_float))


class WeightedSum:
    """A sum over contributions that is formed block by block, in the registers of what uses it."""

    def __init__(
        self, kernels: Kernels, bits: int, parts: Sequence[tuple[Tensor, int, int]], weights: Sequence[float]
    ) -> None:
        """`parts`: chunk, its elements, the first one to sum; these differ by multiples of BLOCK_ELEMENTS."""
        self._library, self._bits = kernels.library, bits
        self._chunks = [chunk for chunk, _, _ in parts]  # to keep them alive
        self._sources = (_Source * len(parts))(*map(partial(_source, bits), parts, weights))
        self._start = parts[0][2] % BLOCK

    def into(self, out: Tensor) -> float:
        """`out` (m,) float32 <- the sum; returns the sum of its squares."""
        stop = self._start + out.numel()
        return float(self._library.diloco_sum(*self._arguments(stop), out.data_ptr()))

    def squares(self, num_elements: int) -> float:
        """The sum of squares of the sum."""
        return float(self._library.diloco_sum(*self._arguments(self._start + num_elements), 0))

    def nesterov(self, theta: Tensor, velocity: Tensor, momentum: float, lr: float) -> None:
        """Take a step of Nesterov's along the sum, in place; both (m,) float32."""
        stop = self._start + theta.numel()
        self._library.diloco_sum_nesterov(*self._arguments(stop), momentum, lr, velocity.data_ptr(), theta.data_ptr())

    def _arguments(self, stop: int) -> tuple[Any, ...]:
        return self._bits, self._sources, len(self._sources), self._start, stop


def _source(bits: int, part: tuple[Tensor, int, int], weight: float) -> _Source:
    """Where the block of the part's first element has its scale and its codes."""
    chunk, num_elements, start = part
    block, num_blocks, address = start // BLOCK, -(-num_elements // BLOCK), chunk.data_ptr()
    return _Source(address + 4 * block, address + 4 * num_blocks + block * BLOCK * bits // 8, weight)


@cache
def kernels() -> Kernels | None:
    """The kernels, compiled if need be; None where they cannot be had."""
    if os.environ.get("DILOCO_NATIVE", "1") == "0":
        return None
    try:
        path = _compiled()
        return None if path is None else Kernels(path, _load(path))
    except (OSError, subprocess.SubprocessError):  # no cache folder, a compiler that fails: torch does it
        return None


def compile_portable() -> Path | None:
    """Lay the portable library beside the source; None where this CPU could not run it.

    Raises OSError or CalledProcessError.
    """
    path = _portable()
    if path is not None:
        _compile(PORTABLE[platform.machine()][0], path)
    return path


def _compiled() -> Path | None:
    """Where the compiled kernels are; compiles them if they are not there yet."""
    portable = _portable()
    if portable is not None and portable.exists():
        return portable
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = cache_home / "decoupled-diloco" / f"kernels-{_digest(_cpu())}.so"
    if not path.exists():
        if shutil.which(_compiler()) is None:
            return None
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _compile("-march=native", path)
    return path


def _portable() -> Path | None:
    """Where the library beside the source lies, if there is one; None where this CPU could not run it."""
    march, needed = PORTABLE.get(platform.machine(), ("", ""))
    if not march or not set(needed.split()) <= set(_cpu().split()):
        return None
    return SOURCE.with_name(f"kernels-{_digest(march)}.so")


def _digest(runs_on: str) -> str:
    return hashlib.sha256(SOURCE.read_bytes() + " ".join(FLAGS).encode() + runs_on.encode()).hexdigest()[:16]


def _compiler() -> str:
    return os.environ.get("CC", "cc")


def _compile(march: str, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder, path.name)
        command = [_compiler(), march, *FLAGS, "-o", str(made), str(SOURCE), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_S)
        made.replace(path)  # at once, so that processes that start together do not read half of it


def _cpu() -> str:
    """What -march=native depends on: a home folder may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line for line in lines if line.startswith(("model name", "flags", "Features"))][:2]
    return platform.machine() + "".join(named)


def _load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    integer, pointer, real, index = ctypes.c_int, ctypes.c_void_p, ctypes.c_float, ctypes.c_int64
    library.diloco_encode.argtypes = [integer, *[pointer] * 4, index, real, real, real, pointer]
    library.diloco_encode.restype = index
    library.diloco_decode.argtypes = [integer, pointer, index, index, index, pointer]
    library.diloco_decode.restype = None
    library.diloco_accumulate.argtypes = [integer, pointer, index, index, index, real, pointer]
    library.diloco_accumulate.restype = None
    library.diloco_sum.argtypes = [integer, pointer, integer, index, index, pointer]
    library.diloco_sum.restype = ctypes.c_double
    library.diloco_sum_nesterov.argtypes = [integer, pointer, integer, index, index, real, real, pointer, pointer]
    library.diloco_sum_nesterov.restype = None
    library.diloco_encode_change.argtypes = [integer, pointer, pointer, index, *[real] * 4, pointer, pointer]
    library.diloco_encode_change.restype = index
    library.diloco_encode_bfloat16.argtypes = [pointer, index, real, pointer]
    library.diloco_encode_bfloat16.restype = integer
    library.diloco_sum_squares.argtypes = [integer, pointer, index, index, index]
    library.diloco_sum_squares.restype = ctypes.c_double
    return library


if __name__ == "__main__":
    if "--portable" in sys.argv[1:]:
        compile_portable()
    found = kernels()
    print(f"native kernels: {found.path}" if found else "no native kernels (no C compiler, or DILOCO_NATIVE=0)")
    sys.exit(0 if found else 1)
