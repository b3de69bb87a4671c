"""Installs what requirements/ lists, and nothing else: every wheel must have one of the hashes that are written there.

    python tools/install.py [--python ENVIRONMENT] [--find-links FOLDER] [--quiet] PART...

A PART is the name of a file in requirements/ without `.txt`. `torch` is torch alone; if its CUDA build was found, also
the libraries that it loads. pip looks for torch in the index TORCH_INDEX, such as PyTorch's index of CPU builds, and
for nothing else there. So a package of another name in that index can never replace one from the usual index.
Dependencies are not followed: what the files do not list is not installed.

It needs only Python's standard library, so it can be the first thing that runs.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "requirements"
OF_CUDA = ("nvidia-", "cuda-", "triton")
LOOK = "import importlib.metadata as m; print(*(m.requires('torch') or []), sep='\\n')"
UNKNOWN_BUILD = """\
install: torch was not installed. If pip says that hashes do not match, this build is not among those that
install: requirements/torch.txt lists: `make lock LOCK="--torch-index $TORCH_INDEX"` adds those of your index.
install: Look at what that changed before you go on."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, default=Path(sys.prefix), help="the virtual environment to fill")
    parser.add_argument("--find-links", type=Path, help="a folder with wheels, in addition to the index")
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("parts", nargs="+", choices=sorted(path.stem for path in FOLDER.glob("*.txt")), metavar="PART")
    args = parser.parse_args()

    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(args.python)]
    options = ["--no-deps", "--only-binary=:all:", *(["--quiet"] if args.quiet else [])]
    options += ["--find-links", str(args.find_links)] if args.find_links else []
    rest = [part for part in args.parts if part != "torch"]
    if "torch" in args.parts:
        code = install_torch(pip, options)
        if code:
            print(UNKNOWN_BUILD, file=sys.stderr)
            return code
        if needs_cuda(args.python):
            rest.insert(0, "cuda")
    return run([*pip, "install", *options, "--require-hashes", *files(rest)]) if rest else 0


def install_torch(pip: Sequence[str], options: Sequence[str]) -> int:
    """Download the build that pip prefers, then install it if its hash is listed. Returns the exit code of pip.

    In one step, pip would prefer a build with an announced hash. A CPU build in a folder has no announced hash.
    """
    (pin,) = re.findall(r"^torch==\S+", (FOLDER / "torch.txt").read_text(), re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        code = run([*pip, "download", *options, "--dest", folder, pin], torch_alone(os.environ))
        found = ["--no-index", "--find-links", folder, "--require-hashes", *files(["torch"])]
        return code or run([*pip, "install", *options, *found])


def run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
    return subprocess.run(command, env=environment, check=False).returncode


def files(parts: Sequence[str]) -> list[str]:
    return [option for part in parts for option in ("--requirement", str(FOLDER / f"{part}.txt"))]


def torch_alone(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables with which pip looks for torch in TORCH_INDEX, or else where it always looks."""
    index = environment.get("TORCH_INDEX", "")
    if not index:
        return dict(environment)
    others = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX")
    return {**{name: value for name, value in environment.items() if name not in others}, "PIP_INDEX_URL": index}


def needs_cuda(environment: Path) -> bool:
    """Whether the torch that is installed in this environment requires CUDA's libraries."""
    asked = subprocess.run([environment / "bin/python", "-c", LOOK], capture_output=True, text=True, check=True)
    return any(line.startswith(OF_CUDA) for line in asked.stdout.splitlines())


if __name__ == "__main__":
    sys.exit(main())
