"""Generates the protocol's Python code, or checks that the committed code is up to date.

Runs under the Python of .venv-proto, which holds the oldest supported generator (`make proto`). Generated code refuses
runtimes older than its generator, so a newer generator would shut out users.
"""

from __future__ import annotations

import argparse
import difflib
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
ROOT = REPOSITORY / "protos"
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def generate(out: Path) -> None:
    sources = sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.proto"))
    outs = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", "-I.", *outs, *sources], cwd=ROOT, check=True)


def generated_in(folder: Path) -> dict[str, str]:
    """Path -> text of all generated files below a folder."""
    paths = (path for path in sorted(folder.rglob("*_pb2*")) if path.name.endswith(SUFFIXES))
    return {str(path.relative_to(folder)): path.read_text() for path in paths}


def drift() -> list[str]:
    """The lines of a diff from the committed to the generated code. Empty: they are the same."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        wanted = generated_in(Path(folder))
    committed = generated_in(ROOT)
    lines: list[str] = []
    for path in sorted(wanted.keys() | committed.keys()):
        before, after = committed.get(path, ""), wanted.get(path, "")
        lines += difflib.unified_diff(
            before.splitlines(), after.splitlines(), f"committed/{path}", f"generated/{path}", lineterm=""
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the code has drifted")
    if not parser.parse_args().check:
        generate(ROOT)
        return 0
    lines = drift()
    if lines:
        print("\n".join(line[:200] for line in lines))  # the descriptor is one line of kilobytes
        print(
            "protos: the generated code has drifted; run `make proto` and commit",
            file=sys.stderr,
        )
        return 1
    print("protos: the generated code is current")
    return 0


if __name__ == "__main__":
    sys.exit(main())
