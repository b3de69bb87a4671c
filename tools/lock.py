"""Writes requirements/*.txt: every package that we install, its version, and the SHA-256 of each acceptable wheel.

`make lock` runs it. Versions stay, unless `--upgrade` (all) or `--upgrade-package NAME` asks for the newest. The files
list wheels for Linux on x86_64 and aarch64, but no sources: building them would run code of others.

    torch.txt    torch alone: it has builds for CPU and CUDA under one version, in indexes of its own
    cuda.txt     what the CUDA build of torch loads
    run.txt      what the node and the page import besides torch; the images contain these packages
    dev.txt      what tests and tools import besides these
    build.txt    what makes the wheel; the other files are groups that are installed on their own (pyproject.toml)

`--torch-index URL` also lists the builds in that index, such as PyTorch's CPU builds. If they need CUDA libraries,
cuda.txt then lists these. Without the option, the listed builds stay as long as torch's version stays.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from packaging.markers import Marker, default_environment
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "requirements"
PYTHONS = [(3, 11), (3, 12), (3, 13), (3, 14)]
MACHINES = ["x86_64", "aarch64"]
TOOLS = ROOT / "deploy/pyproject.toml"
GROUPS = ["docs", "proto", "tools", "wheels", "kubectl"]
"""Groups that are installed separately, each into its own environment."""
OF_CUDA = re.compile(r"nvidia-|cuda-|triton$")


@dataclass(frozen=True)
class Package:
    """One version of a package. Its name is normalized. `wheels`: file name -> SHA-256."""

    name: str
    version: str
    wheels: Mapping[str, str]


def environments() -> list[dict[str, str]]:
    """The values that markers see on each supported Python and machine."""
    common = {
        **cast("dict[str, str]", default_environment()),
        "implementation_name": "cpython", "platform_python_implementation": "CPython",
        "os_name": "posix", "sys_platform": "linux", "platform_system": "Linux",
    }  # fmt: skip
    pythons = [f"{major}.{minor}" for major, minor in PYTHONS]
    return [
        {**common, "python_version": python, "python_full_version": f"{python}.0", "platform_machine": machine}
        for python in pythons
        for machine in MACHINES
    ]


def is_needed(marker: str) -> bool:
    """Whether a package with this marker is needed on any supported Python and machine. If so, all of them get it."""
    return not marker or any(Marker(marker).evaluate(environment) for environment in environments())


def fits(file: str) -> bool:
    """Whether a wheel can be installed on a supported Python and machine, on Linux with glibc."""
    return any(_is_ours(tag) for tag in parse_wheel_filename(file)[3])


def _is_ours(tag: Tag) -> bool:
    linux = re.fullmatch(rf"(?:many)?linux\w*_(?:{'|'.join(MACHINES)})", tag.platform)
    return (tag.platform == "any" or linux is not None) and (tag.interpreter, tag.abi) in _RUNNABLE


_RUNNABLE = {
    (tag.interpreter, tag.abi)
    for python in PYTHONS
    for tags in (
        cpython_tags(python, [f"cp{python[0]}{python[1]}"], ["any"]),
        compatible_tags(python, f"cp{python[0]}{python[1]}", ["any"]),
    )
    for tag in tags
}


def packages_in(pylock: str) -> list[Package]:
    """The packages of a lock file (pylock.toml) with the wheels that fit. Raises ValueError if one has none."""
    found = []
    for entry in tomllib.loads(pylock)["packages"]:
        if not is_needed(entry.get("marker", "")):
            continue
        files = {wheel.get("name") or wheel["url"].rpartition("/")[2]: wheel for wheel in entry.get("wheels", [])}
        wheels = {name.replace("%2B", "+"): wheel["hashes"]["sha256"] for name, wheel in files.items()}
        wheels = {name: digest for name, digest in wheels.items() if fits(name)}
        if not wheels:
            raise ValueError(f"{entry['name']} {entry['version']} has no wheel for Linux")
        found.append(Package(canonicalize_name(entry["name"]), entry["version"], wheels))
    return sorted(found, key=lambda package: package.name)


def pins_in(text: str) -> dict[str, str]:
    """Name -> version, from the text of a file in requirements/."""
    return {canonicalize_name(name): version for name, version in re.findall(r"^([\w.-]+)==([^\s\\]+)", text, re.M)}


def written(packages: Iterable[Package], what: str, comments: Sequence[str] = ()) -> str:
    """The text of a file in requirements/."""
    head = [f"# {what} Written by tools/lock.py (`make lock`).", *comments]
    entries = [
        " \\\n".join(
            [f"{p.name}=={p.version}", *(f"    --hash=sha256:{digest}" for digest in sorted(p.wheels.values()))]
        )
        for p in packages
    ]
    return "\n".join([*head, *entries]) + "\n"


def known_builds(text: str) -> Package | None:
    """torch as listed in torch.txt. Comments there name the builds, since a hash alone does not say which one it is."""
    wheels = {name: digest for digest, name in re.findall(r"^# ([0-9a-f]{64}) {2}(\S+)$", text, re.M)}
    version = pins_in(text).get("torch")
    return Package("torch", version, wheels) if version else None


def merged(found: Iterable[Package | None]) -> Package:
    """torch with all builds of its version. The first package decides which version that is."""
    first, *others = [package for package in found if package is not None]
    version = first.version.partition("+")[0]
    wheels = dict(first.wheels)
    for other in others:
        if other.version.partition("+")[0] == version:
            wheels = {**other.wheels, **wheels}
    return Package("torch", version, wheels)


class Resolver:
    """Runs uv, which resolves for all Pythons and machines at once. pip resolves only for its own."""

    def __init__(self, uv: Path, pins: Mapping[str, str]) -> None:
        self._uv, self._pins = uv, dict(pins)

    def resolve(self, *what: str, folder: Path = ROOT) -> list[Package]:
        """These requirements with all dependencies, at pinned versions. Raises CalledProcessError, ValueError."""
        with tempfile.TemporaryDirectory() as scratch:
            kept, out = Path(scratch, "pins.txt"), Path(scratch, "pylock.toml")
            kept.write_text("".join(f"{name}=={version}\n" for name, version in self._pins.items()))
            oldest = ".".join(map(str, PYTHONS[0]))
            options = ["--universal", "--python-version", oldest, "--only-binary", ":all:", "--format", "pylock.toml"]
            command = [self._uv, "pip", "compile", *what, *options, "--constraints", kept, "--output-file", out]
            subprocess.run([*map(str, command), "--quiet"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
            return packages_in(out.read_text())

    def resolve_torch(self, version: str, index: str) -> list[Package]:
        """torch from this index, and its dependencies from the usual index."""
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "pyproject.toml").write_text(
                f'[project]\nname = "torch-alone"\nversion = "0"\ndependencies = ["torch=={version}"]\n'
                f'[tool.uv.sources]\ntorch = {{ index = "torch" }}\n'
                f'[[tool.uv.index]]\nname = "torch"\nurl = "{index}"\nexplicit = true\n'
            )
            return self.resolve("pyproject.toml", folder=Path(folder))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uv", type=Path, default=Path("uv"), help="path of uv; `make lock` passes it")
    parser.add_argument("--upgrade", action="store_true", help="take the newest version of every package")
    parser.add_argument(
        "--upgrade-package", action="append", default=[], metavar="NAME", help="take the newest version of this one"
    )
    parser.add_argument("--torch-index", metavar="URL", help="another index with builds of torch")
    args = parser.parse_args(arguments)

    before = {path.stem: path.read_text() for path in FOLDER.glob("*.txt")}
    renewed = {canonicalize_name(name) for name in args.upgrade_package}

    def kept(*names: str) -> dict[str, str]:
        pins = {package: version for name in names for package, version in pins_in(before.get(name, "")).items()}
        return {} if args.upgrade else {name: version for name, version in pins.items() if name not in renewed}

    alone = {group: kept(group) for group in GROUPS}
    pins = kept(*(name for name in before if name not in GROUPS))
    try:
        texts = _locked(args.uv, pins, alone, before.get("torch", ""), args.torch_index)
    except (ValueError, subprocess.CalledProcessError) as error:
        print(f"lock: nothing was written: {error}", file=sys.stderr)
        return 1
    for name, text in texts.items():
        (FOLDER / f"{name}.txt").write_text(text)
    return 0


def _of_tools(extra: str, folder: Path) -> str:
    """A file that lists an extra of the tools. uv cannot read their own, as it needs a node that is in no index yet."""
    path = folder / f"{extra}.in"
    path.write_text("\n".join(tomllib.loads(TOOLS.read_text())["project"]["optional-dependencies"][extra]))
    return str(path)


def _locked(
    uv: Path,
    pins: Mapping[str, str],
    alone: Mapping[str, Mapping[str, str]],
    torch_before: str,
    torch_index: str | None,
) -> dict[str, str]:
    """The texts of all files, by name."""
    extras = [f"--extra={name}" for name in ("dev", "hf")]
    with tempfile.TemporaryDirectory() as scratch:
        # The extra `ray` is left out: it has 240 MB, and only one test needs it.
        page, store = (_of_tools(name, Path(scratch)) for name in ("web", "object-store"))
        everything = Resolver(uv, pins).resolve("pyproject.toml", page, store, *extras, "--group", "build")
        chosen = Resolver(uv, {package.name: package.version for package in everything})
        run = {package.name for package in chosen.resolve("pyproject.toml", page)}
    build = {package.name for package in chosen.resolve("--group", "build")}

    cuda = [package for package in everything if OF_CUDA.match(package.name)]
    (torch,) = (package for package in everything if package.name == "torch")
    more = None
    if torch_index:
        more, *libraries = sorted(
            chosen.resolve_torch(torch.version, torch_index), key=lambda package: package.name != "torch"
        )
        cuda = [package for package in libraries if OF_CUDA.match(package.name)] or cuda
    torch = merged([torch, more, known_builds(torch_before)])
    rest = [package for package in everything if package.name != "torch" and not OF_CUDA.match(package.name)]

    builds = [f"# {digest}  {name}" for name, digest in sorted(torch.wheels.items())]
    texts = {
        "torch": written([torch], "torch alone, every build that may be installed.", builds),
        "cuda": written(cuda, "What the CUDA build of torch loads."),
        "run": written([p for p in rest if p.name in run], "What the node and the page import, besides torch."),
        "dev": written([p for p in rest if p.name not in run], "What tests and tools import, besides run.txt."),
        "build": written([p for p in rest if p.name in build], "What makes the wheel."),
    }
    for group in GROUPS:
        packages = Resolver(uv, alone[group]).resolve("--group", group)
        texts[group] = written(packages, f"The group {group} of pyproject.toml.")
    return texts


if __name__ == "__main__":
    sys.exit(main())
