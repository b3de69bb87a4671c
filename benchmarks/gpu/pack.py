"""Packs the wheels that a bare machine lacks, for its version of Python, into the folder .gpu/, which is not committed.

    python benchmarks/gpu/pack.py --python 3.12
    python benchmarks/gpu/pack.py --python 3.13 --machine aarch64 --glibc 2.31

These are the packages that ours import, except torch and what comes with torch, and psutil, which reads the memory of a
process. Versions are those of requirements/, each checked by its hash. The repository itself is copied as it is.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".gpu"
BYTES_MAX = 60 << 20
OF_TORCH = {"networkx", "mpmath", "sympy", "jinja2", "markupsafe", "filelock", "fsspec", "setuptools", "numpy"}
"""Every torch comes with them. A numpy other than the one that it was built for could break it."""
ALSO = {"psutil"}
OLDEST_GLIBC = 5
"""Minor version: tags go from manylinux_2_5 to the machine's, as pip matches each tag by its name."""


def pinned() -> str:
    """The requirements, with their hashes."""
    chosen = []
    for file, wanted in (("run", None), ("dev", ALSO)):
        for match in re.finditer(
            r"^(?P<name>[\w.-]+)==.*(?:\n[ \t]+.*)*", (ROOT / f"requirements/{file}.txt").read_text(), re.M
        ):
            name = match["name"].lower()
            if name not in OF_TORCH and (wanted is None or name in wanted):
                chosen.append(match[0])
    return "\n".join(chosen) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12", help="the machine's version of Python (default: 3.12)")
    parser.add_argument("--machine", default="x86_64", help="what `uname -m` prints on the machine")
    parser.add_argument("--glibc", default="2.35", help="what `ldd --version` prints on the machine, or less")
    args = parser.parse_args()
    wheels = FOLDER / "wheels"
    shutil.rmtree(FOLDER, ignore_errors=True)
    wheels.mkdir(parents=True)
    newest = int(args.glibc.partition(".")[2])
    platforms = [f"manylinux_2_{minor}_{args.machine}" for minor in range(newest, OLDEST_GLIBC - 1, -1)]
    platforms += [f"{old}_{args.machine}" for old in ("manylinux2014", "manylinux2010", "manylinux1")]
    command = [
        sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps",
        "--only-binary=:all:", "--require-hashes", f"--python-version={args.python}", "--implementation=cp",
        *(f"--platform={platform}" for platform in platforms), f"--dest={wheels}",
    ]  # fmt: skip
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(pinned())
        file.flush()
        if code := subprocess.run([*command, "--requirement", file.name], check=False).returncode:
            return code
    git = ["git", "rev-parse", "--short", "HEAD"]
    (FOLDER / "COMMIT").write_text(subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    size = sum(path.stat().st_size for path in wheels.iterdir())
    print(f"{len(list(wheels.iterdir()))} wheels for Python {args.python}, {size / 1e6:.0f} MB, in {FOLDER}")
    print("on the machine, in its copy of this repository: bash benchmarks/gpu/there.sh --minutes 8 --out g")
    if size > BYTES_MAX:
        print(f"pack: more than {BYTES_MAX >> 20} MiB", file=sys.stderr)
    return int(size > BYTES_MAX)


if __name__ == "__main__":
    sys.exit(main())
