"""Installs what will be published, as a stranger would, and trains with it: `make try-install`, before a release.

For each supported Python on this machine, once with the wheel and once with the sources of the node: an empty
environment, `pip install` of the node and the tools with build isolation, `pip check`, and a run of a shard and a
worker that ends by itself. Each takes two minutes or more, mostly to unpack torch. So CI does not run this, but checks
only the contents (tests/artifacts/test_packaging.py and test_versions.py).

Versions are constrained to those of requirements/. If TORCH_INDEX is set, torch comes from there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from lock import PYTHONS, pins_in  # noqa: E402
from wheels import build  # noqa: E402

LIMIT_S = 1800
"""Time limit of one step. At a load of 40 on two cores, it took 1,017 s to install the sources and to train."""
RUN = ("--shards", "1", "--workers", "1", "--tokens", "20_000", "--fresh")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="*", help="wheels and sdists; without any, they are built here")
    parser.add_argument("--python", action="append", help="an interpreter; may be repeated. Default: all that fit")
    args = parser.parse_args()
    pythons = args.python or [name for name in (f"python3.{minor}" for _, minor in PYTHONS) if shutil.which(name)]
    if not pythons:
        parser.error("none of the supported Pythons is on PATH; name one: --python /path/to/python3")
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder, "built")
        if not args.files:
            build(built)
        files = [file.resolve() for file in args.files] or sorted(built.iterdir())
        nodes = [file for file in files if file.name.startswith("decoupled_diloco-")]
        tools = [file for file in files if file not in nodes]
        constraints = Path(folder, "constraints.txt")
        pins = {name: version for part in ("run", "torch") for name, version in pins_of(part).items()}
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
        failed = 0
        for python in pythons:
            for node in nodes:
                place = Path(folder, "environment")
                failed += not tried(python, node, tools, constraints, place)
                shutil.rmtree(place, ignore_errors=True)
    return 1 if failed else 0


def pins_of(part: str) -> dict[str, str]:
    return pins_in((ROOT / f"requirements/{part}.txt").read_text())


def tried(python: str, node: Path, tools: Sequence[Path], constraints: Path, place: Path) -> bool:
    """Install and train, and print the result. Returns whether every step succeeded."""
    own = place / "environment/bin"
    pip: list[str | Path] = [own / "python", "-m", "pip", "--disable-pip-version-check"]
    index = os.environ.get("TORCH_INDEX")
    torch = f"torch=={pins_of('torch')['torch']}"
    steps: list[list[str | Path]] = [
        [python, "-m", "venv", place / "environment"],
        *([[*pip, "install", "-q", "--no-deps", "--index-url", index, torch]] if index else []),
        [*pip, "install", "-q", "--constraint", constraints, node, *tools],
        [*pip, "check"],
        [own / "diloco", "--version"],
        [own / "diloco", "up", *RUN, "--set", f"cluster.folder={place / 'run'}"],
    ]
    place.mkdir()
    began = time.monotonic()
    for step in steps:
        try:
            run(step, place)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print(f"{python}  {node.name}: FAILED\n  {' '.join(map(str, step))}", flush=True)
            print((error.stderr or b"").decode(errors="replace")[-2000:], file=sys.stderr)
            return False
    print(f"{python}  {node.name}: installed, and trained, in {time.monotonic() - began:.0f} s", flush=True)
    return True


def run(command: Sequence[str | Path], folder: Path) -> None:
    """Run a command in `folder`, with nothing of ours on the path. Raises CalledProcessError, TimeoutExpired."""
    outside = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    subprocess.run(list(map(str, command)), cwd=folder, env=outside, check=True, timeout=LIMIT_S, capture_output=True)


if __name__ == "__main__":
    sys.exit(main())
