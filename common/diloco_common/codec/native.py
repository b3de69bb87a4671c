"""The encodings' inner loops in C (kernels.c). On a CPU they are three to nine times as fast as the same in torch.

The machine's C compiler compiles them at first use, in under a second. The user's cache folder keeps them, named by the
hash of source, compiler flags and CPU. Nothing depends on them: without a compiler, with DILOCO_NATIVE=0, or on another
device, the torch code runs and gives the same bytes. `python -m diloco_common.codec.native` compiles them now and says
whether they are used. With `--portable` it puts a library beside the source that runs on other machines too, for
container images without a compiler. If that library fits the CPU, it is used.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
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
"""Machine -> the instruction set of a portable library, and the flags in /proc/cpuinfo of a CPU that has it."""
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
        """Encode `values - minus + plus` (n,) float32 as int8 or int4 into `out` uint8. `loss` gets the encoding error.

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
    """A sum over contributions. The kernel that uses it forms it block by block, in registers."""

    def __init__(
        self, kernels: Kernels, bits: int, parts: Sequence[tuple[Tensor, int, int]], weights: Sequence[float]
    ) -> None:
        """`parts`: a chunk, its number of elements, the first element to sum. These differ by multiples of BLOCK."""
        self._library, self._bits = kernels.library, bits
        self._chunks = [chunk for chunk, _, _ in parts]  # keeps them alive
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
        """Take a Nesterov step along the sum, in place; both (m,) float32."""
        stop = self._start + theta.numel()
        self._library.diloco_sum_nesterov(*self._arguments(stop), momentum, lr, velocity.data_ptr(), theta.data_ptr())

    def _arguments(self, stop: int) -> tuple[Any, ...]:
        return self._bits, self._sources, len(self._sources), self._start, stop


def _source(bits: int, part: tuple[Tensor, int, int], weight: float) -> _Source:
    """The addresses of scale and codes of the block with the part's first element."""
    chunk, num_elements, start = part
    block, num_blocks, address = start // BLOCK, -(-num_elements // BLOCK), chunk.data_ptr()
    return _Source(address + 4 * block, address + 4 * num_blocks + block * BLOCK * bits // 8, weight)


def kernels() -> Kernels | None:
    """The kernels, compiled if necessary; None if they cannot be used."""
    found = find()
    return found if isinstance(found, Kernels) else None


@cache
def find() -> Kernels | str:
    """The kernels, compiled if necessary, or the reason why they cannot be used and torch does the work."""
    if os.environ.get("DILOCO_NATIVE", "1") == "0":
        return "DILOCO_NATIVE is 0"
    try:
        path = _compiled()
        _check_owner(path)
        return Kernels(path, _load(path))
    except _Unusable as error:
        return str(error)
    except subprocess.SubprocessError as error:
        return f"the C compiler failed: {error}"
    except (OSError, RuntimeError) as error:  # a folder that cannot be written to, or no home at all
        return f"there is no place to keep them ({error}); set XDG_CACHE_HOME"


class _Unusable(Exception):
    """The kernels cannot be used; the message says why."""


def _check_owner(path: Path) -> None:
    """Loading a library runs its code, so nobody else may be able to write it. Raises _Unusable."""
    for place in (path, path.parent):
        status = place.stat()
        if status.st_uid not in (0, os.getuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise _Unusable(f"another user can write to {place}; make it yours alone, or set XDG_CACHE_HOME")


def compile_portable() -> Path | None:
    """Put the portable library beside the source; None if this CPU could not run it.

    Raises OSError or CalledProcessError.
    """
    path = _portable()
    if path is not None:
        _compile(PORTABLE[platform.machine()][0], path)
    return path


def _compiled() -> Path:
    """The path of the compiled kernels. Compiles them if they are not there yet.

    Raises _Unusable, SubprocessError, OSError, and RuntimeError if there is no home folder.
    """
    portable = _portable()
    if portable is not None and portable.exists():
        return portable
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = cache_home / "decoupled-diloco" / f"kernels-{_digest(_cpu())}.so"
    if not path.exists():
        if shutil.which(_compiler()) is None:
            raise _Unusable(f"there is no C compiler ({_compiler()})")
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _compile("-march=native", path)
    return path


def _portable() -> Path | None:
    """The path of the library beside the source, if there is one; None if this CPU could not run it."""
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
        made.replace(path)  # in one step, so a process that starts at the same time never reads half of it


def _cpu() -> str:
    """The facts that -march=native depends on. Several machines may share a home folder."""
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
    found = find()
    if isinstance(found, str):
        sys.exit(f"no native kernels: {found}")
    print(f"native kernels: {found.path}")
