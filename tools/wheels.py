"""Builds what is published: the node's sources and wheels, and the wheels of the tools.

`make wheels` runs it. The node has a wheel for any machine, and a platform wheel with prebuilt kernels for each of two
kinds of machines. A platform wheel is the wheel for any machine plus libraries of C kernels (`library`). zig compiles
these on any machine, for glibc 2.17 and later. pip takes the platform wheel where it fits. Elsewhere torch does the
kernels' work until they are built there.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from diloco_common.codec import library

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("deploy", "simulator")
"""Folders of distributions that are published only as a wheel for any machine."""
GLIBC = (2, 17)
MADE = (1980, 1, 1, 0, 0, 0)
"""Time stamp of a library in a wheel. It is always the same, so equal sources make equal wheels."""


def compile_library(zig: Path, machine: str, instructions: library.InstructionSet, path: Path) -> None:
    """Compile kernels for a machine in `library.PORTABLE`. `zig`: a Python with ziglang. Raises CalledProcessError."""
    target = f"{machine}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
    # zig spells the names of instruction sets differently; its default for ARM is the oldest machine.
    cpu = [flag.replace("x86-64-", "x86_64_") for flag in instructions.flags] if machine == "x86_64" else []
    command = [zig, "-m", "ziglang", "cc", "-target", target, *cpu, *library.KERNELS.flags, "-s"]
    subprocess.run([*map(str, command), "-o", str(path), *map(str, library.KERNELS.sources()), "-lm"], check=True)


def platform_wheel(pure: Path, machine: str, compiled: Mapping[str, bytes], folder: Path) -> Path:
    """Write the wheel `pure` plus compiled libraries (file name -> content), with the tag of their machine."""
    tag = f"py3-none-manylinux_{GLIBC[0]}_{GLIBC[1]}_{machine}"
    into = folder / pure.name.replace("py3-none-any", tag)
    with zipfile.ZipFile(pure) as old, zipfile.ZipFile(into, "w", zipfile.ZIP_DEFLATED) as new:
        files = {info.filename: (info, old.read(info)) for info in old.infolist()}
        record = next(name for name in files if name.endswith(".dist-info/RECORD"))
        wheel = record.replace("RECORD", "WHEEL")
        told = files[wheel][1].decode().replace("Tag: py3-none-any", f"Tag: {tag}")
        files[wheel] = files[wheel][0], told.replace("Root-Is-Purelib: true", "Root-Is-Purelib: false").encode()
        record_info = files.pop(record)[0]
        for name, content in compiled.items():
            inside = zipfile.ZipInfo(f"diloco_common/codec/kernels/{name}", MADE)
            inside.external_attr, inside.compress_type = 0o100644 << 16, zipfile.ZIP_DEFLATED
            files[inside.filename] = inside, content
        for info, content in files.values():
            new.writestr(info, content)
        new.writestr(record_info, _record({name: content for name, (_, content) in files.items()}.items(), record))
    return into


def _record(files: Iterable[tuple[str, bytes]], own_name: str) -> str:
    """The list of all files with their hashes, in the format of PEP 376."""
    lines = []
    for name, content in files:
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(content)}\n")
    return "".join([*lines, f"{own_name},,\n"])


def build(folder: Path) -> None:
    """Build the node's sources, and all wheels for any machine. Raises CalledProcessError."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)]
    for what in ([str(ROOT)], *(["--wheel", str(ROOT / name)] for name in TOOLS)):
        subprocess.run(
            [*command, *what], check=True, stdout=subprocess.DEVNULL, env={**os.environ, "DILOCO_NATIVE": "0"}
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--zig", type=Path, required=True, metavar="PYTHON", help="a Python with ziglang")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", metavar="FOLDER")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder))
        (pure,) = Path(folder).glob("decoupled_diloco-*.whl")
        for machine, sets in library.PORTABLE.items():
            compiled = {}
            for one in sets:
                path = Path(folder, library.KERNELS.built_name(one))
                compile_library(args.zig, machine, one, path)
                compiled[path.name] = path.read_bytes()
            platform_wheel(pure, machine, compiled, Path(folder))
        for made in sorted(Path(folder).glob("decoupled_diloco*")):
            print(made.replace(args.out / made.name))


if __name__ == "__main__":
    main()
